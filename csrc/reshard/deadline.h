// Until when to wait for other processes, and what to look after meanwhile.
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <utility>

namespace areal::reshard {

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;
  // How long a wait sleeps at most before it calls interrupt().
  static constexpr std::chrono::milliseconds kSlice{20};

  // seconds: may be infinite; 0 or less (or no number) has passed already. interrupt: called at least every kSlice of a
  // wait, and may throw to end it (Python: Ctrl-C).
  explicit Deadline(double seconds, std::function<void()> interrupt = {})
      : seconds_(seconds > 0 ? seconds : 0), at_(from_now(seconds_)), interrupt_(std::move(interrupt)) {}

  // The same deadline, for a wait that has something of its own to look after: `interrupt` is called before this one's.
  Deadline with(std::function<void()> interrupt) const {
    Deadline both = *this;
    both.interrupt_ = [first = std::move(interrupt), then = interrupt_] {
      first();
      if (then) then();
    };
    return both;
  }

  double seconds() const { return seconds_; }
  bool passed() const { return Clock::now() >= at_; }
  void interrupt() const {
    if (interrupt_) interrupt_();
  }
  // The time left, at most `slice`, at least zero.
  Clock::duration left(Clock::duration slice = kSlice) const {
    const Clock::time_point now = Clock::now();
    return now >= at_ ? Clock::duration::zero() : std::min(at_ - now, slice);
  }

 private:
  static constexpr double kForever = 1e9;  // 31 years

  static Clock::time_point from_now(double seconds) {
    if (seconds >= kForever) return Clock::time_point::max();
    return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  }

  double seconds_;
  Clock::time_point at_;
  std::function<void()> interrupt_;
};

// Looks after a deadline's interrupt() during long work that never waits.
class Lookout {
 public:
  explicit Lookout(const Deadline& deadline) : deadline_(deadline) {}

  void look() {
    const Deadline::Clock::time_point now = Deadline::Clock::now();
    if (now < next_) return;
    next_ = now + kEvery;
    deadline_.interrupt();
  }

 private:
  // An interrupt may have to wait some milliseconds for Python's lock.
  static constexpr std::chrono::milliseconds kEvery{200};

  const Deadline& deadline_;
  Deadline::Clock::time_point next_ = Deadline::Clock::now() + kEvery;
};

}  // namespace areal::reshard
