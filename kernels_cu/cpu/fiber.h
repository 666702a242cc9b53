// One execution context: a stack, the switch to it, and what the sanitizers must be told. No scheduling here.
#pragma once
#include <cstddef>
#include <cstdint>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
extern "C" {
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#endif
#if !defined(__x86_64__) || defined(SIMT_UCONTEXT)
#include <ucontext.h>
#endif

#if defined(__SANITIZE_THREAD__)
#define UNINSTRUMENTED __attribute__((no_sanitize("thread")))
#else
#define UNINSTRUMENTED
#endif

// Hidden: two libraries with kernels in one process must not share a scheduler.
namespace [[gnu::visibility("hidden")]] simt {

#if defined(__x86_64__) && !defined(SIMT_UCONTEXT)

// Callee-saved registers go on the stack, the stack pointer into *save. Compared with swapcontext this leaves out the
// signal mask (two system calls) and the floating-point control words, which kernels do not touch.
extern "C" void simt_switch_stack(void** save, void* load);
asm(R"(
  .text
  .weak simt_switch_stack
  .hidden simt_switch_stack
  .type simt_switch_stack, @function
simt_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size simt_switch_stack, . - simt_switch_stack
)");

struct Registers {
  void* stack_pointer;

  void prepare(char* low, size_t bytes, void (*entry)()) {
    auto** top = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(low + bytes) & ~uintptr_t(15));
    *--top = nullptr;  // in place of a return address: aligns the entry's frame and ends a backtrace
    *--top = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; i++) *--top = nullptr;
    stack_pointer = top;
  }
  UNINSTRUMENTED void switch_to(Registers& next) { simt_switch_stack(&stack_pointer, next.stack_pointer); }
};

#else

struct Registers {
  ucontext_t context;

  void prepare(char* low, size_t bytes, void (*entry)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = low;
    context.uc_stack.ss_size = bytes;
    context.uc_link = nullptr;
    makecontext(&context, entry, 0);
  }
  UNINSTRUMENTED void switch_to(Registers& next) { swapcontext(&context, &next.context); }
};

#endif

// ---- sanitizers. TSan sees every fiber as a thread of its own, so that a missing barrier between CUDA threads is a data race.
// Barriers say what they order; the scheduler's own data is for no one to see. Ranks of one process map the same pages at
// different addresses, which TSan takes for different memory: an order that comes about through another rank is lost on it
// (two writers of one slot of the combine ring are reported).

#if defined(__SANITIZE_THREAD__)
inline void order_before(void* meeting) { __tsan_release(meeting); }
inline void order_after(void* meeting) { __tsan_acquire(meeting); }
inline thread_local int unseen_depth = 0;  // of the running context
inline void begin_unseen() { AnnotateIgnoreReadsBegin(__FILE__, __LINE__), AnnotateIgnoreWritesBegin(__FILE__, __LINE__); }
inline void end_unseen() { AnnotateIgnoreWritesEnd(__FILE__, __LINE__), AnnotateIgnoreReadsEnd(__FILE__, __LINE__); }
struct Unseen {
  UNINSTRUMENTED Unseen() {
    if (unseen_depth++ == 0) begin_unseen();
  }
  UNINSTRUMENTED ~Unseen() {
    if (--unseen_depth == 0) end_unseen();
  }
};
#else
inline void order_before(void*) {}
inline void order_after(void*) {}
struct Unseen {
  Unseen() {}
};
#endif

struct Context {
  Registers registers;
#if defined(__SANITIZE_ADDRESS__)
  void* fake_stack = nullptr;
  const void* low = nullptr;
  size_t bytes = 0;
#endif
#if defined(__SANITIZE_THREAD__)
  void* tsan = nullptr;
  int uses = 0;
  bool left_unseen = false;
#endif

  void prepare(char* stack, size_t stack_bytes, void (*entry)()) {
#if defined(__SANITIZE_ADDRESS__)
    fake_stack = nullptr;
    low = stack;
    bytes = stack_bytes;
    __asan_unpoison_memory_region(stack, stack_bytes);  // frames that an earlier fiber never left
#endif
#if defined(__SANITIZE_THREAD__)
    close();
    if (++uses % 1024 == 0) release();  // its shadow of the call stack keeps the frames that a fiber never leaves
    if (tsan == nullptr) tsan = __tsan_create_fiber(0);
#endif
    registers.prepare(stack, stack_bytes, entry);
  }

  // `last`: this context will never be switched to again.
  UNINSTRUMENTED void switch_to(Context& next, [[maybe_unused]] bool last = false) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(last ? nullptr : &fake_stack, next.low, next.bytes);
#endif
#if defined(__SANITIZE_THREAD__)
    const int depth = unseen_depth;
    if (last && depth != 0) end_unseen();
    left_unseen = !last && depth != 0;
    __tsan_switch_to_fiber(next.tsan, __tsan_switch_to_fiber_no_sync);
#endif
    registers.switch_to(next.registers);
#if defined(__SANITIZE_THREAD__)
    unseen_depth = depth;
#endif
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
  }

  // Makes this the calling OS thread's own context, to come back to.
  void adopt_thread() {
#if defined(__SANITIZE_THREAD__)
    tsan = __tsan_get_current_fiber();
#endif
  }

  // First act of a new context. ASan tells here where the stack of `root`, the OS thread's own context, lies.
  UNINSTRUMENTED static void entered([[maybe_unused]] Context& root) {
#if defined(__SANITIZE_THREAD__)
    unseen_depth = 0;
#endif
#if defined(__SANITIZE_ADDRESS__)
    const void* from = nullptr;
    size_t size = 0;
    __sanitizer_finish_switch_fiber(nullptr, &from, &size);
    if (root.low == nullptr) root.low = from, root.bytes = size;
#endif
  }

  void release() {
#if defined(__SANITIZE_THREAD__)
    close();
    if (tsan != nullptr) __tsan_destroy_fiber(tsan);
    tsan = nullptr;
#endif
  }

#if defined(__SANITIZE_THREAD__)
  // TSan lets no thread end unseen: for a fiber that was abandoned inside the scheduler.
  UNINSTRUMENTED void close() {
    if (!left_unseen) return;
    left_unseen = false;
    void* here = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(tsan, __tsan_switch_to_fiber_no_sync);
    end_unseen();
    __tsan_switch_to_fiber(here, __tsan_switch_to_fiber_no_sync);
  }
#endif
};

}  // namespace simt
