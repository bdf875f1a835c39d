// The kernels of csrc/ops/advantages against the fp64 CPU versions.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "cuda_shim/orders.h"
#include "ops/advantages/gae.h"
#include "ops/advantages/group.h"
#include "ops/advantages/spread.h"

namespace areal {
namespace {

using namespace advantages;  // NOLINT(google-build-using-namespace): the namespace under test

std::vector<int64_t> offsets(const std::vector<int64_t>& lengths) {
  std::vector<int64_t> cu_seqlens{0};
  for (const int64_t length : lengths) cu_seqlens.push_back(cu_seqlens.back() + length);
  return cu_seqlens;
}

// Random numbers of float precision, and a mask with long runs of both kinds.
struct Tokens {
  std::vector<int64_t> cu_seqlens;
  std::vector<float> a, b;
  std::vector<double> wide_a, wide_b;
  std::vector<unsigned char> mask;

  explicit Tokens(const std::vector<int64_t>& lengths) : cu_seqlens(offsets(lengths)) {
    const auto count = static_cast<size_t>(cu_seqlens.back());
    std::mt19937 random(static_cast<unsigned>(count));
    std::normal_distribution<float> normal;
    for (size_t t = 0; t < count; ++t) {
      a.push_back(normal(random));
      b.push_back(normal(random));
      mask.push_back(t / 100 % 3 == 0 ? 1 : t / 100 % 3 == 1 ? random() % 3 != 0 : 0);
    }
    wide_a.assign(a.begin(), a.end());
    wide_b.assign(b.begin(), b.end());
  }
  Segments segments() const { return {cu_seqlens.data(), static_cast<int64_t>(cu_seqlens.size()) - 1}; }
  const bool* loss_mask(bool masked) const { return masked ? reinterpret_cast<const bool*>(mask.data()) : nullptr; }
};

// 128 and 1,024: the tiles of the two kernels; 1,024 is also where the second takes over.
std::vector<std::vector<int64_t>> layouts() {
  std::vector<std::vector<int64_t>> all = {{}, {0}, {1}, {0, 5, 0, 33, 128, 129, 0}, {1025, 3, 1024}};
  if (cuda_shim::variant() == cuda_shim::Variant::kPlain) {
    all.push_back({31, 32, 33, 127, 128, 129, 255, 256, 257, 1023, 1024, 1025});
    all.push_back({2047, 2048, 2049, 1, 5000});
    all.push_back(std::vector<int64_t>(300, 3));  // more sequences than blocks
  }
  return all;
}

template <class T>
bool same_bits(const std::vector<T>& x, const std::vector<T>& y) {
  return x.size() == y.size() && (x.empty() || std::memcmp(x.data(), y.data(), x.size() * sizeof(T)) == 0);
}

TEST(GaeKernel, MatchesTheCpu) {
  for (const auto& lengths : layouts()) {
    const Tokens tokens(lengths);
    for (const bool masked : {false, true}) {
      for (const auto& [gamma, lam] : {std::pair{1.0, 1.0}, std::pair{0.99, 0.95}, std::pair{0.9, 0.0}}) {
        std::vector<double> truth(tokens.a.size()), truth_returns(tokens.a.size());
        gae_cpu({tokens.segments(), tokens.wide_a.data(), tokens.wide_b.data(), tokens.loss_mask(masked), gamma, lam,
                 truth.data(), truth_returns.data()});
        std::vector<float> first;
        cuda_shim::for_each_order(
            [&] {
              std::vector<float> out(tokens.a.size(), NAN), returns(tokens.a.size(), NAN);
              cuda::gae({tokens.segments(), tokens.a.data(), tokens.b.data(), tokens.loss_mask(masked), gamma, lam,
                         out.data(), returns.data()},
                        tokens.cu_seqlens.back(), nullptr);
              for (size_t t = 0; t < out.size(); ++t) {
                ASSERT_NEAR(out[t], truth[t], 1e-5 * (10 + std::fabs(truth[t]))) << t;
                ASSERT_NEAR(returns[t], truth_returns[t], 1e-5 * (10 + std::fabs(truth_returns[t]))) << t;
              }
              if (first.empty()) first = out;
              EXPECT_TRUE(same_bits(first, out)) << "depends on the order";
            },
            1);
      }
    }
  }
}

TEST(GaeKernel, NeverLooksAtMaskedTokens) {
  const Tokens tokens({1500, 700});
  auto dirty_rewards = tokens.a, dirty_values = tokens.b;
  for (size_t t = 0; t < tokens.mask.size(); ++t) {
    if (!tokens.mask[t]) dirty_rewards[t] = dirty_values[t] = t % 2 ? NAN : INFINITY;
  }
  std::vector<float> out[4];
  for (auto& o : out) o.assign(tokens.a.size(), NAN);
  cuda::gae({tokens.segments(), tokens.a.data(), tokens.b.data(), tokens.loss_mask(true), 0.99, 0.95, out[0].data(),
             out[1].data()},
            2200, nullptr);
  cuda::gae({tokens.segments(), dirty_rewards.data(), dirty_values.data(), tokens.loss_mask(true), 0.99, 0.95,
             out[2].data(), out[3].data()},
            2200, nullptr);
  EXPECT_TRUE(same_bits(out[0], out[2]));
  EXPECT_TRUE(same_bits(out[1], out[3]));
}

// cu_seqlens of a GPU that do not fit the tokens: the sequences are cut to them, and what no sequence covers is 0.
TEST(AdvantageKernels, StayInsideTheTokensWhateverCuSeqlensSays) {
  const std::vector<std::vector<int64_t>> lengths = {{}, {3, 40}, {1025, 1}, {5, 1100}, {1060, 1060}};
  for (const auto& given : lengths) {
    constexpr int64_t kTokens = 1050;
    const Tokens inputs({kTokens});
    const std::vector<int64_t> wrong = offsets(given);
    std::vector<int64_t> cut = wrong;
    for (int64_t& token : cut) token = std::min(token, kTokens);
    const auto covered = static_cast<size_t>(cut.back());
    const auto count = static_cast<int64_t>(given.size());
    const std::vector<double> scores(given.size(), 2);
    const auto run = [&](const std::vector<int64_t>& cu_seqlens, int64_t tokens) {
      std::vector<std::vector<float>> out(3, std::vector<float>(static_cast<size_t>(tokens), NAN));
      const Segments segments{cu_seqlens.data(), count};
      cuda::gae({segments, inputs.a.data(), inputs.b.data(), nullptr, 0.99, 0.95, out[0].data(), out[1].data()}, tokens,
                nullptr);
      const TokenArgs<float> args{segments, nullptr, inputs.a.data(), inputs.b.data()};
      cuda::spread_scores(SpreadArgs<float>{args, scores.data(), 0.3, true, out[2].data()}, tokens, nullptr);
      std::vector<double> sums(given.size(), NAN);
      cuda::log_ratio_sums(LogRatioSumArgs<float>{args, sums.data()}, tokens, nullptr);
      out.emplace_back(sums.begin(), sums.end());
      return out;
    };
    const auto out = run(wrong, kTokens), truth = run(cut, cut.back());
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_TRUE(same_bits(std::vector<float>(out[i].begin(), out[i].begin() + covered), truth[i])) << i;
      for (size_t t = covered; t < kTokens; ++t) ASSERT_EQ(out[i][t], 0) << i << ", " << t;
    }
    EXPECT_TRUE(same_bits(out[3], truth[3]));
  }
}

struct Groups {
  std::vector<float> rewards;
  std::vector<double> wide;
  std::vector<int64_t> sorted_ids, order;

