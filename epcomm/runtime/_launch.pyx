# cython: language_level=3
"""Launching a CUDA kernel whose one parameter is a struct, for little more than the driver call takes."""

cimport cython
from libc.stdint cimport uintptr_t
from libc.string cimport memset

include "_driver.pxi"


@cython.final
cdef class CudaLauncher:
    """A kernel with its grid and the place of its arguments: `launcher(stream_handle)` launches it.

    Args:
        context, function: the CUcontext and a CUfunction of it, as ints.
        grid, block: blocks, and threads a block.
        shared: bytes of dynamic shared memory a block.
        address: of the kernel's one parameter in host memory; its content is copied at every launch.
        owner: whatever keeps the function and that memory alive.

    Attributes:
        blocks_per_sm: how many of its blocks one SM can run at once.

    Raises:
        DriverError: the driver refuses that much shared memory; or, from a call, the launch.
    """

    cdef readonly int blocks_per_sm
    cdef CUlaunchConfig config
    cdef CUfunction function
    cdef CUcontext context
    cdef void* parameter
    cdef object owner

    def __init__(
        self, uintptr_t context, uintptr_t function, unsigned int grid, unsigned int block,
        unsigned int shared, uintptr_t address, owner,
    ):
        need_driver()
        self.context = <CUcontext>context
        self.function = <CUfunction>function
        self.parameter = <void*>address
        self.owner = owner
        memset(&self.config, 0, sizeof(self.config))
        self.config.gridDimX = grid
        self.config.gridDimY = self.config.gridDimZ = 1
        self.config.blockDimX = block
        self.config.blockDimY = self.config.blockDimZ = 1
        self.config.sharedMemBytes = shared
        cdef CUcontext popped
        check(driver.cuCtxPushCurrent(self.context), "cuCtxPushCurrent")
        try:
            self.prepare(block, shared)
        finally:
            driver.cuCtxPopCurrent(&popped)

    cdef prepare(self, unsigned int block, unsigned int shared):
        cdef int allowed = 0
        cdef int attribute = CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        cdef CUresult result
        check(driver.cuFuncGetAttribute(&allowed, attribute, self.function), "cuFuncGetAttribute")
        if <int>shared > allowed:  # raised only: another launcher of the function may need more than this one
            result = driver.cuFuncSetAttribute(self.function, attribute, shared)
            check(result, f"cuFuncSetAttribute: {shared} bytes of shared memory")
        cdef int* blocks = &self.blocks_per_sm
        result = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, self.function, block, shared)
        check(result, "cuOccupancyMaxActiveBlocksPerMultiprocessor")

    def __call__(self, uintptr_t stream):
        cdef CUlaunchConfig config = self.config  # a copy: threads may launch at the same time
        cdef void* parameters[1]
        cdef CUcontext current = NULL
        cdef CUresult result
        config.hStream = <CUstream>stream
        parameters[0] = self.parameter
        with nogil:  # a full launch queue blocks, perhaps until a callback that needs the GIL has run
            driver.cuCtxGetCurrent(&current)
            if current == self.context:
                result = driver.cuLaunchKernelEx(&config, self.function, parameters, NULL)
            else:  # a thread that has not used this device before
                result = driver.cuCtxPushCurrent(self.context)
                if result == CUDA_SUCCESS:
                    result = driver.cuLaunchKernelEx(&config, self.function, parameters, NULL)
                    driver.cuCtxPopCurrent(&current)
        if result != CUDA_SUCCESS:
            check(result, "cuLaunchKernelEx")
