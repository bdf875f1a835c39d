#include "reshard/wire.h"

#include <gtest/gtest.h>

#include <cstring>
#include <span>
#include <string_view>

#include "reshard/errors.h"

namespace areal::reshard {
namespace {

WireHeader sealed() {
  WireHeader header{};
  header.type = static_cast<uint16_t>(WireType::kData);
  header.epoch = 0x0123456789abcdef;
  header.plan_digest = 0xfedcba9876543210;
  header.source = 3;
  header.target = 5;
  header.chunk = 7;
  header.sequence = 11;
  header.length = 1 << 20;
  header.xxh3_64 = 0x5555aaaa5555aaaa;
  seal_header(header);
  return header;
}

TEST(Wire, Crc32cEqualsTheStandardsExamples) {
  const std::string_view digits = "123456789";
  EXPECT_EQ(crc32c(std::as_bytes(std::span(digits))), 0xE3069283u);
  const std::array<uint8_t, 32> zeros{};  // RFC 3720, B.4
  EXPECT_EQ(crc32c(std::as_bytes(std::span(zeros))), 0x8A9136AAu);
}

TEST(Wire, ASealedHeaderPasses) { EXPECT_NO_THROW(check_header(sealed())); }

TEST(Wire, LiesAsDocumented) {
  const WireHeader header = sealed();
  const auto bytes = std::as_bytes(std::span(&header, 1));
  EXPECT_EQ(std::memcmp(bytes.data(), "ARRL\x01\x00\x01\x00\x00\x00\x00\x00", 12), 0);
  EXPECT_EQ(static_cast<uint8_t>(bytes[16]), 0xef);  // epoch
  EXPECT_EQ(static_cast<uint8_t>(bytes[24]), 0x10);  // plan_digest
  EXPECT_EQ(static_cast<uint8_t>(bytes[32]), 3);
  EXPECT_EQ(static_cast<uint8_t>(bytes[36]), 5);
  EXPECT_EQ(static_cast<uint8_t>(bytes[40]), 7);
  EXPECT_EQ(static_cast<uint8_t>(bytes[44]), 11);
  EXPECT_EQ(static_cast<uint8_t>(bytes[50]), 0x10);  // length
  EXPECT_EQ(static_cast<uint8_t>(bytes[56]), 0xaa);  // xxh3_64
}

TEST(Wire, EveryFlippedBitAndEveryPairOfThemIsRejected) {
  for (size_t first = 0; first < 512; ++first) {
    for (size_t second = first; second < 512; ++second) {
      WireHeader header = sealed();
      auto* bytes = reinterpret_cast<uint8_t*>(&header);
      bytes[first / 8] ^= static_cast<uint8_t>(1u << first % 8);
      if (second != first) bytes[second / 8] ^= static_cast<uint8_t>(1u << second % 8);
      ASSERT_THROW(check_header(header), CorruptedError) << "bits " << first << " and " << second;
    }
  }
}

TEST(Wire, NamesTheFieldThatIsWrong) {
  WireHeader header = sealed();
  header.version = 9;
  try {
    check_header(header);
    FAIL();
  } catch (const CorruptedError& error) {
    EXPECT_STREQ(error.what(), "WireHeader: expected version = 1, got 9");
  }
}

}  // namespace
}  // namespace areal::reshard
