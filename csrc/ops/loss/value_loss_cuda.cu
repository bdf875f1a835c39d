// Launchers of value_loss_kernels.cuh.
#include "cuda/launch.cuh"
#include "ops/loss/value_loss_kernels.cuh"

namespace areal::cuda {
namespace {

template <class Real>
void launch(const ValueLossArgs<Real>& args, void* stream_handle) {
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  const int64_t blocks = loss::value_block_count(args.tokens);
  AREAL_CHECK(blocks < int64_t{1} << 31, "value_loss: expected fewer than ", loss::kValueBlockTokens << 31,
              " tokens, got ", args.tokens);
  if (blocks > 0) {
    AREAL_LAUNCH(value_loss_kernel<Real>, dim3(static_cast<unsigned>(blocks)), dim3(kValueThreads), 0, stream, args);
  }
  AREAL_LAUNCH(value_loss_finish_kernel<Real>, dim3(1), dim3(kValueFinishThreads), 0, stream, args, blocks);
}

}  // namespace

void value_loss(const loss::ValueLossArgs<float>& args, void* stream) { launch(args, stream); }
void value_loss(const loss::ValueLossArgs<double>& args, void* stream) { launch(args, stream); }

}  // namespace areal::cuda
