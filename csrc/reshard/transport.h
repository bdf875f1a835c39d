// How chunks get from one rank to another. A transport knows bytes and ranks; neither plans nor tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "reshard/deadline.h"
#include "reshard/wire.h"

namespace areal::reshard {

struct ReceivedChunk {
  WireHeader header;
  std::span<const std::byte> bytes;  // valid until release()
  int64_t ticket;                    // the transport's own
};

// The endpoint of one rank. Sending and receiving may go on at once in different threads; several threads may send,
// each to peers of its own. Everything that waits takes a deadline, throws DeadlineError naming the peer, and ends with
// CancelledError after cancel(). A peer that is gone is a PeerError naming it.
class Transport {
 public:
  Transport() = default;
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;
  virtual ~Transport() = default;

  virtual const char* name() const = 0;

  // Memory of the peer that this rank may write directly (same process, or mapped shared memory): the first byte of the
  // buffer as the peer has bound it, nullptr where there is no such reach. Then chunks are copied straight from storage
  // to storage and post() carries no bytes, only the header that says so (length 0; xxh3_64 of what was written).
  virtual std::byte* remote_buffer(int32_t peer, int32_t buffer) = 0;

  // A staging buffer to pack a chunk for the peer into. Waits for a credit: at most two chunks per peer are in flight.
  virtual std::span<std::byte> acquire(int32_t peer, int64_t bytes, const Deadline& deadline) = 0;
  // Sends the header (sealed) and header.length bytes of what acquire() gave.
  virtual void post(int32_t peer, const WireHeader& header, const Deadline& deadline) = 0;

  // The next chunk from any peer.
  virtual ReceivedChunk receive(const Deadline& deadline) = 0;
  // The bytes have been used: the sender gets its credit back.
  virtual void release(const ReceivedChunk& chunk) = 0;

  // Makes every wait of this endpoint end, now and later.
  virtual void cancel() = 0;
};

}  // namespace areal::reshard
