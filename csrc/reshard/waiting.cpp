#include "reshard/waiting.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <climits>
#include <thread>

namespace areal::reshard {
namespace {

static_assert(std::endian::native == std::endian::little, "the futex of a 64-bit word is its low half");

uint32_t* futex_of(const std::atomic<uint64_t>& word) {
  return reinterpret_cast<uint32_t*>(const_cast<std::atomic<uint64_t>*>(&word));
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

}  // namespace areal::reshard
