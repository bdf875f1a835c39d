#include "reshard/version_store.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "reshard/errors.h"
#include "reshard/reader_slots.h"
#include "store_testing.h"

namespace areal::reshard {
namespace {

VersionStore new_store() { return VersionStore::create(test_layout(), kTestChunkBytes); }

template <class ErrorType>
void expect_error(const std::string& part, const auto& call) {
  try {
    call();
    ADD_FAILURE() << "expected an error with '" << part << "'";
  } catch (const ErrorType& error) {
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

TEST(VersionStore, ServesEachVersionInTurn) {
  const VersionStore store = new_store();
  EXPECT_EQ(store.version(), kNoVersion);
  EXPECT_EQ(store.epoch(), 0u);
  for (const int64_t version : {0, 1, 5, 1000}) {
    publish(store, version);
    EXPECT_EQ(store.version(), version);
    expect_serves(store, version);
  }
  EXPECT_EQ(store.epoch(), 4u);
}

TEST(VersionStore, AttachedHandlesShareTheVersion) {
  const VersionStore store = new_store();
  const VersionStore attached = VersionStore::attach(store.fd());
  EXPECT_EQ(attached.plan().digest, store.plan().digest);
  EXPECT_EQ(attached.layout().tensors(), store.layout().tensors());
  publish(store, 1);
  expect_serves(attached, 1);
  publish(attached, 2);
  expect_serves(store, 2);
}

TEST(VersionStore, AbortLeavesTheActiveVersion) {
  const VersionStore store = new_store();
  publish(store, 1);
  {
    Publication publication = store.begin(2, VersionOrder::kIncreasing, Deadline(1.0));
    publication.write(Weights(store.layout(), 2).pointers(), all_chunks(store));
    expect_serves(store, 1);
    publication.abort();
    EXPECT_THROW(publication.commit(Verify::kNo), Error);
    EXPECT_THROW(publication.write(Weights(store.layout(), 2).pointers(), all_chunks(store)), Error);
  }
  {
    Publication dropped = store.begin(2, VersionOrder::kIncreasing, Deadline(1.0));
    dropped.write(Weights(store.layout(), 2).pointers(), {0, 3});
  }
  expect_serves(store, 1);
  EXPECT_EQ(store.epoch(), 1u);
  publish(store, 2, Deadline(0.0));
  expect_serves(store, 2);
}

TEST(VersionStore, CommitNeedsEveryTensorCompletely) {
  const VersionStore store = new_store();
  const Weights weights(store.layout(), 1);
  const auto chunks = static_cast<int64_t>(store.plan().chunks.size());
  for (int64_t missing = 0; missing < chunks; ++missing) {
    Publication publication = store.begin(1, VersionOrder::kIncreasing, Deadline(1.0));
    publication.write(weights.pointers(), {0, missing});
    publication.write(weights.pointers(), {missing + 1, chunks});
    expect_error<Error>("expected all bytes written", [&] { publication.commit(Verify::kNo); });
    EXPECT_EQ(store.version(), kNoVersion);
    publication.write(weights.pointers(), {missing, missing + 1});
    if (missing + 1 < chunks) continue;
    publication.commit(Verify::kReadBack);
  }
  expect_serves(store, 1);
}

TEST(VersionStore, SealTakesTensorsThatTheCallerPlaced) {
  const VersionStore store = new_store();
  const Weights weights(store.layout(), 3);
  std::vector<const std::byte*> sources(weights.pointers().begin(), weights.pointers().end());
  Publication publication = store.begin(3, VersionOrder::kIncreasing, Deadline(1.0));
  for (size_t tensor = 0; tensor < sources.size(); tensor += 2) {
    const auto bytes = static_cast<size_t>(store.layout().tensors()[tensor].bytes());
    if (bytes > 0) {
      std::memcpy(publication.arena() + store.layout().offset_bytes(int64_t(tensor)), sources[tensor], bytes);
    }
    sources[tensor] = nullptr;
  }
  publication.write(sources, all_chunks(store));
  EXPECT_THROW(publication.commit(Verify::kNo), Error);
  for (size_t tensor = 0; tensor < sources.size(); tensor += 2) publication.seal(int64_t(tensor));
  publication.commit(Verify::kReadBack);
  expect_serves(store, 3);
}

TEST(VersionStore, ReadBackRefusesAnArenaThatChangedAfterTheCopy) {
  const VersionStore store = new_store();
  publish(store, 1);
  Publication publication = store.begin(2, VersionOrder::kIncreasing, Deadline(1.0));
  publication.write(Weights(store.layout(), 2).pointers(), all_chunks(store));
  const int64_t tensor = *store.layout().find("layers.2053.weight");
  publication.arena()[store.layout().offset_bytes(tensor) + 5000] ^= std::byte{1};
  expect_error<CorruptedError>("'layers.2053.weight' of version 2", [&] { publication.commit(Verify::kReadBack); });
  expect_serves(store, 1);
}

TEST(VersionStore, PinsFindDamageInDataAndInChecksums) {
  const VersionStore store = new_store();
  publish(store, 1);
  const Pin pin = store.pin(Deadline(1.0));
  pin.verify();
  std::byte* arena = store.memory()->writable_arena(pin.arena_index());
  for (const ArenaPiece& piece : store.plan().pieces) {
    for (const int64_t at : {piece.target_offset_bytes, piece.target_offset_bytes + piece.bytes - 1}) {
      arena[at] ^= std::byte{0x80};
      expect_error<CorruptedError>(store.layout().tensors()[size_t(piece.tensor)].name, [&] { pin.verify(); });
      arena[at] ^= std::byte{0x80};
    }
  }
  store.memory()->checksums(pin.arena_index())[1] ^= 1;
  EXPECT_THROW(pin.verify(), CorruptedError);
}

TEST(VersionStore, CopyToUnpacksAndComparesOnTheWay) {
  const VersionStore store = new_store();
  publish(store, 9);
  const Pin pin = store.pin(Deadline(1.0));
  const Weights unpacked(store.layout(), 0);
  std::vector<std::byte*> targets;
  for (const std::byte* pointer : unpacked.pointers()) targets.push_back(const_cast<std::byte*>(pointer));
  const size_t left_out = static_cast<size_t>(*store.layout().find("layers.31.weight"));
  targets[left_out] = nullptr;
  pin.copy_to(targets);
  for (size_t tensor = 0; tensor < targets.size(); ++tensor) {
    const auto* data = reinterpret_cast<const int32_t*>(unpacked.pointers()[tensor]);
    for (int64_t i = 0; i < store.layout().tensors()[tensor].bytes() / 4; ++i) {
      ASSERT_EQ(data[i], tensor == left_out ? 0 : 9) << "tensor " << tensor << " element " << i;
    }
  }
  const int64_t damaged = *store.layout().find("layers.5000.weight");
  store.memory()->writable_arena(pin.arena_index())[store.layout().offset_bytes(damaged) + 19999] ^= std::byte{2};
  expect_error<CorruptedError>("'layers.5000.weight' of version 9", [&] { pin.copy_to(targets); });
  EXPECT_THROW(pin.copy_to(std::span(targets).first(3)), Error);
}

TEST(VersionStore, VersionsRiseUnlessAnyOrderIsAskedFor) {
  const VersionStore store = new_store();
  publish(store, 7);
  for (const int64_t version : {7, 6, 0}) {
    expect_error<Error>("expected version > 7", [&] { publish(store, version); });
  }
  EXPECT_THROW(publish(store, -1), Error);
  {
    Publication publication = store.begin(2, VersionOrder::kAnyOrder, Deadline(1.0));
    publication.write(Weights(store.layout(), 2).pointers(), all_chunks(store));
    publication.commit(Verify::kNo);
  }
  expect_serves(store, 2);
  publish(store, 3);
}

TEST(VersionStore, TheWriterWaitsForPinsOnTheOtherArenaOnly) {
  const VersionStore store = new_store();
  publish(store, 1);
  Pin one = store.pin(Deadline(1.0));
  publish(store, 2, Deadline(0.0));
  Pin two = store.pin(Deadline(1.0));
  expect_error<DeadlineError>("pins on version 1 released within 0 s", [&] { publish(store, 3, Deadline(0.0)); });
  EXPECT_EQ(count_foreign_elements(store, one), 0);
  one.release();
  publish(store, 3, Deadline(0.0));
  EXPECT_EQ(count_foreign_elements(store, two), 0);
  expect_error<DeadlineError>("pins on version 2", [&] { publish(store, 4, Deadline(0.0)); });
  const Pin moved = std::move(two);
  expect_error<DeadlineError>("pins on version 2", [&] { publish(store, 4, Deadline(0.0)); });
}

TEST(VersionStore, AReaderThatWasOvertakenBetweenLookingAndPinningPinsNothing) {
  const VersionStore store = new_store();
  publish(store, 1);
  ControlLine& control = store.memory()->control();
  for (int updates = 1; updates <= 3; ++updates) {
    const uint64_t looked = store.epoch();
    for (int i = 0; i < updates; ++i) publish(store, store.version() + 1);
    Publication publication = store.begin(100, VersionOrder::kIncreasing, Deadline(0.0));
    EXPECT_FALSE(pin_epoch(control, 0, looked)) << updates << " updates later";
    EXPECT_EQ(control.readers[0] | control.readers[1], 0u);
  }
  EXPECT_TRUE(pin_epoch(control, 0, store.epoch()));
  EXPECT_EQ(control.readers[store.epoch() % 2], 1u);
  unpin_epoch(control, 0, store.epoch());
  EXPECT_EQ(control.readers[0] | control.readers[1], 0u);
}

TEST(VersionStore, ASecondWriterWaitsForTheSeat) {
  const VersionStore store = new_store();
  Publication publication = store.begin(1, VersionOrder::kIncreasing, Deadline(1.0));
  expect_error<DeadlineError>("the writer's seat within 0 s, got it held by pid " + std::to_string(getpid()),
                              [&] { publish(store, 1, Deadline(0.0)); });
  publication.abort();
  publish(store, 1, Deadline(0.0));
}

TEST(VersionStore, AllSlotsInUseIsATypedErrorAndReleaseFreesOne) {
  const VersionStore store = new_store();
  publish(store, 1);
  std::vector<Pin> pins;
  for (int i = 0; i < kReaderSlots; ++i) pins.push_back(store.pin(Deadline(0.0)));
  expect_error<DeadlineError>("all 64 in use", [&] { store.pin(Deadline(0.0)); });
  pins.pop_back();
  EXPECT_NO_THROW(store.pin(Deadline(0.0)));
}

TEST(VersionStore, AnInterruptEndsAWait) {
  struct Interrupted {};
  const VersionStore store = new_store();
  EXPECT_THROW(store.wait(1, Deadline(60.0, [] { throw Interrupted{}; })), Interrupted);
  EXPECT_THROW(store.pin(Deadline(60.0, [] { throw Interrupted{}; })), Interrupted);
}

TEST(VersionStore, WaitReturnsTheVersionThatIsActive) {
  const VersionStore store = new_store();
  std::thread writer([&] {
    for (int64_t version = 1; version <= 20; ++version) publish(store, version);
  });
  for (int64_t version = 1; version <= 20; ++version) EXPECT_GE(store.wait(version, Deadline(30.0)), version);
  writer.join();
  EXPECT_THROW(store.wait(21, Deadline(0.0)), DeadlineError);
}

TEST(VersionStore, ThreadsHammeringSeeOneVersionInEveryTensor) {
  const VersionStore store = new_store();
  publish(store, 1);
  constexpr int64_t kLast = 300;
  std::atomic<int64_t> foreign{0}, backwards{0}, pins{0};
  std::vector<std::thread> readers;
  for (int r = 0; r < 3; ++r) {
    readers.emplace_back([&] {
      for (int64_t seen = 0; seen < kLast;) {
        const Pin pin = store.pin(Deadline(30.0));
        backwards += pin.version() < seen;
        seen = pin.version();
        foreign += count_foreign_elements(store, pin);
        ++pins;
      }
    });
  }
  for (int64_t version = 2; version <= kLast; ++version) publish(store, version);
  for (std::thread& reader : readers) reader.join();
  EXPECT_EQ(foreign, 0);
  EXPECT_EQ(backwards, 0);
  EXPECT_GE(pins, 3);
}

TEST(VersionStore, AttachSaysWhatIsWrongWithEveryDamagedHeaderWord) {
  const VersionStore store = new_store();
  auto* words = reinterpret_cast<uint64_t*>(&store.memory()->header());
  for (size_t word = 0; word < sizeof(StoreHeader) / 8; ++word) {
    for (const int bit : {0, 13, 63}) {
      words[word] ^= uint64_t{1} << bit;
      EXPECT_THROW(VersionStore::attach(store.fd()), Error) << "word " << word << " bit " << bit;
      words[word] ^= uint64_t{1} << bit;
    }
  }
  std::byte* layout = store.memory()->serialized_layout();
  for (size_t at = 0; at < store.memory()->geometry().layout_bytes; ++at) {
    layout[at] ^= std::byte{4};
    EXPECT_THROW(VersionStore::attach(store.fd()), Error) << "layout byte " << at;
    layout[at] ^= std::byte{4};
  }
  EXPECT_NO_THROW(VersionStore::attach(store.fd()));
  const SharedMemory foreign = SharedMemory::create("test", 1 << 20);
  expect_error<Error>("expected the shared memory of a version store", [&] { VersionStore::attach(foreign.fd()); });
  const SharedMemory tiny = SharedMemory::create("test", 8);
  expect_error<Error>("got 8 bytes", [&] { VersionStore::attach(tiny.fd()); });
}

}  // namespace
}  // namespace areal::reshard
