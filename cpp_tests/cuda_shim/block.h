// The threads of one block and the barrier where they all meet. Internal to the shim.
#pragma once

#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "engine.h"
#include "fiber.h"
#include "ready_set.h"
#include "warp.h"

namespace cuda_shim {

class Block;
class Cluster;

enum class ThreadState : uint8_t { kReady, kAtBarrier, kAtWarpOp, kAtClusterBarrier, kAtMbarrier, kDone };

struct Thread : Context {
  Block* owner = nullptr;
  Fiber fiber;
  ThreadState state = ThreadState::kReady;
  Location where{"", 0};           // of the operation it waits at
  Meeting* meeting = nullptr;      // the warp operation it takes part in
  const void* mbarrier = nullptr;  // that it waits for
  unsigned cluster_arrivals = 0, cluster_waits = 0;
};

inline Thread& running_thread() { return *static_cast<Thread*>(current); }

class Block {
 public:
  // threads: this block's, in the cluster's storage.
  Block(Cluster& cluster, unsigned rank, std::span<Thread> threads);

  void reset(uint3 index);

  // Called by running threads.
  int barrier(BarrierKind kind, bool predicate, Location where);
  LaneValues warp_meet(WarpOp op, uint32_t mask, uint64_t value, Location where);
  void warp_leave();

  // Called by the scheduler.
  bool has_ready() const { return !ready_.empty(); }
  Thread& pop_ready() { return threads_[ready_.pop()]; }
  void on_exit(Thread& thread);

  void park(ThreadState state, Location where);  // the running thread will wait, once the cluster yields
  void make_ready(Thread& thread);
  void draw_ranks();

  Cluster& cluster() const { return cluster_; }
  unsigned rank() const { return rank_; }
  char* dynamic_shared() const { return dynamic_shared_.get(); }
  bool owns_shared(const void* address, size_t bytes) const;
  std::span<const Thread> threads() const { return threads_; }
  const std::vector<Warp>& warps() const { return warps_; }
  unsigned exited() const { return exited_; }
  bool finished() const { return exited_ == threads_.size(); }

 private:
  void discard_shared(bool gone);
  void release_barrier();
  void complete(Warp& warp, Meeting& meeting);

  Cluster& cluster_;
  const unsigned rank_;
  const std::span<Thread> threads_;
  std::vector<Warp> warps_;
  std::unique_ptr<char[]> dynamic_shared_;
  ReadySet ready_;

  unsigned exited_ = 0;
  unsigned at_barrier_ = 0;  // threads that wait there
  BarrierKind barrier_kind_ = BarrierKind::kPlain;
  Location barrier_where_{"", 0};
  int barrier_votes_ = 0;
  int barrier_result_ = 0;
};

}  // namespace cuda_shim