  explicit Groups(int64_t count) {
    std::mt19937 random(static_cast<unsigned>(count));
    std::vector<int64_t> ids;
    for (int64_t i = 0; i < count; ++i) {
      ids.push_back(static_cast<int64_t>(random() % 9) * 1000000007 - 3);
      const bool failed = random() % 11 == 0, constant = ids.back() % 2 == 0;
      rewards.push_back(failed ? NAN : constant ? 0.1f : static_cast<float>(random() % 1000) + 1e6f);
    }
    wide.assign(rewards.begin(), rewards.end());
    order.resize(ids.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int64_t i, int64_t j) { return ids[i] < ids[j]; });
    for (const int64_t i : order) sorted_ids.push_back(ids[static_cast<size_t>(i)]);
  }
};

TEST(GroupScoresKernel, MatchesTheCpu) {
  constexpr Level kLevels[] = {Level::kNone, Level::kGroup, Level::kBatch};
  for (const int64_t count : {0, 1, 5, 33, 200}) {
    const Groups groups(count);
    for (int i = 0; i < 36; ++i) {
      const GroupOptions options{kLevels[i % 3], kLevels[i / 3 % 3],
                                 i % 2 == 0,     i / 3 % 3 == 0,
                                 i / 9 % 2,      1e-6,
                                 i / 18 == 1,    i % 5 == 0 ? Singleton::kRaw : Singleton::kZero};
      std::vector<double> truth(groups.rewards.size());
      group_scores_cpu(GroupArgs<double>{options, count, groups.wide.data(), groups.sorted_ids.data(),
                                         groups.order.data(), truth.data()});
      cuda_shim::for_each_order(
          [&] {
            std::vector<double> out(truth.size(), NAN);
            alignas(8) unsigned char scratch[cuda::kBatchScratchBytes];
            cuda::group_scores(GroupArgs<float>{options, count, groups.rewards.data(), groups.sorted_ids.data(),
                                                groups.order.data(), out.data()},
                               scratch, nullptr);
            for (size_t s = 0; s < out.size(); ++s) ASSERT_NEAR(out[s], truth[s], 1e-9 * (1 + std::fabs(truth[s])));
          },
          1);
    }
  }
}

