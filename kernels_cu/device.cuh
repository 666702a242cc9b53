// One vocabulary, two implementations: PTX on a GPU, fibers on a CPU (cpu/device_cpu.h). Every PTX instruction of this
// project is here; every asm that orders memory has a "memory" clobber. A kernel reads like the protocol it implements.
//
// Words: _gpu = visible to this device, otherwise to all devices and the host (.sys). Warp collectives are for full
// warps: all 32 lanes call. Bulk copies (row_*) move multiples of 16 bytes between 16-byte aligned addresses.
#pragma once
#include "args.h"

#ifndef __CUDACC__
#include "cpu/device_cpu.h"
#else

#define DEV __device__ __forceinline__
#define DEV_CALL static __device__ __noinline__  // a call, not inlined: cold code, or hot code that several callers share
#ifndef BLOCK_THREADS
#define BLOCK_THREADS 1024
#endif
#define KERNEL(name, Args) extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1) name(const __grid_constant__ Args a)
// Shapes are -D constants here and fields of the arguments on the CPU.
#define SHAPE(field) SHAPE_##field
#define SHAPE_MAX(field) SHAPE_##field

constexpr i32 WARP = 32;

struct __align__(16) Vec16 {
  u32 x, y, z, w;
};

extern __shared__ __align__(128) u8 epcomm_shared[];

// ---- who am I
DEV i32 thread_index() { return (i32)threadIdx.x; }
DEV i32 block_threads() { return (i32)blockDim.x; }
DEV i32 block_index() { return (i32)blockIdx.x; }
DEV i32 grid_blocks() { return (i32)gridDim.x; }
DEV i32 lane_index() { return (i32)(threadIdx.x % WARP); }
DEV i32 warp_index() { return (i32)(threadIdx.x / WARP); }
DEV i32 block_warps() { return (i32)(blockDim.x / WARP); }
DEV u8* smem() { return epcomm_shared; }

