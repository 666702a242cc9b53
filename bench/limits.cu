// What the machine can do, in the project's own vocabulary: copies over NVLink and through local memory by the number
// of SMs, the flag round trip between two ranks, and a kernel that does nothing. One block an SM, every warp moves
// pieces of 4 KB with 8 loads of 16 bytes in flight a lane.
#include "device.cuh"

constexpr i32 IN_FLIGHT = 8;
constexpr i32 PIECE = WARP * IN_FLIGHT;  // in Vec16

// The peer that piece `i` goes to or comes from: all peers in turn, so that no single link is the limit.
DEV i32 peer_of(i64 i, i32 rank, i32 ranks) { return ranks == 1 ? rank : (rank + 1 + i32(i % (ranks - 1))) % ranks; }

// `pieces` pieces from `from` to `to`, where an address of rank r lies r strides behind rank 0's (0 = local memory).
extern "C" __global__ void __launch_bounds__(1024, 1)
    limit_copy(Vec16* to, i64 to_stride, const Vec16* from, i64 from_stride, i64 pieces, i32 rank, i32 ranks) {
  i64 step = i64(grid_blocks()) * block_warps();
  for (i64 i = i64(block_index()) * block_warps() + warp_index(); i < pieces; i += step) {
    i64 peer = peer_of(i, rank, ranks);
    const Vec16* source = from + peer * from_stride + i * PIECE + lane_index();
    Vec16* target = to + peer * to_stride + i * PIECE + lane_index();
    Vec16 row[IN_FLIGHT];
#pragma unroll
    for (i32 j = 0; j < IN_FLIGHT; ++j) row[j] = load16(source + j * WARP);
#pragma unroll
    for (i32 j = 0; j < IN_FLIGHT; ++j) store16(target + j * WARP, row[j]);
  }
}

// Every piece to `copies` places in local memory, `pieces` pieces apart.
extern "C" __global__ void __launch_bounds__(1024, 1)
    limit_fanout(Vec16* to, const Vec16* from, i64 pieces, i32 copies) {
  i64 step = i64(grid_blocks()) * block_warps();
  for (i64 i = i64(block_index()) * block_warps() + warp_index(); i < pieces; i += step) {
    const Vec16* source = from + i * PIECE + lane_index();
    Vec16 row[IN_FLIGHT];
#pragma unroll
    for (i32 j = 0; j < IN_FLIGHT; ++j) row[j] = load16(source + j * WARP);
    for (i32 copy = 0; copy < copies; ++copy) {
      Vec16* target = to + (copy * pieces + i) * PIECE + lane_index();
#pragma unroll
      for (i32 j = 0; j < IN_FLIGHT; ++j) store16(target + j * WARP, row[j]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(1024, 1) limit_fill(Vec16* to, i64 pieces) {
  i64 step = i64(grid_blocks()) * block_warps();
  for (i64 i = i64(block_index()) * block_warps() + warp_index(); i < pieces; i += step)
#pragma unroll
    for (i32 j = 0; j < IN_FLIGHT; ++j) store16(to + i * PIECE + j * WARP + lane_index(), Vec16{0, 0, 0, 0});
}

// `turns` round trips of a flag between two ranks, values `first + 1 ... first + turns`. A wait of more than
// `timeout_ns` sets *late and ends the kernel.
extern "C" __global__ void limit_flag(u32* theirs, const u32* mine, u32 first, u32 turns, i32 begins, i64 timeout_ns,
                                      u32* late) {
  u64 deadline = clock_ns() + timeout_ns;
  for (u32 turn = first + 1; turn != first + turns + 1; ++turn) {
    if (begins) st_release(theirs, turn);
    while (i32(ld_acquire(mine) - turn) < 0)
      if (clock_ns() > deadline) {
        *late = 1;
        return;
      }
    if (!begins) st_release(theirs, turn);
  }
}

extern "C" __global__ void limit_nothing(u64) {}
