#include "reshard/plan.h"

#include <gtest/gtest.h>

#include "base/check.h"
#include "plan_testing.h"

namespace areal::reshard {
namespace {

TEST(Plan, BringsEveryElementOnceFromARankThatHasIt) {
  for (uint32_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(seed);
    RandomLayouts random(seed);
    const auto specs = random.specs(1 + random.below(6));
    const auto source = share(random.layout(specs, int32_t(1 + random.below(6))));
    const auto target = share(random.layout(specs, int32_t(1 + random.below(6))));
    const Topology topology = random.topology();
    const PlanOptions options{64 + random.below(300), random.below(3) == 0};
    check_plan(*Plan::make(source, target, topology, options));
    if (HasFatalFailure() || HasFailure()) return;
  }
}

TEST(Plan, LoadsTheMostLoadedSenderAsLittleAsPossible) {
  for (uint32_t seed = 0; seed < 150; ++seed) {
    SCOPED_TRACE(seed);
    RandomLayouts random(seed);
    const auto specs = random.specs(1 + random.below(5));
    const auto source = share(random.layout(specs, int32_t(1 + random.below(6))));
    const auto target = share(random.layout(specs, int32_t(1 + random.below(6))));
    const Topology topology = random.topology();
    const auto plan = Plan::make(source, target, topology, {});
    const ElementDemands demands(*source, *target, topology);
    EXPECT_EQ(plan->lower_bound().wire_bytes, demands.wire_bytes);
    EXPECT_EQ(plan->stats().local_bytes, demands.local_bytes);
    const double best = demands.best_seconds(topology);
    EXPECT_NEAR(plan->lower_bound().egress_seconds, best, 1e-12);
    for (const SenderLoad& sender : plan->stats().senders) {
      // Cuts fall between elements: a few of them more than the optimum.
      const double slack = 100;
      EXPECT_LE(double(sender.nic_bytes), best * topology.nic_of(sender.rank) * 1.02 + slack);
      EXPECT_LE(double(sender.bytes - sender.nic_bytes), best * topology.intra_node_bytes_per_s * 1.02 + slack);
    }
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace areal::reshard
