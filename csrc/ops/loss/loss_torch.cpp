// Schema, argument checks and registration. The public function, the fake kernel and the autograd formula are in
// areal_core/ops/loss.py.
#include <tuple>

#include "bind/torch_tensor.h"
#include "ops/loss/loss.h"

namespace areal {
namespace {

using bind::empty;
using bind::ScalarType;
using bind::Tensor;
using bind::vector_data;
using OptionalTensor = std::optional<Tensor>;
using FiveTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

constexpr const char* kOp = "ppo_loss";

struct Inputs {
  Tensor logprobs, proximal_logprobs, advantages, loss_mask;
  OptionalTensor behavior_logprobs, ref_logprobs, entropy, teacher_logprobs, keep_mask, versions, current_version,
      cu_seqlens, normalizer;
};

template <class Real>
void point_at_inputs(const Inputs& in, loss::PolicyLossArgs<Real>& args) {
  const Tensor& like = in.logprobs;
  const int64_t tokens = args.tokens;
  args.logprobs = vector_data<const Real>(in.logprobs, tokens, like, kOp, "logprobs");
  args.proximal_logprobs = vector_data<const Real>(in.proximal_logprobs, tokens, like, kOp, "proximal_logprobs");
  args.advantages = vector_data<const Real>(in.advantages, tokens, like, kOp, "advantages");
  args.loss_mask = vector_data<const bool>(in.loss_mask, tokens, like, kOp, "loss_mask");
  args.behavior_logprobs = vector_data<Real>(in.behavior_logprobs, tokens, like, kOp, "behavior_logprobs");
  args.ref_logprobs = vector_data<Real>(in.ref_logprobs, tokens, like, kOp, "ref_logprobs");
  args.entropy = vector_data<Real>(in.entropy, tokens, like, kOp, "entropy");
  args.teacher_logprobs = vector_data<Real>(in.teacher_logprobs, tokens, like, kOp, "teacher_logprobs");
  args.keep_mask = vector_data<bool>(in.keep_mask, tokens, like, kOp, "keep_mask");
  args.versions = vector_data<int64_t>(in.versions, tokens, like, kOp, "versions");
  args.current_version = vector_data<int64_t>(in.current_version, 1, like, kOp, "current_version");
  AREAL_CHECK(in.versions.has_value() == in.current_version.has_value(), kOp,
              ": expected versions and current_version together, got one of them");
  args.normalizer = vector_data<double>(in.normalizer, 1, like, kOp, "normalizer");
  const Segments segments =
      in.cu_seqlens.has_value() ? bind::make_segments(*in.cu_seqlens, tokens, like, kOp) : Segments{};
  AREAL_CHECK(segments.cu_seqlens != nullptr || !loss::needs_sequences(args.params), kOp,
              ": expected cu_seqlens with a ratio, behavior weight or aggregation by sequence, got None");
  args.cu_seqlens = segments.cu_seqlens;
  args.sequences = segments.count;
}

template <class Real>
FiveTensors run(const Inputs& in, const loss::PolicyLossParams& params) {
  constexpr ScalarType kReal = bind::kScalarType<Real>;
  const Tensor& like = in.logprobs;
  loss::PolicyLossArgs<Real> args;
  args.params = params;
  args.tokens = like.numel();
  point_at_inputs(in, args);

  const bool rewards_entropy = args.entropy != nullptr && params.entropy_coef != 0;
  FiveTensors out{empty({}, kReal, like), empty({loss::kStatCount}, ScalarType::Double, like),
                  empty({args.tokens}, kReal, like), empty({rewards_entropy ? args.tokens : 0}, kReal, like),
                  empty({}, kReal, like)};
  constexpr int64_t kSequenceDoubles = sizeof(loss::SequenceValues) / sizeof(double);
  const Tensor scratch = empty({loss::kStatCount * loss::block_count(args.tokens) + kSequenceDoubles * args.sequences},
                               ScalarType::Double, like);
  args.loss = static_cast<Real*>(std::get<0>(out).mutable_data_ptr());
  args.stats = static_cast<double*>(std::get<1>(out).mutable_data_ptr());
  args.grad_logprobs = static_cast<Real*>(std::get<2>(out).mutable_data_ptr());
  args.grad_entropy = rewards_entropy ? static_cast<Real*>(std::get<3>(out).mutable_data_ptr()) : nullptr;
  args.scale = static_cast<Real*>(std::get<4>(out).mutable_data_ptr());
  args.scratch = static_cast<double*>(scratch.mutable_data_ptr());
  args.sequence_scratch =
      reinterpret_cast<loss::SequenceValues*>(args.scratch + loss::kStatCount * loss::block_count(args.tokens));
  bind::on_device(like, [&] { loss::policy_loss_cpu(args); }, [&](void* stream) { cuda::policy_loss(args, stream); });
  return out;
}

template <class Enum>
Enum choice(int64_t value, int32_t count, const char* name) {
  AREAL_CHECK(value >= 0 && value < count, kOp, ": expected ", name, " in 0..", count - 1, ", got ", value);
  return static_cast<Enum>(value);
}

FiveTensors ppo_loss(const Tensor& logprobs, const Tensor& proximal_logprobs, const Tensor& advantages,
                     const Tensor& loss_mask, const OptionalTensor& behavior_logprobs,
                     const OptionalTensor& ref_logprobs, const OptionalTensor& entropy,
                     const OptionalTensor& teacher_logprobs, const OptionalTensor& keep_mask,
                     const OptionalTensor& versions, const OptionalTensor& current_version,
                     const OptionalTensor& cu_seqlens, const OptionalTensor& normalizer, int64_t objective,
                     int64_t ratio_level, double ratio_low, double ratio_high, double dual_clip, double tau_positive,
                     double tau_negative, int64_t behavior_level, int64_t behavior_mode, double behavior_low,
                     double behavior_cap, int64_t kl_estimator, double kl_coef, double entropy_coef,
                     double distill_coef, int64_t aggregation) {
  loss::PolicyLossParams params;
  params.objective = choice<loss::Objective>(objective, loss::kObjectiveCount, "objective");
  params.ratio_level = choice<loss::RatioLevel>(ratio_level, loss::kRatioLevelCount, "ratio_level");
  params.ratio_low = ratio_low;
  params.ratio_high = ratio_high;
  params.dual_clip = dual_clip;
  params.tau_positive = tau_positive;
  params.tau_negative = tau_negative;
  params.behavior_level = choice<loss::BehaviorLevel>(behavior_level, loss::kBehaviorLevelCount, "behavior_level");
  params.behavior_mode = choice<loss::BehaviorMode>(behavior_mode, loss::kBehaviorModeCount, "behavior_mode");
  params.behavior_low = behavior_low;
  params.behavior_cap = behavior_cap;
  params.kl_estimator = choice<loss::KlEstimator>(kl_estimator, loss::kKlEstimatorCount, "kl_estimator");
  params.kl_coef = kl_coef;
  params.entropy_coef = entropy_coef;
  params.distill_coef = distill_coef;
  params.aggregation = choice<loss::Aggregation>(aggregation, loss::kAggregationCount, "aggregation");
  const Inputs in{logprobs,        proximal_logprobs, advantages,       loss_mask, behavior_logprobs,
                  ref_logprobs,    entropy,           teacher_logprobs, keep_mask, versions,
                  current_version, cu_seqlens,        normalizer};
  return bind::with_real(logprobs, kOp, "logprobs", [&]<class Real>(Real) { return run<Real>(in, params); });
}

STABLE_TORCH_LIBRARY_FRAGMENT(areal_core, m) {
  m.def(
      "ppo_loss(Tensor logprobs, Tensor proximal_logprobs, Tensor advantages, Tensor loss_mask, "
      "Tensor? behavior_logprobs, Tensor? ref_logprobs, Tensor? entropy, Tensor? teacher_logprobs, Tensor? keep_mask, "
      "Tensor? versions, Tensor? current_version, Tensor? cu_seqlens, Tensor? normalizer, int objective, "
      "int ratio_level, float ratio_low, float ratio_high, float dual_clip, float tau_positive, float tau_negative, "
      "int behavior_level, int behavior_mode, float behavior_low, float behavior_cap, int kl_estimator, "
      "float kl_coef, float entropy_coef, float distill_coef, int aggregation) "
      "-> (Tensor loss, Tensor stats, Tensor grad_logprobs, Tensor grad_entropy, Tensor scale)");
}

STABLE_TORCH_LIBRARY_IMPL(areal_core, CPU, m) { m.impl("ppo_loss", TORCH_BOX(&ppo_loss)); }
#if defined(AREAL_WITH_CUDA)
STABLE_TORCH_LIBRARY_IMPL(areal_core, CUDA, m) { m.impl("ppo_loss", TORCH_BOX(&ppo_loss)); }
#endif

}  // namespace
}  // namespace areal
