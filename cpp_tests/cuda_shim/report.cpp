#include "report.h"

#include <cstdio>
#include <cstring>
#include <sstream>

#include "cluster.h"

namespace cuda_shim {
namespace {

constexpr int kGroupsShown = 12;

bool wait_together(const Thread& a, const Thread& b) {
  return a.state == b.state && a.where == b.where && a.meeting == b.meeting && a.mbarrier == b.mbarrier;
}

std::string describe_wait(const Thread& thread) {
  const std::string at = " at " + to_string(thread.where);
  if (thread.state == ThreadState::kReady) return "can run" + at;
  if (thread.state == ThreadState::kAtBarrier) return "wait at __syncthreads" + at;
  if (thread.state == ThreadState::kAtClusterBarrier) return "wait at the cluster barrier" + at;
  if (thread.state == ThreadState::kAtMbarrier) {
    return "wait at an mbarrier" + at + "; " + thread.owner->cluster().copies().describe(thread.mbarrier);
  }
  const Meeting& meeting = *thread.meeting;
  return std::string("wait at ") + warp_op_name(meeting.op) + "(mask " + hex(meeting.mask) + ") at " +
         to_string(thread.where) + "; lanes " + hex(meeting.mask & ~meeting.arrived) + " never came";
}

}  // namespace

std::string hex(uint32_t mask) {
  char text[16];
  std::snprintf(text, sizeof text, "%08x", mask);
  return text;
}

std::string to_string(Location where) {
  const char* slash = std::strrchr(where.file, '/');
  return std::string(slash != nullptr ? slash + 1 : where.file) + ":" + std::to_string(where.line);
}

bool operator==(const Location& a, const Location& b) { return a.line == b.line && std::strcmp(a.file, b.file) == 0; }

void fail(const std::string& message, Location where) { fail_for(running_thread(), message, where); }

void fail_for(const Thread& self, const std::string& message, Location where) {
  std::ostringstream out;
  const uint3 block = self.block_index, thread = self.thread_index;
  out << "cuda_shim: " << message << " at " << to_string(where) << "; kernel '" << self.owner->cluster().launch().name
      << "', block (" << block.x << "," << block.y << "," << block.z << "), thread (" << thread.x << "," << thread.y
      << "," << thread.z << ") [warp " << self.warp << " lane " << self.lane << "]";
  throw Error(out.str());
}

std::string describe_waiting_threads(const std::string& headline, const Block& block) {
  std::ostringstream out;
  const uint3 index = block.threads().front().block_index;
  out << "cuda_shim: " << headline << " in kernel '" << block.cluster().launch().name << "', block (" << index.x << ","
      << index.y << "," << index.z << "): " << block.threads().size() << " threads, " << block.exited() << " exited";
  int shown = 0;
  for (size_t w = 0; w < block.warps().size(); ++w) {
    const Warp& warp = block.warps()[w];
    const Thread* lanes = &block.threads()[warp.first_thread];
    for (uint32_t left = warp.exists & ~warp.exited; left != 0;) {
      const Thread& first = lanes[__builtin_ctz(left)];
      uint32_t group = 0;
      for (uint32_t rest = left; rest != 0; rest &= rest - 1) {
        if (wait_together(first, lanes[__builtin_ctz(rest)])) group |= rest & -rest;
      }
      left &= ~group;
      if (++shown > kGroupsShown) return out.str() + "\n  ...";
      out << "\n  warp " << w << " lanes " << hex(group) << ": " << describe_wait(first);
    }
  }
  return out.str();
}

}  // namespace cuda_shim
