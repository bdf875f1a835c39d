#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <future>

#include "../transfer_testing.h"
#include "reshard/transports/hmac.h"
#include "reshard/transports/mailbox.h"
#include "reshard/transports/sockets.h"

namespace areal::reshard {
namespace {

using namespace areal::reshard::testing;

std::string hex(const Digest& digest) {
  std::string text;
  for (const std::byte byte : digest) {
    text += "0123456789abcdef"[static_cast<uint8_t>(byte) >> 4];
    text += "0123456789abcdef"[static_cast<uint8_t>(byte) & 15];
  }
  return text;
}

std::vector<std::byte> bytes_of_text(const std::string& text) {
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

TEST(Hmac, EqualsTheStandardsExamples) {
  // FIPS 180-4 examples
  EXPECT_EQ(hex(sha256({})), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(hex(sha256(bytes_of_text("abc"))), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(hex(sha256(bytes_of_text("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"))),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  // RFC 4231, cases 1, 2 and 6
  EXPECT_EQ(hex(hmac_sha256(std::vector<std::byte>(20, std::byte{0x0b}), bytes_of_text("Hi There"))),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(hex(hmac_sha256(bytes_of_text("Jefe"), bytes_of_text("what do ya want for nothing?"))),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(hex(hmac_sha256(std::vector<std::byte>(131, std::byte{0xaa}),
                            bytes_of_text("Test Using Larger Than Block-Size Key - Hash Key First"))),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  Digest a = sha256({}), b = a;
  EXPECT_TRUE(equal_digests(a, b));
  b[31] ^= std::byte{1};
  EXPECT_FALSE(equal_digests(a, b));
}

TEST(Mailbox, RefusesWhatNoPeerMaySay) {
  Mailbox mailbox(1);
  mailbox.add_peer(0);
  WireHeader header{};
  header.source = 0;
  header.target = 1;
  header.type = static_cast<uint16_t>(WireType::kCredit);
  EXPECT_THROW(mailbox.arrived(0, {header, {}}), CorruptedError) << "nothing is in flight";
  header.flags = kDirect;
  EXPECT_THROW(mailbox.arrived(0, {header, {}}), CorruptedError);
  header.flags = mailbox.take_slot(0, Deadline(1));
  mailbox.arrived(0, {header, {}});
  EXPECT_THROW(mailbox.arrived(0, {header, {}}), CorruptedError) << "a credit given twice";
  header.type = 77;
  EXPECT_THROW(mailbox.arrived(0, {header, {}}), CorruptedError);
  header.type = static_cast<uint16_t>(WireType::kData);
  header.source = 2;
  EXPECT_THROW(mailbox.arrived(0, {header, {}}), CorruptedError) << "in another's name";
  header.source = 0;
  header.target = 2;
  EXPECT_THROW(mailbox.arrived(0, {header, {}}), CorruptedError) << "for another";
  EXPECT_THROW(mailbox.take_slot(9, Deadline(1)), Error);
}

TEST(Inproc, HasOneEndpointPerRank) {
  InprocGroup group({0, 1});
  const auto endpoint = group.endpoint(0, {});
  EXPECT_THROW(group.endpoint(0, {}), Error);
  EXPECT_THROW(group.endpoint(2, {}), Error);
  EXPECT_THROW(InprocGroup({3, 3}), Error);
}

TEST(Sockets, RefuseAddressesAndOptionsThatMakeNoSense) {
  for (const char* address :
       {"", "localhost", "127.0.0.1", "127.0.0.1:", "127.0.0.1:x1", "host:80", "127.0.0.1:123456"}) {
    EXPECT_THROW(connect_to(address, 1, Deadline(1)), Error) << address;
  }
  EXPECT_THROW(TcpTransport(0, token("too short")), Error);
  EXPECT_THROW(TcpTransport(-1, token()), Error);
  TcpOptions options;
  options.streams = 0;
  EXPECT_THROW(TcpTransport(0, token(), options), Error);
  options = {};
  options.host = "not a host";
  EXPECT_THROW(TcpTransport(0, token(), options), Error);
  EXPECT_THROW(ShmTransport(0, token(), {{0, 0, 1}}), Error) << "no sealed memfd";
  const SharedMemory memory = SharedMemory::create("areal-test", 4096);
  EXPECT_THROW(ShmTransport(0, token(), {{memory.fd(), 4000, 97}}), Error);
  EXPECT_THROW(ShmTransport(0, token(), {{memory.fd(), -1, 1}}), Error);
  EXPECT_NO_THROW(ShmTransport(0, token(), {{memory.fd(), 4000, 96}}));
}

TEST(Sockets, ListenOnIpv6) {
  TcpOptions options;
  options.host = "::1";
  std::optional<TcpTransport> first;
  try {
    first.emplace(0, token(), options);
  } catch (const Error&) {
    GTEST_SKIP() << "this machine has no IPv6";
  }
  TcpTransport second(1, token(), options);
  const std::map<int32_t, std::string> addresses{{0, first->address()}, {1, second.address()}};
  auto connecting = std::async(std::launch::async, [&] { first->connect(addresses, Deadline(10)); });
  second.connect(addresses, Deadline(10));
  connecting.get();
}

TEST(Sockets, AForeignTokenIsRefusedOnBothSides) {
  TcpTransport first(0, token("one token of sixteen")), second(1, token("another one of sixteen"));
  const std::map<int32_t, std::string> addresses{{0, first.address()}, {1, second.address()}};
  auto connecting = std::async(std::launch::async, [&] { first.connect(addresses, Deadline(10)); });
  try {
    second.connect(addresses, Deadline(0.3));
    ADD_FAILURE();
  } catch (const DeadlineError& error) {
    EXPECT_STREQ(error.what(), "Transport: no connection from ranks 0 within 0.3 s");
  }
  EXPECT_THROW(connecting.get(), PeerError);
}

TEST(Sockets, RanksMustAgreeOnStreams) {
  TcpOptions two, three;
  three.streams = 3;
  TcpTransport first(0, token(), two), second(1, token(), three);
  const std::map<int32_t, std::string> addresses{{0, first.address()}, {1, second.address()}};
  auto connecting = std::async(std::launch::async, [&] { first.connect(addresses, Deadline(10)); });
  EXPECT_THROW(second.connect(addresses, Deadline(0.3)), DeadlineError);
  EXPECT_THROW(connecting.get(), PeerError);
}

TEST(Sockets, StrangersDoNotDisturbThoseWhoAreExpected) {
  TcpTransport first(0, token()), second(1, token());
  const std::map<int32_t, std::string> addresses{{0, first.address()}, {1, second.address()}};
  const Fd garbage = connect_to(second.address(), 1, Deadline(5));
  const std::string text(96, 'x');
  ASSERT_EQ(send(garbage.get(), text.data(), text.size(), MSG_NOSIGNAL), 96);
  {
    const Fd gone_at_once = connect_to(second.address(), 1, Deadline(5));
  }
  auto connecting = std::async(std::launch::async, [&] { first.connect(addresses, Deadline(10)); });
  second.connect(addresses, Deadline(10));
  connecting.get();
}

TEST(Sockets, NobodyThereIsADeadline) {
  TcpTransport first(0, token());
  std::string address;
  {
    const TcpTransport gone(1, token());
    address = gone.address();
  }
  EXPECT_THROW(first.connect({{1, address}}, Deadline(0.05)), DeadlineError);
}

// Passes bytes on between two sockets, flipping one bit of what the connecting side sends.
class Proxy {
 public:
  Proxy(std::string target, int64_t bit)
      : listener_(listen_tcp("127.0.0.1", 0)), target_(std::move(target)), bit_(bit) {
    thread_ = std::thread([this] { run(); });
  }
  ~Proxy() {
    stop_ = true;
    thread_.join();
  }
  const std::string& address() const { return listener_.address; }

 private:
  void run() {
    struct Stopped {};
    const Deadline deadline(60, [&] {
      if (stop_) throw Stopped{};
    });
    try {
      const Fd from = Reception(listener_).next("the test", deadline), to = connect_to(target_, 1, deadline);
      int64_t at = 0;
      while (pass(from, to, &at, deadline) && pass(to, from, nullptr, deadline)) {
      }
    } catch (const Stopped&) {
    }
  }

  // False at the end of the stream.
  bool pass(const Fd& from, const Fd& to, int64_t* at, const Deadline& deadline) {
    deadline.interrupt();
    pollfd entry{from.get(), POLLIN, 0};
    if (poll(&entry, 1, 1) <= 0) return true;
    std::array<std::byte, 4096> bytes;
    const ssize_t got = recv(from.get(), bytes.data(), bytes.size(), 0);
    if (got <= 0) return false;
    if (at != nullptr) {
      if (bit_ / 8 >= *at && bit_ / 8 < *at + got)
        bytes[static_cast<size_t>(bit_ / 8 - *at)] ^= std::byte{1} << bit_ % 8;
      *at += got;
    }
    return send(to.get(), bytes.data(), static_cast<size_t>(got), MSG_NOSIGNAL) == got;
  }

  Listener listener_;
  std::string target_;
  int64_t bit_;
  std::atomic<bool> stop_ = false;
  std::thread thread_;
};

std::shared_ptr<const Layout> one_tensor(int32_t rank, int64_t elements) {
  return std::make_shared<Layout>(std::vector<Mesh>{Mesh({rank}, {1}, {"one"})},
                                  std::vector<TensorLayout>{{{"w", "uint8", 1, {elements}}, 0, {Replicate{}}, {}}});
}

TEST(Tcp, RejectsAFlippedBitInAnyByteOnTheWire) {
  constexpr int64_t kHandshakeBytes = 64 + 32, kHeaderBytes = 64, kPayloadBytes = 24;
  const auto plan = std::make_shared<PlainPlan>(one_tensor(0, kPayloadBytes), one_tensor(1, kPayloadBytes), 1000);
  RankMemory source(plan->source().storage(0)), target(plan->target().storage(1));
  TcpOptions options;
  options.streams = 1;
#if defined(__SANITIZE_THREAD__)
  constexpr int64_t kStep = 7;
#else
  constexpr int64_t kStep = 1;
#endif
  struct SenderFailed {};
  for (int64_t byte = 0; byte < kHandshakeBytes + kHeaderBytes + kPayloadBytes; byte += kStep) {
    SCOPED_TRACE(::testing::Message() << "byte " << byte);
    auto first = std::make_shared<TcpTransport>(0, token(), options);
    auto second = std::make_shared<TcpTransport>(1, token(), options);
    const Proxy proxy(second->address(), byte * 8 + byte % 8);
    std::atomic<bool> sender_failed = false;
    const Deadline until_then(30, [&] {
      if (sender_failed) throw SenderFailed{};
    });
    auto receiving = std::async(std::launch::async, [&] {
      second->connect({{0, first->address()}}, byte < kHandshakeBytes ? until_then : Deadline(30));
      BoundBuffers buffers;
      buffers.target = target.spans();
      Executor(plan, 1, second).run(1, buffers, Deadline(10));
    });
    const auto send = [&] {
      first->connect({{1, proxy.address()}}, Deadline(10));
      BoundBuffers buffers;
      for (const auto span : source.spans()) buffers.source.push_back(span);
      Executor(plan, 0, first).run(1, buffers, Deadline(10));
    };
    EXPECT_THROW(send(), PeerError);
    sender_failed = true;
    if (byte < kHandshakeBytes) {
      EXPECT_THROW(receiving.get(), SenderFailed);
    } else {
      EXPECT_THROW(receiving.get(), CorruptedError);
    }
  }
}

TEST(Tcp, RefusesAChunkThatIsTooLong) {
  TcpOptions small;
  small.max_chunk_bytes = 100;
  TcpTransport first(0, token()), second(1, token(), small);
  const std::map<int32_t, std::string> addresses{{0, first.address()}, {1, second.address()}};
  in_threads(std::vector<int32_t>{0, 1},
             [&](int32_t rank) { (rank == 0 ? first : second).connect(addresses, Deadline(10)); });
  WireHeader header{};
  header.length = 101;
  first.acquire(1, 101, Deadline(10));
  first.post(1, header);
  const int32_t peer = 0;
  EXPECT_THROW(second.receive({&peer, 1}, Deadline(10)), CorruptedError);
  EXPECT_THROW(second.acquire(0, 101, Deadline(10)), Error);
}

TEST(Tcp, RefusesHeadersOutOfTheirSequence) {
  TcpOptions options;
  options.streams = 1;
  TcpTransport second(1, token(), options);
  auto raw = std::async(std::launch::async, [&] {
    Fd fd = connect_to(second.address(), 1, Deadline(10));
    introduce(fd, {0, 1, 0, 1}, token(), Deadline(10));
    for (const uint32_t sequence : {0u, 0u}) {
      WireHeader grant{};
      grant.type = static_cast<uint16_t>(WireType::kGrant);
      grant.target = 1;
      grant.sequence = sequence;
      seal_header(grant);
      send(fd.get(), &grant, sizeof grant, MSG_NOSIGNAL);
    }
    return fd;
  });
  second.connect({{0, "127.0.0.1:1"}}, Deadline(10));
  const Fd fd = raw.get();
  EXPECT_NO_THROW(second.await_grant(0, Deadline(10)));
  try {
    second.await_grant(0, Deadline(10));
    ADD_FAILURE() << "took a header twice";
  } catch (const CorruptedError& error) {
    EXPECT_NE(std::string(error.what()).find("expected sequence = 1, got 0"), std::string::npos) << error.what();
  }
}

size_t open_descriptors() {
  const auto entries = std::filesystem::directory_iterator("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin(entries), end(entries)));
}

TEST(Transports, LeaveNoDescriptorBehind) {
  const size_t before = open_descriptors();
  for (const Kind kind : {Kind::kInproc, Kind::kShm, Kind::kShmStaged, Kind::kTcp}) {
    World world(std::make_shared<PlainPlan>(tensor_parallel(0, 2), tensor_parallel(2, 2), 300), kind);
    world.fill(1);
    world.run(1);
    ASSERT_TRUE(world.errors().empty());
    const size_t connected = open_descriptors();
    for (uint64_t epoch = 2; epoch < 20; ++epoch) world.run(epoch);
    EXPECT_EQ(open_descriptors(), connected) << kind_name(kind);
    world.endpoints().at(3)->cancel();
    world.run(20);
    EXPECT_FALSE(world.errors().empty());
    world.reconnect();
    EXPECT_LE(open_descriptors(), connected) << kind_name(kind);
    world.run(21);
    ASSERT_TRUE(world.errors().empty()) << world.error_text(0);
    world.check(1);
  }
  EXPECT_EQ(open_descriptors(), before);
}

}  // namespace
}  // namespace areal::reshard
