#include "warp.h"

#include "block.h"
#include "cluster.h"
#include "race_checker.h"
#include "report.h"

namespace cuda_shim {

const char* warp_op_name(WarpOp op) {
  static constexpr const char* kNames[] = {"__syncwarp",       "__shfl_sync",      "__shfl_xor_sync", "__shfl_up_sync",
                                           "__shfl_down_sync", "__ballot_sync",    "__any_sync",      "__all_sync",
                                           "__reduce_*_sync",  "__match_any_sync", "__match_all_sync"};
  return kNames[static_cast<int>(op)];
}

Meeting& Warp::meeting_for(WarpOp op, uint32_t mask, unsigned lane, Location where) {
  for (uint32_t left = open; left != 0; left &= left - 1) {
    Meeting& meeting = meetings[static_cast<size_t>(__builtin_ctz(left))];
    if (!meeting.complete && meeting.mask == mask && !(meeting.arrived >> lane & 1)) return meeting;
  }
  const auto slot = static_cast<size_t>(__builtin_ctz(~open));
  open |= 1u << slot;
  Meeting& meeting = meetings[slot];
  meeting.op = op;
  meeting.mask = mask;
  meeting.arrived = meeting.unread = 0;
  meeting.complete = false;
  meeting.where = where;
  return meeting;
}

LaneValues Block::warp_meet(WarpOp op, uint32_t mask, uint64_t value, Location where) {
  const race::Unwatched scope;
  Thread& self = running_thread();
  Warp& warp = warps_[self.warp];
  if (!(mask >> self.lane & 1)) {
    fail(std::string(warp_op_name(op)) + ": the calling lane is not in its own mask " + hex(mask), where);
  }
  Meeting& meeting = warp.meeting_for(op, mask, self.lane, where);
  // __syncwarp may be reached at different lines; values may not be exchanged between different ones.
  if (meeting.op != op || (op != WarpOp::kSync && !(meeting.where == where))) {
    fail(std::string("lanes of one warp meet in different operations: ") + warp_op_name(meeting.op) + " at " +
             to_string(meeting.where) + " and " + warp_op_name(op),
         where);
  }
  meeting.values[self.lane] = value;
  meeting.arrived |= 1u << self.lane;
  self.meeting = &meeting;
  if (warp.all_came(meeting)) {
    complete(warp, meeting);
  } else {
    park(ThreadState::kAtWarpOp, where);
    cluster_.yield();
  }
  return {meeting.values, meeting.arrived};
}

void Block::warp_leave() {
  const race::Unwatched scope;
  Thread& self = running_thread();
  Meeting& meeting = *self.meeting;
  self.meeting = nullptr;
  meeting.unread &= ~(1u << self.lane);
  if (meeting.unread == 0) warps_[self.warp].close(meeting);
}

void Block::complete(Warp& warp, Meeting& meeting) {
  meeting.complete = true;
  meeting.unread = meeting.arrived;
  if (meeting.op == WarpOp::kSync) race::on_warp_sync(threads_[warp.first_thread].slot, meeting.arrived);
  for (uint32_t left = meeting.arrived; left != 0; left &= left - 1) {
    Thread& thread = threads_[warp.first_thread + static_cast<unsigned>(__builtin_ctz(left))];
    if (thread.state == ThreadState::kAtWarpOp) make_ready(thread);
  }
}

}  // namespace cuda_shim
