// The kernels of csrc/ops/advantages against the fp64 CPU versions.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "cuda_shim/orders.h"
#include "ops/advantages/best_of.h"
#include "ops/advantages/gae.h"
#include "ops/advantages/group.h"
#include "ops/advantages/moments.h"
#include "ops/advantages/spread.h"
#include "ops/advantages/token_rewards.h"

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

TokenRewards<float> kl_rewards(const Tokens& tokens, const bool* mask, Kl kl) {
  return {nullptr, tokens.a.data(), tokens.b.data(), mask, 0.3, kl};
}

template <class T>
bool same_bits(const std::vector<T>& x, const std::vector<T>& y) {
  return x.size() == y.size() && (x.empty() || std::memcmp(x.data(), y.data(), x.size() * sizeof(T)) == 0);
}

TEST(GaeKernel, MatchesTheCpu) {
  for (const auto& lengths : layouts()) {
    const Tokens tokens(lengths);
    std::vector<double> terminal(lengths.size());
    for (size_t s = 0; s < terminal.size(); ++s) terminal[s] = s % 5 == 2 ? NAN : 0.5 * static_cast<double>(s) - 1;
    for (const bool masked : {false, true}) {
      for (const auto& [gamma, lam] : {std::pair{1.0, 1.0}, std::pair{0.99, 0.95}, std::pair{0.9, 0.0}}) {
        std::vector<double> truth(tokens.a.size()), truth_returns(tokens.a.size());
        gae_cpu({tokens.segments(), tokens.wide_a.data(), tokens.wide_b.data(), terminal.data(),
                 tokens.loss_mask(masked), gamma, lam, truth.data(), truth_returns.data()});
        std::vector<float> first;
        cuda_shim::for_each_order(
            [&] {
              std::vector<float> out(tokens.a.size(), NAN), returns(tokens.a.size(), NAN);
              cuda::gae({tokens.segments(), tokens.a.data(), tokens.b.data(), terminal.data(), tokens.loss_mask(masked),
                         gamma, lam, out.data(), returns.data()},
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
  cuda::gae({tokens.segments(), tokens.a.data(), tokens.b.data(), nullptr, tokens.loss_mask(true), 0.99, 0.95,
             out[0].data(), out[1].data()},
            2200, nullptr);
  cuda::gae({tokens.segments(), dirty_rewards.data(), dirty_values.data(), nullptr, tokens.loss_mask(true), 0.99, 0.95,
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
      cuda::gae(
          {segments, inputs.a.data(), inputs.b.data(), nullptr, nullptr, 0.99, 0.95, out[0].data(), out[1].data()},
          tokens, nullptr);
      cuda::spread_scores(SpreadArgs<float>{segments, scores.data(), scores.data(), nullptr, inputs.a.data(),
                                            inputs.b.data(), 0.3, out[2].data()},
                          tokens, nullptr);
      std::vector<double> sums(given.size(), NAN);
      cuda::sequence_rewards(kl_rewards(inputs, nullptr, Kl::kK1), segments, tokens, sums.data(), nullptr);
      out.emplace_back(sums.begin(), sums.end());
      cuda::live_tokens(segments, nullptr, tokens, sums.data(), nullptr);
      out.emplace_back(sums.begin(), sums.end());
      return out;
    };
    const auto out = run(wrong, kTokens), truth = run(cut, cut.back());
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_TRUE(same_bits(std::vector<float>(out[i].begin(), out[i].begin() + covered), truth[i])) << i;
      for (size_t t = covered; t < kTokens; ++t) ASSERT_EQ(out[i][t], 0) << i << ", " << t;
    }
    EXPECT_TRUE(same_bits(out[3], truth[3]));
    EXPECT_TRUE(same_bits(out[4], truth[4]));
  }
}

struct Groups {
  std::vector<float> rewards;
  std::vector<double> wide;
  std::vector<double> lengths;
  std::vector<int64_t> ids, sorted_ids, order;

  explicit Groups(int64_t count) {
    std::mt19937 random(static_cast<unsigned>(count));
    for (int64_t i = 0; i < count; ++i) {
      ids.push_back(static_cast<int64_t>(random() % 9) * 1000000007 - 3);
      lengths.push_back(static_cast<double>(random() % 5));
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

// Arguments whose outputs are vectors of the caller.
template <class Real>
GroupArgs<Real> group_args(const GroupOptions& options, const Groups& groups, const std::vector<Real>& rewards,
                           std::vector<double>& scores, std::vector<double>& mean_lengths, bool* signal) {
  static const BatchStatistics batch{180, 300, 4e7, 0.1, 1e6 + 999};
  return {options,
          static_cast<int64_t>(rewards.size()),
          rewards.data(),
          groups.lengths.data(),
          groups.sorted_ids.data(),
          groups.order.data(),
          &batch,
          scores.data(),
          mean_lengths.data(),
          signal};
}

TEST(GroupScoresKernel, MatchesTheCpu) {
  constexpr Level kLevels[] = {Level::kNone, Level::kGroup, Level::kBatch};
  for (const int64_t count : {0, 1, 5, 33, 200}) {
    const Groups groups(count);
    const auto size = static_cast<size_t>(count);
    for (int i = 0; i < 36; ++i) {
      const GroupOptions options{.mean = kLevels[i % 3],
                                 .std = kLevels[i / 3 % 3],
                                 .leave_one_out = i % 2 == 0,
                                 .leave_one_out_std = kLevels[i / 3 % 3] == Level::kGroup && i % 4 == 0,
                                 .length_weighted = kLevels[i % 3] == Level::kGroup && i % 2 == 1,
                                 .divide_by_mean = i / 3 % 3 == 0,
                                 .ddof = i / 9 % 2,
                                 .eps = 1e-6,
                                 .eps_in_root = i / 18 == 1,
                                 .singleton = i % 5 == 0 ? Singleton::kRaw : Singleton::kZero};
      std::vector<double> truth(size), true_lengths(size);
      const auto true_signal = std::make_unique<bool[]>(size), signal = std::make_unique<bool[]>(size);
      group_scores_cpu(group_args(options, groups, groups.wide, truth, true_lengths, true_signal.get()));
      cuda_shim::for_each_order(
          [&] {
            std::vector<double> out(size, -7), lengths(size, NAN);
            cuda::group_scores(group_args(options, groups, groups.rewards, out, lengths, signal.get()), nullptr);
            for (size_t s = 0; s < size; ++s) {
              if (std::isnan(truth[s])) {
                ASSERT_TRUE(std::isnan(out[s]));
              } else {
                ASSERT_NEAR(out[s], truth[s], 1e-9 * (1 + std::fabs(truth[s]))) << i << ", " << s;
              }
              ASSERT_EQ(signal[s], true_signal[s]);
            }
            EXPECT_TRUE(same_bits(lengths, true_lengths));
          },
          1);
    }
  }
}

TEST(BestOfKernel, GivesTheBitsOfTheCpu) {
  for (const int64_t count : {0, 1, 5, 200}) {
    Groups groups(count);
    // Within a group rewards must not decrease, NaN last.
    std::stable_sort(groups.order.begin(), groups.order.end(), [&](int64_t i, int64_t j) {
      const float a = groups.rewards[i], b = groups.rewards[j];
      return std::isnan(b) ? !std::isnan(a) : a < b;
    });
    std::stable_sort(groups.order.begin(), groups.order.end(),
                     [&](int64_t i, int64_t j) { return groups.ids[i] < groups.ids[j]; });
    for (int i = 0; i < 12; ++i) {
      const BestOfOptions options{.k = 1 + i % 4,
                                  .divide_by_std = i % 2 == 0,
                                  .eps = 1e-6,
                                  .eps_in_root = i % 3 == 0,
                                  .singleton_raw = i % 5 == 0};
      std::vector<double> truth(groups.rewards.size(), -7);
      best_of_scores_cpu(BestOfArgs<float>{options, count, groups.rewards.data(), groups.sorted_ids.data(),
                                           groups.order.data(), truth.data()});
      cuda_shim::for_each_order(
          [&] {
            std::vector<double> out(truth.size(), -9);
            cuda::best_of_scores(BestOfArgs<float>{options, count, groups.rewards.data(), groups.sorted_ids.data(),
                                                   groups.order.data(), out.data()},
                                 nullptr);
            for (size_t s = 0; s < out.size(); ++s) {
              if (std::isnan(truth[s])) {
                ASSERT_TRUE(std::isnan(out[s]));
              } else {
                ASSERT_EQ(out[s], truth[s]);
              }
            }
          },
          1);
    }
  }
}

TEST(SpreadKernel, MatchesTheCpu) {
  for (const auto& lengths : layouts()) {
    const Tokens tokens(lengths);
    std::vector<double> scores(lengths.size()), divisors(lengths.size());
    for (size_t s = 0; s < scores.size(); ++s) {
      scores[s] = s % 5 == 2 ? NAN : 0.25 * static_cast<double>(s) - 1;
      divisors[s] = 1 + static_cast<double>(s % 3);
    }
    for (const bool masked : {false, true}) {
      for (const double* by : {static_cast<const double*>(nullptr), static_cast<const double*>(divisors.data())}) {
        std::vector<double> truth(tokens.a.size());
        spread_scores_cpu(SpreadArgs<double>{tokens.segments(), scores.data(), by, tokens.loss_mask(masked),
                                             tokens.wide_a.data(), tokens.wide_b.data(), 0.3, truth.data()});
        cuda_shim::for_each_order(
            [&] {
              std::vector<float> out(truth.size(), NAN);
              cuda::spread_scores(SpreadArgs<float>{tokens.segments(), scores.data(), by, tokens.loss_mask(masked),
                                                    tokens.a.data(), tokens.b.data(), 0.3, out.data()},
                                  tokens.cu_seqlens.back(), nullptr);
              for (size_t t = 0; t < out.size(); ++t) ASSERT_NEAR(out[t], truth[t], 1e-6 * (1 + std::fabs(truth[t])));
            },
            1);
      }
    }
  }
}

TEST(TokenRewardKernels, MatchTheCpu) {
  for (const auto& lengths : layouts()) {
    const Tokens tokens(lengths);
    const int64_t count = tokens.cu_seqlens.back();
    for (const Kl kl : {Kl::kK1, Kl::kK2, Kl::kK3}) {
      const bool* mask = tokens.loss_mask(kl != Kl::kK2);
      TokenRewards<float> narrow = kl_rewards(tokens, mask, kl);
      TokenRewards<double> wide{nullptr, tokens.wide_a.data(), tokens.wide_b.data(), mask, 0.3, kl};
      if (kl == Kl::kK3) narrow.rewards = tokens.b.data(), wide.rewards = tokens.wide_b.data();
      std::vector<double> truth(tokens.a.size()), sums(lengths.size()), live(lengths.size());
      token_rewards_cpu(wide, count, truth.data());
      sequence_rewards_cpu(wide, tokens.segments(), sums.data());
      live_tokens_cpu(tokens.segments(), mask, live.data());
      cuda_shim::for_each_order(
          [&] {
            std::vector<float> out(truth.size(), NAN);
            std::vector<double> out_sums(sums.size(), NAN), out_live(sums.size(), NAN);
            cuda::token_rewards(narrow, count, out.data(), nullptr);
            cuda::sequence_rewards(narrow, tokens.segments(), count, out_sums.data(), nullptr);
            cuda::live_tokens(tokens.segments(), mask, count, out_live.data(), nullptr);
            for (size_t t = 0; t < out.size(); ++t) ASSERT_NEAR(out[t], truth[t], 1e-6 * (1 + std::fabs(truth[t])));
            for (size_t s = 0; s < sums.size(); ++s) {
              ASSERT_NEAR(out_sums[s], sums[s], 1e-9 * (10 + std::fabs(sums[s])) * (1 + live[s]));
            }
            EXPECT_TRUE(same_bits(out_live, live));
          },
          1);
    }
  }
}

// Exact sums: whoever adds them up, the parts give the same bits.
TEST(MomentKernels, GiveTheBitsOfTheCpu) {
  const bool is_plain = cuda_shim::variant() == cuda_shim::Variant::kPlain;
  for (const int64_t count : is_plain ? std::vector<int64_t>{0, 1, 255, 1000} : std::vector<int64_t>{700}) {
    const Tokens tokens({count});
    const bool* mask = tokens.loss_mask(count != 255);
    const MomentArgs<float> args{count, tokens.a.data(), mask};
    const auto whole = [](const std::vector<Range>& parts) {
      Range all{0, INFINITY, -INFINITY};
      for (const Range& p : parts) {
        all = {all.count + p.count, std::fmin(all.min, p.min), std::fmax(all.max, p.max)};
      }
      return all;
    };
    const auto total = [](const std::vector<ExactSum>& parts) {
      ExactSum sum;
      for (const ExactSum& p : parts) sum = merge(sum, p);
      return sum.value();
    };
    std::vector<Range> ranges(kParts);
    std::vector<ExactSum> sums(kParts), squares(kParts);
    std::vector<float> normal(tokens.a.size());
    ranges_cpu(args, ranges.data());
    const Range range = whole(ranges);
    sums_cpu(args, &range, nullptr, sums.data());
    const double mean = range.count > 0 ? total(sums) / range.count : 0, scale = 0.5;
    sums_cpu(args, &range, &mean, squares.data());
    normalize_cpu(args, &mean, &scale, normal.data());
    cuda_shim::for_each_order(
        [&] {
          std::vector<Range> out_ranges(kParts);
          std::vector<ExactSum> out_sums(kParts), out_squares(kParts);
          std::vector<float> out(tokens.a.size(), NAN);
          cuda::ranges(args, out_ranges.data(), nullptr);
          const Range out_range = whole(out_ranges);
          ASSERT_EQ(out_range.count, range.count);
          ASSERT_EQ(out_range.min, range.min);
          ASSERT_EQ(out_range.max, range.max);
          cuda::sums(args, &range, nullptr, out_sums.data(), nullptr);
          cuda::sums(args, &range, &mean, out_squares.data(), nullptr);
          cuda::normalize(args, &mean, &scale, out.data(), nullptr);
          ASSERT_EQ(total(out_sums), total(sums));
          ASSERT_EQ(total(out_squares), total(squares));
          EXPECT_TRUE(same_bits(out, normal));
        },
        1);
  }
}

}  // namespace
}  // namespace areal
