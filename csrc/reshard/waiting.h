// How processes wait on words in shared memory, and what becomes of the words of the dead.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>

#include "reshard/deadline.h"
#include "reshard/process_identity.h"
#include "reshard/store_memory.h"

namespace areal::reshard {

// Sleeps while the word's value is `seen`, for at most one slice of the deadline; may return early.
void sleep_while(const std::atomic<uint64_t>& word, uint64_t seen, const Deadline& deadline);
// Wakes all who sleep on the word. Call after changing its low 32 bits.
void wake_all(const std::atomic<uint64_t>& word);

// For conditions nobody announces: sleeps 20 us, then longer, up to 1 ms; never past the deadline.
class Backoff {
 public:
  explicit Backoff(const Deadline& deadline) : deadline_(deadline) {}
  void sleep();

 private:
  const Deadline& deadline_;
  std::chrono::microseconds step_{20};
};

// Makes the caller the owner of a free slot, or of one whose owner is dead (and clears what that one had pinned).
std::optional<int> claim_slot(StoreMemory& memory, ProcessIdentity self);
// Frees the slots of dead owners among those that pin this arena.
void reclaim_dead_pins(StoreMemory& memory, int arena, ProcessIdentity self);

// "pid 12 (2 pins), pid 13"
std::string describe_pins(const StoreMemory& memory, int arena);
// "pid 12", "pid 12 (dead)", "pid 12 (this process)"
std::string describe_process(ProcessIdentity identity);

}  // namespace areal::reshard
