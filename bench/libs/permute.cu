// The local kernels of the NCCL exchange: count entries, lay the groups out, place every entry, move and sum rows.
//
// All rows lie in one store: [rows grouped by local expert | rows to send, by (rank, expert) | rows received, by
// (source, expert)]. An entry's `position` is its row in the store: grouped if its expert is here, else among the
// rows to send; so rows for the own rank are moved once, and combine reads own and returned rows alike.
#include "device.cuh"
#include "numeric.cuh"

constexpr i32 IN_FLIGHT = 7;

DEV i64 first_warp() { return i64(block_index()) * block_warps() + warp_index(); }
DEV i64 all_warps() { return i64(grid_blocks()) * block_warps(); }

// counts[e] += entries of expert e. Shared memory: `experts` words.
extern "C" __global__ void count_entries(const i32* topk_idx, i32 entries, i32 experts, u32* counts) {
  u32* mine = reinterpret_cast<u32*>(smem());
  for (i32 e = thread_index(); e < experts; e += block_threads()) mine[e] = 0;
  block_sync();
  for (i32 i = block_index() * block_threads() + thread_index(); i < entries; i += grid_blocks() * block_threads())
    if (topk_idx[i] >= 0) atomic_add(&mine[topk_idx[i]], 1);
  block_sync();
  for (i32 e = thread_index(); e < experts; e += block_threads())
    if (mine[e]) atomic_add(&counts[e], mine[e]);
}

// out[i] = first + values of all before i, by one block: a run of values a thread, then all runs.
template <class Value>
DEV void exclusive_sums(Value value, i32 n, u32 first, u32* out, u32* runs) {
  i32 run = (n + block_threads() - 1) / block_threads();
  i32 begin = min(thread_index() * run, n), end = min(begin + run, n);
  u32 sum = 0;
  for (i32 i = begin; i < end; ++i) sum += value(i);
  runs[thread_index()] = sum;
  block_sync();
  for (i32 reach = 1; reach < block_threads(); reach *= 2) {
    u32 add = thread_index() >= reach ? runs[thread_index() - reach] : 0;
    block_sync();
    runs[thread_index()] += add;
    block_sync();
  }
  u32 at = first + runs[thread_index()] - sum;
  for (i32 i = begin; i < end; ++i) {
    out[i] = at;
    at += value(i);
  }
  block_sync();
}

// One block. sent [E] and received [R, E/R] are the counts; `cursor` [E] becomes the position of the first entry of every
// expert, `staged` and `grouped` [R, E/R] where the rows of (source, expert) begin among the received and the grouped rows.
// `ends` [E/R]: padded end of every group. `own` [E]: scratch. Shared memory: one word a thread.
extern "C" __global__ void lay_out(const u32* sent, const u32* received, i32 rank, i32 ranks, i32 experts, i32 padding,
                                   i32 send_area, u32* cursor, u32* staged, u32* grouped, u32* ends) {
  u32* runs = reinterpret_cast<u32*>(smem());
  i32 epn = experts / ranks;
  auto group_rows = [=](i32 e) {
    u32 rows = 0;
    for (i32 r = 0; r < ranks; ++r) rows += received[r * epn + e];
    return (rows + padding - 1) / padding * padding;
  };
  exclusive_sums(group_rows, epn, 0, ends, runs);
  exclusive_sums([=](i32 i) { return i / epn == rank ? 0 : received[i]; }, experts, 0, staged, runs);
  exclusive_sums([=](i32 e) { return e / epn == rank ? 0 : sent[e]; }, experts, send_area, cursor, runs);
  for (i32 e = thread_index(); e < epn; e += block_threads()) {
    u32 at = ends[e];
    for (i32 r = 0; r < ranks; ++r) {
      grouped[r * epn + e] = at;
      at += received[r * epn + e];
    }
    cursor[rank * epn + e] = grouped[rank * epn + e];
    ends[e] += group_rows(e);
  }
}

// position[i]: row of entry i in the store, -1 = no expert. The order inside an expert is that of arrival.
extern "C" __global__ void place_entries(const i32* topk_idx, i32 entries, u32* cursor, i32* position) {
  for (i32 i = block_index() * block_threads() + thread_index(); i < entries; i += grid_blocks() * block_threads())
    position[i] = topk_idx[i] < 0 ? -1 : i32(atomic_add(&cursor[topk_idx[i]], 1));
}

