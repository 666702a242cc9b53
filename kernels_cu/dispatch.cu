// dispatch: every token's row to its place on every rank that holds one of its experts.
//
// A token crosses the wire once a destination rank, straight into the slot of its first entry there (the primary). With it goes
// a record (the slots of all its entries on that rank, then their route weights), so that the receiver copies the row to the
// other slots without a search. Two roles by warp in every block, so that transfer and copying overlap without a barrier:
//
//   send    loads a row into shared memory, writes the records, one bulk copy a destination, bulk copies to the own slots,
//           and when the remote copies are complete raises the token's flag at every peer, also where it has no row.
//   expand  zeroes pad rows, then takes the peers' tokens in their order: waits for the flag, keeps the record in the plan
//           (combine needs it) and copies the row to its duplicates.
//
// Send warps never wait for arrivals, only for the peers' entry words: no cycle of waits can close.
#include "rows.cuh"

DEV i32* record_of(const DispatchArgs& a, i32 at, i32 source, i32 token) {
  const i64 words = (2 * SHAPE(topk) + 3) / 4 * 4;
  return (i32*)(chunk(a.world, at) + a.records) + ((i64)source * a.capacity + token) * words;
}

DEV u32* flag_of(const DispatchArgs& a, i32 at, i32 source, i32 token) {
  return (u32*)(chunk(a.world, at) + a.flags) + (i64)source * a.capacity + token;
}

// The token's record at every peer: lane k writes entry k, packed in ascending k and ended by -1.
DEV void write_records(const DispatchArgs& a, i32 token, Entry e, u32 mates) {
  const i32 topk = SHAPE(topk), ranks = SHAPE(ranks), me = a.world.rank, lane = lane_index();
  if (e.slot >= 0 && (i32)e.rank != me) {
    i32* record = record_of(a, e.rank, me, token);
    const i32 place = popc(mates & lanes_below());
    record[place] = e.slot;
    if (a.with_weights) ((f32*)record)[topk + place] = a.topk_weights[(i64)token * topk + lane];
    if (place == 0 && popc(mates) < topk) record[popc(mates)] = -1;
  }
  for (i32 first = 0; first < ranks; first += WARP) {
    const i32 peer = first + lane;
    bool here = false;
    for (i32 k = 0; k < topk; k++) here |= (i32)warp_shfl(e.rank, k) == peer;
    if (peer < ranks && peer != me && !here) *record_of(a, peer, me, token) = -1;
  }
}

// One fence, then relaxed flags to all peers: what this warp wrote for the token is visible before its flag.
DEV void raise_flags(const DispatchArgs& a, i32 token, u32 epoch) {
  warp_sync();
  fence_sys();
  for (i32 peer = lane_index(); peer < SHAPE(ranks); peer += WARP)
    if (peer != a.world.rank) st_relaxed(flag_of(a, peer, a.world.rank, token), epoch);
}

DEV void send(const DispatchArgs& a, u32 epoch) {
  const i32 topk = SHAPE(topk), row_bytes = SHAPE(row_bytes), me = a.world.rank, lane = lane_index();
  u64* arrived = (u64*)smem() + warp_index();
  u8* stage = smem() + (a.send_warps * 8 + 127) / 128 * 128 + (i64)warp_index() * ((row_bytes + 127) / 128 * 128);
  if (lane == 0) {
    mbarrier_init(arrived, 1);
    mbarrier_fence();
  }
  warp_sync();
  if (!peers_entered(a.world, OP_DISPATCH, epoch)) return;
  u8* own_rows = chunk(a.world, me) + a.receive;
  i32 pending = -1;
  u32 parity = 0;
  for (i32 token = warp_index() * grid_blocks() + block_index(); token < a.num_tokens; token += grid_blocks() * a.send_warps) {
    row_wait_read<0>();
    warp_sync();
    if (lane == 0) {
      mbarrier_expect(arrived, row_bytes);
      row_load(stage, a.x + (i64)token * row_bytes, row_bytes, arrived);
    }
    const Entry e = entry_of(a.dst, token, topk, a.row_capacity);
    const u32 mates = warp_match_any(e.rank);
    if (pending >= 0) {  // publish the last token before this one's copies queue up behind it
      row_wait<1>();
      raise_flags(a, pending, epoch);
    }
    write_records(a, token, e, mates);
    const bool own = e.slot >= 0 && (i32)e.rank == me;
    if (own && a.with_weights) a.row_weights[e.slot] = a.topk_weights[(i64)token * topk + lane];
    mbarrier_wait(arrived, parity);
    parity ^= 1;
    if (e.slot >= 0 && !own && (mates & lanes_below()) == 0)
      row_store(chunk(a.world, e.rank) + a.receive + (i64)e.slot * row_bytes, stage, row_bytes);
    row_commit();
    if (own) row_store(own_rows + (i64)e.slot * row_bytes, stage, row_bytes);
    row_commit();
    pending = token;
  }
  row_wait<0>();
  if (pending >= 0) raise_flags(a, pending, epoch);
}

