// Publication of weights from one process to the others of a machine: whole versions, bit for bit, never a mixture.
//
// Two arenas take turns. The writer fills the one that is not active while readers go on using the other, then makes
// it active by counting `epoch` up: epoch e lives in arena e % 2, so one atomic word says both which arena is active
// and whether it has changed since one looked.
//
// Reader                                          Writer
//   1. take a free slot (CAS 0 -> own identity)     1. take the seat (CAS writer -> own identity, busy)
//   2. e = epoch; readers[e % 2] |= slot bit        2. wait until readers[(e + 1) % 2] = 0
//   3. epoch still e? pinned. Else undo, again      3. fill arena (e + 1) % 2, its checksums and its record
//   4. use the arena                                4. epoch = e + 1; wake waiters
//   5. clear the bit, then free the slot            5. leave the seat
//
// Memory ordering. Steps 2 and 3 of a reader (store bit, load epoch) against 4 and the next 2 of the writer (store
// epoch, load bits) are a Dekker pair: all four are seq_cst, so either the reader sees that its arena was retired or
// the writer sees the bit. The reader's load of epoch acquires what the writer stored before it in step 4; each
// copying thread fences its non-temporal stores, and joins, before that. The writer's load of readers = 0 acquires the
// readers' last loads, released by their clearing of the bit, so it overwrites nothing still being read. A bit is set
// and cleared by read-modify-write operations alone, so clearing one reader's carries on what another's has released.
// protocol_orders.h holds the orders, and a test that no weaker ones would do.
//
// Crashes, at any instruction. Every step is one atomic operation on a word that names its owner (pid and start
// time), so there is nothing half-done to repair:
//   - a writer dies: epoch was not counted up, the old version stays active. The next writer finds the seat held by a
//     dead process, takes it, and fills the same arena anew.
//   - a reader dies with a pin: the waiting writer finds the slot's owner dead. It first makes itself the owner (CAS,
//     so that of several only one goes on), then clears the bits, then frees the slot; should it die on the way the
//     next one does the same to it.
//   - an owner counts as dead only when the kernel says so (process_identity.h); in doubt the writer waits, until its
//     deadline, and names the reader.
// Readers can't starve the writer: nobody pins the inactive arena anew.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "reshard/deadline.h"
#include "reshard/process_identity.h"
#include "reshard/publication.h"
#include "reshard/store_memory.h"

namespace areal::reshard {

inline constexpr int64_t kNoVersion = -1;

// Keeps one version from being overwritten. Movable between threads; in a forked child it pins nothing (the parent's
// pin is still the parent's). The memory stays mapped while the pin lives, released or not.
class Pin {
 public:
  Pin(Pin&& other) noexcept = default;
  Pin& operator=(Pin&&) = delete;
  ~Pin() { release(); }

  int64_t version() const { return version_; }
  uint64_t epoch() const { return epoch_; }
  int arena_index() const { return static_cast<int>(epoch_ % 2); }
  const std::byte* arena() const { return memory_->arena(arena_index()); }
  const StoreMemory& memory() const { return *memory_; }
  // Whether the version was committed with checksums. Without, the calls below that need them throw areal::Error.
  bool has_checksums() const;
  // XXH3 over the checksums taken when the version was written: equal contents have equal digests.
  uint64_t content_digest() const;

  // Reads the whole version and compares it with its checksums. Throws CorruptedError naming the first tensor that
  // differs.
  void verify() const;

  // Copies every tensor to its contiguous target (nullptr: not this one) and compares with the checksums on the way.
  // Throws CorruptedError like verify(), after the copy: then some targets hold damaged bytes.
  void copy_to(std::span<std::byte* const> targets) const;
  // The same without checksums, of any version.
  void copy_unverified_to(std::span<std::byte* const> targets) const;

  // The writer may overwrite the arena from now on. Releasing again does nothing.
  void release();

 private:
  friend class VersionStore;
  Pin(std::shared_ptr<StoreMemory> memory, int slot, ProcessIdentity owner);
  void take_active();
  void check_targets(std::span<std::byte* const> targets) const;
  void check_table() const;

  std::shared_ptr<StoreMemory> memory_;  // empty in a moved-from pin
  int slot_;
  ProcessIdentity owner_;
  bool held_ = true;
  uint64_t epoch_ = 0;
  int64_t version_ = kNoVersion;
};

// One process's handle on a store. All methods may be called from several threads at once.
class VersionStore {
 public:
  static VersionStore create(ArenaLayout layout, int64_t chunk_bytes = kMinChunkBytes);
  static VersionStore attach(int fd);

  const ArenaLayout& layout() const { return memory_->layout(); }
  const ArenaPlan& plan() const { return memory_->plan(); }
  const std::shared_ptr<StoreMemory>& memory() const { return memory_; }
  int fd() const { return file_.fd(); }
  // Where an arena begins in the file, for those who write it through a mapping of their own.
  int64_t arena_offset_bytes(int arena) const {
    const StoreGeometry& geometry = memory_->geometry();
    return static_cast<int64_t>(geometry.control_bytes + geometry.arena_stride * static_cast<size_t>(arena));
  }
  uint64_t epoch() const { return memory_->control().epoch.load(std::memory_order_acquire); }

  // The active version, kNoVersion before the first. A few loads: cheap enough for every decoding step.
  int64_t version() const;
  // Waits until version() >= version and returns version(). Throws DeadlineError.
  int64_t wait(int64_t version, const Deadline& deadline) const;
  // Pins the active version, waiting for the first. Throws DeadlineError.
  Pin pin(const Deadline& deadline) const;
  // Starts a publication: waits for the seat and for the pins on the inactive arena. Throws DeadlineError naming who
  // holds them, and areal::Error for a version that is not above version(), unless order is kAnyOrder.
  Publication begin(int64_t version, VersionOrder order, const Deadline& deadline) const;

 private:
  explicit VersionStore(OpenStore opened) : file_(std::move(opened.file)), memory_(std::move(opened.memory)) {}

  SharedMemory file_;
  std::shared_ptr<StoreMemory> memory_;
};

}  // namespace areal::reshard
