// What the transports over stream sockets share: connections to every peer, and one thread that moves frames (a header
// and what follows it) between their sockets and memory, so that packing and sending overlap.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "reshard/transport.h"
#include "reshard/transports/mailbox.h"
#include "reshard/transports/sockets.h"

namespace areal::reshard {

struct Frame {
  WireHeader header{};
  std::span<const std::byte> payload;  // must live until it is sent
  std::vector<std::byte> owned;        // or this
  int fd = -1;                         // a descriptor to pass on, which must live until it is sent
};

class SocketEndpoint : public Transport {
 public:
  // Connects to every other rank of the map (rank -> address()), all of which must do the same.
  void connect(const std::map<int32_t, std::string>& addresses, const Deadline& deadline);
  const std::string& address() const { return listener_.address; }

  int32_t rank() const override { return mailbox_.rank(); }
  void grant(int32_t peer, const WireHeader& header) override;
  ReceivedChunk receive(std::span<const int32_t> peers, const Deadline& deadline) override;
  void release(const ReceivedChunk& chunk) override;
  WireHeader await_grant(int32_t peer, const Deadline& deadline) override;
  void drain(int32_t peer, const Deadline& deadline) override;
  void cancel() override;

 protected:
  SocketEndpoint(int32_t rank, std::vector<std::byte> token, int streams, Listener listener);
  // The derived class calls it first of all in its destructor: what was posted is still sent, unless cancelled.
  void stop();

  // Sends it over one of the peer's connections, in order. Fills in type, source, target and sequence.
  void enqueue(int32_t peer, uint32_t stream, WireType type, Frame frame);
  // Runs in connect(), once for each peer.
  virtual void connected(int32_t peer) = 0;
  // Both run in the I/O thread. Where the payload of a checked header goes: header.length bytes, or none when they do
  // not come through the socket. May throw CorruptedError.
  virtual std::span<std::byte> payload_memory(int32_t peer, const WireHeader& header) = 0;
  // A whole frame. fd: the descriptor that came with it, if any.
  virtual void frame_arrived(int32_t peer, uint32_t stream, const WireHeader& header,
                             std::span<const std::byte> payload, Fd fd) = 0;

  Mailbox mailbox_;
  const int streams_;

 private:
  struct Connection {
    Fd fd;
    int32_t peer = 0;
    uint32_t stream = 0;
    // Reading: touched by the I/O thread alone.
    WireHeader header{};
    size_t header_bytes = 0;
    std::span<std::byte> payload;
    size_t payload_bytes = 0;
    uint32_t received = 0;
    Fd passed_fd;
    // Writing: under mutex_, but for the frame in front, which the I/O thread alone removes.
    std::deque<Frame> frames;
    size_t written = 0;
    uint32_t sent = 0;
    bool lost = false;
  };

  void add_connection(int32_t peer, uint32_t stream, Fd fd);
  void wake();
  void run_io();
  void read_some(Connection& connection);
  bool read_header(Connection& connection);
  void write_some(Connection& connection);
  void lose(Connection& connection, Loss loss, const std::string& why);
  bool may_stop();

  const pid_t process_ = getpid();
  const std::vector<std::byte> token_;
  Listener listener_;
  Fd wake_;
  std::vector<std::unique_ptr<Connection>> connections_;  // complete before the thread starts
  std::mutex mutex_;
  std::atomic<bool> stopping_ = false;
  std::atomic<bool> cancelled_ = false;
  std::thread io_;
};

}  // namespace areal::reshard
