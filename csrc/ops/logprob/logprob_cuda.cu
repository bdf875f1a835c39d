// Grid choice and launches.
#include <algorithm>

#include "cuda/launch.cuh"
#include "ops/logprob/logprob_kernels.cuh"

namespace areal {
namespace {

constexpr const char* kOp = "logprob_from_logits";
constexpr int64_t kMaxSplits = 64;
constexpr int64_t kMaxGridY = 65535;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Blocks that share a row: 1 where the rows alone fill the device; otherwise enough for four blocks a multiprocessor,
// as long as each has one full round of loads.
int64_t split_count(const LogprobInput<float>& input) {
  const int64_t multiprocessors = cuda::multiprocessor_count();
  if (input.rows == 0 || input.rows >= 2 * multiprocessors) return 1;
  const int64_t vectors = ceil_div(input.vocab * static_cast<int64_t>(dtype_size_bytes(input.dtype)), 16);
  const int64_t rounds = vectors / (cuda::kThreads * cuda::kUnroll);
  return std::clamp<int64_t>(std::min(ceil_div(4 * multiprocessors, input.rows), rounds), 1, kMaxSplits);
}

// Whether logits and gradient are equally far from a 16-byte boundary in every row.
bool same_alignment(const LogprobInput<float>& input, const LogprobGradient<float>& gradient) {
  const int64_t bytes = static_cast<int64_t>(dtype_size_bytes(input.dtype));
  const auto from = reinterpret_cast<intptr_t>(input.logits), to = reinterpret_cast<intptr_t>(gradient.grad_logits);
  return (to - from) % 16 == 0 && (input.rows <= 1 || (gradient.grad_row_stride - input.row_stride) * bytes % 16 == 0);
}

template <class T, class Sink>
void launch_forward(const LogprobInput<float>& input, int64_t vocab_total, const Sink& sink,
                    const LogprobCudaScratch& scratch, cudaStream_t stream) {
  if (input.rows == 0) return;
  const int64_t splits = split_count(input);
  if (splits == 1) {
    const int64_t blocks = std::min<int64_t>(input.rows, 32 * int64_t{cuda::multiprocessor_count()});
    AREAL_LAUNCH((cuda::logprob_forward_kernel<T, Sink>), dim3(static_cast<unsigned>(blocks)), dim3(cuda::kThreads), 0,
                 stream, input, vocab_total, sink, scratch.bad_row);
    return;
  }
  auto* parts = static_cast<logprob::Partial<float>*>(scratch.workspace);
  auto* arrivals = reinterpret_cast<unsigned*>(parts + input.rows * splits);
  AREAL_CUDA_CHECK(cudaMemsetAsync(arrivals, 0, static_cast<size_t>(input.rows) * sizeof(unsigned), stream));
  const dim3 grid(static_cast<unsigned>(splits), static_cast<unsigned>(input.rows));
  AREAL_LAUNCH((cuda::logprob_forward_split_kernel<T, Sink>), grid, dim3(cuda::kThreads), 0, stream, input, vocab_total,
               sink, parts, arrivals, scratch.bad_row);
}

template <class T, int kLength>
void launch_backward(const LogprobInput<float>& input, const LogprobGradient<float>& gradient, cudaStream_t stream) {
  const int64_t tiles = std::max<int64_t>(1, ceil_div(input.vocab, int64_t{cuda::kThreads * cuda::kUnroll} * kLength));
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(std::min(input.rows, kMaxGridY)));
  AREAL_LAUNCH((cuda::logprob_backward_kernel<T, kLength>), grid, dim3(cuda::kThreads), 0, stream, input, gradient);
}

}  // namespace

int64_t logprob_workspace_bytes(const LogprobInput<float>& input) {
  const int64_t splits = split_count(input);
  if (splits == 1) return 0;
  return input.rows * (splits * static_cast<int64_t>(sizeof(logprob::Partial<float>)) + int64_t{sizeof(unsigned)});
}

void logprob_forward_cuda(const LogprobInput<float>& input, const LogprobOutput<float>& output,
                          const LogprobCudaScratch& scratch, void* stream) {
  cuda::dispatch_device_dtype(input.dtype, kOp, [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch_forward<T>(input, input.vocab, cuda::OutputSink<T>{output}, scratch, static_cast<cudaStream_t>(stream));
  });
}

void logprob_partial_cuda(const LogprobInput<float>& input, int64_t vocab_total, LogprobPart<float>* parts,
                          const LogprobCudaScratch& scratch, void* stream) {
  cuda::dispatch_device_dtype(input.dtype, kOp, [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch_forward<T>(input, vocab_total, cuda::PartSink<T>{parts}, scratch, static_cast<cudaStream_t>(stream));
  });
}

void logprob_merge_cuda(const LogprobInput<float>& input, const LogprobPart<float>* parts, int64_t ranks,
                        const LogprobOutput<float>& output, void* stream) {
  if (input.rows == 0) return;
  const dim3 grid(static_cast<unsigned>(ceil_div(input.rows, cuda::kThreads)));
  AREAL_LAUNCH(cuda::logprob_merge_kernel, grid, dim3(cuda::kThreads), 0, static_cast<cudaStream_t>(stream), input,
               parts, ranks, output);
}

void logprob_backward_cuda(const LogprobInput<float>& input, const LogprobGradient<float>& gradient,
                           void* stream_handle) {
  if (input.rows == 0 || input.vocab == 0) return;
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  cuda::dispatch_device_dtype(input.dtype, kOp, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (same_alignment(input, gradient)) {
      launch_backward<T, cuda::kVectorLength<T>>(input, gradient, stream);
    } else {
      launch_backward<T, 1>(input, gradient, stream);
    }
  });
}

}  // namespace areal
