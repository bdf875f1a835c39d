// The *_cuda functions of the C API, with the kernels executed on the CPU: they compute what the *_cpu functions do.
#include <areal_core/areal_core.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

namespace {

constexpr int64_t kTokens = 12, kSequences = 4;
const std::vector<int64_t> kCuSeqlens = {0, 3, 3, 10, 12};
const std::vector<uint8_t> kMask = {1, 1, 0, 1, 0, 1, 1, 1, 1, 0, 1, 1};

template <class T>
T make() {
  T args{};
  args.size = sizeof args;
  return args;
}

std::vector<float> wave(int64_t size, double step) {
  std::vector<float> values;
  for (int64_t i = 0; i < size; ++i) values.push_back(static_cast<float>(std::sin(step * static_cast<double>(i + 1))));
  return values;
}

template <class Values>
void expect_close(const Values& got, const Values& want) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    const auto error = std::abs(static_cast<double>(got[i]) - static_cast<double>(want[i]));
    EXPECT_TRUE(error <= 1e-5 * (1 + std::abs(static_cast<double>(want[i])))) << i << ": " << got[i] << ", " << want[i];
  }
}

void expect_ok(areal_status status) { EXPECT_EQ(status, AREAL_OK) << areal_last_error(); }

void expect_refused(areal_status status, const std::string& text) {
  EXPECT_EQ(status, AREAL_INVALID_ARGUMENT);
  EXPECT_NE(std::string(areal_last_error()).find(text), std::string::npos) << areal_last_error();
}

TEST(CApiCuda, IsBuilt) { EXPECT_EQ(areal_has_cuda(), 1); }

struct LogprobResult {
  std::vector<float> logprobs = std::vector<float>(3, NAN), entropy = logprobs, lse = logprobs, row_max = logprobs,
                     log_sum = logprobs, gradient = std::vector<float>(3 * 1025, NAN);

  areal_logprob_output output() {
    auto out = make<areal_logprob_output>();
    out.logprobs = logprobs.data();
    out.entropy = entropy.data();
    out.lse = lse.data();
    out.row_max = row_max.data();
    out.log_sum = log_sum.data();
    return out;
  }
  areal_logprob_gradient backward(const std::vector<float>& upstream) {
    auto grad = make<areal_logprob_gradient>();
    grad.grad_logprobs = grad.grad_entropy = upstream.data();
    grad.logprobs = logprobs.data();
    grad.entropy = entropy.data();
    grad.row_max = row_max.data();
    grad.log_sum = log_sum.data();
    grad.grad_logits = gradient.data();
    grad.grad_row_stride = 1025;
    return grad;
  }
};

TEST(CApiCuda, Logprob) {
  const auto logits = wave(3 * 1025, 0.37), upstream = wave(3, 0.7);
  std::vector<int64_t> labels = {7, -100, 1024};
  auto input = make<areal_logprob_input>();
  input.logits = logits.data();
  input.rows = 3;
  input.vocab = input.row_stride = 1025;
  input.labels = labels.data();
  input.ignore_index = -100;
  input.temperature = 0.8;
  LogprobResult host, device;
  const auto host_output = host.output(), device_output = device.output();
  expect_ok(areal_logprob_forward_cpu(&input, &host_output));
  int64_t bytes = -1, bad_row = 0;
  expect_ok(areal_logprob_workspace_bytes(&input, &bytes));
  std::vector<uint8_t> workspace(static_cast<size_t>(bytes));
  auto scratch = make<areal_logprob_scratch>();
  scratch.workspace = workspace.data();
  scratch.workspace_bytes = bytes;
  expect_refused(areal_logprob_forward_cuda(&input, &device_output, &scratch, nullptr), "expected scratch.bad_row");
  scratch.bad_row = &bad_row;
  expect_ok(areal_logprob_forward_cuda(&input, &device_output, &scratch, nullptr));
  EXPECT_EQ(bad_row, 0);
  expect_close(device.logprobs, host.logprobs);
  expect_close(device.entropy, host.entropy);
  expect_close(device.lse, host.lse);
  const auto host_gradient = host.backward(upstream), device_gradient = device.backward(upstream);
  expect_ok(areal_logprob_backward_cpu(&input, &host_gradient));
  expect_ok(areal_logprob_backward_cuda(&input, &device_gradient, nullptr));
  expect_close(device.gradient, host.gradient);

  labels[0] = 5000;
  expect_ok(areal_logprob_forward_cuda(&input, &device_output, &scratch, nullptr));
  EXPECT_EQ(bad_row, 1);
  input.dtype = AREAL_FLOAT64;
  expect_refused(areal_logprob_forward_cuda(&input, &device_output, &scratch, nullptr), "other than AREAL_FLOAT64");
}

