// The value loss kernels against the fp64 CPU version.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "cuda_shim/orders.h"
#include "ops/loss/value_loss.h"

namespace areal {
namespace {

using loss::ValueLossArgs;

constexpr double kInf = std::numeric_limits<double>::infinity();

template <class Real>
struct Call {
  double clip = 0.2, huber_delta = kInf;
  std::vector<Real> values, old_values, returns, grad, scalars{0, 0};
  std::vector<unsigned char> mask;
  std::vector<double> normalizer{37.0}, stats, scratch;
  bool has_optional = true;

  explicit Call(int64_t tokens) {
    std::mt19937 random(static_cast<unsigned>(tokens));
    std::normal_distribution<float> normal;
    for (int64_t t = 0; t < tokens; ++t) {
      const float old = normal(random);
      old_values.push_back(static_cast<Real>(old));
      values.push_back(static_cast<Real>(old + 0.4f * normal(random)));
      returns.push_back(static_cast<Real>(normal(random)));
      mask.push_back(random() % 4 != 0);
    }
  }

  ValueLossArgs<Real> args() {
    const int64_t tokens = static_cast<int64_t>(mask.size());
    grad.assign(mask.size(), Real(NAN));
    stats.assign(loss::kValueStatCount, NAN);
    scratch.assign(static_cast<size_t>(loss::kValueStatCount * loss::value_block_count(tokens)), NAN);
    return {tokens,
            has_optional ? clip : kInf,
            huber_delta,
            values.data(),
            has_optional ? old_values.data() : nullptr,
            returns.data(),
            reinterpret_cast<const bool*>(mask.data()),
            has_optional ? normalizer.data() : nullptr,
            &scalars[0],
            stats.data(),
            grad.data(),
            &scalars[1],
            scratch.data()};
  }
};

template <class Real>
void check(Call<Real> call, Call<double> truth) {
  loss::value_loss_cpu(truth.args());
  const double tolerance = sizeof(Real) == 8 ? 1e-13 : 2e-6;
  std::vector<double> first;
  cuda_shim::for_each_order([&] {
    cuda::value_loss(call.args(), nullptr);
    const double tokens = 1.0 + static_cast<double>(call.mask.size());
    for (size_t i = 0; i < 2; ++i) EXPECT_NEAR(call.scalars[i], truth.scalars[i], tolerance * tokens);
    for (size_t t = 0; t < call.mask.size(); ++t) ASSERT_NEAR(call.grad[t], truth.grad[t], 4 * tolerance) << t;
    for (int i = 0; i < loss::kValueStatCount; ++i) EXPECT_NEAR(call.stats[i], truth.stats[i], tolerance * tokens) << i;
    if (first.empty()) first = call.stats;
    EXPECT_EQ(0, std::memcmp(first.data(), call.stats.data(), first.size() * sizeof(double))) << "depends on the order";
  });
}

TEST(ValueLossKernel, MatchesTheCpu) {
  for (const int64_t tokens : {0, 1, 33, 2047, 2049, 4100}) {
    for (const double huber_delta : {kInf, 0.5}) {
      for (const bool has_optional : {true, false}) {
        SCOPED_TRACE(tokens);
        Call<float> narrow(tokens);
        Call<double> wide(tokens);
        narrow.huber_delta = wide.huber_delta = huber_delta;
        narrow.has_optional = wide.has_optional = has_optional;
        check(narrow, wide);
        check(wide, wide);
      }
    }
  }
}

TEST(ValueLossKernel, NeverLooksAtMaskedTokens) {
  Call<float> clean(2100), dirty(2100);
  for (size_t t = 0; t < clean.mask.size(); ++t) {
    if (!clean.mask[t]) dirty.values[t] = dirty.old_values[t] = dirty.returns[t] = t % 2 ? NAN : INFINITY;
  }
  cuda::value_loss(clean.args(), nullptr);
  cuda::value_loss(dirty.args(), nullptr);
  EXPECT_EQ(clean.scalars, dirty.scalars);
  EXPECT_EQ(clean.grad, dirty.grad);
  EXPECT_EQ(clean.stats, dirty.stats);
}

TEST(ValueLossKernel, GivesZeroWithoutLiveTokensAndShowsNaN) {
  Call<float> call(2500);
  call.mask.assign(call.mask.size(), 0);
  cuda::value_loss(call.args(), nullptr);
  EXPECT_EQ(call.scalars, std::vector<float>(2, 0.0f));
  EXPECT_EQ(call.grad, std::vector<float>(call.mask.size(), 0.0f));
  call.mask.assign(call.mask.size(), 1);
  call.returns[70] = NAN;
  cuda::value_loss(call.args(), nullptr);
  EXPECT_TRUE(std::isnan(call.scalars[0]));
  for (size_t t = 0; t < call.grad.size(); ++t) EXPECT_EQ(std::isnan(call.grad[t]), t == 70) << t;
}

}  // namespace
}  // namespace areal
