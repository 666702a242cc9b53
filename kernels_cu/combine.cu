// combine: every token's rows back to it, summed.
//
// Each rank sums the rows of a peer's token in fp32, rounds the partial sum once to the row type and pushes it into a ring at the
// token's home; there the partial sums of all ranks are added in ascending rank order, in fp32, and rounded once. Two roles by
// warp in every block:
//
//   produce  takes the peers' tokens token-major over all peers, sums this rank's rows of each, stores the partial sum into the
//            peer's ring and raises the token's flag there.
//   consume  takes the own tokens: waits for the flags of the ranks that hold rows of it, adds own and partial sums.
//
// The ring between two ranks holds `ring_tokens` tokens: slot = token mod ring_tokens. A half of it may be written again when the
// home has consumed the tokens that lay there before, which it says with one credit word a half. Produce warps wait only for
// entry words and credits, consume warps only for flags; credits of early tokens never depend on later tokens, so with token-major
// order no cycle of waits can close.
#include "numeric.cuh"
#include "rows.cuh"

// A rank has one ring a peer, none for itself.
DEV i64 ring_index(const CombineArgs& a, i32 at, i32 source, i32 token) {
  return (i64)(source - (source > at)) * a.ring_tokens + token % a.ring_tokens;
}

DEV u8* ring_slot(const CombineArgs& a, i32 at, i32 source, i32 token) {
  return chunk(a.world, at) + a.ring + ring_index(a, at, source, token) * SHAPE(row_bytes);
}

DEV f32* ring_weights_slot(const CombineArgs& a, i32 at, i32 source, i32 token) {
  return (f32*)(chunk(a.world, at) + a.ring_weights) + ring_index(a, at, source, token) * SHAPE(topk);
}

DEV u32* flag_of(const CombineArgs& a, i32 at, i32 source, i32 token) {
  return (u32*)(chunk(a.world, at) + a.flags) + (i64)source * a.capacity + token;
}

// At rank `at`: the word that rank `home` raises when it has consumed all its tokens of the half `half`.
DEV u32* credit_of(const CombineArgs& a, i32 at, i32 home, i32 half) {
  return (u32*)(chunk(a.world, at) + a.credits) + (i64)half * SHAPE(ranks) + home;
}

template <int DTYPE>
DEV void add_vector(f32* total, Vec16 v) {
  f32 element[vector_width<DTYPE>()];
  unpack<DTYPE>(v, element);
#pragma unroll
  for (i32 i = 0; i < vector_width<DTYPE>(); i++) total[i] += element[i];
}

// What is not there is loaded as zeros, which change no sum: sums start at +0 and never become -0.
template <int COLUMNS, int ROWS>
DEV void load_rows(Vec16 (&v)[ROWS][COLUMNS], const u8* x, i32 row, i32 done, i32 n, i32 first, i32 vectors, bool whole) {
#pragma unroll
  for (i32 r = 0; r < ROWS; r++) {
    const u8* source = x + (i64)warp_shfl(row, min(done + r, WARP - 1)) * vectors * 16;
#pragma unroll
    for (i32 c = 0; c < COLUMNS; c++) {
      v[r][c] = Vec16{0, 0, 0, 0};
      if (done + r < n && (whole || first + c * WARP < vectors)) v[r][c] = load16_const(source + (i64)(first + c * WARP) * 16);
    }
  }
}

template <int COLUMNS, int PARTIALS>
DEV void load_partials(Vec16 (&v)[PARTIALS][COLUMNS], const u8* pushed, i32 done, i32 remote, i32 first, i32 vectors, bool whole) {
#pragma unroll
  for (i32 p = 0; p < PARTIALS; p++) {
    const u8* source = (const u8*)warp_shfl((u64)pushed, min(done + p, WARP - 1));
#pragma unroll
    for (i32 c = 0; c < COLUMNS; c++) {
      v[p][c] = Vec16{0, 0, 0, 0};
      if (done + p < remote && (whole || first + c * WARP < vectors)) v[p][c] = load16(source + (i64)(first + c * WARP) * 16);
    }
  }
}