TEST(CApiCuda, LogprobOverShards) {
  const auto logits = wave(3 * 1025, 0.37);
  const std::vector<int64_t> labels = {7, -100, 1024};
  auto input = make<areal_logprob_input>();
  input.rows = 3;
  input.row_stride = 1025;
  input.labels = labels.data();
  input.ignore_index = -100;
  input.temperature = 0.8;
  struct alignas(16) Parts {
    float values[2][3 * 4];
  } parts;
  std::vector<uint8_t> workspace(1 << 16);
  int64_t bad_row = 0;
  auto scratch = make<areal_logprob_scratch>();
  scratch.workspace = workspace.data();
  scratch.workspace_bytes = static_cast<int64_t>(workspace.size());
  scratch.bad_row = &bad_row;
  LogprobResult host, device;
  const auto host_output = host.output(), device_output = device.output();
  for (const bool on_device : {false, true}) {
    for (const int64_t rank : {0, 1}) {
      input.vocab_start = rank * 600;
      input.vocab = rank == 0 ? 600 : 425;
      input.logits = logits.data() + input.vocab_start;
      void* const part = parts.values[rank];
      expect_ok(on_device ? areal_logprob_partial_cuda(&input, 1025, part, &scratch, nullptr)
                          : areal_logprob_partial_cpu(&input, 1025, part));
    }
    expect_ok(on_device ? areal_logprob_merge_cuda(&input, &parts, 2, &device_output, nullptr)
                        : areal_logprob_merge_cpu(&input, &parts, 2, &host_output));
  }
  EXPECT_EQ(bad_row, 0);
  expect_close(device.logprobs, host.logprobs);
  expect_close(device.entropy, host.entropy);
  expect_close(device.lse, host.lse);
  expect_refused(areal_logprob_partial_cpu(&input, 1024, &parts), "expected vocab_total >= vocab_start + vocab = 1025");
  expect_refused(areal_logprob_merge_cpu(&input, &parts, 0, &host_output), "expected ranks >= 1");
}

TEST(CApiCuda, PolicyLoss) {
  const auto logprobs = wave(kTokens, 0.3), proximal = wave(kTokens, 0.31), advantages = wave(kTokens, 1.1);
  for (const int64_t ratio_level : {AREAL_RATIO_TOKEN, AREAL_RATIO_SEQUENCE}) {
    auto args = make<areal_policy_loss_args>();
    args.tokens = kTokens;
    args.sequences = kSequences;
    args.cu_seqlens = kCuSeqlens.data();
    args.logprobs = args.entropy = logprobs.data();
    args.proximal_logprobs = proximal.data();
    args.advantages = advantages.data();
    args.loss_mask = kMask.data();
    args.ratio_level = ratio_level;
    args.aggregation = AREAL_SEQUENCE_MEAN_TOKEN_MEAN;
    args.clip_low = args.clip_high = 0.2;
    args.entropy_coef = 0.1;
    args.stats_count = areal_policy_loss_stat_count();
    const int64_t scratch_bytes = areal_policy_loss_scratch_bytes(kTokens, kSequences);
    std::vector<float> grads[2], sums[2];
    std::vector<double> stats[2], scratch(static_cast<size_t>(scratch_bytes) / sizeof(double));
    for (const int on_device : {0, 1}) {
      grads[on_device].resize(2 * kTokens, NAN);
      sums[on_device].resize(2, NAN);
      stats[on_device].resize(static_cast<size_t>(args.stats_count), NAN);
      args.loss = sums[on_device].data();
      args.scale = sums[on_device].data() + 1;
      args.grad_logprobs = grads[on_device].data();
      args.grad_entropy = grads[on_device].data() + kTokens;
      args.stats = stats[on_device].data();
      if (on_device == 0) {
        expect_ok(areal_policy_loss_cpu(&args));
      } else {
        expect_refused(areal_policy_loss_cuda(&args, nullptr), "expected scratch_bytes >= ");
        args.scratch = scratch.data();
        args.scratch_bytes = scratch_bytes;
        expect_ok(areal_policy_loss_cuda(&args, nullptr));
      }
    }
    expect_close(grads[1], grads[0]);
    expect_close(sums[1], sums[0]);
    expect_close(stats[1], stats[0]);
  }
}

