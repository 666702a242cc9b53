"""Streams: which one a call runs on, the order of calls across streams, and events of finished calls.

CUDA streams and events go through CuPy, imported on first use. On the CPU device a call is done when it
returns: the order of the program is the order of the calls.
"""

import operator
import threading

from .errors import EpcommError

_LEGACY = 0  # the legacy default stream; 1 is its other name
_PER_THREAD = 2  # a different stream in every thread
_resolved = threading.local()  # .handle, .owner: the stream object that this thread resolved last


class _Cuda:
    """The driver calls of this module. A test puts a recorder in the place of `_cuda`."""

    def __init__(self):
        import cupy

        self._cupy = cupy
        self._runtime = cupy.cuda.runtime

    def event(self, device):
        with self._cupy.cuda.Device(device.index):
            return self._cupy.cuda.Event(disable_timing=True)

    def record(self, device, event, handle):
        with self._cupy.cuda.Device(device.index):  # the default streams are those of the current device
            self._runtime.eventRecord(event.ptr, handle)

    def wait(self, device, handle, event):
        with self._cupy.cuda.Device(device.index):
            self._runtime.streamWaitEvent(handle, event.ptr)

    def synchronize(self, event):
        event.synchronize()

    def stream(self, device):
        with self._cupy.cuda.Device(device.index):
            return self._cupy.cuda.Stream(non_blocking=True, priority=-5)  # clamped to the highest there is


_cuda = None


def _driver():
    global _cuda
    if _cuda is None:
        _cuda = _Cuda()
    return _cuda


def resolve(device, stream):
    """The handle (an int) of the stream that a call shall use.

    Args:
        stream: None = the caller's current stream of the device; an object with `__cuda_stream__` (CuPy,
            cuda.core) or a `cuda_stream` attribute (torch); or a handle as an int (0, 1: the legacy default
            stream, 2: the per-thread one). A stream passed as an object is kept alive while calls need it.

    Raises: TypeError for anything else, ValueError for a stream of another device.
    """
    if device.kind == "cpu":
        return _cpu_handle(device, stream)
    if stream is None:
        stream = device.current_stream()
        handle = device.handle(stream)
    else:
        handle, is_object = _cuda_handle(device, stream)
        if not is_object:
            stream = None
    if handle == 1:
        handle = _LEGACY
    if stream is not None and type(stream).__name__ != "ExternalStream":  # which owns nothing
        _resolved.handle, _resolved.owner = handle, stream
    elif getattr(_resolved, "handle", None) != handle:
        _resolved.handle = _resolved.owner = None
    return handle


def _cpu_handle(device, stream):
    zero = type(stream) is int and stream == 0
    if stream is None or zero or isinstance(stream, type(device.current_stream())):
        return 0
    raise TypeError(f"stream: the CPU device has one stream, None or 0, got {stream!r}")


def _cuda_handle(device, stream):
    """(handle, whether `stream` is an object rather than a number)."""
    for name in ("device_id", "device_index"):  # CuPy's and torch's; -1 = any device
        index = getattr(stream, name, -1)
        if index not in (-1, device.index):
            raise ValueError(f"stream: expected a stream of {device}, got one of cuda:{index}")
    if hasattr(stream, "__cuda_stream__"):
        return stream.__cuda_stream__()[1], True
    if hasattr(stream, "cuda_stream"):
        return stream.cuda_stream, True
    try:
        handle = -1 if isinstance(stream, bool) else operator.index(stream)
    except TypeError:
        handle = -1
    if handle < 0:
        raise TypeError(f"stream: expected None, a stream object or its handle as an int, got {stream!r}")
    return handle, False


def last_owner(handle):
    """The object that owns stream `handle`, where this thread has just resolved it; None if it is known by
    number alone.
    """
    return _resolved.owner if getattr(_resolved, "handle", None) == handle else None


def capturing(device, handle):
    """Whether stream `handle` is inside a graph capture."""
    return handle != _LEGACY and device.capturing(handle)  # the legacy stream cannot be captured, nor asked


def follow(device, follower, leader):
    """Work that is put on stream `follower` from now on waits for all that is on stream `leader` by now."""
    if device.kind == "cuda" and follower != leader:
        event = _driver().event(device)
        _driver().record(device, event, leader)
        _driver().wait(device, follower, event)