// Adds a round of partial sums, with the own one before number `below` (-1: there is none, or it comes behind them all).
template <int DTYPE, int COLUMNS, int PARTIALS>
DEV void add_partials(f32* total, const Vec16 (&v)[PARTIALS][COLUMNS], i32 c, i32 done, i32 remote, Vec16 mine, i32 below) {
#pragma unroll
  for (i32 p = 0; p < PARTIALS; p++) {
    if (done + p == below && below < remote) add_vector<DTYPE>(total, mine);
    add_vector<DTYPE>(total, v[p][c]);
  }
}

// One token's sum, stored to `target`: own rows in the order of the lanes that hold their numbers (lanes 0..n-1), rounded once; then the
// partial sums that `remote` peers pushed, whose addresses lanes 0..remote-1 hold in ascending rank, with the own one after the
// first `below` of them; rounded once more. A producer has no partial sums: rounding twice is rounding once.
//
// COLUMNS vectors of 16 bytes a lane are worked on at a time, with ROWS rows and PARTIALS partial sums of each in flight. More rows
// or partial sums than that take further rounds, for which there are registers only with one column.
template <int DTYPE, int ROWS, int COLUMNS, int PARTIALS>
DEV void sum_columns(const u8* x, u8* target, i32 vectors, i32 row, i32 n, const u8* pushed, i32 remote, i32 below) {
  constexpr i32 WIDTH = vector_width<DTYPE>();
  const bool whole = vectors % (WARP * COLUMNS) == 0;
#pragma unroll 1
  for (i32 start = 0; start < vectors; start += WARP * COLUMNS) {
    const i32 first = start + lane_index();
    Vec16 own[ROWS][COLUMNS], partial[PARTIALS][COLUMNS];
    load_partials<COLUMNS, PARTIALS>(partial, pushed, 0, remote, first, vectors, whole);
    load_rows<COLUMNS, ROWS>(own, x, row, 0, n, first, vectors, whole);
#pragma unroll
    for (i32 c = 0; c < COLUMNS; c++) {
      f32 sum[WIDTH] = {}, total[WIDTH] = {};
#pragma unroll
      for (i32 r = 0; r < ROWS; r++) add_vector<DTYPE>(sum, own[r][c]);
      if constexpr (COLUMNS == 1) {
#pragma unroll 1
        for (i32 done = ROWS; done < n; done += ROWS) {
          load_rows<COLUMNS, ROWS>(own, x, row, done, n, first, vectors, whole);
#pragma unroll
          for (i32 r = 0; r < ROWS; r++) add_vector<DTYPE>(sum, own[r][0]);
        }
      }
      const Vec16 mine = pack<DTYPE>(sum);
      const i32 before = n > 0 ? below : -1;
      add_partials<DTYPE, COLUMNS, PARTIALS>(total, partial, c, 0, remote, mine, before);
      if constexpr (COLUMNS == 1) {
#pragma unroll 1
        for (i32 done = PARTIALS; done < remote; done += PARTIALS) {
          load_partials<COLUMNS, PARTIALS>(partial, pushed, done, remote, first, vectors, whole);
          add_partials<DTYPE, COLUMNS, PARTIALS>(total, partial, 0, done, remote, mine, before);
        }
      }
      if (n > 0 && below == remote) add_vector<DTYPE>(total, mine);
      const i32 i = first + c * WARP;
      if (whole || i < vectors) store16(target + (i64)i * 16, pack<DTYPE>(total));
    }
  }
}

