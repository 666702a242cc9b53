"""The CPU device: NumPy arrays, kernels as fibers on the calling thread, one stream that is always done."""

import ctypes
from typing import NamedTuple

import numpy as np

from . import _fibers, _memfd

_ALIGNMENT = 128


class NullStream:
    """The CPU device's one stream: calls are done when they return."""

    ptr = 0

    def synchronize(self):
        """Nothing to wait for."""


class HostMemory(NamedTuple):
    """Memory that kernels write and the host reads: `pointer` for kernels, `view` (uint8) for the host."""

    pointer: int
    view: np.ndarray


class _Foreign:
    """Gives NumPy memory that somebody else owns; the array keeps this object, and so the owner."""

    def __init__(self, pointer, nbytes, owner):
        self.owner = owner
        self.__array_interface__ = {
            "version": 3,
            "data": (pointer, False),
            "shape": (nbytes,),
            "typestr": "|u1",
        }


class CpuDevice:
    """Runs the kernels of `kernels_cu` on the calling thread. All device memory is host memory."""

    kind = "cpu"
    index = 0
    xp = np
    num_sms = 4
    max_threads = 128
    max_shared = 227 * 1024
    allocator = _memfd.allocator  # of memory that other ranks can map

    def __init__(self):
        self._stream = NullStream()

    def __str__(self):
        return "cpu"

    def __repr__(self):
        return "CpuDevice()"

    def launcher(self, name, args, *, grid, block, shared=0, shape=None):
        """A callable(stream_handle) that runs kernel `name` with the content that `args` has at the call.

        grid: blocks; block: threads, a multiple of 32 up to 1024; shared: bytes a block. `shape` is for CUDA:
        here the kernels read shapes from `args`.
        """
        known = _fibers.kernels()
        if name not in known:
            raise ValueError(f"no kernel is called {name!r}; there are {', '.join(sorted(known)) or 'none'}")
        if ctypes.sizeof(args) != known[name]:
            raise TypeError(
                f"kernel {name}: expected arguments of {known[name]} bytes, "
                f"got {type(args).__name__} of {ctypes.sizeof(args)}"
            )
        if shared > self.max_shared:
            raise ValueError(
                f"kernel {name}: {shared} bytes of shared memory, a block has at most {self.max_shared}"
            )
        launch, address = _fibers.launch, ctypes.addressof(args)

        def call(stream_handle=0, _keep=args):
            launch(name, grid, block, shared, address)

        return call

    def empty(self, shape, dtype, stream=None):
        """An uninitialised array, 128-byte aligned."""
        dtype = np.dtype(dtype)
        count = int(np.prod(shape, dtype=np.int64))
        raw = np.empty(count * dtype.itemsize + _ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % _ALIGNMENT
        return raw[start : start + count * dtype.itemsize].view(dtype).reshape(shape)

    def zeros(self, shape, dtype):
        """An array of zeros, 128-byte aligned."""
        array = self.empty(shape, dtype)
        array[...] = 0
        return array

    def wrap(self, pointer, shape, dtype, owner):
        """An array over foreign memory at address `pointer`; it keeps `owner` alive."""
        dtype = np.dtype(dtype)
        count = int(np.prod(shape, dtype=np.int64))
        return np.asarray(_Foreign(pointer, count * dtype.itemsize, owner)).view(dtype).reshape(shape)

    def pointer(self, array):
        """Address of the array's first element."""
        return array.ctypes.data

    def host_visible(self, nbytes):
        """Zeroed memory for kernels and host: HostMemory(pointer, view)."""
        view = self.zeros((nbytes,), np.uint8)
        return HostMemory(view.ctypes.data, view)

    def current_stream(self):
        """The one stream."""
        return self._stream

    def handle(self, stream):
        """0, for every stream."""
        return 0

    def capturing(self, handle):
        """False: there are no graphs."""
        return False

    def synchronize(self, handle):
        """Nothing to wait for."""

    def copy(self, dst, src, handle):
        """Copy array `src` into `dst`."""
        np.copyto(dst, src)

    def to_host(self, array):
        """A NumPy copy of an array."""
        return np.array(array)
