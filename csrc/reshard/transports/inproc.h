// Ranks that are threads of one process. Buffers that an endpoint exposes are written straight from the sender's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "reshard/transport.h"

namespace areal::reshard {

class InprocGroup {
 public:
  // ranks: unique.
  explicit InprocGroup(std::vector<int32_t> ranks);
  ~InprocGroup();

  // The endpoint of a rank; one at a time. exposed: memory that peers may write while this rank has granted it; it must
  // outlive the group's updates.
  std::unique_ptr<Transport> endpoint(int32_t rank, std::vector<std::span<std::byte>> exposed);

  struct State;

 private:
  std::shared_ptr<State> state_;
};

}  // namespace areal::reshard
