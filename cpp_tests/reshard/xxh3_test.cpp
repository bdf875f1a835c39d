#include "reshard/xxh3.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "base/isa.h"

namespace areal::reshard {
namespace {

struct KnownHash {
  size_t bytes;
  uint64_t hash;
};

// From the reference implementation (xxHash 0.8.1, XXH3_64bits) over test_bytes().
constexpr KnownHash kKnown[] = {
    {0, 0x2d06800538d394c2},    {1, 0x429e81bc6744101c},    {2, 0xa65771cbfd464c2d},     {3, 0x32dbb5c7774cc94f},
    {4, 0x65775238ca34c06f},    {7, 0x39027a52dcba383e},    {8, 0x90b760c9d253d0ff},     {9, 0x15ae9f843bb50ea4},
    {16, 0x372c92fa68129c98},   {17, 0xb5d6b9c1898bd9d6},   {32, 0x0ab1dbf9e9f8c22c},    {33, 0x4f4ae280e8465c3c},
    {64, 0x84fcac4cce9f990d},   {65, 0x2c9f18dff914a8bd},   {96, 0xe1e1ba1b4e47ded7},    {97, 0x5cc877781800cb6b},
    {128, 0xc59e505a97d029e0},  {129, 0xf9e651a476d6d3ca},  {192, 0xadf94aa2ceb17135},   {240, 0x967597e635f3c527},
    {241, 0xd6afac6f8fa85b01},  {255, 0x22062a421972fdde},  {256, 0x9e6593bab96413da},   {512, 0x426b67e0356d303d},
    {1023, 0x120a0457e3e899f6}, {1024, 0xbb9f0c3761cdfd54}, {1025, 0x95edccc1adc4d895},  {1088, 0xe8391a3978cbcf06},
    {2048, 0x278f7a6a39416b51}, {4097, 0xa0336bc14e166395}, {100003, 0x48ace114702c07a4}};

std::vector<uint8_t> test_bytes(size_t count) {
  std::vector<uint8_t> bytes(count);
  uint32_t state = 1;
  for (uint8_t& byte : bytes) {
    state = state * 1664525u + 1013904223u;
    byte = static_cast<uint8_t>(state >> 24);
  }
  return bytes;
}

class Xxh3 : public testing::TestWithParam<Isa> {
 protected:
  void SetUp() override {
    if (GetParam() > best_isa()) GTEST_SKIP() << "this machine lacks " << isa_name(GetParam());
    set_active_isa(GetParam());
  }
  void TearDown() override { set_active_isa(best_isa()); }
};

TEST_P(Xxh3, EqualsTheReferenceImplementation) {
  const std::vector<uint8_t> bytes = test_bytes(100003);
  for (const KnownHash& known : kKnown) EXPECT_EQ(xxh3_64(bytes.data(), known.bytes), known.hash) << known.bytes;
}

TEST_P(Xxh3, CopiesAndHashesAtOnceWithEitherKindOfStores) {
  const std::vector<uint8_t> bytes = test_bytes(5000);
  std::vector<uint8_t> memory(5200);
  uint8_t* aligned = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
  for (const Stores stores : {Stores::kCached, Stores::kNonTemporal}) {
    for (const size_t target_offset : {size_t{0}, size_t{1}}) {
      for (size_t n = 0; n + 7 <= bytes.size(); n += n < 1200 ? 1 : 61) {
        uint8_t* target = aligned + target_offset;
        std::memset(target, 0xab, n + 1);
        EXPECT_EQ(copy_with_xxh3(target, bytes.data() + 7, n, stores), xxh3_64(bytes.data() + 7, n)) << n;
        ASSERT_TRUE(n == 0 || std::memcmp(target, bytes.data() + 7, n) == 0) << n;
        ASSERT_EQ(target[n], 0xab) << "wrote past the end at " << n;
      }
    }
  }
}

TEST_P(Xxh3, SeesEveryFlippedBit) {
  for (const size_t n : {1u, 5u, 16u, 100u, 200u, 241u, 1300u}) {
    std::vector<uint8_t> bytes = test_bytes(n);
    const uint64_t hash = xxh3_64(bytes.data(), n);
    for (size_t bit = 0; bit < 8 * n; ++bit) {
      bytes[bit / 8] ^= uint8_t(1u << bit % 8);
      EXPECT_NE(xxh3_64(bytes.data(), n), hash) << n << " bytes, bit " << bit;
      bytes[bit / 8] ^= uint8_t(1u << bit % 8);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(EveryIsa, Xxh3, testing::Values(Isa::kBaseline, Isa::kAvx2, Isa::kAvx512),
                         [](const auto& info) { return isa_name(info.param); });

}  // namespace
}  // namespace areal::reshard
