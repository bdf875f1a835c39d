#include "fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

#if defined(CUDA_SHIM_ASAN)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

extern "C" void cuda_shim_switch_stack(void** save, void* load);

#if defined(__x86_64__)
asm(R"(.text
.globl cuda_shim_switch_stack
.hidden cuda_shim_switch_stack
.type cuda_shim_switch_stack,@function
.p2align 4
cuda_shim_switch_stack:
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
.size cuda_shim_switch_stack,.-cuda_shim_switch_stack
)");
#elif defined(__aarch64__)
asm(R"(.text
.globl cuda_shim_switch_stack
.hidden cuda_shim_switch_stack
.type cuda_shim_switch_stack,%function
.p2align 4
cuda_shim_switch_stack:
  sub sp, sp, #160
  stp x19, x20, [sp]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size cuda_shim_switch_stack,.-cuda_shim_switch_stack
)");
#else
#error "cuda_shim: fibers are written for x86-64 and aarch64"
#endif

namespace cuda_shim {
namespace {

// The two ends of the switch in progress.
Fiber* leaving = nullptr;
Fiber* entering = nullptr;

// First thing on the stack switched to: tells AddressSanitizer, and learns the bounds of the stack just left.
void arrive() {
#if defined(CUDA_SHIM_ASAN)
  __sanitizer_finish_switch_fiber(entering->fake_stack, &leaving->stack_low, &leaving->stack_bytes);
#endif
}

void start() {
  arrive();
  entering->entry();
  std::abort();
}

// The frame that cuda_shim_switch_stack pops: zeroed callee-saved registers, then a return into start().
void* initial_frame(char* top) {
  auto** words = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(top) & ~uintptr_t{15});
#if defined(__x86_64__)
  *--words = nullptr;  // return address of start(): unwinding ends here, and the stack is aligned as after a call
  *--words = reinterpret_cast<void*>(&start);
  for (int i = 0; i < 6; ++i) *--words = nullptr;
#else
  words -= 20;
  std::memset(words, 0, 160);
  words[11] = reinterpret_cast<void*>(&start);  // x30, the link register
#endif
  return words;
}

}  // namespace

void prepare_fiber(Fiber& fiber, char* stack_low, size_t stack_bytes, void (*entry)()) {
#if defined(CUDA_SHIM_ASAN)
  __asan_unpoison_memory_region(stack_low, stack_bytes);  // an abandoned fiber leaves its redzones behind
#endif
  fiber.stack_low = stack_low;
  fiber.stack_bytes = stack_bytes;
  fiber.fake_stack = nullptr;
  fiber.entry = entry;
  fiber.stack_pointer = initial_frame(stack_low + stack_bytes);
}

void switch_fiber(Fiber& from, Fiber& to, [[maybe_unused]] bool last) {
  leaving = &from;
  entering = &to;
#if defined(CUDA_SHIM_ASAN)
  __sanitizer_start_switch_fiber(last ? nullptr : &from.fake_stack, to.stack_low, to.stack_bytes);
#endif
  cuda_shim_switch_stack(&from.stack_pointer, to.stack_pointer);
  arrive();
}

FiberStacks::~FiberStacks() { release(); }

void FiberStacks::reserve(size_t count, size_t stack_bytes) {
  const size_t slot_bytes = (stack_bytes + kGuardBytes + 4095) & ~size_t{4095};
  if (count <= count_ && slot_bytes == slot_bytes_) return;
  release();
  void* memory =
      mmap(nullptr, count * slot_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  base_ = static_cast<char*>(memory);
  count_ = count;
  slot_bytes_ = slot_bytes;
  for (size_t i = 0; i < count; ++i) mprotect(base_ + i * slot_bytes, kGuardBytes, PROT_NONE);
}

void FiberStacks::release() {
  if (base_ != nullptr) munmap(base_, total_bytes());
  base_ = nullptr;
  count_ = 0;
}

}  // namespace cuda_shim
