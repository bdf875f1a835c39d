// How an executor hands chunks to a receiver. A transport knows bytes and offsets; neither plans nor tensors.
#pragma once

#include <cstddef>
#include <cstdint>

namespace areal::reshard {

// The sending side. Several threads may call it, each for chunks of its own.
class Transport {
 public:
  Transport() = default;
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;
  virtual ~Transport() = default;

  virtual const char* name() const = 0;

  // Where to pack the `bytes` bytes that belong at `target_offset_bytes` of the receiver's arena: the arena itself when
  // it is in reach, a staging buffer otherwise. May wait for a credit. Valid until post() of the same chunk.
  virtual std::byte* stage(int64_t target_offset_bytes, int64_t bytes) = 0;

  // The chunk is packed. On return the caller may reuse its sources.
  virtual void post(int64_t target_offset_bytes, int64_t bytes) = 0;
};

}  // namespace areal::reshard
