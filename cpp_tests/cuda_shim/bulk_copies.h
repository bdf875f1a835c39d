// The asynchronous side of a cluster: mbarriers in shared memory and bulk copies under way. Internal to the shim.
#pragma once

#include <cstdint>
#include <map>
#include <random>
#include <vector>

#include "block.h"
#include "engine.h"

namespace cuda_shim {

struct Mbarrier {
  unsigned expected;          // arrivals a phase
  unsigned missing;           // arrivals that the phase still waits for
  int64_t missing_bytes = 0;  // likewise; negative while copies are ahead of expect_tx
  uint32_t phase = 0;         // phases that have ended
  unsigned queue;             // of the copies that complete here (race checker)
  const Thread* initialiser;  // until it has fenced
  std::vector<Thread*> waiting;
};

class BulkCopies {
 public:
  BulkCopies(const Options& options, std::mt19937_64& random) : options_(options), random_(random) {}

  void reset();

  // Called by running threads.
  void init(const void* barrier, unsigned arrivals, Location where, const void* pc);
  void init_fence();
  void arrive(const void* barrier, uint32_t expected_bytes, Location where, const void* pc);
  void wait(const void* barrier, unsigned parity, Location where, const void* pc);
  void load(void* shared, const void* global, uint32_t bytes, const void* barrier, Location where, const void* pc);
  void store(void* global, const void* shared, uint32_t bytes, Location where, const void* pc);
  void commit();
  void wait_stores(unsigned pending, bool read_only);

  // Called by the scheduler. complete_one() returns false when nothing is under way.
  bool complete_one();
  void maybe_complete_one();
  void on_block_exit(const Block& block);
  std::string describe(const void* barrier) const;

 private:
  struct Copy {
    char* to;
    const char* from;
    uint32_t bytes;
    const void* barrier;  // of a load
    uint32_t phase;       // of the barrier, at the issue
    const Thread* issuer;
    uint32_t group;          // of a store
    std::vector<char> data;  // of a store that has read its source
    Location where;

    bool is_load() const { return barrier != nullptr; }
  };
  // Of one thread.
  struct Stores {
    uint32_t group = 1;  // that is being filled
    unsigned read_queue = 0, write_queue = 0;
  };

  Mbarrier& find(const void* barrier, Location where);
  void end_phase_if_complete(Mbarrier& barrier, const void* address);
  void complete(size_t i);
  void read_source(Copy& copy);

  const Options& options_;
  std::mt19937_64& random_;
  std::map<const void*, Mbarrier> barriers_;
  std::vector<Copy> copies_;  // under way, oldest first
  std::map<const Thread*, Stores> stores_;
};

}  // namespace cuda_shim
