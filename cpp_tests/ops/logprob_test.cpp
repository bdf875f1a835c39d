// The CPU version of the log-softmax gather: every instruction set, any number of threads.
#include "base/isa.h"
#include "base/threads.h"
#include "logprob_oracle.h"

namespace areal::logprob_test {
namespace {

// Pools without threads, which still split the range as a pool of that many would, and run the pieces last to first.
template <int kThreads>
void split_backwards(int64_t begin, int64_t end, int64_t grain, RangeFn fn) {
  const int64_t piece = std::max(grain, (end - begin + kThreads - 1) / kThreads);
  const int64_t pieces = (end - begin + piece - 1) / piece;
  for (int64_t i = pieces; i-- > 0;) fn(begin + i * piece, std::min(end, begin + (i + 1) * piece));
}

class Logprob : public testing::Test {
 protected:
  void TearDown() override {
    set_parallel_for(nullptr, nullptr);
    set_active_isa(best_isa());
  }
};

template <class Real>
Result<Real> forward(const Problem<Real>& problem) {
  Result<Real> result(problem.logits.rows);
  logprob_forward_cpu(problem.input(), result.output());
  return result;
}

template <class Real>
void check(const Problem<Real>& problem) {
  const Result<Real> result = forward(problem);
  Matrix grad(problem.logits.dtype, problem.logits.rows, problem.logits.columns, 2, 1);
  logprob_backward_cpu(problem.input(), result.gradient(problem, grad));
  expect_matches_oracle(problem, result, grad);
  EXPECT_TRUE(grad.surroundings_untouched());
}

TEST_F(Logprob, EveryTailOnEveryInstructionSet) {
  for (const Isa isa : {Isa::kBaseline, Isa::kAvx2, Isa::kAvx512}) {
    if (isa > best_isa()) continue;
    set_active_isa(isa);
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      for (int64_t vocab = 1; vocab <= 70; ++vocab) {
        SCOPED_TRACE(std::string(isa_name(isa)) + ", " + dtype_name(dtype) + ", V = " + std::to_string(vocab));
        check(Problem<float>(dtype, 2, vocab, 1, 3, 1));
      }
      check(Problem<float>(dtype, 2, 4095, 1, 3, 1));
      check(Problem<float>(dtype, 2, 8193, 1, 3, 1));
    }
  }
}

TEST_F(Logprob, Float64) {
  for (const int64_t vocab : {1, 33, 5000}) check(Problem<double>(DType::kFloat64, 3, vocab, 2, 1));
}

TEST_F(Logprob, ResultsAreBitwiseTheSameForAnyNumberOfThreads) {
  for (const int64_t rows : {1, 3, 40}) {
    const Problem<float> problem(DType::kBFloat16, rows, 50257, 3);
    const Result<float> result = forward(problem);
    Matrix grad(DType::kBFloat16, rows, 50257);
    logprob_backward_cpu(problem.input(), result.gradient(problem, grad));
    const auto again = [&](ParallelForFn pool, NumThreadsFn threads) {
      set_parallel_for(pool, threads);
      EXPECT_TRUE(forward(problem) == result) << rows << " rows, " << threads() << " threads";
      Matrix other(DType::kBFloat16, rows, 50257);
      logprob_backward_cpu(problem.input(), result.gradient(problem, other));
      EXPECT_EQ(std::memcmp(grad.base(), other.base(), static_cast<size_t>(rows * 50257 * 2)), 0);
    };
    again(split_backwards<2>, [] { return int64_t{2}; });
    again(split_backwards<7>, [] { return int64_t{7}; });
    again(split_backwards<64>, [] { return int64_t{64}; });
  }
}

TEST_F(Logprob, InPlaceBackwardIsTheSameWhenManyThreadsShareARow) {
  Problem<float> problem(DType::kFloat32, 1, 50257, 4);
  const Result<float> result = forward(problem);
  Matrix grad(DType::kFloat32, 1, 50257);
  logprob_backward_cpu(problem.input(), result.gradient(problem, grad));
  set_parallel_for(split_backwards<13>, [] { return int64_t{13}; });
  logprob_backward_cpu(problem.input(), result.gradient(problem, problem.logits));
  EXPECT_EQ(std::memcmp(grad.base(), problem.logits.base(), 50257 * 4), 0);
}

template <class Real>
Result<Real> check_shards(const Problem<Real>& problem, const std::vector<int64_t>& sizes) {
  return check_shards(
      problem, sizes,
      [](const auto& shard, int64_t total, LogprobPart<Real>* parts) { logprob_partial_cpu(shard, total, parts); },
      [](const auto& input, const LogprobPart<Real>* parts, int64_t ranks, const auto& output) {
        logprob_merge_cpu(input, parts, ranks, output);
      },
      [](const auto& shard, const auto& gradient) { logprob_backward_cpu(shard, gradient); });
}

TEST_F(Logprob, ShardsOfTheVocabularyMergeIntoTheRow) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const std::vector<int64_t>& sizes :
         {std::vector<int64_t>{1}, {1, 1}, {37, 1, 62}, {4095, 4096, 1, 4097}, {0, 5, 0, 3}}) {
      SCOPED_TRACE(std::string(dtype_name(dtype)) + ", " + std::to_string(sizes.size()) + " shards");
      int64_t vocab = 0;
      for (const int64_t size : sizes) vocab += size;
      Problem<float> problem(dtype, 2 * static_cast<int64_t>(sizes.size()) + 1, vocab, 7, 3, 1);
      int64_t start = 0, row = 0;
      for (const int64_t size : sizes) {  // labels on either side of every border; the last row stays as it is
        problem.labels[static_cast<size_t>(row++)] = std::min(start, vocab - 1);
        start += size;
        problem.labels[static_cast<size_t>(row++)] = std::max<int64_t>(start - 1, 0);
      }
      problem.mask.assign(problem.labels.size(), 1);
      problem.mask[1] = 0;
      check_shards(problem, sizes);
    }
  }
  check_shards(Problem<double>(DType::kFloat64, 3, 100, 8), {33, 67});
}

