// Which earlier accesses are ordered before the running thread's next one, by CUDA's rules:
//  - its own;
//  - those of its block before a __syncthreads both passed;
//  - those of its warp before a __syncwarp both joined; shuffles and votes order nothing;
//  - those that reach it through a point: what a thread did before it arrived at the cluster barrier or at an mbarrier,
//    for those who waited for the end of that phase; and a bulk copy, for those who waited for its mbarrier or group;
//  - those of another cluster that reach it through atomics on one location with a __threadfence on both sides: the
//    writer fences, then makes its atomic; the reader makes its atomic, then fences.
//
// Every thread of the running cluster has a slot, and so has each queue of bulk copies. An actor's clock counts its
// releases; to know clock c of a slot is to come after all that its actor did up to then. Internal to the race checker.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "shadow.h"

namespace cuda_shim::race {

class HappensBefore {
 public:
  void begin_launch();
  void begin_cluster(unsigned blocks, unsigned slots_per_block);

  void barrier(unsigned block);  // of all threads of this block of the cluster
  void warp_sync(unsigned first_slot, uint32_t lanes);
  void fence(unsigned slot);
  void atomic(unsigned slot, uintptr_t address);

  // A point where threads arrive (release) and for whose phases they wait (acquire). Phases are cumulative.
  void release(unsigned slot, uintptr_t point);
  void end_phase(uintptr_t point);
  void acquire(unsigned slot, uintptr_t point);

  // A slot for bulk copies that complete together, and the clock of the copies that are issued now.
  unsigned add_queue();
  void reach(unsigned queue, uint32_t clock, uintptr_t point);       // point learns that those up to clock are done
  void reach_thread(unsigned queue, uint32_t clock, unsigned slot);  // so does a thread

  void async_fence(unsigned slot);
  // Was the write followed by its thread's fence_async_proxy?
  bool shown_to_async(const Access& write) const;

  uint32_t cluster() const { return cluster_; }
  uint32_t clock(unsigned slot) const { return threads_[slot].lanes[slot % 32]; }
  bool has_heard_of_block(unsigned slot, unsigned block) const;
  // Does some thread of the block come after the access?
  bool block_knows(unsigned block, const Access& access) const;

  // Is the earlier access ordered before what `slot` does now?
  bool ordered(const Access& earlier, unsigned slot) const;

 private:
  using Lanes = std::array<uint32_t, 32>;
  using Clocks = std::vector<uint32_t>;  // by slot; zeros beyond its end
  using SharedClocks = std::shared_ptr<const Clocks>;

  // A thread knows what both parts say; threads of a block mostly share the first.
  struct Knowledge {
    SharedClocks common;
    Lanes lanes{};  // of its own warp
  };
  struct Point {
    Clocks gathered;
    SharedClocks last_joined;  // part of `gathered` already
    SharedClocks ended;        // gathered, at the end of the last phase
  };
  // What a fence makes ready to publish: everything ordered before it.
  struct Release {
    uint32_t cluster;
    unsigned slot;
    Knowledge knowledge;

    bool covers(const Access& access) const;
  };
  using Releases = std::vector<std::shared_ptr<const Release>>;

  // A release that this cluster has acquired, and by whom and when.
  struct Acquired {
    std::shared_ptr<const Release> release;
    unsigned slot;
    uint32_t clock;
  };

  static bool knows(const Knowledge& knowledge, unsigned owner, unsigned slot, uint32_t clock);
  static void join(Clocks& into, const Clocks& from);
  static void join_thread(Clocks& into, const Knowledge& thread, unsigned slot, SharedClocks& last_joined);
  void tick(unsigned slot) { ++threads_[slot].lanes[slot % 32]; }

  uint32_t cluster_ = 0;
  unsigned slots_per_block_ = 0, queues_end_ = 0;
  std::vector<Knowledge> threads_;                     // by slot
  std::vector<uint32_t> async_fences_;                 // by slot: its clock at its last fence_async_proxy
  std::unordered_map<uintptr_t, Point> points_;        // of this cluster
  std::vector<Releases> ready_;                        // by slot: what its next atomic publishes
  std::vector<Releases> observed_;                     // by slot: what its atomics saw, until a fence acquires it
  std::vector<Acquired> acquired_;                     // by this cluster
  std::unordered_map<uintptr_t, Releases> published_;  // by address of the atomic
};

}  // namespace cuda_shim::race
