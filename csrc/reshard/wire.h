// The 64 bytes before every chunk. Names, shapes and addresses never travel with data: a receiver accepts exactly the
// (epoch, plan, source, chunk, length) that its own plan expects next, and nothing else.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace areal::reshard {

inline constexpr uint32_t kWireMagic = 0x4C525241;  // "ARRL"
inline constexpr uint16_t kWireVersion = 1;

enum class WireType : uint16_t {
  kData = 1,     // a chunk
  kCredit = 2,   // the receiver has used a chunk: its staging may be filled again
  kGrant = 3,    // the receiver expects the chunks of this epoch of this plan; chunk: its first exposed buffer
  kMemory = 4,   // shared memory: a descriptor travels beside the header
  kBuffers = 5,  // where exposed buffers lie in shared memory: a table follows
};

// WireHeader::flags of a chunk that was written straight into the target's buffers: no bytes follow.
inline constexpr uint32_t kDirect = 0xffffffff;

// Little-endian, as laid out here.
struct WireHeader {
  uint32_t magic;
  uint16_t version;
  uint16_t type;
  uint32_t flags;       // of data and credits: which staging buffer of the sender, or kDirect
  uint32_t header_crc;  // CRC-32C of the 64 bytes with this field 0
  uint64_t epoch;
  uint64_t plan_digest;
  uint32_t source;  // rank
  uint32_t target;  // rank
  uint32_t chunk;
  uint32_t sequence;  // counts a connection's headers, from 0; the transport sets it
  uint64_t length;    // bytes that follow
  uint64_t xxh3_64;   // of those bytes
};
static_assert(sizeof(WireHeader) == 64);

// CRC-32C (Castagnoli), as in RFC 3720.
uint32_t crc32c(std::span<const std::byte> bytes);

// Fills magic, version and header_crc.
void seal_header(WireHeader& header);
// Throws CorruptedError saying which field is not what seal_header() wrote.
void check_header(const WireHeader& header);

}  // namespace areal::reshard
