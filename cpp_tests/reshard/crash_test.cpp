// Processes that die by SIGKILL (or a fault in the middle of a copy) while they publish or read.
#include <dirent.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <random>

#include "reshard/errors.h"
#include "store_testing.h"

namespace areal::reshard {
namespace {

int open_descriptors() {
  int count = 0;
  DIR* folder = opendir("/proc/self/fd");
  while (readdir(folder) != nullptr) ++count;
  closedir(folder);
  return count;
}

// Runs fn in a child process that must not return from it.
pid_t start_child(const auto& fn) {
  const pid_t child = fork();
  if (child == 0) {
    fn();
    _exit(1);
  }
  return child;
}

void expect_killed(pid_t child, int signal) {
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == signal) << "status " << status;
}

class Crash : public testing::Test {
 protected:
  Crash() : store_(VersionStore::create(test_layout(), kTestChunkBytes)) { publish(store_, 1); }

  // The old version is served, a retry succeeds at once, no descriptor is left over.
  void expect_recovery(int64_t old_version, int descriptors) {
    expect_serves(store_, old_version);
    publish(store_, old_version + 1, Deadline(0.0));
    expect_serves(store_, old_version + 1);
    EXPECT_EQ(open_descriptors(), descriptors);
  }

  VersionStore store_;
};

TEST_F(Crash, AWriterKilledAfterAnyNumberOfChunksLeavesTheOldVersion) {
  const int descriptors = open_descriptors();
  const auto chunks = static_cast<int64_t>(store_.plan().chunks.size());
  ASSERT_GE(chunks, 10);
  for (int64_t done = 0; done <= chunks; ++done) {
    const int64_t old_version = store_.version();
    expect_killed(start_child([&] {
                    Publication publication = store_.begin(1000, VersionOrder::kIncreasing, Deadline(1.0));
                    publication.write(Weights(store_.layout(), 1000).pointers(), {0, done});
                    raise(SIGKILL);
                  }),
                  SIGKILL);
    expect_recovery(old_version, descriptors);
  }
}

TEST_F(Crash, AWriterThatFaultsInTheMiddleOfACopyLeavesTheOldVersion) {
  const int descriptors = open_descriptors();
  const int64_t tensor = *store_.layout().find("layers.5000.weight");
  expect_killed(start_child([&] {
                  signal(SIGSEGV, SIG_DFL);
                  // Of the 20,000 bytes only the first page can be read.
                  void* source = mmap(nullptr, 1 << 16, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
                  mprotect(source, 4096, PROT_READ | PROT_WRITE);
                  const Weights weights(store_.layout(), 1000);
                  std::vector<const std::byte*> sources(weights.pointers().begin(), weights.pointers().end());
                  sources[static_cast<size_t>(tensor)] = static_cast<const std::byte*>(source);
                  store_.begin(1000, VersionOrder::kIncreasing, Deadline(1.0)).write(sources, all_chunks(store_));
                }),
                SIGSEGV);
  expect_recovery(1, descriptors);
}

TEST_F(Crash, ADeadWriterStillUnreapedIsSucceeded) {
  const pid_t child = start_child([&] {
    Publication publication = store_.begin(1000, VersionOrder::kIncreasing, Deadline(1.0));
    raise(SIGKILL);
  });
  siginfo_t info;
  ASSERT_EQ(waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT), 0);
  publish(store_, 2, Deadline(0.0));
  expect_killed(child, SIGKILL);
}

// Starts a child that holds pins of the active version, and waits until it has them.
pid_t start_pinner(const VersionStore& store, int pins) {
  int ready[2];
  EXPECT_EQ(pipe(ready), 0);
  const pid_t child = start_child([&] {
    std::vector<Pin> held;
    for (int i = 0; i < pins; ++i) held.push_back(store.pin(Deadline(1.0)));
    if (write(ready[1], "x", 1) == 1) pause();
  });
  char byte;
  EXPECT_EQ(read(ready[0], &byte, 1), 1);
  close(ready[0]);
  close(ready[1]);
  return child;
}

TEST_F(Crash, PinsOfALivingProcessAreNamedAndThoseOfADeadOneReclaimed) {
  const pid_t reader = start_pinner(store_, 2);
  publish(store_, 2, Deadline(0.0));
  try {
    publish(store_, 3, Deadline(0.0));
    ADD_FAILURE() << "overwrote a pinned version";
  } catch (const DeadlineError& error) {
    const std::string name = "pid " + std::to_string(reader) + " (2 pins)";
    EXPECT_NE(std::string(error.what()).find(name), std::string::npos) << error.what();
  }
  kill(reader, SIGKILL);
  expect_killed(reader, SIGKILL);
  publish(store_, 3, Deadline(0.0));
  expect_serves(store_, 3);
  for (const ReaderSlot& slot : store_.memory()->slots()) EXPECT_EQ(slot.load(), 0u);
}

TEST_F(Crash, ReadersTakeOverTheSlotsOfTheDead) {
  const pid_t reader = start_pinner(store_, kReaderSlots);
  EXPECT_THROW(store_.pin(Deadline(0.0)), DeadlineError);
  kill(reader, SIGKILL);
  expect_killed(reader, SIGKILL);
  std::vector<Pin> pins;
  for (int i = 0; i < kReaderSlots; ++i) pins.push_back(store_.pin(Deadline(0.0)));
  pins.clear();
  publish(store_, 2, Deadline(0.0));
  publish(store_, 3, Deadline(0.0));
}

TEST_F(Crash, AForkedChildReleasesNeitherThePinNorTheSeatOfItsParent) {
  Pin pin = store_.pin(Deadline(1.0));
  Publication publication = store_.begin(2, VersionOrder::kIncreasing, Deadline(0.0));
  const pid_t child = start_child([&] {
    const Pin pin_of_child = std::move(pin);
    const Publication publication_of_child = std::move(publication);
  });
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  publication.write(Weights(store_.layout(), 2).pointers(), all_chunks(store_));
  publication.commit(Verify::kNo);
  EXPECT_THROW(publish(store_, 3, Deadline(0.0)), DeadlineError) << "the child released its parent's pin";
  EXPECT_EQ(count_foreign_elements(store_, pin), 0);
  pin.release();
  publish(store_, 3, Deadline(0.0));
}

// Kills a busy child at moments of no pattern: after it has made a random number of rounds, whatever it is doing then.
void kill_at_random_moments(VersionStore& store, const auto& busy_loop, const auto& check) {
  std::mt19937 random(17);
  for (int round = 0; round < 100; ++round) {
    auto* rounds = static_cast<std::atomic<int64_t>*>(
        mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    const pid_t child = start_child([&] {
      for (;; ++*rounds) busy_loop(store);
    });
    const auto until = static_cast<int64_t>(1 + random() % 4);
    while (rounds->load() < until) sched_yield();
    for (volatile uint32_t spin = random() % 20000; spin > 0;) spin = spin - 1;
    kill(child, SIGKILL);
    expect_killed(child, SIGKILL);
    munmap(rounds, 4096);
    check(store);
  }
}

TEST_F(Crash, AWriterKilledAtRandomMomentsNeverShowsAMixture) {
  const int descriptors = open_descriptors();
  kill_at_random_moments(
      store_, [](const VersionStore& store) { publish(store, store.version() + 1); },
      [&](const VersionStore& store) {
        expect_serves(store, store.version());
        publish(store, store.version() + 1, Deadline(0.0));
        expect_serves(store, store.version());
      });
  EXPECT_EQ(open_descriptors(), descriptors);
}

TEST_F(Crash, ReadersKilledAtRandomMomentsNeverBlockTheWriter) {
  kill_at_random_moments(
      store_, [](const VersionStore& store) { const Pin pin = store.pin(Deadline(30.0)); },
      [](const VersionStore& store) {
        publish(store, store.version() + 1, Deadline(0.0));
        publish(store, store.version() + 1, Deadline(0.0));
        const ControlLine& control = store.memory()->control();
        EXPECT_EQ(control.readers[0].load(), 0u);
        EXPECT_EQ(control.readers[1].load(), 0u);
      });
}

}  // namespace
}  // namespace areal::reshard
