// Launchers of loss_kernels.cuh.
#include "cuda/launch.cuh"
#include "ops/loss/loss_kernels.cuh"

namespace areal::cuda {
namespace {

template <class Real>
void launch(const PolicyLossArgs<Real>& args, void* stream_handle) {
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  const int64_t blocks = loss::block_count(args.tokens);
  AREAL_CHECK(blocks < int64_t{1} << 31, "ppo_loss: expected fewer than ", loss::kBlockTokens << 31, " tokens, got ",
              args.tokens);
  if (blocks > 0) {
    AREAL_LAUNCH(policy_loss_kernel<Real>, dim3(static_cast<unsigned>(blocks)), dim3(kLossThreads), 0, stream, args);
  }
  AREAL_LAUNCH(policy_loss_finish_kernel<Real>, dim3(1), dim3(kFinishThreads), 0, stream, args, blocks);
}

}  // namespace

void policy_loss(const loss::PolicyLossArgs<float>& args, void* stream) { launch(args, stream); }
void policy_loss(const loss::PolicyLossArgs<double>& args, void* stream) { launch(args, stream); }

}  // namespace areal::cuda
