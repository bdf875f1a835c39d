// How chunks get from one rank to another. A transport knows bytes and ranks; neither plans nor tensors.
//
// One update: the receiver grants it to each sender; the sender packs chunks into staging memory, or copies them
// straight into the receiver's buffers, and posts a header for each; the receiver checks, unpacks, releases; the sender
// drains.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "reshard/deadline.h"
#include "reshard/strided_copy.h"
#include "reshard/wire.h"

namespace areal::reshard {

// Chunks of one peer that may be on their way: one is filled while the other travels.
inline constexpr int kChunksInFlight = 2;

struct ReceivedChunk {
  WireHeader header;                 // of the peer that it names as its source
  std::span<const std::byte> bytes;  // valid until release()
};

// The endpoint of one rank, connected to its peers. Sending and receiving may go on at once in different threads;
// several threads may send, each to peers of its own, and several receive. Everything that waits takes a deadline,
// throws DeadlineError naming the peer, and ends with CancelledError after cancel(). A peer that is gone is a PeerError
// naming it; one that sends what it should not is a CorruptedError. After an error the endpoint is of no more use:
// connect a new one.
class Transport {
 public:
  Transport() = default;
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;
  virtual ~Transport() = default;

  virtual const char* name() const = 0;
  virtual int32_t rank() const = 0;

  // -- receiving ------------------------------------------------------------------------------------------------------
  // Tells the peer that its chunks may come. The header: epoch, plan_digest, chunk.
  virtual void grant(int32_t peer, const WireHeader& header) = 0;
  // The next chunk from any of these peers, those of one peer in the order of their posts. A chunk from any other is a
  // CorruptedError; that another peer is gone is none.
  virtual ReceivedChunk receive(std::span<const int32_t> peers, const Deadline& deadline) = 0;
  // The bytes have been used: the sender gets its credit back.
  virtual void release(const ReceivedChunk& chunk) = 0;
  // Whether peers reach buffers of this rank: what remote_buffers() gives them.
  virtual bool exposes_buffers() const = 0;

  // -- sending --------------------------------------------------------------------------------------------------------
  // The peer's next grant.
  virtual WireHeader await_grant(int32_t peer, const Deadline& deadline) = 0;
  // Memory of the peer that this rank may write directly (same process, or mapped shared memory): the buffers that the
  // peer has exposed, in its order; none where there is no such reach.
  virtual std::vector<std::span<std::byte>> remote_buffers(int32_t peer) = 0;
  // A staging buffer, aligned to 64, to pack a chunk for the peer into. Waits for a credit: at most kChunksInFlight are
  // under way to a peer.
  virtual std::span<std::byte> acquire(int32_t peer, int64_t bytes, const Deadline& deadline) = 0;
  // Sends the header and the bytes of what acquire() gave last for this peer. The caller sets epoch, plan_digest,
  // chunk, length and xxh3_64.
  virtual void post(int32_t peer, const WireHeader& header) = 0;
  // Sends the header of a chunk that the caller has written to remote_buffers(); length is 0.
  virtual void post_direct(int32_t peer, const WireHeader& header) = 0;
  // Returns when the peer has released every chunk posted to it.
  virtual void drain(int32_t peer, const Deadline& deadline) = 0;

  // Staging memory that this endpoint has made for the chunks of all peers, at most kChunksInFlight of them per peer
  // and direction. It is kept for the next update.
  virtual int64_t staging_bytes() const = 0;

  // -- memory that no CPU reads ---------------------------------------------------------------------------------------
  // Whether the buffers of both ends lie on a device, where only the transport can copy: then every chunk is direct,
  // and its xxh3_64 is 0.
  virtual bool copies_itself() const { return false; }
  virtual void copy(std::byte*, const std::byte*, const StridedCopy&) {}
  virtual void zero(std::byte*, int64_t) {}
  // Returns when the copies so far are done.
  virtual void finish_copies() {}

  // Makes every wait of this endpoint end, now and later. Its peers see it gone.
  virtual void cancel() = 0;
};

}  // namespace areal::reshard
