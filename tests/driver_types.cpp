// Compiles if the types that epcomm/runtime/_driver.h declares by hand are laid out like those of cuda.h, its constants have the
// same values, and its functions take as many parameters of the same sizes.
#include <cuda.h>
#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>

#include <array>
#include <type_traits>

namespace ours {
#include "_driver.h"
}

#define SAME_SIZE(type) static_assert(sizeof(ours::type) == sizeof(::type), #type)
#define SAME_PLACE(type, field) \
  static_assert(offsetof(ours::type, field) == offsetof(::type, field) && sizeof(ours::type::field) == sizeof(::type::field), #type)
#define SAME_VALUE(name) static_assert((int)ours::name == (int)::name, #name)

SAME_SIZE(CUresult);
SAME_SIZE(CUdevice);
SAME_SIZE(CUdeviceptr);
SAME_SIZE(CUmemGenericAllocationHandle);
SAME_SIZE(CUcontext);
SAME_SIZE(CUfunction);
SAME_SIZE(CUstream);
SAME_SIZE(CUuuid);
SAME_SIZE(CUmemFabricHandle);

SAME_SIZE(CUmemLocation);
SAME_PLACE(CUmemLocation, type);
SAME_PLACE(CUmemLocation, id);

SAME_SIZE(CUmemAllocationProp);
SAME_PLACE(CUmemAllocationProp, type);
SAME_PLACE(CUmemAllocationProp, requestedHandleTypes);
SAME_PLACE(CUmemAllocationProp, location);
SAME_PLACE(CUmemAllocationProp, win32HandleMetaData);
SAME_PLACE(CUmemAllocationProp, allocFlags);

SAME_SIZE(CUmemAccessDesc);
SAME_PLACE(CUmemAccessDesc, location);
SAME_PLACE(CUmemAccessDesc, flags);

SAME_SIZE(CUlaunchConfig);
SAME_PLACE(CUlaunchConfig, gridDimX);
SAME_PLACE(CUlaunchConfig, gridDimY);
SAME_PLACE(CUlaunchConfig, gridDimZ);
SAME_PLACE(CUlaunchConfig, blockDimX);
SAME_PLACE(CUlaunchConfig, blockDimY);
SAME_PLACE(CUlaunchConfig, blockDimZ);
SAME_PLACE(CUlaunchConfig, sharedMemBytes);
SAME_PLACE(CUlaunchConfig, hStream);
SAME_PLACE(CUlaunchConfig, attrs);
SAME_PLACE(CUlaunchConfig, numAttrs);

SAME_VALUE(CUDA_SUCCESS);
SAME_VALUE(CUDA_ERROR_DEINITIALIZED);
SAME_VALUE(CU_MEM_ALLOCATION_TYPE_PINNED);
SAME_VALUE(CU_MEM_LOCATION_TYPE_DEVICE);
SAME_VALUE(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
SAME_VALUE(CU_MEM_HANDLE_TYPE_FABRIC);
SAME_VALUE(CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
SAME_VALUE(CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
SAME_VALUE(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);

template <class Result, class... Parameter>
constexpr auto sizes(Result (*)(Parameter...)) {
  return std::array<size_t, sizeof...(Parameter)>{sizeof(Parameter)...};
}

template <class Ours, class Theirs>
constexpr bool same_signature(Ours ours, Theirs theirs) {
  constexpr auto a = sizes(Ours{}), b = sizes(Theirs{});
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size() && i < b.size(); i++)
    if (a[i] != b[i]) return false;
  return true;
}

// cuda.h's macros give `name` its _v2 where there is one: that is what cuGetProcAddress answers for the name without it.
#define CHECK(name, parameters) \
  static_assert(same_signature(decltype(ours::DriverTable::name){}, (decltype(&::name))nullptr), #name);
DRIVER_CALLS(CHECK)
static_assert(std::is_same_v<decltype(&::cuGetProcAddress_v2), CUresult (*)(const char*, void**, int, cuuint64_t, CUdriverProcAddressQueryResult*)>);
