// plan: from the routing of all ranks to the place of every entry (token, k), with the same number of tokens on every rank.
//
// Each rank counts its tokens of every expert, sends the counts to all peers and computes the whole plan redundantly, in every
// block, in shared memory; no rank leads and nothing is broadcast. Everything that passes between blocks or ranks is a packet
// {count, epoch} of 8 bytes, seen whole: the epoch says that it has come, so there is no grid barrier and no fence. Packets of
// peers have two slots by parity, which is enough because every rank waits for every peer in every call; those between blocks
// need one, because a rank's launches follow each other.
//
//   count_entries   warps count contiguous shares of the entries; a block publishes its counts
//   send_totals     the blocks share the experts: prefix over the blocks, totals to all ranks
//   receive_totals  all ranks' totals of every expert, and how many of its entries come before this block's
//   exchange        how many tokens each rank takes over, and from whom
//   serve           which experts' tokens these are
//   lay_out         first row of every segment
//   record          the arrays of the plan, but for dst
//   line_up         the ranks' shares of every expert one after the other
//   place           a stable counting sort: entry number g of an expert lies where the ranks' shares of it cover g
#include "plan_balance.cuh"

constexpr i32 BATCH = 8;  // packets that a thread has in flight
constexpr i32 BAD_ID = -2;

DEV u64 packet(u32 value, u32 epoch) { return (u64)epoch << 32 | value; }

// Waits for n packets, up to N, `stride` words apart; packet i comes from rank `peer` + i * peer_step
// (-1: from a block of this rank).
template <i32 N>
DEV bool receive(const World& w, const u64* packets, i64 stride, i32 n, u32 epoch, i32 peer, i32 peer_step, u32 (&value)[N]) {
  i32 late = peer;
  return wait_for(
      w,
      [&](u32& seen) {
        u64 got[N];
#pragma unroll
        for (i32 i = 0; i < N; i++)
          if (i < n) got[i] = ld_relaxed(packets + i * stride);
        bool all = true;
#pragma unroll
        for (i32 i = 0; i < N; i++) {
          if (i >= n) continue;
          value[i] = (u32)got[i];
          if (reached((u32)(got[i] >> 32), epoch)) continue;
          all = false;
          seen = (u32)(got[i] >> 32);
          late = peer + i * peer_step;
        }
        return all;
      },
      epoch, OP_PLAN, late);
}

// Rank `from`'s packets at rank `at`: a count for every expert, then its number of tokens.
DEV u64* packets_of(const PlanArgs& a, i32 at, i32 from, u32 epoch) {
  const i64 slot = (epoch & 1) * a.world.ranks + from;
  return (u64*)(chunk(a.world, at) + a.packets) + slot * (a.experts + 1);
}
// [blocks][E] packets of this rank's blocks: their counts, and the counts of all earlier blocks.
DEV u64* counts_of_block(const PlanArgs& a, i32 block) { return (u64*)a.scratch + (i64)block * a.experts; }
DEV u64* earlier_blocks(const PlanArgs& a, i32 block) { return counts_of_block(a, grid_blocks() + block); }

// This warp's contiguous share of the rank's entries.
struct Share {
  i64 begin, end;
};
DEV Share share_of_warp(const PlanArgs& a) {
  const i64 entries = (i64)a.num_tokens * a.topk, warps = (i64)grid_blocks() * block_warps();
  const i64 size = ((entries + warps - 1) / warps + WARP - 1) / WARP * WARP;
  const i64 begin = size * (block_index() * block_warps() + warp_index());
  Share s;
  s.begin = begin < entries ? begin : entries;
  s.end = s.begin + size < entries ? s.begin + size : entries;
  return s;
}

// The expert of an entry; -1: none, BAD_ID: neither.
DEV i32 expert_of(const PlanArgs& a, i64 entry) {
  const i64 id = a.index_bytes == 8 ? ((const i64*)a.topk_idx)[entry] : ((const i32*)a.topk_idx)[entry];
  return id >= -1 && id < a.experts ? (i32)id : BAD_ID;
}

DEV void count_entries(const PlanArgs& a, const Tables& t, u32 epoch) {
  const i32 experts = a.experts, warps = block_warps();
#pragma unroll 1
  for (i32 i = thread_index(); i < warps * experts; i += block_threads()) t.in_warp[i] = 0;
  block_sync();
  const Share mine = share_of_warp(a);
#pragma unroll 1
  for (i64 i = mine.begin + lane_index(); i < mine.end; i += WARP) {
    const i32 e = expert_of(a, i);
    if (e >= 0) atomic_add(t.in_warp + warp_index() * experts + e, 1);
    if (e == BAD_ID) atomic_add(a.world.bad_input + BAD_EXPERT_IDS, 1);
  }
  block_sync();
  for (i32 e = thread_index(); e < experts; e += block_threads()) {
    u32 sum = 0;
    for (i32 first = 0; first < warps; first += BATCH) {  // loads of a batch go together
      u32 n[BATCH];
#pragma unroll
      for (i32 i = 0; i < BATCH; i++) n[i] = first + i < warps ? t.in_warp[(first + i) * experts + e] : 0;
#pragma unroll
      for (i32 i = 0; i < BATCH; i++) {
        if (first + i < warps) t.in_warp[(first + i) * experts + e] = sum;
        sum += n[i];
      }
    }
    st_relaxed(counts_of_block(a, block_index()) + e, packet(sum, epoch));
  }
}

