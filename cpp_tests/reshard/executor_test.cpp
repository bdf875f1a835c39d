#include "reshard/executor.h"

#include <gtest/gtest.h>

#include <future>

#include "transfer_testing.h"

namespace areal::reshard {
namespace {

using namespace areal::reshard::testing;

#if defined(__SANITIZE_THREAD__)
constexpr uint64_t kManyUpdates = 20;
constexpr int64_t kBitStep = 13;
#else
constexpr uint64_t kManyUpdates = 100;
constexpr int64_t kBitStep = 1;
#endif

class EveryTransport : public ::testing::TestWithParam<Kind> {};

void round_trip(Kind kind, const std::shared_ptr<const Layout>& source, const std::shared_ptr<const Layout>& target,
                int64_t chunk_bytes, const ExecutorOptions& options = {}) {
  World world(std::make_shared<PlainPlan>(source, target, chunk_bytes), kind, options);
  for (uint64_t epoch = 1; epoch <= 3; ++epoch) {
    world.fill(epoch);
    const auto stats = world.run(epoch);
    for (const int32_t rank : world.ranks()) ASSERT_EQ(world.error_text(rank), "") << "rank " << rank;
    world.check(epoch);
    int64_t sent = 0, received = 0;
    uint64_t sent_checksum = 0, received_checksum = 0;
    for (const auto& [rank, one] : stats) {
      sent += one.sent_bytes;
      received += one.received_bytes;
      sent_checksum += one.sent_checksum;
      received_checksum += one.received_checksum;
      EXPECT_EQ(world.executor(rank).done_bytes(), world.executor(rank).total_bytes());
      EXPECT_EQ(one.epoch, epoch);
    }
    EXPECT_GT(sent, 0);
    EXPECT_EQ(sent, received);
    EXPECT_EQ(sent_checksum, received_checksum);
  }
}

TEST_P(EveryTransport, MovesEveryElementWhereItBelongs) {
  for (const int64_t chunk_bytes : {int64_t{96}, int64_t{1} << 20}) {
    round_trip(GetParam(), tensor_parallel(0, 2), tensor_parallel(2, 4), chunk_bytes);
    round_trip(GetParam(), tensor_parallel(0, 4), tensor_parallel(4, 3), chunk_bytes);
    round_trip(GetParam(), flat(0, 4), tensor_parallel(4, 2), chunk_bytes);
    round_trip(GetParam(), tensor_parallel(0, 2), flat(2, 3), chunk_bytes);
    if (HasFatalFailure()) return;
  }
}

TEST_P(EveryTransport, MovesElementsOfAnySize) {
  for (const int64_t item_bytes : {1, 4, 8}) {
    round_trip(GetParam(), flat(0, 2, item_bytes), tensor_parallel(2, 2, item_bytes), 500);
  }
}

TEST_P(EveryTransport, MovesAmongRanksThatAreOnBothSides) {
  round_trip(GetParam(), tensor_parallel(0, 4), tensor_parallel(2, 4), 300);
  round_trip(GetParam(), flat(0, 3), tensor_parallel(0, 3), 300);
}

TEST_P(EveryTransport, MovesWithSeveralThreads) {
  ExecutorOptions options;
  options.threads = 3;
  options.read_back = true;
  round_trip(GetParam(), flat(0, 3), tensor_parallel(3, 4), 128, options);
}

TEST_P(EveryTransport, PassesOnWhatItReceived) {
  auto plan = std::make_shared<PlainPlan>(tensor_parallel(0, 2), flat(2, 1), 200);
  const auto two = std::make_shared<Layout>(std::vector<Mesh>{Mesh({2, 3}, {2}, {"dp"})}, [&] {
    std::vector<TensorLayout> tensors = plan->target().tensors();
    for (TensorLayout& tensor : tensors) tensor.placements = {Replicate{}};
    return tensors;
  }());
  plan = std::make_shared<PlainPlan>(tensor_parallel(0, 2), two, 200);
  plan->pass_on(2, 3);
  World world(plan, GetParam());
  for (uint64_t epoch = 1; epoch <= 3; ++epoch) {
    world.fill(epoch);
    world.run(epoch);
    for (const int32_t rank : world.ranks()) ASSERT_EQ(world.error_text(rank), "");
    world.check(epoch);
  }
}

TEST_P(EveryTransport, HoldsAtMostTwoChunksPerPeerAndDirection) {
  const int64_t chunk_bytes = 256;
  World world(std::make_shared<PlainPlan>(tensor_parallel(0, 2), tensor_parallel(2, 3), chunk_bytes), GetParam());
  int64_t most = 0;
  for (uint64_t epoch = 1; epoch <= kManyUpdates; ++epoch) {
    if (epoch == kManyUpdates) world.fill(epoch);
    for (const auto& [rank, stats] : world.run(epoch)) {
      const bool sends = rank < 2;
      EXPECT_LE(stats.staging_bytes, (sends ? 3 : 2) * kChunksInFlight * chunk_bytes);
      most = std::max(most, stats.staging_bytes);
    }
    ASSERT_TRUE(world.errors().empty());
  }
  world.check(kManyUpdates);
  EXPECT_EQ(most > 0, GetParam() != Kind::kInproc && GetParam() != Kind::kShm);
}

TEST_P(EveryTransport, RefusesAnotherEpochAndAnotherPlan) {
  const auto source = tensor_parallel(0, 1), target = tensor_parallel(1, 1);
  for (const bool other_plan : {false, true}) {
    World world(std::make_shared<PlainPlan>(source, target, 300), GetParam());
    const auto theirs = std::make_shared<PlainPlan>(source, target, 300, other_plan ? 0x9999 : 0x1234);
    Executor receiver(theirs, 1, world.endpoints().at(1));
    world.fill(1);
    auto receiving =
        std::async(std::launch::async, [&] { receiver.run(other_plan ? 1 : 2, world.buffers(1), Deadline(30)); });
    try {
      world.executor(0).run(1, world.buffers(0), Deadline(30));
      ADD_FAILURE() << "sent to a rank that expects something else";
    } catch (const PeerError& error) {
      EXPECT_NE(std::string(error.what()).find("expected rank 1 to receive epoch 1"), std::string::npos)
          << error.what();
    }
    EXPECT_THROW(receiving.get(), PeerError);
    EXPECT_THROW(world.executor(0).run(2, world.buffers(0), Deadline(30)), CancelledError);
  }
}

TEST_P(EveryTransport, EveryWaitHasADeadline) {
  World world(std::make_shared<PlainPlan>(tensor_parallel(0, 1), tensor_parallel(1, 1), 300), GetParam());
  try {
    world.executor(0).run(1, world.buffers(0), Deadline(0.05));
    ADD_FAILURE();
  } catch (const DeadlineError& error) {
    EXPECT_STREQ(error.what(), "rank 0: no grant from rank 1 within 0.05 s");
  }
  world.reconnect();
  try {
    world.executor(1).run(1, world.buffers(1), Deadline(0.05));
    ADD_FAILURE();
  } catch (const DeadlineError& error) {
    EXPECT_STREQ(error.what(), "rank 1: no chunk from rank 0 within 0.05 s");
  }
  world.reconnect();
  // A receiver that grants and then does nothing: credits run out, or are awaited at the end.
  WireHeader grant{};
  grant.epoch = 1;
  grant.plan_digest = world.plan()->digest();
  world.endpoints().at(1)->grant(0, grant);
  try {
    world.executor(0).run(1, world.buffers(0), Deadline(0.05));
    ADD_FAILURE();
  } catch (const DeadlineError& error) {
    EXPECT_NE(std::string(error.what()).find("rank 0: no credit"), std::string::npos) << error.what();
  }
}

TEST_P(EveryTransport, EveryWaitCanBeCancelled) {
  for (const int32_t rank : {0, 1}) {
    World world(std::make_shared<PlainPlan>(tensor_parallel(0, 1), tensor_parallel(1, 1), 300), GetParam());
    auto waiting =
        std::async(std::launch::async, [&] { world.executor(rank).run(1, world.buffers(rank), Deadline(60)); });
    world.executor(rank).cancel();
    EXPECT_THROW(waiting.get(), CancelledError);
    EXPECT_THROW(world.executor(1 - rank).run(1, world.buffers(1 - rank), Deadline(30)), PeerError);
    world.reconnect();
    world.fill(2);
    world.run(2);
    ASSERT_TRUE(world.errors().empty()) << world.error_text(0) << world.error_text(1);
    world.check(2);
  }
}

TEST_P(EveryTransport, AnInterruptEndsARun) {
  World world(std::make_shared<PlainPlan>(flat(0, 2), flat(0, 2), 300), GetParam());
  struct Interrupted {};
  int calls = 0;
  const Deadline deadline(60, [&] {
    if (++calls == 2) throw Interrupted{};
  });
  World colocated(std::make_shared<PlainPlan>(flat(0, 2), tensor_parallel(0, 2), 300), GetParam());
  EXPECT_THROW(colocated.executor(0).run(1, colocated.buffers(0), deadline), Interrupted);
}

TEST_P(EveryTransport, APeerThatGoesIsAnErrorThatNamesIt) {
  World world(std::make_shared<PlainPlan>(tensor_parallel(0, 2), tensor_parallel(2, 2), 300), GetParam());
  world.fill(1);
  world.endpoints().at(3)->cancel();
  world.run(1);
  EXPECT_TRUE(world.failed_with<CancelledError>(3));
  for (const int32_t rank : {0, 1}) {
    EXPECT_TRUE(world.failed_with<PeerError>(rank)) << world.error_text(rank);
  }
  EXPECT_NE((world.error_text(0) + world.error_text(1)).find("lost rank 3"), std::string::npos);
  world.reconnect();
  world.run(2);
  ASSERT_TRUE(world.errors().empty());
  world.check(1);
}

TEST_P(EveryTransport, ADelayedReceiverGetsAllOfBothUpdates) {
  // Two updates; rank 1 starts each late. Acknowledging before the copy would let the second overwrite the first.
  World world(std::make_shared<PlainPlan>(tensor_parallel(0, 1), tensor_parallel(1, 2), 64), GetParam());
  for (uint64_t epoch = 1; epoch <= 2; ++epoch) {
    world.fill(epoch);
    std::promise<void> others_started;
    auto late = std::async(std::launch::async, [&] {
      others_started.get_future().wait();
      return world.executor(1).run(epoch, world.buffers(1), Deadline(30));
    });
    auto early =
        std::async(std::launch::async, [&] { return world.executor(2).run(epoch, world.buffers(2), Deadline(30)); });
    auto sender =
        std::async(std::launch::async, [&] { return world.executor(0).run(epoch, world.buffers(0), Deadline(30)); });
    others_started.set_value();
    sender.get();
    // The sender returned: both hold everything, whether their own run has returned or not.
    world.check(epoch);
    late.get();
    early.get();
  }
}

INSTANTIATE_TEST_SUITE_P(All, EveryTransport,
                         ::testing::Values(Kind::kInproc, Kind::kInprocStaged, Kind::kShm, Kind::kShmStaged,
                                           Kind::kTcp),
                         [](const auto& info) { return kind_name(info.param); });

TEST(Executor, NamesTheBufferWhoseMemoryDoesNotFit) {
  World world(std::make_shared<PlainPlan>(tensor_parallel(0, 1), tensor_parallel(1, 1), 300), Kind::kInproc);
  BoundBuffers buffers = world.buffers(1);
  buffers.target[1] = buffers.target[1].first(10);
  try {
    world.executor(1).run(1, buffers, Deadline(1));
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "Executor: target buffer 'embed': expected 4992 bytes, got 10");
  }
  buffers.target.pop_back();
  EXPECT_THROW(world.executor(1).run(1, buffers, Deadline(1)), Error);
}

// Passes on what another receives, with one bit flipped.
class Flipping final : public Transport {
 public:
  Flipping(std::shared_ptr<Transport> inner, int64_t bit) : inner_(std::move(inner)), bit_(bit) {}
  ReceivedChunk receive(std::span<const int32_t> peers, const Deadline& deadline) override {
    chunk_ = inner_->receive(peers, deadline);
    ReceivedChunk flipped = chunk_;
    payload_.assign(chunk_.bytes.begin(), chunk_.bytes.end());
    auto* header = reinterpret_cast<std::byte*>(&flipped.header);
    const auto at = static_cast<size_t>(bit_ / 8), header_bytes = sizeof(WireHeader);
    std::byte& byte = at < header_bytes ? header[at] : payload_.at(at - header_bytes);
    byte ^= std::byte{1} << bit_ % 8;
    check_header(flipped.header);  // as every transport does for what comes through a socket
    flipped.bytes = payload_;
    return flipped;
  }
  const char* name() const override { return "flipping"; }
  int32_t rank() const override { return inner_->rank(); }
  void grant(int32_t peer, const WireHeader& header) override { inner_->grant(peer, header); }
  void release(const ReceivedChunk&) override { inner_->release(chunk_); }
  bool exposes_buffers() const override { return inner_->exposes_buffers(); }
  WireHeader await_grant(int32_t peer, const Deadline& deadline) override {
    return inner_->await_grant(peer, deadline);
  }
  std::vector<std::span<std::byte>> remote_buffers(int32_t peer) override { return inner_->remote_buffers(peer); }
  std::span<std::byte> acquire(int32_t peer, int64_t bytes, const Deadline& deadline) override {
    return inner_->acquire(peer, bytes, deadline);
  }
  void post(int32_t peer, const WireHeader& header) override { inner_->post(peer, header); }
  void post_direct(int32_t peer, const WireHeader& header) override { inner_->post_direct(peer, header); }
  void drain(int32_t peer, const Deadline& deadline) override { inner_->drain(peer, deadline); }
  int64_t staging_bytes() const override { return inner_->staging_bytes(); }
  void cancel() override { inner_->cancel(); }

