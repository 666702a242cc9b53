// All kernels compiled for the CPU device, and the C functions that epcomm/runtime/_fibers.pyx calls.
// Headers come first, at global scope; each kernel file then has a namespace, as it has a module of its own on CUDA.
#include "../args.h"
#include "../device.cuh"
#include "../numeric.cuh"
#include "../protocol.cuh"
#include "../rows.cuh"
#include "../low_latency.cuh"

namespace plan_cu {
#include "../plan.cu"
}
namespace meet_cu {
#include "../meet.cu"
}
namespace dispatch_cu {
#include "../dispatch.cu"
}
namespace combine_cu {
#include "../combine.cu"
}
namespace prefetch_cu {
#include "../prefetch.cu"
}
namespace reduce_grad_cu {
#include "../reduce_grad.cu"
}
namespace low_latency_dispatch_cu {
#include "../low_latency_dispatch.cu"
}
namespace low_latency_combine_cu {
#include "../low_latency_combine.cu"
}

extern "C" {
int epcomm_launch(const char* name, unsigned grid, unsigned block, size_t shared, const void* args) {
  return simt::launch(name, grid, block, shared, args);
}
const char* epcomm_launch_error() { return simt::machine().error.c_str(); }
void epcomm_set_schedule(unsigned long long seed) { simt::set_schedule(seed); }
unsigned epcomm_num_kernels() { return simt::num_kernels; }
const char* epcomm_kernel_name(unsigned i) { return simt::kernels[i].name; }
size_t epcomm_kernel_args_bytes(unsigned i) { return simt::kernels[i].args_bytes; }
const char* epcomm_bad_kernel() { return simt::bad_kernel; }
}
