// Readers and a writer in threads of one process, compiled with ThreadSanitizer: every access to an arena is ordered.
//
// ThreadSanitizer knows addresses, not pages: readers look through the writable mapping here, so that it sees that they
// and the writer touch the same memory. The writer stores plainly and seals, as one does that receives from afar; the
// copies of Publication::write lie in files compiled for an instruction set each, which are not instrumented.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "reshard/errors.h"
#include "store_testing.h"

namespace areal::reshard {
namespace {

std::span<int32_t> tensor_in(const StoreMemory& memory, int arena, int64_t tensor) {
  auto* data = reinterpret_cast<int32_t*>(memory.writable_arena(arena) + memory.layout().offset_bytes(tensor));
  return {data, static_cast<size_t>(memory.layout().tensors()[static_cast<size_t>(tensor)].bytes() / 4)};
}

void place_and_commit(const VersionStore& store, int64_t version) {
  Publication publication = store.begin(version, VersionOrder::kIncreasing, Deadline(30.0));
  for (int64_t tensor = 0; tensor < store.layout().count(); ++tensor) {
    for (int32_t& x : tensor_in(*store.memory(), publication.arena_index(), tensor)) x = static_cast<int32_t>(version);
  }
  publication.seal_rest();
  publication.commit(Verify::kNo);
}

int64_t foreign_elements(const Pin& pin) {
  int64_t foreign = 0;
  for (int64_t tensor = 0; tensor < pin.memory().layout().count(); ++tensor) {
    for (const int32_t x : tensor_in(pin.memory(), pin.arena_index(), tensor)) foreign += x != pin.version();
  }
  return foreign;
}

TEST(Race, PinnedReadersSeeOneVersion) {
  const VersionStore store = VersionStore::create(test_layout(), kTestChunkBytes);
  place_and_commit(store, 1);
  constexpr int64_t kLast = 100;
  std::atomic<int64_t> foreign{0};
  std::vector<std::thread> readers;
  for (int r = 0; r < 3; ++r) {
    readers.emplace_back([&, r] {
      for (int64_t seen = 0; seen < kLast;) {
        seen = store.wait(seen + (r == 0), Deadline(30.0));  // one reader is always the first to see a version
        Pin pin = store.pin(Deadline(30.0));
        foreign += foreign_elements(pin);
        if (r == 2) pin.verify();
        foreign += pin.content_digest() == 0;
      }
    });
  }
  for (int64_t version = 2; version <= kLast; ++version) place_and_commit(store, version);
  for (std::thread& reader : readers) reader.join();
  EXPECT_EQ(foreign, 0);
}

TEST(Race, TwoWritersTakeTurns) {
  const VersionStore store = VersionStore::create(test_layout(), kTestChunkBytes);
  std::vector<std::thread> writers;
  for (int w = 0; w < 2; ++w) {
    writers.emplace_back([&] {
      for (int round = 0; round < 30; ++round) {
        Publication publication = store.begin(round, VersionOrder::kAnyOrder, Deadline(30.0));
        tensor_in(*store.memory(), publication.arena_index(), 4)[0] = round;
        publication.seal_rest();
        publication.commit(Verify::kReadBack);
      }
    });
  }
  for (std::thread& writer : writers) writer.join();
  EXPECT_EQ(store.epoch(), 60u);
  EXPECT_NO_THROW(store.pin(Deadline(1.0)).verify());
}

}  // namespace
}  // namespace areal::reshard
