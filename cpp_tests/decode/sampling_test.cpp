#include "decode/sampling.h"

#include <cmath>
#include <limits>

#include "decode/philox.h"
#include "kernel_test.h"

namespace areal::decode {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

TEST(PhiloxTest, KnownAnswers) {  // of the authors' Random123 library
  using Words = std::array<uint32_t, 4>;
  EXPECT_EQ(philox4x32({0, 0, 0, 0}, {0, 0}), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox4x32({~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}), (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(PhiloxTest, UniformIsBelowOneAndEven) {
  double sum = 0.0;
  for (uint32_t i = 0; i < 10000; ++i) {
    const double u = philox_uniform(3, 9, 1, i);
    ASSERT_TRUE(u >= 0.0 && u < 1.0);
    sum += u;
  }
  EXPECT_NEAR(sum / 10000, 0.5, 0.015);
}

class SamplingTest : public KernelTest {};

TEST_P(SamplingTest, SoftmaxTermsOfEverySize) {
  for (int64_t size = 1; size <= 600; size = size < 80 ? size + 1 : size * 3 / 2) {
    const std::vector<float> logits = random(size, 4.0f);
    std::vector<float> terms(static_cast<size_t>(size));
    const auto [max, total] = kernels().softmax_terms(logits.data(), size, 0.7f, terms.data());
    double sum = 0.0;
    const float top = *std::max_element(logits.begin(), logits.end());
    EXPECT_EQ(max, top);
    for (int64_t j = 0; j < size; ++j) {
      const size_t at = static_cast<size_t>(j);
      const double term = std::exp(static_cast<double>(logits[at] - top) * static_cast<double>(0.7f));
      EXPECT_NEAR(terms[at], term, 1e-6 * term + 1e-38);
      sum += term;
    }
    EXPECT_NEAR(total, sum, 1e-6 * sum);
  }
}

TEST_P(SamplingTest, SoftmaxTermsOfSpecialValues) {
  for (const int64_t size : {1, 5, 16, 50}) {
    for (int64_t at = 0; at < size; ++at) {
      std::vector<float> logits = random(size), terms(static_cast<size_t>(size));
      const auto total = [&] { return kernels().softmax_terms(logits.data(), size, 1.0f, terms.data()).total; };
      logits[static_cast<size_t>(at)] = -kInfinity;
      EXPECT_EQ(std::isfinite(total()), size > 1);
      logits[static_cast<size_t>(at)] = kInfinity;
      EXPECT_FALSE(std::isfinite(total()));
      logits[static_cast<size_t>(at)] = NAN;
      EXPECT_FALSE(std::isfinite(total()));
    }
  }
}

TEST_P(SamplingTest, FindCumulativeInvertsTheSum) {
  for (int64_t size = 1; size <= 900; size = size < 70 ? size + 1 : size * 2) {
    std::vector<float> terms(static_cast<size_t>(size));
    for (size_t j = 0; j < terms.size(); ++j) terms[j] = j % 3 == 1 ? 0.0f : 1.0f + static_cast<float>(j % 5);
    double before = 0.0;
    for (int64_t j = 0; j < size; ++j) {
      const double term = terms[static_cast<size_t>(j)];
      if (term == 0.0) continue;
      EXPECT_EQ(kernels().find_cumulative(terms.data(), size, before), j);
      EXPECT_EQ(kernels().find_cumulative(terms.data(), size, before + 0.99 * term), j);
      before += term;
    }
    const int64_t last = (size - 1) % 3 == 1 ? size - 2 : size - 1;
    EXPECT_EQ(kernels().find_cumulative(terms.data(), size, before * 1.01), last);
  }
}

TEST_P(SamplingTest, TruncationKeepsTheLikeliestAndRenormalises) {
  // Probabilities 1/2, 1/4, 1/8, 1/16, 1/16, out of order.
  const float ln2 = std::log(2.0f);
  const std::vector<float> logits = {-4 * ln2, -1 * ln2, -3 * ln2, -2 * ln2, -4 * ln2};
  Sampler sampler(kernels(), 5);
  struct Case {
    double top_p;
    int64_t top_k;
    std::vector<int32_t> kept;
    double sum;
  };
  const std::vector<Case> cases = {{1.0, 2, {1, 3}, 0.75},         {0.5, 0, {1}, 0.5},     {0.51, 0, {1, 3}, 0.75},
                                   {0.9, 0, {1, 3, 2, 0}, 0.9375}, {0.8, 3, {1, 3}, 0.75}, {0.9, 3, {1, 3, 2}, 0.875},
                                   {1.0, 4, {1, 3, 2, 0}, 0.9375}, {1e-9, 0, {1}, 0.5}};
  for (const Case& c : cases) {
    SamplingParams sampling;
    sampling.max_new_tokens = 1;
    sampling.top_p = c.top_p;
    sampling.top_k = c.top_k;
    double before = 0.0;
    for (const int32_t id : c.kept) {
      const double p = std::exp(static_cast<double>(logits[static_cast<size_t>(id)])) / c.sum;
      for (const double inside : {0.01, 0.99}) {
        DrawnToken token;
        ASSERT_TRUE(sampler.draw(logits.data(), sampling, before + inside * p, &token));
        EXPECT_EQ(token.id, id);
        EXPECT_NEAR(token.logprob, std::log(p), 1e-6);
      }
      before += p;
    }
    EXPECT_NEAR(before, 1.0, 1e-6);
  }
}

AREAL_ALL_ISAS(SamplingTest);

}  // namespace
}  // namespace areal::decode
