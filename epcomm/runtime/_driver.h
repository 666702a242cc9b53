// The CUDA driver without CUDA: its types retyped, its functions looked up in libcuda.so.1 on first use. A test compares the
// types with those of cuda.h. Every module that includes this has its own table; the GIL guards the filling of it.
#pragma once
#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef unsigned long long CUmemGenericAllocationHandle;
typedef struct CUctx_st* CUcontext;
typedef struct CUfunc_st* CUfunction;
typedef struct CUstream_st* CUstream;

typedef struct {
  char bytes[16];
} CUuuid;

typedef struct {
  unsigned char data[64];
} CUmemFabricHandle;

typedef struct {
  int type;
  int id;
} CUmemLocation;

typedef struct {
  int type;
  int requestedHandleTypes;
  CUmemLocation location;
  void* win32HandleMetaData;
  struct {
    unsigned char compressionType;
    unsigned char gpuDirectRDMACapable;
    unsigned short usage;
    unsigned char reserved[4];
  } allocFlags;
} CUmemAllocationProp;

typedef struct {
  CUmemLocation location;
  int flags;
} CUmemAccessDesc;

typedef struct {
  unsigned int gridDimX, gridDimY, gridDimZ;
  unsigned int blockDimX, blockDimY, blockDimZ;
  unsigned int sharedMemBytes;
  CUstream hStream;
  void* attrs;  // CUlaunchAttribute *
  unsigned int numAttrs;
} CUlaunchConfig;

enum {
  CUDA_SUCCESS = 0,
  CUDA_ERROR_DEINITIALIZED = 4,
  CU_MEM_ALLOCATION_TYPE_PINNED = 1,
  CU_MEM_LOCATION_TYPE_DEVICE = 1,
  CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1,
  CU_MEM_HANDLE_TYPE_FABRIC = 8,
  CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3,
  CU_MEM_ALLOC_GRANULARITY_RECOMMENDED = 1,
  CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8,
};

// The newest function here is cuLaunchKernelEx of 11.6; sm_90 needs 11.8; cuGetProcAddress_v2 itself came with 12.0.
#define DRIVER_VERSION 12000

#define DRIVER_CALLS(X)                                                                                   \
  X(cuInit, (unsigned int))                                                                               \
  X(cuGetErrorName, (CUresult, const char**))                                                             \
  X(cuGetErrorString, (CUresult, const char**))                                                           \
  X(cuDeviceGet, (CUdevice*, int))                                                                        \
  X(cuDeviceGetCount, (int*))                                                                             \
  X(cuDeviceGetUuid, (CUuuid*, CUdevice))                                                                 \
  X(cuDeviceCanAccessPeer, (int*, CUdevice, CUdevice))                                                    \
  X(cuDevicePrimaryCtxRetain, (CUcontext*, CUdevice))                                                     \
  X(cuDevicePrimaryCtxRelease, (CUdevice))                                                                \
  X(cuCtxGetCurrent, (CUcontext*))                                                                        \
  X(cuCtxPushCurrent, (CUcontext))                                                                        \
  X(cuCtxPopCurrent, (CUcontext*))                                                                        \
  X(cuCtxSynchronize, (void))                                                                             \
  X(cuMemGetAllocationGranularity, (size_t*, const CUmemAllocationProp*, int))                            \
  X(cuMemCreate, (CUmemGenericAllocationHandle*, size_t, const CUmemAllocationProp*, unsigned long long)) \
  X(cuMemRelease, (CUmemGenericAllocationHandle))                                                         \
  X(cuMemExportToShareableHandle, (void*, CUmemGenericAllocationHandle, int, unsigned long long))         \
  X(cuMemImportFromShareableHandle, (CUmemGenericAllocationHandle*, void*, int))                          \
  X(cuMemAddressReserve, (CUdeviceptr*, size_t, size_t, CUdeviceptr, unsigned long long))                 \
  X(cuMemAddressFree, (CUdeviceptr, size_t))                                                              \
  X(cuMemMap, (CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long))            \
  X(cuMemUnmap, (CUdeviceptr, size_t))                                                                    \
  X(cuMemSetAccess, (CUdeviceptr, size_t, const CUmemAccessDesc*, size_t))                                \
  X(cuMemsetD8, (CUdeviceptr, unsigned char, size_t))                                                     \
  X(cuFuncGetAttribute, (int*, int, CUfunction))                                                          \
  X(cuFuncSetAttribute, (CUfunction, int, int))                                                           \
  X(cuOccupancyMaxActiveBlocksPerMultiprocessor, (int*, CUfunction, int, size_t))                         \
  X(cuLaunchKernelEx, (const CUlaunchConfig*, CUfunction, void**, void**))

typedef struct {
#define DRIVER_MEMBER(name, parameters) CUresult(*name) parameters;
  DRIVER_CALLS(DRIVER_MEMBER)
#undef DRIVER_MEMBER
} DriverTable;

static DriverTable driver;
static int driver_is_loaded = 0;

// Fills the table from the library and initialises the driver. 0, or -1 with the reason in `message`.
static int driver_load(const char* library, char* message, size_t size) {
  static const struct {
    const char* name;
    size_t offset;
  } calls[] = {
#define DRIVER_ENTRY(name, parameters) {#name, offsetof(DriverTable, name)},
      DRIVER_CALLS(DRIVER_ENTRY)
#undef DRIVER_ENTRY
  };
  DriverTable table;
  void* handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (!handle) {
    snprintf(message, size, "no CUDA driver: %s", dlerror());
    return -1;
  }
  CUresult (*look_up)(const char*, void**, int, unsigned long long, int*);
  *(void**)&look_up = dlsym(handle, "cuGetProcAddress_v2");
  if (!look_up) {
    snprintf(message, size, "the CUDA driver is older than 12.0: it has no cuGetProcAddress_v2");
    return -1;
  }
  for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
    void* address = NULL;
    int status = 0;
    CUresult result = look_up(calls[i].name, &address, DRIVER_VERSION, 0, &status);
    if (result != CUDA_SUCCESS || !address) {
      snprintf(message, size, "the CUDA driver has no %s (error %d, status %d)", calls[i].name, result, status);
      return -1;
    }
    *(void**)((char*)&table + calls[i].offset) = address;
  }
  CUresult result = table.cuInit(0);
  if (result != CUDA_SUCCESS) {
    const char* name = NULL;
    table.cuGetErrorName(result, &name);
    snprintf(message, size, "cuInit: %s (error %d)", name ? name : "unknown", result);
    return -1;
  }
  driver = table;
  driver_is_loaded = 1;
  return 0;
}
