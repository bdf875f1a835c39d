// Ranks on any machines, over TCP. Several streams per pair let the kernel use more than one core.
//
// Bytes are not encrypted: bind to loopback (the default) or a trusted network.
#pragma once

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "reshard/transports/socket_endpoint.h"
#include "reshard/transports/staging.h"

namespace areal::reshard {

struct TcpOptions {
  std::string host = "127.0.0.1";                // numeric; where to listen
  int port = 0;                                  // 0: any
  int streams = 2;                               // connections per pair of ranks; the same on every rank
  int64_t max_chunk_bytes = int64_t{256} << 20;  // a longer one is refused before any memory is made for it
};

class TcpTransport final : public SocketEndpoint {
 public:
  // token: what all ranks of the run know, at least 16 bytes.
  TcpTransport(int32_t rank, std::vector<std::byte> token, const TcpOptions& options = {});
  ~TcpTransport() override { stop(); }

  const char* name() const override { return "tcp"; }
  bool exposes_buffers() const override { return false; }
  std::vector<std::span<std::byte>> remote_buffers(int32_t) override { return {}; }
  std::span<std::byte> acquire(int32_t peer, int64_t bytes, const Deadline& deadline) override;
  void post(int32_t peer, const WireHeader& header) override;
  void post_direct(int32_t peer, const WireHeader& header) override;
  int64_t staging_bytes() const override { return staging_bytes_; }

 private:
  struct Peer {
    // Sending: touched by the thread that sends to the peer.
    Staging outgoing;
    uint32_t slot = 0;
    uint32_t posted = 0;
    // Receiving: touched by the I/O thread.
    Staging incoming;
    std::vector<std::deque<ReceivedChunk>> streams;
    uint32_t delivered = 0;
  };

  void connected(int32_t peer) override;
  std::span<std::byte> payload_memory(int32_t peer, const WireHeader& header) override;
  void frame_arrived(int32_t peer, uint32_t stream, const WireHeader& header, std::span<const std::byte> payload,
                     Fd fd) override;
  std::span<std::byte> slot_of(Staging& staging, uint32_t slot, int64_t bytes);

  const int64_t max_chunk_bytes_;
  std::map<int32_t, Peer> peers_;
  std::atomic<int64_t> staging_bytes_ = 0;
};

}  // namespace areal::reshard
