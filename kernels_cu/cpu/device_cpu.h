// The vocabulary of device.cuh on fibers. Atomics are the compiler's: they hold between fibers, between the rank threads
// of a process and between processes that share the memory.
#pragma once
#include <time.h>

#include "launch.h"

#define DEV [[maybe_unused]] static inline
#define DEV_CALL [[maybe_unused]] __attribute__((noinline)) static
#define SHAPE(field) (a.field)
#define SHAPE_MAX(field) MAX_##field

constexpr i32 WARP = simt::WARP_SIZE;

struct alignas(16) Vec16 {
  u32 x, y, z, w;
};

// TSan does not model fences, so there a relaxed access carries what a fence beside it would order.
#if defined(__SANITIZE_THREAD__)
constexpr int RELAXED_LOAD = __ATOMIC_ACQUIRE, RELAXED_STORE = __ATOMIC_RELEASE;
#else
constexpr int RELAXED_LOAD = __ATOMIC_RELAXED, RELAXED_STORE = __ATOMIC_RELAXED;
#endif

// ---- who am I
DEV i32 thread_index() { return i32(simt::self->thread); }
DEV i32 block_threads() { return i32(simt::self->machine->block_threads); }
DEV i32 block_index() { return i32(simt::self->block->index); }
DEV i32 grid_blocks() { return i32(simt::self->machine->grid); }
DEV i32 lane_index() { return thread_index() % WARP; }
DEV i32 warp_index() { return thread_index() / WARP; }
DEV i32 block_warps() { return block_threads() / WARP; }
DEV u8* smem() { return simt::self->block->shared; }

// ---- barriers and warp collectives
DEV void block_sync() { simt::sync_any(false); }
DEV bool block_any(bool mine) { return simt::sync_any(mine); }
DEV void named_sync(i32 id, i32 threads) { simt::sync_named(id, threads); }
DEV void warp_sync() { simt::collect(simt::COLLECTIVE_SYNC, 0, false); }

template <class T>
DEV T warp_shfl(T value, i32 source) {
  static_assert(sizeof(T) <= 8);
  u64 bits = 0;
  __builtin_memcpy(&bits, &value, sizeof value);
  u32 half = simt::collect(simt::COLLECTIVE_SHUFFLE, bits, false);
  __builtin_memcpy(&value, &simt::self->warp->slot[half][source & (WARP - 1)], sizeof value);
  return value;
}
template <class T>
DEV T warp_shfl_xor(T value, i32 mask) { return warp_shfl(value, lane_index() ^ mask); }
template <class T>
DEV T warp_shfl_up(T value, i32 delta) { return warp_shfl(value, lane_index() < delta ? lane_index() : lane_index() - delta); }

DEV u32 warp_ballot(bool mine) { return simt::self->warp->mask[simt::collect(simt::COLLECTIVE_VOTE, 0, mine)]; }
DEV bool warp_any(bool mine) { return warp_ballot(mine) != 0; }
DEV bool warp_all(bool mine) { return warp_ballot(mine) == ~0u; }
DEV u32 warp_match_any(u32 value) {
  const u64* slot = simt::self->warp->slot[simt::collect(simt::COLLECTIVE_MATCH, value, false)];
  u32 mask = 0;
  for (i32 lane = 0; lane < WARP; lane++) mask |= u32(slot[lane] == value) << lane;
  return mask;
}
DEV i32 warp_max(i32 value) {
  const u64* slot = simt::self->warp->slot[simt::collect(simt::COLLECTIVE_MAX, u64(u32(value)), false)];
  for (i32 lane = 0; lane < WARP; lane++) value = i32(slot[lane]) > value ? i32(slot[lane]) : value;
  return value;
}
DEV i32 warp_min(i32 value) { return ~warp_max(~value); }

DEV i32 popc(u32 x) { return __builtin_popcount(x); }
DEV i32 ffs(u32 x) { return __builtin_ffs(i32(x)); }
DEV i32 clz(u32 x) { return x == 0 ? 32 : __builtin_clz(x); }
DEV u32 lanes_below() { return (1u << lane_index()) - 1; }

