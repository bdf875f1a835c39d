#include "reshard/process_identity.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "base/check.h"

namespace areal::reshard {
namespace {

constexpr int kPidBits = 22;  // PID_MAX_LIMIT of Linux is 2^22
constexpr uint64_t kPidMask = (uint64_t{1} << kPidBits) - 1;

struct ProcessStat {
  char state;
  long threads;
  uint64_t start_ticks;  // since boot
};

// Fields 3, 20 and 22 of /proc/<pid>/stat, counted from behind the command name (which may hold anything).
std::optional<ProcessStat> read_stat(pid_t pid) {
  char path[32], text[1024];
  std::snprintf(path, sizeof path, "/proc/%d/stat", pid);
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return std::nullopt;
  const ssize_t length = read(fd, text, sizeof text - 1);
  close(fd);
  if (length <= 0) return std::nullopt;
  text[length] = '\0';
  const char* field = std::strrchr(text, ')');
  if (field == nullptr || field[1] == '\0') return std::nullopt;
  field += 2;
  ProcessStat stat{*field, 0, 0};
  for (int index = 3; index < 22; ++index) {
    field = std::strchr(field, ' ');
    if (field == nullptr) return std::nullopt;
    ++field;
    if (index + 1 == 20) stat.threads = std::strtol(field, nullptr, 10);
  }
  stat.start_ticks = std::strtoull(field, nullptr, 10);
  return stat;
}

uint64_t pack(pid_t pid, uint64_t start_ticks) {
  return (start_ticks << kPidBits | (static_cast<uint64_t>(pid) & kPidMask)) << 1;
}

uint64_t inode_of(const char* path) {
  struct stat info;
  return stat(path, &info) == 0 ? info.st_ino : 0;  // no time namespaces before Linux 5.6
}

}  // namespace

ProcessIdentity self_identity() {
  static std::atomic<ProcessIdentity> cached{0};
  const pid_t pid = getpid();
  const ProcessIdentity known = cached.load(std::memory_order_relaxed);
  if (known != 0 && pid_of(known) == pid) return known;
  const std::optional<ProcessStat> stat = read_stat(pid);
  AREAL_CHECK(stat.has_value(), "VersionStore: expected a readable /proc/", pid, "/stat, got none (is /proc mounted?)");
  const ProcessIdentity identity = pack(pid, stat->start_ticks);
  cached.store(identity, std::memory_order_relaxed);
  return identity;
}

pid_t pid_of(ProcessIdentity identity) { return static_cast<pid_t>(identity >> 1 & kPidMask); }

bool is_dead(ProcessIdentity identity) {
  const pid_t pid = pid_of(identity);
  if (kill(pid, 0) != 0 && errno == ESRCH) return true;
  const std::optional<ProcessStat> stat = read_stat(pid);
  if (!stat.has_value()) return false;
  // A zombie with threads left is a process whose main thread has ended.
  const bool ended = (stat->state == 'Z' || stat->state == 'X') && stat->threads <= 1;
  return ended || pack(pid, stat->start_ticks) != (identity & ~uint64_t{1});
}

uint64_t namespace_identity() { return inode_of("/proc/self/ns/pid") << 32 ^ inode_of("/proc/self/ns/time"); }

}  // namespace areal::reshard
