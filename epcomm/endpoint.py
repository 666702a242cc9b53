"""Endpoint: what Buffer and MoECommunicator are made of.

An endpoint owns one chunk of symmetric memory laid out in named areas, the epochs of its operations, and the record in which the
first wait that expires says what it missed. Once that has happened the ranks' steps no longer match: the endpoint is dead, and
every later call raises the same error until it is closed and rebuilt.
"""

import collections
import ctypes

import numpy as np

from .arrays import caller_stream
from .errors import EpcommError, PeerTimeoutError
from .layout import Areas
from .runtime import args
from .runtime.symmetric import SymmetricMemory
from .stream import Event, capturing, follow

OPERATIONS = {
    args.OP_PLAN: "plan",
    args.OP_DISPATCH: "dispatch",
    args.OP_COMBINE: "combine",
    args.OP_PREFETCH: "prefetch_weight",
    args.OP_REDUCE_GRAD: "reduce_grad",
    args.OP_LL_DISPATCH: "low-latency dispatch",
    args.OP_LL_COMBINE: "low-latency combine",
}


class Operation:
    """A kernel with its arguments: set `args.field` for a call, then hand it to `Endpoint._launch`.

    args: a ctypes struct of kernels_cu/args.h with the fields that never change set. run: callable(stream handle) that launches the kernel
    with the content of args. warm: it has been launched before.
    """

    __slots__ = ("args", "run", "warm")

    def __init__(self, args, run):
        self.args = args
        self.run = run
        self.warm = False


