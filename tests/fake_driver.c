// A stand-in for libcuda.so.1 on machines without one: GPU memory is memfds, so ranks really share it, and the rules of the
// driver that the package relies on are enforced. Counts what is live, and fails a chosen call.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "_driver.h"

enum { INVALID_VALUE = 1,
       OUT_OF_MEMORY = 2,
       INVALID_CONTEXT = 201,
       MANY = 4096 };
static const size_t GRANULE = 2 << 20;

enum { ALLOCATION,
       RESERVATION,
       MAPPING,
       CONTEXT,
       KINDS };
typedef struct {
  uintptr_t start;
  size_t size;
  int fd;        // of an allocation
  int writable;  // a mapping's access
} Item;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void unlock(pthread_mutex_t** held) { pthread_mutex_unlock(*held); }
static Item items[KINDS][MANY];
static int counts[KINDS], calls, fail_at = -1;
static char fail_name[64], log_text[1 << 16];
static __thread CUcontext current;
static struct {
  CUlaunchConfig config;
  uintptr_t function, stream;
  unsigned char bytes[16];
  CUcontext context;
} last_launch;
static int max_shared = 48 << 10, peer_access = 1;

// ---- for the test
void fake_reset(void) {
  memset(counts, 0, sizeof counts);
  calls = 0, fail_at = -1, log_text[0] = 0, fail_name[0] = 0, max_shared = 48 << 10, peer_access = 1;
}
void fake_fail_nth(int n) { calls = 0, fail_at = n; }
void fake_fail_name(const char* name) { strcpy(fail_name, name); }
void fake_no_peer_access(void) { peer_access = 0; }
void fake_set_current(uintptr_t context) { current = (CUcontext)context; }
int fake_live(int kind) { return counts[kind]; }
int fake_calls(void) { return calls; }
int fake_max_shared(void) { return max_shared; }
const char* fake_log(void) { return log_text; }
const void* fake_last_launch(void) { return &last_launch; }

static int fails(const char* name) {
  if (strlen(log_text) + strlen(name) + 2 < sizeof log_text) strcat(strcat(log_text, name), " ");
  int undo = strstr("cuDevicePrimaryCtxRelease cuMemRelease cuMemAddressFree cuMemUnmap", name) != NULL;
  return (!undo && calls++ == fail_at) || !strcmp(name, fail_name);
}

#define BEGIN                                                     \
  pthread_mutex_lock(&lock);                                      \
  __attribute__((cleanup(unlock))) pthread_mutex_t* held = &lock; \
  if (fails(__func__)) return OUT_OF_MEMORY
#define NEED(condition, error) \
  if (!(condition)) return error;

static Item* find(int kind, uintptr_t start) {
  for (int i = 0; i < counts[kind]; i++)
    if (items[kind][i].start == start) return &items[kind][i];
  return NULL;
}

static int overlapped(int kind, uintptr_t start, size_t size) {
  for (int i = 0; i < counts[kind]; i++)
    if (start < items[kind][i].start + items[kind][i].size && items[kind][i].start < start + size) return 1;
  return 0;
}

static void add(int kind, Item item) {
  if (counts[kind] == MANY) abort();
  items[kind][counts[kind]++] = item;
}

static int drop(int kind, uintptr_t start, Item* gone) {
  Item* item = find(kind, start);
  if (item) *gone = *item, *item = items[kind][--counts[kind]];
  return item ? CUDA_SUCCESS : INVALID_VALUE;
}

static CUresult cuInit(unsigned int flags) { return CUDA_SUCCESS; }

static CUresult cuGetErrorName(CUresult error, const char** text) {
  *text = NULL;
  if (error == OUT_OF_MEMORY) *text = "CUDA_ERROR_OUT_OF_MEMORY";
  if (error == INVALID_VALUE) *text = "CUDA_ERROR_INVALID_VALUE";
  return CUDA_SUCCESS;
}

static CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = error == OUT_OF_MEMORY ? "out of memory" : "invalid argument";
  return CUDA_SUCCESS;
}

static CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  BEGIN;
  NEED(ordinal < 2, INVALID_VALUE);
  *device = 10 + ordinal;
  return CUDA_SUCCESS;
}

static CUresult cuDeviceGetCount(int* count) {
  BEGIN;
  *count = 2;
  return CUDA_SUCCESS;
}

static CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
  BEGIN;
  memset(uuid, device, sizeof *uuid);
  uuid->bytes[3] = 0;  // a UUID may have zeros in it
  return CUDA_SUCCESS;
}

static CUresult cuDeviceCanAccessPeer(int* able, CUdevice device, CUdevice peer) {
  BEGIN;
  *able = device != peer && peer_access;
  return CUDA_SUCCESS;
}

static CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  BEGIN;
  add(CONTEXT, (Item){.start = device});
  *context = (CUcontext)(uintptr_t)(1000 + device);
  return CUDA_SUCCESS;
}

static CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
  BEGIN;
  Item gone;
  return drop(CONTEXT, device, &gone);
}

static CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = current;
  return CUDA_SUCCESS;
}

static CUresult cuCtxPushCurrent(CUcontext context) {
  BEGIN;
  NEED(context && !current, INVALID_CONTEXT)
  current = context;
  return CUDA_SUCCESS;
}

static CUresult cuCtxPopCurrent(CUcontext* context) {
  NEED(current, INVALID_CONTEXT);
  *context = current, current = NULL;
  return CUDA_SUCCESS;
}

static CUresult cuCtxSynchronize(void) {
  BEGIN;
  return current ? CUDA_SUCCESS : INVALID_CONTEXT;
}

static CUresult cuMemGetAllocationGranularity(size_t* size, const CUmemAllocationProp* prop, int option) {
  BEGIN;
  *size = GRANULE;
  return CUDA_SUCCESS;
}

static CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp* prop, unsigned long long flags) {
  BEGIN;
  NEED(size && size % GRANULE == 0 && prop->type == CU_MEM_ALLOCATION_TYPE_PINNED && flags == 0, INVALID_VALUE);
  NEED(prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE && prop->location.id < 2 && !prop->win32HandleMetaData, INVALID_VALUE);
  int fd = memfd_create("fake", MFD_CLOEXEC);
  NEED(fd >= 0 && ftruncate(fd, size) == 0, OUT_OF_MEMORY);
  void* dirty = mmap(NULL, GRANULE, PROT_WRITE, MAP_SHARED, fd, 0);  // memory of a GPU is not zeroed
  memset(dirty, 0xA5, GRANULE);
  munmap(dirty, GRANULE);
  add(ALLOCATION, (Item){.start = *handle = 5000 + fd, .size = size, .fd = fd});
  return CUDA_SUCCESS;
}

static CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  BEGIN;
  Item gone;
  NEED(drop(ALLOCATION, handle, &gone) == CUDA_SUCCESS, INVALID_VALUE);
  close(gone.fd);
  return CUDA_SUCCESS;
}

static CUresult cuMemExportToShareableHandle(void* out, CUmemGenericAllocationHandle handle, int type, unsigned long long flags) {
  BEGIN;
  Item* item = find(ALLOCATION, handle);
  NEED(item && flags == 0, INVALID_VALUE);
  if (type == CU_MEM_HANDLE_TYPE_FABRIC) {
    memset(out, 0, sizeof(CUmemFabricHandle));
    snprintf(out, sizeof(CUmemFabricHandle), "/proc/self/fd/%d", item->fd);
  } else {
    *(int*)out = dup(item->fd);
  }
  return CUDA_SUCCESS;
}

static CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* source, int type) {
  BEGIN;
  int fd = type == CU_MEM_HANDLE_TYPE_FABRIC ? dup(atoi((char*)source + 14)) : dup((int)(intptr_t)source);
  NEED(fd >= 0, INVALID_VALUE);
  add(ALLOCATION, (Item){.start = *handle = 5000 + fd, .size = lseek(fd, 0, SEEK_END), .fd = fd});
  return CUDA_SUCCESS;
}

