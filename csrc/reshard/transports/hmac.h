// HMAC-SHA256, with which peers show that they know the run's token.
// Source: FIPS 180-4 (SHA-256), RFC 2104 (HMAC).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace areal::reshard {

using Digest = std::array<std::byte, 32>;

Digest sha256(std::span<const std::byte> bytes);
Digest hmac_sha256(std::span<const std::byte> key, std::span<const std::byte> bytes);
// In a time that does not depend on where they differ.
bool equal_digests(const Digest& a, const Digest& b);

}  // namespace areal::reshard
