// Which earlier accesses are ordered before the running thread's next one, by CUDA's rules:
//  - its own;
//  - those of its block before the last __syncthreads both passed (epochs);
//  - those of its warp before a __syncwarp both joined (vector clocks over the 32 lanes); shuffles and votes order
//    nothing;
//  - those of another block that reach it through atomics on one location with a __threadfence on both sides: the
//    writer fences, then makes its atomic; the reader makes its atomic, then fences.
// Internal to the race checker.
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
  void begin_block(unsigned threads);

  void barrier() { ++epoch_; }
  void warp_sync(unsigned first_thread, uint32_t lanes);
  void fence(unsigned thread);
  void atomic(unsigned thread, uintptr_t address);

  uint32_t block() const { return block_; }
  uint32_t epoch() const { return epoch_; }
  uint32_t clock(unsigned thread) const { return knowledge_[thread][thread % 32]; }

  // Is the earlier access ordered before what `thread` does now?
  bool ordered(const Access& earlier, unsigned thread) const;

 private:
  using Clocks = std::array<uint32_t, 32>;  // of the lanes of a warp

  // What a fence makes ready to publish: everything ordered before it.
  struct Release {
    uint32_t block, epoch;
    unsigned thread;
    Clocks knowledge;

    bool covers(const Access& access) const;
  };
  using Releases = std::vector<std::shared_ptr<const Release>>;

  // A release that this block has acquired, and since when.
  struct Acquired {
    std::shared_ptr<const Release> release;
    uint32_t epoch, clock;
    unsigned thread;
  };

  bool known(uint32_t epoch, unsigned thread, uint32_t clock, unsigned by) const;

  uint32_t block_ = 0, epoch_ = 0;
  std::vector<Clocks> knowledge_;                      // of each thread about the lanes of its warp
  std::vector<Releases> ready_;                        // by thread: what its next atomic publishes
  std::vector<Releases> observed_;                     // by thread: what its atomics saw, until a fence acquires it
  std::vector<Acquired> acquired_;                     // by this block
  std::unordered_map<uintptr_t, Releases> published_;  // by address of the atomic
};

}  // namespace cuda_shim::race