// target[i]: grouped row of the received row i. A block takes a (source, expert) at a time.
extern "C" __global__ void target_rows(const u32* received, const u32* staged, const u32* grouped, i32 rank, i32 ranks,
                                       i32 experts, i32* target) {
  for (i32 i = block_index(); i < experts; i += grid_blocks())
    if (i / (experts / ranks) != rank)
      for (u32 n = thread_index(); n < received[i]; n += block_threads()) target[staged[i] + n] = grouped[i] + n;
}

// Every token's row to the positions of its entries, and their weights beside (weights may be null). Rows of `vectors` Vec16.
extern "C" __global__ void __launch_bounds__(1024, 1)
    permute_rows(const Vec16* x, const f32* weights, const i32* position, i32 tokens, i32 topk, i32 vectors, Vec16* store,
                 f32* store_weights) {
  for (i64 t = first_warp(); t < tokens; t += all_warps()) {
    i32 mine = lane_index() < topk ? position[t * topk + lane_index()] : -1;
    if (weights && mine >= 0) store_weights[mine] = weights[t * topk + lane_index()];
    for (i32 base = lane_index(); base - lane_index() < vectors; base += WARP * IN_FLIGHT) {
      Vec16 piece[IN_FLIGHT];
#pragma unroll
      for (i32 j = 0; j < IN_FLIGHT; ++j)
        if (base + j * WARP < vectors) piece[j] = load16_const(x + t * vectors + base + j * WARP);
      for (i32 k = 0; k < topk; ++k) {
        i64 row = warp_shfl(mine, k);
        if (row < 0) continue;
#pragma unroll
        for (i32 j = 0; j < IN_FLIGHT; ++j)
          if (base + j * WARP < vectors) store16(store + row * vectors + base + j * WARP, piece[j]);
      }
    }
  }
}

// Row i of one side from or to row index[i] of the other, with its weight (weights may be null on both sides).
// gathers = 1: to[i] = from[index[i]]; 0: to[index[i]] = from[i].
extern "C" __global__ void __launch_bounds__(1024, 1)
    move_rows(Vec16* to, const Vec16* from, f32* to_weights, const f32* from_weights, const i32* index, i32 rows, i32 vectors,
              i32 gathers) {
  for (i64 i = first_warp(); i < rows; i += all_warps()) {
    i64 other = index[i];
    i64 source = gathers ? other : i, target = gathers ? i : other;
    if (to_weights && lane_index() == 0) to_weights[target] = from_weights[source];
    for (i32 base = lane_index(); base < vectors; base += WARP * IN_FLIGHT) {
      Vec16 piece[IN_FLIGHT];
#pragma unroll
      for (i32 j = 0; j < IN_FLIGHT; ++j)
        if (base + j * WARP < vectors) piece[j] = load16_const(from + source * vectors + base + j * WARP);
#pragma unroll
      for (i32 j = 0; j < IN_FLIGHT; ++j)
        if (base + j * WARP < vectors) store16(to + target * vectors + base + j * WARP, piece[j]);
    }
  }
}

// out[t] = sum of the rows of t's entries in ascending k, in float32, rounded once to bfloat16; and their weights (may be
// null). Eight rows are loaded before the first is added.
extern "C" __global__ void __launch_bounds__(768, 1)
    sum_rows(const Vec16* store, const f32* store_weights, const i32* position, i32 tokens, i32 topk, i32 vectors, Vec16* out,
             f32* out_weights) {
  for (i64 t = first_warp(); t < tokens; t += all_warps()) {
    i32 mine = lane_index() < topk ? position[t * topk + lane_index()] : -1;
    if (out_weights && lane_index() < topk)
      out_weights[t * topk + lane_index()] = mine < 0 ? 0.f : store_weights[mine];
    for (i32 base = 0; base < vectors; base += WARP) {
      i32 at = base + lane_index();
      f32 sum[8] = {};
      for (i32 begin = 0; begin < topk; begin += 8) {
        Vec16 row[8];
#pragma unroll
        for (i32 k = 0; k < 8; ++k) {
          i64 from = warp_shfl(mine, min(begin + k, WARP - 1));
          bool used = begin + k < topk && from >= 0 && at < vectors;
          row[k] = used ? load16_const(store + from * vectors + at) : Vec16{0, 0, 0, 0};
        }
#pragma unroll
        for (i32 k = 0; k < 8; ++k) {
          f32 values[8];
          unpack<DTYPE_BF16>(row[k], values);
          for (i32 i = 0; i < 8; ++i) sum[i] += values[i];
        }
      }
      if (at < vectors) out[t * vectors + at] = pack<DTYPE_BF16>(sum);
    }
  }
}
