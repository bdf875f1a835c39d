// The CUDA launchers and kernels of the log-softmax gather, run on the CPU.
#include <sys/mman.h>

#include "cuda_shim/orders.h"
#include "logprob_oracle.h"

namespace areal::logprob_test {
namespace {

constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

// The number of blocks that share a row shows in the workspace: 12 bytes a block and a 4-byte counter a row.
int64_t splits_of(const Problem<float>& problem) {
  const int64_t bytes = logprob_workspace_bytes(problem.input());
  return bytes == 0 ? 1 : (bytes / problem.logits.rows - 4) / 12;
}

Result<float> forward(const Problem<float>& problem, int64_t* bad_row) {
  Result<float> result(problem.logits.rows);
  std::vector<float> workspace(static_cast<size_t>(logprob_workspace_bytes(problem.input()) / 4 + 1), NAN);
  *bad_row = 0;
  logprob_forward_cuda(problem.input(), result.output(), {workspace.data(), bad_row}, nullptr);
  return result;
}

Result<float> forward(const Problem<float>& problem) {
  int64_t bad_row = 0;
  Result<float> result = forward(problem, &bad_row);
  EXPECT_EQ(bad_row, 0);
  return result;
}

void backward(const Problem<float>& problem, const Result<float>& result, Matrix& grad) {
  logprob_backward_cuda(problem.input(), result.gradient(problem, grad), nullptr);
}

void check(const Problem<float>& problem) {
  const Result<float> result = forward(problem);
  Matrix grad(problem.logits.dtype, problem.logits.rows, problem.logits.columns,
              problem.logits.stride - problem.logits.columns, problem.logits.offset);
  backward(problem, result, grad);
  expect_matches_oracle(problem, result, grad);
  EXPECT_TRUE(grad.surroundings_untouched());
}

TEST(LogprobKernel, EveryTailAndAlignment) {
  for (const DType dtype : kDTypes) {
    for (int64_t vocab = 1; vocab <= 34; ++vocab) {
      SCOPED_TRACE(std::string(dtype_name(dtype)) + ", V = " + std::to_string(vocab));
      check(Problem<float>(dtype, 3, vocab, 1, vocab % 5, vocab % 8));
    }
  }
}

TEST(LogprobKernel, RowsOfSeveralRounds) {
  for (const DType dtype : kDTypes) {
    for (const int64_t vocab : {4096, 9001}) {
      SCOPED_TRACE(std::string(dtype_name(dtype)) + ", V = " + std::to_string(vocab));
      Problem<float> problem(dtype, 9, vocab, 2, 3, 1);
      EXPECT_EQ(splits_of(problem), 1);
      problem.mask = {1, 0, 1, 1, 1, 0, 1, 1, 1};
      problem.labels[3] = -100;
      check(problem);
    }
  }
}

TEST(LogprobKernel, FewRowsShareTheirVocabularyOverBlocks) {
  for (const DType dtype : kDTypes) {
    Problem<float> problem(dtype, 3, 33000, 3, 1, 5);
    problem.temperatures = {0.5f, 1.0f, 2.0f};
    problem.mask = {1, 1, 0};
    EXPECT_GT(splits_of(problem), 2);
    check(problem);
  }
}

TEST(LogprobKernel, ResultsDoNotDependOnTheOrderOfBlocksAndThreads) {
  const Problem<float> split(DType::kBFloat16, 2, 20000, 4, 0, 3), whole(DType::kFloat32, 9, 1000, 4, 1);
  EXPECT_GT(splits_of(split), 1);
  for (const Problem<float>* problem : {&split, &whole}) {
    const Result<float> first = forward(*problem);
    cuda_shim::for_each_order([&] { EXPECT_TRUE(forward(*problem) == first); });
  }
}

TEST(LogprobKernel, PersistentGridCoversMoreRowsThanBlocks) {
  check(Problem<float>(DType::kFloat32, 4 * 32 + 5, 37, 5));
}

TEST(LogprobKernel, GradientWithAnotherAlignmentAndInPlace) {
  for (const DType dtype : kDTypes) {
    Problem<float> problem(dtype, 4, 1037, 6, 3, 1);
    const Result<float> result = forward(problem);
    Matrix apart(dtype, 4, 1037, 0, 0);
    backward(problem, result, apart);
    expect_matches_oracle(problem, result, apart);
    EXPECT_TRUE(apart.surroundings_untouched());
    backward(problem, result, problem.logits);
    EXPECT_TRUE(problem.logits.surroundings_untouched());
    for (int64_t row = 0; row < 4; ++row) {
      for (int64_t j = 0; j < 1037; ++j) ASSERT_EQ(problem.logits.get(row, j), apart.get(row, j)) << row << "," << j;
    }
  }
}

// Rows 2^31 elements apart, in a mapping whose pages between them are never touched.
TEST(LogprobKernel, RowOffsetsBeyond32Bits) {
  constexpr int64_t kRows = 3, kVocab = 1040, kFar = int64_t{1} << 31;
  constexpr size_t kBytes = static_cast<size_t>((kRows - 1) * kFar + kVocab) * 2;
  void* const mapping =
      mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) GTEST_SKIP() << "no address space for " << kBytes << " bytes";
  const Problem<float> problem(DType::kBFloat16, kRows, kVocab, 14);
  const auto* near = static_cast<const uint16_t*>(problem.logits.data());
  auto* far = static_cast<uint16_t*>(mapping);
  for (int64_t row = 0; row < kRows; ++row) std::copy_n(near + row * kVocab, kVocab, far + row * kFar);

