// low_latency_dispatch: few tokens to the ranks of their experts, in one launch.
//
//   send     Block 0 sends the routing: it finds each entry's index among the source's entries of the same list, and sends every
//            peer its packets. The other blocks push a token's row to every rank that it goes to, from shared memory.
//   place    Every block learns the lengths of all lists, and for each of its tokens, of every source, where the rows go.
//   deliver  Own rows from shared memory, peers' rows as they come in, each to all its places.
//
// A list is what rows lie contiguous in: an expert (expert-major) or a rank (rank-major). Row = start of the list + what lower ranks
// send there + index within the source; so every rank knows every row without a second exchange, and the order is fixed. A block
// sends all that it owes before its first wait.
#include "low_latency_routing.cuh"

constexpr f32 LARGEST_E4M3 = 448.f, SMALLEST_AMAX = 1e-4f;

// ---- rows

// 8 columns of a lane to 8 bytes of e4m3; 16 lanes share a scale.
DEV void quantize(const Args& a, Vec16 v, u8* row, i32 piece) {
  f32 x[8], largest = SMALLEST_AMAX;
  unpack<DTYPE_BF16>(v, x);
#pragma unroll
  for (i32 i = 0; i < 8; i++) {
    const f32 magnitude = f32_from_bits(f32_bits(x[i]) & 0x7fffffff);
    if (magnitude > largest) largest = magnitude;  // a NaN is passed over
  }
#pragma unroll
  for (i32 step = 8; step > 0; step /= 2) {
    const f32 other = warp_shfl_xor(largest, step);
    if (other > largest) largest = other;
  }
  f32 scale = div_rn(largest, LARGEST_E4M3), inverse = div_rn(LARGEST_E4M3, largest);
  if (SHAPE(power_of_two)) {
    const u32 bits = f32_bits(scale);
    scale = f32_from_bits(((bits >> 23) + ((bits & 0x7fffff) != 0)) << 23);
    inverse = div_rn(1.f, scale);
  }
  u32 q[2] = {0, 0};
#pragma unroll
  for (i32 i = 0; i < 8; i++) q[i / 4] |= (u32)f32_to_e4m3(mul_rn(x[i], inverse)) << i % 4 * 8;
  if (piece * 8 >= SHAPE(hidden)) return;
  ((u32*)row)[piece * 2] = q[0];
  ((u32*)row)[piece * 2 + 1] = q[1];
  if (piece % 16 == 0) ((f32*)(row + SHAPE(hidden)))[piece / 16] = scale;
}

// The token's row into shared memory, as it travels. A block barrier must follow.
DEV void stage(const Args& a, i32 token) {
  const i32 vectors = SHAPE(hidden) / 8;
  const u8* row = a.x + (i64)token * SHAPE(hidden) * 2;
#pragma unroll 1
  for (i32 first = warp_index() * WARP; first < vectors; first = next_spots(first, vectors)) {
    const i32 i = first + lane_index();
    Vec16 v = Vec16{0, 0, 0, 0};
    if (i < vectors) v = load16_const(row + i * 16);
    if (SHAPE(fp8)) quantize(a, v, staged_row(), i);
    else if (i < vectors) *(Vec16*)(staged_row() + i * 16) = v;
  }
}

// Number of the slot and flag at rank `at` for a token of rank `from`, another one.
DEV i64 slot_of(const Args& a, i32 at, i32 from, i32 token) { return (i64)(from - (from > at)) * a.capacity + token; }

// The staged row to every peer that lane k's target names.
DEV void push(const Args& a, const Wire& wire, i32 token, i32 target, u32 epoch) {
  const i32 me = a.world.rank;
  const bool leads = (warp_match_any((u32)target) & lanes_below()) == 0 && target >= 0 && target != me;
  const u32 peers = warp_ballot(leads);
#pragma unroll 1
  for (i32 first = warp_index() * WARP; first < spots_of(wire) && peers != 0; first = next_spots(first, spots_of(wire))) {
    const i32 spot = first + lane_index(), piece = piece_at(wire, spot);
    Vec16 v = Vec16{0, 0, 0, 0};
    if (piece >= 0) v = *(const Vec16*)(staged_row() + piece * 16);
#pragma unroll 1
    for (u32 left = peers; left != 0; left &= left - 1) {
      const i32 peer = warp_shfl(target, ffs(left) - 1);
      put(wire, slot_at(a.world, wire, peer, slot_of(a, peer, me, token)), spot, v, epoch);
    }
  }
  if (wire.lines || peers == 0) return;
  block_sync();
  if (warp_index() == 0 && leads) {
    fence_sys();
    st_relaxed(flag_at(a.world, wire, target, slot_of(a, target, me, token)), epoch);
  }
}

