#include "reshard/version_store.h"

#include "base/check.h"
#include "reshard/errors.h"
#include "reshard/protocol_orders.h"
#include "reshard/reader_slots.h"
#include "reshard/waiting.h"
#include "reshard/xxh3.h"

namespace areal::reshard {
namespace {

std::string describe_writer(const ControlLine& control) {
  const uint64_t writer = control.writer.load();
  return writer == 0 ? "no writer yet" : "last writer: " + describe_process(writer);
}

}  // namespace

Pin::Pin(std::shared_ptr<StoreMemory> memory, int slot, ProcessIdentity owner)
    : memory_(std::move(memory)), slot_(slot), owner_(owner) {}

void Pin::take_active() {
  do {
    epoch_ = memory_->control().epoch.load(kOrders.look);
  } while (!pin_epoch(memory_->control(), slot_, epoch_));
  version_ = memory_->record(arena_index()).version.load(std::memory_order_acquire);
}

bool Pin::has_checksums() const {
  return memory_->record(arena_index()).has_checksums.load(std::memory_order_relaxed) != 0;
}

uint64_t Pin::content_digest() const {
  AREAL_CHECK(has_checksums(), "VersionStore: expected checksums of version ", version_,
              ", got a version that was committed without any");
  return memory_->record(arena_index()).content_digest.load(std::memory_order_relaxed);
}

void Pin::check_table() const {
  AREAL_CHECK(held_, "Pin: expected a pin still held, got a released one");
  const uint64_t expected = content_digest();
  const std::span<const uint64_t> checksums = memory_->checksums(arena_index());
  const uint64_t digest = xxh3_64(checksums.data(), checksums.size_bytes());
  if (digest != expected) {
    throw CorruptedError(format_message("VersionStore: version ", version_, ": expected checksums of digest ", expected,
                                        ", got ", digest));
  }
}

void Pin::verify() const {
  check_table();
  check_intact(*memory_, find_damaged_piece(memory_->plan(), arena(), memory_->checksums(arena_index())), version_);
}

void Pin::check_targets(std::span<std::byte* const> targets) const {
  AREAL_CHECK(held_, "Pin: expected a pin still held, got a released one");
  AREAL_CHECK(static_cast<int64_t>(targets.size()) == memory_->layout().count(), "Pin.copy_to: expected ",
              memory_->layout().count(), " targets, got ", targets.size());
}

void Pin::copy_to(std::span<std::byte* const> targets) const {
  check_targets(targets);
  check_table();
  const ArenaPlan& plan = memory_->plan();
  const std::span<const uint64_t> checksums = memory_->checksums(arena_index());
  check_intact(*memory_, unpack_chunks(plan, arena(), targets, stores_for(plan), checksums), version_);
}

void Pin::copy_unverified_to(std::span<std::byte* const> targets) const {
  check_targets(targets);
  unpack_chunks_unverified(memory_->plan(), arena(), targets, stores_for(memory_->plan()));
}

void Pin::release() {
  if (memory_ == nullptr || !held_) return;
  held_ = false;
  if (self_identity() != owner_) return;  // a forked child: the pin is the parent's
  unpin_epoch(memory_->control(), slot_, epoch_);
  memory_->slots()[static_cast<size_t>(slot_)].store(0);
}

VersionStore VersionStore::create(ArenaLayout layout, int64_t chunk_bytes) {
  return VersionStore(create_store(std::move(layout), chunk_bytes));
}

VersionStore VersionStore::attach(int fd) { return VersionStore(attach_store(fd)); }

int64_t VersionStore::version() const {
  const std::atomic<uint64_t>& word = memory_->control().epoch;
  for (uint64_t epoch = word.load(kOrders.poll); epoch != 0;) {
    // The record may be that of a later epoch being written; then the acquire below has made its epoch visible.
    const int64_t version = memory_->record(static_cast<int>(epoch % 2)).version.load(kOrders.read_record);
    const uint64_t now = word.load(kOrders.poll_again);
    if (now == epoch) return version;
    epoch = now;
  }
  return kNoVersion;
}

int64_t VersionStore::wait(int64_t version, const Deadline& deadline) const {
  const ControlLine& control = memory_->control();
  for (;;) {
    const uint64_t epoch = control.epoch.load();
    const int64_t active = this->version();
    if (active >= version && active != kNoVersion) return active;
    if (deadline.passed()) {
      throw DeadlineError(format_message("VersionStore.wait: expected version >= ", version, " within ",
                                         deadline.seconds(), " s, got ", active, "; ", describe_writer(control)));
    }
    sleep_while(control.epoch, epoch, deadline);
  }
}

Pin VersionStore::pin(const Deadline& deadline) const {
  wait(0, deadline);
  const ProcessIdentity self = self_identity();
  for (Backoff backoff(deadline);;) {
    if (const std::optional<int> slot = claim_slot(*memory_, self)) {
      Pin pin(memory_, *slot, self);
      pin.take_active();
      return pin;
    }
    if (deadline.passed()) {
      throw DeadlineError(format_message("VersionStore.pin: expected a free reader slot within ", deadline.seconds(),
                                         " s, got all ", kReaderSlots, " in use by ", describe_pins(*memory_, 0), ", ",
                                         describe_pins(*memory_, 1)));
    }
    backoff.sleep();
  }
}

Publication VersionStore::begin(int64_t version, VersionOrder order, const Deadline& deadline) const {
  return Publication::begin(memory_, version, order, deadline);
}

}  // namespace areal::reshard
