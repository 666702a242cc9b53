"""ExpertPool: weights or gradients of all experts in mapped memory, so that copied experts can be fetched and
summed by kernels.
"""

import contextlib
import math
import operator

import numpy as np

from . import dtypes
from .errors import EpcommError
from .layout import align
from .runtime import args
from .runtime.handles import share, together
from .runtime.mapped import MappedRange


def _shape(shape):
    try:
        return (operator.index(shape),)
    except TypeError:
        return tuple(operator.index(n) for n in shape)


class ExpertPool:
    """One projection's tensor for every expert: weights (any type that epcomm moves) or float32 gradients.
    Collective.

    Four views of the same pages: what is written through one is seen through the others by the next kernel.
    An expert is contiguous; from one expert to the next it is `stride` bytes in all views, the expert's bytes
    rounded up so that a rank's experts fill whole pages of the device.

    A pool may serve any number of layers that use the same buffer one after the other.

    Args:
        buffer: the Buffer whose plans say which experts are copied where.
        shape: of one expert; its bytes are a multiple of 16.
        dtype: element type; fp8 and e8m0 are uint8 bits on CUDA.

    Attributes:
        full: [E + E/R, *shape], the home experts of all ranks, then this rank's prefetch slots.
        local: [E/R, *shape], this rank's home experts.
        slots: [E/R, *shape], this rank's prefetch slots.
        compute: [2 * E/R, *shape], local then slots: segment i of a plan (Plan.cu_seqlens) belongs to
            compute[i].
        stride: bytes from one expert to the next.

    Raises:
        ValueError: on every rank; the shape does not fit, or the ranks disagree.
    """

    def __init__(self, buffer, shape, dtype):
        self._ranges = None
        group, device = buffer.group, buffer.device
        problem, settings = None, {}
        try:
            buffer._require_usable()
            shape, dtype = _shape(shape), dtypes.resolve(dtype)
            settings = {"shape": shape, "dtype": dtype.name}
            nbytes = math.prod(shape) * dtype.itemsize
            if nbytes <= 0 or nbytes % 16:
                problem = "shape: an expert must be a positive multiple of 16 bytes, "
                problem += f"{shape} of {dtype.name} has {nbytes}"
        except Exception as error:
            problem = error
        group.agree("ExpertPool", settings, problem)
        self.buffer = buffer
        self.shape = shape
        self.dtype = dtype
        self.nbytes = nbytes
        per_rank = buffer.experts_per_rank
        # a rank's experts fill whole granules, so that the chunks of all ranks lie back to back
        unit = math.lcm(16, device.allocator.granularity // math.gcd(device.allocator.granularity, per_rank))
        self.stride = align(nbytes, unit)
        homes = share(group, per_rank * self.stride)
        slots = share(group, per_rank * self.stride)

        def map_views():
            own = [slots[group.rank]]
            self._ranges = (
                MappedRange(device.allocator, homes + own),
                MappedRange(device.allocator, slots),
                MappedRange(device.allocator, [homes[group.rank], *own]),
            )
            full, all_slots, compute = self._ranges
            self.full = self._view(full, buffer.num_experts + per_rank)
            self.compute = self._view(compute, 2 * per_rank)
            self._descriptor = args.Pool(
                full=full.address, all_slots=all_slots.address, stride=self.stride, bytes=self.nbytes
            )

        try:
            together(group, "mapping the expert pool", map_views)
        except BaseException:
            self._ranges = None
            raise
        self.local = self.compute[:per_rank]
        self.slots = self.compute[per_rank:]

    def _view(self, mapped, experts):
        device = self.buffer.device
        dtype = dtypes.storage(self.dtype, device.kind)
        flat = device.wrap(mapped.address, (experts * self.stride // dtype.itemsize,), dtype, mapped)
        inner = tuple(int(n) * dtype.itemsize for n in np.cumprod((1, *self.shape[:0:-1]))[::-1])
        return device.xp.lib.stride_tricks.as_strided(flat, (experts, *self.shape), (self.stride, *inner))

    def _require_open(self):
        if self._ranges is None:
            raise EpcommError(f"ExpertPool of {self.shape} on rank {self.buffer.group.rank} is closed")

    def close(self):
        """Frees the pool once no array over it is left. Collective: waits for the peers within the timeout.
        Idempotent.
        """
        self._release(wait=True)

    def _release(self, wait):
        if self._ranges is None:
            return
        buffer = self.buffer
        try:
            if wait and buffer._symmetric is not None and buffer._failure is None:
                buffer._meet()
        finally:
            with buffer.group.order.lock:  # no call of another thread is being launched with this pool
                ranges, self._ranges = self._ranges, None
            try:
                buffer._synchronize()
            finally:
                self.full = self.local = self.slots = self.compute = None
                # a peer's kernel may still read these pages: they live until the last rank has unmapped them
                del ranges

    def __enter__(self):
        return self

    def __exit__(self, kind, value, traceback):
        if kind is None:
            self._release(wait=True)
        else:  # the peers may never come; and what went wrong is what the caller shall see
            with contextlib.suppress(Exception):
                self._release(wait=False)

    def __repr__(self):
        state = "closed" if self._ranges is None else f"{self.dtype.name}, {self.stride} bytes an expert"
        return f"ExpertPool({self.shape}, {state})"
