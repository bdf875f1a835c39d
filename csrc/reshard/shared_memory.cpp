#include "reshard/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <utility>

#include "base/check.h"

namespace areal::reshard {
namespace {

constexpr unsigned kNoExecSeal = 0x8;  // MFD_NOEXEC_SEAL, which some systems demand and older headers lack
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

// For kernels without MADV_POPULATE_* (before 5.14).
void touch_pages(std::byte* data, size_t bytes, Access access) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  for (size_t at = 0; at < bytes; at += page) {
    // Adding zero is atomic, so it cannot undo a store of another process that maps the page already.
    if (access == Access::kReadWrite) {
      std::atomic_ref<uint8_t>(reinterpret_cast<uint8_t&>(data[at])).fetch_add(0, std::memory_order_relaxed);
    } else {
      static_cast<void>(*const_cast<const volatile std::byte*>(data + at));
    }
  }
}

// In slices, so that a process with a busy timer signal makes progress: an interrupted call gives its pages back.
void reserve_pages(int fd, int64_t bytes) {
  constexpr int64_t kSliceBytes = int64_t{16} << 20;
  for (int64_t at = 0; at < bytes;) {
    const int64_t slice = std::min(bytes - at, kSliceBytes);
    const int error = posix_fallocate(fd, at, slice);
    AREAL_CHECK(error == 0 || error == EINTR, "SharedMemory: expected ", bytes, " bytes of shared memory, got ",
                std::strerror(error), " after ", at);
    if (error == 0) at += slice;
  }
}

}  // namespace

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(access_, other.access_);
  return *this;
}

Mapping::~Mapping() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

void Mapping::prefault() const {
  int failed = -1;
#if defined(MADV_POPULATE_READ)
  failed = madvise(data_, bytes_, access_ == Access::kReadWrite ? MADV_POPULATE_WRITE : MADV_POPULATE_READ);
#endif
  if (failed != 0) touch_pages(data_, bytes_, access_);
}

SharedMemory SharedMemory::create(const char* name, int64_t bytes) {
  // The kernel would hand out pages until it has to kill somebody.
  const int64_t machine_bytes = int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
  AREAL_CHECK(bytes <= machine_bytes, "SharedMemory: expected at most ", machine_bytes,
              " bytes of shared memory (the machine has no more), got ", bytes);
  int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING | kNoExecSeal);
  if (fd < 0 && errno == EINVAL) fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);  // before Linux 6.3
  AREAL_CHECK(fd >= 0, "SharedMemory: expected a new memfd, got ", std::strerror(errno));
  SharedMemory memory(fd, bytes);
  AREAL_CHECK(ftruncate(fd, bytes) == 0, "SharedMemory: expected ", bytes, " bytes of shared memory, got ",
              std::strerror(errno));
  reserve_pages(fd, bytes);
  AREAL_CHECK(fcntl(fd, F_ADD_SEALS, kSeals) == 0, "SharedMemory: expected a sealable memfd, got ",
              std::strerror(errno));
  return memory;
}

SharedMemory SharedMemory::attach(int fd) {
  struct stat info;
  AREAL_CHECK(fstat(fd, &info) == 0, "SharedMemory: expected an open descriptor, got fd ", fd, ": ",
              std::strerror(errno));
  const int seals = fcntl(fd, F_GET_SEALS);
  AREAL_CHECK(seals >= 0 && (seals & kSeals) == kSeals, "SharedMemory: expected fd ", fd,
              " = a memfd of sealed size, got something else");
  const int copy = fcntl(fd, F_DUPFD_CLOEXEC, 3);
  AREAL_CHECK(copy >= 0, "SharedMemory: expected to duplicate fd ", fd, ", got ", std::strerror(errno));
  return SharedMemory(copy, info.st_size);
}

SharedMemory::SharedMemory(SharedMemory&& other) noexcept : fd_(std::exchange(other.fd_, -1)), bytes_(other.bytes_) {}

SharedMemory::~SharedMemory() {
  if (fd_ >= 0) close(fd_);
}

Mapping SharedMemory::map(int64_t offset_bytes, int64_t bytes, Access access) const {
  const int protection = access == Access::kReadWrite ? PROT_READ | PROT_WRITE : PROT_READ;
  void* data = mmap(nullptr, static_cast<size_t>(bytes), protection, MAP_SHARED, fd_, offset_bytes);
  AREAL_CHECK(data != MAP_FAILED, "SharedMemory: expected to map ", bytes, " bytes, got ", std::strerror(errno));
  return Mapping(static_cast<std::byte*>(data), static_cast<size_t>(bytes), access);
}

int64_t monotonic_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

}  // namespace areal::reshard
