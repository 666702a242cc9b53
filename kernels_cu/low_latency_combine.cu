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

// What this rank holds of a token. Lane i: with direct send the row of entry i, else the i-th of the rows here; -1: none.
struct Rows {
  i32 row;
  f32 weight;
};
DEV u32 mask_of(const Rows& rows) { return warp_ballot(rows.row >= 0); }  // the lanes with a row
DEV Rows rows_of(const Args& a, i32 source, i32 token) {
  const i32 lane = lane_index();
  const i64 entry = ((i64)source * a.capacity + token) * SHAPE(topk) + lane;
  Rows here = {-1, 0.f};
  if (lane < SHAPE(topk) && token < a.capacity) {
    here.row = load_const(in_slab<const i32>(a.slab, a.at.rows) + entry);
    if (!SHAPE(rank_major) && !SHAPE(direct_send)) here.weight = load_const(in_slab<const f32>(a.slab, a.at.weights) + entry);
  }
  return here;
}

DEV Vec16 load_piece(const Args& a, i32 row, i32 piece) {
  if (piece < 0) return Vec16{0, 0, 0, 0};
  return load16_const(a.x + (i64)row * SHAPE(hidden) * 2 + piece * 16);
}

DEV void multiply_add(f32 weight, Vec16 v, f32 (&acc)[8]) {
  f32 x[8];
  unpack<DTYPE_BF16>(v, x);
#pragma unroll
  for (i32 i = 0; i < 8; i++) acc[i] = fma_rn(weight, x[i], acc[i]);
}

// A lane's piece of the row that this rank has for a token in rank-local reduce.
DEV Vec16 partial(const Args& a, const Rows& here, i32 piece) {
  if (SHAPE(rank_major)) return load_piece(a, warp_shfl(here.row, 0), piece);
  const u32 mask = mask_of(here);
  f32 acc[8] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll 1
  for (i32 base = 0; base < SHAPE(topk) && (mask >> base) != 0; base += TOGETHER) {
    Vec16 v[TOGETHER];
#pragma unroll
    for (i32 i = 0; i < TOGETHER; i++) {
      const i32 row = warp_shfl(here.row, base + i);
      if (mask >> (base + i) & 1) v[i] = load_piece(a, row, piece);
    }
#pragma unroll
    for (i32 i = 0; i < TOGETHER; i++) {
      const f32 weight = warp_shfl(here.weight, base + i);
      if (mask >> (base + i) & 1) multiply_add(weight, v[i], acc);
    }
  }
  return pack<DTYPE_BF16>(acc);
}

// A token's slots at its source: one a rank, or with direct send one an entry. Flags: always one a rank.
DEV u8* slot_of(const Args& a, const Wire& wire, i32 at, i32 token, i32 number) {
  return slot_at(a.world, wire, at, (i64)token * (SHAPE(direct_send) ? SHAPE(topk) : SHAPE(ranks)) + number);
}
DEV u32* flag_of(const Args& a, const Wire& wire, i32 at, i32 token, i32 rank) {
  return flag_at(a.world, wire, at, (i64)token * SHAPE(ranks) + rank);
}
DEV void raise_flag(const Args& a, const Wire& wire, i32 source, i32 token, u32 epoch) {
  block_sync();
  if (thread_index() == 0) st_release(flag_of(a, wire, source, token, a.world.rank), epoch);
}

// Without lines: the flags of all peers that send for a token. Lane k: the rank of entry k.
DEV bool wait_flags(const Args& a, const Wire& wire, i32 token, i32 target, u32 epoch) {
  const World& w = a.world;
#pragma unroll 1
  for (i32 first = 0; first < SHAPE(ranks); first += WARP) {
    const i32 peer = first + lane_index();
    bool sends = false;
#pragma unroll 1
    for (i32 k = 0; k < SHAPE(topk); k++) sends |= warp_shfl(target, k) == peer && peer != w.rank;
    const u32* flag = flag_of(a, wire, w.rank, token, peer);
    const auto raised = [=](u32& seen) { return !sends || (seen = ld_acquire(flag)) == epoch; };
    if (!warp_wait(w, raised, epoch, OP_LL_COMBINE, peer)) return false;
  }
  return true;
}

// Of TOGETHER slots those in `remote`, once they have come. `peer`: one that sends.
DEV bool receive(const Args& a, const Wire& wire, u8* slots, i32 spot, u32 remote, i32 peer, u32 epoch, Vec16 (&v)[TOGETHER]) {
  const i64 bytes = slot_bytes(wire);
  if (wire.lines) {
    const u8* lines = line_at(wire, slots, spot);
    const auto line = [=](i32 i) -> const u8* { return lines != nullptr && (remote >> i & 1) ? lines + i * bytes : nullptr; };
    return warp_wait(a.world, [&](u32&) { return lines_load<TOGETHER>(line, v, epoch); }, epoch, OP_LL_COMBINE, peer);
  }
  const i32 piece = piece_at(wire, spot);
#pragma unroll
  for (i32 i = 0; i < TOGETHER; i++)
    if ((remote >> i & 1) && piece >= 0) v[i] = load16(slots + i * bytes + piece * 16);
  return true;
}

