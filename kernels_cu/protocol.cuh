// The words of the cross-rank protocol: chunks, entry words, epochs and waits that end. The rules are in docs/protocol.md.
#pragma once
#include "args.h"
#include "device.cuh"

DEV u8* chunk(const World& w, i32 rank) { return w.base + w.stride * rank; }

DEV u32* control_words(const World& w, i32 rank) { return (u32*)(chunk(w, rank) + w.control); }

// The word in rank `at`'s chunk that says how often rank `from` has entered `operation`.
DEV u32* entry_word(const World& w, i32 at, i32 operation, i32 from) {
  return control_words(w, at) + CONTROL_RAISED_BY + w.ranks * (1 + operation) + from;
}

// In a rank's control words: what every rank has chosen for its last call of `operation`, with the call's epoch above it.
DEV u64* choice_words(const World& w, u32* control, i32 operation) {
  return (u64*)control + (CONTROL_RAISED_BY + w.ranks * (1 + NUM_OPERATIONS) + 1) / 2 + w.ranks * operation;
}

// Epochs grow for ever and wrap: a signed difference, never equality, since a fast peer may already be one ahead.
DEV bool reached(u32 seen, u32 epoch) { return (i32)(seen - epoch) >= 0; }

DEV bool aborted(const World& w) { return ld_relaxed(control_words(w, w.rank) + CONTROL_ABORTED) != 0; }

// Ends every wait of this rank: the first wait to expire, or the first to see that a peer gave up, says what it missed; if it was
// not a peer's doing, the peers are told.
DEV_CALL void give_up(const World& w, i32 operation, i32 peer, u32 seen, u32 wanted) {
  u32* own = control_words(w, w.rank);
  if (atomic_exch_gpu(own + CONTROL_REPORTED, 1) != 0) return;  // a word that no peer writes, so one thread alone goes on
  w.error->operation = operation;
  w.error->peer = peer;
  w.error->seen = seen;
  w.error->wanted = wanted;
  w.error->block = block_index();
  w.error->thread = thread_index();
  const u32 before = ld_acquire(own + CONTROL_ABORTED);
  w.error->peer_raised = before == ABORTED_BY_PEER;
  st_relaxed(own + CONTROL_ABORTED, ABORTED_HERE);
#pragma unroll 1
  for (i32 i = 0; i < w.ranks * (1 + NUM_OPERATIONS); i++) ((u32*)(w.error + 1))[i] = ld_relaxed(own + CONTROL_RAISED_BY + i);
  st_release(&w.error->state, 1);
  if (before == ABORTED_BY_PEER) return;
#pragma unroll 1
  for (i32 r = 0; r < w.ranks; r++) {
    if (r == w.rank) continue;
    st_relaxed(control_words(w, r) + CONTROL_RAISED_BY + w.rank, 1);
    st_release(control_words(w, r) + CONTROL_ABORTED, ABORTED_BY_PEER);
  }
}

// Waits until ready(seen) is true. False: the timeout passed, or this rank or a peer had given up; then leave without
// touching anything that depends on what did not come. Where ready() looks at several ranks, it may keep `peer` at a late one.
template <class Ready>
DEV bool wait_for(const World& w, Ready ready, u32 wanted, i32 operation, const i32& peer) {
  u32 seen = 0;
  if (ready(seen)) return true;
  u64 start = clock_ns();
  for (u32 spins = 1;; spins++) {
    spin_hint();
    if (ready(seen)) return true;
    if (spins % 64 != 0) continue;  // the clock and the abort flag cost more than a poll
    if (aborted(w) || (i64)(clock_ns() - start) > w.timeout_ns) {
      give_up(w, operation, peer, seen, wanted);
      return false;
    }
  }
}

// Waits until *flag has reached the epoch; what its writer released before it is then visible to this thread.
DEV bool wait_until(const World& w, const u32* flag, u32 epoch, i32 operation, i32 peer) {
  return wait_for(w, [=](u32& seen) { return reached(seen = ld_acquire(flag), epoch); }, epoch, operation, peer);
}

// Waits for `peer` to have entered this call: it is then past all its earlier uses of its areas.
DEV bool wait_entered(const World& w, i32 operation, u32 epoch, i32 peer) {
  return wait_until(w, entry_word(w, w.rank, operation, peer), epoch, operation, peer);
}

// The whole warp waits until every peer has entered this call.
DEV bool peers_entered(const World& w, i32 operation, u32 epoch) {
  bool ok = true;
  for (i32 peer = lane_index(); peer < w.ranks; peer += WARP)
    ok = ok && (peer == w.rank || wait_entered(w, operation, epoch, peer));
  return warp_all(ok);
}

// False for the whole block if this rank has given up: then a kernel ends where it starts.
DEV bool may_begin(const World& w, i32 operation, u32 epoch) {
  if (!block_any(aborted(w))) return true;
  if (thread_index() == 0) give_up(w, operation, -1, epoch - 1, epoch);
  return false;
}

// Starts a call: its epoch, told to every peer by block 0. False for the whole block if this rank has given up.
// choice: what all ranks must have chosen alike (compare_choices), as a number; 0 = there is nothing to choose.
DEV bool begin_call(const World& w, i32 operation, const u32* epochs, u32& epoch, u32 choice = 0) {
  epoch = epochs[block_index()] + 1;
  if (!may_begin(w, operation, epoch)) return false;
  if (block_index() == 0)
#pragma unroll 1
    for (i32 r = thread_index(); r < w.ranks; r += block_threads()) {
      if (choice != 0) st_relaxed(choice_words(w, control_words(w, r), operation) + w.rank, (u64)epoch << 32 | choice);
      st_release(entry_word(w, r, operation, w.rank), epoch);
    }
  return true;
}

// Ends a call. Each block keeps its own copy of the epoch and is its only writer, so no block needs to know of another.
DEV void end_call(u32* epochs, u32 epoch) {
  block_sync();
  if (thread_index() == 0) epochs[block_index()] = epoch;
}

// Counts the peers that have chosen otherwise for this call, as far as they have entered it. For one warp, once a call.
DEV_CALL void compare_choices(const World& w, i32 operation, u32 epoch, u32 choice) {
  const u64* theirs = choice_words(w, control_words(w, w.rank), operation);
#pragma unroll 1
  for (i32 r = lane_index(); r < w.ranks; r += WARP) {
    const u64 seen = ld_relaxed(theirs + r);
    if ((u32)(seen >> 32) == epoch && (u32)seen != choice) atomic_add(w.bad_input + BAD_CHOICES, 1);
  }
}
