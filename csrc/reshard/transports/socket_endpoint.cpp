#include "reshard/transports/socket_endpoint.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "reshard/errors.h"

namespace areal::reshard {
namespace {

// A stranger must not hold up those who are expected.
constexpr std::chrono::seconds kHandshake{10};
// What was posted before the end is sent, but a peer that does not read must not keep the process.
constexpr double kFlushSeconds = 2;

std::string missing_text(const std::map<int32_t, int>& missing) {
  std::string text = "ranks";
  for (const auto& [rank, count] : missing) text.append(" ").append(std::to_string(rank));
  return text;
}

}  // namespace

SocketEndpoint::SocketEndpoint(int32_t rank, std::vector<std::byte> token, int streams, Listener listener)
    : mailbox_(rank),
      streams_(streams),
      token_(std::move(token)),
      listener_(std::move(listener)),
      wake_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  AREAL_CHECK(rank >= 0, "Transport: expected rank >= 0, got ", rank);
  AREAL_CHECK(streams >= 1 && streams <= 64, "Transport: expected 1 to 64 streams, got ", streams);
  AREAL_CHECK(token_.size() >= 16, "Transport: expected a token of at least 16 bytes, got ", token_.size());
  AREAL_CHECK(wake_, "Transport: expected an eventfd, got ", std::strerror(errno));
}

// Lower ranks connect to higher ones. Nobody waits for anybody lower before that, so the highest rank, then the next,
// finish in turn.
void SocketEndpoint::connect(const std::map<int32_t, std::string>& addresses, const Deadline& given) {
  // cancel() ends the waits of this call as well.
  const Deadline deadline = given.with([this] {
    if (cancelled_) throw CancelledError(format_message("rank ", rank(), ": the update was cancelled"));
  });
  AREAL_CHECK(!io_.joinable(), "Transport: expected one connect(), got a second");
  const auto streams = static_cast<uint32_t>(streams_);
  std::map<int32_t, int> missing;
  for (const auto& [peer, address] : addresses) {
    AREAL_CHECK(peer >= 0, "Transport: expected ranks >= 0, got ", peer);
    if (peer == rank()) continue;
    mailbox_.add_peer(peer);
    if (peer < rank()) missing[peer] = streams_;
    for (uint32_t stream = 0; peer > rank() && stream < streams; ++stream) {
      Fd fd = connect_to(address, peer, deadline);
      introduce(fd, {static_cast<uint32_t>(rank()), static_cast<uint32_t>(peer), stream, streams}, token_, deadline);
      add_connection(peer, stream, std::move(fd));
    }
  }
  Reception reception(listener_);
  while (!missing.empty()) {
    Fd fd = reception.next(missing_text(missing), deadline);
    Introduction said{};
    try {
      const double seconds = std::chrono::duration<double>(deadline.left(kHandshake)).count();
      const Deadline handshake(seconds, [&] { deadline.interrupt(); });
      said = recognise(fd, {0, static_cast<uint32_t>(rank()), 0, streams}, token_, handshake);
    } catch (const PeerError&) {
      continue;  // not one of ours
    } catch (const DeadlineError&) {
      continue;
    }
    const auto peer = static_cast<int32_t>(said.connecting_rank);
    const auto known = std::ranges::any_of(connections_, [&](const std::unique_ptr<Connection>& c) {
      return c->peer == peer && c->stream == said.stream;
    });
    if (known || !missing.contains(peer)) throw PeerError(format_message("Transport: rank ", peer, " connected twice"));
    add_connection(peer, said.stream, std::move(fd));
    if (--missing[peer] == 0) missing.erase(peer);
  }
  for (const auto& [peer, address] : addresses) {
    if (peer != rank()) connected(peer);
  }
  io_ = std::thread([this] { run_io(); });
}

void SocketEndpoint::add_connection(int32_t peer, uint32_t stream, Fd fd) {
  auto connection = std::make_unique<Connection>();
  connection->fd = std::move(fd);
  connection->peer = peer;
  connection->stream = stream;
  connections_.push_back(std::move(connection));
}

void SocketEndpoint::stop() {
  if (getpid() != process_) {  // a fork, which has the sockets but not the thread
    if (io_.joinable()) io_.detach();
    return;
  }
  stopping_ = true;
  wake();
  if (io_.joinable()) io_.join();
}