DEV i32 min(i32 x, i32 y) { return x < y ? x : y; }
DEV i32 max(i32 x, i32 y) { return x > y ? x : y; }

// ---- flags and atomics
DEV u32 ld_relaxed(const u32* p) { return __atomic_load_n(p, RELAXED_LOAD); }
DEV u64 ld_relaxed(const u64* p) { return __atomic_load_n(p, RELAXED_LOAD); }
DEV u32 ld_acquire(const u32* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
DEV u64 ld_acquire(const u64* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
DEV void st_relaxed(u32* p, u32 v) { __atomic_store_n(p, v, RELAXED_STORE); }
DEV void st_relaxed(u64* p, u64 v) { __atomic_store_n(p, v, RELAXED_STORE); }
DEV void st_release(u32* p, u32 v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
DEV void st_release(u64* p, u64 v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
DEV u32 ld_acquire_gpu(const u32* p) { return ld_acquire(p); }
DEV void st_release_gpu(u32* p, u32 v) { st_release(p, v); }
DEV u32 atomic_add_gpu(u32* p, u32 v) { return __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL); }
DEV u32 atomic_exch_gpu(u32* p, u32 v) { return __atomic_exchange_n(p, v, __ATOMIC_ACQ_REL); }
DEV u32 atomic_inc_wrap_gpu(u32* p, u32 limit) {
  u32 old = __atomic_load_n(p, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(p, &old, old >= limit ? 0 : old + 1, true, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) {}
  return old;
}
DEV u32 atomic_add(u32* p, u32 v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
DEV u32 atomic_or(u32* p, u32 v) { return __atomic_fetch_or(p, v, __ATOMIC_RELAXED); }
DEV void red_add_release_sys(u32* p, u32 v) { __atomic_fetch_add(p, v, __ATOMIC_RELEASE); }

#if defined(__SANITIZE_THREAD__)
DEV void fence_sys() {}
#else
DEV void fence_sys() { __atomic_thread_fence(__ATOMIC_ACQ_REL); }
#endif
DEV void fence_gpu() { fence_sys(); }
DEV void fence_async() {}
DEV void fence_async_shared() {}
DEV void fence_alias() {}

// ---- memory
DEV void check_aligned(const void* p) {
  if ((reinterpret_cast<uintptr_t>(p) & 15) != 0) simt::fail("16-byte access at %p, which is not a multiple of 16", p);
}
DEV Vec16 load16(const void* p) {
  check_aligned(p);
  return *static_cast<const Vec16*>(p);
}
DEV Vec16 load16_const(const void* p) { return load16(p); }
template <class T>
DEV T load_const(const T* p) { return *p; }
DEV void store16(void* p, Vec16 v) {
  check_aligned(p);
  *static_cast<Vec16*>(p) = v;
}

// x86-64 with AVX moves 16 aligned bytes as a unit. Elsewhere the upper half carries the order: it is written last and
// read first, so a packet whose last word has the epoch is whole.
DEV Vec16 packet_load(const void* p) {
  check_aligned(p);
  Vec16 v;
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
  typedef long long Pair __attribute__((vector_size(16)));
  Pair pair;
  asm volatile("movdqa %1, %0" : "=x"(pair) : "m"(*static_cast<const Pair*>(p)) : "memory");
  __builtin_memcpy(&v, &pair, 16);
#else
  u64 half[2];
  half[1] = __atomic_load_n(static_cast<const u64*>(p) + 1, __ATOMIC_ACQUIRE);
  half[0] = __atomic_load_n(static_cast<const u64*>(p), __ATOMIC_RELAXED);
  __builtin_memcpy(&v, half, 16);
#endif
  return v;
}
DEV void packet_store(void* p, Vec16 v) {
  check_aligned(p);
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
  typedef long long Pair __attribute__((vector_size(16)));
  Pair pair;
  __builtin_memcpy(&pair, &v, 16);
  asm volatile("movdqa %1, %0" : "=m"(*static_cast<Pair*>(p)) : "x"(pair) : "memory");
#else
  u64 half[2];
  __builtin_memcpy(half, &v, 16);
  __atomic_store_n(static_cast<u64*>(p), half[0], __ATOMIC_RELAXED);
  __atomic_store_n(static_cast<u64*>(p) + 1, half[1], __ATOMIC_RELEASE);
#endif
}

// The warp's lanes are fibers of one OS thread: after a warp barrier, lane 7's release orders the other lanes' stores,
// and its acquire their loads.
DEV void line_store(void* line, Vec16 mine, u32 epoch) {
  i32 part = lane_index() % 8;
  if (line != nullptr && part != 7) store16(static_cast<u8*>(line) + part * 16, mine);
  simt::collect(simt::COLLECTIVE_LINE, 0, false);
  if (line != nullptr && part == 7) st_release(reinterpret_cast<u32*>(static_cast<u8*>(line) + 112), epoch);
}
DEV bool line_load(const void* line, Vec16& mine, u32 epoch) {
  i32 part = lane_index() % 8;
  const u8* at = static_cast<const u8*>(line) + part * 16;
  bool here = line == nullptr || part != 7 || ld_acquire(reinterpret_cast<const u32*>(at)) == epoch;
  if (!warp_all(here)) return false;
  if (line != nullptr && part != 7) mine = load16(at);
  return true;
}

template <i32 N, class Line>
DEV bool lines_load(Line line, Vec16 (&mine)[N], u32 epoch) {
  i32 part = lane_index() % 8;
  bool here = true;
  for (i32 i = 0; i < N && part == 7; i++) {
    const u8* at = line(i);
    here = here && (at == nullptr || ld_acquire(reinterpret_cast<const u32*>(at + 112)) == epoch);
  }
  if (!warp_all(here)) return false;
  for (i32 i = 0; i < N && part != 7; i++) {
    const u8* at = line(i);
    if (at != nullptr) mine[i] = load16(at + part * 16);
  }
  return true;
}

// ---- mbarriers and bulk copies
DEV simt::Mbarrier& as_mbarrier(u64* b) { return *reinterpret_cast<simt::Mbarrier*>(b); }
DEV void mbarrier_init(u64* b, u32 count) { as_mbarrier(b) = {0, count, count, 0}; }
DEV void mbarrier_fence() {}
DEV void mbarrier_expect(u64* b, u32 bytes) { simt::mbarrier_arrive(as_mbarrier(b), bytes); }
DEV void mbarrier_wait(u64* b, u32 parity) { simt::mbarrier_await(as_mbarrier(b), parity); }
DEV void row_load(void* shared, const void* global, u32 bytes, u64* b) { simt::copy_in(shared, global, bytes, as_mbarrier(b)); }
DEV void row_store(void* global, const void* shared, u32 bytes) { simt::copy_out(global, shared, bytes); }
DEV void row_commit() { simt::self->groups++; }
template <i32 N>
DEV void row_wait() { simt::wait_groups(N, simt::Copy::done); }
template <i32 N>
DEV void row_wait_read() { simt::wait_groups(N, simt::Copy::read); }

// ---- time
DEV u64 clock_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return u64(now.tv_sec) * 1000000000u + u64(now.tv_nsec);
}
DEV void spin_hint() { simt::spin(); }
DEV void poll_hint() { simt::spin(); }

// ---- arithmetic that is never contracted (the build says -ffp-contract=off)
template <class T>
DEV T min(T x, T y) { return y < x ? y : x; }
template <class T>
DEV T max(T x, T y) { return x < y ? y : x; }
DEV f32 fma_rn(f32 x, f32 y, f32 z) { return __builtin_fmaf(x, y, z); }
DEV f32 add_rn(f32 x, f32 y) { return x + y; }
DEV f32 mul_rn(f32 x, f32 y) { return x * y; }
DEV f32 div_rn(f32 x, f32 y) { return x / y; }
DEV u32 f32_bits(f32 x) {
  u32 bits;
  __builtin_memcpy(&bits, &x, 4);
  return bits;
}
DEV f32 f32_from_bits(u32 bits) {
  f32 x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}
