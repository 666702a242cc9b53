// low_latency_combine: the rows of the experts back to their tokens, weighted and summed, in one launch.
//
//   rank-local reduce  this rank's rows of a token are summed here (expert-major; rank-major: the caller has done it) and go back as
//                      one row; the source adds the ranks' rows in ascending rank.
//   direct send        every entry's row goes back; the source sums them with its weights in ascending k.
//
// All sums in float32, with fma where there are weights, in a fixed order from +0, and rounded once. A block sends all that it owes
// before its first wait. Nothing is read from the receive slots of dispatch.
#include "low_latency.cuh"

typedef LowLatencyCombineArgs Args;

constexpr i32 TOGETHER = 8;  // rows whose loads go out together

// Lane k: entry k of a token, as far as its row lies here.
struct Rows {
  i32 row;
  f32 weight;
  u32 mask;  // of the entries that lie here
};
DEV Rows rows_of(const Args& a, i32 source, i32 token) {
  const i32 lane = lane_index();
  const i64 entry = ((i64)source * a.capacity + token) * SHAPE(topk) + lane;
  Rows mine = {-1, 0.f, 0};
  if (lane < SHAPE(topk) && token < a.capacity) {
    mine.row = load_const(in_slab<const i32>(a.slab, a.at.rows) + entry);
    if (!SHAPE(rank_major) && !SHAPE(direct_send)) mine.weight = load_const(in_slab<const f32>(a.slab, a.at.weights) + entry);
  }
  mine.mask = warp_ballot(mine.row >= 0);
  return mine;
}

DEV const u8* piece_of_row(const Args& a, i32 row, i32 piece) { return a.x + (i64)row * SHAPE(hidden) * 2 + piece * 16; }

DEV void multiply_add(f32 weight, Vec16 v, f32 (&acc)[8]) {
  f32 x[8];
  unpack<DTYPE_BF16>(v, x);
#pragma unroll
  for (i32 i = 0; i < 8; i++) acc[i] = fma_rn(weight, x[i], acc[i]);
}

