// CUDA threads on one OS thread: every thread a fiber, all blocks resident, barriers as waiting lists.
//
// A fiber that waits at a barrier is off the run queue, so a block_sync over n threads costs n switches, and an empty
// run queue while threads are alive is a deadlock, which is reported. Fibers that spin stay on the queue.
//
// Without a seed the queue is first in, first out. With a seed (launch.h: set_schedule) the next fiber is drawn, some
// warps are slow for a whole launch, shared memory starts as garbage and bulk copies complete late (bulk.h).
#pragma once
#include <sched.h>

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "../args.h"
#include "fiber.h"

namespace [[gnu::visibility("hidden")]] simt {

constexpr u32 WARP_SIZE = 32;
constexpr u32 NAMED_BARRIERS = 16;
constexpr size_t MAX_ARGS = 4096;

enum class Wait : u8 {
  none,
  block,
  named,
  warp,
  mbarrier,
  exited,
};
enum Collective : u32 {
  COLLECTIVE_SYNC,
  COLLECTIVE_SHUFFLE,
  COLLECTIVE_VOTE,
  COLLECTIVE_MATCH,
  COLLECTIVE_MAX,
  COLLECTIVE_LINE,
};

struct Machine;
struct Block;
struct Warp;

struct Fiber {
  Context context;
  Fiber* next = nullptr;  // in the list where it waits
  Machine* machine = nullptr;
  Block* block = nullptr;
  Warp* warp = nullptr;
  char* stack = nullptr;
  u32 thread = 0;
  Wait wait = Wait::none;
  u32 detail = 0;  // named barrier, kind of collective or shared-memory offset of the mbarrier
  u32 groups = 0;  // bulk groups committed
};

struct WaitList {
  Fiber* head = nullptr;
  Fiber* tail = nullptr;
};

struct Barrier {
  WaitList list;
  u32 arrived = 0;
  u32 expected = 0;
};

// Values by generation: a lane may enter the next collective while others still read the last one's.
struct Warp {
  Barrier barrier;
  u32 generation;
  Collective kind;
  bool slow;
  u32 mask[2];
  u64 slot[2][WARP_SIZE];
};

struct Block {
  u32 index;
  u32 live;
  u32 generation;
  bool any[2];  // by generation
  Barrier sync;
  Barrier named[NAMED_BARRIERS];
  WaitList mbarriers;
  u8* shared;
};

struct Copy;

// What one OS thread needs to run kernels: storage that launches share, and the state of the running one.
struct Machine {
  Context root;
  std::vector<Fiber> fibers;
  std::vector<Block> blocks;
  std::vector<Warp> warps;
  std::vector<Copy> copies;    // under way
  std::vector<Fiber*> queue;   // a ring of `ready` fibers from `head` on
  u32 head = 0, ready = 0, mask = 0;
  u32 live = 0;
  u32 spins = 0;   // in a row
  u32 rounds = 0;  // of nothing but spinning, in a row
  u32 grid = 0, block_threads = 0;
  size_t shared = 0;
  bool seeded = false;
  u64 random = 0;
  u32 series = 0, launches = 0;
  char* stacks = nullptr;
  u8* arena = nullptr;  // shared memory of all blocks
  size_t arena_bytes = 0;
  const char* name = "";
  void (*body)(const void*) = nullptr;
  std::string error;
  alignas(16) u8 args[MAX_ARGS];

  Machine() = default;
  Machine(const Machine&) = delete;
  ~Machine();

  bool start(const char* kernel, u32 blocks, u32 threads, size_t shared_bytes);
  bool finish();
  bool advance_one(bool stuck);
  void check_stack(const Fiber& fiber) const;
  [[noreturn]] void deadlock();

  u32 draw(u32 below) {  // xorshift64*
    random ^= random >> 12, random ^= random << 25, random ^= random >> 27;
    return u32(random * 0x2545f4914f6cdd1dull >> 32) % below;
  }

  void push(Fiber* fiber) { queue[(head + ready++) & mask] = fiber; }

  Fiber* pop() {
    Fiber*& first = queue[head & mask];
    if (seeded)
      for (int tries = 0; tries < 4; tries++) {
        std::swap(first, queue[(head + draw(ready)) & mask]);
        if (!first->warp->slow || rounds > 1) break;  // who spins may be waiting for the slow one
      }
    head++, ready--;
    return first;
  }