TEST(SpreadKernel, MatchesTheCpu) {
  for (const auto& lengths : layouts()) {
    const Tokens tokens(lengths);
    std::vector<double> scores(lengths.size());
    for (size_t s = 0; s < scores.size(); ++s) scores[s] = 0.25 * static_cast<double>(s) - 1;
    for (const bool masked : {false, true}) {
      for (const bool by_length : {false, true}) {
        std::vector<double> truth(tokens.a.size()), sums(lengths.size());
        const TokenArgs<double> wide{tokens.segments(), tokens.loss_mask(masked), tokens.wide_a.data(),
                                     tokens.wide_b.data()};
        spread_scores_cpu(SpreadArgs<double>{wide, scores.data(), 0.3, by_length, truth.data()});
        log_ratio_sums_cpu(LogRatioSumArgs<double>{wide, sums.data()});
        cuda_shim::for_each_order(
            [&] {
              const TokenArgs<float> narrow{tokens.segments(), tokens.loss_mask(masked), tokens.a.data(),
                                            tokens.b.data()};
              std::vector<float> out(truth.size(), NAN);
              std::vector<double> out_sums(sums.size(), NAN);
              cuda::spread_scores(SpreadArgs<float>{narrow, scores.data(), 0.3, by_length, out.data()},
                                  tokens.cu_seqlens.back(), nullptr);
              cuda::log_ratio_sums(LogRatioSumArgs<float>{narrow, out_sums.data()}, tokens.cu_seqlens.back(), nullptr);
              for (size_t t = 0; t < out.size(); ++t) ASSERT_NEAR(out[t], truth[t], 1e-6 * (1 + std::fabs(truth[t])));
              for (size_t s = 0; s < sums.size(); ++s) ASSERT_NEAR(out_sums[s], sums[s], 1e-9 * (1 + tokens.a.size()));
            },
            1);
      }
    }
  }
}

}  // namespace
}  // namespace areal
