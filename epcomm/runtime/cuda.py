"""The CUDA device: CuPy arrays and streams, kernels compiled through CuPy and launched through the driver."""

import ctypes

import cupy
import numpy as np
from cupy.cuda import driver, runtime

from . import _vmm
from ._dlpack import Import
from ._launch import CudaLauncher
from .cpu import HostMemory
from .source import kernel_options, kernel_source

_OLDEST = 90  # compute capability 9.0: the kernels use its bulk copies and mbarriers
_LEGACY_STREAMS = (0, 1)


class _Handle:
    """A stream handle as an object that CuPy takes."""

    def __init__(self, handle):
        self._handle = handle

    def __cuda_stream__(self):
        return 0, self._handle


class CudaDevice:
    """One GPU of compute capability 9.0 or later. Making it makes it this thread's current device.

    Args:
        index: of the device, as CUDA counts the visible ones.

    Raises:
        ValueError: the GPU is too old.
        DriverError: CUDA cannot be used.
    """

    kind = "cuda"
    xp = cupy
    max_threads = 1024

    def __init__(self, index):
        self.index = index
        self._device = cupy.cuda.Device(index)
        attributes = self._device.attributes
        capability = int(self._device.compute_capability)  # ten times the version
        if capability < _OLDEST:
            name = runtime.getDeviceProperties(index)["name"].decode()
            raise ValueError(
                f"{self} ({name}) has compute capability {capability / 10}; the kernels need 9.0 (Hopper) or "
                "later"
            )
        self.num_sms = attributes["MultiProcessorCount"]
        self.max_shared = attributes["MaxSharedMemoryPerBlockOptin"]
        self._device.use()
        runtime.free(0)  # makes the context
        self._context = driver.ctxGetCurrent()
        self.allocator = _vmm.Allocator(index)  # of memory that other ranks can map

    def __str__(self):
        return f"cuda:{self.index}"

    def __repr__(self):
        return f"CudaDevice({self.index})"

    def launcher(self, name, args, *, grid, block, shared=0, shape=None):
        """A callable(stream_handle) that launches kernel `name` with the content that `args` has at the call.

        Compiles the kernel unless this process or CuPy's disk cache has it.

        Args:
            name: of the kernel and its file.
            args: ctypes struct of args.h.
            grid, block: blocks, all of which run at the same time; threads a block.
            shared: bytes of dynamic shared memory a block.
            shape: {field: int}, constants SHAPE_field of the compilation.

        Raises:
            ValueError: no such kernel, too much shared memory, or more blocks than can run at once.
        """
        if shared > self.max_shared:
            raise ValueError(
                f"kernel {name}: {shared} bytes of shared memory, a block has at most {self.max_shared}"
            )
        with self._device:
            module = cupy.RawModule(
                code=kernel_source(name, type(args)), options=kernel_options(block, shape or {})
            )
            kernel = module.get_function(name)
            function = kernel.kernel.ptr
        launcher = CudaLauncher(
            self._context, function, grid, block, shared, ctypes.addressof(args), (module, kernel, args)
        )
        resident = launcher.blocks_per_sm * self.num_sms
        if grid > resident:
            raise ValueError(
                f"kernel {name}: its blocks wait for each other, and of {grid} with {block} threads and "
                f"{shared} bytes of shared memory only {resident} run at once on {self}"
            )
        return launcher

    def empty(self, shape, dtype, stream=None):
        """An uninitialised array from CuPy's pool, for use on a stream (a handle; None = the current one).

        What is freed goes to allocations for the same stream, which then follow its last use. In a capture
        the
        current stream's pool serves, which a warm-up call has filled: nothing may be allocated anew there,
        and
        what a graph works on is its user's to keep.
        """
        current = cupy.cuda.get_current_stream(self.index).ptr if stream is not None else None
        if stream != current and not self.capturing(stream):
            with self._device, cupy.cuda.Stream.from_external(_Handle(stream)):
                return cupy.empty(shape, dtype)
        if runtime.getDevice() == self.index:  # nearly always, and cheaper than to make it so
            return cupy.empty(shape, dtype)
        with self._device:
            return cupy.empty(shape, dtype)

    def zeros(self, shape, dtype):
        """An array of zeros from CuPy's pool, zeroed on the current stream."""
        with self._device:
            return cupy.zeros(shape, dtype)

    def wrap(self, pointer, shape, dtype, owner):
        """An array over foreign memory at address `pointer`; it keeps `owner` alive."""
        dtype = np.dtype(dtype)
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        memory = cupy.cuda.UnownedMemory(pointer, nbytes, owner, self.index)
        return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))

    def pointer(self, array):
        """Address of the first element of a CuPy array or of memory that arrays.take returned."""
        return array.pointer if type(array) is Import else array.data.ptr

    def host_visible(self, nbytes):
        """Zeroed pinned memory for kernels and host: HostMemory(pointer, view)."""
        with self._device:
            memory = cupy.cuda.alloc_pinned_memory(nbytes)
        view = np.frombuffer(memory, np.uint8, nbytes)
        view[:] = 0
        return HostMemory(memory.ptr, view)

    def current_stream(self):
        """CuPy's current stream of this device in this thread."""
        return cupy.cuda.get_current_stream(self.index)

    def handle(self, stream):
        """The handle of a CuPy stream."""
        return stream.ptr

    def capturing(self, handle):
        """Whether a stream is being captured into a graph."""
        return handle not in _LEGACY_STREAMS and bool(runtime.streamIsCapturing(handle))

    def synchronize(self, handle):
        """Waits for all work on a stream."""
        with self._device:
            runtime.streamSynchronize(handle)

    def copy(self, dst, src, handle):
        """Copies array `src` into `dst` on a stream, without waiting for it."""
        with self._device:
            if (
                src.flags.c_contiguous
                and dst.flags.c_contiguous
                and (src.dtype, src.shape) == (dst.dtype, dst.shape)
            ):
                runtime.memcpyAsync(dst.data.ptr, src.data.ptr, src.nbytes, runtime.memcpyDefault, handle)
            else:
                with cupy.cuda.Stream.from_external(_Handle(handle)):
                    cupy.copyto(dst, src)

    def to_host(self, array):
        """A NumPy copy of an array, also of one over a peer's memory, in the order of the current stream."""
        with self._device:
            if isinstance(array.data.mem, cupy.cuda.UnownedMemory):
                array = array.copy()  # a peer's memory cannot be copied to ordinary host memory directly
            return array.get()
