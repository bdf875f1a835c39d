#include "reshard/process_identity.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

namespace areal::reshard {
namespace {

TEST(ProcessIdentity, IsStableAndAliveForTheCaller) {
  const ProcessIdentity self = self_identity();
  EXPECT_EQ(self_identity(), self);
  EXPECT_EQ(pid_of(self), getpid());
  EXPECT_EQ(self & 1, 0u);
  EXPECT_FALSE(is_dead(self));
  EXPECT_FALSE(is_dead(self | 1)) << "bit 0 belongs to the user of the word";
}

TEST(ProcessIdentity, FollowsAForkAndSeesDeathBeforeTheZombieIsReaped) {
  int to_parent[2];
  ASSERT_EQ(pipe(to_parent), 0);
  const ProcessIdentity parent = self_identity();
  const pid_t child = fork();
  if (child == 0) {
    const ProcessIdentity mine = self_identity();
    _exit(write(to_parent[1], &mine, sizeof mine) == sizeof mine && pause() ? 0 : 1);
  }
  ProcessIdentity identity = 0;
  ASSERT_EQ(read(to_parent[0], &identity, sizeof identity), ssize_t{sizeof identity});
  EXPECT_NE(identity, parent);
  EXPECT_EQ(pid_of(identity), child);
  EXPECT_FALSE(is_dead(identity));

  kill(child, SIGKILL);
  siginfo_t info;
  ASSERT_EQ(waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT), 0);  // a zombie now
  EXPECT_TRUE(is_dead(identity));
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  EXPECT_TRUE(is_dead(identity));
  close(to_parent[0]);
  close(to_parent[1]);
}

TEST(ProcessIdentity, AUsedAgainPidIsAnotherProcess) {
  const ProcessIdentity self = self_identity();
  const ProcessIdentity earlier = self - (uint64_t{1} << 23);  // the same pid, started a tick before
  EXPECT_EQ(pid_of(earlier), getpid());
  EXPECT_TRUE(is_dead(earlier));
}

}  // namespace
}  // namespace areal::reshard
