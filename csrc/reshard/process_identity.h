// Names a process so that its death is noticed even when its pid is used again: pid and start time in one 64-bit
// word, which an atomic in shared memory can hold.
#pragma once

#include <sys/types.h>

#include <cstdint>

namespace areal::reshard {

// Never 0. Bit 0 is always clear: free for the user of the word.
using ProcessIdentity = uint64_t;

// The calling process; right after fork() too, while exec() changes nothing. Throws areal::Error when /proc is not
// mounted.
ProcessIdentity self_identity();
pid_t pid_of(ProcessIdentity identity);

// Whether that process surely no longer runs: its pid is free, is a zombie, or belongs to a process started at another
// time. When the kernel will not tell (a /proc that hides other users' processes), the answer is no.
bool is_dead(ProcessIdentity identity);

// Identifies the pid and time namespaces of this process. Identities mean something only where this is equal.
uint64_t namespace_identity();

}  // namespace areal::reshard
