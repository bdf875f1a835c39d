// Runs a test body under every kind of thread and block order.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "engine.h"

namespace cuda_shim {

// Sets the order for a scope.
class ScopedOrder {
 public:
  explicit ScopedOrder(Order order, uint64_t seed = 1) : saved_(options()) {
    options().order = order;
    options().seed = seed;
  }
  ScopedOrder(const ScopedOrder&) = delete;
  ScopedOrder& operator=(const ScopedOrder&) = delete;
  ~ScopedOrder() { options() = saved_; }

 private:
  Options saved_;
};

// Calls body() in forward order, in reversed order, and under `seeds` random orders. A failed expectation tells which.
template <class Body>
void for_each_order(Body body, int seeds = 3) {
  const auto run = [&](Order order, uint64_t seed, const std::string& name) {
    SCOPED_TRACE("cuda_shim order: " + name);
    const ScopedOrder scope(order, seed);
    body();
  };
  run(Order::kForward, 1, "forward");
  run(Order::kReversed, 1, "reversed");
  for (int seed = 1; seed <= seeds; ++seed) {
    run(Order::kRandom, static_cast<uint64_t>(seed), "random, seed " + std::to_string(seed));
  }
}

}  // namespace cuda_shim
