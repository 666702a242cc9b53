"""What this machine can do: transfers to peers, local memory, flags between ranks, kernel launches.

On GPUs the copies are the kernels of `limits.cu` and the copy engine. CPU ranks run the same program with
NumPy copies in place of kernels: `push` writes into a peer's shared memory, `pull` reads from it.
"""

import ctypes
import os
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from bench.floors import Rates
from bench.kernels import load_module
from epcomm.runtime.symmetric import SymmetricMemory

PIECE = 4096  # bytes that a warp moves at a time; sizes are multiples of it
FLAG_AREA = 4096
_BLOCK = 1024


def open_limits(group, nbytes, copies):
    """The movers of this group's device: `nbytes` a call, in whole pieces; `copies` in the fan-out."""
    kind = CudaLimits if group.device.kind == "cuda" else CpuLimits
    return kind(group, max(PIECE, nbytes // PIECE * PIECE), copies)


def measure_rates(session, nbytes, copies, sms=None):
    """Collective. The Rates that floors are made of: the whole chip for `wire`, `local`; `sms` for `store`.

    Args:
        session: bench.harness.Session.
        nbytes: bytes per call, best those of the step that is measured.
        copies: places that a row is copied to in local memory (the step's top-k).
        sms: SMs of the operation whose pad rows are to be judged; None = all.
    """
    group = session.group
    with opened(open_limits(group, nbytes, copies)) as limits:
        most = limits.sm_counts()[-1]

        def gbps(function, moved):
            return moved / session.time(function).us / 1e3

        wire = None
        if group.size > 1:
            wire = gbps(limits.push(most), limits.nbytes)
        local = max(
            gbps(limits.local_copy(most), 2 * limits.nbytes),
            gbps(limits.fanout(most), (1 + copies) * limits.nbytes),
        )
        store = gbps(limits.fill(min(sms, most) if sms and most else most), copies * limits.nbytes)
        return Rates(wire, local, store)


@contextmanager
def opened(limits):
    """`limits`, closed at the end; not after an exception, when the peers may never come."""
    yield limits
    limits.close()


class _Limits:
    """Memory that all movers share: one chunk for each rank's data and flags, and local areas.

    Every method takes a number of SMs and returns a function that moves the bytes once on the current stream.
    """

    def __init__(self, group, nbytes, copies):
        self.group = group
        self.device = group.device
        self.nbytes = nbytes
        self.copies = copies
        self.shared = SymmetricMemory(group, nbytes + FLAG_AREA)
        self.source = self.device.zeros((nbytes,), np.uint8)
        self.target = self.device.zeros((copies * nbytes,), np.uint8)
        self.turn = 0

    def close(self):
        self.shared.close()

    def _flag(self, rank):
        return self.shared.array(self.nbytes, (1,), np.uint32, rank)


class CpuLimits(_Limits):
    """NumPy copies. There is nothing to sweep: `sms` is ignored."""

    def sm_counts(self):
        return [None]

    def push(self, sms):
        pairs = [(self._theirs(peer, part), self.source[part]) for peer, part in self._shares()]
        return lambda: [np.copyto(to, of) for to, of in pairs]

    def pull(self, sms):
        pairs = [(self.target[part], self._theirs(peer, part)) for peer, part in self._shares()]
        return lambda: [np.copyto(to, of) for to, of in pairs]

    def local_copy(self, sms):
        return lambda: np.copyto(self.target[: self.nbytes], self.source)

    def fanout(self, sms):
        places = self.target.reshape(self.copies, self.nbytes)
        return lambda: np.copyto(places, self.source)

    def fill(self, sms):
        return lambda: self.target.fill(0)

    def flag_round_trips(self, turns):
        """Round trips between ranks 0 and 1, polled from Python; the other ranks' function does nothing."""
        if self.group.rank > 1:
            return lambda: None
        mine, theirs = self._flag(self.group.rank), self._flag(1 - self.group.rank)
        begins = self.group.rank == 0

        def run():
            for turn in range(self.turn + 1, self.turn + turns + 1):
                if begins:
                    theirs[0] = turn
                deadline = time.monotonic() + self.group.timeout
                while mine[0] < turn:
                    time.sleep(0)  # lets other threads of an in-process group run
                    os.sched_yield()
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"rank {self.group.rank}: flag {turn} did not come")
                if not begins:
                    theirs[0] = turn
            self.turn += turns

        return run

    def _shares(self):
        """(peer, slice of the bytes) for every other rank."""
        size, rank = self.group.size, self.group.rank
        edges = np.linspace(0, self.nbytes, size).astype(int) if size > 1 else []
        return [((rank + 1 + i) % size, slice(edges[i], edges[i + 1])) for i in range(size - 1)]

    def _theirs(self, peer, part):
        return self.shared.array(0, (self.nbytes,), np.uint8, peer)[part]


class CudaLimits(_Limits):
    """The kernels of `limits.cu`, one block of 1024 threads an SM, and the copy engine."""

    def __init__(self, group, nbytes, copies):
        super().__init__(group, nbytes, copies)
        self.module = load_module(self.device, Path(__file__).with_name("limits.cu"))
        self.late = self.device.zeros((1,), np.uint32)

    def close(self):
        self.device.synchronize(self.device.handle(self.device.current_stream()))
        super().close()
        if int(self.late[0]):
            raise TimeoutError(f"rank {self.group.rank}: a flag of the round trips did not come")

    def sm_counts(self):
        most = self.device.num_sms
        return [*(n for n in (1, 2, 4, 8, 16, 32, 48, 64, 96) if n < most), most]

    def push(self, sms):
        return self._copy(sms, self.shared.base, self.shared.stride, self.source.data.ptr, 0, self.group.size)

    def pull(self, sms):
        return self._copy(sms, self.target.data.ptr, 0, self.shared.base, self.shared.stride, self.group.size)

    def local_copy(self, sms):
        return self._copy(sms, self.target.data.ptr, 0, self.source.data.ptr, 0, 1)

    def fanout(self, sms):
        args = (self.target, self.source, np.int64(self.nbytes // PIECE), np.int32(self.copies))
        return self._kernel("limit_fanout", sms, args)

    def fill(self, sms):
        return self._kernel("limit_fill", sms, (self.target, np.int64(self.target.nbytes // PIECE)))

    def copy_engine(self):
        """A driver copy to the next rank."""
        runtime = self.device.xp.cuda.runtime
        to = self.shared.pointer((self.group.rank + 1) % self.group.size)
        of = self.source.data.ptr

        def run():
            stream = self.device.xp.cuda.get_current_stream()
            runtime.memcpyAsync(to, of, self.nbytes, runtime.memcpyDeviceToDevice, stream.ptr)

        return run

    def flag_round_trips(self, turns):
        """Round trips between ranks 0 and 1 in one kernel; the other ranks' function does nothing."""
        if self.group.rank > 1:
            return lambda: None
        kernel = self.module.get_function("limit_flag")
        mine, theirs = self._flag(self.group.rank), self._flag(1 - self.group.rank)

        def run():
            first = np.uint32(self.turn)
            limit = np.int64(self.group.timeout * 1e9)
            args = (theirs, mine, first, np.uint32(turns), np.int32(self.group.rank == 0), limit, self.late)
            kernel((1,), (1,), args)
            self.turn += turns

        return run

    def nothing(self):
        """An empty kernel, as epcomm launches its own."""
        from epcomm.runtime._launch import CudaLauncher

        kernel = self.module.get_function("limit_nothing")
        words = ctypes.c_uint64()  # in the place of the arguments
        owner = (self.module, kernel, words)
        context = self.device.xp.cuda.driver.ctxGetCurrent()
        launcher = CudaLauncher(context, kernel.kernel.ptr, 1, 32, 0, ctypes.addressof(words), owner)
        return lambda: launcher(self.device.handle(self.device.current_stream()))

    def nothing_by_cupy(self):
        """An empty kernel, as CuPy launches it."""
        kernel = self.module.get_function("limit_nothing")
        word = np.uint64(0)
        return lambda: kernel((1,), (32,), (word,))

    def graph_of_nothing(self, kernels):
        """A CUDA graph of empty kernels, launched once per call."""
        cuda = self.device.xp.cuda
        launch = self.nothing_by_cupy()
        launch()
        stream = cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            for _ in range(kernels):
                launch()
            graph = stream.end_capture()
        return lambda: graph.launch(cuda.get_current_stream())

    def _copy(self, sms, to, to_stride, of, of_stride, ranks):
        pieces = self.nbytes // PIECE
        rank = self.group.rank
        vectors = (np.int64(to_stride // 16), np.int64(of_stride // 16))
        sizes = (np.int64(pieces), np.int32(rank), np.int32(ranks))
        return self._kernel("limit_copy", sms, (np.uintp(to), vectors[0], np.uintp(of), vectors[1], *sizes))

    def _kernel(self, name, sms, args):
        kernel = self.module.get_function(name)
        return lambda: kernel((sms,), (_BLOCK,), args)
