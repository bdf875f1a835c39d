// The memory orders of the protocol in version_store.h, by the step that uses them. The store is compiled with kOrders;
// cpp_tests/reshard/protocol_model_test.cpp runs the same table through every interleaving that the memory model of C++
// allows, and again with each order weakened: those that no weaker one could replace then let a reader see a mixture.
#pragma once

#include <atomic>

namespace areal::reshard {

struct ProtocolOrders {
  // A reader.
  std::memory_order look = std::memory_order_relaxed;     // first load of epoch: a stale one fails the re-check
  std::memory_order pin = std::memory_order_seq_cst;      // sets the bit
  std::memory_order recheck = std::memory_order_seq_cst;  // second load of epoch; acquires the arena
  std::memory_order unpin = std::memory_order_release;    // clears the bit; releases the loads from the arena
  // The writer.
  std::memory_order drain = std::memory_order_seq_cst;  // loads readers; acquires what unpin released
  std::memory_order flip = std::memory_order_seq_cst;   // stores epoch; releases arena and record
  // A look at the version without a pin: epoch, record, epoch again.
  std::memory_order write_record = std::memory_order_release;  // by the writer, before the flip
  std::memory_order poll = std::memory_order_acquire;          // first load of epoch
  std::memory_order read_record = std::memory_order_acquire;   // makes the epoch before that of the record visible
  std::memory_order poll_again = std::memory_order_acquire;    // second load of epoch; the first of the next try

  bool operator==(const ProtocolOrders&) const = default;
};

inline constexpr ProtocolOrders kOrders;

}  // namespace areal::reshard
