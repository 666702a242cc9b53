// The routing of low-latency dispatch: which packets pass between ranks, and how block 0 makes them.
//
// A list is what rows lie contiguous in: an expert (expert-major) or a rank (rank-major).
#pragma once
#include "low_latency.cuh"

typedef LowLatencyDispatchArgs Args;

constexpr i32 NO_EXPERT = -1, BAD_ID = -2;

// Shared memory: the token's row as it travels, lengths of all lists [R][lists of a rank], then two of each, by turns, for a token at a
// time: which entries of each source lie here [R], their rows [R][K]; and for block 0 its table.
DEV u8* staged_row() { return smem(); }
DEV u32* list_lengths(const Args& a) { return (u32*)(smem() + a.shared_counts); }
DEV u32* masks_of(const Args& a, i32 turn) { return (u32*)(smem() + a.shared_masks) + (turn & 1) * SHAPE(ranks); }
DEV i32* places_of(const Args& a, i32 turn) { return (i32*)(smem() + a.shared_places) + (turn & 1) * SHAPE(ranks) * SHAPE(topk); }

DEV i32 local_experts(const Args& a) { return SHAPE(experts) / SHAPE(ranks); }
DEV i32 lists_of_rank(const Args& a) { return SHAPE(rank_major) ? 1 : local_experts(a); }

// Packets {value, epoch, value, epoch} of the call's parity, which rank `from` sends to rank `at`. One a token: bits of the entries that
// lie there, and the token's index (rank-major). One an entry that lies there: local expert << 16 | index, weight.
DEV u8* mask_packet(const Args& a, i32 at, i32 from, i32 token, u32 epoch) {
  const i64 i = ((epoch & 1) * SHAPE(ranks) + from) * (i64)a.capacity + token;
  return chunk(a.world, at) + a.masks + i * 16;
}
DEV u8* entry_packet(const Args& a, i32 at, i32 from, i64 entry, u32 epoch) {
  const i64 i = ((epoch & 1) * SHAPE(ranks) + from) * (i64)a.capacity * SHAPE(topk) + entry;
  return chunk(a.world, at) + a.entries + i * 16;
}
// {length, epoch} of a list.
DEV u64* length_packet(const Args& a, i32 at, i32 from, i32 list, u32 epoch) {
  return (u64*)(chunk(a.world, at) + a.counts) + ((epoch & 1) * SHAPE(ranks) + from) * lists_of_rank(a) + list;
}

// The expert of an entry of this rank.
DEV i32 expert_of(const Args& a, i64 entry) {
  if (entry >= (i64)a.num_tokens * SHAPE(topk)) return NO_EXPERT;
  const i64 id = a.index_bytes == 8 ? ((const i64*)a.topk_idx)[entry] : ((const i32*)a.topk_idx)[entry];
  return id >= -1 && id < SHAPE(experts) ? (i32)id : BAD_ID;
}

// The rank that this lane's entry of a token goes to, -1: none.
DEV i32 target_of(const Args& a, i32 token) {
  const i32 expert = lane_index() < SHAPE(topk) ? expert_of(a, (i64)token * SHAPE(topk) + lane_index()) : NO_EXPERT;
  return token < a.num_tokens && expert >= 0 ? expert / local_experts(a) : -1;
}

// ---- block 0
// For a window of 32 * W tokens at a time: which of them are in each list [lists][W], and each token's entries on each rank
// [tokens][R]; and how many came before the window.
struct Table {
  u32* before;
  u32* bits;
  u32* masks;
  i32 lists, words;
};
DEV Table table_of(const Args& a) {
  Table t;
  t.lists = SHAPE(ranks) * lists_of_rank(a);
  t.words = a.bitmap_words;
  t.before = (u32*)(smem() + a.shared_table);
  t.bits = t.before + t.lists;
  t.masks = t.bits + t.lists * t.words;
  return t;
}
DEV u32 index_in_list(const Table& t, i32 list, i32 token) {
  const u32* bits = t.bits + list * t.words;
  u32 index = t.before[list] + popc(bits[token / 32] & ((1u << token % 32) - 1));
#pragma unroll 1
  for (i32 i = 0; i < token / 32; i++) index += popc(bits[i]);
  return index;
}