// Pad rows are the rows between a segment's last token and its padded end.
DEV void zero_pads(const DispatchArgs& a, i32 warp, i32 warps) {
  const i32 padding = a.token_padding, row_bytes = SHAPE(row_bytes);
  if (padding == 1) return;
  u8* rows = chunk(a.world, a.world.rank) + a.receive;
  for (i64 item = warp; item < (i64)a.segments * padding; item += warps) {
    const i32 segment = item / padding, count = load_const(a.counts + segment);
    const i32 pads = (padding - count % padding) % padding, end = load_const(a.cu_seqlens + segment);
    const i32 row = end - 1 - (i32)(item % padding);
    if (row < end - pads) continue;
    zero_row(rows + (i64)row * row_bytes, row_bytes);
    if (a.with_weights && lane_index() == 0) a.row_weights[row] = 0.f;
  }
}

DEV void expand(const DispatchArgs& a, u32 epoch) {
  const i32 topk = SHAPE(topk), row_bytes = SHAPE(row_bytes), peers = SHAPE(ranks) - 1, me = a.world.rank, lane = lane_index();
  const i32 warp = (warp_index() - a.send_warps) * grid_blocks() + block_index();
  const i32 warps = (block_warps() - a.send_warps) * grid_blocks();
  zero_pads(a, warp, warps);
  u8* rows = chunk(a.world, me) + a.receive;
  const i64 items = (i64)most_tokens(a.num_tokens_per_rank, SHAPE(ranks)) * peers;
  for (i64 item = warp; item < items; item += warps) {
    const i32 token = item / max(peers, 1), peer = item % max(peers, 1), source = peer + (peer >= me);
    if (token >= load_const(a.num_tokens_per_rank + source)) continue;
    if (!warp_all(lane != 0 || wait_until(a.world, flag_of(a, me, source, token), epoch, OP_DISPATCH, source))) return;
    i32* record = record_of(a, me, source, token);
    i32 slot = lane < topk ? record[lane] : -1;
    const u32 ends = warp_ballot(slot < 0);
    const i32 n = ends ? ffs(ends) - 1 : WARP;
    if (lane >= n) slot = -1;
    if (lane < topk) a.rows[((i64)source * a.capacity + token) * topk + lane] = slot;
    if (slot >= 0 && a.with_weights) a.row_weights[slot] = ((f32*)record)[topk + lane];
    if (n > 1) copy_to_duplicates(rows, slot, n, row_bytes);
  }
}

KERNEL(dispatch, DispatchArgs) {
  u32 epoch;
  if (!begin_call(a.world, OP_DISPATCH, a.epochs, epoch, a.choice)) return;
  if (block_index() + thread_index() == 0 && load_const(a.cu_seqlens + a.segments - 1) > a.result_rows)
    atomic_add(a.world.bad_input + BAD_TOTALS, 1);  // the rows that are handed out are not all: check() raises
  if (warp_index() < a.send_warps)
    send(a, epoch);
  else
    expand(a, epoch);
  if (block_index() + warp_index() == 0) compare_choices(a.world, OP_DISPATCH, epoch, a.choice);
  end_call(a.epochs, epoch);
}
