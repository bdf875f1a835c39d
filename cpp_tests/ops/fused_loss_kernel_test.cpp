// Logits to gradients through the policy loss: the sm_90 launcher and kernel, run on the CPU.
#include <cmath>
#include <memory>
#include <vector>

#include "cuda/launch.cuh"
#include "cuda_shim/orders.h"
#include "logprob_oracle.h"
#include "ops/lm_head/fused_kernels.cuh"

namespace areal::logprob_test {
namespace {

using loss::PolicyLossArgs;

constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
constexpr float kScale = 0.125f;

// A problem with the other inputs of the loss; problem.grad_logprobs and grad_entropy become what the loss asks for.
struct FusedProblem : Problem<float> {
  loss::PolicyLossParams params = {};
  std::vector<float> proximal, advantages, behavior, reference, teacher;
  std::vector<uint8_t> loss_mask, keep_mask;  // keep_mask empty: none
  bool has_behavior = true, has_reference = true, has_entropy = true, has_teacher = false;

  FusedProblem(DType dtype, int64_t rows, int64_t vocab, uint64_t seed, int64_t gap = 0, int64_t offset = 0)
      : Problem<float>(dtype, rows, vocab, seed, gap, offset) {
    params.ratio_low = 0.8;
    params.ratio_high = 1.2;
    params.dual_clip = 3.0;
    params.behavior_mode = loss::BehaviorMode::kTruncate;
    params.behavior_cap = 2.0;
    params.kl_estimator = loss::KlEstimator::kK3;
    params.kl_coef = 0.1;
    params.entropy_coef = 0.05;
    Random random(seed + 1);
    for (int64_t row = 0; row < rows; ++row) {
      const double near = 0.3 * random.normal() + row_truth(*this, row).logprob;
      proximal.push_back(static_cast<float>(near));
      behavior.push_back(static_cast<float>(near + 0.3 * random.normal()));
      reference.push_back(static_cast<float>(near + 0.3 * random.normal()));
      teacher.push_back(static_cast<float>(near + 0.3 * random.normal()));
      advantages.push_back(static_cast<float>(random.normal()));
      loss_mask.push_back(1);
    }
  }
  // Inputs of the loss; what it computes from, and what it writes, is added by the caller.
  PolicyLossArgs<float> loss_inputs(const float* entropy) const {
    PolicyLossArgs<float> args = {};
    args.params = params;
    args.tokens = logits.rows;
    args.proximal_logprobs = proximal.data();
    args.advantages = advantages.data();
    args.loss_mask = reinterpret_cast<const bool*>(loss_mask.data());
    args.behavior_logprobs = has_behavior ? behavior.data() : nullptr;
    args.ref_logprobs = has_reference ? reference.data() : nullptr;
    args.teacher_logprobs = has_teacher ? teacher.data() : nullptr;
    args.keep_mask = keep_mask.empty() ? nullptr : reinterpret_cast<const bool*>(keep_mask.data());
    args.entropy = has_entropy ? entropy : nullptr;
    return args;
  }
};

// Clusters and stages to run with instead of those the launcher would choose.
struct Forced {
  unsigned blocks;
  int stages;
  int lag;
};

template <class T>
void launch_forced(const FusedLossArgs& args, const Forced& forced) {
  const int64_t vectors = args.input.vocab / cuda::kVectorLength<T>;
  const auto slice = static_cast<int>(std::max<int64_t>((vectors + forced.blocks - 1) / forced.blocks, 1) * 16);
  const cuda::ClusterShape cluster = {forced.blocks, cuda::kFusedThreads,
                                      forced.stages * (slice + static_cast<int64_t>(sizeof(cuda::Stage<float>)))};
  AREAL_LAUNCH_CLUSTERS(cuda::fused_loss_kernel<T>, cluster, 2u, nullptr, args,
                        (cuda::FusedShape{forced.stages, forced.lag, slice}));
}

Result<float> run(FusedProblem& problem, const Forced* forced = nullptr, int64_t expected_bad_row = 0) {
  Result<float> result(problem.logits.rows);
  int64_t bad_row = 0;
  FusedLossArgs args;
  args.input = problem.input();
  args.loss = problem.loss_inputs(result.entropy.data());
  args.scale = &kScale;
  args.output = result.output();
  args.bad_row = &bad_row;
  if (forced == nullptr) {
    EXPECT_TRUE(fused_loss_cuda(args, nullptr));
  } else {
    cuda::dispatch_device_dtype(problem.logits.dtype, "test",
                                [&](auto tag) { launch_forced<typename decltype(tag)::type>(args, *forced); });
  }
  EXPECT_EQ(bad_row, expected_bad_row);
  return result;
}

// The upstream gradients that the loss asks for, by its CPU op in double.
void derive_upstream(FusedProblem& problem) {
  const int64_t rows = problem.logits.rows;
  std::vector<double> logprobs, entropy, grad(rows), grad_entropy(rows),
      scratch(loss::kStatCount * loss::block_count(rows)), stats(loss::kStatCount);
  for (int64_t row = 0; row < rows; ++row) {
    const RowTruth truth = row_truth(problem, row);
    logprobs.push_back(truth.logprob);
    entropy.push_back(truth.entropy);
  }
  const auto widen = [](const std::vector<float>& values) { return std::vector<double>(values.begin(), values.end()); };
  const std::vector<double> proximal = widen(problem.proximal), advantages = widen(problem.advantages),
                            behavior = widen(problem.behavior), reference = widen(problem.reference),
                            teacher = widen(problem.teacher);
  double total = 0, scale = 0;
  PolicyLossArgs<double> args = {};
  args.params = problem.params;
  args.tokens = rows;
  args.logprobs = logprobs.data();
  args.proximal_logprobs = proximal.data();
  args.advantages = advantages.data();
  args.loss_mask = reinterpret_cast<const bool*>(problem.loss_mask.data());
  args.behavior_logprobs = problem.has_behavior ? behavior.data() : nullptr;
  args.ref_logprobs = problem.has_reference ? reference.data() : nullptr;
  args.teacher_logprobs = problem.has_teacher ? teacher.data() : nullptr;
  args.keep_mask = problem.keep_mask.empty() ? nullptr : reinterpret_cast<const bool*>(problem.keep_mask.data());
  args.entropy = problem.has_entropy ? entropy.data() : nullptr;
  args.loss = &total;
  args.stats = stats.data();
  args.grad_logprobs = grad.data();
  args.grad_entropy = problem.has_entropy ? grad_entropy.data() : nullptr;
  args.scale = &scale;
  args.scratch = scratch.data();
  policy_loss_cpu(args);
  for (int64_t row = 0; row < rows; ++row) {
    problem.grad_logprobs[row] = static_cast<float>(kScale * grad[row]);
    problem.grad_entropy[row] = static_cast<float>(kScale * grad_entropy[row]);
    problem.grad_lse[row] = 0.0f;
  }
}

void check(FusedProblem problem, const Forced* forced = nullptr) {
  derive_upstream(problem);
  FusedProblem overwritten = problem;
  const Result<float> result = run(overwritten, forced);
  expect_matches_oracle(problem, result, overwritten.logits);
  EXPECT_TRUE(overwritten.logits.surroundings_untouched());
}

TEST(FusedLossKernel, EveryTailAndAlignment) {
  for (const DType dtype : kDTypes) {
    for (int64_t vocab = 1; vocab <= 34; ++vocab) {
      SCOPED_TRACE(std::string(dtype_name(dtype)) + ", V = " + std::to_string(vocab));
      check(FusedProblem(dtype, 3, vocab, 1, vocab % 5, vocab % 8));
    }
  }
}

// 19 rows: the two clusters go round the ring of stages more than once.
void check_ring(DType dtype, const Forced& forced, int64_t vocab) {
  SCOPED_TRACE(std::string(dtype_name(dtype)) + ", V = " + std::to_string(vocab) + ", " +
               std::to_string(forced.blocks) + " blocks, " + std::to_string(forced.stages) + " stages");
  FusedProblem problem(dtype, 19, vocab, 2, 3, 1);
  problem.mask.assign(19, 1);
  problem.mask[0] = problem.mask[6] = problem.mask[18] = 0;
  problem.labels[3] = -100;
  problem.loss_mask[5] = 0;  // no gradient, but a logprob
  check(problem, &forced);
}

TEST(FusedLossKernel, EveryClusterStagesAndLag) {
  for (const Forced& forced : {Forced{1, 3, 1}, {2, 4, 2}, {3, 5, 1}, {8, 3, 1}, {4, 8, 2}}) {
    for (const int64_t vocab : {7, 1025}) check_ring(DType::kBFloat16, forced, vocab);
  }
  check_ring(DType::kFloat32, {2, 3, 1}, 100);
  check_ring(DType::kFloat16, {4, 4, 2}, 100);
}

TEST(FusedLossKernel, LabelsAtTheEdgesOfSlices) {
  const Forced forced = {4, 3, 1};
  for (const DType dtype : kDTypes) {
    const int64_t length = dtype == DType::kFloat32 ? 4 : 8;
    const int64_t offset = 1, head = length - offset, each = 16, vocab = head + 4 * each * length + 3;
    std::vector<int64_t> labels = {0, head - 1, head, vocab - 4, vocab - 3, vocab - 1};
    for (int64_t rank = 1; rank < 4; ++rank) {
      labels.push_back(head + rank * each * length - 1);
      labels.push_back(head + rank * each * length);
    }
    const auto rows = static_cast<int64_t>(labels.size());
    const int64_t gap = (length - vocab % length) % length;  // every row starts as the first does
    FusedProblem problem(dtype, rows, vocab, 3, gap, offset);
    problem.labels = labels;
    check(problem, &forced);
  }
}

TEST(FusedLossKernel, TheVocabulariesOfModels) {
  for (const DType dtype : kDTypes) {
    for (const int64_t vocab : {1025, 16385, 50257}) {
      SCOPED_TRACE(std::string(dtype_name(dtype)) + ", V = " + std::to_string(vocab));
      check(FusedProblem(dtype, 3, vocab, 4, vocab % 2, vocab % 3));
    }
  }
}

TEST(FusedLossKernel, TheLongestRows) {
  check(FusedProblem(DType::kBFloat16, 3, 151936, 5));
  if (cuda_shim::variant() == cuda_shim::Variant::kPlain) check(FusedProblem(DType::kFloat32, 9, 151936, 5));
}

TEST(FusedLossKernel, LongerRowsAreLeftToOthers) {
  FusedProblem problem(DType::kFloat32, 1, 8, 6);
  FusedLossArgs args;
  args.input = problem.input();
  for (const auto& [dtype, vocab, fits] : {std::tuple{DType::kFloat32, 151936, true},
                                           {DType::kFloat32, 160000, false},
                                           {DType::kBFloat16, 262144, true},
                                           {DType::kBFloat16, 400000, false},
                                           {DType::kFloat64, 8, false}}) {
    args.input.dtype = dtype;
    args.input.vocab = vocab;
    EXPECT_EQ(fused_loss_fits(args), fits) << dtype_name(dtype) << " " << vocab;
    if (!fits) {
      EXPECT_FALSE(fused_loss_cuda(args, nullptr));
    }
  }
}

TEST(FusedLossKernel, ResultsDoNotDependOnTheOrderOfThreadsBlocksAndCopies) {
  for (const Forced forced : {Forced{8, 3, 1}, {2, 4, 2}}) {
    const FusedProblem problem(DType::kBFloat16, 11, 1031, 7, 0, 3);
    FusedProblem first = problem;
    const Result<float> result = run(first, &forced);
    cuda_shim::for_each_order([&] {
      FusedProblem again = problem;
      EXPECT_TRUE(run(again, &forced) == result);
      EXPECT_EQ(
          std::memcmp(again.logits.base(), first.logits.base(), first.logits.storage.size() * sizeof(std::max_align_t)),
          0);
    });
  }
}

TEST(FusedLossKernel, EveryObjectiveKlEstimatorAndInput) {
  FusedProblem problem(DType::kFloat32, 12, 50, 8);
  problem.has_teacher = true;
  problem.params.distill_coef = 0.3;
  problem.keep_mask = {1, 0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1};
  for (const auto objective :
       {loss::Objective::kPpo, loss::Objective::kCispo, loss::Objective::kSapo, loss::Objective::kReinforce}) {
    for (int32_t estimator = 0; estimator < loss::kKlEstimatorCount; ++estimator) {
      SCOPED_TRACE(std::to_string(static_cast<int>(objective)) + ", " + std::to_string(estimator));
      problem.params.objective = objective;
      problem.params.kl_estimator = static_cast<loss::KlEstimator>(estimator);
      check(problem);
    }
  }
  problem.params.ratio_level = loss::RatioLevel::kOff;
  check(problem);
  FusedProblem bare(DType::kFloat32, 12, 50, 9);
  bare.has_behavior = bare.has_reference = bare.has_entropy = false;
  check(bare);
}

TEST(FusedLossKernel, LongRunsOfMaskedAndOfLiveRows) {
  FusedProblem problem(DType::kBFloat16, 300, 43, 13, 0, 2);
  problem.mask.assign(300, 1);
  for (int row = 0; row < 300; ++row) problem.mask[static_cast<size_t>(row)] = row < 70 || (row > 200 && row % 3 == 0);
  const Forced forced = {2, 4, 2};
  check(problem, &forced);
  for (uint8_t& live : problem.mask) live = !live;
  check(problem, &forced);
}

TEST(FusedLossKernel, AllRowsMasked) {
  FusedProblem problem(DType::kBFloat16, 9, 1001, 10, 1, 1);
  problem.mask.assign(9, 0);
  for (int64_t j = 0; j < 1001; ++j) problem.logits.set(4, j, j % 2 ? NAN : INFINITY);
  check(problem);
}

// Separate kernels on the same inputs: logprobs, then the loss, then the gradient over the logits.
Result<float> run_apart(FusedProblem& problem, int64_t* bad_row) {
  const int64_t rows = problem.logits.rows;
  Result<float> result(rows);
  std::vector<float> workspace(static_cast<size_t>(logprob_workspace_bytes(problem.input()) / 4 + 1), NAN);
  logprob_forward_cuda(problem.input(), result.output(), {workspace.data(), bad_row}, nullptr);
  std::vector<float> grad(static_cast<size_t>(rows)), grad_entropy(static_cast<size_t>(rows));
  std::vector<double> scratch(loss::kStatCount * loss::block_count(rows)), stats(loss::kStatCount);
  const double normalizer = 1 / kScale;
  float total = 0, scale = 0;
  PolicyLossArgs<float> args = problem.loss_inputs(result.entropy.data());
  args.logprobs = result.logprobs.data();
  args.normalizer = &normalizer;
  args.loss = &total;
  args.stats = stats.data();
  args.grad_logprobs = grad.data();
  args.grad_entropy = problem.has_entropy ? grad_entropy.data() : nullptr;
  args.scale = &scale;
  args.scratch = scratch.data();
  cuda::policy_loss(args, nullptr);
  for (int64_t row = 0; row < rows; ++row) {
    problem.grad_logprobs[row] = scale * grad[row];
    problem.grad_entropy[row] = scale * grad_entropy[row];
    problem.grad_lse[row] = 0.0f;
  }
  logprob_backward_cuda(problem.input(), result.gradient(problem, problem.logits), nullptr);
  return result;
}

TEST(FusedLossKernel, InfiniteNanAndOutOfRangeRowsAreThoseOfTheSeparateOps) {
  for (const int64_t vocab : {1, 2, 40, 1030}) {
    FusedProblem problem(DType::kFloat32, 12, vocab, 11, 1, 2);
    problem.temperatures.assign(12, 0.9f);
    problem.temperatures[4] = 0;
    for (int64_t j = 0; j < vocab; ++j) {
      problem.logits.set(0, j, -INFINITY);
      if (j != vocab - 1) problem.logits.set(1, j, -INFINITY);
      problem.logits.set(8, j, -1e30);
    }
    problem.logits.set(2, vocab / 2, NAN);
    problem.logits.set(5, vocab - 1, INFINITY);
    problem.logits.set(6, 0, -INFINITY);
    problem.labels[6] = 0;  // a label that cannot be
    problem.labels[1] = vocab - 1;
    problem.labels[3] = vocab;
    problem.proximal[7] = -INFINITY;
    problem.advantages[9] = NAN;
    problem.loss_mask[10] = 0;
    problem.advantages[10] = NAN;
    problem.mask.assign(12, 1);
    problem.mask[11] = 0;
    FusedProblem apart = problem;
    int64_t bad_row = 0;
    const Result<float> want = run_apart(apart, &bad_row), got = run(problem, nullptr, bad_row);
    const auto same = [](double a, double b) {
      return std::isnan(a) ? std::isnan(b) : a == b || close(a, b, 3e-6, 1e-5);
    };
    for (int64_t row = 0; row < 12; ++row) {
      SCOPED_TRACE("V = " + std::to_string(vocab) + ", row " + std::to_string(row));
      EXPECT_PRED2(same, want.logprobs[row], got.logprobs[row]);
      EXPECT_PRED2(same, want.entropy[row], got.entropy[row]);
      EXPECT_PRED2(same, want.lse[row], got.lse[row]);
      for (int64_t j = 0; j < vocab; ++j) ASSERT_PRED2(same, apart.logits.get(row, j), problem.logits.get(row, j)) << j;
    }
  }
}

TEST(FusedLossKernel, TermsThatSpanTokensAreLeftToOthers) {
  FusedProblem problem(DType::kFloat32, 1, 8, 6);
  FusedLossArgs args;
  args.input = problem.input();
  EXPECT_TRUE(fused_loss_fits(args));
  args.loss.params.ratio_level = loss::RatioLevel::kSequence;
  EXPECT_FALSE(fused_loss_fits(args));
  EXPECT_FALSE(fused_loss_cuda(args, nullptr));
}

TEST(FusedLossKernel, RowsMayNotOverlap) {
  FusedProblem problem(DType::kFloat32, 2, 8, 12);
  FusedLossArgs args;
  args.input = problem.input();
  args.input.row_stride = 7;
  EXPECT_THROW(fused_loss_cuda(args, nullptr), Error);
  args.input.rows = 0;
  EXPECT_TRUE(fused_loss_cuda(args, nullptr));
}

}  // namespace
}  // namespace areal::logprob_test
