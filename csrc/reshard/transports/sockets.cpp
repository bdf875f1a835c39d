#include "reshard/transports/sockets.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "reshard/errors.h"

namespace areal::reshard {
namespace {

constexpr int kBacklog = 1024;
constexpr size_t kMostSilent = 256;  // connections that have said nothing yet
constexpr char kProtocol[16] = "areal-reshard-1";

struct Address {
  sockaddr_storage storage{};
  socklen_t bytes = 0;

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

template <class T>
Address address_of(const T& specific, socklen_t bytes = sizeof(T)) {
  Address address;
  std::memcpy(&address.storage, &specific, sizeof specific);
  address.bytes = bytes;
  return address;
}

Address parse_tcp(const std::string& host, int port) {
  AREAL_CHECK(port >= 0 && port <= 65535, "TcpTransport: expected a port of 0 to 65535, got ", port);
  sockaddr_in v4{};
  v4.sin_family = AF_INET;
  v4.sin_port = htons(static_cast<uint16_t>(port));
  if (inet_pton(AF_INET, host.c_str(), &v4.sin_addr) == 1) return address_of(v4);
  sockaddr_in6 v6{};
  v6.sin6_family = AF_INET6;
  v6.sin6_port = htons(static_cast<uint16_t>(port));
  AREAL_CHECK(inet_pton(AF_INET6, host.c_str(), &v6.sin6_addr) == 1,
              "TcpTransport: expected a numeric address such as 127.0.0.1, got '", host, "'");
  return address_of(v6);
}

bool is_wildcard(const Address& address) {
  if (address.storage.ss_family == AF_INET) {
    return reinterpret_cast<const sockaddr_in*>(&address.storage)->sin_addr.s_addr == INADDR_ANY;
  }
  return IN6_IS_ADDR_UNSPECIFIED(&reinterpret_cast<const sockaddr_in6*>(&address.storage)->sin6_addr);
}

Address parse(const std::string& text) {
  if (text.starts_with('@')) {
    sockaddr_un local{};
    local.sun_family = AF_UNIX;
    AREAL_CHECK(text.size() < sizeof local.sun_path, "ShmTransport: expected a shorter address, got '", text, "'");
    std::memcpy(local.sun_path + 1, text.data() + 1, text.size() - 1);  // abstract: begins with a zero
    return address_of(local, static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + text.size()));
  }
  const size_t colon = text.rfind(':');
  AREAL_CHECK(colon != std::string::npos && colon + 1 < text.size() && text.size() - colon <= 6 &&
                  std::all_of(text.begin() + static_cast<int64_t>(colon) + 1, text.end(),
                              [](char c) { return c >= '0' && c <= '9'; }),
              "Transport: expected an address host:port or @name, got '", text, "'");
  std::string host = text.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  return parse_tcp(host, std::stoi(text.substr(colon + 1)));
}

Fd new_socket(int family) {
  Fd fd(socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  AREAL_CHECK(fd, "Transport: expected a new socket, got ", std::strerror(errno));
  return fd;
}

// No waiting for more bytes to fill a packet; notice a machine that went away.
void tune(const Fd& fd, int family) {
  if (family == AF_UNIX) return;
  const int on = 1, lost_after_ms = 60'000;
  setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  setsockopt(fd.get(), SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  setsockopt(fd.get(), IPPROTO_TCP, TCP_USER_TIMEOUT, &lost_after_ms, sizeof lost_after_ms);
}

void listen_on(const Fd& fd, const Address& address, const std::string& text) {
  AREAL_CHECK(bind(fd.get(), address.get(), address.bytes) == 0 && listen(fd.get(), kBacklog) == 0,
              "Transport: expected to listen at ", text, ", got ", std::strerror(errno));
}

// One slice of waiting; true when something may be ready.
bool poll_for(int fd, short events, const Deadline& deadline, std::chrono::milliseconds slice = Deadline::kSlice) {
  pollfd entry{fd, events, 0};
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(deadline.left(slice)).count();
  const int ready = poll(&entry, 1, static_cast<int>(ms));
  deadline.interrupt();
  return ready > 0;
}

void fill_random(std::span<std::byte> bytes) {
  AREAL_CHECK(getrandom(bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()),
              "Transport: expected random bytes, got ", std::strerror(errno));
}

// -- handshake --------------------------------------------------------------------------------------------------------

struct Hello {
  char protocol[16];
  Introduction introduction;
  Digest nonce;
};
static_assert(sizeof(Hello) == 64);

struct Answer {
  Hello hello;
  Digest proof;
};
static_assert(sizeof(Answer) == 96);

Hello hello_of(const Introduction& introduction) {
  Hello hello{};
  std::memcpy(hello.protocol, kProtocol, sizeof kProtocol);
  hello.introduction = introduction;
  fill_random(hello.nonce);
  return hello;
}

Digest proof_of(const char* side, const Hello& connecting, const Hello& accepting, std::span<const std::byte> token) {
  std::vector<std::byte> text;
  const auto append = [&](std::span<const std::byte> bytes) { text.insert(text.end(), bytes.begin(), bytes.end()); };
  append(std::as_bytes(std::span(side, std::strlen(side))));
  append(std::as_bytes(std::span(&connecting, 1)));
  append(std::as_bytes(std::span(&accepting, 1)));
  return hmac_sha256(token, text);
}

template <class T>
void send_all(const Fd& fd, const T& value, const Deadline& deadline) {
  const auto* bytes = reinterpret_cast<const std::byte*>(&value);
  for (size_t at = 0; at < sizeof value;) {
    const ssize_t sent = send(fd.get(), bytes + at, sizeof value - at, MSG_NOSIGNAL);
    if (sent > 0) at += static_cast<size_t>(sent);
    if (sent < 0 && errno != EAGAIN && errno != EINTR) {
      throw PeerError(format_message("Transport: the connection ended in the handshake: ", std::strerror(errno)));
    }
    if (sent >= 0) continue;
    if (deadline.passed())
      throw DeadlineError(format_message("Transport: no handshake within ", deadline.seconds(), " s"));
    poll_for(fd.get(), POLLOUT, deadline);
  }
}

template <class T>
T receive_all(const Fd& fd, const Deadline& deadline) {
  T value;
  auto* bytes = reinterpret_cast<std::byte*>(&value);
  for (size_t at = 0; at < sizeof value;) {
    const ssize_t got = recv(fd.get(), bytes + at, sizeof value - at, 0);
    if (got > 0) at += static_cast<size_t>(got);
    if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) {
      throw PeerError("Transport: the peer ended the connection in the handshake: does it know the same token?");
    }
    if (got > 0) continue;
    if (deadline.passed())
      throw DeadlineError(format_message("Transport: no handshake within ", deadline.seconds(), " s"));
    poll_for(fd.get(), POLLIN, deadline);
  }
  return value;
}

void check_hello(const Hello& hello, uint32_t connecting, uint32_t accepting, uint32_t streams) {
  const Introduction& said = hello.introduction;
  if (std::memcmp(hello.protocol, kProtocol, sizeof kProtocol) != 0) {
    throw PeerError("Transport: expected the protocol of this engine, got another");
  }
  if (said.connecting_rank != connecting || said.accepting_rank != accepting || said.streams != streams ||
      said.stream >= streams) {
    throw PeerError(format_message("Transport: expected a connection of rank ", connecting, " to ", accepting, " with ",
                                   streams, " streams, got ", said.connecting_rank, " to ", said.accepting_rank,
                                   " with ", said.streams));
  }
}

void check_proof(const Digest& proof, const Digest& expected, uint32_t rank) {
  if (!equal_digests(proof, expected)) {
    throw PeerError(format_message("Transport: expected rank ", rank, " to know the token, got a foreign one"));
  }
}

}  // namespace

Fd::~Fd() {
  if (fd_ >= 0) close(fd_);
}

Listener listen_tcp(const std::string& host, int port) {
  const Address address = parse_tcp(host, port);
  AREAL_CHECK(!is_wildcard(address), "TcpTransport: expected an address at which peers reach this machine, got '", host,
              "'");
  Fd fd = new_socket(address.storage.ss_family);
  const int on = 1;
  setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  listen_on(fd, address, host);
  sockaddr_storage bound{};
  socklen_t bytes = sizeof bound;
  AREAL_CHECK(getsockname(fd.get(), reinterpret_cast<sockaddr*>(&bound), &bytes) == 0,
              "TcpTransport: expected the bound port, got ", std::strerror(errno));
  // Both families keep the port at the same place.
  const uint16_t actual = ntohs(reinterpret_cast<const sockaddr_in*>(&bound)->sin_port);
  const std::string shown = bound.ss_family == AF_INET6 ? "[" + host + "]" : host;
  return {std::move(fd), shown + ":" + std::to_string(actual)};
}

Listener listen_unix() {
  std::array<std::byte, 16> name;
  fill_random(name);
  std::string text = "@areal-";
  for (const std::byte byte : name) {
    constexpr char kHex[] = "0123456789abcdef";
    text += kHex[static_cast<uint8_t>(byte) >> 4];
    text += kHex[static_cast<uint8_t>(byte) & 15];
  }
  Fd fd = new_socket(AF_UNIX);
  listen_on(fd, parse(text), text);
  return {std::move(fd), text};
}

Fd connect_to(const std::string& address, int32_t peer, const Deadline& deadline) {
  const Address to = parse(address);
  while (true) {
    Fd fd = new_socket(to.storage.ss_family);
    tune(fd, to.storage.ss_family);
    int error = connect(fd.get(), to.get(), to.bytes) == 0 ? 0 : errno;
    while (error == EINPROGRESS && !deadline.passed()) {
      if (!poll_for(fd.get(), POLLOUT, deadline)) continue;
      socklen_t bytes = sizeof error;
      getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &bytes);
    }
    if (error == 0) return fd;
    if (deadline.passed()) {
      throw DeadlineError(format_message("Transport: no connection to rank ", peer, " at ", address, " within ",
                                         deadline.seconds(), " s"));
    }
    if (error != ECONNREFUSED && error != EAGAIN && error != EINTR) {
      throw PeerError(
          format_message("Transport: no connection to rank ", peer, " at ", address, ": ", std::strerror(error)));
    }
    std::this_thread::sleep_for(deadline.left(std::chrono::milliseconds{2}));
    deadline.interrupt();
  }
}

void Reception::accept_all() {
  while (true) {
    Fd fd(accept4(listener_.fd.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!fd && errno == EAGAIN) return;
    if (!fd && (errno == EINTR || errno == ECONNABORTED)) continue;
    AREAL_CHECK(fd, "Transport: expected a connection, got ", std::strerror(errno));
    tune(fd, listener_.address.starts_with('@') ? AF_UNIX : AF_INET);
    silent_.push_back(std::move(fd));
    if (silent_.size() > kMostSilent) silent_.pop_front();
  }
}

// None when nobody has said a whole Hello. Forgets those that have gone.
Fd Reception::take_one_that_spoke() {
  for (auto fd = silent_.begin(); fd != silent_.end();) {
    char hello[sizeof(Hello)];
    const ssize_t got = recv(fd->get(), hello, sizeof hello, MSG_PEEK);
    if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) {
      fd = silent_.erase(fd);
    } else if (got == sizeof hello) {
      Fd spoke = std::move(*fd);
      silent_.erase(fd);
      return spoke;
    } else {
      ++fd;
    }
  }
  return {};
}

Fd Reception::next(const std::string& awaited, const Deadline& deadline) {
  while (true) {
    accept_all();
    if (Fd fd = take_one_that_spoke()) return fd;
    if (deadline.passed()) {
      throw DeadlineError(
          format_message("Transport: no connection from ", awaited, " within ", deadline.seconds(), " s"));
    }
    // Those that are silent are looked at again soon: what they lack of a Hello tells no poll that it may return.
    poll_for(listener_.fd.get(), POLLIN, deadline, silent_.empty() ? Deadline::kSlice : std::chrono::milliseconds{1});
  }
}

void introduce(const Fd& fd, const Introduction& self, std::span<const std::byte> token, const Deadline& deadline) {
  const Hello hello = hello_of(self);
  send_all(fd, hello, deadline);
  const auto answer = receive_all<Answer>(fd, deadline);
  check_hello(answer.hello, self.connecting_rank, self.accepting_rank, self.streams);
  check_proof(answer.proof, proof_of("accepting", hello, answer.hello, token), self.accepting_rank);
  send_all(fd, proof_of("connecting", hello, answer.hello, token), deadline);
  receive_all<char>(fd, deadline);  // accepted
}

Introduction recognise(const Fd& fd, const Introduction& self, std::span<const std::byte> token,
                       const Deadline& deadline) {
  const auto hello = receive_all<Hello>(fd, deadline);
  check_hello(hello, hello.introduction.connecting_rank, self.accepting_rank, self.streams);
  Answer answer{hello_of(hello.introduction), {}};
  answer.proof = proof_of("accepting", hello, answer.hello, token);
  send_all(fd, answer, deadline);
  check_proof(receive_all<Digest>(fd, deadline), proof_of("connecting", hello, answer.hello, token),
              hello.introduction.connecting_rank);
  send_all(fd, '+', deadline);
  return hello.introduction;
}

}  // namespace areal::reshard
