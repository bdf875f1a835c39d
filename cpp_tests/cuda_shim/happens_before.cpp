#include "happens_before.h"

#include <algorithm>

namespace cuda_shim::race {

void HappensBefore::begin_launch() {
  block_ = 0;
  published_.clear();
}

void HappensBefore::begin_block(unsigned threads) {
  ++block_;
  epoch_ = 0;
  knowledge_.assign((threads + 31) / 32 * 32, Clocks{});
  for (unsigned t = 0; t < knowledge_.size(); ++t) knowledge_[t][t % 32] = 1;
  ready_.assign(threads, {});
  observed_.assign(threads, {});
  acquired_.clear();
}

void HappensBefore::warp_sync(unsigned first_thread, uint32_t lanes) {
  Clocks joined{};
  for (uint32_t left = lanes; left != 0; left &= left - 1) {
    const Clocks& lane = knowledge_[first_thread + static_cast<unsigned>(__builtin_ctz(left))];
    for (size_t i = 0; i < 32; ++i) joined[i] = std::max(joined[i], lane[i]);
  }
  for (uint32_t left = lanes; left != 0; left &= left - 1) {
    const auto lane = static_cast<unsigned>(__builtin_ctz(left));
    knowledge_[first_thread + lane] = joined;
    ++knowledge_[first_thread + lane][lane];
  }
}

void HappensBefore::fence(unsigned thread) {
  for (const auto& release : observed_[thread]) acquired_.push_back({release, epoch_, clock(thread), thread});
  observed_[thread].clear();
  Releases& ready = ready_[thread];
  ready.clear();
  for (const Acquired& a : acquired_) {  // what reached this thread passes on with its own work
    if (known(a.epoch, a.thread, a.clock, thread)) ready.push_back(a.release);
  }
  ready.push_back(std::make_shared<const Release>(Release{block_, epoch_, thread, knowledge_[thread]}));
  ++knowledge_[thread][thread % 32];  // what comes after the fence is not covered
}

void HappensBefore::atomic(unsigned thread, uintptr_t address) {
  if (ready_[thread].empty() && published_.empty()) return;
  Releases& published = published_[address];
  observed_[thread].insert(observed_[thread].end(), published.begin(), published.end());
  published.insert(published.end(), ready_[thread].begin(), ready_[thread].end());
}

bool HappensBefore::known(uint32_t epoch, unsigned thread, uint32_t clock, unsigned by) const {
  if (thread == by || epoch < epoch_) return true;
  return thread / 32 == by / 32 && knowledge_[by][thread % 32] >= clock;
}

bool HappensBefore::Release::covers(const Access& access) const {
  if (access.block != block || access.epoch > epoch) return false;
  if (access.epoch < epoch) return true;
  if (access.thread / 32 != thread / 32) return false;
  // The publishing atomic follows its fence; a plain access of the acquirer to the same counter is ordered after it.
  const uint32_t slack = access.atomic && access.thread == thread ? 1 : 0;
  return knowledge[access.thread % 32] + slack >= access.clock;
}

bool HappensBefore::ordered(const Access& earlier, unsigned thread) const {
  if (earlier.block == block_) return known(earlier.epoch, earlier.thread, earlier.clock, thread);
  return std::any_of(acquired_.begin(), acquired_.end(), [&](const Acquired& a) {
    return a.release->covers(earlier) && known(a.epoch, a.thread, a.clock, thread);
  });
}

}  // namespace cuda_shim::race
