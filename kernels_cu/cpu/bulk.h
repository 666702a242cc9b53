// mbarriers and the bulk copy engine.
//
// Without a seed a copy completes when it is issued. With a seed it completes whenever the dice say so, and lazy ones only
// when they must: a load when nothing else gets on, a store at the wait that asks for it. A load reads its source when it completes;
// a store first reads shared memory and later writes, so that neither kind of wait can be left out unnoticed.
#pragma once
#include <cstdlib>

#include "simt.h"

namespace [[gnu::visibility("hidden")]] simt {

// As in PTX: a phase is complete when no arrival and no byte is pending.
struct Mbarrier {
  u32 phase : 1;
  u32 count : 15;
  u32 pending : 16;
  i32 bytes;
};
static_assert(sizeof(Mbarrier) == sizeof(u64));

struct Copy {
  enum State : u8 {
    issued,
    read,
    done,
  };
  Fiber* owner;
  u8* to;
  const u8* from;
  u32 bytes;
  u32 group;           // of a store
  Mbarrier* mbarrier;  // of a load; null: a store
  u32 phase;           // of the mbarrier
  State state;
  bool lazy;
  bool waited;  // a store whose source a wait has covered
  u8* buffer;   // what a store has read
};

inline u32 offset_in_shared(const void* p) { return u32(static_cast<const u8*>(p) - self->block->shared); }

// Ends the phase if nothing is pending.
inline void settle(Mbarrier& mbarrier, Block& block, Machine& m) {
  if (mbarrier.pending != 0 || mbarrier.bytes != 0) return;
  mbarrier.phase ^= 1;
  mbarrier.pending = mbarrier.count;
  m.release(block.mbarriers);  // those that wait for another one go back to waiting
}

inline void mbarrier_arrive(Mbarrier& mbarrier, u32 bytes) {
  Unseen unseen;
  if (mbarrier.pending == 0) fail("mbarrier at shared offset %u: more arrivals than its count of %u", offset_in_shared(&mbarrier), u32(mbarrier.count));
  order_before(&mbarrier);
  mbarrier.pending--;
  mbarrier.bytes += i32(bytes);
  settle(mbarrier, *self->block, *self->machine);
}

inline void mbarrier_await(Mbarrier& mbarrier, u32 parity) {
  Unseen unseen;
  while (mbarrier.phase == (parity & 1)) wait_in(self->block->mbarriers, Wait::mbarrier, offset_in_shared(&mbarrier));
  order_after(&mbarrier);
  auto& copies = self->machine->copies;
  for (size_t i = copies.size(); i-- > 0;)
    if (copies[i].mbarrier == &mbarrier && copies[i].phase == (parity & 1) && copies[i].state == Copy::done)
      std::swap(copies[i], copies.back()), copies.pop_back();
}

inline void advance(Machine& m, Copy& copy, Copy::State target) {
  if (copy.mbarrier != nullptr) {
    memcpy(copy.to, copy.from, copy.bytes);
    copy.state = Copy::done;
    copy.mbarrier->bytes -= i32(copy.bytes);
    settle(*copy.mbarrier, *copy.owner->block, m);
    return;
  }
  if (copy.state == Copy::issued) {
    copy.buffer = static_cast<u8*>(malloc(copy.bytes));
    memcpy(copy.buffer, copy.from, copy.bytes);
    copy.state = Copy::read;
  }
  if (copy.state == Copy::read && target == Copy::done) {
    memcpy(copy.to, copy.buffer, copy.bytes);
    free(copy.buffer);
    copy.state = Copy::done;
  }
}

// One step of some copy. When nothing else gets on: of a load, the only kind that others wait for; else of one that is
// not lazy. False if there is none.
inline bool Machine::advance_one(bool stuck) {
  const u32 n = u32(copies.size()), first = n == 0 ? 0 : draw(n);
  for (u32 i = 0; i < n; i++) {
    Copy& copy = copies[(first + i) % n];
    if (copy.state == Copy::done || (stuck ? copy.mbarrier == nullptr : copy.lazy)) continue;
    advance(*this, copy, copy.state == Copy::issued ? Copy::read : Copy::done);
    return true;
  }
  return false;
}

inline void check_copy(const char* what, const void* shared, const void* global, u32 bytes) {
  if (((reinterpret_cast<uintptr_t>(shared) | reinterpret_cast<uintptr_t>(global) | bytes) & 15) != 0)
    fail("%s: addresses %p, %p or %u bytes are not multiples of 16", what, shared, global, bytes);
  u32 offset = offset_in_shared(shared);
  if (offset > self->machine->shared || bytes > self->machine->shared - offset)
    fail("%s: %u bytes at %p are not in this block's %zu bytes of shared memory", what, bytes, shared, self->machine->shared);
}

inline void issue(const void* from, void* to, u32 bytes, Mbarrier* mbarrier) {
  Copy copy{};
  copy.owner = self;
  copy.from = static_cast<const u8*>(from);
  copy.to = static_cast<u8*>(to);
  copy.bytes = bytes;
  copy.mbarrier = mbarrier;
  if (mbarrier != nullptr) copy.phase = mbarrier->phase;
  else copy.group = self->groups;
  copy.lazy = self->machine->draw(2) == 0;
  self->machine->copies.push_back(copy);
}

inline void copy_in(void* shared, const void* global, u32 bytes, Mbarrier& mbarrier) {
  check_copy("row_load", shared, global, bytes);
  if (!self->machine->seeded) memcpy(shared, global, bytes);
  Unseen unseen;
  if (self->machine->seeded) return issue(global, shared, bytes, &mbarrier);
  order_before(&mbarrier);
  mbarrier.bytes -= i32(bytes);
  settle(mbarrier, *self->block, *self->machine);
}

inline void copy_out(void* global, const void* shared, u32 bytes) {
  check_copy("row_store", shared, global, bytes);
  if (!self->machine->seeded) memcpy(global, shared, bytes);
  Unseen unseen;
  if (self->machine->seeded) issue(shared, global, bytes, nullptr);
}

// All but the `pending` latest groups of this thread have read their sources / are complete.
inline void wait_groups(u32 pending, Copy::State target) {
  Unseen unseen;
  auto& copies = self->machine->copies;
  for (size_t i = copies.size(); i-- > 0;) {
    Copy& copy = copies[i];
    if (copy.owner != self || copy.mbarrier != nullptr || copy.group + pending >= self->groups) continue;
    advance(*self->machine, copy, target);
    copy.waited = true;
    if (copy.state == Copy::done) std::swap(copy, copies.back()), copies.pop_back();
  }
}

// On a GPU, shared memory is gone when its block ends.
inline void check_stores_waited() {
  Unseen unseen;
  for (const Copy& copy : self->machine->copies)
    if (copy.owner == self && copy.mbarrier == nullptr && !copy.waited)
      fail("exits with a row_store of %u bytes that no row_wait or row_wait_read covers", copy.bytes);
}

// After the last fiber: what is left to write is written. Returns a load that nobody waited for, if any.
inline const Copy* flush(Machine& m) {
  const Copy* lost = nullptr;
  for (Copy& copy : m.copies) {
    if (copy.mbarrier != nullptr) lost = &copy;
    else advance(m, copy, Copy::done);
  }
  return lost;
}

}  // namespace simt
