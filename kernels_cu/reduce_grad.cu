// reduce_grad: the fp32 gradients that lie in everybody's prefetch slots are added to the experts' homes, of all pools at once; then
// every rank clears the slots it used.
//
// The home pulls: home row + slots in ascending rank, in fp32, the same order always. A rank clears a slot only after its reader has
// left (`left` word), and a reader starts only when the slot's owner has entered. All blocks read before any of them waits for a
// peer to leave.
#include "protocol.cuh"

constexpr i32 PIECE_VECTORS = 32 * WARP;

// smem: slot_of[local expert][rank] (-1: no copy there), then the copied experts.
struct Copies {
  i32* slot_of;
  i32* expert;
  i32 count;
};

DEV Copies find_copies(const ReduceGradArgs& a) {
  const i32 ranks = a.world.ranks, per_rank = a.experts_per_rank, first = a.world.rank * per_rank;
  Copies copies;
  copies.slot_of = (i32*)smem();
  copies.expert = copies.slot_of + per_rank * ranks;
  i32* count = copies.expert + per_rank;
  for (i32 i = thread_index(); i < per_rank * ranks; i += block_threads()) copies.slot_of[i] = -1;
  block_sync();
  for (i32 i = thread_index(); i < ranks * per_rank; i += block_threads()) {
    const i32 local = load_const(a.experts_to_copy + i) - first;
    if (local >= 0 && local < per_rank) copies.slot_of[local * ranks + i / per_rank] = i % per_rank;
  }
  block_sync();
  if (warp_index() == 0) {
    i32 found = 0;
    for (i32 base = 0; base < per_rank; base += WARP) {
      const i32 local = base + lane_index();
      bool copied = false;
      for (i32 r = 0; local < per_rank && r < ranks; r++) copied |= copies.slot_of[local * ranks + r] >= 0;
      const u32 mask = warp_ballot(copied);
      if (copied) copies.expert[found + popc(mask & lanes_below())] = local;
      found += popc(mask);
    }
    if (lane_index() == 0) *count = found;
  }
  block_sync();
  copies.count = *count;
  return copies;
}

DEV void add4(Vec16& total, Vec16 v) {
  total.x = f32_bits(add_rn(f32_from_bits(total.x), f32_from_bits(v.x)));
  total.y = f32_bits(add_rn(f32_from_bits(total.y), f32_from_bits(v.y)));
  total.z = f32_bits(add_rn(f32_from_bits(total.z), f32_from_bits(v.z)));
  total.w = f32_bits(add_rn(f32_from_bits(total.w), f32_from_bits(v.w)));
}

// home += the slots of every rank that holds a copy, ascending, for one piece of an expert.
DEV void add_piece(const ReduceGradArgs& a, const Pool& pool, const i32* slot_of, u8* home, i64 offset, i64 vectors) {
  constexpr i32 IN_FLIGHT = 8;
#pragma unroll 1
  for (i64 start = 0; start < vectors; start += WARP * IN_FLIGHT) {
    const i64 first = start + lane_index();
    Vec16 total[IN_FLIGHT], v[IN_FLIGHT];
#pragma unroll
    for (i32 j = 0; j < IN_FLIGHT; j++)
      if (first + j * WARP < vectors) total[j] = load16(home + (first + j * WARP) * 16);
#pragma unroll 1
    for (i32 r = 0; r < a.world.ranks; r++) {
      if (slot_of[r] < 0) continue;
      const u8* source = pool.all_slots + ((i64)r * a.experts_per_rank + slot_of[r]) * pool.stride + offset;
#pragma unroll
      for (i32 j = 0; j < IN_FLIGHT; j++)
        if (first + j * WARP < vectors) v[j] = load16(source + (first + j * WARP) * 16);
#pragma unroll
      for (i32 j = 0; j < IN_FLIGHT; j++)
        if (first + j * WARP < vectors) add4(total[j], v[j]);
    }
#pragma unroll
    for (i32 j = 0; j < IN_FLIGHT; j++)
      if (first + j * WARP < vectors) store16(home + (first + j * WARP) * 16, total[j]);
  }
}

DEV bool add_copies(const ReduceGradArgs& a, u32 epoch) {
  const Copies copies = find_copies(a);
  const i32 ranks = a.world.ranks, warp = warp_index() * grid_blocks() + block_index(), warps = grid_blocks() * block_warps();
  bool entered = false;
  i64 passed = 0;
  for (i32 p = 0; p < a.num_pools; p++) {
    const Pool& pool = a.pools[p];
    const i64 vectors = pool.bytes / 16, pieces = (vectors + PIECE_VECTORS - 1) / PIECE_VECTORS, all = pieces * copies.count;
    for (i64 item = (warp - passed % warps + warps) % warps; item < all; item += warps) {
      if (!entered && !peers_entered(a.world, OP_REDUCE_GRAD, epoch)) return false;  // whoever holds a copy may be any of them
      entered = true;
      const i32 local = copies.expert[item / pieces];
      const i64 offset = item % pieces * PIECE_VECTORS, rest = vectors - offset;
      u8* home = pool.full + ((i64)a.world.rank * a.experts_per_rank + local) * pool.stride + offset * 16;
      add_piece(a, pool, copies.slot_of + local * ranks, home, offset * 16, rest < PIECE_VECTORS ? rest : PIECE_VECTORS);
    }
    passed += all;
  }
  return true;
}

// The last block to finish reading tells all peers that this rank has left their slots.
DEV void tell_left(const ReduceGradArgs& a, u32 epoch) {
  block_sync();
  if (thread_index() != 0) return;
  const u32 others = grid_blocks() - 1;
  if (atomic_inc_wrap_gpu(a.blocks_done, others) != others) return;
  fence_sys();
  for (i32 r = 0; r < a.world.ranks; r++) st_relaxed((u32*)(chunk(a.world, r) + a.left) + a.world.rank, epoch);
}

DEV void clear_slots(const ReduceGradArgs& a, u32 epoch) {
  const i32* expert_in = a.experts_to_copy + (i64)a.world.rank * a.experts_per_rank;
  const u32* left = (u32*)(chunk(a.world, a.world.rank) + a.left);
  const i32 warp = warp_index() * grid_blocks() + block_index(), warps = grid_blocks() * block_warps();
  Vec16 zero;
  zero.x = zero.y = zero.z = zero.w = 0;
  for (i32 slot = 0; slot < a.experts_per_rank; slot++) {
    const i32 expert = load_const(expert_in + slot);
    if (expert < 0) return;
    const i32 home = expert / a.experts_per_rank;
    if (!warp_all(lane_index() != 0 || wait_until(a.world, left + home, epoch, OP_REDUCE_GRAD, home))) return;
    for (i32 p = 0; p < a.num_pools; p++) {
      u8* own = a.pools[p].all_slots + ((i64)a.world.rank * a.experts_per_rank + slot) * a.pools[p].stride;
      for (i64 i = (i64)warp * WARP + lane_index(); i < a.pools[p].bytes / 16; i += (i64)warps * WARP) store16(own + i * 16, zero);
    }
  }
}

KERNEL(reduce_grad, ReduceGradArgs) {
  u32 epoch;
  if (!begin_call(a.world, OP_REDUCE_GRAD, a.epochs, epoch)) return;
  const bool complete = add_copies(a, epoch);
  if (!block_any(!complete)) {
    tell_left(a, epoch);
    clear_slots(a, epoch);
  }
  end_call(a.epochs, epoch);
}
