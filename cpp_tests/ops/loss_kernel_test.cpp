// The policy loss kernels against the fp64 CPU version.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "cuda_shim/orders.h"
#include "ops/loss/loss.h"

namespace areal {
namespace {

using loss::PolicyLossArgs;
using loss::PolicyLossParams;

constexpr double kInf = std::numeric_limits<double>::infinity();

PolicyLossParams default_params() {
  PolicyLossParams params;
  params.ratio_high = 1.28;
  params.dual_clip = 1.5;
  params.behavior_cap = 1.2;
  params.kl_coef = 0.1;
  params.entropy_coef = 0.01;
  params.distill_coef = 0.2;
  return params;
}

// Inputs of a call and room for its outputs.
template <class Real>
struct Call {
  PolicyLossParams params = default_params();
  std::vector<Real> inputs[7];  // in the order of PolicyLossArgs
  std::vector<unsigned char> mask, keep;
  std::vector<int64_t> versions, cu_seqlens;
  int64_t current_version = 9;
  std::vector<double> normalizer{37.0};
  std::vector<Real> grad, grad_entropy, scalars{0, 0};
  std::vector<double> stats, scratch;
  std::vector<loss::SequenceValues> sequence_scratch;
  bool has_optional = true;

  explicit Call(int64_t tokens)
      : mask(static_cast<size_t>(tokens)), keep(mask.size()), versions(mask.size()), cu_seqlens{0, 0} {
    std::mt19937 random(static_cast<unsigned>(tokens));
    std::normal_distribution<double> normal;
    for (auto& input : inputs) input.resize(mask.size());
    for (size_t t = 0; t < mask.size(); ++t) {
      const double proximal = -0.5 - std::fabs(normal(random));
      const double values[7] = {proximal + 0.3 * normal(random),
                                proximal,
                                normal(random),
                                proximal + 0.3 * normal(random),
                                proximal + 0.3 * normal(random),
                                std::fabs(normal(random)),
                                proximal + 0.3 * normal(random)};
      // Rounded to float for both precisions, so that they compute the same function of the same numbers.
      for (int i = 0; i < 7; ++i) inputs[i][t] = static_cast<Real>(static_cast<float>(values[i]));
      mask[t] = random() % 4 != 0;
      keep[t] = random() % 8 != 0;
      versions[t] = static_cast<int64_t>(random() % 10) - 1;
    }
    // Sequences of mixed lengths, some of them empty, some longer than a block of threads.
    while (cu_seqlens.back() < tokens) {
      const int64_t length = std::vector<int64_t>{1, 0, 5, 300, 33, 1500}[random() % 6];
      cu_seqlens.push_back(std::min(tokens, cu_seqlens.back() + length));
    }
  }

