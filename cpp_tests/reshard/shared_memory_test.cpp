#include "reshard/shared_memory.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "base/check.h"

namespace areal::reshard {
namespace {

TEST(SharedMemory, IsOneMemoryBehindEveryDescriptorAndMapping) {
  const SharedMemory created = SharedMemory::create("test", 1 << 20);
  const Mapping writable = created.map(0, 1 << 20, Access::kReadWrite);
  writable.prefault();
  const SharedMemory attached = SharedMemory::attach(created.fd());
  EXPECT_NE(attached.fd(), created.fd());
  EXPECT_EQ(attached.size_bytes(), 1 << 20);
  const Mapping readable = attached.map(1 << 16, 1 << 16, Access::kRead);
  readable.prefault();
  for (size_t i = 0; i < readable.size_bytes(); ++i) ASSERT_EQ(readable.data()[i], std::byte{0});
  writable.data()[(1 << 16) + 5] = std::byte{42};
  EXPECT_EQ(readable.data()[5], std::byte{42});
}

TEST(SharedMemory, PrefaultKeepsWhatIsThere) {
  const SharedMemory memory = SharedMemory::create("test", 1 << 16);
  const Mapping first = memory.map(0, 1 << 16, Access::kReadWrite);
  std::memset(first.data(), 7, first.size_bytes());
  memory.map(0, 1 << 16, Access::kReadWrite).prefault();
  for (size_t i = 0; i < first.size_bytes(); ++i) ASSERT_EQ(first.data()[i], std::byte{7});
}

TEST(SharedMemory, CannotChangeSizeUnderAReader) {
  const SharedMemory memory = SharedMemory::create("test", 1 << 16);
  EXPECT_NE(ftruncate(memory.fd(), 0), 0);
  EXPECT_NE(ftruncate(memory.fd(), 1 << 20), 0);
}

TEST(SharedMemory, MappingOutlivesTheDescriptor) {
  Mapping mapping;
  {
    const SharedMemory memory = SharedMemory::create("test", 1 << 16);
    mapping = memory.map(0, 1 << 16, Access::kReadWrite);
  }
  mapping.data()[0] = std::byte{1};
  EXPECT_EQ(mapping.data()[0], std::byte{1});
}

TEST(SharedMemory, ReadersCannotWrite) {
  const SharedMemory memory = SharedMemory::create("test", 1 << 16);
  const Mapping mapping = memory.map(0, 1 << 16, Access::kRead);
  EXPECT_DEATH(*const_cast<volatile std::byte*>(mapping.data()) = std::byte{1}, "");
}

TEST(SharedMemory, RefusesForeignDescriptors) {
  EXPECT_THROW(SharedMemory::attach(-1), Error);
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  EXPECT_THROW(SharedMemory::attach(ends[0]), Error);
  close(ends[0]);
  close(ends[1]);
  const int unsealed = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  EXPECT_THROW(SharedMemory::attach(unsealed), Error);
  close(unsealed);
  const int file = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
  EXPECT_THROW(SharedMemory::attach(file), Error);
  close(file);
}

TEST(SharedMemory, RefusesMoreThanTheMachineHas) {
  EXPECT_THROW(SharedMemory::create("test", int64_t{1} << 50), Error);
}

}  // namespace
}  // namespace areal::reshard
