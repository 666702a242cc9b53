# What _vmm and _launch share of the driver: its table and the way from an error code to an exception.

from ..errors import DriverError

cdef extern from "_driver.h" nogil:
    ctypedef int CUresult
    ctypedef int CUdevice
    ctypedef unsigned long long CUdeviceptr
    ctypedef unsigned long long CUmemGenericAllocationHandle
    ctypedef void* CUcontext
    ctypedef void* CUfunction
    ctypedef void* CUstream
    ctypedef struct CUuuid:
        char bytes[16]
    ctypedef struct CUmemFabricHandle:
        unsigned char data[64]
    ctypedef struct CUmemLocation:
        int type
        int id
    ctypedef struct CUmemAllocationProp:
        int type
        int requestedHandleTypes
        CUmemLocation location
    ctypedef struct CUmemAccessDesc:
        CUmemLocation location
        int flags
    ctypedef struct CUlaunchConfig:
        unsigned int gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes
        CUstream hStream

    enum:
        CUDA_SUCCESS
        CUDA_ERROR_DEINITIALIZED
        CU_MEM_ALLOCATION_TYPE_PINNED
        CU_MEM_LOCATION_TYPE_DEVICE
        CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        CU_MEM_HANDLE_TYPE_FABRIC
        CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES

    ctypedef struct DriverTable:
        CUresult (*cuGetErrorName)(CUresult, const char**) noexcept nogil
        CUresult (*cuGetErrorString)(CUresult, const char**) noexcept nogil
        CUresult (*cuDeviceGet)(CUdevice*, int) noexcept nogil
        CUresult (*cuDeviceGetCount)(int*) noexcept nogil
        CUresult (*cuDeviceGetUuid)(CUuuid*, CUdevice) noexcept nogil
        CUresult (*cuDeviceCanAccessPeer)(int*, CUdevice, CUdevice) noexcept nogil
        CUresult (*cuDevicePrimaryCtxRetain)(CUcontext*, CUdevice) noexcept nogil
        CUresult (*cuDevicePrimaryCtxRelease)(CUdevice) noexcept nogil
        CUresult (*cuCtxGetCurrent)(CUcontext*) noexcept nogil
        CUresult (*cuCtxPushCurrent)(CUcontext) noexcept nogil
        CUresult (*cuCtxPopCurrent)(CUcontext*) noexcept nogil
        CUresult (*cuCtxSynchronize)() noexcept nogil
        CUresult (*cuMemGetAllocationGranularity)(size_t*, const CUmemAllocationProp*, int) noexcept nogil
        CUresult (*cuMemCreate)(
            CUmemGenericAllocationHandle*, size_t, const CUmemAllocationProp*, unsigned long long
        ) noexcept nogil
        CUresult (*cuMemRelease)(CUmemGenericAllocationHandle) noexcept nogil
        CUresult (*cuMemExportToShareableHandle)(
            void*, CUmemGenericAllocationHandle, int, unsigned long long) noexcept nogil
        CUresult (*cuMemImportFromShareableHandle)(CUmemGenericAllocationHandle*, void*, int) noexcept nogil
        CUresult (*cuMemAddressReserve)(
            CUdeviceptr*, size_t, size_t, CUdeviceptr, unsigned long long) noexcept nogil
        CUresult (*cuMemAddressFree)(CUdeviceptr, size_t) noexcept nogil
        CUresult (*cuMemMap)(
            CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long) noexcept nogil
        CUresult (*cuMemUnmap)(CUdeviceptr, size_t) noexcept nogil
        CUresult (*cuMemSetAccess)(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) noexcept nogil
        CUresult (*cuMemsetD8)(CUdeviceptr, unsigned char, size_t) noexcept nogil
        CUresult (*cuFuncGetAttribute)(int*, int, CUfunction) noexcept nogil
        CUresult (*cuFuncSetAttribute)(CUfunction, int, int) noexcept nogil
        CUresult (*cuOccupancyMaxActiveBlocksPerMultiprocessor)(int*, CUfunction, int, size_t) noexcept nogil
        CUresult (*cuLaunchKernelEx)(const CUlaunchConfig*, CUfunction, void**, void**) noexcept nogil

    DriverTable driver
    int driver_is_loaded
    int driver_load(const char*, char*, size_t) noexcept


def _load(library="libcuda.so.1"):
    """Fills this module's driver table from a library, on first use. Tests load their own."""
    cdef char message[512]
    if driver_load(library.encode(), message, sizeof(message)) < 0:
        raise DriverError(message.decode())


cdef int need_driver() except -1:
    if not driver_is_loaded:
        _load()
    return 0


cdef str error_text(CUresult result):
    cdef const char* name = NULL
    cdef const char* text = NULL
    driver.cuGetErrorName(result, &name)
    driver.cuGetErrorString(result, &text)
    if name == NULL or text == NULL:
        return f"error {result}"
    return f"{name.decode()} ({text.decode()})"


cdef int check(CUresult result, str call) except -1:
    """Raises DriverError for a call that failed."""
    if result != CUDA_SUCCESS:
        raise DriverError(f"{call}: {error_text(result)}")
    return 0
