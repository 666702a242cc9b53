// prefetch: pulls the experts that this step copies to this rank from their homes into the own prefetch slots, of all pools at once.
//
// It only reads peers' memory and waits for nobody: weights do not change between a step's plan and its last use (docs/memory.md).
#include "protocol.cuh"

constexpr i32 PIECE_VECTORS = 64 * WARP;  // 16-byte vectors that one warp copies of one expert at a time: 32 KB

DEV void copy_piece(u8* target, const u8* source, i64 vectors) {
  constexpr i32 IN_FLIGHT = 8;
#pragma unroll 1
  for (i64 start = 0; start < vectors; start += WARP * IN_FLIGHT) {
    const i64 first = start + lane_index();
    Vec16 v[IN_FLIGHT];
#pragma unroll
    for (i32 j = 0; j < IN_FLIGHT; j++)
      if (first + j * WARP < vectors) v[j] = load16(source + (first + j * WARP) * 16);
#pragma unroll
    for (i32 j = 0; j < IN_FLIGHT; j++)
      if (first + j * WARP < vectors) store16(target + (first + j * WARP) * 16, v[j]);
  }
}

KERNEL(prefetch, PrefetchArgs) {
  if (!may_begin(a.world, OP_PREFETCH, 0)) return;  // after a plan that came to no end, its arrays hold anything
  const i32* expert_in = a.experts_to_copy + (i64)a.world.rank * a.experts_per_rank;
  i32 slots = 0;  // the used ones come first
  while (slots < a.experts_per_rank && load_const(expert_in + slots) >= 0) slots++;
  const i32 warp = warp_index() * grid_blocks() + block_index(), warps = grid_blocks() * block_warps();
  i64 passed = 0;  // pieces of earlier pools
  for (i32 p = 0; p < a.num_pools; p++) {
    const Pool& pool = a.pools[p];
    const i64 vectors = pool.bytes / 16, pieces = (vectors + PIECE_VECTORS - 1) / PIECE_VECTORS, all = pieces * slots;
    for (i64 item = (warp - passed % warps + warps) % warps; item < all; item += warps) {
      const i32 slot = item / pieces;
      const i64 offset = item % pieces * PIECE_VECTORS;
      const u8* source = pool.full + load_const(expert_in + slot) * pool.stride;
      u8* target = pool.full + (a.experts + slot) * pool.stride;
      const i64 rest = vectors - offset;
      copy_piece(target + offset * 16, source + offset * 16, rest < PIECE_VECTORS ? rest : PIECE_VECTORS);
    }
    passed += all;
  }
}
