// What comes from elsewhere, byte for byte: the layout of a store, its header, the header of a chunk.
#include "fuzzing.h"
#include "reshard/store_memory.h"
#include "reshard/version_store.h"
#include "reshard/wire.h"
#include "reshard/xxh3.h"
#include "store_testing.h"

namespace areal::reshard {
namespace {

std::vector<std::string> layouts() {
  return {ArenaLayout({}).serialize(), test_layout().serialize(),
          ArenaLayout({{"a", "int8", 1, {2, 3}}, {"b.weight", "float8_e4m3fn", 1, {}}, {"c", "int64", 8, {0, 7}}})
              .serialize()};
}

TEST(Fuzz, ASerializedArenaLayoutIsTakenOnlyAsItIsWritten) {
  fuzz(layouts(), [](const std::string& input) -> std::string {
    return ArenaLayout::parse(input).serialize() == input ? "" : "another layout writes these bytes";
  });
}

std::string bytes_of(const WireHeader& header) { return {reinterpret_cast<const char*>(&header), sizeof header}; }

// Every other input gets a checksum that fits, so that what lies behind it is reached.
TEST(Fuzz, AWireHeaderIsTakenOnlyAsItIsSealed) {
  std::vector<std::string> corpus;
  for (const WireType type : {WireType::kData, WireType::kCredit}) {
    WireHeader header{};
    header.type = static_cast<uint16_t>(type);
    header.epoch = 7;
    header.plan_digest = 0x0123456789abcdef;
    header.target = 3;
    header.length = 4096;
    seal_header(header);
    corpus.push_back(bytes_of(header));
  }
  int inputs = 0;
  fuzz(corpus, [&inputs](std::string input) -> std::string {
    input.resize(sizeof(WireHeader));
    WireHeader header;
    std::memcpy(&header, input.data(), sizeof header);
    if (++inputs % 2 == 0) {
      header.header_crc = 0;
      const std::string unsealed = bytes_of(header);
      header.header_crc = crc32c(std::as_bytes(std::span(unsealed)));
    }
    check_header(header);
    WireHeader sealed = header;
    seal_header(sealed);
    return bytes_of(sealed) == bytes_of(header) ? "" : "seal_header() writes another header";
  });
}

// Bytes over the header and the layout of a store; the header's checksum is made to fit, so that what lies behind it is
// reached.
TEST(Fuzz, AStoreIsAttachedOnlyWithItsOwnLayout) {
  const VersionStore store = VersionStore::create(test_layout(), kTestChunkBytes);
  const StoreMemory& memory = *store.memory();
  auto* front = reinterpret_cast<std::byte*>(&memory.header());
  const size_t layout_offset = static_cast<size_t>(memory.serialized_layout() - front);
  const size_t front_bytes = layout_offset + memory.geometry().layout_bytes;
  const std::string whole(reinterpret_cast<const char*>(front), front_bytes);
  const auto put = [&](std::string text) {
    text.resize(front_bytes);
    auto* header = reinterpret_cast<StoreHeader*>(text.data());
    header->checksum = xxh3_64(header, offsetof(StoreHeader, checksum));
    std::memcpy(front, text.data(), front_bytes);
  };
  fuzz({whole}, [&](const std::string& input) -> std::string {
    put(input);
    const VersionStore attached = VersionStore::attach(store.fd());
    return attached.layout().tensors() == store.layout().tensors() ? "" : "another layout was taken";
  });
  put(whole);
  EXPECT_NO_THROW(VersionStore::attach(store.fd()));
}

}  // namespace
}  // namespace areal::reshard
