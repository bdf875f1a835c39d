// Operations across the lanes of a warp: each is a Meeting of the lanes its mask names. A lane that has its result may
// run ahead to the next meeting while others still have to read this one, so several can be open. Internal.
#pragma once

#include <array>
#include <cstdint>

#include "engine.h"

namespace cuda_shim {

struct Meeting {
  WarpOp op;
  uint32_t mask;
  uint32_t arrived;
  uint32_t unread;  // lanes that have not taken their result yet, once complete
  bool complete;
  Location where;
  uint64_t values[32];
};

struct Warp {
  unsigned first_thread;
  uint32_t exists;  // lanes the block has (its last warp may be partial)
  uint32_t exited;
  uint32_t open;                     // bit i: meetings[i] is in use
  std::array<Meeting, 32> meetings;  // every open one holds a lane, so 32 suffice

  // The incomplete meeting with this mask that the lane has not joined, or a new one.
  Meeting& meeting_for(WarpOp op, uint32_t mask, unsigned lane, Location where);
  void close(Meeting& meeting) { open &= ~(1u << (&meeting - meetings.data())); }
  // Every lane of the mask has come, has exited or never existed.
  bool all_came(const Meeting& meeting) const { return (meeting.mask & ~(meeting.arrived | exited | ~exists)) == 0; }
};

const char* warp_op_name(WarpOp op);

}  // namespace cuda_shim
