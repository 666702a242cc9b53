// What low-latency dispatch and combine share: how a row travels, how a call starts, how a warp waits.
//
// A row of `pieces` 16-byte pieces travels in one of two ways into a slot of the receiver:
//   lines  128-byte lines of 112 bytes and the call's epoch, which becomes visible with them: no fence and no flag. It rests on a line
//          that 8 lanes store together becoming visible as a unit, which NVLink does and the PTX memory model does not promise.
//   flags  plain stores, then one release flag a row: the portable way.
// Slots, flags and packets exist twice, by parity of the epoch. A slot that is written in call e was last read in call e - 2, so
// what has arrived is told by equality: nobody can be ahead in it, and one not used for very long cannot look as if it had come.
#pragma once
#include "numeric.cuh"
#include "protocol.cuh"

struct Wire {
  i64 slots;  // offsets of this call's slots and flags in a chunk
  i64 flags;
  i32 pieces;
  bool lines;
};

constexpr i32 LINE_PIECES = 7, LINE_BYTES = 128;

// A row is handled in spots, a lane each: pieces in order, or with lines groups of 8 whose last spot has no piece.
DEV i32 spots_of(const Wire& wire) { return wire.lines ? (wire.pieces + LINE_PIECES - 1) / LINE_PIECES * 8 : wire.pieces; }
DEV i32 piece_at(const Wire& wire, i32 spot) {
  const i32 piece = !wire.lines ? spot : spot % 8 == LINE_PIECES ? -1
                                                                 : spot / 8 * LINE_PIECES + spot % 8;
  return piece < wire.pieces ? piece : -1;
}
// A warp's spots: warp_index() * WARP, then from one to the next by this. Where a block has a thread for every spot there is no loop.
DEV i32 next_spots(i32 first, i32 spots) {
#ifdef BLOCK_THREADS
  if (BLOCK_THREADS >= spots) return spots;
#endif
  return first + block_threads();
}
DEV i64 slot_bytes(const Wire& wire) {
  return wire.lines ? spots_of(wire) / 8 * LINE_BYTES : (wire.pieces * 16 + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES;
}
DEV u8* slot_at(const World& w, const Wire& wire, i32 rank, i64 slot) { return chunk(w, rank) + wire.slots + slot * slot_bytes(wire); }
// The wire of a call with this many slots and flags: the half of both areas that its parity names.
DEV Wire wire_of(i64 slots, i64 flags, i64 num_slots, i64 num_flags, i32 row_bytes, bool lines, u32 epoch) {
  Wire wire;
  wire.pieces = (row_bytes + 15) / 16;
  wire.lines = lines;
  wire.slots = slots + (epoch & 1) * num_slots * slot_bytes(wire);
  wire.flags = flags + (epoch & 1) * num_flags * 4;
  return wire;
}
DEV u32* flag_at(const World& w, const Wire& wire, i32 rank, i64 flag) { return (u32*)(chunk(w, rank) + wire.flags) + flag; }
// The line of a spot, null behind the row's end.
DEV u8* line_at(const Wire& wire, u8* slot, i32 spot) { return spot < spots_of(wire) ? slot + spot / 8 * LINE_BYTES : nullptr; }

// The whole warp stores its spots of a row.
DEV void put(const Wire& wire, u8* slot, i32 spot, Vec16 v, u32 epoch) {
  if (wire.lines) line_store(line_at(wire, slot, spot), v, epoch);
  else if (piece_at(wire, spot) >= 0) store16(slot + spot * 16, v);
}

// Whether a wait must end: this rank or a peer has given up, or it has lasted too long. `start`: when this was asked first, 0 before.
DEV bool must_end(const World& w, u64& start) {
  const u64 now = clock_ns();
  if (start == 0) start = now;
  return aborted(w) || (i64)(now - start) > w.timeout_ns;
}

// The whole warp waits until ready(seen) holds for each of its lanes. False for all of them: the timeout passed, or somebody gave up.
template <class Ready>
DEV bool warp_wait(const World& w, Ready ready, u32 wanted, i32 operation, i32 peer) {
  u32 seen = wanted - 1;
  u64 start = 0;
#pragma unroll 1
  for (u32 polls = 1;; polls++) {
    const bool mine = ready(seen);
    if (warp_all(mine)) return true;
    poll_hint();
    if (polls % 64 != 0 || !warp_any(must_end(w, start))) continue;  // the clock and the abort flag cost more than a poll
    if (lane_index() == ffs(warp_ballot(!mine)) - 1) give_up(w, operation, peer, seen, wanted);
    return false;
  }
}

// Starts a call: its epoch. False for the whole block if this rank has given up. AFTER_LAST: also waits for all peers to have
// entered the call before this one, so that they have read what lies in the slots of this parity.
template <bool AFTER_LAST>
DEV bool start_call(const World& w, i32 operation, u32* epochs, u32& epoch) {
  epoch = epochs[block_index()] + 1;
  bool stop = aborted(w);
  if (AFTER_LAST && warp_index() == 0) {
#pragma unroll 1
    for (i32 first = 0; first < w.ranks; first += WARP) {
      const i32 peer = first + lane_index();
      const u32* word = entry_word(w, w.rank, operation, peer);
      const u32 last = epoch - 1;
      const auto entered = [=](u32& seen) { return peer >= w.ranks || peer == w.rank || reached(seen = ld_relaxed(word), last); };
      stop = !warp_wait(w, entered, last, operation, peer) || stop;
    }
  }
  if (block_any(stop)) {
    if (thread_index() == 0) give_up(w, operation, -1, epoch - 1, epoch);
    return false;
  }
  if (thread_index() == 0) epochs[block_index()] = epoch;  // all threads of the block have read it
  return true;
}

// Block 0 tells the peers that this call has begun, when it has sent all it owes. Relaxed: the reads that the word vouches for
// were over before this kernel began.
DEV void tell_entered(const World& w, i32 operation, u32 epoch) {
#pragma unroll 1
  for (i32 r = thread_index(); r < w.ranks; r += block_threads()) st_relaxed(entry_word(w, r, operation, w.rank), epoch);
}

// A block's tokens are first_token(), first_token() + grid, ...: block 0, which starts first and has other work too, comes last.
DEV i32 first_token() { return block_index() == 0 ? grid_blocks() - 1 : block_index() - 1; }

template <class T>
DEV T* in_slab(u8* slab, i64 offset) { return (T*)(slab + offset); }
