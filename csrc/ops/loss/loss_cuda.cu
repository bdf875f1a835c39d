// Launchers of loss_kernels.cuh.
#include <algorithm>

#include "cuda/launch.cuh"
#include "ops/loss/loss_kernels.cuh"

namespace areal::cuda {
namespace {

template <class Variant, class Real>
void launch_variant(const PolicyLossArgs<Real>& args, int64_t blocks, cudaStream_t stream) {
  if (args.sequences > 0) {
    const int64_t grid = std::min<int64_t>(args.sequences, int64_t{16} * multiprocessor_count());
    AREAL_LAUNCH((policy_loss_sequences_kernel<Variant, Real>), dim3(static_cast<unsigned>(grid)),
                 dim3(kSequenceThreads), 0, stream, args);
  }
  AREAL_LAUNCH((policy_loss_kernel<Variant, Real>), dim3(static_cast<unsigned>(blocks)), dim3(kLossThreads), 0, stream,
               args);
}

template <class Real>
void launch(const PolicyLossArgs<Real>& args, void* stream_handle) {
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  const int64_t blocks = loss::block_count(args.tokens);
  AREAL_CHECK(blocks < int64_t{1} << 31, "ppo_loss: expected fewer than ", loss::kBlockTokens << 31, " tokens, got ",
              args.tokens);
  if (blocks > 0) {
    loss::with_variant(args.params,
                       [&](auto variant) { launch_variant<decltype(variant), Real>(args, blocks, stream); });
  }
  AREAL_LAUNCH(policy_loss_finish_kernel<Real>, dim3(1), dim3(kFinishThreads), 0, stream, args, blocks);
}

}  // namespace

void policy_loss(const loss::PolicyLossArgs<float>& args, void* stream) { launch(args, stream); }
void policy_loss(const loss::PolicyLossArgs<double>& args, void* stream) { launch(args, stream); }

}  // namespace areal::cuda
