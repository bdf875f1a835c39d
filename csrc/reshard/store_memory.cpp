#include "reshard/store_memory.h"

#include <cstring>
#include <string_view>

#include "base/check.h"
#include "reshard/process_identity.h"
#include "reshard/xxh3.h"

namespace areal::reshard {
namespace {

constexpr uint64_t kMagic = 0x53564c4145524131;  // "1AREALVS"
constexpr uint64_t kFormat = 2;
constexpr size_t kLayoutOffset = 256 + kReaderSlots * sizeof(ReaderSlot);
constexpr size_t kPageBytes = size_t{64} << 10;  // the largest of common page sizes: one format for all

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

uint64_t checksum_of(const StoreHeader& header) { return xxh3_64(&header, offsetof(StoreHeader, checksum)); }

void check_header(const StoreHeader& header, size_t file_bytes) {
  AREAL_CHECK(header.magic == kMagic,
              "VersionStore.attach: expected the shared memory of a version store, got another");
  AREAL_CHECK(header.checksum == checksum_of(header), "VersionStore.attach: expected an intact header, got checksum ",
              header.checksum, " over ", checksum_of(header));
  AREAL_CHECK(header.format == kFormat, "VersionStore.attach: expected format ", kFormat, ", got ", header.format);
  AREAL_CHECK(header.total_bytes == file_bytes && header.layout_bytes <= file_bytes - kLayoutOffset,
              "VersionStore.attach: expected a store of ", header.total_bytes, " bytes, got ", file_bytes);
  AREAL_CHECK(header.namespaces == namespace_identity(),
              "VersionStore.attach: expected a process of the pid namespace that created the store (so that the death "
              "of a reader is seen), got another namespace");
}

}  // namespace

StoreGeometry StoreGeometry::of(const ArenaLayout& layout, const ArenaPlan& plan) {
  StoreGeometry g;
  const auto arena_bytes = static_cast<size_t>(layout.arena_bytes());
  g.layout_bytes = layout.serialize().size();
  g.checksums_offset = round_up(kLayoutOffset + g.layout_bytes, 64);
  g.control_bytes = round_up(g.checksums_offset + 2 * plan.pieces.size() * sizeof(uint64_t), kPageBytes);
  g.arena_stride = round_up(arena_bytes, kPageBytes);
  g.total_bytes = g.control_bytes + 2 * g.arena_stride;
  return g;
}

StoreMemory::StoreMemory(const SharedMemory& file, ArenaLayout layout, ArenaPlan plan)
    : layout_(std::move(layout)), plan_(std::move(plan)), geometry_(StoreGeometry::of(layout_, plan_)) {
  const auto offset = static_cast<int64_t>(geometry_.control_bytes);
  const auto arenas = static_cast<int64_t>(2 * geometry_.arena_stride);
  control_ = file.map(0, static_cast<int64_t>(geometry_.control_bytes), Access::kReadWrite);
  readable_ = file.map(offset, arenas, Access::kRead);
  writable_ = file.map(offset, arenas, Access::kReadWrite);
}

std::span<uint64_t> StoreMemory::checksums(int arena) const {
  const size_t pieces = plan_.pieces.size();
  return {at<uint64_t>(geometry_.checksums_offset) + pieces * static_cast<size_t>(arena), pieces};
}

void StoreMemory::prefault_writable() {
  if (!writable_prefaulted_.exchange(true, std::memory_order_relaxed)) writable_.prefault();
}

OpenStore create_store(ArenaLayout layout, int64_t chunk_bytes) {
  ArenaPlan plan = make_arena_plan(layout, chunk_bytes);
  const StoreGeometry geometry = StoreGeometry::of(layout, plan);
  SharedMemory file = SharedMemory::create("areal-version-store", static_cast<int64_t>(geometry.total_bytes));
  auto memory = std::make_shared<StoreMemory>(file, std::move(layout), std::move(plan));
  memory->prefault_writable();
  const std::string text = memory->layout().serialize();
  std::memcpy(memory->serialized_layout(), text.data(), text.size());
  StoreHeader& header = memory->header();
  header = {.magic = kMagic,
            .format = kFormat,
            .total_bytes = geometry.total_bytes,
            .namespaces = namespace_identity(),
            .chunk_bytes = static_cast<uint64_t>(chunk_bytes),
            .layout_bytes = geometry.layout_bytes,
            .plan_digest = memory->plan().digest,
            .checksum = 0};
  header.checksum = checksum_of(header);
  return {std::move(file), std::move(memory)};
}

OpenStore attach_store(int fd) {
  SharedMemory file = SharedMemory::attach(fd);
  AREAL_CHECK(file.size_bytes() >= static_cast<int64_t>(kPageBytes),
              "VersionStore.attach: expected the shared memory of a version store, got ", file.size_bytes(), " bytes");
  StoreHeader header;
  std::memcpy(&header, file.map(0, kPageBytes, Access::kRead).data(), sizeof header);
  check_header(header, static_cast<size_t>(file.size_bytes()));

  const Mapping front = file.map(0, static_cast<int64_t>(kLayoutOffset + header.layout_bytes), Access::kRead);
  const std::string_view text(reinterpret_cast<const char*>(front.data()) + kLayoutOffset, header.layout_bytes);
  ArenaLayout layout = ArenaLayout::parse(text);
  // Before anything is made that is as large as the layout says.
  AREAL_CHECK(layout.arena_bytes() <= file.size_bytes() / 2, "VersionStore.attach: expected arenas of ",
              layout.arena_bytes(), " bytes for the stored layout, got a store of ", file.size_bytes());
  ArenaPlan plan = make_arena_plan(layout, static_cast<int64_t>(header.chunk_bytes));
  const StoreGeometry geometry = StoreGeometry::of(layout, plan);
  AREAL_CHECK(plan.digest == header.plan_digest, "VersionStore.attach: expected plan digest = ", header.plan_digest,
              ", got ", plan.digest, " from the stored layout");
  AREAL_CHECK(geometry.total_bytes == header.total_bytes, "VersionStore.attach: expected ", geometry.total_bytes,
              " bytes for the stored layout, got ", header.total_bytes);
  auto memory = std::make_shared<StoreMemory>(file, std::move(layout), std::move(plan));
  memory->prefault_readable();
  return {std::move(file), std::move(memory)};
}

}  // namespace areal::reshard
