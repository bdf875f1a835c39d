#include "ops/loss/loss.h"

#include <areal_core/loss.h>

#include <cmath>
#include <iterator>
#include <limits>
#include <vector>

#include "c_api/boundary.h"

namespace areal::c_api {
namespace {

constexpr const char* kStatNames[] = {"live_tokens",
                                      "live_sequences",
                                      "loss_weight",
                                      "loss",
                                      "policy_loss",
                                      "ratio",
                                      "clip_low",
                                      "clip_high",
                                      "dual_clip",
                                      "kl_proximal_current_k1",
                                      "kl_proximal_current_k3",
                                      "kl_behavior_proximal_k1",
                                      "kl_behavior_proximal_k3",
                                      "kl_current_reference_k1",
                                      "kl_current_reference_k3",
                                      "kl_proximal_teacher_k1",
                                      "kl_proximal_teacher_k3",
                                      "behavior_weight",
                                      "applied_weight",
                                      "applied_weight_square",
                                      "behavior_capped",
                                      "behavior_masked",
                                      "dropped",
                                      "entropy",
                                      "staleness",
                                      "ratio_max",
                                      "negative_ratio_min",
                                      "behavior_weight_max",
                                      "staleness_max"};
static_assert(std::size(kStatNames) == loss::kStatCount, "name every statistic of loss.h");

double or_infinity(double value) { return value == 0 ? std::numeric_limits<double>::infinity() : value; }

loss::PolicyLossParams make_params(const areal_policy_loss_args& args, const char* op) {
  AREAL_CHECK(args.clip_low >= 0 && args.clip_low <= 1, op, ": expected clip_low in [0, 1], got ", args.clip_low);
  AREAL_CHECK(args.clip_high >= 0, op, ": expected clip_high >= 0, got ", args.clip_high);
  AREAL_CHECK(args.dual_clip == 0 || args.dual_clip > 1, op, ": expected dual_clip > 1, or 0 for none, got ",
              args.dual_clip);
  AREAL_CHECK(args.behavior_low >= 0 && args.behavior_low <= or_infinity(args.behavior_cap), op,
              ": expected behavior_low in [0, behavior_cap], got ", args.behavior_low);
  AREAL_CHECK(args.behavior_cap >= 0, op, ": expected behavior_cap > 0, or 0 for none, got ", args.behavior_cap);
  AREAL_CHECK(std::isfinite(args.kl_coef), op, ": expected kl_coef finite, got ", args.kl_coef);
  AREAL_CHECK(std::isfinite(args.entropy_coef), op, ": expected entropy_coef finite, got ", args.entropy_coef);
  AREAL_CHECK(args.kl_coef == 0 || args.ref_logprobs != nullptr, op,
              ": expected ref_logprobs with kl_coef set, got NULL");
  AREAL_CHECK(args.entropy_coef == 0 || args.entropy != nullptr, op,
              ": expected entropy with entropy_coef set, got NULL");
  const bool bounded = args.behavior_cap != 0 || args.behavior_low != 0;
  AREAL_CHECK(!bounded || args.behavior_logprobs != nullptr, op,
              ": expected behavior_logprobs with behavior_cap or behavior_low set, got NULL");
  return {.ratio_low = 1 - args.clip_low,
          .ratio_high = 1 + args.clip_high,
          .dual_clip = or_infinity(args.dual_clip),
          .behavior_mode = checked_enum(args.behavior_mode, loss::BehaviorMode::kMask, op, "behavior_mode"),
          .behavior_low = args.behavior_low,
          .behavior_cap = or_infinity(args.behavior_cap),
          .kl_estimator = checked_enum(args.kl_estimator, loss::KlEstimator::kK3, op, "kl_estimator"),
          .kl_coef = args.kl_coef,
          .entropy_coef = args.entropy_coef};
}

template <class Real>
loss::PolicyLossArgs<Real> make_policy_loss(const areal_policy_loss_args& args, Memory memory, double* scratch,
                                            const char* op) {
  const int64_t tokens = args.tokens;
  AREAL_CHECK(args.stats_count >= loss::kStatCount, op, ": expected stats_count >= ", int{loss::kStatCount}, ", got ",
              args.stats_count);
  loss::PolicyLossArgs<Real> native{};
  native.params = make_params(args, op);
  native.tokens = tokens;
  native.logprobs = real_array<Real>(args.logprobs, tokens, op, "logprobs");
  native.proximal_logprobs = real_array<Real>(args.proximal_logprobs, tokens, op, "proximal_logprobs");
  native.advantages = real_array<Real>(args.advantages, tokens, op, "advantages");
  native.loss_mask = mask_in(memory, required(args.loss_mask, tokens, op, "loss_mask"), tokens, op);
  native.behavior_logprobs = static_cast<const Real*>(args.behavior_logprobs);
  native.ref_logprobs = static_cast<const Real*>(args.ref_logprobs);
  native.entropy = static_cast<const Real*>(args.entropy);
  native.normalizer = args.normalizer;
  native.loss = real_array<Real>(args.loss, 1, op, "loss");
  native.stats = required(args.stats, 1, op, "stats");
  native.grad_logprobs = real_array<Real>(args.grad_logprobs, tokens, op, "grad_logprobs");
  native.scale = real_array<Real>(args.scale, 1, op, "scale");
  native.scratch = scratch;
  return native;
}

// The caller's scratch, or on the host `own` where there is none.
double* scratch_of(const areal_policy_loss_args& args, std::vector<double>* own, const char* op) {
  const int64_t bytes = areal_policy_loss_scratch_bytes(checked_count(args.tokens, op, "tokens"));
  if (own != nullptr && args.scratch == nullptr) {
    own->resize(static_cast<size_t>(bytes) / sizeof(double));
    return own->data();
  }
  AREAL_CHECK(args.scratch_bytes >= bytes, op, ": expected scratch_bytes >= ", bytes, ", got ", args.scratch_bytes);
  return static_cast<double*>(required(args.scratch, bytes, op, "scratch"));
}

}  // namespace
}  // namespace areal::c_api

using namespace areal::c_api;

int64_t areal_policy_loss_scratch_bytes(int64_t tokens) {
  return tokens <= 0 ? 0 : areal::loss::kStatCount * areal::loss::block_count(tokens) * int64_t{sizeof(double)};
}

int64_t areal_policy_loss_stat_count(void) { return areal::loss::kStatCount; }

const char* areal_policy_loss_stat_name(int64_t stat) {
  return stat >= 0 && stat < areal::loss::kStatCount ? kStatNames[stat] : nullptr;
}

areal_status areal_policy_loss_cpu(const areal_policy_loss_args* args) {
  constexpr const char* op = "areal_policy_loss_cpu";
  return guarded([&] {
    const auto given = read_struct(args, op, "args");
    std::vector<double> own;
    double* const scratch = scratch_of(given, &own, op);
    with_real(given.dtype, op, [&]<class Real>(Real) {
      areal::loss::policy_loss_cpu(make_policy_loss<Real>(given, Memory::kHost, scratch, op));
    });
  });
}

areal_status areal_policy_loss_cuda(const areal_policy_loss_args* args, void* stream) {
  constexpr const char* op = "areal_policy_loss_cuda";
  return guarded_cuda(
      [&] {
        const auto given = read_struct(args, op, "args");
        double* const scratch = scratch_of(given, nullptr, op);
        with_real(given.dtype, op, [&]<class Real>(Real) {
          areal::cuda::policy_loss(make_policy_loss<Real>(given, Memory::kDevice, scratch, op), stream);
        });
      },
      op);
}
