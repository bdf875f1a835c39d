#include "ops/loss/loss.h"

#include <areal_core/loss.h>

#include <cmath>
#include <iterator>
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

double or_infinity(double value) { return value == 0 ? loss::kInfinity : value; }

void check_numbers(const areal_policy_loss_args& args, const char* op) {
  AREAL_CHECK(args.clip_low >= 0 && args.clip_low <= 1, op, ": expected clip_low in [0, 1], got ", args.clip_low);
  AREAL_CHECK(args.clip_high >= 0, op, ": expected clip_high >= 0, got ", args.clip_high);
  AREAL_CHECK(args.dual_clip == 0 || args.dual_clip > 1, op, ": expected dual_clip > 1, or 0 for none, got ",
              args.dual_clip);
  AREAL_CHECK(args.tau_positive >= 0, op, ": expected tau_positive > 0, or 0 for 1, got ", args.tau_positive);
  AREAL_CHECK(args.tau_negative >= 0, op, ": expected tau_negative > 0, or 0 for 1.05, got ", args.tau_negative);
  AREAL_CHECK(args.behavior_cap >= 0, op, ": expected behavior_cap > 0, or 0 for none, got ", args.behavior_cap);
  AREAL_CHECK(args.behavior_low >= 0 && args.behavior_low <= or_infinity(args.behavior_cap), op,
              ": expected behavior_low in [0, behavior_cap], got ", args.behavior_low);
  AREAL_CHECK(std::isfinite(args.kl_coef), op, ": expected kl_coef finite, got ", args.kl_coef);
  AREAL_CHECK(std::isfinite(args.entropy_coef), op, ": expected entropy_coef finite, got ", args.entropy_coef);
  AREAL_CHECK(std::isfinite(args.distill_coef), op, ": expected distill_coef finite, got ", args.distill_coef);
}

// Combinations that the core would take for others.
void check_objective(const loss::PolicyLossParams& params, const char* op) {
  using loss::Objective, loss::RatioLevel;
  const auto level = static_cast<int32_t>(params.ratio_level);
  AREAL_CHECK(params.objective != Objective::kGmpo || params.ratio_level == RatioLevel::kSequence, op,
              ": expected ratio_level AREAL_RATIO_SEQUENCE with AREAL_OBJECTIVE_GMPO, got ", level);
  AREAL_CHECK(params.objective == Objective::kReinforce || params.ratio_level != RatioLevel::kOff, op,
              ": expected ratio_level other than AREAL_RATIO_OFF but with AREAL_OBJECTIVE_REINFORCE, got ", level);
  AREAL_CHECK(params.objective == Objective::kPpo || params.dual_clip == loss::kInfinity, op,
              ": expected dual_clip 0 but with AREAL_OBJECTIVE_PPO, got ", params.dual_clip);
}

// What an option needs and was not given.
void check_given(const areal_policy_loss_args& args, const loss::PolicyLossParams& params, const char* op) {
  const auto need = [&](bool wanted, const void* given, const char* name, const char* option) {
    AREAL_CHECK(!wanted || given != nullptr, op, ": expected ", name, " with ", option, " set, got NULL");
  };
  need(params.kl_coef != 0, args.ref_logprobs, "ref_logprobs", "kl_coef");
  need(params.entropy_coef != 0, args.entropy, "entropy", "entropy_coef");
  need(params.entropy_coef != 0 && args.tokens > 0, args.grad_entropy, "grad_entropy", "entropy_coef");
  need(params.distill_coef != 0, args.teacher_logprobs, "teacher_logprobs", "distill_coef");
  need(args.behavior_cap != 0 || args.behavior_low != 0, args.behavior_logprobs, "behavior_logprobs",
       "behavior_cap or behavior_low");
  need(params.behavior_level != loss::BehaviorLevel::kToken, args.behavior_logprobs, "behavior_logprobs",
       "behavior_level");
  need(params.aggregation == loss::Aggregation::kConstant, args.normalizer, "normalizer", "aggregation AREAL_CONSTANT");
  need(args.versions != nullptr, args.current_version, "current_version", "versions");
  need(loss::needs_sequences(params), args.cu_seqlens, "cu_seqlens",
       "a ratio, behavior weight or aggregation by sequence");
}

