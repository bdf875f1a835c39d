// One publication in the making: the writer's side of the protocol in version_store.h.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "reshard/arena_copy.h"
#include "reshard/deadline.h"
#include "reshard/process_identity.h"
#include "reshard/store_memory.h"

namespace areal::reshard {

enum class VersionOrder { kIncreasing, kAnyOrder };
enum class Verify { kNo, kReadBack };
// Whether a version must carry the checksums of its pieces: without them its readers can verify nothing.
enum class Checksums { kRequired, kOptional };

// Holds the writer's seat. Going out of scope without commit() aborts: the active version stays what it was.
// One thread at a time.
class Publication {
 public:
  // See VersionStore::begin.
  static Publication begin(std::shared_ptr<StoreMemory> memory, int64_t version, VersionOrder order,
                           const Deadline& deadline);

  Publication(Publication&& other) noexcept = default;
  Publication& operator=(Publication&&) = delete;
  ~Publication() { abort(); }

  int64_t version() const { return version_; }
  uint64_t epoch() const { return epoch_; }  // the one that commit() makes active
  int arena_index() const { return static_cast<int>(epoch_ % 2); }
  std::byte* arena() const { return memory_->writable_arena(arena_index()); }
  const std::shared_ptr<StoreMemory>& memory() const { return memory_; }

  // Copies these chunks from contiguous sources (per tensor; nullptr: leave this tensor to seal()).
  void write(std::span<const std::byte* const> sources, ChunkRange chunks);
  // Declares that the caller has put this tensor into arena() by other means, and takes its checksums there.
  void seal(int64_t tensor);
  // The same for every tensor not written yet: one pass over the arena, on all threads.
  void seal_rest();
  // XXH3 over the checksums, which commit() will publish. Throws areal::Error naming a tensor not written completely.
  uint64_t content_digest() const;

  // Makes the version active. Throws areal::Error naming the first tensor that was neither written completely nor
  // sealed; with kReadBack also reads the arena again and throws CorruptedError if it is not what was written. Then
  // nothing is published. kOptional: the caller has put into arena() what was not written or sealed, and does without
  // the checksums of the version unless all are there.
  void commit(Verify verify, Checksums checksums = Checksums::kRequired);
  void abort();

 private:
  Publication(std::shared_ptr<StoreMemory> memory, int64_t version, ProcessIdentity owner);
  bool has_all_checksums() const;
  void check_complete() const;
  void leave_seat();

  std::shared_ptr<StoreMemory> memory_;  // empty in a moved-from publication
  int64_t version_;
  ProcessIdentity owner_;
  bool seated_ = true;
  uint64_t epoch_ = 0;
  std::vector<uint8_t> written_;  // per piece
};

// Throws CorruptedError naming the tensor of the piece, unless that is kNoPiece.
void check_intact(const StoreMemory& memory, int64_t damaged_piece, int64_t version);

}  // namespace areal::reshard
