#include "reshard/reader_slots.h"

#include <map>

#include "reshard/protocol_orders.h"

namespace areal::reshard {
namespace {

// Takes a slot away from a dead owner; true for the one process that succeeds.
bool take_over(StoreMemory& memory, int slot, ProcessIdentity self) {
  ReaderSlot& word = memory.slots()[static_cast<size_t>(slot)];
  uint64_t owner = word.load(std::memory_order_acquire);
  if (owner == 0 || !is_dead(owner) || !word.compare_exchange_strong(owner, self)) return false;
  for (std::atomic<uint64_t>& readers : memory.control().readers) readers.fetch_and(~(uint64_t{1} << slot));
  return true;
}

}  // namespace

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

bool pin_epoch(ControlLine& control, int slot, uint64_t epoch) {
  control.readers[epoch % 2].fetch_or(uint64_t{1} << slot, kOrders.pin);
  if (control.epoch.load(kOrders.recheck) == epoch) return true;
  unpin_epoch(control, slot, epoch);
  return false;
}

void unpin_epoch(ControlLine& control, int slot, uint64_t epoch) {
  control.readers[epoch % 2].fetch_and(~(uint64_t{1} << slot), kOrders.unpin);
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
