#include <areal_core/advantages.h>

#include <algorithm>
#include <numeric>

#include "c_api/boundary.h"
#include "ops/advantages/best_of.h"
#include "ops/advantages/gae.h"
#include "ops/advantages/group.h"
#include "ops/advantages/spread.h"
#include "ops/advantages/token_rewards.h"

namespace areal::c_api {
namespace {

template <class Real>
advantages::GaeArgs<Real> make_gae(const areal_gae_args& args, Memory memory, const char* op) {
  AREAL_CHECK(args.gamma >= 0 && args.gamma <= 1, op, ": expected gamma in [0, 1], got ", args.gamma);
  AREAL_CHECK(args.lam >= 0 && args.lam <= 1, op, ": expected lam in [0, 1], got ", args.lam);
  const Segments segments = segments_in(memory, args.cu_seqlens, args.sequences, args.tokens, op);
  return {.segments = segments,
          .rewards = static_cast<const Real*>(args.rewards),
          .values = static_cast<const Real*>(args.values),
          .terminal = args.terminal_rewards,
          .loss_mask = mask_in(memory, args.loss_mask, args.tokens, op),
          .gamma = args.gamma,
          .lam = args.lam,
          .advantages = static_cast<Real*>(args.advantages),
          .returns = real_array<Real>(args.returns, args.tokens, op, "returns")};
}

template <class Real>
advantages::GroupArgs<Real> make_group_scores(const areal_group_scores_args& args,
                                              const advantages::BatchStatistics* batch, const char* op) {
  const int64_t count = checked_count(args.sequences, op, "sequences");
  AREAL_CHECK(args.ddof == 0 || args.ddof == 1, op, ": expected ddof 0 or 1, got ", args.ddof);
  AREAL_CHECK(args.eps >= 0, op, ": expected eps >= 0, got ", args.eps);
  const advantages::GroupOptions options{
      .mean = checked_enum(args.mean_level, advantages::Level::kBatch, op, "mean_level"),
      .std = checked_enum(args.std_level, advantages::Level::kBatch, op, "std_level"),
      .leave_one_out = checked_flag(args.leave_one_out, op, "leave_one_out"),
      .leave_one_out_std = checked_flag(args.leave_one_out_std, op, "leave_one_out_std"),
      .length_weighted = checked_flag(args.length_weighted, op, "length_weighted"),
      .divide_by_mean = checked_flag(args.divide_by_mean, op, "divide_by_mean"),
      .ddof = static_cast<int32_t>(args.ddof),
      .eps = args.eps,
      .eps_in_root = checked_flag(args.eps_in_root, op, "eps_in_root"),
      .singleton = checked_enum(args.singleton_raw, advantages::Singleton::kRaw, op, "singleton_raw")};
  const bool by_length = options.length_weighted || args.mean_lengths != nullptr;
  AREAL_CHECK(!by_length || args.lengths != nullptr || count == 0, op,
              ": expected lengths with length_weighted or mean_lengths set, got NULL");
  return {.options = options,
          .count = count,
          .rewards = real_array<Real>(args.rewards, count, op, "rewards"),
          .lengths = args.lengths,
          .sorted_ids = required(args.sorted_ids, count, op, "sorted_ids"),
          .order = required(args.order, count, op, "order"),
          .batch = batch,
          .scores = required(args.scores, count, op, "scores"),
          .mean_lengths = args.mean_lengths,
          .has_signal = reinterpret_cast<bool*>(args.has_signal)};
}

template <class Real>
advantages::BestOfArgs<Real> make_best_of(const areal_best_of_scores_args& args, const char* op) {
  const int64_t count = checked_count(args.sequences, op, "sequences");
  AREAL_CHECK(args.k >= 1, op, ": expected k >= 1, got ", args.k);
  AREAL_CHECK(args.eps >= 0, op, ": expected eps >= 0, got ", args.eps);
  return {.options = {.k = args.k,
                      .divide_by_std = checked_flag(args.divide_by_std, op, "divide_by_std"),
                      .eps = args.eps,
                      .eps_in_root = checked_flag(args.eps_in_root, op, "eps_in_root"),
                      .singleton_raw = checked_flag(args.singleton_raw, op, "singleton_raw")},
          .count = count,
          .rewards = real_array<Real>(args.rewards, count, op, "rewards"),
          .sorted_ids = required(args.sorted_ids, count, op, "sorted_ids"),
          .order = required(args.order, count, op, "order"),
          .scores = required(args.scores, count, op, "scores")};
}

template <class Real>
advantages::SpreadArgs<Real> make_spread(const areal_spread_scores_args& args, Memory memory, const char* op) {
  AREAL_CHECK(args.beta == 0 || (args.logprobs != nullptr && args.ref_logprobs != nullptr), op,
              ": expected logprobs and ref_logprobs with beta = ", args.beta, ", got NULL");
  return {.segments = segments_in(memory, args.cu_seqlens, args.sequences, args.tokens, op),
          .scores = required(args.scores, args.sequences, op, "scores"),
          .divisors = args.divisors,
          .loss_mask = mask_in(memory, args.loss_mask, args.tokens, op),
          .logprobs = static_cast<const Real*>(args.logprobs),
          .ref_logprobs = static_cast<const Real*>(args.ref_logprobs),
          .beta = args.beta,
          .advantages = real_array<Real>(args.advantages, args.tokens, op, "advantages")};
}

// Of areal_token_rewards_args and areal_sequence_rewards_args, which share these fields.
template <class Real, class Args>
advantages::TokenRewards<Real> make_rewards(const Args& args, Memory memory, const char* op) {
  AREAL_CHECK((args.logprobs == nullptr) == (args.ref_logprobs == nullptr), op,
              ": expected logprobs and ref_logprobs or neither");
  return {.rewards = static_cast<const Real*>(args.rewards),
          .logprobs = static_cast<const Real*>(args.logprobs),
          .ref_logprobs = static_cast<const Real*>(args.ref_logprobs),
          .loss_mask = mask_in(memory, args.loss_mask, args.tokens, op),
          .beta = args.beta,
          .kl = checked_enum(args.kl, advantages::Kl::kK3, op, "kl")};
}

}  // namespace
}  // namespace areal::c_api

