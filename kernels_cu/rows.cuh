// What dispatch and combine share: the places of one token's entries, a lane an entry, and the copy of a row.
#pragma once
#include "protocol.cuh"

constexpr u32 NOWHERE = 0xffffffffu;

// Entry `lane` of a token: the rank and the slot it goes to. Lanes behind top-k and masked entries go nowhere.
struct Entry {
  u32 rank;
  i32 slot;
};

DEV Entry entry_of(const i32* dst, i32 token, i32 topk, i32 row_capacity) {
  const i32 lane = lane_index();
  const i32 place = lane < topk ? load_const(dst + (i64)token * topk + lane) : -1;
  Entry e;
  e.rank = place >= 0 ? (u32)(place / row_capacity) : NOWHERE;
  e.slot = place >= 0 ? place - (i32)e.rank * row_capacity : -1;
  return e;
}

// The largest number of tokens of any rank: loops over tokens end there, not at the capacity.
DEV i32 most_tokens(const i32* num_tokens_per_rank, i32 ranks) {
  i32 most = 0;
  for (i32 r = lane_index(); r < ranks; r += WARP) most = max(most, load_const(num_tokens_per_rank + r));
  for (i32 step = WARP / 2; step > 0; step /= 2) most = max(most, warp_shfl_xor(most, step));
  return most;
}

// Copies a row through registers to the slots that lanes 1..n-1 hold; lane 0 holds the slot it lies in.
DEV void copy_to_duplicates(u8* rows, i32 slot, i32 n, i32 row_bytes) {
  constexpr i32 IN_FLIGHT = 7;
  const i32 vectors = row_bytes / 16, lane = lane_index();
  const u8* source = rows + (i64)warp_shfl(slot, 0) * row_bytes;
#pragma unroll 1
  for (i32 first = 0; first < vectors; first += WARP * IN_FLIGHT) {
    Vec16 v[IN_FLIGHT];
#pragma unroll
    for (i32 j = 0; j < IN_FLIGHT; j++) {
      const i32 i = first + j * WARP + lane;
      if (i < vectors) v[j] = load16(source + (i64)i * 16);
    }
#pragma unroll 1
    for (i32 d = 1; d < n; d++) {
      u8* target = rows + (i64)warp_shfl(slot, d) * row_bytes;
#pragma unroll
      for (i32 j = 0; j < IN_FLIGHT; j++) {
        const i32 i = first + j * WARP + lane;
        if (i < vectors) store16(target + (i64)i * 16, v[j]);
      }
    }
  }
}

DEV void zero_row(u8* row, i32 row_bytes) {
  Vec16 zero;
  zero.x = zero.y = zero.z = zero.w = 0;
  for (i32 i = lane_index(); i < row_bytes / 16; i += WARP) store16(row + (i64)i * 16, zero);
}