// Not inlined: both roles share one copy of the hot code, which must stay small for the instruction cache.
template <int DTYPE>
DEV_CALL void sum_token(const CombineArgs& a, u8* target, i32 row, i32 n, const u8* pushed, i32 remote, i32 below) {
  const i32 vectors = SHAPE(row_bytes) / 16;
  if (SHAPE(ranks) > 2 && remote > 1)
    sum_columns<DTYPE, 4, 1, 4>(a.x, target, vectors, row, n, pushed, remote, below);
  else if (n > 4)
    sum_columns<DTYPE, 8, 1, 1>(a.x, target, vectors, row, n, pushed, remote, below);
  else
    sum_columns<DTYPE, 4, 2, 1>(a.x, target, vectors, row, n, pushed, remote, below);
}

// A row number that lies behind the caller's rows is not read: it is counted, and check() raises.
DEV i32 checked_row(const CombineArgs& a, i32 row) {
  if (row < a.x_rows) return row;
  atomic_add(a.world.bad_input + BAD_ROWS, 1);
  return -1;
}

// Moves the rows >= 0 to the lanes 0.. in their order; returns their number.
DEV i32 pack_to_front(i32& row) {
  const u32 used = warp_ballot(row >= 0);
  const i32 n = popc(used);
  i32 source = 0;
  u32 rest = used;
  for (i32 i = 0; i < n; i++) {
    const i32 bit = ffs(rest) - 1;
    if (i == lane_index()) source = bit;
    rest &= rest - 1;
  }
  row = warp_shfl(row, source);
  if (lane_index() >= n) row = -1;
  return n;
}

template <int DTYPE>
DEV void produce(const CombineArgs& a, u32 epoch) {
  const i32 topk = SHAPE(topk), peers = SHAPE(ranks) - 1, me = a.world.rank, lane = lane_index(), half = a.ring_tokens / 2;
  const i32 warps = grid_blocks() * a.produce_warps;
  const i64 items = (i64)most_tokens(a.num_tokens_per_rank, SHAPE(ranks)) * peers;
  bool entered = false;
  for (i64 item = warp_index() * grid_blocks() + block_index(); item < items; item += warps) {
    const i32 token = item / max(peers, 1), peer = item % max(peers, 1), home = peer + (peer >= me);
    if (token >= load_const(a.num_tokens_per_rank + home)) continue;
    i32 row = lane < topk ? load_const(a.rows + ((i64)home * a.capacity + token) * topk + lane) : -1;
    if (!warp_any(row >= 0)) continue;
    if (!entered && !peers_entered(a.world, OP_COMBINE, epoch)) return;
    entered = true;
    const i32 before = token / half - 2;  // the half of the tokens that lay in this slot's half of the ring before
    if (before >= 0 &&
        !warp_all(lane != 0 || wait_until(a.world, credit_of(a, me, home, before), epoch, OP_COMBINE, home)))
      return;
    if (row >= 0) row = checked_row(a, row);
    if (a.with_weights && lane < topk && row >= 0)
      ring_weights_slot(a, home, me, token)[lane] = load_const(a.row_weights + row);
    const i32 n = pack_to_front(row);
    sum_token<DTYPE>(a, ring_slot(a, home, me, token), row, n, nullptr, 0, 0);
    warp_sync();
    if (lane == 0) st_release(flag_of(a, home, me, token), epoch);
  }
}

// The peers that hold rows of a token, ascending: lane i gets the i-th of them. Returns their number.
DEV i32 peers_of(const CombineArgs& a, Entry e, u32 mates, i32& peer, i32& below) {
  const bool leads = e.slot >= 0 && (i32)e.rank != a.world.rank && (mates & lanes_below()) == 0;
  const u32 leaders = warp_ballot(leads);
  const i32 count = popc(leaders);
  below = popc(warp_ballot(leads && (i32)e.rank < a.world.rank));
  i32 order = 0;  // of this lane's rank among the leaders' ranks
  u32 rest = leaders;
  for (i32 i = 0; i < count; i++, rest &= rest - 1) order += warp_shfl(e.rank, ffs(rest) - 1) < e.rank;
  peer = 0;
  for (i32 i = 0; i < count; i++) {
    const u32 rank = warp_shfl(e.rank, ffs(warp_ballot(leads && order == i)) - 1);
    if (lane_index() == i) peer = rank;
  }
  return count;
}

