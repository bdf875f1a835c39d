#include "happens_before.h"

#include <algorithm>

namespace cuda_shim::race {

void HappensBefore::begin_launch() {
  cluster_ = 0;
  published_.clear();
}

void HappensBefore::begin_cluster(unsigned blocks, unsigned slots_per_block) {
  ++cluster_;
  slots_per_block_ = slots_per_block;
  const unsigned slots = queues_end_ = blocks * slots_per_block;
  threads_.assign(slots, {std::make_shared<const Clocks>(), {}});
  for (unsigned s = 0; s < slots; ++s) tick(s);
  async_fences_.assign(slots, 0);
  points_.clear();
  ready_.assign(slots, {});
  observed_.assign(slots, {});
  acquired_.clear();
}

bool HappensBefore::knows(const Knowledge& knowledge, unsigned owner, unsigned slot, uint32_t clock) {
  if (slot / 32 == owner / 32 && knowledge.lanes[slot % 32] >= clock) return true;
  return slot < knowledge.common->size() && (*knowledge.common)[slot] >= clock;
}

void HappensBefore::join(Clocks& into, const Clocks& from) {
  if (into.size() < from.size()) into.resize(from.size());
  for (size_t i = 0; i < from.size(); ++i) into[i] = std::max(into[i], from[i]);
}

void HappensBefore::join_thread(Clocks& into, const Knowledge& thread, unsigned slot, SharedClocks& last_joined) {
  if (thread.common != last_joined) join(into, *thread.common);
  last_joined = thread.common;
  const unsigned first = slot / 32 * 32;
  if (into.size() < first + 32) into.resize(first + 32);
  for (unsigned i = 0; i < 32; ++i) into[first + i] = std::max(into[first + i], thread.lanes[i]);
}

void HappensBefore::barrier(unsigned block) {
  auto joined = std::make_shared<Clocks>();
  SharedClocks last_joined;
  const unsigned first = block * slots_per_block_, end = first + slots_per_block_;
  for (unsigned s = first; s < end; ++s) join_thread(*joined, threads_[s], s, last_joined);
  for (unsigned s = first; s < end; ++s) {
    threads_[s].common = joined;
    tick(s);
  }
}

void HappensBefore::warp_sync(unsigned first_slot, uint32_t lanes) {
  Lanes joined{};
  Clocks common;
  SharedClocks last_joined;
  bool differ = false;
  for (uint32_t left = lanes; left != 0; left &= left - 1) {
    const Knowledge& lane = threads_[first_slot + static_cast<unsigned>(__builtin_ctz(left))];
    for (size_t i = 0; i < 32; ++i) joined[i] = std::max(joined[i], lane.lanes[i]);
    differ |= last_joined && last_joined != lane.common;
    last_joined = lane.common;
  }
  if (differ) {
    last_joined.reset();
    for (uint32_t left = lanes; left != 0; left &= left - 1) {
      const unsigned slot = first_slot + static_cast<unsigned>(__builtin_ctz(left));
      join_thread(common, threads_[slot], slot, last_joined);
    }
    last_joined = std::make_shared<const Clocks>(std::move(common));
  }
  for (uint32_t left = lanes; left != 0; left &= left - 1) {
    const unsigned slot = first_slot + static_cast<unsigned>(__builtin_ctz(left));
    threads_[slot] = {last_joined, joined};
    tick(slot);
  }
}

void HappensBefore::release(unsigned slot, uintptr_t point) {
  Point& p = points_[point];
  join_thread(p.gathered, threads_[slot], slot, p.last_joined);
  tick(slot);
}

void HappensBefore::end_phase(uintptr_t point) {
  Point& p = points_[point];
  p.ended = std::make_shared<const Clocks>(p.gathered);
}

void HappensBefore::acquire(unsigned slot, uintptr_t point) {
  const Point& p = points_[point];
  if (!p.ended) return;
  Knowledge& thread = threads_[slot];
  const Clocks &mine = *thread.common, &theirs = *p.ended;
  bool includes_mine = mine.size() <= theirs.size();
  for (size_t i = 0; includes_mine && i < mine.size(); ++i) includes_mine = mine[i] <= theirs[i];
  if (includes_mine) {
    thread.common = p.ended;
    return;
  }
  Clocks joined = mine;
  join(joined, theirs);
  if (joined != mine) thread.common = std::make_shared<const Clocks>(std::move(joined));
}

unsigned HappensBefore::add_queue() { return queues_end_++; }

void HappensBefore::reach(unsigned queue, uint32_t clock, uintptr_t point) {
  Clocks& gathered = points_[point].gathered;
  if (gathered.size() <= queue) gathered.resize(queue + 1);
  gathered[queue] = std::max(gathered[queue], clock);
}

void HappensBefore::reach_thread(unsigned queue, uint32_t clock, unsigned slot) {
  Clocks common = *threads_[slot].common;
  if (common.size() <= queue) common.resize(queue + 1);
  common[queue] = std::max(common[queue], clock);
  threads_[slot].common = std::make_shared<const Clocks>(std::move(common));
}

void HappensBefore::async_fence(unsigned slot) {
  async_fences_[slot] = clock(slot);
  tick(slot);
}

bool HappensBefore::shown_to_async(const Access& write) const {
  return write.cluster != cluster_ || write.slot >= async_fences_.size() || write.clock <= async_fences_[write.slot];
}

void HappensBefore::fence(unsigned slot) {
  for (const auto& release : observed_[slot]) acquired_.push_back({release, slot, clock(slot)});
  observed_[slot].clear();
  Releases& ready = ready_[slot];
  ready.clear();
  for (const Acquired& a : acquired_) {  // what reached this thread passes on with its own work
    if (knows(threads_[slot], slot, a.slot, a.clock)) ready.push_back(a.release);
  }
  ready.push_back(std::make_shared<const Release>(Release{cluster_, slot, threads_[slot]}));
  tick(slot);  // what comes after the fence is not covered
}

void HappensBefore::atomic(unsigned slot, uintptr_t address) {
  if (ready_[slot].empty() && published_.empty()) return;
  Releases& published = published_[address];
  observed_[slot].insert(observed_[slot].end(), published.begin(), published.end());
  published.insert(published.end(), ready_[slot].begin(), ready_[slot].end());
}

bool HappensBefore::has_heard_of_block(unsigned slot, unsigned block) const {
  const unsigned first = block * slots_per_block_;
  for (unsigned s = first; s < first + slots_per_block_; ++s) {
    if (knows(threads_[slot], slot, s, 1)) return true;
  }
  return false;
}

bool HappensBefore::block_knows(unsigned block, const Access& access) const {
  const unsigned first = block * slots_per_block_;
  for (unsigned s = first; s < first + slots_per_block_; ++s) {
    if (knows(threads_[s], s, access.slot, access.clock)) return true;
  }
  return false;
}

bool HappensBefore::Release::covers(const Access& access) const {
  if (access.cluster != cluster) return false;
  // The publishing atomic follows its fence; a plain access of the acquirer to the same counter is ordered after it.
  const uint32_t slack = access.atomic && access.slot == slot ? 1 : 0;
  return knows(knowledge, slot, access.slot, access.clock - slack);
}

bool HappensBefore::ordered(const Access& earlier, unsigned slot) const {
  if (earlier.cluster == cluster_) {
    return earlier.slot == slot || knows(threads_[slot], slot, earlier.slot, earlier.clock);
  }
  return std::any_of(acquired_.begin(), acquired_.end(), [&](const Acquired& a) {
    return a.release->covers(earlier) && knows(threads_[slot], slot, a.slot, a.clock);
  });
}

}  // namespace cuda_shim::race
