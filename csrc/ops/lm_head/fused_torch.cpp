// Schema, argument checks and registration of the fused loss. The public function is in areal_core/ops/lm_head.py.
#include <tuple>
#include <vector>

#include "bind/torch_tensor.h"
#include "ops/lm_head/fused.h"
#include "ops/lm_head/scale.h"

namespace areal {
namespace {

using bind::empty;
using bind::Tensor;
using bind::vector_data;
using OptionalTensor = std::optional<Tensor>;
using ThreeTensors = std::tuple<Tensor, Tensor, Tensor>;

constexpr const char* kOp = "ppo_loss_from_logits";
constexpr size_t kOptionCount = 16;

// The fields of PolicyLossParams in the order of the arguments of ppo_loss, which has checked them.
loss::PolicyLossParams make_params(const std::vector<double>& options) {
  AREAL_CHECK(options.size() == kOptionCount, kOp, ": expected ", kOptionCount, " options, got ", options.size());
  const double* next = options.data();
  const auto choice = [&next] { return static_cast<int32_t>(*next++); };
  loss::PolicyLossParams params;
  params.objective = static_cast<loss::Objective>(choice());
  params.ratio_level = static_cast<loss::RatioLevel>(choice());
  params.ratio_low = *next++;
  params.ratio_high = *next++;
  params.dual_clip = *next++;
  params.tau_positive = *next++;
  params.tau_negative = *next++;
  params.behavior_level = static_cast<loss::BehaviorLevel>(choice());
  params.behavior_mode = static_cast<loss::BehaviorMode>(choice());
  params.behavior_low = *next++;
  params.behavior_cap = *next++;
  params.kl_estimator = static_cast<loss::KlEstimator>(choice());
  params.kl_coef = *next++;
  params.entropy_coef = *next++;
  params.distill_coef = *next++;
  params.aggregation = static_cast<loss::Aggregation>(choice());
  AREAL_CHECK(!loss::needs_sequences(params), kOp,
              ": expected a loss whose gradient at a token needs that token alone");
  return params;
}

template <class Real>
LogprobInput<Real> make_input(const Tensor& logits, const Tensor& labels, const OptionalTensor& temperatures,
                              double temperature, const Tensor& loss_mask, int64_t ignore_index) {
  AREAL_CHECK(logits.dim() == 2, kOp, ": expected logits of shape [T, V], got ", logits.dim(), "-D");
  AREAL_CHECK(logits.stride(1) == 1 || logits.size(1) <= 1, kOp, ": expected logits.stride(-1) = 1, got ",
              logits.stride(1));
  AREAL_CHECK(logits.stride(0) >= logits.size(1) || logits.size(0) <= 1, kOp,
              ": expected logits whose rows do not overlap (stride(0) >= ", logits.size(1),
              "), got stride(0) = ", logits.stride(0));
  const int64_t rows = logits.size(0);
  LogprobInput<Real> input;
  input.logits = logits.mutable_data_ptr();
  input.dtype = bind::stream_dtype(logits, kOp, "logits");
  input.row_stride = logits.stride(0);
  input.rows = rows;
  input.vocab = logits.size(1);
  input.labels = vector_data<const int64_t>(labels, rows, logits, kOp, "labels");
  input.temperatures = vector_data<Real>(temperatures, rows, logits, kOp, "temperature");
  input.temperature = temperature;
  input.loss_mask = vector_data<const bool>(loss_mask, rows, logits, kOp, "loss_mask");
  input.ignore_index = ignore_index;
  return input;
}

struct TokenTensors {
  Tensor proximal_logprobs, advantages;
  OptionalTensor behavior_logprobs, ref_logprobs, teacher_logprobs, keep_mask;
};

template <class Real>
loss::PolicyLossArgs<Real> make_tokens(const TokenTensors& in, const LogprobInput<Real>& input,
                                       const loss::PolicyLossParams& params, const Tensor& like,
                                       const LogprobOutput<Real>& output) {
  const int64_t rows = input.rows;
  loss::PolicyLossArgs<Real> tokens = {};
  tokens.params = params;
  tokens.tokens = rows;
  tokens.proximal_logprobs = vector_data<const Real>(in.proximal_logprobs, rows, like, kOp, "proximal_logprobs");
  tokens.advantages = vector_data<const Real>(in.advantages, rows, like, kOp, "advantages");
  tokens.loss_mask = input.loss_mask;
  tokens.behavior_logprobs = vector_data<Real>(in.behavior_logprobs, rows, like, kOp, "behavior_logprobs");
  tokens.ref_logprobs = vector_data<Real>(in.ref_logprobs, rows, like, kOp, "ref_logprobs");
  tokens.entropy = output.entropy;
  tokens.teacher_logprobs = vector_data<Real>(in.teacher_logprobs, rows, like, kOp, "teacher_logprobs");
  tokens.keep_mask = vector_data<bool>(in.keep_mask, rows, like, kOp, "keep_mask");
  return tokens;
}

template <class Real>
ThreeTensors run(const Tensor& logits, const Tensor& labels, const OptionalTensor& temperatures, double temperature,
                 const Tensor& loss_mask, int64_t ignore_index, const TokenTensors& in, const Tensor& scale,
                 const loss::PolicyLossParams& params) {
  const auto input = make_input<Real>(logits, labels, temperatures, temperature, loss_mask, ignore_index);
  const auto make = [&] { return empty({input.rows}, bind::kScalarType<Real>, logits); };
  const auto data = [](const Tensor& tensor) { return static_cast<Real*>(tensor.mutable_data_ptr()); };
  ThreeTensors out{make(), make(), make()};
  const Tensor row_max = make(), log_sum = make();
  const LogprobOutput<Real> output{data(std::get<0>(out)), data(std::get<1>(out)), data(std::get<2>(out)),
                                   data(row_max), data(log_sum)};
  const auto tokens = make_tokens<Real>(in, input, params, logits, output);
  const Real* const factor = vector_data<const Real>(scale, 1, logits, kOp, "scale");
  bind::on_device(
      logits, [&] { fused_loss_cpu(input, tokens, *factor, output); },
      [&]([[maybe_unused]] void* stream) {
#if defined(AREAL_WITH_CUDA)
        if constexpr (std::is_same_v<Real, float>) {
          const Tensor bad_row = empty({1}, bind::ScalarType::Long, logits);  // the rows' NaN is what tells
          auto* const flag = static_cast<int64_t*>(bad_row.mutable_data_ptr());
          if (fused_loss_cuda({input, tokens, factor, output, flag}, stream)) return;
        }
        throw Error(format_message(kOp, ": expected what fused_policy_loss_fits"));
#endif
      });
  return out;
}

ThreeTensors fused_policy_loss(Tensor logits, const Tensor& labels, const OptionalTensor& temperatures,
                               double temperature, const Tensor& loss_mask, int64_t ignore_index,
                               const Tensor& proximal_logprobs, const Tensor& advantages,
                               const OptionalTensor& behavior_logprobs, const OptionalTensor& ref_logprobs,
                               const OptionalTensor& teacher_logprobs, const OptionalTensor& keep_mask,
                               const Tensor& scale, std::vector<double> options) {
  const TokenTensors in{proximal_logprobs, advantages, behavior_logprobs, ref_logprobs, teacher_logprobs, keep_mask};
  const auto params = make_params(options);
  const bool wide = bind::stream_dtype(logits, kOp, "logits") == DType::kFloat64;
  return wide ? run<double>(logits, labels, temperatures, temperature, loss_mask, ignore_index, in, scale, params)
              : run<float>(logits, labels, temperatures, temperature, loss_mask, ignore_index, in, scale, params);
}

void scale(Tensor values, const Tensor& factor) {
  constexpr const char* op = "scale_";
  AREAL_CHECK(values.dim() >= 1 && values.dim() <= 2, op, ": expected values of 1 or 2 dimensions, got ", values.dim());
  const int64_t columns = values.size(values.dim() - 1);
  ScaleArgs args;
  args.values = values.mutable_data_ptr();
  args.dtype = bind::stream_dtype(values, op, "values");
  args.rows = values.dim() == 2 ? values.size(0) : 1;
  args.columns = columns;
  args.row_stride = args.rows > 1 ? values.stride(0) : columns;
  AREAL_CHECK(columns <= 1 || values.stride(values.dim() - 1) == 1, op, ": expected values.stride(-1) = 1");
  AREAL_CHECK(args.row_stride >= columns, op, ": expected rows that do not overlap");
  args.factor = args.dtype == DType::kFloat64
                    ? static_cast<const void*>(vector_data<const double>(factor, 1, values, op, "factor"))
                    : static_cast<const void*>(vector_data<const float>(factor, 1, values, op, "factor"));
  bind::on_device(values, [&] { scale_cpu(args); }, [&](void* stream) { scale_cuda(args, stream); });
}

bool fits_on_cpu(const Tensor&) { return true; }

#if defined(AREAL_WITH_CUDA)
bool fits_on_cuda(const Tensor& logits) {
  const torch::stable::accelerator::DeviceGuard guard(logits.get_device_index());
  FusedLossArgs args = {};
  args.input.dtype = bind::stream_dtype(logits, kOp, "logits");
  args.input.vocab = logits.size(1);
  return fused_loss_fits(args);
}
#endif

STABLE_TORCH_LIBRARY_FRAGMENT(areal_core, m) {
  m.def(
      "fused_policy_loss_(Tensor(a!) logits, Tensor labels, Tensor? temperatures, float temperature, Tensor loss_mask, "
      "int ignore_index, Tensor proximal_logprobs, Tensor advantages, Tensor? behavior_logprobs, Tensor? ref_logprobs, "
      "Tensor? teacher_logprobs, Tensor? keep_mask, Tensor scale, float[] options) "
      "-> (Tensor logprobs, Tensor entropy, Tensor lse)");
  m.def("fused_policy_loss_fits(Tensor logits) -> bool");
  m.def("scale_(Tensor(a!) values, Tensor factor) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(areal_core, CPU, m) {
  m.impl("fused_policy_loss_", TORCH_BOX(&fused_policy_loss));
  m.impl("fused_policy_loss_fits", TORCH_BOX(&fits_on_cpu));
  m.impl("scale_", TORCH_BOX(&scale));
}
#if defined(AREAL_WITH_CUDA)
STABLE_TORCH_LIBRARY_IMPL(areal_core, CUDA, m) {
  m.impl("fused_policy_loss_", TORCH_BOX(&fused_policy_loss));
  m.impl("fused_policy_loss_fits", TORCH_BOX(&fits_on_cuda));
  m.impl("scale_", TORCH_BOX(&scale));
}
#endif

}  // namespace
}  // namespace areal