TEST_F(Logprob, ShardsGiveTheSameBitsForAnyNumberOfThreads) {
  const Problem<float> problem(DType::kBFloat16, 3, 50257, 9);
  const Result<float> result = check_shards(problem, {20000, 30257});
  set_parallel_for(split_backwards<7>, [] { return int64_t{7}; });
  EXPECT_TRUE(check_shards(problem, {20000, 30257}) == result);
}

TEST_F(Logprob, LargeOffsetsLoseNoDigits) {
  for (const Isa isa : {Isa::kBaseline, best_isa()}) {
    set_active_isa(isa);
    Problem<float> problem(DType::kFloat32, 1, 2, 5);
    problem.temperature = 1.0;
    problem.labels = {0};
    problem.logits.set(0, 0, 16384);
    problem.logits.set(0, 1, 16383);
    EXPECT_NEAR(forward(problem).logprobs[0], -0.31326168751822286, 1e-7);
  }
}

TEST_F(Logprob, NothingIsWrittenWhenARowIsRefused) {
  Problem<float> problem(DType::kFloat32, 3, 8, 6);
  problem.labels[2] = 8;
  Result<float> result(3), untouched(3);
  EXPECT_THROW(logprob_forward_cpu(problem.input(), result.output()), Error);
  EXPECT_TRUE(result == untouched);
  problem.labels[2] = 0;
  problem.temperatures = {1, -1, 1};
  EXPECT_THROW(logprob_forward_cpu(problem.input(), result.output()), Error);
  problem.mask = {1, 0, 1};
  EXPECT_NO_THROW(logprob_forward_cpu(problem.input(), result.output()));
}

}  // namespace
}  // namespace areal::logprob_test