using namespace areal::c_api;

areal_status areal_gae_cpu(const areal_gae_args* args) {
  constexpr const char* op = "areal_gae_cpu";
  return guarded([&] {
    const auto given = read_struct(args, op, "args");
    with_real(given.dtype, op,
              [&]<class Real>(Real) { areal::advantages::gae_cpu(make_gae<Real>(given, Memory::kHost, op)); });
  });
}

areal_status areal_gae_cuda(const areal_gae_args* args, void* stream) {
  constexpr const char* op = "areal_gae_cuda";
  return guarded_cuda(
      [&] {
        const auto given = read_struct(args, op, "args");
        with_real(given.dtype, op, [&]<class Real>(Real) {
          areal::cuda::gae(make_gae<Real>(given, Memory::kDevice, op), given.tokens, stream);
        });
      },
      op);
}

areal_status areal_sort_groups_cpu(const int64_t* group_ids, int64_t sequences, int64_t* sorted_ids, int64_t* order) {
  constexpr const char* op = "areal_sort_groups_cpu";
  return guarded([&] {
    checked_count(sequences, op, "sequences");
    required(group_ids, sequences, op, "group_ids");
    required(sorted_ids, sequences, op, "sorted_ids");
    required(order, sequences, op, "order");
    std::iota(order, order + sequences, int64_t{0});
    std::stable_sort(order, order + sequences, [&](int64_t a, int64_t b) { return group_ids[a] < group_ids[b]; });
    std::transform(order, order + sequences, sorted_ids, [&](int64_t s) { return group_ids[s]; });
  });
}

int64_t areal_group_scores_scratch_bytes(void) { return sizeof(areal::advantages::BatchStatistics); }

areal_status areal_group_scores_cpu(const areal_group_scores_args* args) {
  constexpr const char* op = "areal_group_scores_cpu";
  return guarded([&] {
    const auto given = read_struct(args, op, "args");
    with_real(given.dtype, op, [&]<class Real>(Real) {
      const auto batch = areal::advantages::batch_statistics_cpu(make_group_scores<Real>(given, nullptr, op));
      areal::advantages::group_scores_cpu(make_group_scores<Real>(given, &batch, op));
    });
  });
}

areal_status areal_group_scores_cuda(const areal_group_scores_args* args, void* stream) {
  constexpr const char* op = "areal_group_scores_cuda";
  return guarded_cuda(
      [&] {
        const auto given = read_struct(args, op, "args");
        const int64_t bytes = areal_group_scores_scratch_bytes();
        AREAL_CHECK(given.scratch != nullptr && given.scratch_bytes >= bytes, op, ": expected scratch of ", bytes,
                    " bytes, got ", given.scratch == nullptr ? 0 : given.scratch_bytes);
        with_real(given.dtype, op, [&]<class Real>(Real) {
          auto* batch = static_cast<areal::advantages::BatchStatistics*>(given.scratch);
          const auto made = make_group_scores<Real>(given, batch, op);
          areal::cuda::batch_statistics(made, batch, stream);
          areal::cuda::group_scores(made, stream);
        });
      },
      op);
}

areal_status areal_spread_scores_cpu(const areal_spread_scores_args* args) {
  constexpr const char* op = "areal_spread_scores_cpu";
  return guarded([&] {
    const auto given = read_struct(args, op, "args");
    with_real(given.dtype, op, [&]<class Real>(Real) {
      areal::advantages::spread_scores_cpu(make_spread<Real>(given, Memory::kHost, op));
    });
  });
}

