// No execution lets a reader see a mixture; every order of protocol_orders.h that is not relaxed is needed.
#include "protocol_model.h"

#include <gtest/gtest.h>

#include <vector>

namespace areal::reshard::model {
namespace {

using enum std::memory_order;

constexpr int kPinnedUpdates = 2;  // enough to come back to a reader's arena
constexpr int kPolledUpdates = 4;

struct Weakened {
  const char* step;
  std::memory_order ProtocolOrders::* order;
  std::memory_order weaker;  // the strongest of those below the one in use
};

TEST(ProtocolModel, PinnedReadersSeeOneVersion) {
  const Outcome outcome = explore_pins(kOrders, Fault::kNone, kPinnedUpdates);
  EXPECT_EQ(outcome.violation, "");
  EXPECT_GT(outcome.executions, 1000);
}

TEST(ProtocolModel, PollsReturnActiveVersions) {
  const Outcome outcome = explore_polls(kOrders, kPolledUpdates);
  EXPECT_EQ(outcome.violation, "");
  EXPECT_GT(outcome.executions, 1000);
}

TEST(ProtocolModel, NoWeakerOrderOfAPinWouldDo) {
  for (const Weakened& w : std::vector<Weakened>{{"pin", &ProtocolOrders::pin, acq_rel},
                                                 {"recheck", &ProtocolOrders::recheck, acquire},
                                                 {"unpin", &ProtocolOrders::unpin, relaxed},
                                                 {"drain", &ProtocolOrders::drain, acquire},
                                                 {"flip", &ProtocolOrders::flip, release}}) {
    ProtocolOrders orders;
    orders.*w.order = w.weaker;
    EXPECT_NE(explore_pins(orders, Fault::kNone, kPinnedUpdates).violation, "") << w.step;
  }
}

TEST(ProtocolModel, NoWeakerOrderOfAPollWouldDo) {
  for (const Weakened& w : std::vector<Weakened>{{"write_record", &ProtocolOrders::write_record, relaxed},
                                                 {"poll", &ProtocolOrders::poll, relaxed},
                                                 {"read_record", &ProtocolOrders::read_record, relaxed},
                                                 {"poll_again", &ProtocolOrders::poll_again, relaxed}}) {
    ProtocolOrders orders;
    orders.*w.order = w.weaker;
    EXPECT_NE(explore_polls(orders, kPolledUpdates).violation, "") << w.step;
  }
}

TEST(ProtocolModel, EveryStepIsNeededAndInItsPlace) {
  for (const Fault fault : {Fault::kNoRecheck, Fault::kRecheckBeforePin, Fault::kNoDrain, Fault::kDrainOtherArena,
                            Fault::kFlipBeforeFill, Fault::kUnpinBeforeUse}) {
    EXPECT_NE(explore_pins(kOrders, fault, kPinnedUpdates).violation, "") << "fault " << int(fault);
  }
}

}  // namespace
}  // namespace areal::reshard::model
