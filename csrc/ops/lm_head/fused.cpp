// The CPU version of the fused loss: the passes of logprob and loss, over groups of rows that stay in cache.
#include "ops/lm_head/fused.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/check.h"
#include "base/threads.h"

namespace areal {
namespace {

constexpr int64_t kGroupBytes = 512 * 1024;  // of logits: a quarter of a core's L2

template <class T>
T* shifted(T* values, int64_t rows) {
  return values == nullptr ? nullptr : values + rows;
}

template <class Real>
LogprobInput<Real> rows_of(LogprobInput<Real> input, int64_t begin, int64_t end) {
  const int64_t row_bytes = input.row_stride * static_cast<int64_t>(dtype_size_bytes(input.dtype));
  input.logits = static_cast<const char*>(input.logits) + begin * row_bytes;
  input.rows = end - begin;
  input.labels += begin;
  input.temperatures = shifted(input.temperatures, begin);
  input.loss_mask = shifted(input.loss_mask, begin);
  return input;
}

template <class Real>
LogprobOutput<Real> rows_of(const LogprobOutput<Real>& output, int64_t begin) {
  return {output.logprobs + begin, output.entropy + begin, output.lse + begin, output.row_max + begin,
          output.log_sum + begin};
}

// What the loss reads of rows [begin, end), whose log-probabilities are there.
template <class Real>
loss::PolicyLossArgs<Real> rows_of(const loss::PolicyLossArgs<Real>& tokens, const LogprobOutput<Real>& output,
                                   int64_t begin, int64_t end) {
  loss::PolicyLossArgs<Real> args = {};
  args.params = tokens.params;
  args.tokens = end - begin;
  args.logprobs = output.logprobs + begin;
  args.proximal_logprobs = tokens.proximal_logprobs + begin;
  args.advantages = tokens.advantages + begin;
  args.loss_mask = tokens.loss_mask + begin;
  args.behavior_logprobs = shifted(tokens.behavior_logprobs, begin);
  args.ref_logprobs = shifted(tokens.ref_logprobs, begin);
  args.entropy = tokens.entropy == nullptr ? nullptr : output.entropy + begin;
  args.teacher_logprobs = shifted(tokens.teacher_logprobs, begin);
  args.keep_mask = shifted(tokens.keep_mask, begin);
  return args;
}

// dL/dlogprob of the rows, then dL/dentropy (empty where the loss has none).
template <class Real>
struct TokenGradients {
  std::vector<Real> logprob, entropy;
};

template <class Real>
TokenGradients<Real> token_gradients(loss::PolicyLossArgs<Real> args, Real scale) {
  const size_t rows = static_cast<size_t>(args.tokens);
  const bool rewards_entropy = args.entropy != nullptr && args.params.entropy_coef != 0;
  TokenGradients<Real> gradients{std::vector<Real>(rows), std::vector<Real>(rewards_entropy ? rows : 0)};
  std::vector<double> scratch(static_cast<size_t>(loss::kStatCount * loss::block_count(args.tokens)));
  double stats[loss::kStatCount];
  Real value = 0, unused_scale = 0;
  args.loss = &value;
  args.stats = stats;
  args.scale = &unused_scale;
  args.scratch = scratch.data();
  args.grad_logprobs = gradients.logprob.data();
  args.grad_entropy = rewards_entropy ? gradients.entropy.data() : nullptr;
  loss::policy_loss_cpu(args);
  for (std::vector<Real>* values : {&gradients.logprob, &gradients.entropy}) {
    for (Real& gradient : *values) gradient *= scale;
  }
  return gradients;
}

template <class Real>
void run_rows(const LogprobInput<Real>& input, const loss::PolicyLossArgs<Real>& tokens, Real scale,
              const LogprobOutput<Real>& output, int64_t begin, int64_t end) {
  const LogprobInput<Real> rows = rows_of(input, begin, end);
  const LogprobOutput<Real> results = rows_of(output, begin);
  logprob_forward_cpu(rows, results);
  const TokenGradients<Real> up = token_gradients(rows_of(tokens, output, begin, end), scale);
  LogprobGradient<Real> gradient;
  gradient.grad_logprobs = up.logprob.data();
  gradient.grad_entropy = up.entropy.empty() ? nullptr : up.entropy.data();
  gradient.logprobs = results.logprobs;
  gradient.entropy = results.entropy;
  gradient.row_max = results.row_max;
  gradient.log_sum = results.log_sum;
  gradient.grad_logits = const_cast<void*>(rows.logits);
  gradient.grad_row_stride = rows.row_stride;
  logprob_backward_cpu(rows, gradient);
}

template <class Real>
void check_live_rows(const LogprobInput<Real>& input) {
  for (int64_t row = 0; row < input.rows; ++row) {
    if (!input.live(row)) continue;
    const int64_t label = input.labels[row];
    AREAL_CHECK(label >= 0 && label < input.vocab, "ppo_loss_from_logits: expected labels[", row, "] in [0, ",
                input.vocab, ") or equal to ignore_index = ", input.ignore_index, ", got ", label);
    const Real temperature = input.row_temperature(row);
    AREAL_CHECK(temperature > 0 && std::isnormal(temperature), "ppo_loss_from_logits: expected temperature of row ",
                row, " > 0 and finite, got ", temperature);
  }
}

template <class Real>
void run(const LogprobInput<Real>& input, const loss::PolicyLossArgs<Real>& tokens, Real scale,
         const LogprobOutput<Real>& output) {
  check_live_rows(input);
  const int64_t row_bytes = input.vocab * static_cast<int64_t>(dtype_size_bytes(input.dtype));
  const int64_t group = std::clamp<int64_t>(kGroupBytes / std::max<int64_t>(row_bytes, 1), 1, loss::kBlockTokens);
  const int64_t groups = (input.rows + group - 1) / group;
  const auto run_group = [&](int64_t g) {
    run_rows(input, tokens, scale, output, g * group, std::min((g + 1) * group, input.rows));
  };
  if (groups < num_threads()) {  // the passes share each group out
    for (int64_t g = 0; g < groups; ++g) run_group(g);
    return;
  }
  parallel_for(0, groups, 1, [&](int64_t begin, int64_t end) {
    for (int64_t g = begin; g < end; ++g) run_group(g);
  });
}

}  // namespace

void fused_loss_cpu(const LogprobInput<float>& input, const loss::PolicyLossArgs<float>& tokens, float scale,
                    const LogprobOutput<float>& output) {
  run(input, tokens, scale, output);
}
void fused_loss_cpu(const LogprobInput<double>& input, const loss::PolicyLossArgs<double>& tokens, double scale,
                    const LogprobOutput<double>& output) {
  run(input, tokens, scale, output);
}

}  // namespace areal
