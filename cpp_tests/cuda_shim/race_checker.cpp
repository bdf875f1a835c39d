// Memory-order checker of the race build. Kernels are compiled with -fsanitize=thread, which puts a call to __tsan_*
// round every access, and libtsan is not linked: tsan_hooks.cpp sends those calls here. Two accesses of which one
// writes must be ordered (happens_before.h), and shared memory must be written before it is read.
#include "race_checker.h"

#include <algorithm>
#include <map>
#include <set>
#include <sstream>
#include <utility>
#include <vector>

#include "engine.h"
#include "happens_before.h"
#include "race_access.h"
#include "shadow.h"
#include "shared_arrays.h"
#include "source_line.h"

namespace cuda_shim::race {
namespace {

constexpr int kReportsShown = 8;

class Checker {
 public:
  void begin_launch(const char* kernel) {
    kernel_ = kernel;
    shadow_.clear();
    order_.begin_launch();
    block_indices_.assign(1, {});
    seen_.clear();
    findings_.clear();
  }

  void begin_cluster(const ClusterMemory& memory) {
    slots_per_block_ = memory.slots_per_block;
    dynamic_shared_ = memory.dynamic_shared;
    exited_.assign(dynamic_shared_.size(), false);
    remote_.assign(dynamic_shared_.size(), {});
    order_.begin_cluster(static_cast<unsigned>(memory.blocks.size()), slots_per_block_);
    unwatched_ = {memory.stacks, memory.threads, Region(&current, sizeof current)};
    block_indices_.push_back(memory.blocks);
  }
  // What other blocks did to its shared memory must come before.
  void exit_block(unsigned block) {
    exited_[block] = true;
    for (const auto& [slot, remote] : remote_[block]) {
      if (order_.block_knows(block, remote.access)) continue;
      report("the block that owns it may have exited", remote.address, nullptr, false, remote.access, remote.writes);
    }
  }

  std::string findings() const {
    if (findings_.empty()) return "";
    std::ostringstream out;
    out << "cuda_shim: kernel '" << kernel_ << "':";
    for (const std::string& finding : findings_) out << "\n  " << finding;
    return out.str();
  }

  HappensBefore& order() { return order_; }
  void watch(bool on) { watching_ = on; }

  void access(uintptr_t address, size_t bytes, bool writes, bool atomic, uintptr_t pc) {
    if (!watching_) return;
    for (const Region& region : unwatched_) {
      if (region.contains(address)) return;
    }
    watching_ = false;  // nor are the containers used below
    const unsigned slot = current->slot;
    visit(address, bytes, writes, made_by(slot, order_.clock(slot), atomic, pc));
    if (atomic) order_.atomic(slot, address);
    watching_ = true;
  }

  void bulk_access(uintptr_t address, size_t bytes, bool writes, unsigned queue, uint32_t clock, uintptr_t pc) {
    visit(address, bytes, writes, made_by(queue, clock, false, pc));
  }

 private:
  Access made_by(unsigned slot, uint32_t clock, bool atomic, uintptr_t pc) const {
    return {order_.cluster(), clock, static_cast<uint32_t>(pc - program_start()), static_cast<uint16_t>(slot), atomic};
  }
  bool is_bulk(const Access& access) const {
    return access.slot >= block_indices_[access.cluster].size() * slots_per_block_;
  }

  void visit(uintptr_t address, size_t bytes, bool writes, const Access& now) {
    const bool shared = shared_name(address) != nullptr;
    if (shared) check_owner(address, now, writes);
    shadow_.for_each_cell(address, bytes, [&](uintptr_t at, Cell& cell) {
      if (shared) begin_shared(cell, at, now, writes);
      check(cell, at, now, writes);
      if (shared && is_bulk(now)) check_shown(cell, at, now, writes);
      remember(cell, now, writes);
    });
  }

  // Name of the shared array at the address, null in global memory.
  const char* shared_name(uintptr_t address) const {
    for (const Region& region : dynamic_shared_) {
      if (region.contains(address)) return "dynamic";
    }
    for (const SharedArray& array : shared_arrays()) {
      if (Region(array.address, array.bytes).contains(address)) return array.name.c_str();
    }
    return nullptr;
  }

  // Another block's shared memory is there from the first cluster barrier to that block's exit.
  void check_owner(uintptr_t address, const Access& now, bool writes) {
    for (unsigned block = 0; block < dynamic_shared_.size(); ++block) {
      if (block == current->cluster_rank || !dynamic_shared_[block].contains(address)) continue;
      if (exited_[block]) report("the block that owns it may have exited", address, nullptr, false, now, writes);
      if (!order_.has_heard_of_block(current->slot, block)) {
        report("the block that owns it may not have started", address, nullptr, false, now, writes);
      }
      remote_[block][now.slot] = {now, writes, address};
    }
  }

  // Bulk copies see what threads wrote to shared memory only after a fence of the writer.
  void check_shown(const Cell& cell, uintptr_t at, const Access& now, bool writes) {
    if (cell.write.exists() && !is_bulk(cell.write) && !order_.shown_to_async(cell.write)) {
      report("no fence_async_proxy between a write and a bulk copy", at, &cell.write, true, now, writes);
    }
  }

  // Shared memory is new in every block.
  void begin_shared(Cell& cell, uintptr_t at, const Access& now, bool writes) {
    if (cell.write.cluster != now.cluster) cell.write = Access{};
    for (Access& read : cell.reads) {
      if (read.cluster != now.cluster) read = Access{};
    }
    if (!cell.write.exists() && (!writes || now.atomic)) {
      report("read of uninitialised memory", at, nullptr, false, now, false);
    }
  }