DEV void store_sum(const Args& a, i32 token, i32 piece, const f32 (&acc)[8]) {
  if (piece >= 0) store16(a.out + (i64)token * SHAPE(hidden) * 2 + piece * 16, pack<DTYPE_BF16>(acc));
}

// What a block wants to know of its first token, loaded together with the epoch. Lane k: the rank of entry k.
struct Early {
  Rows next;  // of the next rank's token
  Rows own;
  i32 target;
};
DEV i32 target_of(const Args& a, i32 token) {
  if (lane_index() >= SHAPE(topk) || token >= a.num_tokens) return -1;
  return load_const(in_slab<const i32>(a.slab, a.at.targets) + (i64)token * SHAPE(topk) + lane_index());
}
DEV Early early_of(const Args& a) {
  const i32 me = a.world.rank, token = first_token();
  Early e;
  e.next = rows_of(a, me + 1 < SHAPE(ranks) ? me + 1 : 0, token);
  e.own = rows_of(a, me, token);
  e.target = target_of(a, token);
  return e;
}

// ---- rank-local reduce

// Own sums wait in shared memory, each thread its own.
DEV Vec16* own_sum(i32 piece) { return (Vec16*)(smem() + piece * 16); }

// The ranks' rows of a token in ascending rank.
DEV bool add_ranks(const Args& a, const Wire& wire, i32 token, i32 target, u32 epoch) {
  const World& w = a.world;
  if (!wire.lines && !wait_flags(a, wire, token, target, epoch)) return false;
#pragma unroll 1
  for (i32 first = warp_index() * WARP; first < spots_of(wire); first = next_spots(first, spots_of(wire))) {
    const i32 spot = first + lane_index(), piece = piece_at(wire, spot);
    f32 acc[8] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll 1
    for (i32 base = 0; base < SHAPE(ranks); base += TOGETHER) {
      u32 senders = 0;
#pragma unroll
      for (i32 i = 0; i < TOGETHER; i++)
        if (base + i < SHAPE(ranks)) senders |= (u32)warp_any(target == base + i) << i;
      const i32 mine = w.rank - base;
      const u32 remote = mine >= 0 && mine < TOGETHER ? senders & ~(1u << mine) : senders;
      Vec16 v[TOGETHER];
      if (!receive(a, wire, slot_of(a, wire, w.rank, token, base), spot, remote, base + ffs(remote) - 1, epoch, v)) return false;
#pragma unroll
      for (i32 i = 0; i < TOGETHER; i++) {
        if (base + i >= SHAPE(ranks) || (senders >> i & 1) == 0) continue;
        if (i == mine && piece >= 0) v[i] = *own_sum(piece);
        f32 x[8];
        unpack<DTYPE_BF16>(v[i], x);
#pragma unroll
        for (i32 j = 0; j < 8; j++) acc[j] = add_rn(acc[j], x[j]);
      }
    }
    store_sum(a, token, piece, acc);
  }
  return true;
}

DEV void reduce(const Args& a, const Wire& wire, const Early& early, u32 epoch) {
  const World& w = a.world;
  const i32 ranks = SHAPE(ranks);
#pragma unroll 1
  for (i32 own = 0; own < 2; own++) {  // what is owed to peers first, then what is awaited
#pragma unroll 1
    for (i32 token = first_token(); token < (own ? a.num_tokens : a.capacity); token += grid_blocks()) {
#pragma unroll 1
      for (i32 i = own ? ranks : 1; i < ranks + own; i++) {
        const i32 source = w.rank + i < ranks ? w.rank + i : w.rank + i - ranks;
        Rows here = own ? early.own : early.next;
        if (token != first_token() || i != (own ? ranks : 1)) here = rows_of(a, source, token);
        if (mask_of(here) == 0) continue;
        u8* slot = slot_of(a, wire, source, token, w.rank);
#pragma unroll 1
        for (i32 first = warp_index() * WARP; first < spots_of(wire); first = next_spots(first, spots_of(wire))) {
          const i32 spot = first + lane_index(), piece = piece_at(wire, spot);
          const Vec16 sum = partial(a, here, piece);
          if (!own) put(wire, slot, spot, sum, epoch);
          else if (piece >= 0) *own_sum(piece) = sum;
        }
        if (!own && !wire.lines) raise_flag(a, wire, source, token, epoch);
      }
      if (own && !add_ranks(a, wire, token, token == first_token() ? early.target : target_of(a, token), epoch)) return;
    }
    if (!own && block_index() == 0) tell_entered(w, OP_LL_COMBINE, epoch);
  }
}

