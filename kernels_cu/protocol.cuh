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

// Epochs grow for ever and wrap: a signed difference, never equality, since a fast peer may already be one ahead.
DEV bool reached(u32 seen, u32 epoch) { return (i32)(seen - epoch) >= 0; }

DEV bool aborted(const World& w) { return ld_relaxed(control_words(w, w.rank) + CONTROL_ABORTED) != 0; }

// Ends every wait of this rank: the first wait to expire, or the first to see that a peer gave up, says what it missed; if it was
// not a peer's doing, the peers are told.
DEV_CALL void give_up(const World& w, i32 operation, i32 peer, u32 seen, u32 wanted) {
  const u32 before = atomic_exch_gpu(control_words(w, w.rank) + CONTROL_ABORTED, ABORTED_HERE);
  ErrorRecord* record = w.error;
  if (before == ABORTED_HERE || ld_acquire(&record->state) != 0) return;
  record->peer_raised = before == ABORTED_BY_PEER;
  record->operation = operation;
  record->rank = w.rank;
  record->peer = peer;
  record->seen = seen;
  record->wanted = wanted;
  record->block = block_index();
  record->thread = thread_index();
  st_release(&record->state, 1);
  if (before == ABORTED_BY_PEER) return;
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

// Starts a call: its epoch, told to every peer by block 0. False for the whole block if this rank has given up.
DEV bool begin_call(const World& w, i32 operation, const u32* epochs, u32& epoch) {
  epoch = epochs[block_index()] + 1;
  if (block_any(aborted(w))) {
    if (thread_index() == 0) give_up(w, operation, -1, epoch - 1, epoch);
    return false;
  }
  if (block_index() == 0)
    for (i32 r = thread_index(); r < w.ranks; r += block_threads()) st_release(entry_word(w, r, operation, w.rank), epoch);
  return true;
}

// Ends a call. Each block keeps its own copy of the epoch and is its only writer, so no block needs to know of another.
DEV void end_call(u32* epochs, u32 epoch) {
  block_sync();
  if (thread_index() == 0) epochs[block_index()] = epoch;
}