void SocketEndpoint::cancel() {
  cancelled_ = true;
  mailbox_.cancel();
  wake();
}

void SocketEndpoint::wake() {
  const uint64_t one = 1;
  static_cast<void>(!write(wake_.get(), &one, sizeof one));  // a full counter wakes as well
}

void SocketEndpoint::grant(int32_t peer, const WireHeader& header) {
  Frame frame;
  frame.header = header;
  frame.header.length = 0;
  enqueue(peer, 0, WireType::kGrant, std::move(frame));
}

ReceivedChunk SocketEndpoint::receive(std::span<const int32_t> peers, const Deadline& deadline) {
  return mailbox_.next_chunk(peers, deadline);
}

void SocketEndpoint::release(const ReceivedChunk& chunk) {
  Frame frame;
  frame.header = chunk.header;
  frame.header.length = 0;
  enqueue(static_cast<int32_t>(chunk.header.source), 0, WireType::kCredit, std::move(frame));
}

WireHeader SocketEndpoint::await_grant(int32_t peer, const Deadline& deadline) {
  return mailbox_.next_grant(peer, deadline);
}

void SocketEndpoint::drain(int32_t peer, const Deadline& deadline) { mailbox_.drain(peer, deadline); }

void SocketEndpoint::enqueue(int32_t peer, uint32_t stream, WireType type, Frame frame) {
  mailbox_.check(peer);
  const auto found = std::ranges::find_if(
      connections_, [&](const std::unique_ptr<Connection>& c) { return c->peer == peer && c->stream == stream; });
  AREAL_CHECK(found != connections_.end(), "Transport: expected a connected peer, got rank ", peer);
  Connection& connection = **found;
  {
    const std::lock_guard lock(mutex_);
    frame.header.type = static_cast<uint16_t>(type);
    frame.header.source = static_cast<uint32_t>(rank());
    frame.header.target = static_cast<uint32_t>(peer);
    frame.header.sequence = connection.sent++;
    seal_header(frame.header);
    connection.frames.push_back(std::move(frame));
  }
  wake();
}

// -- the I/O thread ---------------------------------------------------------------------------------------------------

void SocketEndpoint::run_io() {
  std::vector<pollfd> polled;
  const Deadline::Clock::time_point never = Deadline::Clock::time_point::max();
  Deadline::Clock::time_point give_up = never;
  while (true) {
    if (stopping_ && give_up == never) {
      give_up = Deadline::Clock::now() +
                std::chrono::duration_cast<Deadline::Clock::duration>(std::chrono::duration<double>(kFlushSeconds));
    }
    if (cancelled_ || (stopping_ && (may_stop() || Deadline::Clock::now() >= give_up))) break;
    polled.assign(1, {wake_.get(), POLLIN, 0});
    {
      const std::lock_guard lock(mutex_);
      for (const auto& c : connections_) {
        const short events = c->frames.empty() ? POLLIN : POLLIN | POLLOUT;
        polled.push_back({c->lost ? -1 : c->fd.get(), events, 0});
      }
    }
    poll(polled.data(), polled.size(), stopping_ ? 20 : 1000);
    if (polled[0].revents != 0) {
      uint64_t count;
      static_cast<void>(!read(wake_.get(), &count, sizeof count));
    }
    for (size_t i = 0; i < connections_.size(); ++i) {
      Connection& connection = *connections_[i];
      const short ready = polled[i + 1].revents;
      if ((ready & POLLOUT) != 0) write_some(connection);
      if ((ready & (POLLIN | POLLHUP | POLLERR)) != 0 && !connection.lost) read_some(connection);
    }
  }
  for (const auto& connection : connections_) {
    if (!connection->lost) shutdown(connection->fd.get(), SHUT_RDWR);
  }
}

bool SocketEndpoint::may_stop() {
  const std::lock_guard lock(mutex_);
  return std::ranges::all_of(connections_, [](const auto& c) { return c->lost || c->frames.empty(); });
}

void SocketEndpoint::lose(Connection& connection, Loss loss, const std::string& why) {
  {
    const std::lock_guard lock(mutex_);
    connection.lost = true;
    connection.frames.clear();
  }
  shutdown(connection.fd.get(), SHUT_RDWR);
  mailbox_.lose(connection.peer, loss, why);
}

