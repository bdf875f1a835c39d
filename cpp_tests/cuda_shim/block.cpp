#include "block.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "race_checker.h"
#include "report.h"
#include "shared_arrays.h"

namespace cuda_shim {
namespace {

constexpr unsigned kWarpLanes = 32;

FiberStacks& stacks() {
  static FiberStacks instance;
  return instance;
}

}  // namespace

Block::Block(const Launch& launch, const Options& options, const std::function<void()>& body)
    : launch_(launch), options_(options), body_(body), random_(options.seed) {
  const unsigned count = launch.block.x * launch.block.y * launch.block.z;
  threads_.resize(count);
  warps_.resize((count + kWarpLanes - 1) / kWarpLanes);
  stacks().reserve(count, options.stack_bytes);
  if (launch.dynamic_shared_bytes > 0) dynamic_shared_.reset(new char[launch.dynamic_shared_bytes]);
}

void Block::reset(uint3 index) {
  exited_ = at_barrier_ = 0;
  error_ = nullptr;
  ready_.clear();
  draw_ranks();
  const auto count = static_cast<unsigned>(threads_.size());
  for (unsigned w = 0; w < warps_.size(); ++w) {
    Warp& warp = warps_[w];
    const unsigned lanes = std::min(kWarpLanes, count - w * kWarpLanes);
    warp.first_thread = w * kWarpLanes;
    warp.exists = lanes == kWarpLanes ? 0xffffffffu : (1u << lanes) - 1;
    warp.exited = warp.open = 0;
  }
  for (unsigned i = 0; i < count; ++i) {
    Thread& thread = threads_[i];
    thread.thread_index = {i % launch_.block.x, i / launch_.block.x % launch_.block.y,
                           i / (launch_.block.x * launch_.block.y)};
    thread.block_index = index;
    thread.block_dim = launch_.block;
    thread.grid_dim = launch_.grid;
    thread.linear = i;
    thread.lane = i % kWarpLanes;
    thread.warp = i / kWarpLanes;
    thread.owner = this;
    thread.meeting = nullptr;
    // Stacks a power of two apart would all fall into the same cache sets: shift their tops.
    const size_t colour_bytes = i % 61 * 128;
    prepare_fiber(thread.fiber, stacks().low(i), stacks().stack_bytes() - colour_bytes, &Block::run_thread);
    make_ready(thread);
  }
}

// CUDA leaves shared memory undefined at the start of a block: all bits set, NaN in every floating type.
void Block::fill_shared() {
  if (dynamic_shared_) std::memset(dynamic_shared_.get(), 0xff, launch_.dynamic_shared_bytes);
  for (const SharedArray& array : shared_arrays()) std::memset(array.address, 0xff, array.bytes);
}

void Block::run(uint3 index) {
  reset(index);
  fill_shared();
  race::on_block(static_cast<unsigned>(threads_.size()),
                 {dynamic_shared_.get(), launch_.dynamic_shared_bytes, stacks().base(), stacks().total_bytes(),
                  threads_.data(), threads_.size() * sizeof(Thread)});
  const struct NoneRunsAfterwards {
    ~NoneRunsAfterwards() { current = nullptr; }
  } on_every_way_out;
  while (!ready_.empty()) {
    Thread& thread = threads_[ready_.pop()];
    current = &thread;
    switch_fiber(scheduler_, thread.fiber);
    if (error_) std::rethrow_exception(error_);
    if (thread.state == ThreadState::kDone) on_exit(thread);
  }
  if (exited_ != threads_.size()) throw Error(describe_waiting_threads("deadlock", *this));
}

void Block::run_thread() {
  Thread& self = running_thread();
  Block& block = *self.owner;
  try {
    race::watch(true);
    block.body_();
  } catch (...) {
    if (!block.error_) block.error_ = std::current_exception();
  }
  race::watch(false);
  self.state = ThreadState::kDone;
  switch_fiber(self.fiber, block.scheduler_, true);
}

void Block::park(ThreadState state, Location where) {
  Thread& self = running_thread();
  self.state = state;
  self.where = where;
}

void Block::yield() { switch_fiber(running_thread().fiber, scheduler_); }

void Block::make_ready(Thread& thread) {
  thread.state = ThreadState::kReady;
  ready_.insert(thread.linear);
}

void Block::draw_ranks() {
  std::vector<unsigned> order(threads_.size());
  std::iota(order.begin(), order.end(), 0u);
  if (options_.order == Order::kReversed) std::reverse(order.begin(), order.end());
  if (options_.order == Order::kRandom) {
    std::shuffle(order.begin(), order.end(), random_);
    if (random_() & 1) {  // as often, whole warps: one of them may run far ahead of the others
      std::vector<uint64_t> warp_rank(warps_.size());
      for (uint64_t& rank : warp_rank) rank = random_();
      std::stable_sort(order.begin(), order.end(),
                       [&](unsigned a, unsigned b) { return warp_rank[a / kWarpLanes] < warp_rank[b / kWarpLanes]; });
    }
  }
  ready_.set_ranks(order);
}

int Block::barrier(BarrierKind kind, bool predicate, Location where) {
  const race::Unwatched scope;
  if (at_barrier_ == 0) {
    barrier_kind_ = kind;
    barrier_where_ = where;
    barrier_votes_ = 0;
  } else if (barrier_kind_ != kind || !(barrier_where_ == where)) {
    fail("divergent barrier: some threads wait at __syncthreads at " + to_string(barrier_where_) +
             ", this thread came to another",
         where);
  }
  if (exited_ > 0 && !options_.exited_threads_pass_barriers) {
    fail("divergent barrier: " + std::to_string(exited_) + " thread(s) of the block exited before __syncthreads",
         where);
  }
  barrier_votes_ += predicate;
  park(ThreadState::kAtBarrier, where);
  if (++at_barrier_ == threads_.size() - exited_) release_barrier();
  yield();
  return barrier_result_;
}

void Block::release_barrier() {
  switch (barrier_kind_) {
    case BarrierKind::kPlain:
      break;
    case BarrierKind::kCount:
      barrier_result_ = barrier_votes_;
      break;
    case BarrierKind::kAnd:
      barrier_result_ = barrier_votes_ == static_cast<int>(at_barrier_);
      break;
    case BarrierKind::kOr:
      barrier_result_ = barrier_votes_ > 0;
      break;
  }
  at_barrier_ = 0;
  race::on_barrier();
  if (options_.order == Order::kRandom) draw_ranks();
  for (Thread& thread : threads_) {
    if (thread.state == ThreadState::kAtBarrier) make_ready(thread);
  }
}

// What waited only for this thread can go on.
void Block::on_exit(Thread& thread) {
  ++exited_;
  Warp& warp = warps_[thread.warp];
  warp.exited |= 1u << thread.lane;
  for (uint32_t left = warp.open; left != 0; left &= left - 1) {
    Meeting& meeting = warp.meetings[static_cast<size_t>(__builtin_ctz(left))];
    if (!meeting.complete && warp.all_came(meeting)) complete(warp, meeting);
  }
  if (at_barrier_ == 0 || at_barrier_ != threads_.size() - exited_) return;
  if (!options_.exited_threads_pass_barriers) {
    throw Error(describe_waiting_threads("divergent barrier: threads exited while others wait", *this));
  }
  release_barrier();
}

}  // namespace cuda_shim