// A lane's piece of what this rank has for a token, in rank-local reduce.
DEV Vec16 partial(const Args& a, const Rows& rows, i32 piece) {
  if (SHAPE(rank_major)) {
    const i32 row = warp_shfl(rows.row, ffs(rows.mask) - 1);
    return piece >= 0 ? load16_const(piece_of_row(a, row, piece)) : Vec16{0, 0, 0, 0};
  }
  f32 acc[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  for (u32 left = rows.mask; left != 0;) {
    Vec16 v[TOGETHER];
    u32 next = left;
#pragma unroll
    for (i32 i = 0; i < TOGETHER; i++) {
      const i32 row = warp_shfl(rows.row, ffs(next) - 1);
      if (next != 0 && piece >= 0) v[i] = load16_const(piece_of_row(a, row, piece));
      next &= next - 1;
    }
#pragma unroll
    for (i32 i = 0; i < TOGETHER; i++) {
      const f32 weight = warp_shfl(rows.weight, ffs(left) - 1);
      if (left != 0 && piece >= 0) multiply_add(weight, v[i], acc);
      left &= left - 1;
    }
  }
  return pack<DTYPE_BF16>(acc);
}

// Slots: of the rank that a partial sum comes from, [R][T]; with direct send of the entry, [T][K]. Flags always [R][T].
DEV i64 slot_of_rank(const Args& a, i32 rank, i32 token) { return (i64)rank * a.capacity + token; }

DEV void send(const Args& a, const Wire& wire, i32 source, i32 token, const Rows& rows, u32 epoch) {
  const World& w = a.world;
  if (rows.mask == 0) return;
  for (i32 first = warp_index() * WARP; first < spots_of(wire); first += block_threads()) {
    const i32 spot = first + lane_index(), piece = piece_at(wire, spot);
    if (!SHAPE(direct_send)) {
      put(wire, slot_at(w, wire, source, slot_of_rank(a, w.rank, token)), spot, partial(a, rows, piece), epoch);
      continue;
    }
    for (u32 left = rows.mask; left != 0;) {
      Vec16 v[TOGETHER];
      u32 next = left;
#pragma unroll
      for (i32 i = 0; i < TOGETHER; i++) {
        const i32 row = warp_shfl(rows.row, ffs(next) - 1);
        v[i] = Vec16{0, 0, 0, 0};
        if (next != 0 && piece >= 0) v[i] = load16_const(piece_of_row(a, row, piece));
        next &= next - 1;
      }
#pragma unroll
      for (i32 i = 0; i < TOGETHER; i++) {
        if (left != 0) put(wire, slot_at(w, wire, source, (i64)token * SHAPE(topk) + ffs(left) - 1), spot, v[i], epoch);
        left &= left - 1;
      }
    }
  }
  if (wire.lines) return;
  block_sync();
  if (thread_index() == 0) st_release(flag_at(w, wire, source, slot_of_rank(a, w.rank, token)), epoch);
}

// Without lines: the flags of all peers that send for a token. Lane k: the rank of entry k.
DEV bool wait_flags(const Args& a, const Wire& wire, i32 token, i32 target, u32 epoch) {
  const World& w = a.world;
  for (i32 first = 0; first < SHAPE(ranks); first += WARP) {
    const i32 peer = first + lane_index();
    bool sends = false;
    for (i32 k = 0; k < SHAPE(topk); k++) sends |= warp_shfl(target, k) == peer && peer != w.rank;
    const u32* flag = flag_at(w, wire, w.rank, slot_of_rank(a, peer, token));
    const auto raised = [=](u32& seen) { return !sends || (seen = ld_acquire(flag)) == epoch; };
    if (!warp_wait(w, raised, epoch, OP_LL_COMBINE, peer)) return false;
  }
  return true;
}

DEV void store_sum(const Args& a, i32 token, i32 piece, const f32 (&acc)[8]) {
  if (piece >= 0) store16(a.out + (i64)token * SHAPE(hidden) * 2 + piece * 16, pack<DTYPE_BF16>(acc));
}

// Rank-local reduce: the ranks' rows in ascending rank.
DEV bool add_ranks(const Args& a, const Wire& wire, i32 token, i32 target, const Rows& own, u32 epoch) {
  const World& w = a.world;
  for (i32 first = warp_index() * WARP; first < spots_of(wire); first += block_threads()) {
    const i32 spot = first + lane_index(), piece = piece_at(wire, spot);
    Vec16 mine = Vec16{0, 0, 0, 0};
    if (own.mask != 0) mine = partial(a, own, piece);
    f32 acc[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    for (i32 base = 0; base < SHAPE(ranks); base += TOGETHER) {
      Vec16 part[TOGETHER];
      u32 sends = 0;
      i32 peer = -1;
#pragma unroll
      for (i32 i = 0; i < TOGETHER; i++) {
        const i32 rank = base + i;
        if (rank >= SHAPE(ranks) || !warp_any(target == rank)) continue;
        sends |= 1u << i;
        if (rank == w.rank) {
          part[i] = mine;
          continue;
        }
        peer = rank;
        if (!wire.lines && piece >= 0) part[i] = load16(slot_at(w, wire, w.rank, slot_of_rank(a, rank, token)) + piece * 16);
      }
      const auto line = [&](i32 i) -> const u8* {
        if (base + i >= SHAPE(ranks) || base + i == w.rank || (sends >> i & 1) == 0) return nullptr;
        return line_at(wire, slot_at(w, wire, w.rank, slot_of_rank(a, base + i, token)), spot);
      };
      const auto came = [&](u32&) { return lines_load<TOGETHER>(line, part, epoch); };
      if (wire.lines && !warp_wait(w, came, epoch, OP_LL_COMBINE, peer)) return false;
#pragma unroll
      for (i32 i = 0; i < TOGETHER; i++) {
        if ((sends >> i & 1) == 0 || piece < 0) continue;
        f32 x[8];
        unpack<DTYPE_BF16>(part[i], x);
#pragma unroll
        for (i32 j = 0; j < 8; j++) acc[j] = add_rn(acc[j], x[j]);
      }
    }
    store_sum(a, token, piece, acc);
  }
  return true;
}

// Direct send: the entries' rows in ascending k.
DEV bool add_entries(const Args& a, const Wire& wire, i32 token, i32 target, const Rows& own, u32 epoch) {
  const World& w = a.world;
  const i32 lane = lane_index();
  const i64 entry = (i64)token * SHAPE(topk);
  f32 weight = 0.f;
  if (lane < SHAPE(topk)) weight = load_const(in_slab<const f32>(a.slab, a.at.route_weights) + entry + lane);
  const u32 entries = warp_ballot(target >= 0);
  for (i32 first = warp_index() * WARP; first < spots_of(wire); first += block_threads()) {
    const i32 spot = first + lane, piece = piece_at(wire, spot);
    f32 acc[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    for (u32 left = entries; left != 0;) {
      Vec16 v[TOGETHER];
      u32 next = left, remote = 0;
      i32 peer = -1;
#pragma unroll
      for (i32 i = 0; i < TOGETHER; i++) {
        const i32 k = ffs(next) - 1, rank = warp_shfl(target, k), row = warp_shfl(own.row, k);
        if (next != 0 && rank != w.rank) {
          remote |= 1u << i;
          peer = rank;
          if (!wire.lines && piece >= 0) v[i] = load16(slot_at(w, wire, w.rank, entry + k) + piece * 16);
        } else if (next != 0 && piece >= 0) {
          v[i] = load16_const(piece_of_row(a, row, piece));
        }
        next &= next - 1;
      }
      u32 rest = 0;
      const auto line = [&](i32 i) -> const u8* {
        if (i == 0) rest = left;
        const i32 k = ffs(rest) - 1;
        rest &= rest - 1;
        return remote >> i & 1 ? line_at(wire, slot_at(w, wire, w.rank, entry + k), spot) : nullptr;
      };
      const auto came = [&](u32&) { return lines_load<TOGETHER>(line, v, epoch); };
      if (wire.lines && !warp_wait(w, came, epoch, OP_LL_COMBINE, peer)) return false;
#pragma unroll
      for (i32 i = 0; i < TOGETHER; i++) {
        const f32 factor = warp_shfl(weight, ffs(left) - 1);
        if (left != 0 && piece >= 0) multiply_add(factor, v[i], acc);
        left &= left - 1;
      }
    }
    store_sum(a, token, piece, acc);
  }
  return true;
}

KERNEL(low_latency_combine, LowLatencyCombineArgs) {
  const World& w = a.world;
  const i32 ranks = SHAPE(ranks), topk = SHAPE(topk), me = w.rank, first = first_token();
  const i32 next_rank = me + 1 < ranks ? me + 1 : 0;
  const Rows early = rows_of(a, next_rank, first);
  u32 epoch;
  if (!start_call<true>(w, OP_LL_COMBINE, a.epochs, epoch)) return;

  const i64 slots = (i64)a.capacity * (SHAPE(direct_send) ? topk : ranks), flags = (i64)a.capacity * ranks;
  const Wire wire = wire_of(a.slots, a.flags, slots, flags, SHAPE(hidden) * 2, SHAPE(lines), epoch);

  for (i32 token = first; token < a.capacity; token += grid_blocks())
    for (i32 i = 1; i < ranks; i++) {
      const i32 source = me + i < ranks ? me + i : me + i - ranks;
      send(a, wire, source, token, token == first && i == 1 ? early : rows_of(a, source, token), epoch);
    }
  if (block_index() == 0) tell_entered(w, OP_LL_COMBINE, epoch);

  for (i32 token = first; token < a.num_tokens; token += grid_blocks()) {
    const i32 lane = lane_index();
    i32 target = -1;
    if (lane < topk) target = load_const(in_slab<const i32>(a.slab, a.at.targets) + (i64)token * topk + lane);
    const Rows own = rows_of(a, me, token);
    if (!wire.lines && !wait_flags(a, wire, token, target, epoch)) return;
    if (!(SHAPE(direct_send) ? add_entries(a, wire, token, target, own, epoch) : add_ranks(a, wire, token, target, own, epoch))) return;
  }
}
