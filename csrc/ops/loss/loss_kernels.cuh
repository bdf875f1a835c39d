// Kernels of the policy loss: the values of every sequence where an option needs them, then blocks of kBlockTokens
// tokens, then one block that joins their statistics in order.
#pragma once

#include "cuda/bounded_segments.cuh"
#include "cuda/reduce.cuh"
#include "ops/loss/loss_sequence.h"

namespace areal::cuda {
namespace {

using loss::Accumulator;
using loss::LossConstants;
using loss::PolicyLossArgs;
using loss::ScalarLane;
using loss::SequenceSums;
using loss::SequenceTerms;
using loss::TokenInputs;
using loss::TokenLoss;

constexpr int kLossThreads = 256;
constexpr int kLossWarps = kLossThreads / kWarp;
constexpr int kSequenceThreads = 128;
constexpr int kFinishThreads = kWarp * loss::kStatCount;  // a warp per statistic
template <class Real>
inline constexpr int kLossUnroll = sizeof(Real) == 4 ? 4 : 2;  // tokens a thread has in flight

static_assert(loss::kBlockTokens % (kLossThreads * kLossUnroll<float>) == 0);
static_assert(kFinishThreads <= 1024);

// The inputs of token t, zeros unless live. Everything is loaded, live or not, so that no load waits for the mask.
template <class Real>
__device__ __forceinline__ TokenInputs<ScalarLane<Real>> load_token(const PolicyLossArgs<Real>& args, int64_t t) {
  TokenInputs<ScalarLane<Real>> x = {};
  if (t >= args.tokens) return x;
  const auto load = [&](const Real* p) { return p != nullptr ? __ldg(p + t) : Real(0); };
  const bool live = args.loss_mask[t], keep = args.keep_mask == nullptr || args.keep_mask[t];
  const Real logprob = load(args.logprobs), proximal = load(args.proximal_logprobs), advantage = load(args.advantages);
  const Real behavior = load(args.behavior_logprobs), reference = load(args.ref_logprobs), entropy = load(args.entropy);
  const Real teacher = load(args.teacher_logprobs);
  if (live) x = {logprob, proximal, advantage, behavior, reference, entropy, teacher, true, keep};
  return x;
}

template <class Real>
__device__ __forceinline__ int64_t token_age(const PolicyLossArgs<Real>& args, int64_t t, bool live) {
  if (args.versions == nullptr || !live) return 0;
  const int64_t version = __ldg(args.versions + t);
  return version >= 0 ? *args.current_version - version : 0;
}

// A block per sequence, in a grid of any size. (The 1 in the launch bounds keeps ptxas from spilling for occupancy.)
template <class Variant, class Real>
__global__ void __launch_bounds__(kSequenceThreads, 1) policy_loss_sequences_kernel(PolicyLossArgs<Real> args) {
  using Lane = ScalarLane<Real>;
  __shared__ SequenceSums<double> warps[kSequenceThreads / kWarp];
  const LossConstants<Lane> constants = loss::loss_constants<Lane>(args);
  const SequenceSums<double> empty = {};
  for (int64_t s = blockIdx.x; s < args.sequences; s += gridDim.x) {
    SequenceSums<Real> sums = {};
    const TokenRange range = sequence_range({args.cu_seqlens, args.sequences}, s, args.tokens);
    for (int64_t t = range.begin + threadIdx.x; t < range.end; t += kSequenceThreads) {
      const TokenInputs<Lane> x = load_token(args, t);
      if (x.live) loss::accumulate_sequence<Variant>(constants, x, sums);
    }
    const SequenceSums<double> wide = {double(sums.live), double(sums.log_ratio), double(sums.log_weight),
                                       double(sums.positive), double(sums.negative)};
    const auto add = [](const SequenceSums<double>& a, const SequenceSums<double>& b) {
      return SequenceSums<double>{a.live + b.live, a.log_ratio + b.log_ratio, a.log_weight + b.log_weight,
                                  a.positive + b.positive, a.negative + b.negative};
    };
    const SequenceSums<double> total = block_reduce<kSequenceThreads>(wide, add, empty, warps);
    if (threadIdx.x == 0) args.sequence_scratch[s] = loss::sequence_values<Variant>(args, total);
  }
}

// Every thread of the block contributes; thread i writes statistic i of the block.
template <class Real>
__device__ __forceinline__ void store_block_stats(const PolicyLossArgs<Real>& args, const Accumulator<Real>& acc) {
  __shared__ Real warps[loss::kStatCount][kLossWarps];
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
#pragma unroll
  for (int i = 0; i < loss::kSumCount; ++i) {
    const Real sum = warp_reduce(acc.sum[i], [](Real a, Real b) { return a + b; });
    if (lane == 0) warps[i][warp] = sum;
  }
#pragma unroll
  for (int i = 0; i < loss::kMaxCount; ++i) {
    const Real max = warp_reduce(acc.max[i], [](Real a, Real b) { return a > b ? a : b; });
    if (lane == 0) warps[loss::kSumCount + i][warp] = max;
  }
  __syncthreads();
  const int stat = static_cast<int>(threadIdx.x);
  if (stat >= loss::kStatCount) return;
  double total = loss::empty_stat(stat);
  for (int w = 0; w < kLossWarps; ++w) total = loss::join_stat(stat, total, static_cast<double>(warps[stat][w]));
  args.scratch[stat * int64_t{gridDim.x} + blockIdx.x] = total;
}

template <class Variant, class Real>
__global__ void __launch_bounds__(kLossThreads, 1) policy_loss_kernel(PolicyLossArgs<Real> args) {
  using Lane = ScalarLane<Real>;
  constexpr int kUnroll = kLossUnroll<Real>;
  __shared__ int64_t first_sequence, last_sequence;  // of the block
  const LossConstants<Lane> constants = loss::loss_constants<Lane>(args);
  Accumulator<Real> acc;
  loss::reset<Lane>(acc);
  const int64_t block_begin = blockIdx.x * loss::kBlockTokens, begin = block_begin + threadIdx.x;
  const bool has_sequences = args.sequences > 0;
  if (has_sequences) {
    if (threadIdx.x == 0) {
      first_sequence = loss::sequence_at(args.cu_seqlens, 0, args.sequences - 1, block_begin);
      last_sequence =
          loss::sequence_at(args.cu_seqlens, first_sequence, args.sequences - 1, block_begin + loss::kBlockTokens - 1);
    }
    __syncthreads();
  }
  for (int64_t round = 0; round < loss::kBlockTokens; round += kLossThreads * kUnroll) {
    TokenInputs<Lane> x[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) x[u] = load_token(args, begin + round + u * kLossThreads);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t t = begin + round + u * kLossThreads;
      if (t >= args.tokens) continue;
      SequenceTerms<Lane> terms = loss::sequence_terms<Lane>(loss::no_sequence());
      if (has_sequences) {
        const int64_t s = loss::sequence_at(args.cu_seqlens, first_sequence, last_sequence, t);
        terms = loss::sequence_terms<Lane>(args.sequence_scratch[s]);
        if (args.cu_seqlens[s] == t && terms.token_weight > 0) acc.add(loss::kLiveSequences, Real(1));
      }
      const TokenLoss<Real> token = loss::token_loss<Variant>(constants, x[u], terms, acc);
      const Real age = static_cast<Real>(token_age(args, t, x[u].live));
      acc.add(loss::kStaleness, age);
      loss::raise_max<Lane>(acc, loss::kStalenessMax, age);
      args.grad_logprobs[t] = token.grad_logprob;
      if (args.grad_entropy != nullptr) args.grad_entropy[t] = token.grad_entropy;
    }
  }
  store_block_stats(args, acc);
}

// One block. Warp i joins statistic i of all blocks: lanes stride over the blocks, then join in a fixed tree.
template <class Real>
__global__ void __launch_bounds__(kFinishThreads) policy_loss_finish_kernel(PolicyLossArgs<Real> args, int64_t blocks) {
  __shared__ double totals[loss::kStatCount];
  const int lane = static_cast<int>(threadIdx.x) % kWarp, stat = static_cast<int>(threadIdx.x) / kWarp;
  double total = loss::empty_stat(stat);
  for (int64_t b = lane; b < blocks; b += kWarp) total = loss::join_stat(stat, total, args.scratch[stat * blocks + b]);
  total = warp_reduce(total, [stat](double a, double b) { return loss::join_stat(stat, a, b); });
  if (lane == 0) totals[stat] = total;
  __syncthreads();
  if (threadIdx.x == 0) loss::finish(args, totals);
}

}  // namespace
}  // namespace areal::cuda