  const Result<float> expected = forward(problem);
  Matrix grad(DType::kBFloat16, kRows, kVocab);
  backward(problem, expected, grad);
  LogprobInput<float> input = problem.input();
  input.logits = mapping;
  input.row_stride = kFar;
  Result<float> result(kRows);
  int64_t bad_row = 0;
  logprob_forward_cuda(input, result.output(), {nullptr, &bad_row}, nullptr);
  EXPECT_TRUE(result == expected);
  LogprobGradient<float> gradient = expected.gradient(problem, grad);
  gradient.grad_logits = mapping;
  gradient.grad_row_stride = kFar;
  logprob_backward_cuda(input, gradient, nullptr);
  for (int64_t row = 0; row < kRows; ++row) {
    EXPECT_EQ(std::memcmp(far + row * kFar, static_cast<const uint16_t*>(grad.data()) + row * kVocab, kVocab * 2), 0);
  }
  munmap(mapping, kBytes);
}

TEST(LogprobKernel, MaskedRowsAreNotRead) {
  for (const int64_t vocab : {77, 17000}) {
    Problem<float> problem(DType::kFloat32, 2, vocab, 7);
    problem.mask = {0, 1};
    for (int64_t j = 0; j < vocab; ++j) problem.logits.set(0, j, j % 2 ? NAN : INFINITY);
    problem.labels[0] = vocab + 5;
    problem.grad_logprobs[0] = NAN;
    check(problem);
  }
}

TEST(LogprobKernel, MinusInfinityNanAndOutOfRange) {
  for (const int64_t vocab : {40, 17000}) {
    Problem<float> problem(DType::kFloat32, 6, vocab, 8);
    problem.temperatures = {1, 1, 1, 1, 0, 1};
    for (int64_t j = 0; j < vocab; ++j) {
      problem.logits.set(0, j, -INFINITY);
      if (j != vocab - 1) problem.logits.set(1, j, -INFINITY);
    }
    problem.logits.set(2, vocab / 2, NAN);
    problem.labels[1] = vocab - 1;
    problem.labels[3] = vocab;
    int64_t bad_row = 0;
    const Result<float> result = forward(problem, &bad_row);
    EXPECT_EQ(bad_row, 5);  // rows 3 (label) and 4 (temperature): one plus the larger
    Matrix grad(DType::kFloat32, 6, vocab);
    backward(problem, result, grad);

    EXPECT_EQ(result.logprobs[0], -INFINITY);
    EXPECT_EQ(result.entropy[0], 0.0f);
    EXPECT_EQ(result.logprobs[1], 0.0f);
    EXPECT_EQ(result.entropy[1], 0.0f);
    for (const int64_t row : {2, 3, 4}) EXPECT_TRUE(std::isnan(result.logprobs[row])) << row;
    for (int64_t j = 0; j < vocab; ++j) {
      ASSERT_EQ(grad.get(0, j), 0.0) << j;
      ASSERT_FALSE(std::isnan(grad.get(1, j))) << j;
      for (const int64_t row : {2, 3, 4}) ASSERT_TRUE(std::isnan(grad.get(row, j))) << row << "," << j;
    }
    EXPECT_PRED4(close, result.logprobs[5], row_truth(problem, 5).logprob, 3e-6, 3e-7);
  }
}

Result<float> check_shards(const Problem<float>& problem, const std::vector<int64_t>& sizes) {
  int64_t bad_row = 0;
  const auto partial = [&](const LogprobInput<float>& shard, int64_t total, LogprobPart<float>* parts) {
    std::vector<float> workspace(static_cast<size_t>(logprob_workspace_bytes(shard) / 4 + 1), NAN);
    logprob_partial_cuda(shard, total, parts, {workspace.data(), &bad_row}, nullptr);
  };
  const auto merge = [](const LogprobInput<float>& input, const LogprobPart<float>* parts, int64_t ranks,
                        const LogprobOutput<float>& output) {
    logprob_merge_cuda(input, parts, ranks, output, nullptr);
  };
  const auto backward = [](const LogprobInput<float>& shard, const LogprobGradient<float>& gradient) {
    logprob_backward_cuda(shard, gradient, nullptr);
  };
  const Result<float> result = check_shards(problem, sizes, partial, merge, backward);
  EXPECT_EQ(bad_row, 0);
  return result;
}

TEST(LogprobKernel, ShardsOfTheVocabularyMergeIntoTheRow) {
  for (const DType dtype : kDTypes) {
    for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{1, 1}, {37, 1, 62}, {1023, 17000}}) {
      SCOPED_TRACE(std::string(dtype_name(dtype)) + ", " + std::to_string(sizes.size()) + " shards");
      int64_t vocab = 0;
      for (const int64_t size : sizes) vocab += size;
      Problem<float> problem(dtype, 5, vocab, 11, 3, 1);
      problem.labels = {0, sizes[0] - 1, sizes[0], vocab - 1, 0};
      problem.mask = {1, 1, 1, 1, 0};
      check_shards(problem, sizes);
    }
  }
}

