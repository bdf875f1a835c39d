// Launchers of gae_kernels.cuh, group_kernels.cuh and spread_kernels.cuh.
#include <algorithm>

#include "cuda/launch.cuh"
#include "ops/advantages/gae_kernels.cuh"
#include "ops/advantages/group_kernels.cuh"
#include "ops/advantages/spread_kernels.cuh"

namespace areal::cuda {
namespace {

// At least one block, which zeroes tokens of no sequence. Blocks loop over what exceeds the bound; a multiprocessor
// holds at most 32.
dim3 grid_for(int64_t blocks) {
  return dim3(static_cast<unsigned>(std::clamp<int64_t>(blocks, 1, 64 * int64_t{multiprocessor_count()})));
}

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
void launch_group_scores(const GroupArgs<Real>& args, void* batch_scratch, void* stream_handle) {
  if (args.count == 0) return;
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  const bool uses_batch =
      args.options.mean == advantages::Level::kBatch || args.options.std == advantages::Level::kBatch;
  auto* batch = uses_batch ? static_cast<SetStatistics*>(batch_scratch) : nullptr;
  if (uses_batch) AREAL_LAUNCH(batch_statistics_kernel<Real>, dim3(1), dim3(kWarp), 0, stream, args, batch);
  const int64_t blocks = (args.count + kGroupsPerBlock - 1) / kGroupsPerBlock;
  AREAL_LAUNCH(group_scores_kernel<Real>, dim3(static_cast<unsigned>(blocks)), dim3(kGroupThreads), 0, stream, args,
               batch);
}

template <class Real>
void launch_spread(const SpreadArgs<Real>& args, int64_t tokens, void* stream) {
  if (tokens == 0) return;
  AREAL_LAUNCH(spread_scores_kernel<Real>, grid_for(args.tokens.segments.count), dim3(kSpreadThreads), 0,
               static_cast<cudaStream_t>(stream), args, tokens);
}

template <class Real>
void launch_sums(const LogRatioSumArgs<Real>& args, int64_t tokens, void* stream) {
  if (args.tokens.segments.count == 0) return;
  AREAL_LAUNCH(log_ratio_sums_kernel<Real>, grid_for(args.tokens.segments.count), dim3(kSpreadThreads), 0,
               static_cast<cudaStream_t>(stream), args, tokens);
}

}  // namespace

void gae(const GaeArgs<float>& args, int64_t tokens, void* stream) { launch_gae(args, tokens, stream); }
void gae(const GaeArgs<double>& args, int64_t tokens, void* stream) { launch_gae(args, tokens, stream); }
void group_scores(const GroupArgs<float>& args, void* batch_scratch, void* stream) {
  launch_group_scores(args, batch_scratch, stream);
}
void group_scores(const GroupArgs<double>& args, void* batch_scratch, void* stream) {
  launch_group_scores(args, batch_scratch, stream);
}
void spread_scores(const SpreadArgs<float>& args, int64_t tokens, void* stream) { launch_spread(args, tokens, stream); }
void spread_scores(const SpreadArgs<double>& args, int64_t tokens, void* stream) {
  launch_spread(args, tokens, stream);
}
void log_ratio_sums(const LogRatioSumArgs<float>& args, int64_t tokens, void* stream) {
  launch_sums(args, tokens, stream);
}
void log_ratio_sums(const LogRatioSumArgs<double>& args, int64_t tokens, void* stream) {
  launch_sums(args, tokens, stream);
}

}  // namespace areal::cuda
