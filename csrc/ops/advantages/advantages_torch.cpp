// Schemas, argument checks and registration of the scans, group scores and token rewards. The public functions and the
// fake kernels are in areal_core/ops/advantages.py and estimators.py.
#include <tuple>

#include "bind/torch_tensor.h"
#include "ops/advantages/best_of.h"
#include "ops/advantages/gae.h"
#include "ops/advantages/group.h"
#include "ops/advantages/spread.h"
#include "ops/advantages/token_rewards.h"

namespace areal {
namespace {

using bind::empty;
using bind::make_segments;
using bind::on_device;
using bind::ScalarType;
using bind::Tensor;
using bind::vector_data;
using bind::with_real;
using OptionalTensor = std::optional<Tensor>;

void check_unit(double value, const char* op, const char* name) {
  AREAL_CHECK(value >= 0 && value <= 1, op, ": expected ", name, " in [0, 1], got ", value);
}

template <class Real>
void run_gae(const advantages::GaeArgs<Real>& args, int64_t tokens, const Tensor& like) {
  on_device(like, [&] { advantages::gae_cpu(args); }, [&](void* stream) { cuda::gae(args, tokens, stream); });
}

std::tuple<Tensor, Tensor> gae(const OptionalTensor& rewards, const Tensor& values, const OptionalTensor& terminal,
                               const Tensor& cu_seqlens, const OptionalTensor& loss_mask, double gamma, double lam) {
  constexpr const char* op = "gae";
  check_unit(gamma, op, "gamma");
  check_unit(lam, op, "lam");
  const Tensor& like = rewards.has_value() ? *rewards : values;  // errors name the other
  return with_real(like, op, rewards.has_value() ? "rewards" : "values", [&]<class Real>(Real) {
    const int64_t tokens = like.numel();
    std::tuple<Tensor, Tensor> out{empty({tokens}, bind::kScalarType<Real>, like),
                                   empty({tokens}, bind::kScalarType<Real>, like)};
    const advantages::GaeArgs<Real> args{
        make_segments(cu_seqlens, tokens, like, op),
        vector_data<Real>(rewards, tokens, like, op, "rewards"),
        vector_data<const Real>(values, tokens, like, op, "values"),
        vector_data<double>(terminal, cu_seqlens.numel() - 1, like, op, "terminal_rewards"),
        vector_data<bool>(loss_mask, tokens, like, op, "loss_mask"),
        gamma,
        lam,
        static_cast<Real*>(std::get<0>(out).mutable_data_ptr()),
        static_cast<Real*>(std::get<1>(out).mutable_data_ptr())};
    run_gae(args, tokens, like);
    return out;
  });
}

Tensor discounted_returns(const Tensor& rewards, const OptionalTensor& terminal, const Tensor& cu_seqlens,
                          const OptionalTensor& loss_mask, double gamma) {
  constexpr const char* op = "discounted_returns";
  check_unit(gamma, op, "gamma");
  return with_real(rewards, op, "rewards", [&]<class Real>(Real) {
    const int64_t tokens = rewards.numel();
    const Tensor returns = empty({tokens}, bind::kScalarType<Real>, rewards);
    const advantages::GaeArgs<Real> args{
        make_segments(cu_seqlens, tokens, rewards, op),
        vector_data<const Real>(rewards, tokens, rewards, op, "rewards"),
        nullptr,
        vector_data<double>(terminal, cu_seqlens.numel() - 1, rewards, op, "terminal_rewards"),
        vector_data<bool>(loss_mask, tokens, rewards, op, "loss_mask"),
        gamma,
        1.0,
        nullptr,
        static_cast<Real*>(returns.mutable_data_ptr())};
    run_gae(args, tokens, rewards);
    return returns;
  });
}

std::tuple<Tensor, Tensor, Tensor> group_scores(const Tensor& rewards, const OptionalTensor& lengths,
                                                const Tensor& sorted_ids, const Tensor& order,
                                                const OptionalTensor& batch, int64_t mean_level, int64_t std_level,
                                                bool leave_one_out, bool leave_one_out_std, bool length_weighted,
                                                bool divide_by_mean, int64_t ddof, double eps, bool eps_in_root,
                                                bool singleton_raw) {
  constexpr const char* op = "group_scores";
  AREAL_CHECK(mean_level >= 0 && mean_level <= 2, op, ": expected mean_level in 0..2, got ", mean_level);
  AREAL_CHECK(std_level >= 0 && std_level <= 2, op, ": expected std_level in 0..2, got ", std_level);
  AREAL_CHECK(ddof == 0 || ddof == 1, op, ": expected ddof 0 or 1, got ", ddof);
  AREAL_CHECK(eps >= 0, op, ": expected eps >= 0, got ", eps);
  AREAL_CHECK(lengths.has_value() || !length_weighted, op, ": expected lengths, got none");
  AREAL_CHECK(batch.has_value() || (mean_level != 2 && std_level != 2), op, ": expected batch, got none");
  return with_real(rewards, op, "rewards", [&]<class Real>(Real) {
    const int64_t count = rewards.numel();
    std::tuple<Tensor, Tensor, Tensor> out{empty({count}, ScalarType::Double, rewards),
                                           empty({lengths.has_value() ? count : 0}, ScalarType::Double, rewards),
                                           empty({count}, ScalarType::Bool, rewards)};
    const advantages::GroupArgs<Real> args{
        {static_cast<advantages::Level>(mean_level), static_cast<advantages::Level>(std_level), leave_one_out,
         leave_one_out_std, length_weighted, divide_by_mean, static_cast<int32_t>(ddof), eps, eps_in_root,
         singleton_raw ? advantages::Singleton::kRaw : advantages::Singleton::kZero},
        count,
        vector_data<const Real>(rewards, count, rewards, op, "rewards"),
        vector_data<double>(lengths, count, rewards, op, "lengths"),
        vector_data<const int64_t>(sorted_ids, count, rewards, op, "sorted_ids"),
        vector_data<const int64_t>(order, count, rewards, op, "order"),
        reinterpret_cast<const advantages::BatchStatistics*>(vector_data<double>(batch, 5, rewards, op, "batch")),
        static_cast<double*>(std::get<0>(out).mutable_data_ptr()),
        lengths.has_value() ? static_cast<double*>(std::get<1>(out).mutable_data_ptr()) : nullptr,
        static_cast<bool*>(std::get<2>(out).mutable_data_ptr())};
    on_device(
        rewards, [&] { advantages::group_scores_cpu(args); }, [&](void* stream) { cuda::group_scores(args, stream); });
    return out;
  });
}

Tensor best_of_scores(const Tensor& rewards, const Tensor& sorted_ids, const Tensor& order, int64_t k,
                      bool divide_by_std, double eps, bool eps_in_root, bool singleton_raw) {
  constexpr const char* op = "best_of_scores";
  AREAL_CHECK(k >= 1, op, ": expected k >= 1, got ", k);
  AREAL_CHECK(eps >= 0, op, ": expected eps >= 0, got ", eps);
  return with_real(rewards, op, "rewards", [&]<class Real>(Real) {
    const int64_t count = rewards.numel();
    const Tensor scores = empty({count}, ScalarType::Double, rewards);
    const advantages::BestOfArgs<Real> args{{k, divide_by_std, eps, eps_in_root, singleton_raw},
                                            count,
                                            vector_data<const Real>(rewards, count, rewards, op, "rewards"),
                                            vector_data<const int64_t>(sorted_ids, count, rewards, op, "sorted_ids"),
                                            vector_data<const int64_t>(order, count, rewards, op, "order"),
                                            static_cast<double*>(scores.mutable_data_ptr())};
    on_device(
        rewards, [&] { advantages::best_of_scores_cpu(args); },
        [&](void* stream) { cuda::best_of_scores(args, stream); });
    return scores;
  });
}

template <class Real>
Tensor spread_typed(const Tensor& scores, const OptionalTensor& divisors, const Tensor& cu_seqlens, int64_t tokens,
                    const OptionalTensor& loss_mask, const OptionalTensor& logprobs, const OptionalTensor& ref_logprobs,
                    double beta) {
  constexpr const char* op = "spread_scores";
  AREAL_CHECK(tokens >= 0, op, ": expected tokens >= 0, got ", tokens);
  AREAL_CHECK(beta == 0 || (logprobs.has_value() && ref_logprobs.has_value()), op,
              ": expected logprobs and ref_logprobs with beta = ", beta, ", got none");
  const Tensor out = empty({tokens}, bind::kScalarType<Real>, scores);
  const advantages::SpreadArgs<Real> args{
      make_segments(cu_seqlens, tokens, scores, op),
      vector_data<const double>(scores, cu_seqlens.numel() - 1, scores, op, "scores"),
      vector_data<double>(divisors, cu_seqlens.numel() - 1, scores, op, "divisors"),
      vector_data<bool>(loss_mask, tokens, scores, op, "loss_mask"),
      vector_data<Real>(logprobs, tokens, scores, op, "logprobs"),
      vector_data<Real>(ref_logprobs, tokens, scores, op, "ref_logprobs"),
      beta,
      static_cast<Real*>(out.mutable_data_ptr())};
  on_device(
      scores, [&] { advantages::spread_scores_cpu(args); },
      [&](void* stream) { cuda::spread_scores(args, tokens, stream); });
  return out;
}

Tensor spread_scores(const Tensor& scores, const OptionalTensor& divisors, const Tensor& cu_seqlens, int64_t tokens,
                     const OptionalTensor& loss_mask, const OptionalTensor& logprobs,
                     const OptionalTensor& ref_logprobs, double beta, bool float64) {
  return (float64 ? spread_typed<double> : spread_typed<float>)(scores, divisors, cu_seqlens, tokens, loss_mask,
                                                                logprobs, ref_logprobs, beta);
}

template <class Real>
advantages::TokenRewards<Real> make_rewards(const OptionalTensor& rewards, const OptionalTensor& logprobs,
                                            const OptionalTensor& ref_logprobs, const OptionalTensor& loss_mask,
                                            double beta, int64_t kl, const Tensor& like, const char* op) {
  AREAL_CHECK(logprobs.has_value() == ref_logprobs.has_value(), op, ": expected logprobs and ref_logprobs or neither");
  AREAL_CHECK(kl >= 0 && kl <= 2, op, ": expected kl in 0..2, got ", kl);
  const int64_t tokens = like.numel();
  return {vector_data<Real>(rewards, tokens, like, op, "rewards"),
          vector_data<Real>(logprobs, tokens, like, op, "logprobs"),
          vector_data<Real>(ref_logprobs, tokens, like, op, "ref_logprobs"),
          vector_data<bool>(loss_mask, tokens, like, op, "loss_mask"),
          beta,
          static_cast<advantages::Kl>(kl)};
}

const Tensor& any_of(const OptionalTensor& rewards, const OptionalTensor& logprobs, const char* op) {
  AREAL_CHECK(rewards.has_value() || logprobs.has_value(), op, ": expected rewards or logprobs, got neither");
  return rewards.has_value() ? *rewards : *logprobs;
}

Tensor token_rewards(const OptionalTensor& rewards, const OptionalTensor& logprobs, const OptionalTensor& ref_logprobs,
                     const OptionalTensor& loss_mask, double beta, int64_t kl) {
  constexpr const char* op = "token_rewards";
  const Tensor& like = any_of(rewards, logprobs, op);
  return with_real(like, op, rewards.has_value() ? "rewards" : "logprobs", [&]<class Real>(Real) {
    const auto args = make_rewards<Real>(rewards, logprobs, ref_logprobs, loss_mask, beta, kl, like, op);
    const Tensor result = empty({like.numel()}, bind::kScalarType<Real>, like);
    auto* out = static_cast<Real*>(result.mutable_data_ptr());
    on_device(
        like, [&] { advantages::token_rewards_cpu(args, like.numel(), out); },
        [&](void* stream) { cuda::token_rewards(args, like.numel(), out, stream); });
    return result;
  });
}

Tensor sequence_rewards(const OptionalTensor& rewards, const OptionalTensor& logprobs,
                        const OptionalTensor& ref_logprobs, const Tensor& cu_seqlens, const OptionalTensor& loss_mask,
                        double beta, int64_t kl) {
  constexpr const char* op = "sequence_rewards";
  const Tensor& like = any_of(rewards, logprobs, op);
  return with_real(like, op, rewards.has_value() ? "rewards" : "logprobs", [&]<class Real>(Real) {
    const auto args = make_rewards<Real>(rewards, logprobs, ref_logprobs, loss_mask, beta, kl, like, op);
    const Segments segments = make_segments(cu_seqlens, like.numel(), like, op);
    const Tensor sums = empty({segments.count}, ScalarType::Double, like);
    auto* out = static_cast<double*>(sums.mutable_data_ptr());
    on_device(
        like, [&] { advantages::sequence_rewards_cpu(args, segments, out); },
        [&](void* stream) { cuda::sequence_rewards(args, segments, like.numel(), out, stream); });
    return sums;
  });
}

Tensor live_tokens(const Tensor& cu_seqlens, const OptionalTensor& loss_mask, int64_t tokens) {
  constexpr const char* op = "live_tokens";
  const Segments segments = make_segments(cu_seqlens, tokens, cu_seqlens, op);
  const bool* mask = vector_data<bool>(loss_mask, tokens, cu_seqlens, op, "loss_mask");
  const Tensor counts = empty({segments.count}, ScalarType::Double, cu_seqlens);
  auto* out = static_cast<double*>(counts.mutable_data_ptr());
  on_device(
      cu_seqlens, [&] { advantages::live_tokens_cpu(segments, mask, out); },
      [&](void* stream) { cuda::live_tokens(segments, mask, tokens, out, stream); });
  return counts;
}

STABLE_TORCH_LIBRARY_FRAGMENT(areal_core, m) {
  m.def(
      "gae(Tensor? rewards, Tensor values, Tensor? terminal, Tensor cu_seqlens, Tensor? loss_mask, float gamma, "
      "float lam) -> (Tensor advantages, Tensor returns)");
  m.def(
      "discounted_returns(Tensor rewards, Tensor? terminal, Tensor cu_seqlens, Tensor? loss_mask, float gamma) "
      "-> Tensor");
  m.def(
      "group_scores(Tensor rewards, Tensor? lengths, Tensor sorted_ids, Tensor order, Tensor? batch, int mean_level, "
      "int std_level, bool leave_one_out, bool leave_one_out_std, bool length_weighted, bool divide_by_mean, "
      "int ddof, float eps, bool eps_in_root, bool singleton_raw) "
      "-> (Tensor scores, Tensor mean_lengths, Tensor has_signal)");
  m.def(
      "best_of_scores(Tensor rewards, Tensor sorted_ids, Tensor order, int k, bool divide_by_std, float eps, "
      "bool eps_in_root, bool singleton_raw) -> Tensor");
  m.def(
      "spread_scores(Tensor scores, Tensor? divisors, Tensor cu_seqlens, SymInt tokens, Tensor? loss_mask, Tensor? "
      "logprobs, "
      "Tensor? ref_logprobs, float beta, bool float64) -> Tensor");
  m.def(
      "token_rewards(Tensor? rewards, Tensor? logprobs, Tensor? ref_logprobs, Tensor? loss_mask, float beta, int kl) "
      "-> Tensor");
  m.def(
      "sequence_rewards(Tensor? rewards, Tensor? logprobs, Tensor? ref_logprobs, Tensor cu_seqlens, Tensor? loss_mask, "
      "float beta, int kl) -> Tensor");
  m.def("live_tokens(Tensor cu_seqlens, Tensor? loss_mask, SymInt tokens) -> Tensor");
}

template <class Library>
void register_ops(Library& m) {
  m.impl("gae", TORCH_BOX(&gae));
  m.impl("discounted_returns", TORCH_BOX(&discounted_returns));
  m.impl("group_scores", TORCH_BOX(&group_scores));
  m.impl("best_of_scores", TORCH_BOX(&best_of_scores));
  m.impl("spread_scores", TORCH_BOX(&spread_scores));
  m.impl("token_rewards", TORCH_BOX(&token_rewards));
  m.impl("sequence_rewards", TORCH_BOX(&sequence_rewards));
  m.impl("live_tokens", TORCH_BOX(&live_tokens));
}

STABLE_TORCH_LIBRARY_IMPL(areal_core, CPU, m) { register_ops(m); }
#if defined(AREAL_WITH_CUDA)
STABLE_TORCH_LIBRARY_IMPL(areal_core, CUDA, m) { register_ops(m); }
#endif

}  // namespace
}  // namespace areal