// ---- direct send

DEV void send_entries(const Args& a, const Wire& wire, i32 source, i32 token, const Rows& here, u32 epoch) {
  const u32 mask = mask_of(here);
  if (mask == 0) return;
  u8* slots = slot_of(a, wire, source, token, 0);
#pragma unroll 1
  for (i32 first = warp_index() * WARP; first < spots_of(wire); first = next_spots(first, spots_of(wire))) {
    const i32 spot = first + lane_index(), piece = piece_at(wire, spot);
#pragma unroll 1
    for (i32 base = 0; base < SHAPE(topk); base += TOGETHER) {
      Vec16 v[TOGETHER];
#pragma unroll
      for (i32 i = 0; i < TOGETHER; i++) {
        const i32 row = warp_shfl(here.row, base + i);
        if (mask >> (base + i) & 1) v[i] = load_piece(a, row, piece);
      }
#pragma unroll
      for (i32 i = 0; i < TOGETHER; i++)
        if (mask >> (base + i) & 1) put(wire, slots + (base + i) * slot_bytes(wire), spot, v[i], epoch);
    }
  }
  if (!wire.lines) raise_flag(a, wire, source, token, epoch);
}

// The rows of a token's entries in ascending k.
DEV bool add_entries(const Args& a, const Wire& wire, i32 token, i32 target, const Rows& own, u32 epoch) {
  const World& w = a.world;
  f32 weight = 0.f;
  if (target >= 0) weight = load_const(in_slab<const f32>(a.slab, a.at.route_weights) + (i64)token * SHAPE(topk) + lane_index());
  const u32 entries = warp_ballot(target >= 0), mine = mask_of(own), remote = entries & ~mine;
  if (!wire.lines && !wait_flags(a, wire, token, target, epoch)) return false;
#pragma unroll 1
  for (i32 first = warp_index() * WARP; first < spots_of(wire); first = next_spots(first, spots_of(wire))) {
    const i32 spot = first + lane_index(), piece = piece_at(wire, spot);
    f32 acc[8] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll 1
    for (i32 base = 0; base < SHAPE(topk); base += TOGETHER) {
      Vec16 v[TOGETHER];
#pragma unroll
      for (i32 i = 0; i < TOGETHER; i++) {
        const i32 row = warp_shfl(own.row, base + i);
        if (mine >> (base + i) & 1) v[i] = load_piece(a, row, piece);
      }
      const i32 peer = warp_shfl(target, ffs(remote >> base << base) - 1);
      if (!receive(a, wire, slot_of(a, wire, w.rank, token, base), spot, remote >> base, peer, epoch, v)) return false;
#pragma unroll
      for (i32 i = 0; i < TOGETHER; i++) {
        const f32 factor = warp_shfl(weight, base + i);
        if (entries >> (base + i) & 1) multiply_add(factor, v[i], acc);
      }
    }
    store_sum(a, token, piece, acc);
  }
  return true;
}

DEV void send_directly(const Args& a, const Wire& wire, const Early& early, u32 epoch) {
  const World& w = a.world;
  const i32 ranks = SHAPE(ranks);
#pragma unroll 1
  for (i32 token = first_token(); token < a.capacity; token += grid_blocks())
#pragma unroll 1
    for (i32 i = 1; i < ranks; i++) {
      const i32 source = w.rank + i < ranks ? w.rank + i : w.rank + i - ranks;
      Rows here = early.next;
      if (token != first_token() || i != 1) here = rows_of(a, source, token);
      send_entries(a, wire, source, token, here, epoch);
    }
  if (block_index() == 0) tell_entered(w, OP_LL_COMBINE, epoch);
#pragma unroll 1
  for (i32 token = first_token(); token < a.num_tokens; token += grid_blocks()) {
    Rows own = early.own;
    i32 target = early.target;
    if (token != first_token()) {
      own = rows_of(a, w.rank, token);
      target = target_of(a, token);
    }
    if (!add_entries(a, wire, token, target, own, epoch)) return;
  }
}

KERNEL(low_latency_combine, LowLatencyCombineArgs) {
  const World& w = a.world;
  const Early early = early_of(a);
  u32 epoch;
  if (!start_call<true>(w, OP_LL_COMBINE, a.epochs, epoch)) return;
  const i64 slots = (i64)a.capacity * (SHAPE(direct_send) ? SHAPE(topk) : SHAPE(ranks)), flags = (i64)a.capacity * SHAPE(ranks);
  const Wire wire = wire_of(a.slots, a.flags, slots, flags, SHAPE(hidden) * 2, SHAPE(lines), epoch);
  if (SHAPE(direct_send)) send_directly(a, wire, early, epoch);
  else reduce(a, wire, early, epoch);
}
