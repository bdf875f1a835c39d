#include "reshard/plan.h"

#include <gtest/gtest.h>

#include <functional>
#include <numeric>

#include "base/check.h"
#include "plan_testing.h"

namespace areal::reshard {
namespace {

Mesh mesh(int32_t first, std::vector<int64_t> shape) {
  std::vector<int32_t> ranks(size_t(std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>())));
  std::iota(ranks.begin(), ranks.end(), first);
  std::vector<std::string> names;
  for (size_t d = 0; d < shape.size(); ++d) names.emplace_back(1, char('a' + d));
  return {ranks, std::move(shape), names};
}

// Tensors "a", "b", ... with the same placements on one mesh.
std::shared_ptr<const Layout> layout(const std::vector<TensorSpec>& specs, const Mesh& mesh,
                                     const std::vector<Placement>& placements) {
  std::vector<TensorLayout> tensors;
  for (const TensorSpec& spec : specs) tensors.push_back({spec, 0, placements, {}});
  return share({{mesh}, tensors});
}

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

TEST(Plan, KeepsTensorsApartThatDifferInOneThing) {
  // Equal shapes of other element sizes; equal shapes and placements on meshes of other shapes.
  const std::vector<TensorSpec> specs = {{"a", "x", 2, {6, 6}}, {"b", "y", 4, {6, 6}}};
  check_plan(*Plan::make(layout(specs, mesh(0, {2, 3}), {Shard{0}, Shard{1}}), layout(specs, mesh(10, {4}), {Shard{1}}),
                         {}, {}));
  const std::vector<TensorSpec> twins = {{"a", "x", 2, {6, 6}}, {"b", "x", 2, {6, 6}}};
  const std::vector<Placement> rows_and_columns = {Shard{0}, Shard{1}};
  const auto source = share(
      {{mesh(0, {2, 3}), mesh(0, {3, 2})}, {{twins[0], 0, rows_and_columns, {}}, {twins[1], 1, rows_and_columns, {}}}});
  check_plan(*Plan::make(source, layout(twins, mesh(10, {4}), {Shard{1}}), {}, {}));
}

TEST(Plan, DividesManyTensorsAmongManyReplicas) {
  std::vector<TensorSpec> specs;
  for (int i = 0; i < 300; ++i) {
    specs.push_back({std::to_string(1000 + i), "x", int64_t{1} << i % 3, {1 + i % 5, 3 + i % 7}});
  }
  const auto source = layout(specs, mesh(0, {2, 9}), {Shard{0}, Replicate{}});
  const auto plan =
      Plan::make(source, layout(specs, mesh(20, {5}), {Shard{1}}), {1, 1000, 1000, {{4, 100}}}, {64, false});
  check_plan(*plan);
  EXPECT_LE(plan->stats().sender_max_over_mean, 1.05);
}

TEST(Plan, CutsBetweenRows) {
  const std::vector<TensorSpec> specs = {{"a", "x", 2, {1000, 64}}};
  const auto plan =
      Plan::make(layout(specs, mesh(0, {7}), {Replicate{}}), layout(specs, mesh(8, {1}), {Replicate{}}), {}, {});
  EXPECT_LE(plan->stats().sender_max_over_mean, 1.05);
  for (const Message& message : plan->rank(8).receives) {
    ASSERT_EQ(message.atoms.size(), 1u);
    EXPECT_EQ(message.atoms[0].box.size[1], 64);
  }
}

// Two nodes of four, each with a replica of every tensor in four shards; the target wants other shards.
TEST(Plan, MixesLinksEvenlyWhereOneKindIsNotEnough) {
  const std::vector<TensorSpec> specs = {{"a", "x", 2, {4096, 64}}, {"b", "x", 2, {4096, 64}}};
  const auto source = layout(specs, mesh(0, {4, 2}), {Replicate{}, Shard{0}});
  const auto target = layout(specs, mesh(0, {2, 4}), {Replicate{}, Shard{1}});
  const auto plan = Plan::make(source, target, {4, 1e6, 2e6, {}}, {});
  EXPECT_LE(plan->stats().seconds, 1.05 * plan->lower_bound().seconds);
}

TEST(Plan, BoundsTimesExactly) {
  const std::vector<TensorSpec> specs = {{"a", "x", 1, {1 << 20}}};
  const Topology topology{4, 1000, 5000, {}};
  const double bytes = 1 << 20;
  const auto bound_of = [&](const Mesh& from, const Mesh& to, bool multicast) {
    const auto plan = Plan::make(layout(specs, from, {Replicate{}}), layout(specs, to, {Replicate{}}), topology,
                                 {1 << 20, multicast});
    EXPECT_GE(plan->stats().seconds, plan->lower_bound().seconds);
    return std::pair(plan->lower_bound(), plan->stats());
  };
  // From a neighbour alone: the NICs are no help.
  const auto [near, near_stats] = bound_of(mesh(0, {1}), mesh(1, {1}), false);
  EXPECT_DOUBLE_EQ(near.ingress_seconds, bytes / 5000);
  EXPECT_DOUBLE_EQ(near.egress_seconds, bytes / 5000);
  EXPECT_DOUBLE_EQ(near_stats.seconds, bytes / 5000);
  EXPECT_EQ(near.nic_bytes, 0);
  // From afar: over one NIC. To all four of a node: four times; by multicast once, over the NICs of all four.
  const auto [far, far_stats] = bound_of(mesh(0, {4}), mesh(4, {4}), false);
  EXPECT_DOUBLE_EQ(far.ingress_seconds, bytes / 1000);
  EXPECT_DOUBLE_EQ(far.node_seconds, bytes / 1000);
  EXPECT_DOUBLE_EQ(far.egress_seconds, bytes / 1000);
  EXPECT_EQ(far.nic_bytes, 4 << 20);
  const auto [once, once_stats] = bound_of(mesh(0, {4}), mesh(4, {4}), true);
  EXPECT_DOUBLE_EQ(once.ingress_seconds, bytes / 6000);
  EXPECT_DOUBLE_EQ(once.node_seconds, bytes / 4000);
  EXPECT_DOUBLE_EQ(once.egress_seconds, bytes / 4000);
  EXPECT_EQ(once.nic_bytes, 1 << 20);
  EXPECT_EQ(once_stats.nic_bytes, 1 << 20);
  EXPECT_DOUBLE_EQ(once_stats.seconds, bytes / 4000 + bytes * 3 / 4 / 5000);  // one phase after the other
}

TEST(Plan, SpreadsSmallTensorsOverTheRanksOfANode) {
  std::vector<TensorSpec> specs;
  for (int i = 0; i < 64; ++i) specs.push_back({std::string(1, char('0' + i)), "x", 2, {100 + i}});
  const auto plan = Plan::make(layout(specs, mesh(0, {1}), {Replicate{}}), layout(specs, mesh(8, {8}), {Replicate{}}),
                               {}, {1 << 20, true});
  check_plan(*plan);
  int64_t most = 0;
  for (const Message& message : plan->rank(0).sends) most = std::max(most, message.bytes);
  EXPECT_EQ(plan->rank(0).sends.size(), 8u);
  EXPECT_LE(most, plan->stats().nic_bytes / 4);
}

}  // namespace
}  // namespace areal::reshard
