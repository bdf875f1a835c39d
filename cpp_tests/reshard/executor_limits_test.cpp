// What executors refuse, and how they stop.
#include <gtest/gtest.h>

#include <cmath>
#include <future>

#include "transfer_testing.h"

namespace areal::reshard {
namespace {

using namespace areal::reshard::testing;

// One tensor for each size, on one rank.
std::shared_ptr<const Layout> tensors(int32_t rank, const std::vector<int64_t>& sizes) {
  std::vector<TensorLayout> layouts;
  for (size_t i = 0; i < sizes.size(); ++i) {
    layouts.push_back({{"w" + std::to_string(i), "uint8", 1, {sizes[i]}}, 0, {Replicate{}}, {}});
  }
  return std::make_shared<Layout>(std::vector<Mesh>{Mesh({rank}, {1}, {"one"})}, layouts);
}

std::string text_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(ExecutorLimits, NothingIsWrittenToExposedMemoryOfAnotherSize) {
  const auto plan = std::make_shared<PlainPlan>(tensors(0, {100, 50}), tensors(1, {100, 50}), 1000);
  RankMemory source(plan->source().storage(0)), target(plan->target().storage(1));
  InprocGroup group({0, 1});
  auto exposed = target.spans();
  std::swap(exposed[0], exposed[1]);
  std::shared_ptr<Transport> sending = group.endpoint(0, {}), receiving = group.endpoint(1, exposed);
  BoundBuffers from, to;
  for (const auto span : source.spans()) from.source.push_back(span);
  to.target = target.spans();
  auto received = std::async(std::launch::async, [&] { Executor(plan, 1, receiving).run(1, to, Deadline(30)); });
  EXPECT_EQ(text_of([&] { Executor(plan, 0, sending).run(1, from, Deadline(30)); }),
            "rank 0: expected rank 1 to expose 100 bytes as buffer 0, got 50");
  EXPECT_THROW(received.get(), PeerError);
  for (const auto span : target.spans()) {
    EXPECT_TRUE(std::ranges::all_of(span, [](std::byte b) { return b == kGarbage; }));
  }
}

TEST(ExecutorLimits, AnEmptyBufferDoesNotHideThoseAfterIt) {
  World world(std::make_shared<PlainPlan>(tensors(0, {0, 100}), tensors(1, {0, 100}), 1000), Kind::kInproc);
  world.fill(1);
  const auto stats = world.run(1);
  ASSERT_TRUE(world.errors().empty());
  EXPECT_EQ(stats.at(0).direct_bytes, 100);
  world.check(1);
}

TEST(ExecutorLimits, AChunkIsNotDirectWhereNothingIsExposed) {
  World world(std::make_shared<PlainPlan>(tensors(0, {100}), tensors(1, {100}), 1000), Kind::kInprocStaged);
  auto receiving = std::async(std::launch::async, [&] { world.executor(1).run(1, world.buffers(1), Deadline(30)); });
  Transport& sender = *world.endpoints().at(0);
  sender.await_grant(1, Deadline(30));
  WireHeader header{};
  header.epoch = 1;
  header.plan_digest = world.plan()->digest();
  header.length = 100;
  sender.post_direct(1, header);
  EXPECT_EQ(text_of([&] { receiving.get(); }),
            "rank 1: chunk from rank 0: expected flags = 0, got " + std::to_string(kDirect));
}

// Whoever does not release shows where a sender began: there it waits for its third credit.
TEST(ExecutorLimits, SendersBeginWithDifferentReceivers) {
  for (const int32_t rank : {0, 1, 2}) {
    World world(std::make_shared<PlainPlan>(flat(0, 3), tensor_parallel(3, 3), 64), Kind::kInprocStaged);
    WireHeader grant{};
    grant.epoch = 1;
    grant.plan_digest = world.plan()->digest();
    for (const int32_t receiver : {3, 4, 5}) world.endpoints().at(receiver)->grant(rank, grant);
    EXPECT_EQ(text_of([&] { world.executor(rank).run(1, world.buffers(rank), Deadline(0.05)); }),
              "rank " + std::to_string(rank) + ": no credit from rank " + std::to_string(3 + rank) + " within 0.05 s");
  }
}

TEST(ExecutorLimits, CancelledOnesStayCancelledEvenWithNothingToDo) {
  const auto plan = std::make_shared<PlainPlan>(tensors(0, {0}), tensors(1, {0}), 1000);
  Executor idle(plan, 7, nullptr);
  EXPECT_EQ(idle.run(1, {}, Deadline(0)).sent_bytes, 0);
  idle.cancel();
  EXPECT_THROW(idle.run(2, {}, Deadline(0)), CancelledError);
}

TEST(ExecutorLimits, AnInterruptEndsARunOfSeveralThreads) {
  ExecutorOptions options;
  options.threads = 3;
  for (int attempt = 0; attempt < 10; ++attempt) {
    World world(std::make_shared<PlainPlan>(tensors(0, {100}), tensors(1, {100}), 1000), Kind::kInproc, options);
    struct Interrupted {};
    const Deadline deadline(5, [&] { throw Interrupted{}; });
    ASSERT_THROW(world.executor(1).run(1, world.buffers(1), deadline), Interrupted);
  }
}

TEST(ExecutorLimits, ExposedBuffersAreCountedFromZero) {
  World world(std::make_shared<PlainPlan>(tensors(0, {100}), tensors(1, {100}), 1000), Kind::kInproc);
  BoundBuffers buffers = world.buffers(1);
  buffers.first_exposed = -1;
  EXPECT_EQ(text_of([&] { world.executor(1).run(1, buffers, Deadline(1)); }),
            "Executor: expected first_exposed >= 0, got -1");
}

TEST(Deadlines, NoNumberHasPassed) { EXPECT_TRUE(Deadline(std::nan("")).passed()); }

TEST(Deadlines, LongWorkIsInterruptedToo) {
  struct Interrupted {};
  const Deadline deadline(30, [] { throw Interrupted{}; });
  Lookout lookout(deadline);
  EXPECT_NO_THROW(lookout.look()) << "asked for every piece, it would wait for Python's lock each time";
  const auto work = [&] {
    while (!deadline.passed()) lookout.look();
  };
  EXPECT_THROW(work(), Interrupted);
}

TEST(ExecutorLimits, OneTransportServesPlansInTurn) {
  for (const Kind kind : {Kind::kInproc, Kind::kInprocStaged, Kind::kShmStaged, Kind::kTcp}) {
    World world(std::make_shared<PlainPlan>(tensors(0, {100, 70}), tensors(1, {100, 70}), 64, 1), kind);
    const auto other = std::make_shared<PlainPlan>(tensors(0, {100, 70}), tensors(1, {100, 70}), 1000, 2);
    Executor sender(other, 0, world.endpoints().at(0)), receiver(other, 1, world.endpoints().at(1));
    for (uint64_t epoch = 1; epoch <= 6; ++epoch) {
      world.fill(epoch);
      if (epoch % 2 == 1) {
        world.run(epoch);
        ASSERT_TRUE(world.errors().empty());
      } else {
        auto receiving = std::async(std::launch::async, [&] { receiver.run(epoch, world.buffers(1), Deadline(30)); });
        sender.run(epoch, world.buffers(0), Deadline(30));
        receiving.get();
      }
      world.check(epoch);
    }
  }
}

}  // namespace
}  // namespace areal::reshard