static CUresult cuMemAddressReserve(CUdeviceptr* address, size_t size, size_t alignment, CUdeviceptr hint, unsigned long long flags) {
  BEGIN;
  NEED(size && size % GRANULE == 0 && flags == 0, INVALID_VALUE);
  uintptr_t start = (uintptr_t)mmap(NULL, size + alignment, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  uintptr_t aligned = (start + alignment - 1) / alignment * alignment;
  munmap((void*)(aligned + size), start + alignment - aligned);
  if (aligned > start) munmap((void*)start, aligned - start);
  add(RESERVATION, (Item){.start = *address = aligned, .size = size});
  return CUDA_SUCCESS;
}

static CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
  BEGIN;
  Item gone;
  NEED(!overlapped(MAPPING, address, size) && find(RESERVATION, address) && find(RESERVATION, address)->size == size, INVALID_VALUE);
  drop(RESERVATION, address, &gone);
  munmap((void*)(uintptr_t)address, size);
  return CUDA_SUCCESS;
}

static CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
  BEGIN;
  Item* item = find(ALLOCATION, handle);
  NEED(item && offset == 0 && size == item->size && flags == 0, INVALID_VALUE);
  NEED(overlapped(RESERVATION, address, size) && !overlapped(MAPPING, address, size), INVALID_VALUE);
  mmap((void*)(uintptr_t)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, item->fd, 0);
  add(MAPPING, (Item){.start = address, .size = size});
  return CUDA_SUCCESS;
}

static CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
  BEGIN;
  Item gone;
  NEED(find(MAPPING, address) && find(MAPPING, address)->size == size, INVALID_VALUE);
  drop(MAPPING, address, &gone);
  mmap((void*)(uintptr_t)address, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  return CUDA_SUCCESS;
}

static CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc* access, size_t count) {
  BEGIN;
  Item* item = find(MAPPING, address);
  NEED(item && item->size == size && count == 1 && access->location.type == CU_MEM_LOCATION_TYPE_DEVICE, INVALID_VALUE);
  NEED(access->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE, INVALID_VALUE);
  item->writable = 1;
  mprotect((void*)(uintptr_t)address, size, PROT_READ | PROT_WRITE);
  return CUDA_SUCCESS;
}

static CUresult cuMemsetD8(CUdeviceptr address, unsigned char value, size_t size) {
  BEGIN;
  Item* item = find(MAPPING, address);
  NEED(current, INVALID_CONTEXT);
  NEED(item && item->writable && size <= item->size, INVALID_VALUE);
  memset((void*)(uintptr_t)address, value, size);
  return CUDA_SUCCESS;
}

static CUresult cuFuncGetAttribute(int* value, int attribute, CUfunction function) {
  BEGIN;
  NEED(current && attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, INVALID_VALUE);
  *value = max_shared;
  return CUDA_SUCCESS;
}

static CUresult cuFuncSetAttribute(CUfunction function, int attribute, int value) {
  BEGIN;
  NEED(current && attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES && value <= 227 << 10, INVALID_VALUE);
  max_shared = value;
  return CUDA_SUCCESS;
}

static CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction function, int threads, size_t shared) {
  BEGIN;
  NEED(current, INVALID_CONTEXT);
  *blocks = 2048 / threads;
  return CUDA_SUCCESS;
}

static CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** parameters, void** extra) {
  if (fail_name[0] && !strcmp(fail_name, __func__)) return OUT_OF_MEMORY;
  NEED(current && !extra && config->numAttrs == 0, INVALID_VALUE);
  last_launch.config = *config;
  last_launch.function = (uintptr_t)function;
  last_launch.stream = (uintptr_t)config->hStream;
  last_launch.context = current;
  memcpy(last_launch.bytes, parameters[0], sizeof last_launch.bytes);
  return CUDA_SUCCESS;
}

CUresult cuGetProcAddress_v2(const char* name, void** address, int version, unsigned long long flags, int* status) {
#define FIND(call, parameters) \
  if (!strcmp(name, #call)) *address = (void*)call;
  DRIVER_CALLS(FIND)
  return version == DRIVER_VERSION && *address ? CUDA_SUCCESS : INVALID_VALUE;
}
