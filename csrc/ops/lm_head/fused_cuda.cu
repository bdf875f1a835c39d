// Shape and launch of fused_kernels.cuh.
#include <algorithm>

#include "cuda/launch.cuh"
#include "ops/lm_head/fused_kernels.cuh"

namespace areal {
namespace {

// A slice that keeps a multiprocessor's loads in flight; a larger cluster only adds blocks that wait for each other.
constexpr int64_t kSliceGoalBytes = 40 * 1024;

struct Choice {
  cuda::ClusterShape cluster;
  cuda::FusedShape shape;
};

// The smallest cluster whose slices meet the goal, and as many stages as fit; false when that is too few.
bool choose(const LogprobInput<float>& input, Choice* choice) {
  const int64_t vectors = input.vocab * static_cast<int64_t>(dtype_size_bytes(input.dtype)) / 16;
  unsigned blocks = 1;
  const auto slice_bytes = [&] { return std::max<int64_t>((vectors + blocks - 1) / blocks, 1) * 16; };
  while (blocks < cuda::kMaxClusterBlocks && slice_bytes() > kSliceGoalBytes) blocks *= 2;
  const int64_t stage_bytes = slice_bytes() + static_cast<int64_t>(sizeof(cuda::Stage<float>));
  const int64_t stages = std::min<int64_t>(cuda::max_dynamic_shared_bytes() / stage_bytes, cuda::kMaxStages);
  if (stages < cuda::kMinStages) return false;
  choice->cluster = {blocks, cuda::kFusedThreads, stages * stage_bytes};
  choice->shape = {static_cast<int>(stages), static_cast<int>(std::min<int64_t>(stages - 2, cuda::kMaxLag)),
                   static_cast<int>(slice_bytes())};
  return true;
}

bool fits(const FusedLossArgs& args, Choice* choice) {
  return args.input.dtype != DType::kFloat64 && !loss::needs_sequences(args.loss.params) && cuda::has_clusters() &&
         choose(args.input, choice);
}

}  // namespace

bool fused_loss_fits(const FusedLossArgs& args) {
  Choice choice;
  return fits(args, &choice);
}

bool fused_loss_cuda(const FusedLossArgs& args, void* stream) {
  const LogprobInput<float>& input = args.input;
  Choice choice;
  if (!fits(args, &choice)) return false;
  if (input.rows == 0) return true;
  AREAL_CHECK(input.row_stride >= input.vocab || input.rows == 1,
              "ppo_loss_from_logits: expected rows that do not overlap, got a stride of ", input.row_stride);
  cuda::dispatch_device_dtype(input.dtype, "ppo_loss_from_logits", [&](auto tag) {
    using T = typename decltype(tag)::type;
    const int64_t at_once = std::max(cuda::max_active_clusters(cuda::fused_loss_kernel<T>, choice.cluster), 1);
    AREAL_LAUNCH_CLUSTERS(cuda::fused_loss_kernel<T>, choice.cluster,
                          static_cast<unsigned>(std::min(input.rows, at_once)), static_cast<cudaStream_t>(stream), args,
                          choice.shape);
  });
  return true;
}

}  // namespace areal