// The route weights' way back: entry k takes the weight of its row, wherever it lay; masked entries take 0.
DEV void gather_weights(const CombineArgs& a, i32 token, Entry e, u32 mates) {
  const i32 topk = SHAPE(topk), lane = lane_index();
  if (lane >= topk) return;
  f32 weight = 0.f;
  if (e.slot >= 0 && (i32)e.rank == a.world.rank)
    weight = e.slot < a.x_rows ? load_const(a.row_weights + e.slot) : 0.f;
  else if (e.slot >= 0)
    weight = ring_weights_slot(a, a.world.rank, e.rank, token)[popc(mates & lanes_below())];
  a.topk_weights[(i64)token * topk + lane] = weight;
}

// The last warp to finish a token of a half tells every peer that this half of its ring may be written again. A half also waits for the
// one that lay there before: a peer that had no rows in this half may still have some of that one unread.
DEV void give_credit(const CombineArgs& a, i32 token, u32 epoch) {
  const i32 half_tokens = a.ring_tokens / 2;
  warp_sync();
  for (i32 half = token / half_tokens; (i64)(half + 2) * half_tokens < a.num_tokens; half += 2) {  // nobody asks for later ones
    const u32 others = half_tokens - 1 + (half >= 2);
    bool last = false;
    if (lane_index() == 0) last = atomic_inc_wrap_gpu(a.consumed + half, others) == others;
    if (!warp_any(last)) return;
    fence_sys();
    for (i32 peer = lane_index(); peer < SHAPE(ranks); peer += WARP)
      if (peer != a.world.rank) st_relaxed(credit_of(a, peer, a.world.rank, half), epoch);
  }
}

template <int DTYPE>
DEV void consume(const CombineArgs& a, u32 epoch) {
  const i32 topk = SHAPE(topk), me = a.world.rank, lane = lane_index();
  const i32 warps = grid_blocks() * (block_warps() - a.produce_warps);
  for (i32 token = (warp_index() - a.produce_warps) * grid_blocks() + block_index(); token < a.num_tokens; token += warps) {
    const Entry e = entry_of(a.dst, token, topk, a.row_capacity);
    const u32 mates = warp_match_any(e.rank);
    i32 peer, below, row = e.slot >= 0 && (i32)e.rank == me ? checked_row(a, e.slot) : -1;
    const i32 remote = peers_of(a, e, mates, peer, below), n = pack_to_front(row);
    const bool arrived =
        lane >= remote || wait_until(a.world, flag_of(a, me, peer, token), epoch, OP_COMBINE, peer);
    if (!warp_all(arrived)) return;
    sum_token<DTYPE>(a, a.out + (i64)token * SHAPE(row_bytes), row, n, ring_slot(a, me, peer, token), remote, below);
    if (a.with_weights) gather_weights(a, token, e, mates);
    give_credit(a, token, epoch);
  }
}

template <int DTYPE>
DEV void combine_rows(const CombineArgs& a, u32 epoch) {
  if (warp_index() < a.produce_warps)
    produce<DTYPE>(a, epoch);
  else
    consume<DTYPE>(a, epoch);
}

KERNEL(combine, CombineArgs) {
  u32 epoch;
  if (!begin_call(a.world, OP_COMBINE, a.epochs, epoch, a.choice)) return;
  const i32 dtype = SHAPE(dtype);
  if (dtype == DTYPE_BF16)
    combine_rows<DTYPE_BF16>(a, epoch);
  else if (dtype == DTYPE_F16)
    combine_rows<DTYPE_F16>(a, epoch);
  else
    combine_rows<DTYPE_F32>(a, epoch);
  if (block_index() + warp_index() == 0) compare_choices(a.world, OP_COMBINE, epoch, a.choice);
  end_call(a.epochs, epoch);
}
