#include "block.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#if defined(CUDA_SHIM_ASAN)
#include <sanitizer/asan_interface.h>
#endif

#include "cluster.h"
#include "race_checker.h"
#include "report.h"

namespace cuda_shim {
namespace {

constexpr unsigned kWarpLanes = 32;

}  // namespace

Block::Block(Cluster& cluster, unsigned rank, std::span<Thread> threads)
    : cluster_(cluster), rank_(rank), threads_(threads) {
  warps_.resize((threads.size() + kWarpLanes - 1) / kWarpLanes);
  const size_t bytes = cluster.launch().dynamic_shared_bytes;
  if (bytes > 0) dynamic_shared_.reset(new char[bytes]);
}

// The cluster has set the threads' contexts and fibers.
void Block::reset(uint3) {
  exited_ = at_barrier_ = 0;
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
  for (Thread& thread : threads_) {
    thread.owner = this;
    thread.meeting = nullptr;
    thread.mbarrier = nullptr;
    thread.cluster_arrivals = thread.cluster_waits = 0;
    make_ready(thread);
  }
  discard_shared(false);
}

// CUDA leaves shared memory undefined at the start of a block, and takes it back at the end: all bits set, NaN in every
// floating type.
void Block::discard_shared([[maybe_unused]] bool gone) {
  if (!dynamic_shared_) return;
  const size_t bytes = cluster_.launch().dynamic_shared_bytes;
#if defined(CUDA_SHIM_ASAN)
  __asan_unpoison_memory_region(dynamic_shared_.get(), bytes);
#endif
  std::memset(dynamic_shared_.get(), 0xff, bytes);
#if defined(CUDA_SHIM_ASAN)
  if (gone) __asan_poison_memory_region(dynamic_shared_.get(), bytes);
#endif
}

bool Block::owns_shared(const void* address, size_t bytes) const {
  const size_t offset = static_cast<size_t>(static_cast<const char*>(address) - dynamic_shared_.get());
  const size_t all = cluster_.launch().dynamic_shared_bytes;
  return offset < all && bytes <= all - offset;
}

void Block::park(ThreadState state, Location where) {
  Thread& self = running_thread();
  self.state = state;
  self.where = where;
}

void Block::make_ready(Thread& thread) {
  thread.state = ThreadState::kReady;
  ready_.insert(thread.linear);
}

void Block::draw_ranks() {
  std::vector<unsigned> order(threads_.size());
  std::iota(order.begin(), order.end(), 0u);
  if (cluster_.options().order == Order::kReversed) std::reverse(order.begin(), order.end());
  if (cluster_.options().order == Order::kRandom) {
    std::shuffle(order.begin(), order.end(), cluster_.random());
    if (cluster_.random()() & 1) {  // as often, whole warps: one of them may run far ahead of the others
      std::vector<uint64_t> warp_rank(warps_.size());
      for (uint64_t& rank : warp_rank) rank = cluster_.random()();
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
  if (exited_ > 0 && !cluster_.options().exited_threads_pass_barriers) {
    fail("divergent barrier: " + std::to_string(exited_) + " thread(s) of the block exited before __syncthreads",
         where);
  }
  barrier_votes_ += predicate;
  park(ThreadState::kAtBarrier, where);
  if (++at_barrier_ == threads_.size() - exited_) release_barrier();
  cluster_.yield();
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
  race::on_barrier(rank_);
  if (cluster_.options().order == Order::kRandom) draw_ranks();
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
  if (finished()) {
    race::on_block_exit(rank_);
    if (cluster_.blocks().size() > 1) discard_shared(true);
  }
  if (at_barrier_ == 0 || at_barrier_ != threads_.size() - exited_) return;
  if (!cluster_.options().exited_threads_pass_barriers) {
    throw Error(describe_waiting_threads("divergent barrier: threads exited while others wait", *this));
  }
  release_barrier();
}

}  // namespace cuda_shim
