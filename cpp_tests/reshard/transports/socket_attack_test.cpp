// What strangers, and peers gone mad, send to an endpoint.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <future>
#include <random>

#include "../transfer_testing.h"
#include "reshard/transports/sockets.h"

namespace areal::reshard {
namespace {

using namespace areal::reshard::testing;

void send_bytes(const Fd& fd, const void* data, size_t bytes) {
  ASSERT_EQ(send(fd.get(), data, bytes, MSG_NOSIGNAL), static_cast<ssize_t>(bytes));
}

TEST(Strangers, WhoSayNothingHoldUpNobody) {
  TcpTransport first(0, token()), second(1, token());
  const std::map<int32_t, std::string> addresses{{0, first.address()}, {1, second.address()}};
  std::vector<Fd> silent;
  for (int i = 0; i < 20; ++i) {
    silent.push_back(connect_to(second.address(), 1, Deadline(5)));
    if (i % 2 == 1) send_bytes(silent.back(), "areal", 5);
  }
  auto connecting = std::async(std::launch::async, [&] { first.connect(addresses, Deadline(5)); });
  second.connect(addresses, Deadline(5));
  connecting.get();
}

TEST(Strangers, WhoRepeatAHandshakeTheyHaveSeenAreRefused) {
  // What a genuine peer said to an earlier endpoint of the rank, said again to the next.
  std::array<char, 96> said;
  {
    const Listener listener = listen_tcp("127.0.0.1", 0);
    TcpTransport earlier(1, token()), genuine(0, token());
    auto connecting = std::async(std::launch::async, [&] { genuine.connect({{1, listener.address}}, Deadline(5)); });
    auto accepting = std::async(std::launch::async, [&] { earlier.connect({{0, "127.0.0.1:1"}}, Deadline(0.3)); });
    const Fd from = Reception(listener).next("genuine", Deadline(5)),
             to = connect_to(earlier.address(), 1, Deadline(5));
    const auto pass = [](const Fd& a, const Fd& b, char* bytes, size_t count) {
      for (size_t at = 0; at < count;) {
        const ssize_t got = recv(a.get(), bytes + at, count - at, 0);
        at += got > 0 ? static_cast<size_t>(got) : 0;
      }
      send(b.get(), bytes, count, MSG_NOSIGNAL);
    };
    std::array<char, 96> answer;
    pass(from, to, said.data(), 64);
    pass(to, from, answer.data(), 96);
    pass(from, to, said.data() + 64, 32);
    EXPECT_THROW(accepting.get(), DeadlineError);  // of two streams, one came
    shutdown(from.get(), SHUT_RDWR);
    EXPECT_THROW(connecting.get(), PeerError);
  }
  TcpTransport now(1, token());
  auto accepting = std::async(std::launch::async, [&] { now.connect({{0, "127.0.0.1:1"}}, Deadline(0.3)); });
  const Fd again = connect_to(now.address(), 1, Deadline(5));
  send_bytes(again, said.data(), said.size());
  try {
    accepting.get();
    ADD_FAILURE();
  } catch (const DeadlineError& error) {
    EXPECT_STREQ(error.what(), "Transport: no connection from ranks 0 within 0.3 s");
  }
  std::array<char, 256> answer;
  EXPECT_EQ(recv(again.get(), answer.data(), answer.size(), 0), 96) << "no word that it was accepted";
}

// Headers that only a peer which knows the token can send: any field may be anything.
WireHeader random_header(std::mt19937_64& random, uint32_t sequence) {
  WireHeader header{};
  const auto below = [&](uint64_t n) { return random() % n; };
  header.type = static_cast<uint16_t>(below(7));
  header.flags = std::array<uint32_t, 5>{0, 1, 2, kDirect, static_cast<uint32_t>(random())}[below(5)];
  header.epoch = below(3);
  header.plan_digest = random();
  header.source = below(8) == 0 ? static_cast<uint32_t>(random()) : 0;
  header.target = below(8) == 0 ? static_cast<uint32_t>(random()) : 1;
  header.chunk = std::array<uint32_t, 4>{0, 1, 2, static_cast<uint32_t>(random())}[below(4)];
  header.sequence = below(16) == 0 ? static_cast<uint32_t>(random()) : sequence;
  header.length = std::array<uint64_t, 5>{0, 24, 64, 100, random()}[below(5)];
  seal_header(header);
  if (below(16) == 0) reinterpret_cast<std::byte*>(&header)[below(64)] ^= std::byte{1} << below(8);
  return header;
}

// The endpoint as seen by its owner: whatever comes, calls end by themselves and errors are typed.
void use_until_lost(Transport& endpoint) {
  const int32_t peer = 0;
  try {
    while (true) {
      const ReceivedChunk chunk = endpoint.receive({&peer, 1}, Deadline(0.2));
      uint64_t sum = 0;
      for (const std::byte byte : chunk.bytes) sum += static_cast<uint64_t>(byte);
      EXPECT_LE(sum, 255 * chunk.bytes.size());
      endpoint.release(chunk);
    }
  } catch (const CorruptedError&) {
  } catch (const PeerError&) {
  } catch (const DeadlineError&) {
  }
}

template <class MakeEndpoint>
void fuzz_frames(uint64_t seeds, const MakeEndpoint& make) {
  for (uint64_t seed = 0; seed < seeds; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    std::mt19937_64 random(seed);
    const std::unique_ptr<SocketEndpoint> endpoint = make();
    auto using_it = std::async(std::launch::async, [&] {
      endpoint->connect({{0, "127.0.0.1:1"}}, Deadline(10));
      use_until_lost(*endpoint);
    });
    {
      const Fd fd = connect_to(endpoint->address(), 1, Deadline(10));
      introduce(fd, {0, 1, 0, 1}, token(), Deadline(10));
      std::vector<std::byte> payload(200);
      for (uint32_t i = 0; i < 8; ++i) {
        const WireHeader header = random_header(random, i);
        send(fd.get(), &header, sizeof header, MSG_NOSIGNAL | MSG_DONTWAIT);
        for (std::byte& byte : payload) byte = static_cast<std::byte>(random());
        const uint64_t length = random() % 4 == 0 ? random() % 200 : std::min<uint64_t>(header.length, 200);
        send(fd.get(), payload.data(), length, MSG_NOSIGNAL | MSG_DONTWAIT);
      }
    }
    using_it.get();
  }
}

#if defined(__SANITIZE_THREAD__)
constexpr uint64_t kSeeds = 60;
#else
constexpr uint64_t kSeeds = 400;
#endif

TEST(MadPeers, OverTcpAreTypedErrors) {
  TcpOptions options;
  options.streams = 1;
  options.max_chunk_bytes = 1000;
  fuzz_frames(kSeeds, [&] { return std::make_unique<TcpTransport>(1, token(), options); });
}

TEST(MadPeers, OverShmAreTypedErrors) {
  fuzz_frames(kSeeds, [&] { return std::make_unique<ShmTransport>(1, token()); });
}

TEST(Strangers, SayingAnythingAtAllDoNotGetIn) {
  std::mt19937_64 random(1);
  TcpTransport first(0, token()), second(1, token());
  const std::map<int32_t, std::string> addresses{{0, first.address()}, {1, second.address()}};
  auto accepting = std::async(std::launch::async, [&] { second.connect(addresses, Deadline(20)); });
  for (int i = 0; i < 100; ++i) {
    const Fd fd = connect_to(second.address(), 1, Deadline(5));
    std::array<std::byte, 128> bytes{};
    std::memcpy(bytes.data(), "areal-reshard-1", 16);
    const uint32_t introduction[4] = {0, 1, static_cast<uint32_t>(random() % 3), 2};
    std::memcpy(bytes.data() + 16, introduction, sizeof introduction);
    for (size_t at = 32; at < bytes.size(); ++at) bytes[at] = static_cast<std::byte>(random());
    for (uint64_t flips = random() % 3; flips-- > 0;) bytes[random() % 32] ^= std::byte{1} << random() % 8;
    send(fd.get(), bytes.data(), random() % bytes.size() + 1, MSG_NOSIGNAL);
    shutdown(fd.get(), SHUT_WR);
  }
  first.connect(addresses, Deadline(10));
  accepting.get();
}

TEST(Limits, NoDescriptorForSharedMemoryIsSaid) {
  World world(std::make_shared<PlainPlan>(tensor_parallel(0, 1), tensor_parallel(1, 1), 300), Kind::kShmStaged);
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit none{3, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  world.run(1);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_NE(world.error_text(0).find("Too many open files"), std::string::npos) << world.error_text(0);
  EXPECT_TRUE(world.failed_with<PeerError>(1)) << world.error_text(1);
  world.reconnect();
  world.fill(2);
  world.run(2);
  ASSERT_TRUE(world.errors().empty());
  world.check(2);
}

#if !defined(__SANITIZE_THREAD__)
TEST(Limits, AForkMayDropItsCopies) {
  World world(std::make_shared<PlainPlan>(tensor_parallel(0, 1), tensor_parallel(1, 1), 300), Kind::kTcp);
  world.fill(1);
  world.run(1);
  const pid_t child = fork();
  if (child == 0) {
    alarm(10);
    world.endpoints().clear();
    std::_Exit(0);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  world.run(2);
  ASSERT_TRUE(world.errors().empty()) << world.error_text(0);
}
#endif

TEST(Addresses, MustBeReachable) {
  for (const auto& [host, port] : {std::pair{"0.0.0.0", 0}, {"::", 0}, {"127.0.0.1", 65536}, {"127.0.0.1", -1}}) {
    TcpOptions options;
    options.host = host;
    options.port = port;
    EXPECT_THROW(TcpTransport(0, token(), options), Error) << host << " " << port;
  }
  EXPECT_THROW(connect_to("127.0.0.1:70000", 1, Deadline(1)), Error);
  TcpOptions taken;
  const TcpTransport first(0, token());
  taken.port = std::stoi(first.address().substr(first.address().rfind(':') + 1));
  try {
    TcpTransport second(1, token(), taken);
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "Transport: expected to listen at 127.0.0.1, got Address already in use");
  }
}

}  // namespace
}  // namespace areal::reshard
