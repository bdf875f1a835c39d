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
using FourTensors = std::tuple<Tensor, Tensor, Tensor, Tensor>;

constexpr const char* kOp = "ppo_loss";

template <class Real>
FourTensors ppo_loss_typed(const loss::PolicyLossParams& params, const Tensor& logprobs,
                           const Tensor& proximal_logprobs, const Tensor& advantages, const Tensor& loss_mask,
                           const OptionalTensor& behavior_logprobs, const OptionalTensor& ref_logprobs,
                           const OptionalTensor& entropy, const OptionalTensor& normalizer) {
  const int64_t tokens = logprobs.numel();
  constexpr ScalarType kReal = bind::kScalarType<Real>;
  FourTensors out{empty({}, kReal, logprobs), empty({loss::kStatCount}, ScalarType::Double, logprobs),
                  empty({tokens}, kReal, logprobs), empty({}, kReal, logprobs)};
  const Tensor scratch = empty({loss::kStatCount * loss::block_count(tokens)}, ScalarType::Double, logprobs);

  loss::PolicyLossArgs<Real> args;
  args.params = params;
  args.tokens = tokens;
  args.logprobs = vector_data<const Real>(logprobs, tokens, logprobs, kOp, "logprobs");
  args.proximal_logprobs = vector_data<const Real>(proximal_logprobs, tokens, logprobs, kOp, "proximal_logprobs");
  args.advantages = vector_data<const Real>(advantages, tokens, logprobs, kOp, "advantages");
  args.loss_mask = vector_data<const bool>(loss_mask, tokens, logprobs, kOp, "loss_mask");
  args.behavior_logprobs = vector_data<Real>(behavior_logprobs, tokens, logprobs, kOp, "behavior_logprobs");
  args.ref_logprobs = vector_data<Real>(ref_logprobs, tokens, logprobs, kOp, "ref_logprobs");
  args.entropy = vector_data<Real>(entropy, tokens, logprobs, kOp, "entropy");
  args.normalizer = vector_data<double>(normalizer, 1, logprobs, kOp, "normalizer");
  args.loss = static_cast<Real*>(std::get<0>(out).mutable_data_ptr());
  args.stats = static_cast<double*>(std::get<1>(out).mutable_data_ptr());
  args.grad_logprobs = static_cast<Real*>(std::get<2>(out).mutable_data_ptr());
  args.scale = static_cast<Real*>(std::get<3>(out).mutable_data_ptr());
  args.scratch = static_cast<double*>(scratch.mutable_data_ptr());
  bind::on_device(
      logprobs, [&] { loss::policy_loss_cpu(args); }, [&](void* stream) { cuda::policy_loss(args, stream); });
  return out;
}

FourTensors ppo_loss(const Tensor& logprobs, const Tensor& proximal_logprobs, const Tensor& advantages,
                     const Tensor& loss_mask, const OptionalTensor& behavior_logprobs,
                     const OptionalTensor& ref_logprobs, const OptionalTensor& entropy,
                     const OptionalTensor& normalizer, double ratio_low, double ratio_high, double dual_clip,
                     int64_t behavior_mode, double behavior_low, double behavior_cap, int64_t kl_estimator,
                     double kl_coef, double entropy_coef) {
  const loss::PolicyLossParams params{ratio_low,
                                      ratio_high,
                                      dual_clip,
                                      static_cast<loss::BehaviorMode>(behavior_mode),
                                      behavior_low,
                                      behavior_cap,
                                      static_cast<loss::KlEstimator>(kl_estimator),
                                      kl_coef,
                                      entropy_coef};
  AREAL_CHECK(behavior_mode >= 0 && behavior_mode <= 1, kOp, ": expected behavior_mode 0 or 1, got ", behavior_mode);
  AREAL_CHECK(kl_estimator >= 0 && kl_estimator <= 2, kOp, ": expected kl_estimator in 0..2, got ", kl_estimator);
  switch (bind::stream_dtype(logprobs, kOp, "logprobs")) {
    case DType::kFloat32:
      return ppo_loss_typed<float>(params, logprobs, proximal_logprobs, advantages, loss_mask, behavior_logprobs,
                                   ref_logprobs, entropy, normalizer);
    case DType::kFloat64:
      return ppo_loss_typed<double>(params, logprobs, proximal_logprobs, advantages, loss_mask, behavior_logprobs,
                                    ref_logprobs, entropy, normalizer);
    default:
      throw Error(format_message(kOp, ": expected logprobs dtype in {float32, float64}, got ",
                                 torch::headeronly::toString(logprobs.scalar_type())));
  }
}

STABLE_TORCH_LIBRARY_FRAGMENT(areal_core, m) {
  m.def(
      "ppo_loss(Tensor logprobs, Tensor proximal_logprobs, Tensor advantages, Tensor loss_mask, "
      "Tensor? behavior_logprobs, Tensor? ref_logprobs, Tensor? entropy, Tensor? normalizer, float ratio_low, "
      "float ratio_high, float dual_clip, int behavior_mode, float behavior_low, float behavior_cap, "
      "int kl_estimator, float kl_coef, float entropy_coef) "
      "-> (Tensor loss, Tensor stats, Tensor grad_logprobs, Tensor scale)");
}

STABLE_TORCH_LIBRARY_IMPL(areal_core, CPU, m) { m.impl("ppo_loss", TORCH_BOX(&ppo_loss)); }
#if defined(AREAL_WITH_CUDA)
STABLE_TORCH_LIBRARY_IMPL(areal_core, CUDA, m) { m.impl("ppo_loss", TORCH_BOX(&ppo_loss)); }
#endif

}  // namespace
}  // namespace areal
