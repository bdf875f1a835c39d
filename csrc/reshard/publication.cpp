#include "reshard/publication.h"

#include <algorithm>

#include "base/check.h"
#include "base/threads.h"
#include "reshard/errors.h"
#include "reshard/protocol_orders.h"
#include "reshard/reader_slots.h"
#include "reshard/version_store.h"
#include "reshard/waiting.h"
#include "reshard/xxh3.h"

namespace areal::reshard {
namespace {

constexpr uint64_t kBusy = 1;

DeadlineError seat_taken(const ControlLine& control, uint64_t writer, const Deadline& deadline) {
  const double idle_s = 1e-9 * static_cast<double>(monotonic_ns() - control.heartbeat.load(std::memory_order_relaxed));
  return DeadlineError(format_message("VersionStore.publish: expected the writer's seat within ", deadline.seconds(),
                                      " s, got it held by ", describe_process(writer), ", whose last progress was ",
                                      idle_s, " s ago"));
}

void take_seat(ControlLine& control, ProcessIdentity self, const Deadline& deadline) {
  uint64_t writer = control.writer.load();
  for (Backoff backoff(deadline);;) {
    if ((writer & kBusy) == 0 || is_dead(writer)) {
      if (control.writer.compare_exchange_weak(writer, self | kBusy)) return;
      continue;
    }
    if (deadline.passed()) throw seat_taken(control, writer, deadline);
    backoff.sleep();
    writer = control.writer.load();
  }
}

void wait_until_unpinned(StoreMemory& memory, int arena, ProcessIdentity self, const Deadline& deadline) {
  const std::atomic<uint64_t>& readers = memory.control().readers[arena];
  for (Backoff backoff(deadline); readers.load(kOrders.drain) != 0;) {
    reclaim_dead_pins(memory, arena, self);
    if (readers.load(kOrders.drain) == 0) return;
    if (deadline.passed()) {
      throw DeadlineError(format_message("VersionStore.publish: expected the pins on version ",
                                         memory.record(arena).version.load(), " released within ", deadline.seconds(),
                                         " s, got it pinned by ", describe_pins(memory, arena)));
    }
    backoff.sleep();
  }
}

// The checksum of one piece where it lies in the arena.
uint64_t checksum_in_place(const StoreMemory& memory, int arena, const ArenaPiece& piece) {
  return xxh3_64(memory.arena(arena) + piece.target_offset_bytes, static_cast<size_t>(piece.bytes));
}

uint64_t digest_of_checksums(const StoreMemory& memory, int arena) {
  const std::span<const uint64_t> checksums = memory.checksums(arena);
  return xxh3_64(checksums.data(), checksums.size_bytes());
}

}  // namespace

Publication::Publication(std::shared_ptr<StoreMemory> memory, int64_t version, ProcessIdentity owner)
    : memory_(std::move(memory)),
      version_(version),
      owner_(owner),
      epoch_(memory_->control().epoch.load() + 1),
      written_(memory_->plan().pieces.size(), 0) {}

Publication Publication::begin(std::shared_ptr<StoreMemory> memory, int64_t version, VersionOrder order,
                               const Deadline& deadline) {
  AREAL_CHECK(version >= 0, "VersionStore.publish: expected version >= 0, got ", version);
  const ProcessIdentity self = self_identity();
  ControlLine& control = memory->control();
  take_seat(control, self, deadline);
  Publication publication(std::move(memory), version, self);  // from here on it leaves the seat when we throw
  control.heartbeat.store(monotonic_ns(), std::memory_order_relaxed);
  StoreMemory& shared = *publication.memory_;
  if (publication.epoch_ > 1 && order == VersionOrder::kIncreasing) {
    const int64_t active = shared.record(1 - publication.arena_index()).version.load();
    AREAL_CHECK(version > active, "VersionStore.publish: expected version > ", active,
                " (the current one; allow_rollback=True lifts this), got ", version);
  }
  wait_until_unpinned(shared, publication.arena_index(), self, deadline);
  shared.prefault_writable();
  return publication;
}

void Publication::write(std::span<const std::byte* const> sources, ChunkRange chunks) {
  AREAL_CHECK(seated_, "Publication.write: expected an open publication, got one committed or aborted");
  const ArenaPlan& plan = memory_->plan();
  AREAL_CHECK(static_cast<int64_t>(sources.size()) == memory_->layout().count(), "Publication.write: expected ",
              memory_->layout().count(), " sources, got ", sources.size());
  write_chunks(plan, chunks, sources, {arena(), memory_->control().heartbeat}, stores_for(plan),
               memory_->checksums(arena_index()));
  for (int64_t c = chunks.begin; c < chunks.end; ++c) {
    const ArenaChunk& chunk = plan.chunks[static_cast<size_t>(c)];
    for (int64_t p = chunk.first_piece; p < chunk.first_piece + chunk.piece_count; ++p) {
      const auto index = static_cast<size_t>(p);
      if (sources[static_cast<size_t>(plan.pieces[index].tensor)] != nullptr) written_[index] = 1;
    }
  }
}

void Publication::seal(int64_t tensor) {
  AREAL_CHECK(seated_, "Publication.seal: expected an open publication, got one committed or aborted");
  const auto& pieces = memory_->plan().pieces;
  const auto first =
      std::partition_point(pieces.begin(), pieces.end(), [&](const ArenaPiece& p) { return p.tensor < tensor; });
  for (auto piece = first; piece != pieces.end() && piece->tensor == tensor; ++piece) {
    const auto index = static_cast<size_t>(piece - pieces.begin());
    memory_->checksums(arena_index())[index] = checksum_in_place(*memory_, arena_index(), *piece);
    written_[index] = 1;
  }
}

void Publication::seal_rest() {
  AREAL_CHECK(seated_, "Publication.seal_rest: expected an open publication, got one committed or aborted");
  const ArenaPlan& plan = memory_->plan();
  const std::span<uint64_t> checksums = memory_->checksums(arena_index());
  parallel_for(0, static_cast<int64_t>(plan.chunks.size()), chunks_per_thread(plan), [&](int64_t begin, int64_t end) {
    const ArenaChunk& last = plan.chunks[static_cast<size_t>(end - 1)];
    int64_t piece = plan.chunks[static_cast<size_t>(begin)].first_piece;
    for (; piece < last.first_piece + last.piece_count; ++piece) {
      const auto index = static_cast<size_t>(piece);
      if (written_[index] != 0) continue;
      checksums[index] = checksum_in_place(*memory_, arena_index(), plan.pieces[index]);
      written_[index] = 1;
      memory_->control().heartbeat.store(monotonic_ns(), std::memory_order_relaxed);
    }
  });
}

uint64_t Publication::content_digest() const {
  check_complete();
  return digest_of_checksums(*memory_, arena_index());
}

bool Publication::has_all_checksums() const { return std::ranges::find(written_, 0) == written_.end(); }

void Publication::check_complete() const {
  const auto missing = std::find(written_.begin(), written_.end(), 0);
  if (missing == written_.end()) return;
  const ArenaPiece& piece = memory_->plan().pieces[static_cast<size_t>(missing - written_.begin())];
  throw Error(format_message(
      "VersionStore.publish: tensor '", memory_->layout().tensors()[static_cast<size_t>(piece.tensor)].name,
      "': expected all bytes written before commit, got none at offset ", piece.source_offset_bytes));
}

void Publication::commit(Verify verify, Checksums checksums) {
  AREAL_CHECK(seated_, "Publication.commit: expected an open publication, got one committed or aborted");
  if (checksums == Checksums::kRequired || verify == Verify::kReadBack) check_complete();
  if (verify == Verify::kReadBack) {
    const std::byte* written = memory_->arena(arena_index());
    check_intact(*memory_, find_damaged_piece(memory_->plan(), written, memory_->checksums(arena_index())), version_);
  }
  ControlLine& control = memory_->control();
  AREAL_CHECK(control.writer.load() == (owner_ | kBusy),
              "VersionStore.publish: expected to hold the writer's seat, got ", describe_process(control.writer.load()),
              " on it");
  ArenaRecord& record = memory_->record(arena_index());
  const bool has_checksums = has_all_checksums();
  record.has_checksums.store(has_checksums ? 1 : 0, std::memory_order_relaxed);
  record.content_digest.store(has_checksums ? digest_of_checksums(*memory_, arena_index()) : 0,
                              std::memory_order_relaxed);
  record.version.store(version_, kOrders.write_record);
  control.epoch.store(epoch_, kOrders.flip);
  wake_all(control.epoch);
  leave_seat();
}

void Publication::abort() {
  if (memory_ != nullptr && seated_) leave_seat();
}

void Publication::leave_seat() {
  seated_ = false;
  if (self_identity() != owner_) return;  // a forked child: the seat is the parent's
  uint64_t mine = owner_ | kBusy;
  memory_->control().writer.compare_exchange_strong(mine, owner_);
}

void check_intact(const StoreMemory& memory, int64_t damaged_piece, int64_t version) {
  if (damaged_piece == kNoPiece) return;
  const ArenaPiece& piece = memory.plan().pieces[static_cast<size_t>(damaged_piece)];
  throw CorruptedError(
      format_message("VersionStore: tensor '", memory.layout().tensors()[static_cast<size_t>(piece.tensor)].name,
                     "' of version ", version, ": expected the bytes that were published, got others in [",
                     piece.source_offset_bytes, ", ", piece.source_offset_bytes + piece.bytes, ")"));
}

}  // namespace areal::reshard