// ---- barriers and warp collectives
DEV void block_sync() { __syncthreads(); }
DEV bool block_any(bool mine) { return __syncthreads_or(mine) != 0; }
// Barrier `id` (1 to 15) of `threads` threads, whole warps.
DEV void named_sync(i32 id, i32 threads) { asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
DEV void warp_sync() { __syncwarp(); }
template <class T>
DEV T warp_shfl(T value, i32 source) { return __shfl_sync(~0u, value, source); }
template <class T>
DEV T warp_shfl_xor(T value, i32 mask) { return __shfl_xor_sync(~0u, value, mask); }
template <class T>
DEV T warp_shfl_up(T value, i32 delta) { return __shfl_up_sync(~0u, value, delta); }
DEV u32 warp_ballot(bool mine) { return __ballot_sync(~0u, mine); }
DEV bool warp_any(bool mine) { return __any_sync(~0u, mine) != 0; }
DEV bool warp_all(bool mine) { return __all_sync(~0u, mine) != 0; }
DEV u32 warp_match_any(u32 value) { return __match_any_sync(~0u, value); }
DEV i32 warp_max(i32 value) { return __reduce_max_sync(~0u, value); }
DEV i32 warp_min(i32 value) { return __reduce_min_sync(~0u, value); }

DEV i32 popc(u32 x) { return __popc(x); }
DEV i32 ffs(u32 x) { return __ffs((i32)x); }  // 1-based, 0: no bit is set
DEV i32 clz(u32 x) { return __clz((i32)x); }
DEV u32 lanes_below() {
  u32 mask;
  asm("mov.u32 %0, %%lanemask_lt;" : "=r"(mask));
  return mask;
}

// clang-format off: one instruction, one line
// ---- flags and atomics; the 8-byte ones carry packets {value, epoch}, seen whole
DEV u32 ld_relaxed(const u32* p) { u32 v; asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v; }
DEV u64 ld_relaxed(const u64* p) { u64 v; asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory"); return v; }
DEV u32 ld_acquire(const u32* p) { u32 v; asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v; }
DEV u64 ld_acquire(const u64* p) { u64 v; asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory"); return v; }
DEV void st_relaxed(u32* p, u32 v) { asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
DEV void st_relaxed(u64* p, u64 v) { asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
DEV void st_release(u32* p, u32 v) { asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
DEV void st_release(u64* p, u64 v) { asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
DEV u32 ld_acquire_gpu(const u32* p) { u32 v; asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v; }
DEV void st_release_gpu(u32* p, u32 v) { asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
// acquire and release
DEV u32 atomic_add_gpu(u32* p, u32 v) { u32 old; asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory"); return old; }
DEV u32 atomic_exch_gpu(u32* p, u32 v) { u32 old; asm volatile("atom.acq_rel.gpu.global.exch.b32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory"); return old; }
// old >= limit ? 0 : old + 1
DEV u32 atomic_inc_wrap_gpu(u32* p, u32 limit) { u32 old; asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(limit) : "memory"); return old; }
// relaxed; shared or global memory
DEV u32 atomic_add(u32* p, u32 v) { return atomicAdd(p, v); }
DEV u32 atomic_or(u32* p, u32 v) { return atomicOr(p, v); }
DEV void red_add_release_sys(u32* p, u32 v) { asm volatile("red.release.sys.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }

DEV void fence_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
DEV void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
DEV void fence_async() { asm volatile("fence.proxy.async;" ::: "memory"); }                           // between plain accesses and bulk copies
DEV void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }        // the same, shared memory only
DEV void fence_alias() { asm volatile("fence.proxy.alias;" ::: "memory"); }                           // between two addresses of one page

// ---- global memory
// Data that may have arrived during this kernel.
DEV Vec16 load16(const void* p) { Vec16 v; asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory"); return v; }
// Data of earlier kernels only.
DEV Vec16 load16_const(const void* p) { Vec16 v; asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p)); return v; }
template <class T>
DEV T load_const(const T* p) { return __ldg(p); }
DEV void store16(void* p, Vec16 v) { asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory"); }
// A packet that the peer sees whole. The last word carries the epoch.
DEV Vec16 packet_load(const void* p) { Vec16 v; asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory"); return v; }
DEV void packet_store(void* p, Vec16 v) { asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory"); }

// A 128-byte line: 112 bytes of data, 16 from each of the first 7 of 8 consecutive lanes, and the epoch in the place of
// the eighth lane. All 32 lanes call, each group of 8 with the start of its own line; null: no line for this group.
DEV void line_store(void* line, Vec16 mine, u32 epoch) {
  i32 part = lane_index() % 8;
  if (part == 7) mine = Vec16{epoch, epoch, epoch, epoch};
  if (line != nullptr) packet_store((u8*)line + part * 16, mine);
}
// True when all lines of the warp have the epoch; only then is `mine` of use (lanes 0 to 6 of a line).
DEV bool line_load(const void* line, Vec16& mine, u32 epoch) {
  i32 part = lane_index() % 8;
  Vec16 seen = Vec16{epoch, epoch, epoch, epoch};
  if (line != nullptr) seen = packet_load((const u8*)line + part * 16);
  if (!__all_sync(~0u, part != 7 || seen.x == epoch)) return false;
  mine = seen;
  return true;
}
// Line line(i) of every i < N, all under way together; null: mine[i] is left alone. Until it returns true the others are of no use.
template <i32 N, class Line>
DEV bool lines_load(Line line, Vec16 (&mine)[N], u32 epoch) {
  i32 part = lane_index() % 8;
  u32 loaded = 0;
#pragma unroll
  for (i32 i = 0; i < N; i++) {
    const void* at = line(i);
    if (at == nullptr) continue;
    mine[i] = packet_load((const u8*)at + part * 16);
    loaded |= 1u << i;
  }
  bool here = true;
#pragma unroll
  for (i32 i = 0; i < N; i++) here = here && (part != 7 || (loaded >> i & 1) == 0 || mine[i].x == epoch);
  return __all_sync(~0u, here) != 0;
}

// ---- mbarriers and bulk copies
DEV u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEV void mbarrier_init(u64* b, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(count) : "memory"); }
// After the last mbarrier_init and before the first use by a bulk copy.
DEV void mbarrier_fence() { asm volatile("fence.mbarrier_init.release.cluster;\n\tfence.proxy.async.shared::cta;" ::: "memory"); }
// One arrival, and `bytes` more to come before the phase is complete.
DEV void mbarrier_expect(u64* b, u32 bytes) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)), "r"(bytes) : "memory"); }
// Returns when the phase of this parity (0 first) is complete.
DEV void mbarrier_wait(u64* b, u32 parity) {
  u32 done;
  do {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(shared_address(b)), "r"(parity) : "memory");
  } while (!done);
}
DEV void row_load(void* shared, const void* global, u32 bytes, u64* b) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(shared)), "l"(global), "r"(bytes), "r"(shared_address(b)) : "memory");
}
// fence_async_shared() first if threads wrote the source.
DEV void row_store(void* global, const void* shared, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared_address(shared)), "r"(bytes) : "memory");
}
DEV void row_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// All but the latest N groups of this thread's stores are complete at the destination / have read their source.
template <i32 N>
DEV void row_wait() { asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory"); }
template <i32 N>
DEV void row_wait_read() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory"); }

// ---- time
DEV u64 clock_ns() { u64 t; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)); return t; }
DEV void spin_hint() { __nanosleep(20); }
DEV void poll_hint() {}  // between polls where every nanosecond counts

// ---- arithmetic that is never contracted or reassociated
DEV f32 fma_rn(f32 x, f32 y, f32 z) { return __fmaf_rn(x, y, z); }
DEV f32 add_rn(f32 x, f32 y) { return __fadd_rn(x, y); }
DEV f32 mul_rn(f32 x, f32 y) { return __fmul_rn(x, y); }
DEV f32 div_rn(f32 x, f32 y) { return __fdiv_rn(x, y); }
DEV u32 f32_bits(f32 x) { return __float_as_uint(x); }
DEV f32 f32_from_bits(u32 bits) { return __uint_as_float(bits); }
// clang-format on
#endif
