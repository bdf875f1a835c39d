// Stream sockets, TCP and Unix, and the handshake by which two ranks recognise each other.
#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <utility>

#include "reshard/deadline.h"
#include "reshard/transports/hmac.h"

namespace areal::reshard {

// A descriptor that is closed with the object.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd();

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

struct Listener {
  Fd fd;
  std::string address;  // "127.0.0.1:4711", "[::1]:4711", or "@name" (abstract Unix socket)
};

// host: a numeric address; port 0: any. Throws areal::Error when it cannot be bound.
Listener listen_tcp(const std::string& host, int port);
Listener listen_unix();

// Waits while nobody listens there yet. Throws DeadlineError, and PeerError when the address cannot be reached.
Fd connect_to(const std::string& address, int32_t peer, const Deadline& deadline);

// Takes connections as they speak, so that strangers who say nothing hold up nobody.
class Reception {
 public:
  explicit Reception(const Listener& listener) : listener_(listener) {}

  // The next connection that has introduced itself. Throws DeadlineError naming who is awaited.
  Fd next(const std::string& awaited, const Deadline& deadline);

 private:
  void accept_all();
  Fd take_one_that_spoke();

  const Listener& listener_;
  std::deque<Fd> silent_;  // oldest first
};

// What a connection is for; both sides state it, and the handshake authenticates it.
struct Introduction {
  uint32_t connecting_rank;
  uint32_t accepting_rank;
  uint32_t stream;
  uint32_t streams;
};

// Each side proves with HMAC-SHA256 over both sides' fresh nonces that it knows the token; it is never sent. Throw
// PeerError for a foreign token, another protocol or another rank.
void introduce(const Fd& fd, const Introduction& self, std::span<const std::byte> token, const Deadline& deadline);
// self.connecting_rank and self.stream are the other side's to say.
Introduction recognise(const Fd& fd, const Introduction& self, std::span<const std::byte> token,
                       const Deadline& deadline);

}  // namespace areal::reshard