class Endpoint:
    """A collective object: symmetric areas, epochs, sticky failure.

    Args:
        group: the Group whose ranks all construct it.
        areas: the areas its operations need; a control area is added.
        grids: {operation: blocks} of the operations it launches; the grid of an operation is constant, since each block keeps
            its own copy of the epoch.
    """

    def __init__(self, group, areas: Areas, grids: dict):
        device = group.device
        self._symmetric = None
        self.group = group
        self.device = device
        self.xp = device.xp
        self._areas = areas
        control_bytes = 4 * (args.CONTROL_RAISED_BY + group.size * (1 + args.NUM_OPERATIONS))
        areas.add("control", control_bytes)
        self._record_memory = device.host_visible(ctypes.sizeof(args.ErrorRecord))
        self._record_memory.view[:] = 0
        self._record = args.ErrorRecord.from_buffer(self._record_memory.view)
        self._alarm = self._record_memory.view[:4].view(np.uint32)
        self._bad_input = device.zeros((2,), np.uint32)
        self._epochs = {operation: device.zeros((blocks,), np.uint32) for operation, blocks in grids.items()}
        self._failure = None
        self._in_flight = collections.deque()
        self._last_handle = device.handle(device.current_stream())
        device.synchronize(self._last_handle)
        self._symmetric = SymmetricMemory(group, areas.nbytes)
        self._world = args.World(
            base=self._symmetric.base,
            stride=self._symmetric.stride,
            control=areas["control"],
            error=self._record_memory.pointer,
            bad_input=device.pointer(self._bad_input),
            timeout_ns=int(group.timeout * 1e9),
            rank=group.rank,
            ranks=group.size,
        )

    # -- calls ---------------------------------------------------------------------------------------------------------------

    def _epochs_of(self, operation) -> int:
        """The address of an operation's epochs."""
        return self.device.pointer(self._epochs[operation])

    def _streams(self, stream, async_finish, x=None):
        """(the caller's stream, the one to launch on), as handles; raises if the endpoint cannot be used.

        x: an array of the caller, whose framework has a current stream of its own.
        """
        self._require_usable()
        caller = caller_stream(self.device, x, stream)
        return caller, self.group.order.communication_stream(self.device) if async_finish else caller

    def _call(self, caller, handle):
        """Context of the launches of one call: behind the caller's work, in the order of all calls of the device."""
        if handle != caller:
            follow(self.device, handle, caller)
        return self.group.order.call(self.device, handle)

    def _refuse_cold(self, operation, handle):
        if not operation.warm and capturing(self.device, handle):
            raise EpcommError("the first call of an operation cannot be captured: make one warm-up call before the capture")

    def _launch(self, operation, handle):
        self._refuse_cold(operation, handle)
        operation.warm = True
        operation.run(handle)
        self._last_handle = handle
        self._raise_known()

    def _keep(self, handle, async_finish, stream, *arrays):
        """The Event of an asynchronous call, None of another. Keeps what a call works on until it is done, whatever the caller drops, where
        the call is not on the caller's current stream: CuPy's pool reuses memory in the order of that one."""
        if stream is None and not async_finish:
            return None
        in_flight = self._in_flight
        captured = capturing(self.device, handle)
        while in_flight and not captured and in_flight[0][0].done:  # asking an event would end a capture
            in_flight.popleft()
        event = Event(self.device, handle, (self._raise_known,))
        if not captured:  # what a graph works on is its user's to keep
            in_flight.append((event, arrays))
        return event if async_finish else None

    def _raise_known(self):
        if self._alarm[0]:
            raise self._failed()

    # -- state ---------------------------------------------------------------------------------------------------------------

    def _require_usable(self):
        """Raises if the endpoint is closed or has failed; costs one look at host memory."""
        if self._symmetric is None:
            raise EpcommError(f"{type(self).__name__} on rank {self.group.rank} is closed")
        self._raise_known()

    def _failed(self) -> PeerTimeoutError:
        if self._failure is None:
            self._failure = self._explain()
        return self._failure.with_traceback(None)

    def _explain(self) -> PeerTimeoutError:
        """The error for what the record says, naming the ranks that held the call up."""
        record, group = self._record, self.group
        words = self._control_words()
        raised = {r for r in range(group.size) if words[args.CONTROL_RAISED_BY + r]}
        first = args.CONTROL_RAISED_BY + group.size * (1 + record.operation)
        entered = [int(word) for word in words[first : first + group.size]]
        peers = [r for r in range(group.size) if r != group.rank]
        behind = {r for r in peers if (entered[r] - record.wanted + 2**31) % 2**32 < 2**31}
        gone = {r for r in peers if group.alive(r) is False}
        silent = {record.peer} - raised - {-1}
        culprits = sorted(behind & gone or behind or gone or silent or raised)
        name = OPERATIONS[record.operation]
        names = f"rank{'s' if len(culprits) > 1 else ''} {', '.join(map(str, culprits))}"
        state = [f"{r}: {'process gone' if r in gone else f'entered call {entered[r]}'}" for r in culprits]
        how = (
            f"rank {min(raised)} gave up"
            if record.peer_raised and raised
            else f"nothing came within {group.timeout:g} s"
        )
        return PeerTimeoutError(
            f"{name} on rank {group.rank}: {names} did not come to call {record.wanted} ({how}; {'; '.join(state)}; block "
            f"{record.block} thread {record.thread} waited for rank {record.peer}, saw {record.seen}, wanted {record.wanted}). "
            f"The ranks' steps no longer match: close this object and build a new one.",
            operation=name,
            rank=group.rank,
            peers=culprits,
            seen=record.seen,
            wanted=record.wanted,
        )

    def _control_words(self) -> np.ndarray:
        count = self._areas.sizes["control"] // 4
        words = self._symmetric.array(self._areas["control"], (count,), np.uint32)
        return self.device.to_host(words)

    def check(self):
        """Waits for this object's work so far, then raises what went wrong in it.

        Raises:
            PeerTimeoutError: a peer did not come; the object is dead.
            ValueError: expert ids outside -1 ... num_experts - 1, or rows outside the array given to combine, were met (and treated
                as not there) since the last check.
        """
        self._require_usable()
        self.device.synchronize(self._last_handle)
        self._require_usable()
        bad = self.device.to_host(self._bad_input)
        if bad.any():
            self._bad_input[:] = 0
            self.device.synchronize(self.device.handle(self.device.current_stream()))
            problems = []
            if bad[args.BAD_EXPERT_IDS]:
                problems.append(f"{bad[args.BAD_EXPERT_IDS]} expert ids were out of range and treated as -1")
            if bad[args.BAD_ROWS]:
                problems.append(f"{bad[args.BAD_ROWS]} rows lay outside the array given to combine and were left out")
            raise ValueError(f"rank {self.group.rank}: {'; '.join(problems)}")

    def memory(self) -> dict:
        """Bytes of memory held on this rank, by area, with their sum under "total"."""
        sizes = dict(self._areas.sizes)
        sizes["local"] = self._local_bytes()
        sizes["total"] = sum(sizes.values())
        return sizes

    def _local_bytes(self) -> int:
        return self._bad_input.nbytes + sum(epochs.nbytes for epochs in self._epochs.values())

    # -- end of life ---------------------------------------------------------------------------------------------------------

    def destroy(self):
        """Frees everything. Collective: waits for the peers within the timeout, but not after a failure. Idempotent."""
        self._release(wait=True)

    close = destroy

    def _release(self, wait):
        symmetric, self._symmetric = self._symmetric, None
        if symmetric is None:
            return
        self.device.synchronize(self._last_handle)
        aborted = symmetric.array(self._areas["control"], (1,), np.uint32)
        wait = wait and not self.device.to_host(aborted)[0]  # nobody will come any more
        self._close_views()
        symmetric.close(wait=wait)

    def _close_views(self):
        """Hook: drop arrays over the symmetric memory."""

    def __enter__(self):
        return self

    def __exit__(self, kind, value, traceback):
        self._release(wait=kind is None)  # after an exception the peers may never come
