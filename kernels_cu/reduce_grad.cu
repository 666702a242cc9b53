// reduce_grad: the fp32 gradients that lie in everybody's prefetch slots are added to the experts' homes, of all pools at once,
// and the slots are cleared.
//
// The home does both: it pulls home row + slots in ascending rank, in fp32, the same order always, and pushes zeros back over
// what it has read. A rank with copies has none of its own experts copied away, so these zeros go where the wire is idle, and
// clearing takes no time of its own. A home starts when the slots' owners have entered; an owner ends when the homes of its
// copies have left its slots (`left` word).
#include "protocol.cuh"

constexpr i32 PIECE_BYTES = 16 * 1024;  // that one warp adds of one expert at a time

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

// home += the slots of every rank that holds a copy, ascending; these are zeroes then. A lane's N vectors lie STEP bytes apart, its
// first at `home`; `copy` is the same place in rank 0's slot 0.
constexpr i32 STEP = WARP * 16;

template <int N>
DEV void add_vectors(const ReduceGradArgs& a, i64 stride, const i32* slot_of, u8* home, u8* copy) {
  Vec16 total[N], v[N], zero;
  zero.x = zero.y = zero.z = zero.w = 0;
#pragma unroll
  for (i32 j = 0; j < N; j++) total[j] = load16(home + j * STEP);
#pragma unroll 1
  for (i32 r = 0; r < a.world.ranks; r++) {
    if (slot_of[r] < 0) continue;
    u8* slot = copy + ((i64)r * a.experts_per_rank + slot_of[r]) * stride;
#pragma unroll
    for (i32 j = 0; j < N; j++) v[j] = load16(slot + j * STEP);
#pragma unroll
    for (i32 j = 0; j < N; j++) add4(total[j], v[j]);
#pragma unroll
    for (i32 j = 0; j < N; j++) store16(slot + j * STEP, zero);
  }
#pragma unroll
  for (i32 j = 0; j < N; j++) store16(home + j * STEP, total[j]);
}

DEV void add_piece(const ReduceGradArgs& a, const Pool& pool, const i32* slot_of, u8* home, i64 offset, i32 bytes) {
  constexpr i32 IN_FLIGHT = 8;
  u8* copy = pool.all_slots + offset;
  home += offset;
  i32 i = lane_index() * 16;
#pragma unroll 1
  for (; i + (IN_FLIGHT - 1) * STEP < bytes; i += IN_FLIGHT * STEP) add_vectors<IN_FLIGHT>(a, pool.stride, slot_of, home + i, copy + i);
#pragma unroll 1
  for (; i < bytes; i += STEP) add_vectors<1>(a, pool.stride, slot_of, home + i, copy + i);
}

DEV bool add_copies(const ReduceGradArgs& a, u32 epoch) {
  const Copies copies = find_copies(a);
  const i32 ranks = a.world.ranks, warps = grid_blocks() * block_warps();
  // Whoever holds a copy may be any of them.
  if (copies.count > 0 && !peers_entered(a.world, OP_REDUCE_GRAD, epoch)) return false;
  // The pieces of all pools in one row, dealt out to the warps.
  i32 item = warp_index() * grid_blocks() + block_index();
  for (i32 p = 0; p < a.num_pools; p++) {
    const Pool& pool = a.pools[p];
    const i32 pieces = (pool.bytes + PIECE_BYTES - 1) / PIECE_BYTES, all = pieces * copies.count;
    for (; item < all; item += warps) {
      const i32 number = item / pieces, local = copies.expert[number];
      const i64 offset = (i64)(item - number * pieces) * PIECE_BYTES, rest = pool.bytes - offset;
      u8* home = pool.full + ((i64)a.world.rank * a.experts_per_rank + local) * pool.stride;
      add_piece(a, pool, copies.slot_of + local * ranks, home, offset, rest < PIECE_BYTES ? rest : PIECE_BYTES);
    }
    item -= all;
  }
  return true;
}

// The last block to finish tells all peers that this rank has left their slots.
DEV void tell_left(const ReduceGradArgs& a, u32 epoch) {
  block_sync();
  if (thread_index() != 0) return;
  const u32 others = grid_blocks() - 1;
  if (atomic_inc_wrap_gpu(a.blocks_done, others) != others) return;
  fence_sys();
  for (i32 r = 0; r < a.world.ranks; r++) st_relaxed((u32*)(chunk(a.world, r) + a.left) + a.world.rank, epoch);
}

// The kernel ends when the homes of this rank's copies have left: one warp that waits is enough.
DEV void wait_for_homes(const ReduceGradArgs& a, u32 epoch) {
  if (block_index() + warp_index() != 0) return;
  const i32* expert_in = a.experts_to_copy + (i64)a.world.rank * a.experts_per_rank;
  const u32* left = (u32*)(chunk(a.world, a.world.rank) + a.left);
  i32 gone = -1;
  for (i32 slot = lane_index(); slot < a.experts_per_rank; slot += WARP) {
    const i32 expert = load_const(expert_in + slot), home = expert / a.experts_per_rank;
    if (expert < 0 || (home != gone && !wait_until(a.world, left + home, epoch, OP_REDUCE_GRAD, home))) return;
    gone = home;
  }
}

KERNEL(reduce_grad, ReduceGradArgs) {
  u32 epoch;
  if (!begin_call(a.world, OP_REDUCE_GRAD, a.epochs, epoch)) return;
  const bool complete = add_copies(a, epoch);
  if (!block_any(!complete)) {
    tell_left(a, epoch);
    wait_for_homes(a, epoch);
  }
  end_call(a.epochs, epoch);
}
