"""Endpoint: what Buffer and MoECommunicator are made of.

An endpoint owns one chunk of symmetric memory laid out in named areas, the epochs of its operations, and the
record in which the first wait that expires says what it missed. Once that has happened the ranks' steps no
longer match: the endpoint is dead, and every later call raises the same error until it is closed and rebuilt.
"""

import collections
import contextlib
import ctypes
import os
import weakref

import numpy as np

from .arrays import caller_stream
from .errors import EpcommError, PeerTimeoutError
from .layout import Areas, align
from .runtime import args
from .runtime.handles import together
from .runtime.symmetric import SymmetricMemory
from .stream import Event, capturing, follow, last_owner

OPERATIONS = {
    args.OP_PLAN: "plan",
    args.OP_DISPATCH: "dispatch",
    args.OP_COMBINE: "combine",
    args.OP_PREFETCH: "prefetch_weight",
    args.OP_REDUCE_GRAD: "reduce_grad",
    args.OP_LL_DISPATCH: "low-latency dispatch",
    args.OP_LL_COMBINE: "low-latency combine",
    args.OP_MEET: "close",
}
_live = weakref.WeakSet()
_inherited = []  # in a forked child: memory that only its parent may free


class Operation:
    """A kernel with its arguments: set `args.field` for a call, then hand it to `Endpoint._launch`.

    args: a ctypes struct of kernels_cu/args.h with the fields that never change set. run: callable(stream
    handle) that launches the kernel with the content of args. warm: it has been launched before.
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
        grids: {operation: blocks} of the operations it launches; the grid of an operation is constant, since
            each block keeps its own copy of the epoch.
    """

    def __init__(self, group, areas: Areas, grids: dict):
        self._symmetric = None
        self._gone = "closed"  # why there is no memory
        self.group = group
        self.device = group.device
        self.xp = group.device.xp
        self._areas = areas
        self._failure = None
        self._in_flight = collections.deque()
        self._last_handle = self._last_owner = None
        words = align(args.CONTROL_RAISED_BY + group.size * (1 + args.NUM_OPERATIONS), 2)
        areas.add("control", 4 * words + 8 * group.size * args.NUM_OPERATIONS)
        together(group, type(self).__name__, lambda: self._allocate(grids | {args.OP_MEET: 1}))
        self._symmetric = SymmetricMemory(group, areas.nbytes)
        self._chunk_bytes = self._symmetric.nbytes
        self._world = args.World(
            base=self._symmetric.base,
            stride=self._symmetric.stride,
            control=areas["control"],
            error=self._record_memory.pointer,
            bad_input=self.device.pointer(self._bad_input),
            timeout_ns=int(group.timeout * 1e9),
            rank=group.rank,
            ranks=group.size,
        )
        self._complete(self._make_meet)
        _live.add(self)

    def _allocate(self, grids):
        device, ranks = self.device, self.group.size
        header = ctypes.sizeof(args.ErrorRecord)
        shape = (1 + args.NUM_OPERATIONS, ranks)
        self._record_memory = device.host_visible(header + 4 * shape[0] * ranks)
        self._record_memory.view[:] = 0
        self._record = args.ErrorRecord.from_buffer(self._record_memory.view)
        self._record_words = self._record_memory.view[header:].view(np.uint32).reshape(shape)
        self._alarm = self._record_memory.view[:4].view(np.uint32)
        self._bad_input = device.zeros((args.NUM_BAD_INPUTS,), np.uint32)
        self._epochs = {operation: device.zeros((blocks,), np.uint32) for operation, blocks in grids.items()}
        device.synchronize(device.handle(device.current_stream()))

    def _make_meet(self):
        a = args.MeetArgs(world=self._world, epochs=self._epochs_of(args.OP_MEET))
        self._meet_kernel = Operation(a, self.device.launcher("meet", a, grid=1, block=32))

    def _complete(self, function):
        """A part of a constructor. Collective: if `function` raises on one rank, all raise, and the memory is
        freed.
        """
        try:
            together(self.group, type(self).__name__, function)
        except BaseException:
            self._release(wait=False)
            raise

    # calls
    # -----

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
        """Context of the launches of one call: behind the caller's work, in the order of all calls of the
        device.
        """
        if handle != caller:
            follow(self.device, handle, caller)
        return self.group.order.call(self.device, handle)

    def _refuse_cold(self, operation, handle):
        if not operation.warm and capturing(self.device, handle):
            raise EpcommError(
                "the first call of an operation cannot be captured: make one warm-up call before the capture"
            )

    def _launch(self, operation, handle):
        if self._symmetric is None:  # closed by another thread since the call began
            self._require_usable()
        if not operation.warm:
            self._refuse_cold(operation, handle)
            operation.warm = True
        operation.run(handle)
        if handle != self._last_handle:  # while its owner is kept, the number means the same stream
            self._last_handle, self._last_owner = handle, last_owner(handle)
        self._raise_known()

    def _keep(self, handle, async_finish, stream, *arrays):
        """The Event of an asynchronous call, None of another. Keeps what a call works on until it is done,
        whatever the caller drops, where the call is not on the caller's current stream: CuPy's pool reuses
        memory in the order of that one.
        """
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

    def _overlap(self, a, b):
        """Whether two contiguous arrays share memory."""
        first, second = self.device.pointer(a), self.device.pointer(b)
        return first < second + b.nbytes and second < first + a.nbytes

    def _raise_known(self):
        if self._alarm[0]:
            raise self._failed()

    # state
    # -----

    def _require_usable(self):
        """Raises if the endpoint is closed or has failed; costs one look at host memory."""
        if self._symmetric is None:
            raise EpcommError(f"{type(self).__name__} on rank {self.group.rank} is {self._gone}")
        self._raise_known()

    def _failed(self) -> PeerTimeoutError:
        if self._failure is None:
            self._failure = self._explain()
        return self._failure.with_traceback(None)

    def _explain(self) -> PeerTimeoutError:
        """The error for what the record says, naming the ranks that held the call up."""
        record, group = self._record, self.group
        wanted, name = record.wanted, OPERATIONS[record.operation]
        call = f"call {wanted}" if wanted else "the call"
        peers = [r for r in range(group.size) if r != group.rank]
        raised = [r for r in peers if self._record_words[0, r]]
        entered = [int(word) for word in self._record_words[1 + record.operation]]
        behind = {r for r in peers if (entered[r] - wanted) % 2**32 >= 2**31}
        # whoever gave up did so before this call: this rank is the late one
        if record.peer < 0 and behind.issuperset(raised):
            behind = set()
        gone = {r for r in peers if group.alive(r) is False}
        silent = {record.peer} - set(raised) - {-1}
        culprits = sorted(behind & gone or behind or gone or silent)
        if culprits:
            states = "; ".join(
                f"rank {r}: {'its process is gone' if r in gone else f'entered call {entered[r]}'}"
                for r in culprits
            )
            what = f"did not come to {call}" if set(culprits) & behind else f"did not finish {call}"
            what = f"{_ranks(culprits)} {what} ({states})"
        elif record.peer < 0:
            what = f"{_ranks(raised)} had given up when this rank came to {call}"
        else:
            what = f"{_ranks(raised)} gave up in the middle of {call}"
        how = (
            f"{_ranks(raised)} gave up" if record.peer_raised else f"nothing came within {group.timeout:g} s"
        )
        if record.peer >= 0:
            how += f"; waited for rank {record.peer}, saw {record.seen}, wanted {wanted}, "
            how += f"block {record.block} thread {record.thread}"
        return PeerTimeoutError(
            f"{name} on rank {group.rank}: {what}; {how}. The ranks' steps no longer match: "
            "close this object and build a new one.",
            operation=name,
            rank=group.rank,
            peers=culprits or raised,
            seen=record.seen,
            wanted=wanted,
        )

    def check(self):
        """Waits for this object's work so far, then raises what went wrong in it.

        Raises:
            PeerTimeoutError: a peer did not come; the object is dead.
            ValueError: since the last check, expert ids outside -1 ... num_experts - 1, or rows outside the
                array given to combine, were met (and treated as not there), a `total_tokens` was too small
                for its step, or ranks came to a call with different plans or some of them without weights.
            EpcommError: the object is closed, or the stream of its last call is being captured.
        """
        self._require_usable()
        self._synchronize()
        self._require_usable()
        bad = self.device.to_host(self._bad_input)
        if bad.any():
            self._bad_input[:] = 0
            self.device.synchronize(self.device.handle(self.device.current_stream()))
            problems = []
            if bad[args.BAD_EXPERT_IDS]:
                problems.append(f"{bad[args.BAD_EXPERT_IDS]} expert ids were out of range and treated as -1")
            if bad[args.BAD_ROWS]:
                problems.append(
                    f"{bad[args.BAD_ROWS]} rows lay outside the array given to combine and were left out"
                )
            if bad[args.BAD_TOTALS]:
                problems.append(
                    f"total_tokens of {bad[args.BAD_TOTALS]} dispatches was too small, so rows were cut off"
                )
            if bad[args.BAD_CHOICES]:
                problems.append(
                    f"{bad[args.BAD_CHOICES]} times another rank came to a call with another plan, or with "
                    "weights where this one has none, so the results mean nothing"
                )
            raise ValueError(f"rank {self.group.rank}: {'; '.join(problems)}")

    def memory(self) -> dict:
        """Bytes of device memory held on this rank, by area, with their sum under "total".

        "rounding": between areas and up to whole pages of the device. "local": arrays of this rank alone.
        Results of calls, Plans and ExpertPools are not in it: each has memory of its own.
        """
        sizes = dict(self._areas.sizes)
        sizes["rounding"] = self._chunk_bytes - sum(sizes.values())
        sizes["local"] = self._local_bytes()
        sizes["total"] = sum(sizes.values())
        return sizes

    def _local_bytes(self) -> int:
        return self._bad_input.nbytes + sum(epochs.nbytes for epochs in self._epochs.values())

    # end of life
    # -----------

    def destroy(self):
        """Frees everything. Collective: waits for the peers within the timeout, but not after a failure.
        Idempotent.

        Raises:
            PeerTimeoutError: a peer did not come, or an earlier call had failed and nobody was told yet. All
                is freed nevertheless.
        """
        self._release(wait=True)

    close = destroy

    def _synchronize(self):
        """Waits for this object's work so far: eager calls, and what is on the stream of the last one."""
        device, handles = self.device, [self.device.handle(self.device.current_stream())]
        if self._last_owner is not None:  # else the user may have destroyed it since
            handles.append(self._last_handle)
        if any(capturing(device, handle) for handle in handles):
            raise EpcommError(
                "nothing can be waited for while a stream is being captured: end the capture first"
            )
        self.group.order.synchronize(device)
        device.synchronize(handles[-1])

    def _meet(self):
        """Waits until all ranks are past all that they did before; raises what has gone wrong. Collective."""
        handle = self.device.handle(self.device.current_stream())
        if capturing(self.device, handle):
            raise EpcommError("nothing can be closed while a stream is being captured: end the capture first")
        with self._call(handle, handle):
            self._launch(self._meet_kernel, handle)
        self.device.synchronize(handle)
        self._raise_known()

    def _release(self, wait):
        if self._symmetric is None:
            return
        try:
            if wait and self._failure is None:  # what has been raised once is known
                self._meet()
        finally:
            with self.group.order.lock:  # no call of another thread is being launched, and none will be
                symmetric, self._symmetric = self._symmetric, None
            if symmetric is not None:
                try:
                    self._synchronize()
                finally:
                    self._in_flight.clear()
                    self._close_views()
                    symmetric.close(wait=False)

    def _close_views(self):
        """Hook: drop arrays over the symmetric memory."""

    def __enter__(self):
        return self

    def __exit__(self, kind, value, traceback):
        if kind is None:
            self._release(wait=True)
        else:  # the peers may never come; and what went wrong is what the caller shall see
            with contextlib.suppress(Exception):
                self._release(wait=False)


def _ranks(ranks):
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _forget_all():
    """In a forked child: its parent's memory is still mapped, but the peers know nothing of this process."""
    for endpoint in list(_live):
        _inherited.append(endpoint._symmetric)
        endpoint._symmetric, endpoint._gone = None, "the parent process's: a forked child cannot use it"


os.register_at_fork(after_in_child=_forget_all)
