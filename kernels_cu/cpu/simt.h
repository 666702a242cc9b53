// A grid of CUDA threads on one OS thread: every thread a fiber, all blocks resident, barriers as waiting lists.
// A fiber that waits at a barrier is off the run queue, so a block_sync over n threads costs n switches, and a run queue
// that is empty while threads are alive is a deadlock, which is reported.
//
// Without a seed the queue is first in, first out, and bulk copies complete when they are issued. With a seed
// (set_schedule) the next fiber is drawn, some warps are slow for a whole launch, shared memory starts as garbage,
// and bulk copies complete late: whenever the dice say so, at the latest at the wait that asks for them.
#pragma once
#include <sched.h>
#include <sys/mman.h>

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "../args.h"
#include "fiber.h"

namespace simt {

constexpr u32 WARP_SIZE = 32;
constexpr u32 NAMED_BARRIERS = 16;
constexpr size_t MAX_ARGS = 4096;
constexpr size_t MAX_SHARED = 227 * 1024;
constexpr size_t SHARED_GUARD = 128;  // behind each block's shared memory, checked after the launch
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || !defined(__OPTIMIZE__)
constexpr size_t STACK_BYTES = 256 * 1024;
#else
constexpr size_t STACK_BYTES = 64 * 1024;
#endif
// Not a multiple of a page: tops of stacks spread over the cache sets.
constexpr size_t STACK_STRIDE = STACK_BYTES + 5 * 64;
// The lowest part of a stack is not for use; a word at its upper end tells an overflow before a neighbour is hurt.
constexpr size_t STACK_RESERVE = 8 * 1024;
constexpr u64 CANARY = 0x5ca1ab1e0ddba11ull;

enum class Wait : u8 { none, block, named, warp, mbarrier, exited };

struct Machine;
struct Block;
struct Warp;

struct Fiber {
  Context context;
  Fiber* next = nullptr;  // in the list where it waits
  Machine* machine = nullptr;
  Block* block = nullptr;
  Warp* warp = nullptr;
  u32 thread = 0;
  Wait wait = Wait::none;
  u32 detail = 0;       // named barrier id, kind of collective or shared-memory offset of the mbarrier
  u32 groups = 0;       // bulk groups committed
  char* stack = nullptr;
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

// Two generations of slots: a lane may enter the next collective while others still read this one's.
struct Warp {
  u64 slot[2][WARP_SIZE];
  u32 mask[2];
  u32 generation;
  u32 kind;
  Barrier barrier;
  bool slow;
};

struct Block {
  u32 index;
  u32 live;
  u32 generation;
  bool any[2];
  Barrier sync;
  Barrier named[NAMED_BARRIERS];
  WaitList mbarriers;
  u8* shared;
};

// As in PTX: a phase is complete when no arrival and no byte is pending.
struct Mbarrier {
  u32 phase : 1;
  u32 count : 15;
  u32 pending : 16;
  i32 bytes;
};
static_assert(sizeof(Mbarrier) == sizeof(u64));

// A bulk copy under way (only with a seed).
struct Copy {
  enum State : u8 { issued, read, done } state;
  bool waited;   // a store whose source a wait has covered
  u32 phase;     // of the mbarrier a load reports to
  u32 group;     // a store's bulk group
  u32 bytes;
  u8* to;
  const u8* from;
  u64* mbarrier;  // null: a store
  Fiber* owner;
  u8* buffer;     // what a store has read
};

inline thread_local Fiber* self = nullptr;

// The process's schedule: 0 = none. Every set_schedule starts a new series of launches on every OS thread.
inline std::atomic<u64> schedule_seed{0};
inline std::atomic<u32> schedule_series{0};

[[noreturn]] inline void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

struct Machine {
  Context root;
  std::vector<Fiber> fibers;
  std::vector<Block> blocks;
  std::vector<Warp> warps;
  std::vector<Copy> copies;
  std::vector<Fiber*> queue;  // a ring
  u32 head = 0, ready = 0, mask = 0;
  u32 live = 0;
  u32 spins = 0;
  u32 grid = 0, block_threads = 0;
  size_t shared = 0;
  bool seeded = false;
  u64 random = 0;
  u32 series = 0, launches = 0;
  char* stacks = nullptr;
  u8* arena = nullptr;
  size_t arena_bytes = 0;
  void (*body)(const void*) = nullptr;
  const char* name = "";
  alignas(16) u8 args[MAX_ARGS];
  std::string error;

  Machine() = default;
  Machine(const Machine&) = delete;
  ~Machine() {
    for (Fiber& fiber : fibers) fiber.context.release();
    if (stacks != nullptr) munmap(stacks, fibers.size() * STACK_STRIDE);
    if (arena != nullptr) munmap(arena, arena_bytes);
  }

  u32 draw(u32 below) {  // xorshift64*
    random ^= random >> 12, random ^= random << 25, random ^= random >> 27;
    return u32((random * 0x2545f4914f6cdd1dull) >> 32) % below;
  }

  void push(Fiber* fiber) { queue[(head + ready++) & mask] = fiber; }
  Fiber* pop() {
    Fiber*& first = queue[head & mask];
    if (seeded)
      for (int tries = 0; tries < 4; tries++) {
        std::swap(first, queue[(head + draw(ready)) & mask]);
        if (!first->warp->slow) break;
      }
    Fiber* fiber = first;
    head++, ready--;
    return fiber;
  }
  void release(WaitList& list) {
    for (Fiber* fiber = list.head; fiber != nullptr; fiber = fiber->next) {
      fiber->wait = Wait::none;
      push(fiber);
    }
    list.head = nullptr;
  }

  bool start(const char* kernel, u32 grid_, u32 threads, size_t shared_bytes);
  bool finish();
  void advance(Copy& copy, Copy::State target);
  void advance_some();
  [[noreturn]] void deadlock();
};

inline u32 offset_in_shared(const void* p) { return u32(static_cast<const u8*>(p) - self->block->shared); }

// Leaves all fibers as they are and returns to launch(), which reports.
[[noreturn]] inline void abandon(const std::string& message) {
  Machine& m = *self->machine;
  m.error = message;
  self->context.switch_to(m.root, true);
  __builtin_unreachable();
}

inline void fail(const char* format, ...) {
  char text[512];
  int used = snprintf(text, sizeof text, "kernel %s, block %u, thread %u: ", self->machine->name, self->block->index, self->thread);
  va_list list;
  va_start(list, format);
  vsnprintf(text + used, sizeof text - size_t(used), format, list);
  va_end(list);
  abandon(text);
}

inline void check_stack(const Fiber& fiber) {
  if (*reinterpret_cast<u64*>(fiber.stack + STACK_RESERVE) != CANARY)
    fail("stack overflow of block %u, thread %u (%zu bytes)", fiber.block->index, fiber.thread, STACK_BYTES - STACK_RESERVE);
}

// ---- switching

inline void run_next(bool last) {
  Fiber* from = self;
  Machine& m = *from->machine;
  if (m.seeded) m.advance_some();
  while (m.ready == 0) {
    if (m.copies.empty()) m.deadlock();
    m.advance_some();
  }
  Fiber* to = m.pop();
  if (to == from) return;
  self = to;
  from->context.switch_to(to->context, last);
}

inline void yield() {
  self->machine->push(self);
  run_next(false);
}

inline void wait_in(WaitList& list, Wait why, u32 detail) {
  self->wait = why;
  self->detail = detail;
  self->next = nullptr;
  (list.head == nullptr ? list.head : list.tail->next) = self;
  list.tail = self;
  self->machine->spins = 0;
  run_next(false);
}

// One round of nothing but spinning: whoever is waited for may need this core.
inline void spin() {
  Machine& m = *self->machine;
  if (++m.spins > m.ready) {
    m.spins = 0;
    sched_yield();
  }
  yield();
}

// ---- barriers

inline void arrive(Barrier& barrier, u32 expected, Wait why, u32 detail) {
  if (++barrier.arrived == expected) {
    barrier.arrived = 0;
    self->machine->release(barrier.list);
  } else {
    wait_in(barrier.list, why, detail);
  }
}

inline bool sync_any(bool mine) {
  Block& block = *self->block;
  bool& any = block.any[block.generation & 1];
  if (block.sync.arrived == 0) any = false;
  any |= mine;
  if (block.sync.arrived + 1 == block.live) block.generation++;
  arrive(block.sync, block.live, Wait::block, 0);
  return any;
}

inline void sync_named(i32 id, i32 threads) {
  if (id < 1 || id >= i32(NAMED_BARRIERS) || threads <= 0 || threads % i32(WARP_SIZE) != 0 || threads > i32(self->machine->block_threads))
    fail("named_sync(%d, %d): ids are 1 to 15, threads a multiple of 32 up to the block's", id, threads);
  Barrier& barrier = self->block->named[id];
  if (barrier.arrived == 0) barrier.expected = u32(threads);
  if (barrier.expected != u32(threads)) fail("named_sync(%d, %d): others wait there for %u threads", id, threads, barrier.expected);
  arrive(barrier, barrier.expected, Wait::named, u32(id));
}

enum Collective : u32 { COLLECTIVE_SYNC, COLLECTIVE_SHUFFLE, COLLECTIVE_VOTE, COLLECTIVE_MATCH, COLLECTIVE_MAX, COLLECTIVE_LINE };

// All lanes give a value and a bit; returns the generation's slots and mask.
inline u32 collect(Collective kind, u64 value, bool bit) {
  Warp& warp = *self->warp;
  u32 half = warp.generation & 1, lane = self->thread % WARP_SIZE;
  if (warp.barrier.arrived == 0) warp.mask[half] = 0, warp.kind = kind;
  if (warp.kind != kind) fail("lanes of one warp are at different warp collectives");
  warp.slot[half][lane] = value;
  warp.mask[half] |= u32(bit) << lane;
  if (warp.barrier.arrived + 1 == WARP_SIZE) warp.generation++;
  arrive(warp.barrier, WARP_SIZE, Wait::warp, kind);
  return half;
}

// ---- mbarriers and bulk copies

inline void settle(u64* word) {
  auto* mbarrier = reinterpret_cast<Mbarrier*>(word);
  if (mbarrier->pending != 0 || mbarrier->bytes != 0) return;
  mbarrier->phase ^= 1;
  mbarrier->pending = mbarrier->count;
}

inline void mbarrier_arrive(u64* word, u32 bytes) {
  auto* mbarrier = reinterpret_cast<Mbarrier*>(word);
  if (mbarrier->pending == 0) fail("mbarrier at shared offset %u: more arrivals than its count of %u", offset_in_shared(word), u32(mbarrier->count));
  mbarrier->pending--;
  mbarrier->bytes += i32(bytes);
  settle(word);
  self->machine->release(self->block->mbarriers);
}

inline void mbarrier_wait(u64* word, u32 parity) {
  auto* mbarrier = reinterpret_cast<Mbarrier*>(word);
  while (mbarrier->phase == (parity & 1)) wait_in(self->block->mbarriers, Wait::mbarrier, offset_in_shared(word));
  auto& copies = self->machine->copies;
  for (size_t i = 0; i < copies.size();)
    if (copies[i].mbarrier == word && copies[i].phase == (parity & 1) && copies[i].state == Copy::done) copies[i] = copies.back(), copies.pop_back();
    else i++;
}

inline void Machine::advance(Copy& copy, Copy::State target) {
  if (copy.mbarrier != nullptr) {
    if (copy.state == Copy::done) return;
    memcpy(copy.to, copy.from, copy.bytes);
    copy.state = Copy::done;
    reinterpret_cast<Mbarrier*>(copy.mbarrier)->bytes -= i32(copy.bytes);
    settle(copy.mbarrier);
    release(copy.owner->block->mbarriers);
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

inline void Machine::advance_some() {
  if (copies.empty() || draw(4) != 0) return;
  Copy& copy = copies[draw(u32(copies.size()))];
  advance(copy, copy.state == Copy::issued ? Copy::read : Copy::done);
}

inline void check_copy(const char* what, const void* shared, const void* global, u32 bytes) {
  Machine& m = *self->machine;
  if (((reinterpret_cast<uintptr_t>(shared) | reinterpret_cast<uintptr_t>(global) | bytes) & 15) != 0)
    fail("%s: addresses %p, %p or %u bytes are not multiples of 16", what, shared, global, bytes);
  auto* begin = self->block->shared;
  if (static_cast<const u8*>(shared) < begin || static_cast<const u8*>(shared) + bytes > begin + m.shared)
    fail("%s: %u bytes at %p are not in this block's shared memory (%p, %zu bytes)", what, bytes, shared, static_cast<void*>(begin), m.shared);
}

inline void copy_in(void* shared, const void* global, u32 bytes, u64* mbarrier) {
  check_copy("row_load", shared, global, bytes);
  u32 phase = reinterpret_cast<Mbarrier*>(mbarrier)->phase;
  Copy copy{Copy::issued, false, phase, 0, bytes, static_cast<u8*>(shared), static_cast<const u8*>(global), mbarrier, self, nullptr};
  if (self->machine->seeded) self->machine->copies.push_back(copy);
  else self->machine->advance(copy, Copy::done);
}

inline void copy_out(void* global, const void* shared, u32 bytes) {
  check_copy("row_store", shared, global, bytes);
  Copy copy{Copy::issued, false, 0, self->groups, bytes, static_cast<u8*>(global), static_cast<const u8*>(shared), nullptr, self, nullptr};
  if (self->machine->seeded) self->machine->copies.push_back(copy);
  else memcpy(global, shared, bytes);
}

// All but the `pending` latest groups of this thread: read, or arrived as well.
inline void wait_groups(u32 pending, Copy::State target) {
  Machine& m = *self->machine;
  for (size_t i = 0; i < m.copies.size();) {
    Copy& copy = m.copies[i];
    if (copy.owner == self && copy.mbarrier == nullptr && copy.group + pending < self->groups) {
      m.advance(copy, target);
      copy.waited = true;
      if (target == Copy::done) {
        copy = m.copies.back(), m.copies.pop_back();
        continue;
      }
    }
    i++;
  }
}

// ---- a launch

inline void fiber_main() {
  Machine& m = *self->machine;
  Context::entered(m.root);
  m.body(m.args);
  check_stack(*self);
  for (Copy& copy : m.copies)
    if (copy.owner == self && copy.mbarrier == nullptr && !copy.waited) fail("exits with a row_store of %u bytes that no row_wait or row_wait_read covers", copy.bytes);
  self->wait = Wait::exited;
  Block& block = *self->block;
  block.live--;
  if (block.sync.arrived != 0 && block.sync.arrived == block.live) {
    block.sync.arrived = 0;
    block.generation++;
    m.release(block.sync.list);
  }
  m.spins = 0;
  if (--m.live == 0) self->context.switch_to(m.root, true);
  run_next(true);
  __builtin_unreachable();
}

inline void Machine::deadlock() {
  char text[256];
  std::string message = std::string("kernel ") + name + ": deadlock, no thread can run any more";
  static const char* const collectives[] = {"warp_sync", "a warp shuffle", "a warp vote", "warp_match_any", "warp_max", "line_store"};
  for (Block& block : blocks) {
    // One line for threads that wait for the same thing.
    struct Group { Wait wait; u32 detail, warp, first, count; };
    std::vector<Group> groups;
    for (u32 t = 0; t < block_threads; t++) {
      const Fiber& f = fibers[block.index * block_threads + t];
      check_stack(f);
      u32 warp = f.wait == Wait::warp ? t / WARP_SIZE : 0, detail = f.wait == Wait::exited ? 0 : f.detail;
      Group* found = nullptr;
      for (Group& g : groups)
        if (g.wait == f.wait && g.detail == detail && g.warp == warp) found = &g;
      if (found != nullptr) found->count++;
      else groups.push_back({f.wait, detail, warp, t, 1});
    }
    for (const Group& g : groups) {
      int used = snprintf(text, sizeof text, "\n  block %u: %u thread%s (first: thread %u) ", block.index, g.count, g.count == 1 ? "" : "s", g.first);
      char* rest = text + used;
      size_t room = sizeof text - size_t(used);
      if (g.wait == Wait::block) snprintf(rest, room, "at block_sync, which waits for %u live threads", block.live);
      if (g.wait == Wait::named) snprintf(rest, room, "at named_sync %u, which waits for %u threads", g.detail, block.named[g.detail].expected);
      if (g.wait == Wait::warp) snprintf(rest, room, "at %s of warp %u, which waits for all %u lanes", collectives[g.detail], g.warp, WARP_SIZE);
      if (g.wait == Wait::mbarrier) {
        const auto* b = reinterpret_cast<const Mbarrier*>(block.shared + g.detail);
        snprintf(rest, room, "at mbarrier_wait, shared offset %u, phase %u, with %u arrivals and %d bytes pending", g.detail, u32(b->phase), u32(b->pending), b->bytes);
      }
      if (g.wait == Wait::exited) snprintf(rest, room, "exited");
      message += text;
    }
  }
  abandon(message);
}

inline bool Machine::start(const char* kernel, u32 grid_, u32 threads, size_t shared_bytes) {
  name = kernel;
  error.clear();
  size_t n = size_t(grid_) * threads;
  if (grid_ == 0 || threads == 0 || threads > 1024 || threads % WARP_SIZE != 0 || n > 65536 || shared_bytes > MAX_SHARED) {
    char text[256];
    snprintf(text, sizeof text, "kernel %s: cannot launch %u blocks of %u threads with %zu bytes of shared memory (threads: multiples of 32 up to 1024, shared: up to %zu)", kernel, grid_, threads, shared_bytes, MAX_SHARED);
    error = text;
    return false;
  }
  if (n > fibers.size()) {
    for (Fiber& fiber : fibers) fiber.context.release();
    if (stacks != nullptr) munmap(stacks, fibers.size() * STACK_STRIDE);
    fibers.clear();
    void* p = mmap(nullptr, n * STACK_STRIDE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    stacks = p == MAP_FAILED ? nullptr : static_cast<char*>(p);
    if (stacks != nullptr) fibers.resize(n);
    mask = 1;
    while (mask < n) mask *= 2;
    queue.resize(mask--);
  }
  size_t stride = (shared_bytes + SHARED_GUARD + 127) / 128 * 128;
  if (stride * grid_ > arena_bytes) {
    if (arena != nullptr) munmap(arena, arena_bytes);
    arena_bytes = stride * grid_;
    void* p = mmap(nullptr, arena_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    arena = p == MAP_FAILED ? nullptr : static_cast<u8*>(p);
  }
  if (stacks == nullptr || arena == nullptr) {
    error = std::string("kernel ") + name + ": no memory for its stacks and shared memory";
    arena_bytes = arena == nullptr ? 0 : arena_bytes;
    return false;
  }
  grid = grid_, block_threads = threads, shared = shared_bytes;
  u32 now = schedule_series.load();
  if (now != series) series = now, launches = 0;
  u64 seed = schedule_seed.load();
  seeded = seed != 0;
  random = (seed + ++launches) * 0x9e3779b97f4a7c15ull | 1;
  head = ready = spins = 0;
  live = u32(n);
  copies.clear();
  blocks.assign(grid, Block{});
  warps.resize(n / WARP_SIZE);
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(arena, arena_bytes);
#endif
  for (u32 b = 0; b < grid; b++) {
    blocks[b].index = b;
    blocks[b].live = threads;
    blocks[b].shared = arena + b * stride;
    if (seeded) memset(blocks[b].shared, 0x80 | i32(draw(128)), shared);
    memset(blocks[b].shared + shared, 0xa5, SHARED_GUARD);
#if defined(__SANITIZE_ADDRESS__)
    __asan_poison_memory_region(blocks[b].shared + shared, stride - shared);
#endif
  }
  for (Warp& warp : warps) {
    warp.generation = 0;
    warp.barrier = Barrier{};
    warp.slow = seeded && draw(4) == 0;
  }
  for (u32 i = 0; i < n; i++) {
    Fiber& f = fibers[i];
    f.machine = this;
    f.block = &blocks[i / threads];
    f.warp = &warps[i / WARP_SIZE];
    f.thread = i % threads;
    f.wait = Wait::none;
    f.groups = 0;
    f.stack = stacks + i * STACK_STRIDE;
    *reinterpret_cast<u64*>(f.stack + STACK_RESERVE) = CANARY;
    f.context.prepare(f.stack, STACK_BYTES, fiber_main);
    push(&f);
  }
  return true;
}

inline bool Machine::finish() {
  self = nullptr;
  for (Copy& copy : copies) {
    if (error.empty() && copy.mbarrier != nullptr) error = std::string("kernel ") + name + ": exits with a row_load that no mbarrier_wait covers";
    if (error.empty()) advance(copy, Copy::done);
    else if (copy.state == Copy::read) free(copy.buffer);
  }
  copies.clear();
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(arena, arena_bytes);
#endif
  for (Block& block : blocks)
    for (size_t i = 0; i < SHARED_GUARD; i++)
      if (error.empty() && block.shared[shared + i] != 0xa5)
        error = std::string("kernel ") + name + ", block " + std::to_string(block.index) + ": wrote behind its shared memory, at offset " + std::to_string(shared + i);
  return error.empty();
}

// ---- kernels by name

struct Kernel {
  const char* name;
  void (*body)(const void*);
  size_t args_bytes;
};
constexpr u32 MAX_KERNELS = 64;
inline Kernel kernels[MAX_KERNELS];
inline u32 num_kernels = 0;
inline const char* bad_kernel = nullptr;  // registered twice, or too many or too large arguments

struct Register {
  Register(const char* name, void (*body)(const void*), size_t args_bytes) {
    bool bad = num_kernels == MAX_KERNELS || args_bytes > MAX_ARGS;
    for (u32 i = 0; i < num_kernels; i++) bad |= strcmp(kernels[i].name, name) == 0;
    if (bad) bad_kernel = name;
    else kernels[num_kernels++] = {name, body, args_bytes};
  }
};

enum Status : i32 { LAUNCHED = 0, REFUSED = 1, FAILED = 2 };

// The calling OS thread's machine: its stacks live as long as the thread.
inline Machine& machine() {
  static thread_local Machine m;
  return m;
}

inline Status launch(const char* name, u32 grid, u32 block, size_t shared, const void* args) {
  Machine& m = machine();
  const Kernel* kernel = nullptr;
  for (u32 i = 0; i < num_kernels; i++)
    if (strcmp(kernels[i].name, name) == 0) kernel = &kernels[i];
  if (kernel == nullptr) {
    m.error = std::string("no kernel is called ") + name;
    return REFUSED;
  }
  if (!m.start(kernel->name, grid, block, shared)) return REFUSED;
  m.body = kernel->body;
  memcpy(m.args, args, kernel->args_bytes);
  m.root.adopt_thread();
  self = m.pop();
  m.root.switch_to(self->context);
  return m.finish() ? LAUNCHED : FAILED;
}

inline void set_schedule(u64 seed) {
  schedule_seed = seed;
  schedule_series++;
}

}  // namespace simt

// Argument structs have at most MAX_ARGS bytes and reach the kernel as `a`.
#define KERNEL(name, Args)                                                             \
  static void name##_body(const Args& a);                                              \
  static simt::Register name##_registered(                                             \
      #name, [](const void* args) { name##_body(*static_cast<const Args*>(args)); }, sizeof(Args)); \
  static void name##_body([[maybe_unused]] const Args& a)
