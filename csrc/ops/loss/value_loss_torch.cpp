// Schema, argument checks and registration of value_loss. The public function, the fake kernel and the autograd formula
// are in areal_core/ops/value_loss.py.
#include <tuple>

#include "bind/torch_tensor.h"
#include "ops/loss/value_loss.h"

namespace areal {
namespace {

using bind::empty;
using bind::ScalarType;
using bind::Tensor;
using bind::vector_data;
using OptionalTensor = std::optional<Tensor>;
using FourTensors = std::tuple<Tensor, Tensor, Tensor, Tensor>;

constexpr const char* kOp = "value_loss";

template <class Real>
FourTensors run(const Tensor& values, const OptionalTensor& old_values, const Tensor& returns, const Tensor& loss_mask,
                const OptionalTensor& normalizer, double clip, double huber_delta) {
  constexpr ScalarType kReal = bind::kScalarType<Real>;
  const int64_t tokens = values.numel();
  loss::ValueLossArgs<Real> args;
  args.tokens = tokens;
  args.clip = clip;
  args.huber_delta = huber_delta;
  args.values = vector_data<const Real>(values, tokens, values, kOp, "values");
  args.old_values = vector_data<Real>(old_values, tokens, values, kOp, "old_values");
  args.returns = vector_data<const Real>(returns, tokens, values, kOp, "returns");
  args.loss_mask = vector_data<const bool>(loss_mask, tokens, values, kOp, "loss_mask");
  args.normalizer = vector_data<double>(normalizer, 1, values, kOp, "normalizer");
  FourTensors out{empty({}, kReal, values), empty({loss::kValueStatCount}, ScalarType::Double, values),
                  empty({tokens}, kReal, values), empty({}, kReal, values)};
  const Tensor scratch = empty({loss::kValueStatCount * loss::value_block_count(tokens)}, ScalarType::Double, values);
  args.loss = static_cast<Real*>(std::get<0>(out).mutable_data_ptr());
  args.stats = static_cast<double*>(std::get<1>(out).mutable_data_ptr());
  args.grad = static_cast<Real*>(std::get<2>(out).mutable_data_ptr());
  args.scale = static_cast<Real*>(std::get<3>(out).mutable_data_ptr());
  args.scratch = static_cast<double*>(scratch.mutable_data_ptr());
  bind::on_device(values, [&] { loss::value_loss_cpu(args); }, [&](void* stream) { cuda::value_loss(args, stream); });
  return out;
}

FourTensors value_loss(const Tensor& values, const OptionalTensor& old_values, const Tensor& returns,
                       const Tensor& loss_mask, const OptionalTensor& normalizer, double clip, double huber_delta) {
  return bind::with_real(values, kOp, "values", [&]<class Real>(Real) {
    return run<Real>(values, old_values, returns, loss_mask, normalizer, clip, huber_delta);
  });
}

STABLE_TORCH_LIBRARY_FRAGMENT(areal_core, m) {
  m.def(
      "value_loss(Tensor values, Tensor? old_values, Tensor returns, Tensor loss_mask, Tensor? normalizer, float clip, "
      "float huber_delta) -> (Tensor loss, Tensor stats, Tensor grad, Tensor scale)");
}

STABLE_TORCH_LIBRARY_IMPL(areal_core, CPU, m) { m.impl("value_loss", TORCH_BOX(&value_loss)); }
#if defined(AREAL_WITH_CUDA)
STABLE_TORCH_LIBRARY_IMPL(areal_core, CUDA, m) { m.impl("value_loss", TORCH_BOX(&value_loss)); }
#endif

}  // namespace
}  // namespace areal