TEST(CApiCuda, ValueLoss) {
  const auto values = wave(kTokens, 0.3), returns = wave(kTokens, 0.5);
  std::vector<float> grads[2], sums[2];
  std::vector<double> stats[2];
  const int64_t scratch_bytes = areal_value_loss_scratch_bytes(kTokens);
  std::vector<double> scratch(static_cast<size_t>(scratch_bytes) / sizeof(double));
  for (const int on_device : {0, 1}) {
    grads[on_device].resize(kTokens, NAN);
    sums[on_device].resize(2, NAN);
    stats[on_device].resize(AREAL_VALUE_STAT_COUNT, NAN);
    auto args = make<areal_value_loss_args>();
    args.tokens = kTokens;
    args.values = values.data();
    args.returns = returns.data();
    args.loss_mask = kMask.data();
    args.huber_delta = 0.1;
    args.loss = sums[on_device].data();
    args.scale = sums[on_device].data() + 1;
    args.grad_values = grads[on_device].data();
    args.stats = stats[on_device].data();
    args.scratch = scratch.data();
    args.scratch_bytes = scratch_bytes;
    expect_ok(on_device ? areal_value_loss_cuda(&args, nullptr) : areal_value_loss_cpu(&args));
    args.clip = 0.1;
    expect_refused(areal_value_loss_cpu(&args), "expected old_values with clip set");
  }
  expect_close(grads[1], grads[0]);
  expect_close(sums[1], sums[0]);
  expect_close(stats[1], stats[0]);
}

TEST(CApiCuda, Gae) {
  const auto rewards = wave(kTokens, 0.9), values = wave(kTokens, 0.4);
  std::vector<float> advantages[2], returns[2];
  for (const int on_device : {0, 1}) {
    advantages[on_device].resize(kTokens, NAN);
    returns[on_device].resize(kTokens, NAN);
    auto args = make<areal_gae_args>();
    args.tokens = kTokens;
    args.sequences = kSequences;
    args.cu_seqlens = kCuSeqlens.data();
    args.rewards = rewards.data();
    args.values = values.data();
    args.loss_mask = kMask.data();
    args.gamma = 0.9;
    args.lam = 0.8;
    args.advantages = advantages[on_device].data();
    args.returns = returns[on_device].data();
    expect_ok(on_device ? areal_gae_cuda(&args, nullptr) : areal_gae_cpu(&args));
  }
  expect_close(advantages[1], advantages[0]);
  expect_close(returns[1], returns[0]);
}

TEST(CApiCuda, GroupScores) {
  const std::vector<int64_t> ids = {5, 2, 5, 5, 2};
  std::vector<int64_t> sorted(5), order(5);
  expect_ok(areal_sort_groups_cpu(ids.data(), 5, sorted.data(), order.data()));
  EXPECT_EQ(order, (std::vector<int64_t>{1, 4, 0, 2, 3}));
  const auto rewards = wave(5, 0.9);
  std::vector<double> scores[2];
  std::vector<uint8_t> scratch(areal_group_scores_scratch_bytes());
  for (const int on_device : {0, 1}) {
    scores[on_device].resize(5, NAN);
    auto args = make<areal_group_scores_args>();
    args.sequences = 5;
    args.rewards = rewards.data();
    args.sorted_ids = sorted.data();
    args.order = order.data();
    args.mean_level = AREAL_LEVEL_GROUP;
    args.std_level = AREAL_LEVEL_BATCH;
    args.ddof = 1;
    args.eps = 1e-6;
    args.scores = scores[on_device].data();
    if (on_device) {
      expect_refused(areal_group_scores_cuda(&args, nullptr), "expected scratch of");
      args.scratch = scratch.data();
      args.scratch_bytes = areal_group_scores_scratch_bytes();
    }
    expect_ok(on_device ? areal_group_scores_cuda(&args, nullptr) : areal_group_scores_cpu(&args));
  }
  expect_close(scores[1], scores[0]);
}

TEST(CApiCuda, SpreadScoresAndSequenceRewards) {
  const auto logprobs = wave(kTokens, 0.3), reference = wave(kTokens, 0.5);
  const std::vector<double> scores = {1, -1, 0.5, 2};
  std::vector<double> divisors(kSequences);
  std::vector<float> advantages[2];
  std::vector<double> sums[2];
  for (const int on_device : {0, 1}) {
    advantages[on_device].resize(kTokens, NAN);
    sums[on_device].resize(kSequences, NAN);
    const auto fill = [&](auto& args) {
      args.tokens = kTokens;
      args.sequences = kSequences;
      args.cu_seqlens = kCuSeqlens.data();
      args.loss_mask = kMask.data();
      args.logprobs = logprobs.data();
      args.ref_logprobs = reference.data();
    };
    auto live = make<areal_live_tokens_args>();
    live.tokens = kTokens;
    live.sequences = kSequences;
    live.cu_seqlens = kCuSeqlens.data();
    live.loss_mask = kMask.data();
    live.counts = divisors.data();
    expect_ok(on_device ? areal_live_tokens_cuda(&live, nullptr) : areal_live_tokens_cpu(&live));
    auto spread = make<areal_spread_scores_args>();
    fill(spread);
    spread.scores = scores.data();
    spread.beta = 0.1;
    spread.divisors = divisors.data();
    spread.advantages = advantages[on_device].data();
    expect_ok(on_device ? areal_spread_scores_cuda(&spread, nullptr) : areal_spread_scores_cpu(&spread));
    auto sum = make<areal_sequence_rewards_args>();
    fill(sum);
    sum.beta = -1;
    sum.kl = AREAL_KL_K3;
    sum.sums = sums[on_device].data();
    expect_ok(on_device ? areal_sequence_rewards_cuda(&sum, nullptr) : areal_sequence_rewards_cpu(&sum));
  }
  expect_close(advantages[1], advantages[0]);
  expect_close(sums[1], sums[0]);
}

