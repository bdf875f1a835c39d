// Launcher of scale_kernels.cuh.
#include <algorithm>

#include "cuda/launch.cuh"
#include "ops/lm_head/scale_kernels.cuh"

namespace areal {

void scale_cuda(const ScaleArgs& args, void* stream) {
  if (args.rows == 0 || args.columns == 0) return;
  constexpr int64_t kBlocksPerMultiprocessor = 8;
  const int64_t blocks = std::min<int64_t>(args.rows, cuda::multiprocessor_count() * kBlocksPerMultiprocessor);
  cuda::dispatch_device_dtype(args.dtype, "scale", [&](auto tag) {
    AREAL_LAUNCH(cuda::scale_kernel<typename decltype(tag)::type>, dim3(static_cast<unsigned>(blocks)),
                 dim3(cuda::kScaleThreads), 0, static_cast<cudaStream_t>(stream), args);
  });
}

}  // namespace areal