loss::PolicyLossParams make_params(const areal_policy_loss_args& args, const char* op) {
  check_numbers(args, op);
  const auto last = []<class Enum>(Enum, int32_t count) { return static_cast<Enum>(count - 1); };
  loss::PolicyLossParams params;
  params.objective = checked_enum(args.objective, last(params.objective, loss::kObjectiveCount), op, "objective");
  params.ratio_level =
      checked_enum(args.ratio_level, last(params.ratio_level, loss::kRatioLevelCount), op, "ratio_level");
  params.ratio_low = 1 - args.clip_low;
  params.ratio_high = 1 + args.clip_high;
  params.dual_clip = or_infinity(args.dual_clip);
  if (args.tau_positive != 0) params.tau_positive = args.tau_positive;
  if (args.tau_negative != 0) params.tau_negative = args.tau_negative;
  params.behavior_level =
      checked_enum(args.behavior_level, last(params.behavior_level, loss::kBehaviorLevelCount), op, "behavior_level");
  params.behavior_mode =
      checked_enum(args.behavior_mode, last(params.behavior_mode, loss::kBehaviorModeCount), op, "behavior_mode");
  params.behavior_low = args.behavior_low;
  params.behavior_cap = or_infinity(args.behavior_cap);
  params.kl_estimator =
      checked_enum(args.kl_estimator, last(params.kl_estimator, loss::kKlEstimatorCount), op, "kl_estimator");
  params.kl_coef = args.kl_coef;
  params.entropy_coef = args.entropy_coef;
  params.distill_coef = args.distill_coef;
  params.aggregation =
      checked_enum(args.aggregation, last(params.aggregation, loss::kAggregationCount), op, "aggregation");
  check_objective(params, op);
  check_given(args, params, op);
  return params;
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
  if (args.cu_seqlens != nullptr) {
    const Segments segments = segments_in(memory, args.cu_seqlens, args.sequences, tokens, op);
    native.cu_seqlens = segments.cu_seqlens;
    native.sequences = segments.count;
  }
  native.logprobs = real_array<Real>(args.logprobs, tokens, op, "logprobs");
  native.proximal_logprobs = real_array<Real>(args.proximal_logprobs, tokens, op, "proximal_logprobs");
  native.advantages = real_array<Real>(args.advantages, tokens, op, "advantages");
  native.behavior_logprobs = static_cast<const Real*>(args.behavior_logprobs);
  native.ref_logprobs = static_cast<const Real*>(args.ref_logprobs);
  native.entropy = static_cast<const Real*>(args.entropy);
  native.teacher_logprobs = static_cast<const Real*>(args.teacher_logprobs);
  native.loss_mask = mask_in(memory, required(args.loss_mask, tokens, op, "loss_mask"), tokens, op);
  native.keep_mask = mask_in(memory, args.keep_mask, tokens, op);
  native.versions = args.versions;
  native.current_version = args.current_version;
  native.normalizer = args.normalizer;
  native.loss = real_array<Real>(args.loss, 1, op, "loss");
  native.grad_logprobs = real_array<Real>(args.grad_logprobs, tokens, op, "grad_logprobs");
  native.grad_entropy = native.params.entropy_coef != 0 ? static_cast<Real*>(args.grad_entropy) : nullptr;
  native.scale = real_array<Real>(args.scale, 1, op, "scale");
  native.stats = required(args.stats, 1, op, "stats");
  native.scratch = scratch;
  native.sequence_scratch =
      reinterpret_cast<loss::SequenceValues*>(scratch + loss::kStatCount * loss::block_count(tokens));
  return native;
}

int64_t scratch_bytes_of(const areal_policy_loss_args& args, const char* op) {
  return areal_policy_loss_scratch_bytes(checked_count(args.tokens, op, "tokens"),
                                         checked_count(args.sequences, op, "sequences"));
}

}  // namespace
}  // namespace areal::c_api

using namespace areal::c_api;

int64_t areal_policy_loss_scratch_bytes(int64_t tokens, int64_t sequences) {
  namespace loss = areal::loss;
  static_assert(alignof(loss::SequenceValues) == alignof(double));
  const int64_t blocks = loss::block_count(tokens < 0 ? 0 : tokens);
  return loss::kStatCount * blocks * int64_t{sizeof(double)} +
         (sequences < 0 ? 0 : sequences) * int64_t{sizeof(loss::SequenceValues)};
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
    double* const scratch = scratch_of(given, scratch_bytes_of(given, op), &own, op);
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
        double* const scratch = scratch_of(given, scratch_bytes_of(given, op), nullptr, op);
        with_real(given.dtype, op, [&]<class Real>(Real) {
          areal::cuda::policy_loss(make_policy_loss<Real>(given, Memory::kDevice, scratch, op), stream);
        });
      },
      op);
}