areal_status areal_spread_scores_cuda(const areal_spread_scores_args* args, void* stream) {
  constexpr const char* op = "areal_spread_scores_cuda";
  return guarded_cuda(
      [&] {
        const auto given = read_struct(args, op, "args");
        with_real(given.dtype, op, [&]<class Real>(Real) {
          areal::cuda::spread_scores(make_spread<Real>(given, Memory::kDevice, op), given.tokens, stream);
        });
      },
      op);
}

areal_status areal_sequence_rewards_cpu(const areal_sequence_rewards_args* args) {
  constexpr const char* op = "areal_sequence_rewards_cpu";
  return guarded([&] {
    const auto given = read_struct(args, op, "args");
    const areal::Segments segments = segments_in(Memory::kHost, given.cu_seqlens, given.sequences, given.tokens, op);
    double* sums = required(given.sums, given.sequences, op, "sums");
    with_real(given.dtype, op, [&]<class Real>(Real) {
      areal::advantages::sequence_rewards_cpu(make_rewards<Real>(given, Memory::kHost, op), segments, sums);
    });
  });
}

areal_status areal_sequence_rewards_cuda(const areal_sequence_rewards_args* args, void* stream) {
  constexpr const char* op = "areal_sequence_rewards_cuda";
  return guarded_cuda(
      [&] {
        const auto given = read_struct(args, op, "args");
        const areal::Segments segments =
            segments_in(Memory::kDevice, given.cu_seqlens, given.sequences, given.tokens, op);
        double* sums = required(given.sums, given.sequences, op, "sums");
        with_real(given.dtype, op, [&]<class Real>(Real) {
          areal::cuda::sequence_rewards(make_rewards<Real>(given, Memory::kDevice, op), segments, given.tokens, sums,
                                        stream);
        });
      },
      op);
}

areal_status areal_live_tokens_cpu(const areal_live_tokens_args* args) {
  constexpr const char* op = "areal_live_tokens_cpu";
  return guarded([&] {
    const auto given = read_struct(args, op, "args");
    const areal::Segments segments = segments_in(Memory::kHost, given.cu_seqlens, given.sequences, given.tokens, op);
    areal::advantages::live_tokens_cpu(segments, mask_in(Memory::kHost, given.loss_mask, given.tokens, op),
                                       required(given.counts, given.sequences, op, "counts"));
  });
}

areal_status areal_live_tokens_cuda(const areal_live_tokens_args* args, void* stream) {
  constexpr const char* op = "areal_live_tokens_cuda";
  return guarded_cuda(
      [&] {
        const auto given = read_struct(args, op, "args");
        const areal::Segments segments =
            segments_in(Memory::kDevice, given.cu_seqlens, given.sequences, given.tokens, op);
        areal::cuda::live_tokens(segments, mask_in(Memory::kDevice, given.loss_mask, given.tokens, op), given.tokens,
                                 required(given.counts, given.sequences, op, "counts"), stream);
      },
      op);
}

areal_status areal_token_rewards_cpu(const areal_token_rewards_args* args) {
  constexpr const char* op = "areal_token_rewards_cpu";
  return guarded([&] {
    const auto given = read_struct(args, op, "args");
    const int64_t tokens = checked_count(given.tokens, op, "tokens");
    with_real(given.dtype, op, [&]<class Real>(Real) {
      areal::advantages::token_rewards_cpu(make_rewards<Real>(given, Memory::kHost, op), tokens,
                                           real_array<Real>(given.out, tokens, op, "out"));
    });
  });
}

areal_status areal_token_rewards_cuda(const areal_token_rewards_args* args, void* stream) {
  constexpr const char* op = "areal_token_rewards_cuda";
  return guarded_cuda(
      [&] {
        const auto given = read_struct(args, op, "args");
        const int64_t tokens = checked_count(given.tokens, op, "tokens");
        with_real(given.dtype, op, [&]<class Real>(Real) {
          areal::cuda::token_rewards(make_rewards<Real>(given, Memory::kDevice, op), tokens,
                                     real_array<Real>(given.out, tokens, op, "out"), stream);
        });
      },
      op);
}

areal_status areal_best_of_scores_cpu(const areal_best_of_scores_args* args) {
  constexpr const char* op = "areal_best_of_scores_cpu";
  return guarded([&] {
    const auto given = read_struct(args, op, "args");
    with_real(given.dtype, op,
              [&]<class Real>(Real) { areal::advantages::best_of_scores_cpu(make_best_of<Real>(given, op)); });
  });
}

areal_status areal_best_of_scores_cuda(const areal_best_of_scores_args* args, void* stream) {
  constexpr const char* op = "areal_best_of_scores_cuda";
  return guarded_cuda(
      [&] {
        const auto given = read_struct(args, op, "args");
        with_real(given.dtype, op,
                  [&]<class Real>(Real) { areal::cuda::best_of_scores(make_best_of<Real>(given, op), stream); });
      },
      op);
}
