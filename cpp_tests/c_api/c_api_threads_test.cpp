// The C library's threads: its own pool and a lent one, from several callers, inside a loop, and after a fork.
#include <areal_core/areal_core.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <thread>
#include <vector>

namespace {

// A scan long enough to be split among threads.
class Scan {
 public:
  Scan() {
    for (int64_t s = 0; s < kSequences; ++s) cu_seqlens_.push_back(cu_seqlens_.back() + 100 + s % 300);
    const auto tokens = static_cast<size_t>(cu_seqlens_.back());
    for (size_t t = 0; t < tokens; ++t) {
      rewards_.push_back(std::sin(0.1f * static_cast<float>(t)));
      values_.push_back(std::cos(0.3f * static_cast<float>(t)));
    }
  }
  std::vector<float> run() const {
    std::vector<float> advantages(rewards_.size(), NAN), returns(rewards_.size(), NAN);
    areal_gae_args args{};
    args.size = sizeof args;
    args.tokens = static_cast<int64_t>(rewards_.size());
    args.sequences = kSequences;
    args.cu_seqlens = cu_seqlens_.data();
    args.rewards = rewards_.data();
    args.values = values_.data();
    args.gamma = 0.99;
    args.lam = 0.95;
    args.advantages = advantages.data();
    args.returns = returns.data();
    EXPECT_EQ(areal_gae_cpu(&args), AREAL_OK) << areal_last_error();
    return advantages;
  }

 private:
  static constexpr int64_t kSequences = 1000;
  std::vector<int64_t> cu_seqlens_{0};
  std::vector<float> rewards_, values_;
};

void expect_same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  ASSERT_EQ(a.size(), b.size());
  EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)), 0);
}

class CApiThreads : public testing::Test {
 protected:
  void TearDown() override {
    EXPECT_EQ(areal_set_thread_pool(nullptr), AREAL_OK);
    EXPECT_EQ(areal_set_num_threads(1), AREAL_OK);
  }
  const Scan scan_;
};

TEST_F(CApiThreads, ResultsDoNotDependOnThreads) {
  EXPECT_EQ(areal_num_threads(), 1);
  const auto alone = scan_.run();
  for (const int64_t threads : {2, 3, 8, 1}) {
    ASSERT_EQ(areal_set_num_threads(threads), AREAL_OK);
    EXPECT_EQ(areal_num_threads(), threads);
    for (int repeat = 0; repeat < 20; ++repeat) expect_same_bits(scan_.run(), alone);
  }
}

TEST_F(CApiThreads, SeveralCallersShareThePool) {
  const auto alone = scan_.run();
  ASSERT_EQ(areal_set_num_threads(3), AREAL_OK);
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i) {
    callers.emplace_back([&] {
      for (int repeat = 0; repeat < 10; ++repeat) expect_same_bits(scan_.run(), alone);
    });
  }
  for (std::thread& caller : callers) caller.join();
}

TEST_F(CApiThreads, TheNumberIsChecked) {
  for (const int64_t threads : {int64_t{0}, int64_t{-1}, int64_t{1} << 40}) {
    EXPECT_EQ(areal_set_num_threads(threads), AREAL_INVALID_ARGUMENT);
    EXPECT_NE(std::string(areal_last_error()).find("expected threads in 1..4096, got " + std::to_string(threads)),
              std::string::npos);
  }
  EXPECT_EQ(areal_num_threads(), 1);
}

TEST_F(CApiThreads, AChildProcessComputesWithoutThePool) {
  const auto alone = scan_.run();
  ASSERT_EQ(areal_set_num_threads(2), AREAL_OK);
  expect_same_bits(scan_.run(), alone);  // the worker has started, and waits again when the fork comes
  const pid_t child = fork();
  if (child == 0) {
    const bool same = scan_.run() == alone && areal_num_threads() == 1 && areal_set_num_threads(2) == AREAL_OK &&
                      areal_num_threads() == 2 && scan_.run() == alone;
    _exit(same ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

struct Lent {
  std::atomic<int64_t> loops = 0, pieces = 0;
};

// One piece after the other, as small as they may be, the last first.
void run_lent(void* context, int64_t begin, int64_t end, int64_t grain, areal_body_fn body, void* body_context) {
  auto* lent = static_cast<Lent*>(context);
  ++lent->loops;
  while (begin < end) {
    const int64_t piece = std::max(begin, end - grain);
    body(body_context, piece, end);
    ++lent->pieces;
    end = piece;
  }
}

TEST_F(CApiThreads, ALentPoolRunsTheLoops) {
  const auto alone = scan_.run();
  Lent lent;
  areal_thread_pool pool{};
  pool.size = sizeof pool;
  pool.context = &lent;
  pool.parallel_for = run_lent;
  EXPECT_EQ(areal_set_thread_pool(&pool), AREAL_INVALID_ARGUMENT) << "no num_threads";
  pool.num_threads = [](void*) -> int64_t { return 5; };
  ASSERT_EQ(areal_set_thread_pool(&pool), AREAL_OK);
  ASSERT_EQ(areal_set_num_threads(2), AREAL_OK);
  EXPECT_EQ(areal_num_threads(), 5) << "the lent pool comes first";
  expect_same_bits(scan_.run(), alone);
  EXPECT_EQ(lent.loops, 1);
  EXPECT_GT(lent.pieces, 1);
  ASSERT_EQ(areal_set_thread_pool(nullptr), AREAL_OK);
  EXPECT_EQ(areal_num_threads(), 2);
  expect_same_bits(scan_.run(), alone);
  EXPECT_EQ(lent.loops, 1);
}

TEST(CApiErrors, EachThreadHasItsOwnText) {
  EXPECT_EQ(areal_gae_cpu(nullptr), AREAL_INVALID_ARGUMENT);
  const std::string text = areal_last_error();
  EXPECT_EQ(text, "areal_gae_cpu: expected args, got NULL");
  std::thread([] {
    EXPECT_STREQ(areal_last_error(), "");
    EXPECT_EQ(areal_set_num_threads(0), AREAL_INVALID_ARGUMENT);
  }).join();
  EXPECT_EQ(text, areal_last_error());
}

}  // namespace
