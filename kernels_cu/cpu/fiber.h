// One execution context: a stack and the switch to it. No scheduling here.
#pragma once
#include <cstddef>
#include <cstdint>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

namespace simt {

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
    *--top = nullptr;  // where a return address would be: keeps the entry's stack aligned and ends a backtrace
    *--top = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; i++) *--top = nullptr;
    stack_pointer = top;
  }
  void switch_to(Registers& next) { simt_switch_stack(&stack_pointer, next.stack_pointer); }
};

#else
}  // namespace simt
#include <ucontext.h>
namespace simt {

struct Registers {
  ucontext_t context;

  void prepare(char* low, size_t bytes, void (*entry)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = low;
    context.uc_stack.ss_size = bytes;
    context.uc_link = nullptr;
    makecontext(&context, entry, 0);
  }
  void switch_to(Registers& next) { swapcontext(&context, &next.context); }
};

#endif

// Registers plus what the sanitizers must be told about every switch.
struct Context {
  Registers registers;
#if defined(__SANITIZE_ADDRESS__)
  void* fake_stack = nullptr;
  const void* low = nullptr;
  size_t bytes = 0;
#endif
#if defined(__SANITIZE_THREAD__)
  void* tsan = nullptr;
#endif

  void prepare(char* stack, size_t stack_bytes, void (*entry)()) {
    registers.prepare(stack, stack_bytes, entry);
#if defined(__SANITIZE_ADDRESS__)
    fake_stack = nullptr;
    low = stack;
    bytes = stack_bytes;
    __asan_unpoison_memory_region(stack, stack_bytes);  // frames of an earlier launch
#endif
#if defined(__SANITIZE_THREAD__)
    if (tsan == nullptr) tsan = __tsan_create_fiber(0);
#endif
  }

  // `last`: this context will never be switched to again.
  void switch_to(Context& next, [[maybe_unused]] bool last = false) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(last ? nullptr : &fake_stack, next.low, next.bytes);
#endif
#if defined(__SANITIZE_THREAD__)
    __tsan_switch_to_fiber(next.tsan, 0);
#endif
    registers.switch_to(next.registers);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
  }

  // First act of a new context. `root` is the OS thread's own one, whose stack only ASan knows.
  static void entered([[maybe_unused]] Context& root) {
#if defined(__SANITIZE_ADDRESS__)
    const void* from = nullptr;
    size_t size = 0;
    __sanitizer_finish_switch_fiber(nullptr, &from, &size);
    if (root.low == nullptr) root.low = from, root.bytes = size;
#endif
  }

  // Called on the OS thread's own stack before it switches away.
  void adopt_thread() {
#if defined(__SANITIZE_THREAD__)
    tsan = __tsan_get_current_fiber();
#endif
  }

  void release() {
#if defined(__SANITIZE_THREAD__)
    if (tsan != nullptr) __tsan_destroy_fiber(tsan);
    tsan = nullptr;
#endif
  }
};

}  // namespace simt
