// Stacks and the switch between them: a fiber is a stack pointer, and switching saves the callee-saved registers.
#pragma once

#include <cstddef>

namespace cuda_shim {

struct Fiber {
  void* stack_pointer = nullptr;
  const void* stack_low = nullptr;  // what AddressSanitizer is told when it is switched to
  size_t stack_bytes = 0;
  void* fake_stack = nullptr;  // AddressSanitizer's, while the fiber sleeps
  void (*entry)() = nullptr;
};

// Makes `fiber` run entry() on the given stack when first switched to. entry() must not return: it leaves by
// switch_fiber with `last` set.
void prepare_fiber(Fiber& fiber, char* stack_low, size_t stack_bytes, void (*entry)());

// Suspends `from`, which must be the running one, and resumes `to`. `last`: `from` will never be resumed.
void switch_fiber(Fiber& from, Fiber& to, bool last = false);

// Equal stacks, each above a guard page that turns an overflow into a fault.
class FiberStacks {
 public:
  FiberStacks() = default;
  FiberStacks(const FiberStacks&) = delete;
  FiberStacks& operator=(const FiberStacks&) = delete;
  ~FiberStacks();

  void reserve(size_t count, size_t stack_bytes);
  char* low(size_t i) const { return base_ + i * slot_bytes_ + kGuardBytes; }
  size_t stack_bytes() const { return slot_bytes_ - kGuardBytes; }
  char* base() const { return base_; }
  size_t total_bytes() const { return count_ * slot_bytes_; }

 private:
  static constexpr size_t kGuardBytes = 4096;

  void release();

  char* base_ = nullptr;
  size_t count_ = 0, slot_bytes_ = 0;
};

}  // namespace cuda_shim
