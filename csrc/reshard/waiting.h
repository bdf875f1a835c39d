// How processes wait on words in shared memory.
#pragma once

#include <atomic>
#include <cstdint>

#include "reshard/deadline.h"

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

}  // namespace areal::reshard
