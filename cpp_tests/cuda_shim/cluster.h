// The blocks of one cluster, which run together: the scheduler of their threads, the cluster's barrier and its bulk
// copies. A launch without clusters has clusters of one block. Internal to the shim.
#pragma once

#include <exception>
#include <functional>
#include <random>
#include <vector>

#include "block.h"
#include "bulk_copies.h"
#include "engine.h"
#include "fiber.h"

namespace cuda_shim {

class Cluster {
 public:
  Cluster(const Launch& launch, const Options& options, const std::function<void()>& body);
  Cluster(const Cluster&) = delete;
  Cluster& operator=(const Cluster&) = delete;
  ~Cluster();

  // Runs the blocks from this index of the grid on to their end. Throws what a thread threw, or Error on a deadlock.
  void run(uint3 first);

  // Called by running threads.
  void arrive(Location where);
  void wait(Location where);
  void* map_shared(const void* address, unsigned rank, Location where);
  void yield();

  const Launch& launch() const { return launch_; }
  const Options& options() const { return options_; }
  std::mt19937_64& random() { return random_; }
  BulkCopies& copies() { return copies_; }
  const BulkCopies& copies() const { return copies_; }
  const std::vector<Block>& blocks() const { return blocks_; }

 private:
  static void run_thread();  // entry of every fiber
  void reset(uint3 first);
  void run_ready_threads();
  Block* next_block();
  void on_exit(Thread& thread);
  void end_phase_if_complete();
  void check_static_shared() const;
  unsigned running_threads() const;

  const Launch launch_;
  const Options options_;
  const std::function<void()>& body_;  // what every thread runs
  std::mt19937_64 random_;
  std::vector<Thread> threads_;  // of all blocks
  std::vector<Block> blocks_;    // by rank
  std::vector<unsigned> order_;  // of the blocks: who goes first
  BulkCopies copies_;
  Fiber scheduler_;
  std::exception_ptr error_;
  unsigned arrived_ = 0;       // at the cluster barrier
  unsigned phases_ended_ = 0;  // of the cluster barrier
};

}  // namespace cuda_shim