 private:
  std::shared_ptr<Transport> inner_;
  int64_t bit_;
  ReceivedChunk chunk_{};
  std::vector<std::byte> payload_;
};

std::shared_ptr<const Layout> one_tensor(int32_t rank, int64_t elements) {
  return std::make_shared<Layout>(std::vector<Mesh>{Mesh({rank}, {1}, {"one"})},
                                  std::vector<TensorLayout>{{{"w", "uint8", 1, {elements}}, 0, {Replicate{}}, {}}});
}

TEST(Executor, RejectsEveryFlippedBitOfHeaderAndPayload) {
  constexpr int64_t kBytes = 40;
  for (int64_t bit = 0; bit < 8 * (64 + kBytes); bit += kBitStep) {
    World world(std::make_shared<PlainPlan>(one_tensor(0, kBytes), one_tensor(1, kBytes), 1000), Kind::kInprocStaged);
    world.fill(1);
    Executor receiver(world.plan(), 1, std::make_shared<Flipping>(world.endpoints().at(1), bit));
    auto sending = std::async(std::launch::async, [&] { world.executor(0).run(1, world.buffers(0), Deadline(30)); });
    ASSERT_THROW(receiver.run(1, world.buffers(1), Deadline(30)), CorruptedError) << "bit " << bit;
    ASSERT_THROW(sending.get(), PeerError);
  }
}

TEST(Executor, ReadBackSeesMemoryThatChangedAfterItWasWritten) {
  constexpr int64_t kBytes = 40;
  World world(std::make_shared<PlainPlan>(one_tensor(0, kBytes), one_tensor(1, kBytes), 1000), Kind::kInproc);
  world.fill(1);
  // The sender's part by hand: the bytes are right when hashed, and wrong when the header arrives.
  ExecutorOptions options;
  options.read_back = true;
  Executor receiver(world.plan(), 1, world.endpoints().at(1), options);
  auto receiving = std::async(std::launch::async, [&] { receiver.run(1, world.buffers(1), Deadline(30)); });
  Transport& sender = *world.endpoints().at(0);
  const WireHeader grant = sender.await_grant(1, Deadline(30));
  std::byte* remote = sender.remote_buffers(1).at(grant.chunk).data();
  WireHeader header{};
  header.epoch = 1;
  header.plan_digest = world.plan()->digest();
  header.xxh3_64 = xxh3_64(remote, kBytes);
  remote[17] ^= std::byte{4};
  sender.post_direct(1, header);
  EXPECT_THROW(receiving.get(), CorruptedError);
}

TEST(Executor, RefusesChunksThatItsPlanDoesNotExpect) {
  const auto refused = [](const std::function<void(WireHeader&)>& change) {
    World world(std::make_shared<PlainPlan>(one_tensor(0, 100), one_tensor(1, 100), 1000), Kind::kInprocStaged);
    auto receiving = std::async(std::launch::async, [&] { world.executor(1).run(7, world.buffers(1), Deadline(30)); });
    Transport& sender = *world.endpoints().at(0);
    sender.await_grant(1, Deadline(30));
    const auto slot = sender.acquire(1, 200, Deadline(30));
    WireHeader header{};
    header.epoch = 7;
    header.plan_digest = world.plan()->digest();
    header.length = 100;
    header.xxh3_64 = xxh3_64(slot.data(), 100);
    change(header);
    sender.post(1, header);
    try {
      receiving.get();
      return std::string();
    } catch (const CorruptedError& error) {
      return std::string(error.what());
    }
  };
  EXPECT_EQ(refused([](WireHeader&) {}), "");
  EXPECT_EQ(refused([](WireHeader& h) { h.epoch = 6; }), "rank 1: chunk from rank 0: expected epoch = 7, got 6");
  EXPECT_EQ(refused([](WireHeader& h) { h.chunk = 1; }), "rank 1: chunk from rank 0: expected chunk = 0, got 1");
  EXPECT_EQ(refused([](WireHeader& h) { h.length = 99; }), "rank 1: chunk from rank 0: expected length = 100, got 99");
  EXPECT_EQ(refused([](WireHeader& h) { h.length = 0; }), "rank 1: chunk from rank 0: expected length = 100, got 0");
  EXPECT_NE(refused([](WireHeader& h) { h.plan_digest = 1; }).find("expected plan_digest"), std::string::npos);
  EXPECT_NE(refused([](WireHeader& h) { h.xxh3_64 ^= 1; }).find("expected xxh3_64"), std::string::npos);
}

TEST(Executor, RefusesChunksFromAPeerThatOwesNone) {
  World world(std::make_shared<PlainPlan>(tensor_parallel(0, 1), tensor_parallel(1, 2), 1000), Kind::kInprocStaged);
  auto receiving = std::async(std::launch::async, [&] { world.executor(1).run(1, world.buffers(1), Deadline(30)); });
  Transport& stranger = *world.endpoints().at(2);
  stranger.acquire(1, 10, Deadline(30));
  WireHeader header{};
  header.length = 10;
  stranger.post(1, header);
  EXPECT_THROW(receiving.get(), CorruptedError);
}

TEST(Executor, FramesCarryWhatMessagesDo) {
  World world(std::make_shared<PlainPlan>(flat(0, 1), tensor_parallel(1, 1), 200), Kind::kInproc);
  world.fill(5);
  Executor &sender = world.executor(0), &receiver = world.executor(1);
  sender.begin(world.buffers(0));
  receiver.begin(world.buffers(1));
  ASSERT_EQ(sender.sends().size(), 1u);
  const MessageProgram &sent = sender.sends()[0], &received = receiver.receives()[0];
  for (size_t i = 0; i < sent.chunks.size(); ++i) {
    std::vector<std::byte> frame(sizeof(WireHeader) + static_cast<size_t>(sent.chunks[i].bytes));
    sender.pack_frame(sent, sent.chunks[i], 5, frame.data(), world.buffers(0));
    EXPECT_THROW(receiver.unpack_frame(received, received.chunks[i], 6, frame.data(), world.buffers(1)),
                 CorruptedError);
    receiver.unpack_frame(received, received.chunks[i], 5, frame.data(), world.buffers(1));
    frame.back() ^= std::byte{1};
    EXPECT_THROW(receiver.unpack_frame(received, received.chunks[i], 5, frame.data(), world.buffers(1)),
                 CorruptedError);
    frame.back() ^= std::byte{1};
    receiver.unpack_frame(received, received.chunks[i], 5, frame.data(), world.buffers(1));
  }
  world.check(5);
}

}  // namespace
}  // namespace areal::reshard