// ---- places

// The lengths of all sources' lists on this rank, into shared memory. The last threads begin: the first ones have entries to wait for.
DEV bool receive_lengths(const Args& a, u32 epoch) {
  const i32 lists = lists_of_rank(a), n = SHAPE(ranks) * lists;
#pragma unroll 1
  for (i32 first = (block_warps() - 1 - warp_index()) * WARP; first < n; first += block_threads()) {
    const i32 i = first + lane_index();
    const u64* packet = length_packet(a, a.world.rank, 0, i, epoch);
    u64 got = 0;
    const auto ready = [&](u32& seen) {
      if (i >= n) return true;
      got = ld_relaxed(packet);
      return (seen = (u32)(got >> 32)) == epoch;
    };
    if (!warp_wait(a.world, ready, epoch, OP_LL_DISPATCH, i / lists)) return false;
    if (i < n) list_lengths(a)[i] = (u32)got;
  }
  return true;
}

// What came of one entry of a token: number j = source * K + k.
struct Arrival {
  u32 mask, index;  // of the token
  u32 value;        // local expert << 16 | index in the expert
  f32 weight;
};
DEV bool receive_entry(const Args& a, i32 token, i32 j, u32 epoch, Arrival& got) {
  const i32 topk = SHAPE(topk), source = j / topk, k = j % topk;
  const bool none = j >= SHAPE(ranks) * topk;
  const u8* mask_at = mask_packet(a, a.world.rank, source, token, epoch);
  const u8* entry_at = entry_packet(a, a.world.rank, source, (i64)token * topk + k, epoch);
  const auto ready = [&](u32& seen) {
    if (none) return true;
    const Vec16 mask = packet_load(mask_at), entry = packet_load(entry_at);
    got = Arrival{mask.x, mask.z, entry.x, f32_from_bits(entry.z)};
    seen = mask.y;
    if (mask.y != epoch || mask.w != epoch) return false;
    if ((mask.x >> k & 1) == 0) return true;
    seen = entry.y;
    return entry.y == epoch && entry.w == epoch;
  };
  return warp_wait(a.world, ready, epoch, OP_LL_DISPATCH, source);
}

// Where the row of entry k goes in the slab's list of a token's rows on this rank. Direct send: to its k. Else those that lie here come
// first, in ascending k, so that combine finds them without a search; the others follow as -1.
DEV i64 place_in_slab(const Args& a, i32 source, i32 token, i32 k, u32 mask) {
  const u32 below = (1u << k) - 1;
  const i32 packed = mask >> k & 1 ? popc(mask & below) : popc(mask) + popc(~mask & below);
  return ((i64)source * a.capacity + token) * SHAPE(topk) + (SHAPE(direct_send) ? k : packed);
}

// Expert-major: entry j's row, to shared memory and into the slab.
DEV void place_in_expert(const Args& a, i32 token, i32 j, const Arrival& got, i32* places) {
  const i32 topk = SHAPE(topk), source = j / topk, k = j % topk, local = local_experts(a);
  const i64 entry = place_in_slab(a, source, token, k, got.mask);
  i32 row = -1;
  if (got.mask >> k & 1) {
    const i32 expert = got.value >> 16;
    row = expert * SHAPE(ranks) * a.capacity + (got.value & 0xffff);
#pragma unroll 1
    for (i32 r = 0; r < source; r++) row += list_lengths(a)[r * local + expert];
    in_slab<i32>(a.slab, a.at.src_info)[row] = token;
    if (!SHAPE(direct_send)) in_slab<f32>(a.slab, a.at.weights)[entry] = got.weight;
  }
  in_slab<i32>(a.slab, a.at.rows)[entry] = row;
  places[j] = row;
}