DEV bool send_totals(const PlanArgs& a, u32 epoch) {
  const World& w = a.world;
  const i32 experts = a.experts, blocks = grid_blocks(), lane = lane_index();
  if (block_index() == 0)
    for (i32 r = thread_index(); r < w.ranks; r += block_threads())
      st_relaxed(packets_of(a, r, w.rank, epoch) + experts, packet(a.num_tokens, epoch));
  const i32 end = (i32)((i64)experts * (block_index() + 1) / blocks);
  for (i32 e = (i32)((i64)experts * block_index() / blocks) + warp_index(); e < end; e += block_warps()) {
    u32 sum = 0;
    for (i32 round = 0; round < blocks; round += WARP * BATCH) {
      const i32 first = round + lane * BATCH;
      u32 value[BATCH];
      const bool ok = receive(w, counts_of_block(a, first) + e, experts, blocks - first, epoch, -1, 0, value);
      if (!warp_all(ok)) return false;
      u32 own = 0;
#pragma unroll
      for (i32 i = 0; i < BATCH; i++)
        if (first + i < blocks) own += value[i];
      const u32 upto = sum + warp_scan(own);
      u32 earlier = upto - own;
#pragma unroll
      for (i32 i = 0; i < BATCH; i++) {
        if (first + i >= blocks) break;
        st_relaxed(earlier_blocks(a, first + i) + e, packet(earlier, epoch));
        earlier += value[i];
      }
      sum = warp_shfl(upto, WARP - 1);
    }
#pragma unroll 1
    for (i32 r = lane; r < w.ranks; r += WARP) st_relaxed(packets_of(a, r, w.rank, epoch) + e, packet(sum, epoch));
  }
  return true;
}

DEV bool receive_totals(const PlanArgs& a, const Tables& t, u32 epoch) {
  const World& w = a.world;
  const i32 experts = a.experts;
  u32 value[BATCH];
  for (i32 e = thread_index(); e < experts; e += block_threads()) {
    u32 total = 0, before = 0;
    for (i32 first = 0; first < w.ranks; first += BATCH) {
      const u64* packets = packets_of(a, w.rank, first, epoch) + e;
      if (!receive(w, packets, experts + 1, w.ranks - first, epoch, first, 1, value)) return false;
#pragma unroll
      for (i32 i = 0; i < BATCH; i++) {
        if (first + i < w.ranks) total += value[i];
        if (first + i < w.rank) before += value[i];
      }
    }
    u32 earlier[1];
    if (!receive(w, earlier_blocks(a, block_index()) + e, 0, 1, epoch, -1, 0, earlier)) return false;
    t.before[e] = before + earlier[0];
    t.share[e] = total;
    t.share[experts + e] = 0;
  }
  if (block_index() == 0)
    for (i32 r = thread_index(); r < w.ranks; r += block_threads()) {
      u32 num_tokens[1];
      if (!receive(w, packets_of(a, w.rank, r, epoch) + experts, 0, 1, epoch, r, 0, num_tokens)) return false;
      a.num_tokens_per_rank[r] = num_tokens[0];
    }
  return true;
}

DEV void place(const PlanArgs& a, const Tables& t) {
  const i32 epn = a.experts / a.world.ranks;
  const Share mine = share_of_warp(a);
  u32* taken = t.in_warp + warp_index() * a.experts;
  for (i64 i = mine.begin + lane_index(); i - lane_index() < mine.end; i += WARP) {
    const i32 e = i < mine.end ? expert_of(a, i) : -1;
    const u32 same = warp_match_any(e >= 0 ? e : ~0u), lower = same & lanes_below();
    i32 dst = -1;
    if (e >= 0) {
      const i32 g = t.before[e] + taken[e] + popc(lower), j = e % epn;
      i32 row = t.head[e / epn];
      while (g >= t.share[row * epn + j]) row = t.next[row];
      dst = t.first[row * epn + j] + g;
    }
    if (i < mine.end) a.dst[i] = dst;
    warp_sync();
    if (e >= 0 && lower == 0) taken[e] += popc(same);
    warp_sync();
  }
}

KERNEL(plan, PlanArgs) {
  const i32 ranks = a.world.ranks, epn = a.experts / ranks;
  u32 epoch;
  if (!begin_call(a.world, OP_PLAN, a.epochs, epoch)) return;
  const Tables t = tables(a);
  count_entries(a, t, epoch);
  const bool ok = send_totals(a, epoch) && receive_totals(a, t, epoch);
  if (block_any(!ok)) return;
  for (i32 h = warp_index(); h < ranks; h += block_warps()) {
    i32 tokens = 0;
    for (i32 j = lane_index(); j < epn; j += WARP) tokens += t.share[h * epn + j];
    tokens = warp_sum(tokens);
    if (lane_index() == 0) t.surplus[h] = tokens;
  }
  block_sync();
  if (warp_index() == 0) exchange(a, t);
  block_sync();
  for (i32 h = warp_index(); h < ranks; h += block_warps())
    if (link_rows(a, t, h) > 1) serve(a, t, h);
  block_sync();
  pad(a, t);
  block_sync();
  for (i32 r = warp_index(); r < ranks; r += block_warps()) {
    const i32 rows = lay_out(a, t, r);
    if (block_index() == r % grid_blocks()) record(a, t, r, rows);
  }
  block_sync();
  line_up(a, t);
  block_sync();
  place(a, t);
  end_call(a.epochs, epoch);
}
