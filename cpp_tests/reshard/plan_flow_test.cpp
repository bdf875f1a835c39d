#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "base/check.h"
#include "reshard/flow.h"

namespace areal::reshard {
namespace {

struct Network {
  std::vector<Demand> demands;
  std::vector<int64_t> rates;
};

Network random_network(std::mt19937& random) {
  Network network;
  const auto below = [&](int64_t n) { return int64_t(random() % uint64_t(n)); };
  for (int64_t i = 1 + below(6); i > 0; --i) network.rates.push_back(1 + below(9));
  for (int64_t i = 1 + below(6); i > 0; --i) {
    Demand demand{below(5) == 0 ? 0 : below(1000), {}};
    for (size_t link = 0; link < network.rates.size(); ++link) {
      if (below(2) == 0) demand.links.push_back(int32_t(link));
    }
    if (demand.links.empty()) demand.links.push_back(0);
    network.demands.push_back(demand);
  }
  return network;
}

// Over all sets of open links: what only they can serve over their rate.
double slow_tightest(const Network& network, const std::vector<bool>& served, const std::vector<bool>& closed) {
  double worst = 0;
  for (uint32_t set = 1; set < uint32_t{1} << network.rates.size(); ++set) {
    double bytes = 0, rate = 0;
    for (size_t link = 0; link < network.rates.size(); ++link) {
      if ((set >> link & 1) != 0 && !closed[link]) rate += double(network.rates[link]);
    }
    for (size_t k = 0; k < network.demands.size(); ++k) {
      const auto& links = network.demands[k].links;
      const bool only =
          std::all_of(links.begin(), links.end(), [&](int32_t l) { return set >> l & 1 || closed[size_t(l)]; });
      if (only && !served[k]) bytes += double(network.demands[k].bytes);
    }
    if (rate > 0) worst = std::max(worst, bytes / rate);
  }
  return worst;
}

std::vector<int64_t> loads_of(const Network& network, const Service& service) {
  std::vector<int64_t> loads(network.rates.size());
  for (size_t k = 0; k < network.demands.size(); ++k) {
    for (size_t i = 0; i < service.bytes[k].size(); ++i) {
      loads[size_t(network.demands[k].links[i])] += service.bytes[k][i];
    }
  }
  return loads;
}

TEST(PlanFlow, FindsTheTightestSet) {
  std::mt19937 random(1);
  for (int round = 0; round < 500; ++round) {
    const Network network = random_network(random);
    const std::vector<bool> none(8);
    EXPECT_DOUBLE_EQ(tightest_set(network.demands, network.rates).seconds(), slow_tightest(network, none, none));
  }
}

TEST(PlanFlow, ServesEverythingAsEvenlyAsPossible) {
  std::mt19937 random(2);
  for (int round = 0; round < 500; ++round) {
    const Network network = random_network(random);
    const Service service = serve(network.demands, network.rates);
    for (size_t k = 0; k < network.demands.size(); ++k) {
      ASSERT_EQ(service.bytes[k].size(), network.demands[k].links.size());
      EXPECT_EQ(std::accumulate(service.bytes[k].begin(), service.bytes[k].end(), int64_t{0}),
                network.demands[k].bytes);
      for (const int64_t bytes : service.bytes[k]) EXPECT_GE(bytes, 0);
    }
    // Level by level: the tightest set that is left, without the links and demands of tighter ones.
    const std::vector<int64_t> loads = loads_of(network, service);
    std::vector<bool> served(network.demands.size()), closed(network.rates.size());
    while (true) {
      const double level = slow_tightest(network, served, closed);
      if (level == 0) break;
      int32_t group = -1;
      double most = 0;
      for (size_t link = 0; link < loads.size(); ++link) {
        const double seconds = double(loads[link]) / double(network.rates[link]);
        if (closed[link] || service.group_of_link[link] < 0 || seconds <= most) continue;
        most = seconds;
        group = service.group_of_link[link];
      }
      ASSERT_GE(group, 0) << "no link is loaded for " << level << " s";
      for (size_t link = 0; link < loads.size(); ++link) {
        if (service.group_of_link[link] != group) continue;
        // Rounding moves less than a byte for each demand.
        EXPECT_NEAR(double(loads[link]) / double(network.rates[link]), level,
                    double(network.demands.size()) / double(network.rates[link]));
        closed[link] = true;
      }
      for (size_t k = 0; k < served.size(); ++k) {
        const auto& links = network.demands[k].links;
        served[k] = std::all_of(links.begin(), links.end(), [&](int32_t l) { return closed[size_t(l)]; });
      }
    }
  }
}

TEST(PlanFlow, PrefersLinksAsFarAsTheLimitAllows) {
  // Link 1 alone would take 20 / 3 s for both; in the least time, 4 s, it takes 60 bytes of the 100.
  const std::vector<int64_t> rates = {10, 15};
  const std::vector<Demand> demands = {{60, {0, 1}}, {40, {0, 1}}};
  const Tightness limit = tightest_set(demands, rates);
  EXPECT_DOUBLE_EQ(limit.seconds(), 4);
  const std::vector<int64_t> preferred = serve_preferred(demands, 1, rates, limit);
  EXPECT_EQ(preferred[0] + preferred[1], 60);
  EXPECT_EQ(serve_preferred(demands, 2, rates, limit), (std::vector<int64_t>{0, 0}));
  EXPECT_EQ(serve_preferred(demands, 0, rates, limit), (std::vector<int64_t>{60, 40}));
}

TEST(PlanFlow, PreferenceIsGreatestAndLeavesRoomForTheRest) {
  std::mt19937 random(3);
  for (int round = 0; round < 300; ++round) {
    const Network network = random_network(random);
    const auto first_preferred = int32_t(random() % (network.rates.size() + 1));
    std::vector<Demand> halves;
    const Tightness limit = tightest_set(network.demands, network.rates);
    const std::vector<int64_t> bytes = serve_preferred(network.demands, first_preferred, network.rates, limit);
    for (size_t k = 0; k < bytes.size(); ++k) {
      EXPECT_LE(bytes[k], network.demands[k].bytes);
      const std::vector<int32_t>& links = network.demands[k].links;
      const auto middle = std::lower_bound(links.begin(), links.end(), first_preferred);
      EXPECT_TRUE(middle != links.begin() || bytes[k] == network.demands[k].bytes);
      halves.push_back({bytes[k], {middle, links.end()}});
      halves.push_back({network.demands[k].bytes - bytes[k], {links.begin(), middle}});
    }
    // Both halves fit into the limit together, but for what rounding up moved.
    EXPECT_LE(tightest_set(halves, network.rates).seconds(), limit.seconds() + double(bytes.size()));
    // No more could be preferred: the greatest flow over preferred links alone, by all sets of links.
    double greatest = 1e18;
    for (uint32_t set = 0; set < uint32_t{1} << network.rates.size(); ++set) {
      double cut = 0;
      for (size_t link = 0; link < network.rates.size(); ++link) {
        if ((set >> link & 1) != 0) cut += double(network.rates[link]) * limit.seconds();
      }
      for (size_t k = 0; k < bytes.size(); ++k) {
        const std::vector<int32_t>& links = network.demands[k].links;
        const bool covered = std::all_of(links.begin(), links.end(),
                                         [&](int32_t l) { return l < first_preferred || (set >> l & 1) != 0; });
        if (!covered) cut += double(network.demands[k].bytes);
      }
      greatest = std::min(greatest, cut);
    }
    EXPECT_NEAR(double(std::accumulate(bytes.begin(), bytes.end(), int64_t{0})), greatest, double(bytes.size()));
  }
}

TEST(PlanFlow, KeepsLargeNumbersExact) {
  const std::vector<int64_t> rates(1000, 99'999'999'999'999);
  std::vector<int32_t> all(1000);
  std::iota(all.begin(), all.end(), 0);
  const std::vector<Demand> demands = {{int64_t{1} << 60, all}, {(int64_t{1} << 60) + 1, {7}}, {3, {7, 8}}};
  const Service service = serve(demands, rates);
  EXPECT_EQ(service.bytes[1][0], (int64_t{1} << 60) + 1);
  EXPECT_EQ(service.bytes[0][7], 0);
  EXPECT_EQ(service.bytes[2], (std::vector<int64_t>{0, 3}));
  EXPECT_EQ(std::accumulate(service.bytes[0].begin(), service.bytes[0].end(), int64_t{0}), int64_t{1} << 60);
}

TEST(PlanFlow, RefusesDemandsThatNobodyServes) {
  EXPECT_THROW(tightest_set({{1, {}}}, {1}), Error);
  EXPECT_THROW(tightest_set({{-1, {0}}}, {1}), Error);
  EXPECT_EQ(tightest_set({{0, {}}}, {1}).seconds(), 0);
}

}  // namespace
}  // namespace areal::reshard