// Rank-major: likewise, with the ids and weights beside the row; and row number `token` of this source if nothing lies there.
DEV void place_in_rank(const Args& a, i32 token, i32 j, const Arrival& got, i32* places) {
  const i32 topk = SHAPE(topk), source = j / topk, k = j % topk;
  const bool here = got.mask >> k & 1;
  const i32 row = source * a.capacity + got.index;
  i32* ids = in_slab<i32>(a.slab, a.at.topk_idx);
  f32* weights = in_slab<f32>(a.slab, a.at.topk_weights);
  i32* src_info = in_slab<i32>(a.slab, a.at.src_info);
  if (got.mask != 0) {
    ids[(i64)row * topk + k] = here ? a.world.rank * local_experts(a) + (i32)(got.value >> 16) : -1;
    weights[(i64)row * topk + k] = here ? got.weight : 0.f;
    if (k == 0) src_info[row] = token;
  }
  if (token >= (i32)list_lengths(a)[source]) {
    const i64 idle = (i64)source * a.capacity + token;
    ids[idle * topk + k] = -1;
    weights[idle * topk + k] = 0.f;
    if (k == 0) src_info[idle] = -1;
  }
  const i64 entry = place_in_slab(a, source, token, k, got.mask);
  in_slab<i32>(a.slab, a.at.rows)[entry] = !here ? -1 : SHAPE(direct_send) ? row * topk + k
                                                                           : row;
  places[j] = row;
}

// Lengths and ranges of the lists, for the caller.
DEV void describe(const Args& a) {
  const i32 ranks = SHAPE(ranks), lists = lists_of_rank(a);
  const u32* lengths = list_lengths(a);
  i32* counts = in_slab<i32>(a.slab, a.at.counts);
  i64* ranges = in_slab<i64>(a.slab, a.at.layout_range);
#pragma unroll 1
  for (i32 i = thread_index(); i < lists * ranks; i += block_threads()) {
    const i32 list = i / ranks, source = i % ranks;
    i64 first = 0;
    if (SHAPE(rank_major)) first = (i64)source * a.capacity;
    else
#pragma unroll 1
      for (i32 r = 0; r < source; r++) first += lengths[r * lists + list];
    const u32 length = lengths[source * lists + list];
    ranges[i] = first << 32 | length;
    if (SHAPE(rank_major)) counts[source] = length;
    else if (source == ranks - 1) counts[list] = (i32)first + length;
  }
}

// ---- delivery

// A piece of a row to all its places.
DEV void deliver(const Args& a, const i32* places, u32 mask, i32 piece, Vec16 v) {
  const i32 vectors = SHAPE(fp8) ? SHAPE(hidden) / 16 : SHAPE(hidden) / 8, scales = SHAPE(hidden) / 128;
#pragma unroll 1
  for (u32 left = mask; left != 0; left &= left - 1) {
    const i64 row = places[ffs(left) - 1];
    if (piece < vectors) {
      store16(a.tokens + (row * vectors + piece) * 16, v);
      continue;
    }
    const u32 word[4] = {v.x, v.y, v.z, v.w};
    u32* target = in_slab<u32>(a.slab, a.at.block_scales) + row * scales;
#pragma unroll
    for (i32 i = 0; i < 4; i++) {
      const i32 scale = (piece - vectors) * 4 + i;
      if (scale < scales) target[scale] = word[i];
    }
  }
}

DEV bool receive_row(const Args& a, const Wire& wire, i32 source, i32 token, const i32* places, u32 mask, u32 epoch) {
  const World& w = a.world;
  const i64 slot = slot_of(a, w.rank, source, token);
  u8* row = slot_at(w, wire, w.rank, slot);
  if (!wire.lines) {
    const u32* flag = flag_at(w, wire, w.rank, slot);
    const auto raised = [=](u32& seen) { return (seen = ld_acquire(flag)) == epoch; };
    if (!warp_wait(w, raised, epoch, OP_LL_DISPATCH, source)) return false;
  }
#pragma unroll 1
  for (i32 first = warp_index() * WARP; first < spots_of(wire); first = next_spots(first, spots_of(wire))) {
    const i32 spot = first + lane_index(), piece = piece_at(wire, spot);
    Vec16 v;
    if (wire.lines) {
      const u8* line = line_at(wire, row, spot);
      if (!warp_wait(w, [&](u32&) { return line_load(line, v, epoch); }, epoch, OP_LL_DISPATCH, source)) return false;
    } else if (piece >= 0) {
      v = load16(row + piece * 16);
    }
    if (piece >= 0) deliver(a, places, mask, piece, v);
  }
  return true;
}

