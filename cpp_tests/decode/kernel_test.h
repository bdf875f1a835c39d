// Runs each test under every instruction set of this machine.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "base/isa.h"
#include "decode/buffer.h"
#include "decode/kernels.h"

namespace areal::decode {

class KernelTest : public testing::TestWithParam<Isa> {
 protected:
  void SetUp() override {
    if (GetParam() > best_isa()) GTEST_SKIP() << "this machine has no " << isa_name(GetParam());
    set_active_isa(GetParam());
    kernels_ = &active_kernels();
  }
  void TearDown() override { set_active_isa(best_isa()); }

  const Kernels& kernels() const { return *kernels_; }
  std::vector<float> random(int64_t size, float scale = 1.0f) {
    std::normal_distribution<float> normal(0.0f, scale);
    std::vector<float> values(static_cast<size_t>(size));
    for (float& value : values) value = normal(generator_);
    return values;
  }

 private:
  const Kernels* kernels_ = nullptr;
  std::mt19937 generator_{7};
};

#define AREAL_ALL_ISAS(suite)                                                                     \
  INSTANTIATE_TEST_SUITE_P(Isa, suite, testing::Values(Isa::kBaseline, Isa::kAvx2, Isa::kAvx512), \
                           [](auto& info) { return std::string(isa_name(info.param)); })

// Rows of `size` floats, each padded with zeros to a multiple of kPad.
inline std::vector<float> pad_rows(const std::vector<float>& rows, int64_t size) {
  const int64_t ld = round_up(size, kPad), count = static_cast<int64_t>(rows.size()) / size;
  std::vector<float> padded(static_cast<size_t>(count * ld), 0.0f);
  for (int64_t i = 0; i < count; ++i)
    std::memcpy(padded.data() + i * ld, rows.data() + i * size, static_cast<size_t>(size) * sizeof(float));
  return padded;
}

}  // namespace areal::decode