  void release(WaitList& list) {
    for (Fiber* fiber = list.head; fiber != nullptr; fiber = fiber->next) push(fiber);
    list.head = nullptr;
  }
};

// The running fiber. In a library the model saves a call a use; musl would not load the library with it.
#if defined(__GLIBC__)
__attribute__((tls_model("initial-exec")))
#endif
inline thread_local Fiber* self = nullptr;

// ---- ending early

// Leaves all fibers where they are, destructors too, and returns to launch(), which reports the machine's error.
[[noreturn]] inline void abandon() {
  self->context.switch_to(self->machine->root, true);
  __builtin_unreachable();
}

[[noreturn, gnu::format(printf, 1, 2), gnu::cold]] inline void fail(const char* format, ...) {
  char text[512];
  size_t used = size_t(snprintf(text, sizeof text, "kernel %s, block %u, thread %u: ", self->machine->name, self->block->index, self->thread));
  va_list list;
  va_start(list, format);
  vsnprintf(text + used, sizeof text - used, format, list);
  va_end(list);
  self->machine->error = text;
  abandon();
}

// ---- switching

inline void run_next(bool last) {
  Fiber* from = self;
  Machine& m = *from->machine;
  if (m.seeded && m.draw(4) == 0) m.advance_one(false);
  while (m.ready == 0)
    if (!m.advance_one(true)) m.deadlock();
  Fiber* to = m.pop();
  if (to == from) return;
  self = to;
  from->context.switch_to(to->context, last);
}

inline void wait_in(WaitList& list, Wait why, u32 detail) {
  self->wait = why;
  self->detail = detail;
  self->next = nullptr;
  (list.head == nullptr ? list.head : list.tail->next) = self;
  list.tail = self;
  if (why != Wait::warp) self->machine->spins = self->machine->rounds = 0;  // a warp may spin together
  run_next(false);
}

// To the next fiber. After a round of nothing but spinning, what is waited for may be a load, or another rank that needs
// this core.
inline void spin() {
  Unseen unseen;
  Machine& m = *self->machine;
  if (++m.spins > m.ready) {
    m.spins = 0;
    m.rounds++;
    if (!m.advance_one(true)) sched_yield();
  }
  m.push(self);
  run_next(false);
}

// ---- barriers

inline void arrive(Barrier& barrier, u32 expected, Wait why, u32 detail, void* meeting) {
  order_before(meeting);
  if (++barrier.arrived == expected) {
    barrier.arrived = 0;
    self->machine->release(barrier.list);
  } else {
    wait_in(barrier.list, why, detail);
  }
  order_after(meeting);
}

inline bool sync_any(bool mine) {
  Unseen unseen;
  Block& block = *self->block;
  bool& any = block.any[block.generation & 1];
  if (block.sync.arrived == 0) any = false;
  any |= mine;
  if (block.sync.arrived + 1 == block.live) block.generation++;
  arrive(block.sync, block.live, Wait::block, 0, &any);
  return any;
}

inline void sync_named(i32 id, i32 threads) {
  Unseen unseen;
  if (id < 1 || id >= i32(NAMED_BARRIERS) || threads <= 0 || threads % i32(WARP_SIZE) != 0 || threads > i32(self->machine->block_threads))
    fail("named_sync(%d, %d): ids are 1 to 15, threads a multiple of 32 up to the block's", id, threads);
  Barrier& barrier = self->block->named[id];
  if (barrier.arrived == 0) barrier.expected = u32(threads);
  if (barrier.expected != u32(threads)) fail("named_sync(%d, %d): others wait there for %u threads", id, threads, barrier.expected);
  arrive(barrier, barrier.expected, Wait::named, u32(id), &barrier);
}

// All lanes give a value and a bit, to be found in slot[] and mask[] of the generation that is returned.
inline u32 collect(Collective kind, u64 value, bool bit) {
  Unseen unseen;
  Warp& warp = *self->warp;
  u32 half = warp.generation & 1, lane = self->thread % WARP_SIZE;
  if (warp.barrier.arrived == 0) warp.mask[half] = 0, warp.kind = kind;
  if (warp.kind != kind) fail("the lanes of this warp are at different warp collectives");
  warp.slot[half][lane] = value;
  warp.mask[half] |= u32(bit) << lane;
  if (warp.barrier.arrived + 1 == WARP_SIZE) warp.generation++;
  arrive(warp.barrier, WARP_SIZE, Wait::warp, kind, &warp.mask[half]);
  return half;
}

// A fiber ends. Threads that have exited do not count at block_sync, which may be complete now.
[[noreturn]] inline void leave() {
  Unseen unseen;
  Machine& m = *self->machine;
  Block& block = *self->block;
  self->wait = Wait::exited;
  block.live--;
  if (block.sync.arrived != 0 && block.sync.arrived == block.live) {
    block.sync.arrived = 0;
    block.generation++;
    m.release(block.sync.list);
  }
  m.spins = m.rounds = 0;
  order_before(&m.live);
  if (--m.live == 0) abandon();
  run_next(true);
  __builtin_unreachable();
}

}  // namespace simt
