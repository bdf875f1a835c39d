#include "bulk_copies.h"

#include <algorithm>
#include <cstring>

#if defined(CUDA_SHIM_ASAN)
#include <sanitizer/asan_interface.h>
#endif

#include "cluster.h"
#include "race_checker.h"
#include "report.h"

namespace cuda_shim {
namespace {

constexpr uint32_t kUnit = 16;                         // bytes; of addresses and sizes of bulk copies
constexpr int64_t kMaxBytes = (int64_t{1} << 20) - 1;  // that a phase may wait for
constexpr unsigned kMaxArrivals = (1u << 20) - 1;

void check_unit(const char* what, uint64_t value, Location where) {
  if (value % kUnit == 0) return;
  fail(std::string("bulk copy: expected ") + what + " to be a multiple of 16, got " + std::to_string(value % kUnit) +
           " past one",
       where);
}

void check_sizes(const void* to, const void* from, uint32_t bytes, Location where) {
  if (bytes == 0) fail("bulk copy: expected at least 16 bytes, got 0", where);
  check_unit("the number of bytes", bytes, where);
  check_unit("the destination's address", reinterpret_cast<uintptr_t>(to), where);
  check_unit("the source's address", reinterpret_cast<uintptr_t>(from), where);
}

// Where AddressSanitizer knows the bounds. At the issue: the copy itself is made when the culprit has gone on.
void check_bounds([[maybe_unused]] const char* what, [[maybe_unused]] const void* address,
                  [[maybe_unused]] uint32_t bytes, [[maybe_unused]] Location where) {
#if defined(CUDA_SHIM_ASAN)
  auto* begin = const_cast<char*>(static_cast<const char*>(address));
  const auto* bad = static_cast<const char*>(__asan_region_is_poisoned(begin, bytes));
  if (bad == nullptr) return;
  fail(std::string("bulk copy of ") + std::to_string(bytes) + " bytes: byte " + std::to_string(bad - begin) +
           " of its " + what + " is out of bounds, or the destination of another one under way",
       where);
#endif
}

void poison([[maybe_unused]] const void* address, [[maybe_unused]] uint32_t bytes, [[maybe_unused]] bool on) {
#if defined(CUDA_SHIM_ASAN)
  on ? __asan_poison_memory_region(address, bytes) : __asan_unpoison_memory_region(address, bytes);
#endif
}

}  // namespace

void BulkCopies::reset() {
  barriers_.clear();
  for (const Copy& copy : copies_) {
    if (copy.is_load()) poison(copy.to, copy.bytes, false);
  }
  copies_.clear();
  stores_.clear();
}

Mbarrier& BulkCopies::find(const void* barrier, Location where) {
  const auto found = barriers_.find(barrier);
  if (found == barriers_.end()) fail("mbarrier: used before its initialisation", where);
  return found->second;
}

void BulkCopies::init(const void* barrier, unsigned arrivals, Location where, const void* pc) {
  const Thread& self = running_thread();
  if (reinterpret_cast<uintptr_t>(barrier) % 8 != 0 || !self.owner->owns_shared(barrier, 8)) {
    fail("mbarrier: expected 8 aligned bytes of the block's dynamic shared memory", where);
  }
  if (arrivals == 0 || arrivals > kMaxArrivals) {
    fail("mbarrier: expected 1 to " + std::to_string(kMaxArrivals) + " arrivals, got " + std::to_string(arrivals),
         where);
  }
  const bool is_new =
      barriers_.try_emplace(barrier, Mbarrier{arrivals, arrivals, 0, 0, race::add_queue(), &self, {}}).second;
  if (!is_new) fail("mbarrier: initialised twice", where);
  race::on_mbarrier(barrier, true, pc);
}

void BulkCopies::init_fence() {
  for (auto& [address, barrier] : barriers_) {
    if (barrier.initialiser == &running_thread()) barrier.initialiser = nullptr;
  }
}

void BulkCopies::arrive(const void* address, uint32_t expected_bytes, Location where, const void* pc) {
  Mbarrier& barrier = find(address, where);
  race::on_mbarrier(address, false, pc);
  if (barrier.missing == 0) {
    fail("mbarrier: more arrivals than the " + std::to_string(barrier.expected) + " of a phase", where);
  }
  barrier.missing_bytes += expected_bytes;
  if (barrier.missing_bytes > kMaxBytes) {
    fail("mbarrier: expected at most " + std::to_string(kMaxBytes) + " bytes a phase, got " +
             std::to_string(barrier.missing_bytes),
         where);
  }
  --barrier.missing;
  race::on_release(address);
  if (barrier.missing == 0 && barrier.missing_bytes < 0) {
    fail("mbarrier: bulk copies brought " + std::to_string(-barrier.missing_bytes) +
             " bytes more than the phase was told to expect",
         where);
  }
  end_phase_if_complete(barrier, address);
}

void BulkCopies::end_phase_if_complete(Mbarrier& barrier, const void* address) {
  if (barrier.missing != 0 || barrier.missing_bytes != 0) return;
  barrier.missing = barrier.expected;
  ++barrier.phase;
  race::on_end_phase(address);
  for (Thread* thread : barrier.waiting) {
    thread->mbarrier = nullptr;
    thread->owner->make_ready(*thread);
  }
  barrier.waiting.clear();
}

void BulkCopies::wait(const void* address, unsigned parity, Location where, const void* pc) {
  Thread& self = running_thread();
  if (!self.owner->owns_shared(address, 8)) fail("mbarrier: expected to wait in the block's own shared memory", where);
  Mbarrier& barrier = find(address, where);
  race::on_mbarrier(address, false, pc);
  if (parity > 1) fail("mbarrier: expected a parity of 0 or 1, got " + std::to_string(parity), where);
  if (barrier.phase % 2 == parity) {
    barrier.waiting.push_back(&self);
    self.mbarrier = address;
    self.owner->park(ThreadState::kAtMbarrier, where);
    self.owner->cluster().yield();
  }
  race::on_acquire(address);
}

void BulkCopies::load(void* shared, const void* global, uint32_t bytes, const void* address, Location where,
                      const void* pc) {
  const Thread& self = running_thread();
  check_sizes(shared, global, bytes, where);
  if (!self.owner->owns_shared(shared, bytes))
    fail("bulk copy: the destination leaves the block's shared memory", where);
  if (!self.owner->owns_shared(address, 8)) fail("bulk copy: expected an mbarrier of the block's own", where);
  Mbarrier& barrier = find(address, where);
  if (barrier.initialiser != nullptr) {
    fail("bulk copy: expected mbarrier_init_fence by the thread that initialised its mbarrier", where);
  }
  check_bounds("source", global, bytes, where);
  check_bounds("destination", shared, bytes, where);
  race::on_mbarrier(address, false, pc);
  race::on_bulk_access(global, bytes, false, barrier.queue, barrier.phase + 1, pc);
  race::on_bulk_access(shared, bytes, true, barrier.queue, barrier.phase + 1, pc);
  std::memset(shared, 0xff, bytes);
  poison(shared, bytes, true);
  copies_.push_back({static_cast<char*>(shared),
                     static_cast<const char*>(global),
                     bytes,
                     address,
                     barrier.phase,
                     &self,
                     0,
                     {},
                     where});
  if (options_.order == Order::kRandom && random_() % 4 == 0) complete(copies_.size() - 1);
}

void BulkCopies::store(void* global, const void* shared, uint32_t bytes, Location where, const void* pc) {
  const Thread& self = running_thread();
  check_sizes(global, shared, bytes, where);
  if (!self.owner->owns_shared(shared, bytes)) fail("bulk copy: the source leaves the block's shared memory", where);
  check_bounds("source", shared, bytes, where);
  check_bounds("destination", global, bytes, where);
  Stores& stores = stores_[&self];
  if (stores.read_queue == stores.write_queue) {
    stores.read_queue = race::add_queue();
    stores.write_queue = race::add_queue();
  }
  race::on_bulk_access(shared, bytes, false, stores.read_queue, stores.group, pc);
  race::on_bulk_access(global, bytes, true, stores.write_queue, stores.group, pc);
  copies_.push_back({static_cast<char*>(global),
                     static_cast<const char*>(shared),
                     bytes,
                     nullptr,
                     0,
                     &self,
                     stores.group,
                     {},
                     where});
  if (options_.order == Order::kRandom && random_() % 4 == 0) complete(copies_.size() - 1);
}

void BulkCopies::commit() { ++stores_[&running_thread()].group; }

void BulkCopies::wait_stores(unsigned pending, bool read_only) {
  const Thread& self = running_thread();
  const Stores& stores = stores_[&self];
  const uint32_t committed = stores.group - 1;
  if (committed <= pending) return;
  const uint32_t done = committed - pending;
  for (size_t i = copies_.size(); i-- > 0;) {
    if (copies_[i].is_load() || copies_[i].issuer != &self || copies_[i].group > done) continue;
    read_only ? read_source(copies_[i]) : complete(i);
  }
  race::on_bulk_wait(stores.read_queue, done);
  if (!read_only) race::on_bulk_wait(stores.write_queue, done);
}

void BulkCopies::read_source(Copy& copy) {
  if (copy.data.empty()) copy.data.assign(copy.from, copy.from + copy.bytes);
}

void BulkCopies::complete(size_t i) {
  const Copy copy = std::move(copies_[i]);
  copies_.erase(copies_.begin() + static_cast<std::ptrdiff_t>(i));
  if (!copy.is_load()) {
    std::memcpy(copy.to, copy.data.empty() ? copy.from : copy.data.data(), copy.bytes);
    return;
  }
  poison(copy.to, copy.bytes, false);
  std::memcpy(copy.to, copy.from, copy.bytes);
  Mbarrier& barrier = barriers_.at(copy.barrier);
  if (barrier.phase != copy.phase) {
    fail_for(*copy.issuer, "bulk copy: its mbarrier's phase ended before it did, for it was told to expect fewer bytes",
             copy.where);
  }
  barrier.missing_bytes -= copy.bytes;
  if (barrier.missing == 0 && barrier.missing_bytes < 0) {
    fail_for(*copy.issuer,
             "bulk copy: brings " + std::to_string(-barrier.missing_bytes) +
                 " bytes more than its mbarrier was told to expect",
             copy.where);
  }
  race::on_bulk_end(barrier.queue, barrier.phase + 1, copy.barrier);
  end_phase_if_complete(barrier, copy.barrier);
}

bool BulkCopies::complete_one() {
  if (copies_.empty()) return false;
  switch (options_.order) {
    case Order::kForward:
      complete(0);
      break;
    case Order::kReversed:
      complete(copies_.size() - 1);
      break;
    case Order::kRandom:
      complete(random_() % copies_.size());
      break;
  }
  return true;
}

void BulkCopies::maybe_complete_one() {
  if (options_.order == Order::kRandom && !copies_.empty() && random_() % 64 == 0) complete_one();
}

void BulkCopies::on_block_exit(const Block& block) {
  for (const Copy& copy : copies_) {
    if (copy.is_load() && block.owns_shared(copy.to, copy.bytes)) {
      fail_for(*copy.issuer, "bulk copy: the block exits while shared memory is still to be written", copy.where);
    }
    if (!copy.is_load() && copy.data.empty() && block.owns_shared(copy.from, copy.bytes)) {
      fail_for(*copy.issuer, "bulk copy: the block exits while its shared memory is still to be read", copy.where);
    }
  }
}

std::string BulkCopies::describe(const void* address) const {
  const Mbarrier& barrier = barriers_.at(address);
  return std::to_string(barrier.missing) + " arrivals and " + std::to_string(barrier.missing_bytes) +
         " bytes never came in phase " + std::to_string(barrier.phase);
}

}  // namespace cuda_shim
