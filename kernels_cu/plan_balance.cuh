// The plan itself, from the totals of every expert: who takes over how many tokens of which experts, and where they lie. Every
// block computes it in shared memory. Ties go to the lower rank and the lower expert.
#pragma once
#include "protocol.cuh"

constexpr i32 NONE = 0x7fffffff;

// In shared memory. A row is epn words, one for each expert of a home rank: row h holds the shares that stay at home on rank h,
// row R + r the shares that rank r takes over from the experts of giver[r].
struct Tables {
  u32* in_warp;   // [warps][E] counts of each warp, then the entries of the block's earlier warps
  i32* before;    // [E] entries on earlier ranks and in earlier blocks
  i32* share;     // [2R][epn] tokens; after `line_up`: tokens on this and all lower ranks
  i32* first;     // [2R][epn] first row of the segment; after `line_up`: destination = this + number of the entry
  i32* surplus;   // [R]
  i32* giver;     // [R] whose experts rank r takes over, -1: nobody's
  i32* open;      // [R] tokens that rank r has still to be given
  i32* head;      // [R] of the home's rows, the one of the lowest rank
  i32* next;      // [2R] the home's row of the next higher rank, -1: no more
};

DEV Tables tables(const PlanArgs& a) {
  const i32 experts = a.experts, ranks = a.world.ranks;
  Tables t;
  t.in_warp = (u32*)smem();
  t.before = (i32*)t.in_warp + block_warps() * experts;
  t.share = t.before + experts;
  t.first = t.share + 2 * experts;
  t.surplus = t.first + 2 * experts;
  t.giver = t.surplus + ranks;
  t.open = t.giver + ranks;
  t.head = t.open + ranks;
  t.next = t.head + ranks;
  return t;
}

DEV i32 warp_sum(i32 v) {
  for (i32 step = WARP / 2; step > 0; step /= 2) v += warp_shfl_xor(v, step);
  return v;
}
// Sum over this and all lower lanes.
DEV i32 warp_scan(i32 v) {
  for (i32 step = 1; step < WARP; step *= 2) {
    const i32 lower = warp_shfl_up(v, step);
    if (lane_index() >= step) v += lower;
  }
  return v;
}

// The largest surplus fills the largest deficit completely, until there is no surplus; so a rank has one giver at most.
// One warp; each lane looks after the ranks lane, lane + 32, ... and alone touches their words.
DEV void exchange(const PlanArgs& a, const Tables& t) {
  const i32 ranks = a.world.ranks, lane = lane_index();
  i32 total = 0;
#pragma unroll 1
  for (i32 r = lane; r < ranks; r += WARP) total += t.surplus[r];
  total = warp_sum(total);
#pragma unroll 1
  for (i32 r = lane; r < ranks; r += WARP) {
    t.surplus[r] -= total / ranks + (r < total % ranks);
    t.giver[r] = -1;
    t.open[r] = 0;
  }
  for (;;) {
    i32 most = -NONE, least = NONE, giver = NONE, receiver = NONE;
#pragma unroll 1
    for (i32 r = lane; r < ranks; r += WARP) {
      const i32 s = t.surplus[r];
      if (s > most) most = s, giver = r;
      if (s < least) least = s, receiver = r;
    }
    const i32 surplus = warp_max(most), deficit = -warp_min(least);
    if (surplus <= 0) return;
    giver = warp_min(most == surplus ? giver : NONE);
    receiver = warp_min(least == -deficit ? receiver : NONE);
    if (lane == receiver % WARP) {
      t.giver[receiver] = giver;
      t.open[receiver] = deficit;
      t.surplus[receiver] = 0;
    }
    if (lane == giver % WARP) t.surplus[giver] -= deficit;
  }
}

// A home's rows in ascending rank, as a list. One warp; returns how many there are.
DEV i32 link_rows(const PlanArgs& a, const Tables& t, i32 home) {
  const i32 ranks = a.world.ranks, lane = lane_index();
  i32 head = -1, rows = 0;
#pragma unroll 1
  for (i32 first = (ranks - 1) / WARP * WARP; first >= 0; first -= WARP) {
    const i32 r = first + lane;
    const bool here = r < ranks && (r == home || t.giver[r] == home);
    const i32 row = r == home ? r : ranks + r;
    const u32 mask = warp_ballot(here), higher = mask & ~(lanes_below() | 1u << lane);
    const i32 next = warp_shfl(row, higher ? ffs(higher) - 1 : 0), lowest = warp_shfl(row, mask ? ffs(mask) - 1 : 0);
    if (here) t.next[row] = higher ? next : head;
    if (mask) head = lowest;
    rows += popc(mask);
  }
  if (lane == 0) t.head[home] = head;
  return rows;
}

