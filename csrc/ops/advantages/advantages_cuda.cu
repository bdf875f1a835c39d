// Launchers of the kernels of this folder.
#include <algorithm>

#include "cuda/launch.cuh"
#include "ops/advantages/best_of_kernels.cuh"
#include "ops/advantages/gae_kernels.cuh"
#include "ops/advantages/group_kernels.cuh"
#include "ops/advantages/moments_kernels.cuh"
#include "ops/advantages/token_kernels.cuh"

namespace areal::cuda {
namespace {

// At least one block, which zeroes tokens of no sequence. Blocks loop over what exceeds the bound; a multiprocessor
// holds at most 32.
dim3 grid_for(int64_t blocks) {
  return dim3(static_cast<unsigned>(std::clamp<int64_t>(blocks, 1, 64 * int64_t{multiprocessor_count()})));
}

// A thread per element.
dim3 grid_over(int64_t count, int threads) { return grid_for((count + threads - 1) / threads); }

template <class Real>
void launch_gae(const GaeArgs<Real>& args, int64_t tokens, void* stream_handle) {
  if (tokens == 0) return;
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  const dim3 grid = grid_for(args.segments.count);
  AREAL_LAUNCH((gae_kernel<1, Real>), grid, dim3(kWarp), 0, stream, args, tokens);
  if (tokens <= kShortTokens) return;
  AREAL_LAUNCH((gae_kernel<kLongWarps, Real>), grid, dim3(kLongWarps * kWarp), 0, stream, args, tokens);
}

template <class Real>
void launch_group_scores(const GroupArgs<Real>& args, void* stream) {
  if (args.count == 0) return;
  const int64_t blocks = (args.count + kGroupsPerBlock - 1) / kGroupsPerBlock;
  AREAL_LAUNCH(group_scores_kernel<Real>, dim3(static_cast<unsigned>(blocks)), dim3(kGroupThreads), 0,
               static_cast<cudaStream_t>(stream), args);
}

template <class Real>
void launch_spread(const SpreadArgs<Real>& args, int64_t tokens, void* stream) {
  if (tokens == 0) return;
  AREAL_LAUNCH(spread_scores_kernel<Real>, grid_for(args.segments.count), dim3(kTokenThreads), 0,
               static_cast<cudaStream_t>(stream), args, tokens);
}

}  // namespace

void gae(const GaeArgs<float>& args, int64_t tokens, void* stream) { launch_gae(args, tokens, stream); }
void gae(const GaeArgs<double>& args, int64_t tokens, void* stream) { launch_gae(args, tokens, stream); }
void group_scores(const GroupArgs<float>& args, void* stream) { launch_group_scores(args, stream); }
void group_scores(const GroupArgs<double>& args, void* stream) { launch_group_scores(args, stream); }
void spread_scores(const SpreadArgs<float>& args, int64_t tokens, void* stream) { launch_spread(args, tokens, stream); }
void spread_scores(const SpreadArgs<double>& args, int64_t tokens, void* stream) {
  launch_spread(args, tokens, stream);
}

template <class Real>
void batch_statistics(const GroupArgs<Real>& args, BatchStatistics* out, void* stream) {
  AREAL_LAUNCH(batch_statistics_kernel<Real>, dim3(1), dim3(kWarp), 0, static_cast<cudaStream_t>(stream), args, out);
}

template <class Real>
void best_of_scores(const BestOfArgs<Real>& args, void* stream) {
  if (args.count == 0) return;
  const int64_t blocks = (args.count + kBestOfThreads - 1) / kBestOfThreads;
  AREAL_LAUNCH(best_of_scores_kernel<Real>, dim3(static_cast<unsigned>(blocks)), dim3(kBestOfThreads), 0,
               static_cast<cudaStream_t>(stream), args);
}

template <class Real>
void token_rewards(const TokenRewards<Real>& rewards, int64_t tokens, Real* out, void* stream) {
  if (tokens == 0) return;
  AREAL_LAUNCH(token_rewards_kernel<Real>, grid_over(tokens, kTokenThreads), dim3(kTokenThreads), 0,
               static_cast<cudaStream_t>(stream), rewards, tokens, out);
}

template <class Real>
void sequence_rewards(const TokenRewards<Real>& rewards, const Segments& segments, int64_t tokens, double* sums,
                      void* stream) {
  if (segments.count == 0) return;
  AREAL_LAUNCH(sequence_rewards_kernel<Real>, grid_for(segments.count), dim3(kTokenThreads), 0,
               static_cast<cudaStream_t>(stream), rewards, segments, tokens, sums);
}

void live_tokens(const Segments& segments, const bool* loss_mask, int64_t tokens, double* counts, void* stream) {
  if (segments.count == 0) return;
  AREAL_LAUNCH(live_tokens_kernel, grid_for(segments.count), dim3(kTokenThreads), 0, static_cast<cudaStream_t>(stream),
               segments, loss_mask, tokens, counts);
}

template <class Real>
void ranges(const MomentArgs<Real>& args, Range* parts, void* stream) {
  AREAL_LAUNCH(ranges_kernel<Real>, dim3(advantages::kParts), dim3(kMomentThreads), 0,
               static_cast<cudaStream_t>(stream), args, parts);
}

template <class Real>
void sums(const MomentArgs<Real>& args, const Range* range, const double* mean, ExactSum* parts, void* stream) {
  AREAL_LAUNCH(moment_sums_kernel<Real>, dim3(advantages::kParts), dim3(kMomentThreads), 0,
               static_cast<cudaStream_t>(stream), args, range, mean, parts);
}

template <class Real>
void normalize(const MomentArgs<Real>& args, const double* mean, const double* scale, Real* out, void* stream) {
  if (args.count == 0) return;
  AREAL_LAUNCH(normalize_kernel<Real>, grid_over(args.count, kMomentThreads), dim3(kMomentThreads), 0,
               static_cast<cudaStream_t>(stream), args, mean, scale, out);
}

template void best_of_scores(const BestOfArgs<float>&, void*);
template void best_of_scores(const BestOfArgs<double>&, void*);
template void batch_statistics(const GroupArgs<float>&, BatchStatistics*, void*);
template void batch_statistics(const GroupArgs<double>&, BatchStatistics*, void*);
template void token_rewards(const TokenRewards<float>&, int64_t, float*, void*);
template void token_rewards(const TokenRewards<double>&, int64_t, double*, void*);
template void sequence_rewards(const TokenRewards<float>&, const Segments&, int64_t, double*, void*);
template void sequence_rewards(const TokenRewards<double>&, const Segments&, int64_t, double*, void*);
template void ranges(const MomentArgs<float>&, Range*, void*);
template void ranges(const MomentArgs<double>&, Range*, void*);
template void sums(const MomentArgs<float>&, const Range*, const double*, ExactSum*, void*);
template void sums(const MomentArgs<double>&, const Range*, const double*, ExactSum*, void*);
template void normalize(const MomentArgs<float>&, const double*, const double*, float*, void*);
template void normalize(const MomentArgs<double>&, const double*, const double*, double*, void*);

}  // namespace areal::cuda