  void check(const Cell& cell, uintptr_t at, const Access& now, bool writes) {
    const auto races = [&](const Access& earlier) {
      return earlier.exists() && !(earlier.atomic && now.atomic) && !order_.ordered(earlier, current->slot);
    };
    if (races(cell.write)) report(writes ? "write-write race" : "write-read race", at, &cell.write, true, now, writes);
    if (!writes) return;
    for (const Access& read : cell.reads) {
      if (races(read)) report("read-write race", at, &read, false, now, true);
    }
  }

  void remember(Cell& cell, const Access& now, bool writes) {
    if (writes) {
      cell.write = now;
      cell.reads = {};
      return;
    }
    // Two reads are kept: one that is ordered before this one needs no memory of its own.
    Access& first = cell.reads[0];
    if (!first.exists() || order_.ordered(first, current->slot)) {
      first = now;
    } else {
      cell.reads[1] = now;
    }
  }

  std::string describe(const Access& access, bool writes) const {
    std::ostringstream out;
    out << (access.atomic ? "atomic " : "") << (writes ? "write" : "read");
    if (is_bulk(access)) {
      out << " by a bulk copy";
    } else {
      const uint3 block = block_indices_[access.cluster][access.slot / slots_per_block_];
      const unsigned thread = access.slot % slots_per_block_;
      out << " by thread " << thread << " of block (" << block.x << "," << block.y << "," << block.z << ") [warp "
          << thread / 32 << " lane " << thread % 32 << "]";
    }
    out << " at " << source_line(program_start() + access.pc);
    return out.str();
  }

  void report(const char* what, uintptr_t at, const Access* earlier, bool earlier_writes, const Access& now,
              bool writes) {
    if (findings_.size() >= kReportsShown || !seen_.insert({earlier != nullptr ? earlier->pc : 0, now.pc}).second) {
      return;
    }
    std::ostringstream out;
    const char* name = shared_name(at);
    out << what << (name != nullptr ? " in shared memory (" + variable_name(name) + "): " : " in global memory: ");
    if (earlier != nullptr) out << describe(*earlier, earlier_writes) << " and ";
    out << describe(now, writes);
    if (earlier != nullptr) out << "; nothing orders them";
    findings_.push_back(out.str());
  }

  bool watching_ = false;
  std::string kernel_;
  Shadow shadow_;
  HappensBefore order_;
  struct RemoteAccess {
    Access access;
    bool writes;
    uintptr_t address;
  };

  unsigned slots_per_block_ = 1;
  std::vector<Region> dynamic_shared_;                    // by rank in the running cluster
  std::vector<bool> exited_;                              // likewise
  std::vector<std::map<uint16_t, RemoteAccess>> remote_;  // likewise: the last access of each thread of other blocks
  std::array<Region, 3> unwatched_;
  std::vector<std::vector<uint3>> block_indices_;  // by serial number of the cluster, then rank
  std::set<std::pair<uint32_t, uint32_t>> seen_;
  std::vector<std::string> findings_;
};

Checker& checker() {
  static Checker instance;
  return instance;
}

}  // namespace

void watch(bool on) { checker().watch(on); }
void on_launch(const char* kernel) { checker().begin_launch(kernel); }
void on_cluster(const ClusterMemory& memory) { checker().begin_cluster(memory); }
void on_barrier(unsigned block) { checker().order().barrier(block); }
void on_warp_sync(unsigned first_slot, uint32_t lanes) { checker().order().warp_sync(first_slot, lanes); }
void on_block_exit(unsigned block) { checker().exit_block(block); }
std::string findings() { return checker().findings(); }

void on_release(const void* point) { checker().order().release(current->slot, reinterpret_cast<uintptr_t>(point)); }
void on_end_phase(const void* point) { checker().order().end_phase(reinterpret_cast<uintptr_t>(point)); }
void on_acquire(const void* point) { checker().order().acquire(current->slot, reinterpret_cast<uintptr_t>(point)); }

unsigned add_queue() { return checker().order().add_queue(); }
void on_bulk_access(const void* address, size_t bytes, bool writes, unsigned queue, uint32_t clock, const void* pc) {
  checker().bulk_access(reinterpret_cast<uintptr_t>(address), bytes, writes, queue, clock,
                        reinterpret_cast<uintptr_t>(pc));
}
void on_bulk_end(unsigned queue, uint32_t clock, const void* point) {
  checker().order().reach(queue, clock, reinterpret_cast<uintptr_t>(point));
}
void on_bulk_wait(unsigned queue, uint32_t clock) { checker().order().reach_thread(queue, clock, current->slot); }
void on_mbarrier(const void* barrier, bool initialises, const void* pc) {
  watch(true);
  checker().access(reinterpret_cast<uintptr_t>(barrier), 8, true, !initialises, reinterpret_cast<uintptr_t>(pc));
  watch(false);
}

void on_access(const void* address, size_t bytes, bool writes, const void* pc) {
  checker().access(reinterpret_cast<uintptr_t>(address), bytes, writes, false, reinterpret_cast<uintptr_t>(pc));
}

}  // namespace cuda_shim::race

namespace cuda_shim {

void note_atomic(const void* address, size_t bytes, const void* pc) {
  race::checker().access(reinterpret_cast<uintptr_t>(address), bytes, true, true, reinterpret_cast<uintptr_t>(pc));
}
void note_fence() {
  const race::Unwatched scope;
  race::checker().order().fence(current->slot);
}
void fence_async_proxy() {
  const race::Unwatched scope;
  race::checker().order().async_fence(current->slot);
}

}  // namespace cuda_shim