struct Entry {
  i32 expert;
  f32 weight;
};
DEV Entry entry_of(const Args& a, i64 entry) {
  Entry e;
  e.expert = expert_of(a, entry);
  e.weight = e.expert >= 0 && a.topk_weights ? a.topk_weights[entry] : 1.f;
  return e;
}

DEV void clear_table(const Args& a, const Table& t, i32 first) {
  const i32 end = t.lists * (1 + t.words) + 32 * t.words * SHAPE(ranks);
#pragma unroll 1
  for (i32 i = first + thread_index(); i < end; i += block_threads()) t.before[i] = 0;
}

// `first`: the entry of this thread's number, loaded early.
DEV void send_routing(const Args& a, Entry first, u32 epoch) {
  const i32 topk = SHAPE(topk), ranks = SHAPE(ranks), me = a.world.rank, local = local_experts(a);
  const Table t = table_of(a);
#pragma unroll 1
  for (i32 begin = 0; begin < a.capacity; begin += 32 * t.words) {
    const i32 tokens = min(a.capacity - begin, 32 * t.words);
    const bool ends = begin + tokens == a.capacity;
    const i64 base = (i64)begin * topk;
#pragma unroll 1
    for (i32 i = thread_index(); i < tokens * topk; i += block_threads()) {
      const Entry e = base + i == thread_index() ? first : entry_of(a, base + i);
      if (e.expert == BAD_ID) atomic_add(a.world.bad_input + BAD_EXPERT_IDS, 1);
      if (e.expert < 0) continue;
      const i32 token = i / topk, rank = e.expert / local, list = SHAPE(rank_major) ? rank : e.expert;
      atomic_or(t.bits + list * t.words + token / 32, 1u << token % 32);
      atomic_or(t.masks + token * ranks + rank, 1u << i % topk);
    }
    block_sync();
    if (ends)
#pragma unroll 1
      for (i32 list = thread_index(); list < t.lists; list += block_threads()) {
        const u32 length = index_in_list(t, list, 32 * t.words - 1) + (t.bits[list * t.words + t.words - 1] >> 31);
        st_relaxed(length_packet(a, list / lists_of_rank(a), me, list % lists_of_rank(a), epoch), (u64)epoch << 32 | length);
      }
#pragma unroll 1
    for (i32 i = thread_index(); i < tokens * ranks; i += block_threads()) {
      const i32 token = i % tokens, rank = i / tokens;
      const u32 mask = t.masks[token * ranks + rank], index = SHAPE(rank_major) ? index_in_list(t, rank, token) : 0;
      packet_store(mask_packet(a, rank, me, begin + token, epoch), Vec16{mask, epoch, index, epoch});
    }
#pragma unroll 1
    for (i32 i = thread_index(); i < tokens * topk; i += block_threads()) {
      const Entry e = base + i == thread_index() ? first : entry_of(a, base + i);
      const i32 rank = e.expert >= 0 ? e.expert / local : -1;
      if (base + i < (i64)a.num_tokens * topk) {
        in_slab<i32>(a.slab, a.at.targets)[base + i] = rank;
        in_slab<f32>(a.slab, a.at.route_weights)[base + i] = e.weight;
      }
      if (e.expert < 0) continue;
      const u32 index = SHAPE(rank_major) ? 0 : index_in_list(t, e.expert, i / topk);
      const Vec16 packet = Vec16{(u32)(e.expert - rank * local) << 16 | index, epoch, f32_bits(e.weight), epoch};
      packet_store(entry_packet(a, rank, me, base + i, epoch), packet);
    }
    if (ends) break;
    block_sync();
#pragma unroll 1
    for (i32 list = thread_index(); list < t.lists; list += block_threads())
      t.before[list] = index_in_list(t, list, 32 * t.words - 1) + (t.bits[list * t.words + t.words - 1] >> 31);
    block_sync();
    clear_table(a, t, t.lists);
    block_sync();
  }
}