// Reads until the socket has no more, at most some frames: others wait, too.
void SocketEndpoint::read_some(Connection& connection) {
  try {
    for (int frames = 0; frames < 16;) {
      if (connection.header_bytes < sizeof(WireHeader)) {
        if (!read_header(connection)) return;
        connection.payload = payload_memory(connection.peer, connection.header);
        connection.payload_bytes = 0;
      }
      while (connection.payload_bytes < connection.payload.size()) {
        const ssize_t got = recv(connection.fd.get(), connection.payload.data() + connection.payload_bytes,
                                 connection.payload.size() - connection.payload_bytes, 0);
        if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
        if (got <= 0)
          return lose(connection, Loss::kGone, got == 0 ? "it closed the connection" : std::strerror(errno));
        connection.payload_bytes += static_cast<size_t>(got);
      }
      frame_arrived(connection.peer, connection.stream, connection.header, connection.payload,
                    std::move(connection.passed_fd));
      connection.passed_fd = Fd();
      connection.header_bytes = 0;
      ++frames;
    }
  } catch (const CorruptedError& error) {
    lose(connection, Loss::kCorrupted, error.what());
  } catch (const std::exception& error) {
    lose(connection, Loss::kGone, error.what());
  }
}

// True when the header is complete and right. A descriptor travels with its first byte.
bool SocketEndpoint::read_header(Connection& connection) {
  while (connection.header_bytes < sizeof(WireHeader)) {
    iovec part{reinterpret_cast<std::byte*>(&connection.header) + connection.header_bytes,
               sizeof(WireHeader) - connection.header_bytes};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    const ssize_t got = recvmsg(connection.fd.get(), &message, MSG_CMSG_CLOEXEC);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return false;
    if (got <= 0) {
      lose(connection, Loss::kGone, got == 0 ? "it closed the connection" : std::strerror(errno));
      return false;
    }
    for (cmsghdr* c = CMSG_FIRSTHDR(&message); c != nullptr; c = CMSG_NXTHDR(&message, c)) {
      if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
      int fd;
      std::memcpy(&fd, CMSG_DATA(c), sizeof fd);
      connection.passed_fd = Fd(fd);
    }
    AREAL_CHECK((message.msg_flags & MSG_CTRUNC) == 0, "no room for its descriptor: too many are open in this process");
    connection.header_bytes += static_cast<size_t>(got);
  }
  check_header(connection.header);
  if (connection.header.sequence != connection.received) {
    throw CorruptedError(
        format_message("expected sequence = ", connection.received, ", got ", connection.header.sequence));
  }
  ++connection.received;
  return true;
}

void SocketEndpoint::write_some(Connection& connection) {
  while (true) {
    Frame* frame = nullptr;
    {
      const std::lock_guard lock(mutex_);
      if (connection.frames.empty()) return;
      frame = &connection.frames.front();  // stays where it is while others are added
    }
    const std::span<const std::byte> payload = frame->owned.empty() ? frame->payload : frame->owned;
    const size_t total = sizeof(WireHeader) + payload.size(), at = connection.written;
    const size_t header_left = sizeof(WireHeader) - std::min(at, sizeof(WireHeader));
    const size_t payload_at = at - std::min(at, sizeof(WireHeader));
    iovec parts[2] = {{reinterpret_cast<std::byte*>(&frame->header) + (sizeof(WireHeader) - header_left), header_left},
                      {const_cast<std::byte*>(payload.data()) + payload_at, payload.size() - payload_at}};
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = 2;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    if (frame->fd >= 0 && at == 0) {
      message.msg_control = control;
      message.msg_controllen = sizeof control;
      cmsghdr* c = CMSG_FIRSTHDR(&message);
      c->cmsg_level = SOL_SOCKET;
      c->cmsg_type = SCM_RIGHTS;
      c->cmsg_len = CMSG_LEN(sizeof(int));
      std::memcpy(CMSG_DATA(c), &frame->fd, sizeof(int));
    }
    const ssize_t sent = sendmsg(connection.fd.get(), &message, MSG_NOSIGNAL);
    if (sent < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (sent < 0) return lose(connection, Loss::kGone, std::strerror(errno));
    connection.written += static_cast<size_t>(sent);
    if (connection.written < total) continue;
    connection.written = 0;
    const std::lock_guard lock(mutex_);
    connection.frames.pop_front();
  }
}

}  // namespace areal::reshard
