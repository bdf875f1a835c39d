#include "reshard/waiting.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <map>
#include <thread>

namespace areal::reshard {
namespace {

// The futex of a 64-bit word is its low half (little-endian, as xxh3.cpp asserts).
uint32_t* futex_of(const std::atomic<uint64_t>& word) {
  return reinterpret_cast<uint32_t*>(const_cast<std::atomic<uint64_t>*>(&word));
}

// Takes a slot away from a dead owner; true for the one process that succeeds.
bool take_over(StoreMemory& memory, int slot, ProcessIdentity self) {
  ReaderSlot& word = memory.slots()[static_cast<size_t>(slot)];
  uint64_t owner = word.load(std::memory_order_acquire);
  if (owner == 0 || !is_dead(owner) || !word.compare_exchange_strong(owner, self)) return false;
  for (std::atomic<uint64_t>& readers : memory.control().readers) readers.fetch_and(~(uint64_t{1} << slot));
  return true;
}

}  // namespace

void sleep_while(const std::atomic<uint64_t>& word, uint64_t seen, const Deadline& deadline) {
  const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(deadline.left()).count();
  const timespec timeout{left / 1'000'000'000, left % 1'000'000'000};
  syscall(SYS_futex, futex_of(word), FUTEX_WAIT, static_cast<uint32_t>(seen), &timeout, nullptr, 0);
  deadline.interrupt();
}

void wake_all(const std::atomic<uint64_t>& word) {
  syscall(SYS_futex, futex_of(word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Backoff::sleep() {
  std::this_thread::sleep_for(deadline_.left(step_));
  step_ = std::min(step_ * 2, std::chrono::microseconds{1000});
  deadline_.interrupt();
}

std::optional<int> claim_slot(StoreMemory& memory, ProcessIdentity self) {
  const std::span<ReaderSlot> slots = memory.slots();
  for (int slot = 0; slot < kReaderSlots; ++slot) {
    uint64_t free = 0;
    if (slots[static_cast<size_t>(slot)].compare_exchange_strong(free, self)) return slot;
  }
  for (int slot = 0; slot < kReaderSlots; ++slot) {
    if (take_over(memory, slot, self)) return slot;
  }
  return std::nullopt;
}

void reclaim_dead_pins(StoreMemory& memory, int arena, ProcessIdentity self) {
  const uint64_t readers = memory.control().readers[arena].load();
  for (int slot = 0; slot < kReaderSlots; ++slot) {
    if ((readers >> slot & 1) != 0 && take_over(memory, slot, self)) {
      memory.slots()[static_cast<size_t>(slot)].store(0);
    }
  }
}

std::string describe_pins(const StoreMemory& memory, int arena) {
  const uint64_t readers = memory.control().readers[arena].load();
  std::map<ProcessIdentity, int> pins;
  for (int slot = 0; slot < kReaderSlots; ++slot) {
    const uint64_t owner = memory.slots()[static_cast<size_t>(slot)].load();
    if ((readers >> slot & 1) != 0 && owner != 0) ++pins[owner];
  }
  std::string text;
  for (const auto& [owner, count] : pins) {
    text += (text.empty() ? "" : ", ") + describe_process(owner);
    if (count > 1) text += " (" + std::to_string(count) + " pins)";
  }
  return text.empty() ? "nobody" : text;
}

std::string describe_process(ProcessIdentity identity) {
  const std::string text = "pid " + std::to_string(pid_of(identity));
  if (is_dead(identity)) return text + " (dead)";
  return (identity & ~uint64_t{1}) == self_identity() ? text + " (this process)" : text;
}

}  // namespace areal::reshard