  PolicyLossArgs<Real> args() {
    const int64_t tokens = static_cast<int64_t>(mask.size());
    grad.assign(mask.size(), Real(NAN));
    grad_entropy.assign(mask.size(), Real(NAN));
    stats.assign(loss::kStatCount, NAN);
    scratch.assign(static_cast<size_t>(loss::kStatCount * loss::block_count(tokens)), NAN);
    sequence_scratch.assign(cu_seqlens.size() - 1, {NAN, NAN, NAN, NAN});
    PolicyLossArgs<Real> a = {};
    a.params = params;
    a.tokens = tokens;
    a.logprobs = inputs[0].data();
    a.proximal_logprobs = inputs[1].data();
    a.advantages = inputs[2].data();
    a.loss_mask = reinterpret_cast<const bool*>(mask.data());
    if (has_optional) {
      a.behavior_logprobs = inputs[3].data();
      a.ref_logprobs = inputs[4].data();
      a.entropy = inputs[5].data();
      a.teacher_logprobs = inputs[6].data();
      a.keep_mask = reinterpret_cast<const bool*>(keep.data());
      a.versions = versions.data();
      a.current_version = &current_version;
      a.normalizer = normalizer.data();
      a.grad_entropy = grad_entropy.data();
    }
    if (has_optional || loss::needs_sequences(params)) {
      a.cu_seqlens = cu_seqlens.data();
      a.sequences = static_cast<int64_t>(cu_seqlens.size()) - 1;
      a.sequence_scratch = sequence_scratch.data();
    }
    a.loss = &scalars[0];
    a.stats = stats.data();
    a.grad_logprobs = grad.data();
    a.scale = &scalars[1];
    a.scratch = scratch.data();
    return a;
  }
};

template <class Real>
void expect_close(const Call<Real>& call, const Call<double>& truth, double tolerance) {
  const double tokens = 1.0 + static_cast<double>(call.mask.size());
  for (size_t i = 0; i < 2; ++i)
    EXPECT_NEAR(call.scalars[i], truth.scalars[i], tolerance * (1 + truth.scalars[1] * tokens));
  for (size_t t = 0; t < call.mask.size(); ++t) {
    const double bound = tolerance * std::max(4.0, 4 * std::fabs(static_cast<double>(truth.grad[t])));
    ASSERT_NEAR(call.grad[t], truth.grad[t], bound) << t;
    if (call.has_optional) {
      ASSERT_NEAR(call.grad_entropy[t], truth.grad_entropy[t], tolerance) << t;
    }
  }
  for (int i = 0; i < loss::kStatCount; ++i) {
    EXPECT_NEAR(call.stats[i], truth.stats[i], tolerance * std::max(tokens, std::fabs(truth.stats[i]))) << i;
  }
}

template <class Real>
void check_kernel(Call<Real> call, Call<double> truth) {
  loss::policy_loss_cpu(truth.args());
  std::vector<double> first;
  cuda_shim::for_each_order([&] {
    cuda::policy_loss(call.args(), nullptr);
    expect_close(call, truth, sizeof(Real) == 8 ? 1e-13 : 1e-6);
    if (first.empty()) first = call.stats;
    EXPECT_EQ(0, std::memcmp(first.data(), call.stats.data(), first.size() * sizeof(double))) << "depends on the order";
  });
}

std::vector<int64_t> sizes() {
  if (cuda_shim::variant() == cuda_shim::Variant::kPlain) return {0, 1, 31, 33, 255, 1023, 2047, 2048, 2049, 7001};
  return {0, 1, 33, 2049};
}

TEST(PolicyLossKernel, MatchesTheCpu) {
  for (const int64_t tokens : sizes()) {
    SCOPED_TRACE(tokens);
    check_kernel(Call<float>(tokens), Call<double>(tokens));
    check_kernel(Call<double>(tokens), Call<double>(tokens));
  }
}

void check_params(const PolicyLossParams& params) {
  const int64_t tokens = cuda_shim::variant() == cuda_shim::Variant::kPlain ? 2777 : 500;
  for (const bool has_optional : {true, false}) {
    Call<float> call(tokens);
    Call<double> truth(tokens);
    call.params = truth.params = params;
    call.has_optional = truth.has_optional = has_optional;
    check_kernel(call, truth);
  }
}

TEST(PolicyLossKernel, MatchesTheCpuForEveryObjectiveAndRatio) {
  for (int objective = 0; objective < loss::kObjectiveCount; ++objective) {
    for (int level = 0; level < loss::kRatioLevelCount; ++level) {
      SCOPED_TRACE(::testing::Message() << "objective " << objective << " level " << level);
      PolicyLossParams params = default_params();
      params.objective = static_cast<loss::Objective>(objective);
      params.ratio_level = static_cast<loss::RatioLevel>(level);
      if (params.ratio_level == loss::RatioLevel::kOff && params.objective != loss::Objective::kReinforce) continue;
      params.aggregation = static_cast<loss::Aggregation>(level);
      check_params(params);
    }
  }
}

TEST(PolicyLossKernel, MatchesTheCpuForEveryEstimatorAndWeight) {
  for (int estimator = 0; estimator < loss::kKlEstimatorCount; ++estimator) {
    for (const auto mode : {loss::BehaviorMode::kTruncate, loss::BehaviorMode::kMask}) {
      PolicyLossParams params;
      params.kl_estimator = static_cast<loss::KlEstimator>(estimator);
      params.kl_coef = 0.2;
      params.behavior_mode = mode;
      params.behavior_low = mode == loss::BehaviorMode::kMask ? 0.9 : 0.0;
      params.behavior_cap = 1.1;
      params.behavior_level = static_cast<loss::BehaviorLevel>(estimator % loss::kBehaviorLevelCount);
      params.aggregation = static_cast<loss::Aggregation>(estimator);
      check_params(params);
    }
  }
}

TEST(PolicyLossKernel, MatchesTheCpuWithoutOptionalInputs) {
  Call<float> call(2500);
  Call<double> truth(2500);
  call.has_optional = truth.has_optional = false;
  check_kernel(call, truth);
}

TEST(PolicyLossKernel, NeverLooksAtMaskedTokens) {
  Call<float> clean(2100), dirty(2100);
  for (size_t t = 0; t < clean.mask.size(); ++t) {
    if (clean.mask[t]) continue;
    const float junk[3] = {NAN, INFINITY, -INFINITY};
    for (auto& input : dirty.inputs) input[t] = junk[t % 3];
  }
  cuda::policy_loss(clean.args(), nullptr);
  cuda::policy_loss(dirty.args(), nullptr);
  EXPECT_EQ(clean.scalars, dirty.scalars);
  EXPECT_EQ(clean.grad, dirty.grad);
  EXPECT_EQ(clean.stats, dirty.stats);
}

TEST(PolicyLossKernel, GivesZeroWithoutLiveTokens) {
  for (const int64_t tokens : {0, 5, 2500}) {
    Call<float> call(tokens);
    call.mask.assign(call.mask.size(), 0);
    for (const double normalizer : {0.0, 37.0}) {
      call.normalizer[0] = normalizer;
      cuda::policy_loss(call.args(), nullptr);
      EXPECT_EQ(call.scalars, std::vector<float>(2, 0.0f));
      EXPECT_EQ(call.grad, std::vector<float>(call.mask.size(), 0.0f));
      for (const double stat : call.stats) EXPECT_TRUE(std::isfinite(stat));
    }
  }
}

// On a GPU nobody has checked cu_seqlens: the sequences are cut to the tokens there are.
TEST(PolicyLossKernel, StaysInsideTheTokensWhateverCuSeqlensSays) {
  constexpr int64_t kTokens = 2100, kFar = int64_t{1} << 40;
  const std::vector<std::vector<int64_t>> layouts = {{0}, {0, 40, kTokens + 7}, {0, 2000, kFar}, {-5, 40, kTokens}};
  for (const auto& wrong : layouts) {
    Call<float> call(kTokens), cut(kTokens);
    call.params.ratio_level = cut.params.ratio_level = loss::RatioLevel::kSequence;
    call.cu_seqlens = wrong;
    cut.cu_seqlens.clear();
    for (const int64_t token : wrong) cut.cu_seqlens.push_back(std::clamp<int64_t>(token, 0, kTokens));
    cuda::policy_loss(call.args(), nullptr);
    cuda::policy_loss(cut.args(), nullptr);
    EXPECT_EQ(call.scalars, cut.scalars);
    EXPECT_EQ(call.grad, cut.grad);
    for (const float gradient : call.grad) ASSERT_TRUE(std::isfinite(gradient));
  }
}

TEST(PolicyLossKernel, NaNAtALiveTokenShows) {
  Call<float> call(100);
  call.mask.assign(call.mask.size(), 1);
  call.inputs[0][70] = NAN;
  cuda::policy_loss(call.args(), nullptr);
  EXPECT_TRUE(std::isnan(call.scalars[0]));
  for (size_t t = 0; t < call.grad.size(); ++t) EXPECT_EQ(std::isnan(call.grad[t]), t == 70) << t;
}

}  // namespace
}  // namespace areal