// ---- a block's tokens, of all sources

DEV bool place(const Args& a, i32 token, i32 turn, bool have_first, Arrival got, u32 epoch) {
  const i32 topk = SHAPE(topk);
#pragma unroll 1
  for (i32 first = warp_index() * WARP; first < SHAPE(ranks) * topk; first += block_threads()) {
    const i32 j = first + lane_index();
    if (!(have_first && j == thread_index()) && !receive_entry(a, token, j, epoch, got)) return false;
    if (j >= SHAPE(ranks) * topk) continue;
    if (SHAPE(rank_major)) place_in_rank(a, token, j, got, places_of(a, turn));
    else place_in_expert(a, token, j, got, places_of(a, turn));
    if (j % topk == 0) masks_of(a, turn)[j / topk] = got.mask;
  }
  return true;
}

DEV bool deliver_all(const Args& a, const Wire& wire, i32 token, i32 turn, u32 epoch) {
  const i32 topk = SHAPE(topk), ranks = SHAPE(ranks), me = a.world.rank;
#pragma unroll 1
  for (i32 i = 0; i < ranks; i++) {
    const i32 source = me + i < ranks ? me + i : me + i - ranks;
    const i32* places = places_of(a, turn) + source * topk;
    u32 mask = masks_of(a, turn)[source];
    if (SHAPE(rank_major)) mask &= 0 - mask;  // one row, whatever the number of entries
    if (mask == 0) continue;
    if (source != me) {
      if (!receive_row(a, wire, source, token, places, mask, epoch)) return false;
      continue;
    }
#pragma unroll 1
    for (i32 piece = thread_index(); piece < wire.pieces; piece += block_threads())
      deliver(a, places, mask, piece, *(const Vec16*)(staged_row() + piece * 16));
  }
  return true;
}

KERNEL(low_latency_dispatch, LowLatencyDispatchArgs) {
  const World& w = a.world;
  const bool routes = block_index() == 0;
  const i32 first = first_token();
  // The loads of the row, its experts, the routing and the epoch go out together.
  const i32 target = target_of(a, first);
  Entry entry = {NO_EXPERT, 1.f};
  if (routes) entry = entry_of(a, thread_index());
  if (first < a.num_tokens) stage(a, first);
  if (routes) clear_table(a, table_of(a), 0);
  u32 epoch;
  if (!start_call<false>(w, OP_LL_DISPATCH, a.epochs, epoch)) return;

  const i32 row_bytes = SHAPE(fp8) ? SHAPE(hidden) + SHAPE(hidden) / 128 * 4 : SHAPE(hidden) * 2;
  const i64 slots = (i64)(SHAPE(ranks) - 1) * a.capacity;
  const Wire wire = wire_of(a.slots, a.flags, slots, slots, row_bytes, SHAPE(lines), epoch);

  if (routes) send_routing(a, entry, epoch);
  i32 staged = first;
#pragma unroll 1
  for (i32 token = first; token < a.num_tokens; token += grid_blocks()) {
    const i32 goes_to = token == first ? target : target_of(a, token);
    if (token != first) {
      block_sync();
      stage(a, staged = token);
      block_sync();
    }
    push(a, wire, token, goes_to, epoch);
  }
  if (routes) tell_entered(w, OP_LL_DISPATCH, epoch);

  Arrival early;
  bool ok = true;
  if (first < a.capacity && warp_index() * WARP < SHAPE(ranks) * SHAPE(topk)) ok = receive_entry(a, first, thread_index(), epoch, early);
  ok = ok && receive_lengths(a, epoch);
  if (block_any(!ok)) return;
  if (routes) describe(a);
#pragma unroll 1
  for (i32 token = first, turn = 0; token < a.capacity; token += grid_blocks(), turn++) {
    ok = ok && place(a, token, turn, turn == 0, early, epoch);
    if (block_any(!ok)) return;
    if (masks_of(a, turn)[w.rank] != 0 && staged != token) {
      stage(a, staged = token);
      block_sync();
    }
    ok = deliver_all(a, wire, token, turn, epoch);
  }
}