TEST(LogprobKernel, ShardsGiveTheSameBitsInEveryOrder) {
  const Problem<float> problem(DType::kBFloat16, 20, 40, 12);
  const Result<float> result = check_shards(problem, {16, 24});
  cuda_shim::for_each_order([&] { EXPECT_TRUE(check_shards(problem, {16, 24}) == result); });
}

TEST(LogprobKernel, ALabelOfNoShardMakesItsRowNan) {
  Problem<float> problem(DType::kFloat32, 2, 10, 13);
  problem.labels[1] = 10;
  int64_t bad_row = 0;
  std::vector<LogprobPart<float>> parts(2);
  logprob_partial_cuda(shard_of(problem, 0, 10), 10, parts.data(), {nullptr, &bad_row}, nullptr);
  EXPECT_EQ(bad_row, 2);
  Result<float> result(2);
  logprob_merge_cuda(problem.input(), parts.data(), 1, result.output(), nullptr);
  EXPECT_FALSE(std::isnan(result.logprobs[0]));
  for (const float value : {result.logprobs[1], result.entropy[1], result.lse[1]}) EXPECT_TRUE(std::isnan(value));
}

TEST(LogprobKernel, EmptyInputsAreNoLaunch) {
  Problem<float> problem(DType::kFloat32, 0, 8, 9);
  EXPECT_EQ(logprob_workspace_bytes(problem.input()), 0);
  check(problem);
}

TEST(LogprobKernel, Float64IsRefused) {
  Problem<float> problem(DType::kFloat64, 1, 8, 10);
  EXPECT_THROW(forward(problem), Error);
}

}  // namespace
}  // namespace areal::logprob_test