// The largest open amount is met from the home's largest remaining expert, until nothing is open. One warp; a lane looks after
// every 32nd rank and expert.
DEV void serve(const PlanArgs& a, const Tables& t, i32 home) {
  const i32 ranks = a.world.ranks, epn = a.experts / ranks, lane = lane_index();
  i32* left = t.share + home * epn;
  i32 most = 0, receiver = NONE, largest = 0, expert = NONE;
  bool look_at_ranks = true, look_at_experts = true;
  for (;;) {
    if (look_at_ranks) {
      most = 0, receiver = NONE;
#pragma unroll 1
      for (i32 r = lane; r < ranks; r += WARP)
        if (t.giver[r] == home && t.open[r] > most) most = t.open[r], receiver = r;
    }
    if (look_at_experts) {
      largest = 0, expert = NONE;
      for (i32 j = lane; j < epn; j += WARP)
        if (left[j] > largest) largest = left[j], expert = j;
    }
    const i32 wanted = warp_max(most), found = warp_max(largest);
    if (wanted == 0) return;
    const i32 to = warp_min(most == wanted ? receiver : NONE), from = warp_min(largest == found ? expert : NONE);
    const i32 amount = min(wanted, found);
    look_at_ranks = lane == to % WARP;
    look_at_experts = lane == from % WARP;
    if (look_at_ranks) t.open[to] -= amount;
    if (look_at_experts) {
      left[from] -= amount;
      t.share[(ranks + to) * epn + from] = amount;
    }
  }
}

DEV i32 padded(const PlanArgs& a, i32 tokens) { return (tokens + a.token_padding - 1) / a.token_padding * a.token_padding; }

// Rows of every segment, where their first row is to be.
DEV void pad(const PlanArgs& a, const Tables& t) {
#pragma unroll 1
  for (i32 i = thread_index(); i < 2 * a.experts; i += block_threads()) t.first[i] = padded(a, t.share[i]);
}

// A rank's segments lie back to back: its home experts, then what it takes over, in ascending id. One warp; a lane has
// consecutive segments. Returns the rows of all.
DEV i32 lay_out(const PlanArgs& a, const Tables& t, i32 rank) {
  const i32 epn = a.experts / a.world.ranks, each = (2 * epn + WARP - 1) / WARP;
  const i32 begin = min(lane_index() * each, 2 * epn), end = min(begin + each, 2 * epn);
  i32* home = t.first + rank * epn;
  i32* over = t.first + (a.world.ranks + rank - 1) * epn;
  i32 rows = 0;
  for (i32 i = begin; i < end; i++) rows += (i < epn ? home : over)[i];
  const i32 upto = warp_scan(rows);
  i32 row = upto - rows;
#pragma unroll 1
  for (i32 i = begin; i < end; i++) {
    i32& first = (i < epn ? home : over)[i];
    const i32 size = first;
    first = row;
    row += size;
  }
  return warp_shfl(upto, WARP - 1);
}

// Writes down the rank's prefetch slots and, on the rank itself, what its segments hold. The warp of `lay_out`, with its result.
DEV void record(const PlanArgs& a, const Tables& t, i32 rank, i32 rows) {
  const i32 epn = a.experts / a.world.ranks, lane = lane_index();
  const bool mine = rank == a.world.rank;
  warp_sync();
#pragma unroll 1
  for (i32 i = lane; mine && i < epn; i += WARP) {
    const i32 at = rank * epn + i, n = t.share[at];
    a.counts[i] = n;
    a.cu_seqlens[i] = t.first[at] + padded(a, n);
  }
  i32 slots = 0;
#pragma unroll 1
  for (i32 begin = 0; begin < epn; begin += WARP) {
    const i32 i = begin + lane, at = (a.world.ranks + rank) * epn + i, n = i < epn ? t.share[at] : 0;
    const u32 used = warp_ballot(n > 0);
    const i32 slot = slots + popc(used & lanes_below());
    slots += popc(used);
    if (n == 0) continue;
    a.experts_to_copy[rank * epn + slot] = t.giver[rank] * epn + i;
    if (!mine) continue;
    a.counts[epn + slot] = n;
    a.cu_seqlens[epn + slot] = t.first[at] + padded(a, n);
  }
#pragma unroll 1
  for (i32 slot = slots + lane; slot < epn; slot += WARP) {
    a.experts_to_copy[rank * epn + slot] = -1;
    if (!mine) continue;
    a.counts[epn + slot] = 0;
    a.cu_seqlens[epn + slot] = rows;
  }
}

// The ranks' shares of every expert one after the other, in ascending rank.
DEV void line_up(const PlanArgs& a, const Tables& t) {
  const i32 ranks = a.world.ranks, epn = a.experts / ranks;
  for (i32 e = thread_index(); e < a.experts; e += block_threads()) {
    i32 upto = 0;
    for (i32 row = t.head[e / epn]; row >= 0; row = t.next[row]) {
      const i32 at = row * epn + e % epn;
      t.first[at] += (row < ranks ? row : row - ranks) * a.row_capacity - upto;
      upto += t.share[at];
      t.share[at] = upto;
    }
  }
}
