// The shared memory of a VersionStore and its format. Everything but the header's own fields follows from the layout
// and the chunk size, so an attaching process believes no offset it reads:
//
//     0      StoreHeader                        192    ArenaRecord of arena 1
//     64     ControlLine                        256    reader slots: 64 words
//     128    ArenaRecord of arena 0             768    serialized ArenaLayout
//     ...    piece checksums of arena 0, then of arena 1
//     ...    arena 0, arena 1, each on a page of its own
//
// The arenas are mapped twice: read-only for readers, so that a stray write faults instead of changing the weights of
// every generator; and writable for publication, page tables filled when a process first publishes.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "reshard/arena_layout.h"
#include "reshard/arena_plan.h"
#include "reshard/shared_memory.h"

namespace areal::reshard {

inline constexpr int kReaderSlots = 64;

struct alignas(64) StoreHeader {
  uint64_t magic;
  uint64_t format;
  uint64_t total_bytes;
  uint64_t namespaces;  // process_identity.h: identities mean something only inside these
  uint64_t chunk_bytes;
  uint64_t layout_bytes;
  uint64_t plan_digest;
  uint64_t checksum;  // XXH3 of the fields above
};

// One cache line. The protocol on it is described in version_store.h.
struct alignas(64) ControlLine {
  std::atomic<uint64_t> epoch;       // commits so far; the active arena is epoch % 2; 0: nothing published yet
  std::atomic<uint64_t> readers[2];  // bit s: reader slot s pins this arena
  std::atomic<uint64_t> writer;      // identity of the last writer; bit 0: it is publishing
  std::atomic<int64_t> heartbeat;    // of the writer, CLOCK_MONOTONIC nanoseconds
  uint64_t reserved[3];
};

// Written while no reader can pin the arena, read under a pin (version also without: see VersionStore::version).
struct alignas(64) ArenaRecord {
  std::atomic<int64_t> version;
  std::atomic<uint64_t> has_checksums;   // 0: of this version nobody has taken any
  std::atomic<uint64_t> content_digest;  // XXH3 of the piece checksums, 0 without
};

using ReaderSlot = std::atomic<uint64_t>;  // identity of the process whose pin this is; 0: free

static_assert(sizeof(StoreHeader) == 64 && sizeof(ControlLine) == 64 && sizeof(ArenaRecord) == 64);
static_assert(std::atomic<uint64_t>::is_always_lock_free && sizeof(ReaderSlot) == 8);

// Where things lie, as a function of what is stored.
struct StoreGeometry {
  size_t layout_bytes;
  size_t checksums_offset;
  size_t control_bytes;  // all that comes before the arenas
  size_t arena_stride;
  size_t total_bytes;

  static StoreGeometry of(const ArenaLayout& layout, const ArenaPlan& plan);
};

class StoreMemory {
 public:
  StoreMemory(const SharedMemory& file, ArenaLayout layout, ArenaPlan plan);

  const ArenaLayout& layout() const { return layout_; }
  const ArenaPlan& plan() const { return plan_; }
  const StoreGeometry& geometry() const { return geometry_; }

  StoreHeader& header() const { return *at<StoreHeader>(0); }
  ControlLine& control() const { return *at<ControlLine>(64); }
  ArenaRecord& record(int arena) const { return *at<ArenaRecord>(128 + 64 * static_cast<size_t>(arena)); }
  std::span<ReaderSlot> slots() const { return {at<ReaderSlot>(256), kReaderSlots}; }
  std::byte* serialized_layout() const { return at<std::byte>(768); }
  std::span<uint64_t> checksums(int arena) const;  // per piece of the plan
  const std::byte* arena(int arena) const { return readable_.data() + geometry_.arena_stride * size_t(arena); }
  std::byte* writable_arena(int arena) const { return writable_.data() + geometry_.arena_stride * size_t(arena); }

  // Fill the page tables of a mapping; the writable one at most once.
  void prefault_readable() const { readable_.prefault(); }
  void prefault_writable();

 private:
  template <class T>
  T* at(size_t offset_bytes) const {
    return reinterpret_cast<T*>(control_.data() + offset_bytes);
  }

  ArenaLayout layout_;
  ArenaPlan plan_;
  StoreGeometry geometry_;
  Mapping control_;
  Mapping readable_;
  Mapping writable_;
  std::atomic<bool> writable_prefaulted_{false};
};

struct OpenStore {
  SharedMemory file;
  std::shared_ptr<StoreMemory> memory;  // outlives the file: pins and tensors share it
};

// New memory that holds no version yet.
OpenStore create_store(ArenaLayout layout, int64_t chunk_bytes);
// The store behind fd (duplicated). Throws areal::Error, saying why, for anything create_store() has not written, and
// for a store of another pid namespace.
OpenStore attach_store(int fd);

}  // namespace areal::reshard
