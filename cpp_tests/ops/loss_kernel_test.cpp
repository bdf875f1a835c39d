// The policy loss kernels against the fp64 CPU version.
#include <gtest/gtest.h>

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

// Inputs of a call and room for its outputs.
template <class Real>
struct Call {
  PolicyLossParams params{0.8, 1.28, 1.5, loss::BehaviorMode::kTruncate, 0.0, 1.2, loss::KlEstimator::kK3, 0.1, 0.01};
  std::vector<Real> inputs[6];  // in the order of PolicyLossArgs
  std::vector<unsigned char> mask;
  std::vector<double> normalizer{37.0};
  std::vector<Real> grad, scalars{0, 0};
  std::vector<double> stats, scratch;
  bool has_optional = true;

  explicit Call(int64_t tokens) : mask(static_cast<size_t>(tokens)) {
    std::mt19937 random(static_cast<unsigned>(tokens));
    std::normal_distribution<double> normal;
    for (auto& input : inputs) input.resize(mask.size());
    for (size_t t = 0; t < mask.size(); ++t) {
      const double proximal = -0.5 - std::fabs(normal(random));
      const double values[6] = {proximal + 0.3 * normal(random),
                                proximal,
                                normal(random),
                                proximal + 0.3 * normal(random),
                                proximal + 0.3 * normal(random),
                                std::fabs(normal(random))};
      // Rounded to float for both precisions, so that they compute the same function of the same numbers.
      for (int i = 0; i < 6; ++i) inputs[i][t] = static_cast<Real>(static_cast<float>(values[i]));
      mask[t] = random() % 4 != 0;
    }
  }

  PolicyLossArgs<Real> args() {
    const int64_t tokens = static_cast<int64_t>(mask.size());
    grad.assign(mask.size(), Real(NAN));
    stats.assign(loss::kStatCount, NAN);
    scratch.assign(static_cast<size_t>(loss::kStatCount * loss::block_count(tokens)), NAN);
    const auto optional = [&](int i) { return has_optional ? inputs[i].data() : nullptr; };
    return {params,           tokens,
            inputs[0].data(), inputs[1].data(),
            inputs[2].data(), reinterpret_cast<const bool*>(mask.data()),
            optional(3),      optional(4),
            optional(5),      has_optional ? normalizer.data() : nullptr,
            &scalars[0],      stats.data(),
            grad.data(),      &scalars[1],
            scratch.data()};
  }
};

template <class Real>
void expect_close(const Call<Real>& call, const Call<double>& truth, double tolerance) {
  const double tokens = 1.0 + static_cast<double>(call.mask.size());
  for (size_t i = 0; i < 2; ++i)
    EXPECT_NEAR(call.scalars[i], truth.scalars[i], tolerance * (1 + truth.scalars[1] * tokens));
  for (size_t t = 0; t < call.mask.size(); ++t) ASSERT_NEAR(call.grad[t], truth.grad[t], 4 * tolerance) << t;
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

TEST(PolicyLossKernel, MatchesTheCpuForEveryParameter) {
  for (const auto estimator : {loss::KlEstimator::kK1, loss::KlEstimator::kK2, loss::KlEstimator::kK3}) {
    for (const auto mode : {loss::BehaviorMode::kTruncate, loss::BehaviorMode::kMask}) {
      Call<float> call(777);
      Call<double> truth(777);
      call.params = truth.params = {0.9, 1.1,       kInf, mode, mode == loss::BehaviorMode::kMask ? 0.9 : 0.0,
                                    1.1, estimator, 0.2,  0.0};
      check_kernel(call, truth);
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
