// Schemas, argument checks and registration. The public functions and the fake kernels are in
// areal_core/ops/advantages.py.
#include <tuple>

#include "bind/torch_tensor.h"
#include "ops/advantages/gae.h"
#include "ops/advantages/group.h"
#include "ops/advantages/spread.h"

namespace areal {
namespace {

using bind::empty;
using bind::make_segments;
using bind::on_device;
using bind::ScalarType;
using bind::Tensor;
using bind::vector_data;
using OptionalTensor = std::optional<Tensor>;

// Calls fn(float{}) or fn(double{}) by the dtype of the tensor.
template <class Fn>
auto with_real(const Tensor& tensor, const char* op, const char* name, const Fn& fn) {
  const DType dtype = bind::stream_dtype(tensor, op, name);
  AREAL_CHECK(dtype == DType::kFloat32 || dtype == DType::kFloat64, op, ": expected ", name,
              " dtype in {float32, float64}, got ", dtype_name(dtype));
  return dtype == DType::kFloat64 ? fn(double{}) : fn(float{});
}

std::tuple<Tensor, Tensor> gae(const Tensor& rewards, const Tensor& values, const Tensor& cu_seqlens,
                               const OptionalTensor& loss_mask, double gamma, double lam) {
  constexpr const char* op = "gae";
  AREAL_CHECK(gamma >= 0 && gamma <= 1, op, ": expected gamma in [0, 1], got ", gamma);
  AREAL_CHECK(lam >= 0 && lam <= 1, op, ": expected lam in [0, 1], got ", lam);
  return with_real(rewards, op, "rewards", [&]<class Real>(Real) {
    const int64_t tokens = rewards.numel();
    std::tuple<Tensor, Tensor> out{empty({tokens}, bind::kScalarType<Real>, rewards),
                                   empty({tokens}, bind::kScalarType<Real>, rewards)};
    const advantages::GaeArgs<Real> args{make_segments(cu_seqlens, tokens, rewards, op),
                                         vector_data<const Real>(rewards, tokens, rewards, op, "rewards"),
                                         vector_data<const Real>(values, tokens, rewards, op, "values"),
                                         vector_data<bool>(loss_mask, tokens, rewards, op, "loss_mask"),
                                         gamma,
                                         lam,
                                         static_cast<Real*>(std::get<0>(out).mutable_data_ptr()),
                                         static_cast<Real*>(std::get<1>(out).mutable_data_ptr())};
    on_device(rewards, [&] { advantages::gae_cpu(args); }, [&](void* stream) { cuda::gae(args, tokens, stream); });
    return out;
  });
}

Tensor group_scores(const Tensor& rewards, const Tensor& sorted_ids, const Tensor& order, int64_t mean_level,
                    int64_t std_level, bool leave_one_out, bool divide_by_mean, int64_t ddof, double eps,
                    bool eps_in_root, bool singleton_raw) {
  constexpr const char* op = "group_scores";
  AREAL_CHECK(mean_level >= 0 && mean_level <= 2, op, ": expected mean_level in 0..2, got ", mean_level);
  AREAL_CHECK(std_level >= 0 && std_level <= 2, op, ": expected std_level in 0..2, got ", std_level);
  AREAL_CHECK(ddof == 0 || ddof == 1, op, ": expected ddof 0 or 1, got ", ddof);
  AREAL_CHECK(eps >= 0, op, ": expected eps >= 0, got ", eps);
  return with_real(rewards, op, "rewards", [&]<class Real>(Real) {
    const int64_t count = rewards.numel();
    const Tensor scores = empty({count}, ScalarType::Double, rewards);
    const Tensor batch_scratch = empty({cuda::kBatchScratchBytes}, ScalarType::Byte, rewards);
    const advantages::GroupArgs<Real> args{
        {static_cast<advantages::Level>(mean_level), static_cast<advantages::Level>(std_level), leave_one_out,
         divide_by_mean, static_cast<int32_t>(ddof), eps, eps_in_root,
         singleton_raw ? advantages::Singleton::kRaw : advantages::Singleton::kZero},
        count,
        vector_data<const Real>(rewards, count, rewards, op, "rewards"),
        vector_data<const int64_t>(sorted_ids, count, rewards, op, "sorted_ids"),
        vector_data<const int64_t>(order, count, rewards, op, "order"),
        static_cast<double*>(scores.mutable_data_ptr())};
    on_device(
        rewards, [&] { advantages::group_scores_cpu(args); },
        [&](void* stream) { cuda::group_scores(args, batch_scratch.mutable_data_ptr(), stream); });
    return scores;
  });
}

template <class Real>
advantages::TokenArgs<Real> make_tokens(const Tensor& cu_seqlens, int64_t tokens, const OptionalTensor& loss_mask,
                                        const OptionalTensor& logprobs, const OptionalTensor& ref_logprobs,
                                        const Tensor& like, const char* op) {
  return {make_segments(cu_seqlens, tokens, like, op), vector_data<bool>(loss_mask, tokens, like, op, "loss_mask"),
          vector_data<Real>(logprobs, tokens, like, op, "logprobs"),
          vector_data<Real>(ref_logprobs, tokens, like, op, "ref_logprobs")};
}

template <class Real>
Tensor spread_typed(const Tensor& scores, const Tensor& cu_seqlens, int64_t tokens, const OptionalTensor& loss_mask,
                    const OptionalTensor& logprobs, const OptionalTensor& ref_logprobs, double beta,
                    bool divide_by_length) {
  constexpr const char* op = "spread_scores";
  AREAL_CHECK(tokens >= 0, op, ": expected tokens >= 0, got ", tokens);
  AREAL_CHECK(beta == 0 || (logprobs.has_value() && ref_logprobs.has_value()), op,
              ": expected logprobs and ref_logprobs with beta = ", beta, ", got none");
  const Tensor out = empty({tokens}, bind::kScalarType<Real>, scores);
  const advantages::SpreadArgs<Real> args{
      make_tokens<Real>(cu_seqlens, tokens, loss_mask, logprobs, ref_logprobs, scores, op),
      vector_data<const double>(scores, cu_seqlens.numel() - 1, scores, op, "scores"), beta, divide_by_length,
      static_cast<Real*>(out.mutable_data_ptr())};
  on_device(
      scores, [&] { advantages::spread_scores_cpu(args); },
      [&](void* stream) { cuda::spread_scores(args, tokens, stream); });
  return out;
}

Tensor spread_scores(const Tensor& scores, const Tensor& cu_seqlens, int64_t tokens, const OptionalTensor& loss_mask,
                     const OptionalTensor& logprobs, const OptionalTensor& ref_logprobs, double beta,
                     bool divide_by_length, bool float64) {
  return (float64 ? spread_typed<double> : spread_typed<float>)(scores, cu_seqlens, tokens, loss_mask, logprobs,
                                                                ref_logprobs, beta, divide_by_length);
}

Tensor log_ratio_sums(const Tensor& logprobs, const Tensor& ref_logprobs, const Tensor& cu_seqlens,
                      const OptionalTensor& loss_mask) {
  constexpr const char* op = "log_ratio_sums";
  return with_real(logprobs, op, "logprobs", [&]<class Real>(Real) {
    const Tensor sums = empty({cu_seqlens.numel() - 1}, ScalarType::Double, logprobs);
    const advantages::LogRatioSumArgs<Real> args{
        make_tokens<Real>(cu_seqlens, logprobs.numel(), loss_mask, logprobs, ref_logprobs, logprobs, op),
        static_cast<double*>(sums.mutable_data_ptr())};
    on_device(
        logprobs, [&] { advantages::log_ratio_sums_cpu(args); },
        [&](void* stream) { cuda::log_ratio_sums(args, logprobs.numel(), stream); });
    return sums;
  });
}

STABLE_TORCH_LIBRARY_FRAGMENT(areal_core, m) {
  m.def(
      "gae(Tensor rewards, Tensor values, Tensor cu_seqlens, Tensor? loss_mask, float gamma, float lam) "
      "-> (Tensor advantages, Tensor returns)");
  m.def(
      "group_scores(Tensor rewards, Tensor sorted_ids, Tensor order, int mean_level, int std_level, "
      "bool leave_one_out, bool divide_by_mean, int ddof, float eps, bool eps_in_root, bool singleton_raw) -> Tensor");
  m.def(
      "spread_scores(Tensor scores, Tensor cu_seqlens, SymInt tokens, Tensor? loss_mask, Tensor? logprobs, "
      "Tensor? ref_logprobs, float beta, bool divide_by_length, bool float64) -> Tensor");
  m.def("log_ratio_sums(Tensor logprobs, Tensor ref_logprobs, Tensor cu_seqlens, Tensor? loss_mask) -> Tensor");
}

template <class Library>
void register_ops(Library& m) {
  m.impl("gae", TORCH_BOX(&gae));
  m.impl("group_scores", TORCH_BOX(&group_scores));
  m.impl("spread_scores", TORCH_BOX(&spread_scores));
  m.impl("log_ratio_sums", TORCH_BOX(&log_ratio_sums));
}

STABLE_TORCH_LIBRARY_IMPL(areal_core, CPU, m) { register_ops(m); }
#if defined(AREAL_WITH_CUDA)
STABLE_TORCH_LIBRARY_IMPL(areal_core, CUDA, m) { register_ops(m); }
#endif

}  // namespace
}  // namespace areal