TEST(CApiCuda, BestOfScoresAndTokenRewards) {
  const std::vector<int64_t> sorted = {2, 2, 5, 5, 5}, order = {1, 4, 0, 2, 3};
  const std::vector<float> rewards = {0, 0, 1, 2, 1};
  const auto logprobs = wave(kTokens, 0.3), reference = wave(kTokens, 0.5);
  std::vector<double> scores[2];
  std::vector<float> out[2];
  for (const int on_device : {0, 1}) {
    scores[on_device].resize(5, NAN);
    out[on_device].resize(kTokens, NAN);
    auto best = make<areal_best_of_scores_args>();
    best.sequences = 5;
    best.rewards = rewards.data();
    best.sorted_ids = sorted.data();
    best.order = order.data();
    best.k = 2;
    best.divide_by_std = 1;
    best.scores = scores[on_device].data();
    expect_ok(on_device ? areal_best_of_scores_cuda(&best, nullptr) : areal_best_of_scores_cpu(&best));
    auto tokens = make<areal_token_rewards_args>();
    tokens.tokens = kTokens;
    tokens.loss_mask = kMask.data();
    tokens.logprobs = logprobs.data();
    tokens.ref_logprobs = reference.data();
    tokens.beta = 0.1;
    tokens.kl = AREAL_KL_K3;
    tokens.out = out[on_device].data();
    expect_ok(on_device ? areal_token_rewards_cuda(&tokens, nullptr) : areal_token_rewards_cpu(&tokens));
  }
  expect_close(scores[1], scores[0]);
  expect_close(out[1], out[0]);
}

TEST(CApiCuda, Packing) {
  const auto source = wave(kTokens, 0.3);
  const float fill = 0.25f;
  std::vector<float> target[2];
  std::vector<int64_t> positions[2], extents[2];
  for (const int on_device : {0, 1}) {
    target[on_device].resize(kTokens, NAN);
    positions[on_device].resize(kTokens, -1);
    extents[on_device].resize(9, -1);
    auto map = make<areal_segment_map>();
    map.segments = kSequences;
    map.source_begin = map.target_begin = kCuSeqlens.data();
    map.target_end = kCuSeqlens.data() + 1;
    map.shift = 1;
    map.source_rows = map.target_rows = kTokens;
    auto rows = make<areal_row_tensor>();
    rows.source = source.data();
    rows.target = target[on_device].data();
    rows.row_bytes = sizeof(float);
    rows.fill = &fill;
    rows.fill_bytes = sizeof fill;
    expect_ok(on_device ? areal_copy_segments_cuda(&map, &rows, 1, nullptr) : areal_copy_segments_cpu(&map, &rows, 1));
    auto ids = make<areal_position_ids_args>();
    ids.tokens = kTokens;
    ids.sequences = kSequences;
    ids.cu_seqlens = kCuSeqlens.data();
    ids.positions = positions[on_device].data();
    expect_ok(on_device ? areal_position_ids_cuda(&ids, nullptr) : areal_position_ids_cpu(&ids));
    auto mask = make<areal_mask_extents_args>();
    mask.rows = 3;
    mask.columns = 4;
    mask.mask = kMask.data();
    mask.starts = extents[on_device].data();
    mask.lengths = extents[on_device].data() + 3;
    mask.counts = extents[on_device].data() + 6;
    expect_ok(on_device ? areal_mask_extents_cuda(&mask, nullptr) : areal_mask_extents_cpu(&mask));
  }
  EXPECT_EQ(target[1], target[0]);
  EXPECT_EQ(positions[1], positions[0]);
  EXPECT_EQ(extents[1], extents[0]);
}

}  // namespace
