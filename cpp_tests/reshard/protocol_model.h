// The protocol of version_store.h in an executable memory model: small enough to run through everything that C++
// allows, with the very orders the store is compiled with (protocol_orders.h).
//
// Every atomic location keeps its whole modification order. A load may read any store that is not older than one its
// thread knows of; an acquire learns what the release it reads from knew; a seq_cst operation also what earlier
// seq_cst operations on that location read and wrote; a read-modify-write reads the newest store and carries on its
// release. Arenas are plain memory: two accesses, one of them a write, that no happens-before orders are a fault, and
// so is a read of another version's bytes. Threads take steps in every order.
#pragma once

#include <string>

#include "reshard/protocol_orders.h"

namespace areal::reshard::model {

// What a broken implementation could do instead.
enum class Fault { kNone, kNoRecheck, kRecheckBeforePin, kNoDrain, kDrainOtherArena, kFlipBeforeFill, kUnpinBeforeUse };

struct Outcome {
  std::string violation;  // of the first execution that has one; empty: none has
  int64_t executions = 0;
};

// One writer that publishes `updates` versions, against one reader that pins twice.
Outcome explore_pins(const ProtocolOrders& orders, Fault fault, int updates);
// The same against one thread that asks for the version without a pin.
Outcome explore_polls(const ProtocolOrders& orders, int updates);

}  // namespace areal::reshard::model
