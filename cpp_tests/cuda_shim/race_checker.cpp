// Memory-order checker of the race build. Kernels are compiled with -fsanitize=thread, which puts a call to __tsan_*
// round every access, and libtsan is not linked: tsan_hooks.cpp sends those calls here. Two accesses of which one
// writes must be ordered (happens_before.h), and shared memory must be written before it is read.
#include "race_checker.h"

#include <algorithm>
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

struct Region {
  uintptr_t begin = 0;
  size_t bytes = 0;

  Region() = default;
  Region(const void* address, size_t size) : begin(reinterpret_cast<uintptr_t>(address)), bytes(size) {}
  bool contains(uintptr_t address) const { return address - begin < bytes; }
};

class Checker {
 public:
  void begin_launch(const char* kernel) {
    kernel_ = kernel;
    shadow_.clear();
    order_.begin_launch();
    block_indices_.assign(1, uint3{});
    seen_.clear();
    findings_.clear();
  }

  void begin_block(unsigned threads, const BlockMemory& memory) {
    order_.begin_block(threads);
    dynamic_shared_ = Region(memory.dynamic_shared, memory.dynamic_shared_bytes);
    unwatched_[0] = Region(memory.stacks, memory.stacks_bytes);
    unwatched_[1] = Region(memory.threads, memory.threads_bytes);
    unwatched_[2] = Region(&current, sizeof current);
    block_indices_.push_back(uint3{});
  }

  void end_launch() {
    if (findings_.empty()) return;
    std::ostringstream out;
    out << "cuda_shim: kernel '" << kernel_ << "':";
    for (const std::string& finding : findings_) out << "\n  " << finding;
    throw Error(out.str());
  }

  HappensBefore& order() { return order_; }
  void watch(bool on) { watching_ = on; }

  void access(uintptr_t address, size_t bytes, bool writes, bool atomic, uintptr_t pc) {
    if (!watching_) return;
    for (const Region& region : unwatched_) {
      if (region.contains(address)) return;
    }
    watching_ = false;  // nor are the containers used below
    const unsigned thread = current->linear;
    block_indices_.back() = current->block_index;
    const Access now{order_.block(),
                     order_.epoch(),
                     order_.clock(thread),
                     static_cast<uint32_t>(pc - program_start()),
                     static_cast<uint16_t>(thread),
                     atomic};
    const bool shared = shared_name(address) != nullptr;
    shadow_.for_each_cell(address, bytes, [&](uintptr_t at, Cell& cell) {
      if (shared) begin_shared(cell, at, now, writes);
      check(cell, at, now, writes);
      remember(cell, now, writes);
    });
    if (atomic) order_.atomic(thread, address);
    watching_ = true;
  }

 private:
  // Name of the shared array at the address, null in global memory.
  const char* shared_name(uintptr_t address) const {
    if (dynamic_shared_.contains(address)) return "dynamic";
    for (const SharedArray& array : shared_arrays()) {
      if (Region(array.address, array.bytes).contains(address)) return array.name.c_str();
    }
    return nullptr;
  }

  // Shared memory is new in every block.
  void begin_shared(Cell& cell, uintptr_t at, const Access& now, bool writes) {
    if (cell.write.block != now.block) cell.write = Access{};
    for (Access& read : cell.reads) {
      if (read.block != now.block) read = Access{};
    }
    if (!cell.write.exists() && (!writes || now.atomic)) {
      report("read of uninitialised memory", at, nullptr, false, now, false);
    }
  }

  void check(const Cell& cell, uintptr_t at, const Access& now, bool writes) {
    const auto races = [&](const Access& earlier) {
      return earlier.exists() && !(earlier.atomic && now.atomic) && !order_.ordered(earlier, now.thread);
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
    if (!first.exists() || order_.ordered(first, now.thread)) {
      first = now;
    } else {
      cell.reads[1] = now;
    }
  }

  std::string describe(const Access& access, bool writes) const {
    std::ostringstream out;
    const uint3 block = block_indices_[access.block];
    out << (access.atomic ? "atomic " : "") << (writes ? "write" : "read") << " by thread " << access.thread
        << " of block (" << block.x << "," << block.y << "," << block.z << ") [warp " << access.thread / 32 << " lane "
        << access.thread % 32 << "] at " << source_line(program_start() + access.pc);
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
  Region dynamic_shared_;
  std::array<Region, 3> unwatched_;
  std::vector<uint3> block_indices_;  // by serial number
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
void on_block(unsigned threads, const BlockMemory& memory) { checker().begin_block(threads, memory); }
void on_barrier() { checker().order().barrier(); }
void on_warp_sync(unsigned first_thread, uint32_t lanes) { checker().order().warp_sync(first_thread, lanes); }
void on_launch_end() { checker().end_launch(); }

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
  race::checker().order().fence(current->linear);
}

}  // namespace cuda_shim