class CallOrder:
    """Chains the cross-rank calls of one device, whatever object they belong to and stream they run on.

    Two such kernels that ran at once could each hold the SMs that the other's peers wait for, so a call waits
    for the call before it. Only a change of stream costs anything: then the old stream is recorded and
    the new stream waits for it. Inside a graph capture nothing is chained, in either direction: replays are
    ordered by the user.

        with order.call(device, handle):
            launch(handle)

    Attributes:
        lock: held by `call`; `enter` and `leave` want it held.
    """

    def __init__(self):
        self.lock = threading.RLock()
        self._last = None  # stream of the last call
        self._owner = None  # keeps that stream alive
        self._event = None
        self._recorded = False  # the event holds the last call already
        self._communication = None

    def call(self, device, handle):
        """Context of one call: takes the lock, enters, and leaves even if the call fails on the host."""
        return _Call(self, device, handle)

    def enter(self, device, handle):
        """Before the launch: stream `handle` waits for the last call."""
        if self._last is None or self._stays_on(handle) or capturing(device, handle):
            return
        if not self._recorded:
            if capturing(device, self._last):
                return  # an event recorded there now would belong to the capture
            self._record(device, self._last)
        _driver().wait(device, handle, self._event)

    def leave(self, device, handle):
        """After the launch: stream `handle` has the last call."""
        if device.kind == "cpu" or self._stays_on(handle) or capturing(device, handle):
            return
        owner = self._owner_of(handle)
        # A stream known by number alone may be destroyed before the next call, and its number used again;
        # the per-thread stream cannot be reached from another thread. So these are recorded at once.
        at_once = handle == _PER_THREAD or (handle != _LEGACY and owner is None)
        if at_once:
            self._record(device, handle)
        self._last, self._owner, self._recorded = handle, owner, at_once

    def _stays_on(self, handle):
        return handle == self._last and not self._recorded

    def _owner_of(self, handle):
        if self._communication is not None and self._communication[1] == handle:
            return self._communication[0]
        return last_owner(handle)

    def _record(self, device, handle):
        if self._event is None:
            self._event = _driver().event(device)
        _driver().record(device, self._event, handle)

    def synchronize(self, device):
        """Block the host until the last eager call is over, and so all before it. EpcommError inside a
        capture.
        """
        if device.kind == "cpu":
            return
        with self.lock:
            if self._last is None:
                return
            if not self._recorded:
                if capturing(device, self._last):
                    raise EpcommError(
                        "nothing can be waited for while a stream is being captured: end the capture first"
                    )
                self._record(device, self._last)
                self._recorded = True
            event = self._event
        _driver().synchronize(event)

    def communication_stream(self, device):
        """The handle of the device's own stream for `async_finish`; non-blocking, of high priority."""
        if device.kind == "cpu":
            return device.handle(device.current_stream())
        with self.lock:
            if self._communication is None:
                stream = _driver().stream(device)
                self._communication = stream, device.handle(stream)
            return self._communication[1]


class _Call:
    __slots__ = ("_device", "_handle", "_order")

    def __init__(self, order, device, handle):
        self._order, self._device, self._handle = order, device, handle

    def __enter__(self):
        order = self._order
        order.lock.acquire()
        try:
            order.enter(self._device, self._handle)
        except BaseException:
            order.lock.release()
            raise

    def __exit__(self, kind, *_):
        order = self._order
        try:
            order.leave(self._device, self._handle)
        except Exception:
            # After a failure too: it may have come after the launch, and the stream has waited anyway.
            if not kind:
                raise
        finally:
            order.lock.release()


_orders = {}
_orders_lock = threading.Lock()


def order_of(device):
    """The CallOrder of a GPU, one a process. On the CPU every group has its own.

    There, ranks may be threads of one process, and a call that holds the lock waits for the other ranks.
    """
    if device.kind == "cpu":
        return CallOrder()
    with _orders_lock:
        return _orders.setdefault(device.index, CallOrder())


class Event:
    """The end of a call that was made with `async_finish=True`.

    Args:
        device: the device of the call.
        handle: the stream that the call runs on.
        checks: callables without arguments that raise what went wrong in the owner, as far as it is known.
    """

    def __init__(self, device, handle, checks=()):
        self._device = device
        self._checks = tuple(checks)
        self._event = None
        self._captured = False
        if device.kind == "cuda":
            self._captured = capturing(device, handle)
            self._event = _driver().event(device)
            _driver().record(device, self._event, handle)

    def wait(self, stream=None):
        """Make `stream` (None: the current one) wait for the call. Does not block the host.

        Raises: what is already known to have gone wrong; a failure that comes later shows at `synchronize`,
        at `check` and at the next call of the object. EpcommError if one side is inside a graph capture and
        the other is not.
        """
        handle = resolve(self._device, stream)
        self._check()
        if self._event is None:
            return
        if capturing(self._device, handle) != self._captured:
            where = ("outside", "inside") if self._captured else ("inside", "outside")
            raise EpcommError(f"event.wait: {where[0]} a graph capture, for a call made {where[1]} of it")
        _driver().wait(self._device, handle, self._event)

    @property
    def done(self):
        """Whether the call has ended, without waiting. Not to be asked while a stream is being captured.

        True for a captured call: its arrays are kept by the graph's user.
        """
        return self._captured or self._event is None or self._event.done

    def synchronize(self):
        """Block the host until the call has ended, then raise what went wrong in it."""
        if self._captured:
            raise EpcommError("event.synchronize: the call was captured, synchronize the replay's stream")
        if self._event is not None:
            _driver().synchronize(self._event)
        self._check()

    def _check(self):
        for check in self._checks:
            check()
