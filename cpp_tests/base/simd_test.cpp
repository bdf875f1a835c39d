// Compiled once per instruction set; a machine without it skips.
#include "base/simd.h"

#include <gtest/gtest.h>

#include <cmath>

#include "base/isa.h"

#define AREAL_STR2(x) #x
#define AREAL_STR(x) AREAL_STR2(x)

namespace areal {
namespace {

using namespace AREAL_ISA;  // NOLINT(google-build-using-namespace): the namespace under test

class Simd : public testing::Test {
 protected:
  void SetUp() override {
    if (std::string(AREAL_STR(AREAL_ISA)) > isa_name(best_isa()) && best_isa() != Isa::kAvx512 &&
        std::string(AREAL_STR(AREAL_ISA)) != "baseline")
      GTEST_SKIP() << "this machine has no " AREAL_STR(AREAL_ISA);
  }
};

TEST_F(Simd, ExpIsWithinTwoUlpOverEveryBinade) {
  double worst = 0;
  for (uint32_t bits = 0; bits < 0x42ae0000u; bits += 251) {
    for (const uint32_t sign : {0u, 1u << 31}) {
      const float x = std::bit_cast<float>(bits | sign);
      const double truth = std::exp(static_cast<double>(x));
      const double ulp = std::ldexp(1.0, std::max(std::ilogb(static_cast<float>(truth)), -126) - 23);
      const double error = std::fabs(static_cast<double>(AREAL_ISA::exp(splat(x))[kLanes - 1]) - truth) / ulp;
      if (!(error <= worst)) worst = error;
    }
  }
  EXPECT_LE(worst, 2.0);
}

TEST_F(Simd, ExpOfSpecialValues) {
  EXPECT_EQ(AREAL_ISA::exp(splat(0.0f))[0], 1.0f);
  EXPECT_EQ(AREAL_ISA::exp(splat(-kInf))[0], 0.0f);
  EXPECT_EQ(AREAL_ISA::exp(splat(-1e30f))[0], 0.0f);
  EXPECT_TRUE(std::isnan(AREAL_ISA::exp(splat(NAN))[0]));
}

TEST_F(Simd, Exp2OfAProductIsWithinTwoUlp) {
  double worst = 0;
  for (const float scale : {1.0f, 1.4426950f, 0.37f}) {
    for (int i = -125000; i <= 127000; ++i) {
      const float x = static_cast<float>(i) * 0.99997f / 1000.0f / scale;
      const double truth = std::exp2(static_cast<double>(x) * static_cast<double>(scale));
      const double ulp = std::ldexp(1.0, std::ilogb(static_cast<float>(truth)) - 23);
      const float value = exp2_of_product(splat(x), splat(scale))[kLanes - 1];
      // Where there is no fused multiply-add the product is rounded.
      const double rounding = kLanes == 4 ? std::fabs(static_cast<double>(x * scale)) * 0x1p-24 / ulp * truth : 0;
      const double error = std::fabs(static_cast<double>(value) - truth) / ulp - rounding;
      if (!(error <= worst)) worst = error;
    }
  }
  EXPECT_LE(worst, 2.0);
  for (int i = -125; i <= 127; ++i)
    EXPECT_EQ(exp2_of_product(splat(1.0f), splat(static_cast<float>(i)))[0], std::ldexp(1.0f, i));
}

template <class T>
void expect_pairs_round_trip() {
  for (uint32_t start = 0; start < 65536; start += 2 * kLanes) {
    T in[2 * kLanes], out[2 * kLanes], without_nan[2 * kLanes];
    float values[2 * kLanes];
    for (int i = 0; i < 2 * kLanes; ++i) {
      values[i] = to_float(BFloat16{static_cast<uint16_t>(start + static_cast<uint32_t>(i))}) * 1.0039f;
      from_float(values[i], in + i);
    }
    VecF a, b, x, y;
    load_pair(in, a, b);
    store_pair(out, a, b);
    store_pair_without_nan(without_nan, a, b);
    // The values before they were rounded, put in the pair's order by reading ones that name their place.
    float place[2 * kLanes];
    T index[2 * kLanes];
    for (int i = 0; i < 2 * kLanes; ++i) from_float(static_cast<float>(i), index + i);
    load_pair(index, x, y);
    store(place, x);
    store(place + kLanes, y);
    float ordered[2 * kLanes];
    for (int i = 0; i < 2 * kLanes; ++i) ordered[i] = values[static_cast<int>(place[i])];
    T rounded[2 * kLanes];
    store_pair(rounded, load(ordered), load(ordered + kLanes));
    for (int i = 0; i < 2 * kLanes; ++i) {
      if (std::isnan(values[i])) {
        ASSERT_TRUE(std::isnan(to_float(out[i])) && std::isnan(to_float(rounded[i]))) << values[i];
      } else {
        ASSERT_EQ(to_float(out[i]), to_float(in[i])) << values[i];
        ASSERT_EQ(to_float(without_nan[i]), to_float(in[i])) << values[i];
        ASSERT_EQ(to_float(rounded[i]), to_float(in[i])) << values[i];
      }
    }
  }
}

TEST_F(Simd, PairsKeepEveryElementInItsPlace) {
  expect_pairs_round_trip<float>();
  expect_pairs_round_trip<BFloat16>();
  expect_pairs_round_trip<Float16>();
}

template <class Half>
void expect_round_trip() {
  for (uint32_t bits = 0; bits < 65536; bits += kLanes) {
    Half in[kLanes], out[kLanes];
    for (int i = 0; i < kLanes; ++i) in[i].bits = static_cast<uint16_t>(bits + static_cast<uint32_t>(i));
    const VecF wide = load(in);
    store(out, wide);
    for (int i = 0; i < kLanes; ++i) {
      const float x = to_float(in[i]);
      Half scalar;
      from_float(x, &scalar);
      if (std::isnan(x)) {
        ASSERT_TRUE(std::isnan(wide[i]) && std::isnan(to_float(out[i])) && std::isnan(to_float(scalar))) << in[i].bits;
      } else {
        ASSERT_EQ(std::bit_cast<uint32_t>(x), std::bit_cast<uint32_t>(static_cast<float>(wide[i]))) << in[i].bits;
        ASSERT_EQ(out[i].bits, in[i].bits);
        ASSERT_EQ(scalar.bits, in[i].bits);
      }
    }
  }
}

TEST_F(Simd, BFloat16RoundTripsEveryValue) { expect_round_trip<BFloat16>(); }
TEST_F(Simd, Float16RoundTripsEveryValue) { expect_round_trip<Float16>(); }

TEST_F(Simd, NarrowingRoundsToNearestEvenInVectorAndScalar) {
  for (uint32_t bits = 0x33000000u; bits < 0x47900000u; bits += 40009) {
    const float x = std::bit_cast<float>(bits);
    Float16 vector16[kLanes], scalar16;
    BFloat16 vector_b[kLanes], scalar_b;
    store(vector16, splat(x));
    store(vector_b, splat(x));
    from_float(x, &scalar16);
    from_float(x, &scalar_b);
    ASSERT_EQ(vector16[0].bits, scalar16.bits) << x;
    ASSERT_EQ(vector_b[0].bits, scalar_b.bits) << x;
    ASSERT_LE(std::fabs(to_float(scalar_b) - x), std::ldexp(1.0f, std::ilogb(x) - 8)) << x;
  }
}

TEST_F(Simd, Reductions) {
  VecF v;
  float sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += (v[i] = static_cast<float>((i * 7) % kLanes));
  EXPECT_EQ(reduce_add(v), sum);
  EXPECT_EQ(reduce_max(v), static_cast<float>(kLanes - 1));
}

}  // namespace
}  // namespace areal
