#include "reshard/wire.h"

#include <array>
#include <bit>
#include <cstring>

#include "reshard/errors.h"

static_assert(std::endian::native == std::endian::little, "headers travel in native order");

namespace areal::reshard {
namespace {

// CRC-32C (Castagnoli, reflected), a byte at a time: 64 bytes per chunk need no more.
constexpr std::array<uint32_t, 256> kCrcTable = [] {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0x82F63B78u : 0);
    table[i] = crc;
  }
  return table;
}();

uint32_t crc_of(WireHeader header) {
  header.header_crc = 0;
  return crc32c(std::as_bytes(std::span(&header, 1)));
}

template <class T>
void check_field(const char* name, T value, T expected) {
  if (value == expected) return;
  throw CorruptedError(
      format_message("WireHeader: expected ", name, " = ", uint64_t{expected}, ", got ", uint64_t{value}));
}

}  // namespace

uint32_t crc32c(std::span<const std::byte> bytes) {
  uint32_t crc = ~0u;
  for (const std::byte byte : bytes) crc = kCrcTable[(crc ^ static_cast<uint8_t>(byte)) & 0xff] ^ crc >> 8;
  return ~crc;
}

void seal_header(WireHeader& header) {
  header.magic = kWireMagic;
  header.version = kWireVersion;
  header.header_crc = crc_of(header);
}

void check_header(const WireHeader& header) {
  check_field("magic", header.magic, kWireMagic);
  check_field("version", header.version, kWireVersion);
  check_field("header_crc", header.header_crc, crc_of(header));
}

}  // namespace areal::reshard
