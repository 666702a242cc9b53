"""SymmetricMemory: one collective allocation, all ranks' chunks mapped back to back."""

import math
import warnings

import numpy as np

from .handles import share, together
from .mapped import MappedRange


class SymmetricMemory:
    """A zeroed chunk of device memory on every rank, each of which all ranks can read and write.

    Rank r's chunk begins at `base + r * stride` on every rank; `base` itself differs between ranks.

    Args:
        group: the Group; all its ranks construct together.
        nbytes: of a chunk, the same on all ranks; rounded up to the device's granularity.

    Attributes:
        base: address of rank 0's chunk in this process.
        stride: bytes from one chunk to the next.
        nbytes: usable bytes of a chunk, after rounding; equals `stride`.

    Raises:
        HandleError: on every rank, if any could not allocate or map the memory.
        ValueError: on every rank, if `nbytes` differs between them.
    """

    def __init__(self, group, nbytes):
        self._range = None
        self.group = group
        allocator = group.device.allocator
        self.stride = self.nbytes = -(-nbytes // allocator.granularity) * allocator.granularity
        chunks = share(group, self.nbytes)

        def map_chunks():
            self._range = MappedRange(allocator, chunks)

        together(group, "mapping the memory of other ranks", map_chunks)
        self.base = self._range.address

    def pointer(self, rank, offset=0) -> int:
        """The address of byte `offset` of a rank's chunk."""
        if not 0 <= rank < self.group.size:
            raise ValueError(f"rank: expected 0 ... {self.group.size - 1}, got {rank}")
        if not 0 <= offset < self.nbytes:
            raise ValueError(f"offset: expected 0 ... {self.nbytes - 1}, got {offset}")
        return self.base + rank * self.stride + offset

    def array(self, offset, shape, dtype, rank=None):
        """An array over part of a chunk, no copy. It keeps the memory mapped for as long as it lives.

        On CUDA a copy from another rank's chunk straight to ordinary host memory fails (invalid argument):
        copy to an array of this device first.

        Args:
            offset: bytes from the start of the chunk, a multiple of the item size.
            shape, dtype: of the array, C-contiguous.
            rank: whose chunk; None = the own.

        Raises:
            ValueError: the array would not lie inside the chunk or be misaligned, or the memory is closed.
        """
        if self._range is None:
            raise ValueError("the symmetric memory is closed")
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        itemsize = np.dtype(dtype).itemsize
        if offset % itemsize:
            raise ValueError(f"offset: expected a multiple of the item size {itemsize}, got {offset}")
        end = offset + math.prod(shape) * itemsize
        if end > self.nbytes:
            what = f"an array of {shape} {np.dtype(dtype)} at {offset}"
            raise ValueError(f"{what} ends at {end}, behind the chunk's {self.nbytes} bytes")
        pointer = self.pointer(self.group.rank if rank is None else rank, offset)
        return self.group.device.wrap(pointer, shape, dtype, self._range)

    def close(self, wait=True):
        """Unmaps the memory, once no array over it is left. Idempotent.

        The caller's own work on the memory must have finished; the peers' is waited for.

        Args:
            wait: first meet the other ranks, within the group's timeout, since their kernels may still use
                this rank's chunk. False after a failure: they may never come, and what they have mapped stays
                theirs.

        Raises:
            PeerTimeoutError: a peer did not come; the memory is unmapped all the same.
        """
        mapped, self._range = self._range, None
        if mapped is not None and wait:
            self.group.barrier()

    def __del__(self):
        if self._range is not None:
            warnings.warn(
                f"SymmetricMemory of {self.nbytes} bytes was never closed",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )
