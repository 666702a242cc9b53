// Kernels by name, and their launch on the calling OS thread.
#pragma once
#include <sys/mman.h>

#include <atomic>
#include <memory>

#include "bulk.h"

namespace [[gnu::visibility("hidden")]] simt {

constexpr u32 MAX_KERNELS = 64;
constexpr u32 MAX_THREADS = 65536;
constexpr size_t MAX_SHARED = 227 * 1024;
constexpr size_t SHARED_GUARD = 128;  // behind each block's shared memory, checked after the launch
constexpr u8 GUARD_BYTE = 0xa5;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || !defined(__OPTIMIZE__)
constexpr size_t STACK_BYTES = 128 * 1024;
#else
constexpr size_t STACK_BYTES = 64 * 1024;
#endif
// Not a multiple of a page, so that the hot ends of the stacks spread over the cache sets.
constexpr size_t STACK_STRIDE = STACK_BYTES + 5 * 64;
// The lowest part is not for use: the word at its upper end tells an overflow before a neighbour is hurt.
constexpr size_t STACK_RESERVE = 8 * 1024;
constexpr u64 CANARY = 0x5ca1ab1e0ddba11ull;

struct Kernel {
  const char* name;
  void (*body)(const void*);
  size_t args_bytes;
};
inline Kernel kernels[MAX_KERNELS];
inline u32 num_kernels = 0;
inline const char* bad_kernel = nullptr;  // registered twice, or beyond the limits

struct Register {
  Register(const char* name, void (*body)(const void*), size_t args_bytes) {
    bool bad = num_kernels == MAX_KERNELS || args_bytes > MAX_ARGS;
    for (u32 i = 0; i < num_kernels; i++) bad |= strcmp(kernels[i].name, name) == 0;
    if (bad) bad_kernel = name;
    else kernels[num_kernels++] = {name, body, args_bytes};
  }
};

// The process's schedule; 0: none. A new series starts the drawing anew, on every OS thread.
inline std::atomic<u64> schedule_seed{0};
inline std::atomic<u32> schedule_series{0};

inline void set_schedule(u64 seed) {
  schedule_seed = seed;
  schedule_series++;
}

inline void fiber_main() {
  Context::entered(self->machine->root);
  order_after(&self->machine->root);
  self->machine->body(self->machine->args);
  check_stores_waited();
  self->machine->check_stack(*self);
  leave();
}

inline void Machine::check_stack(const Fiber& fiber) const {
  if (*reinterpret_cast<const u64*>(fiber.stack + STACK_RESERVE) != CANARY)
    fail("the stack of block %u, thread %u has overflown its %zu bytes", fiber.block->index, fiber.thread, STACK_BYTES - STACK_RESERVE);
}

// Nothing can run: says who waits where, threads with the same wait in one line.
inline void Machine::deadlock() {
  struct Group {
    Wait wait;
    u32 detail, warp, first, count;
  };
  static const char* const collectives[] = {"warp_sync", "a warp shuffle", "a warp vote", "warp_match_any", "warp_max", "line_store"};
  char text[256];
  error = std::string("kernel ") + name + ": deadlock, no thread can run any more";
  for (const Block& block : blocks) {
    std::vector<Group> groups;
    for (u32 t = 0; t < block_threads; t++) {
      const Fiber& fiber = fibers[block.index * block_threads + t];
      check_stack(fiber);
      Group mine{fiber.wait, fiber.wait == Wait::exited ? 0 : fiber.detail, fiber.wait == Wait::warp ? t / WARP_SIZE : 0, t, 0};
      auto same = [&](const Group& g) { return g.wait == mine.wait && g.detail == mine.detail && g.warp == mine.warp; };
      size_t i = 0;
      while (i < groups.size() && !same(groups[i])) i++;
      if (i == groups.size()) groups.push_back(mine);
      groups[i].count++;
    }
    for (const Group& g : groups) {
      size_t used = size_t(snprintf(text, sizeof text, "\n  block %u: %u thread%s (first: thread %u) ", block.index, g.count, g.count == 1 ? "" : "s", g.first));
      char* rest = text + used;
      size_t room = sizeof text - used;
      const auto* b = reinterpret_cast<const Mbarrier*>(block.shared + g.detail);
      switch (g.wait) {
        case Wait::block: snprintf(rest, room, "at block_sync, which waits for %u live threads", block.live); break;
        case Wait::named: snprintf(rest, room, "at named_sync %u, which waits for %u threads", g.detail, block.named[g.detail].expected); break;
        case Wait::warp: snprintf(rest, room, "at %s of warp %u, which waits for %u lanes", collectives[g.detail], g.warp, WARP_SIZE); break;
        case Wait::mbarrier:
          snprintf(rest, room, "at mbarrier_wait, shared offset %u: phase %u, %u arrivals and %d bytes pending", g.detail, u32(b->phase), u32(b->pending), b->bytes);
          break;
        default: snprintf(rest, room, "exited");
      }
      error += text;
    }
  }
  abandon();
}

inline void* map_memory(size_t bytes, int flags) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
  return p == MAP_FAILED ? nullptr : p;
}

inline Machine::~Machine() {
  for (Fiber& fiber : fibers) fiber.context.release();
  if (stacks != nullptr) munmap(stacks, fibers.size() * STACK_STRIDE);
  if (arena != nullptr) munmap(arena, arena_bytes);
}

inline bool Machine::start(const char* kernel, u32 num_blocks, u32 threads, size_t shared_bytes) {
  name = kernel;
  error.clear();
  const size_t n = size_t(num_blocks) * threads, stride = (shared_bytes + SHARED_GUARD + 127) / 128 * 128;
  if (n == 0 || n > MAX_THREADS || threads > 1024 || threads % WARP_SIZE != 0 || shared_bytes > MAX_SHARED) {
    char text[256];
    snprintf(text, sizeof text,
             "kernel %s: cannot launch %u blocks of %u threads with %zu bytes of shared memory (threads: a multiple of 32 up to 1024, %u in all; shared: up to %zu)",
             kernel, num_blocks, threads, shared_bytes, MAX_THREADS, MAX_SHARED);
    error = text;
    return false;
  }
  if (n > fibers.size()) {
    for (Fiber& fiber : fibers) fiber.context.release();
    if (stacks != nullptr) munmap(stacks, fibers.size() * STACK_STRIDE);
    fibers.clear();
    stacks = static_cast<char*>(map_memory(n * STACK_STRIDE, MAP_NORESERVE));
    if (stacks != nullptr) fibers.resize(n);
    for (mask = 1; mask < n;) mask *= 2;
    queue.resize(mask--);
  }
  if (stride * num_blocks > arena_bytes) {
    if (arena != nullptr) munmap(arena, arena_bytes);
    arena = static_cast<u8*>(map_memory(stride * num_blocks, 0));
    arena_bytes = arena == nullptr ? 0 : stride * num_blocks;
  }
  if (stacks == nullptr || arena == nullptr) {
    error = std::string("kernel ") + name + ": no memory for its stacks or its shared memory";
    return false;
  }
  grid = num_blocks, block_threads = threads, shared = shared_bytes;
  head = ready = spins = rounds = 0;
  live = u32(n);

  if (series != schedule_series.load()) series = schedule_series.load(), launches = 0;
  seeded = schedule_seed.load() != 0;
  random = (schedule_seed.load() * 0xbf58476d1ce4e5b9ull + ++launches) * 0x9e3779b97f4a7c15ull | 1;
  for (int i = 0; i < 4; i++) draw(1);

  blocks.assign(grid, Block{});
  for (u32 b = 0; b < grid; b++) {
    blocks[b].index = b;
    blocks[b].live = threads;
    blocks[b].shared = arena + b * stride;
    if (seeded) memset(blocks[b].shared, int(0x80 | draw(128)), shared);
    memset(blocks[b].shared + shared, GUARD_BYTE, SHARED_GUARD);
#if defined(__SANITIZE_ADDRESS__)
    __asan_poison_memory_region(blocks[b].shared + shared, stride - shared);
#endif
  }
  warps.resize(n / WARP_SIZE);
  for (Warp& warp : warps) {
    warp.barrier = Barrier{};
    warp.generation = 0;
    warp.slow = seeded && draw(4) == 0;
  }
  for (u32 i = 0; i < n; i++) {
    Fiber& fiber = fibers[i];
    fiber.machine = this;
    fiber.block = &blocks[i / threads];
    fiber.warp = &warps[i / WARP_SIZE];
    fiber.thread = i % threads;
    fiber.groups = 0;
    fiber.stack = stacks + i * STACK_STRIDE;
    *reinterpret_cast<u64*>(fiber.stack + STACK_RESERVE) = CANARY;
    fiber.context.prepare(fiber.stack, STACK_BYTES, fiber_main);
    push(&fiber);
  }
  return true;
}

inline bool Machine::finish() {
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(arena, arena_bytes);
#endif
  if (error.empty() && flush(*this) != nullptr) error = std::string("kernel ") + name + ": exits with a row_load that no mbarrier_wait covers";
  for (Copy& copy : copies)
    if (copy.state == Copy::read) free(copy.buffer);
  copies.clear();
  for (const Block& block : blocks)
    for (size_t i = shared; i < shared + SHARED_GUARD; i++)
      if (error.empty() && block.shared[i] != GUARD_BYTE)
        error = std::string("kernel ") + name + ", block " + std::to_string(block.index) + ": wrote behind its shared memory, at offset " + std::to_string(i);
  return error.empty();
}

// Its memory is allocated once for an OS thread, grows with the largest launch, and goes with the thread. (A pointer:
// static thread-local storage of a library is scarce.)
inline Machine& machine() {
  static thread_local std::unique_ptr<Machine> m;
  if (m == nullptr) m = std::make_unique<Machine>();
  return *m;
}

enum Status : i32 {
  LAUNCHED = 0,
  REFUSED = 1,
  FAILED = 2,
};

// Runs a kernel to its end. The message of a status other than LAUNCHED is machine().error.
inline Status launch(const char* name, u32 grid, u32 block, size_t shared, const void* args) {
  Unseen unseen;
  Machine& m = machine();
  u32 i = 0;
  while (i < num_kernels && strcmp(kernels[i].name, name) != 0) i++;
  if (i == num_kernels) {
    m.error = std::string("no kernel is called ") + name;
    return REFUSED;
  }
  if (!m.start(kernels[i].name, grid, block, shared)) return REFUSED;
  m.body = kernels[i].body;
  memcpy(m.args, args, kernels[i].args_bytes);
  m.root.adopt_thread();
  order_before(&m.root);
  self = m.pop();
  m.root.switch_to(self->context);
  order_after(&m.live);
  self = nullptr;
  return m.finish() ? LAUNCHED : FAILED;
}

}  // namespace simt

// The arguments reach the kernel as `a`.
#define KERNEL(name, Args)                                                                          \
  static void name##_body(const Args& a);                                                           \
  static simt::Register name##_registered(                                                          \
      #name, [](const void* args) { name##_body(*static_cast<const Args*>(args)); }, sizeof(Args)); \
  static void name##_body([[maybe_unused]] const Args& a)
