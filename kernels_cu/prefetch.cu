// prefetch: pulls the experts that this step copies to this rank from their homes into the own prefetch slots, of all pools at
// once.
//
// It only reads peers' memory and waits for nobody: weights do not change between a step's plan and its last use
// (docs/memory.md).
#include "protocol.cuh"

constexpr i32 PIECE_BYTES = 32 * 1024;  // that one warp copies of one expert at a time

// A lane's N vectors lie a step of the warp apart. Moves both pointers on by N steps.
constexpr i32 STEP = WARP * 16;

template <int N>
DEV void copy_vectors(u8*& target, const u8*& source) {
  Vec16 v[N];
#pragma unroll
  for (i32 j = 0; j < N; j++) v[j] = load16(source + j * STEP);
#pragma unroll
  for (i32 j = 0; j < N; j++) store16(target + j * STEP, v[j]);
  target += N * STEP;
  source += N * STEP;
}

DEV void copy_piece(u8* target, const u8* source, i32 bytes) {
  constexpr i32 IN_FLIGHT = 8;
  const i32 first = lane_index() * 16;
  i32 left = bytes - first;
  target += first;
  source += first;
#pragma unroll 1
  for (; left > (IN_FLIGHT - 1) * STEP; left -= IN_FLIGHT * STEP) copy_vectors<IN_FLIGHT>(target, source);
#pragma unroll 1
  for (; left > 0; left -= STEP) copy_vectors<1>(target, source);
}

KERNEL(prefetch, PrefetchArgs) {
  if (!may_begin(a.world, OP_PREFETCH, 0)) return;  // after a plan that came to no end, its arrays hold anything
  const i32* expert_in = a.experts_to_copy + (i64)a.world.rank * a.experts_per_rank;
  i32 slots = 0;  // the used ones come first
  while (slots < a.experts_per_rank && load_const(expert_in + slots) >= 0) slots++;
  const i32 warps = grid_blocks() * block_warps();
  // The pieces of all pools in one row, dealt out to the warps.
  i32 item = warp_index() * grid_blocks() + block_index();
  for (i32 p = 0; p < a.num_pools; p++) {
    const Pool& pool = a.pools[p];
    const i32 pieces = (pool.bytes + PIECE_BYTES - 1) / PIECE_BYTES, all = pieces * slots;
    for (; item < all; item += warps) {
      const i32 slot = item / pieces;
      const i64 offset = (i64)(item - slot * pieces) * PIECE_BYTES, rest = pool.bytes - offset;
      const u8* source = pool.full + load_const(expert_in + slot) * pool.stride;
      u8* target = pool.full + (a.experts + slot) * pool.stride;
      copy_piece(target + offset, source + offset, rest < PIECE_BYTES ? rest : PIECE_BYTES);
    }
    item -= all;
  }
}
