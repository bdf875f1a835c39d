// The threads of one block: the scheduler that runs them and the barrier where they all meet. Internal to the shim.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "engine.h"
#include "fiber.h"
#include "ready_set.h"
#include "warp.h"

namespace cuda_shim {

class Block;

enum class ThreadState : uint8_t { kReady, kAtBarrier, kAtWarpOp, kDone };

struct Thread : Context {
  Block* owner = nullptr;
  Fiber fiber;
  ThreadState state = ThreadState::kReady;
  Location where{"", 0};       // of the operation it waits at
  Meeting* meeting = nullptr;  // the warp operation it takes part in
};

inline Thread& running_thread() { return *static_cast<Thread*>(current); }

class Block {
 public:
  Block(const Launch& launch, const Options& options, const std::function<void()>& body);

  // Runs the block at this index of the grid to its end. Throws what a thread threw, or Error on a deadlock.
  void run(uint3 index);

  // Called by running threads.
  int barrier(BarrierKind kind, bool predicate, Location where);
  LaneValues warp_meet(WarpOp op, uint32_t mask, uint64_t value, Location where);
  void warp_leave();

  void* dynamic_shared() const { return dynamic_shared_.get(); }
  const char* kernel_name() const { return launch_.name; }
  const std::vector<Thread>& threads() const { return threads_; }
  const std::vector<Warp>& warps() const { return warps_; }
  unsigned exited() const { return exited_; }

 private:
  static void run_thread();  // entry of every fiber
  void reset(uint3 index);
  void fill_shared();
  void park(ThreadState state, Location where);  // the running thread will wait, once it yields
  void yield();
  void make_ready(Thread& thread);
  void draw_ranks();
  void release_barrier();
  void complete(Warp& warp, Meeting& meeting);
  void on_exit(Thread& thread);

  const Launch launch_;
  const Options options_;
  const std::function<void()>& body_;  // what every thread runs
  std::vector<Thread> threads_;
  std::vector<Warp> warps_;
  std::unique_ptr<char[]> dynamic_shared_;
  std::mt19937_64 random_;
  ReadySet ready_;
  Fiber scheduler_;
  std::exception_ptr error_;

  unsigned exited_ = 0;
  unsigned at_barrier_ = 0;  // threads that wait there
  BarrierKind barrier_kind_ = BarrierKind::kPlain;
  Location barrier_where_{"", 0};
  int barrier_votes_ = 0;
  int barrier_result_ = 0;
};

}  // namespace cuda_shim
