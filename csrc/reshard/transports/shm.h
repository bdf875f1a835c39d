// Ranks that are processes of one machine. Headers travel over Unix sockets, whose end says at once that a process has
// died; bytes lie in shared memory, passed by descriptor and mapped once: either the receiver's own buffers (a version
// store's arena), which senders write directly, or staging buffers of the sender.
#pragma once

#include <array>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "reshard/shared_memory.h"
#include "reshard/transports/socket_endpoint.h"

namespace areal::reshard {

// A buffer of this rank that peers may write while it has granted them an update.
struct ExposedBuffer {
  int fd;  // SharedMemory::fd(); stays the caller's
  int64_t offset_bytes;
  int64_t bytes;
};

class ShmTransport final : public SocketEndpoint {
 public:
  ShmTransport(int32_t rank, std::vector<std::byte> token, const std::vector<ExposedBuffer>& exposed = {});
  ~ShmTransport() override { stop(); }

  const char* name() const override { return "shm"; }
  bool exposes_buffers() const override { return !table_.empty(); }
  std::vector<std::span<std::byte>> remote_buffers(int32_t peer) override;
  std::span<std::byte> acquire(int32_t peer, int64_t bytes, const Deadline& deadline) override;
  void post(int32_t peer, const WireHeader& header) override;
  void post_direct(int32_t peer, const WireHeader& header) override;
  int64_t staging_bytes() const override { return staging_bytes_; }

 private:
  // As it travels: which of the memories sent before, and where in it.
  struct Place {
    uint64_t memory;
    uint64_t offset_bytes;
    uint64_t bytes;
  };
  struct Slot {
    std::optional<SharedMemory> memory;
    Mapping mapping;
  };
  struct Peer {
    std::array<Slot, kChunksInFlight> outgoing;  // touched by the thread that sends to the peer
    uint32_t slot = 0;
    std::array<Mapping, kChunksInFlight> incoming;  // touched by the I/O thread
    std::vector<std::byte> table;                   // likewise: the payload of kBuffers
    std::vector<Mapping> memories;                  // the peer's exposed memory, under memory_mutex_
    std::vector<std::span<std::byte>> buffers;      // likewise
  };

  void connected(int32_t peer) override;
  std::span<std::byte> payload_memory(int32_t peer, const WireHeader& header) override;
  void frame_arrived(int32_t peer, uint32_t stream, const WireHeader& header, std::span<const std::byte> payload,
                     Fd fd) override;
  void take_memory(Peer& peer, const WireHeader& header, const Fd& fd);
  void take_table(Peer& peer, std::span<const std::byte> payload);

  std::vector<SharedMemory> exposed_;
  std::vector<Place> table_;
  std::map<int32_t, Peer> peers_;
  std::mutex memory_mutex_;
  std::atomic<int64_t> staging_bytes_ = 0;
};

}  // namespace areal::reshard
