// Schema, argument checks and registration. The public function, the fake kernels and the autograd formula are in
// areal_core/ops/logprob.py.
#include <limits>
#include <tuple>

#include "base/fresh_memory.h"
#include "bind/torch_tensor.h"
#include "ops/logprob/logprob.h"

namespace areal {
namespace {

using bind::empty;
using bind::ScalarType;
using bind::Tensor;
using bind::vector_data;
using OptionalTensor = std::optional<Tensor>;
using FiveTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

constexpr const char* kOp = "logprob_from_logits";

template <class Real>
LogprobInput<Real> make_input(const Tensor& logits, const Tensor& labels, const OptionalTensor& temperatures,
                              double temperature, const OptionalTensor& loss_mask, int64_t ignore_index,
                              int64_t vocab_start) {
  AREAL_CHECK(logits.dim() == 2, kOp, ": expected logits of shape [T, V], got ", logits.dim(), "-D");
  AREAL_CHECK(logits.stride(1) == 1 || logits.size(1) <= 1, kOp, ": expected logits.stride(-1) = 1, got ",
              logits.stride(1));
  AREAL_CHECK(temperature >= std::numeric_limits<float>::min() && temperature <= std::numeric_limits<float>::max(), kOp,
              ": expected temperature > 0 and finite, got ", temperature);
  const int64_t rows = logits.size(0);
  LogprobInput<Real> input;
  input.logits = logits.const_data_ptr();
  input.dtype = bind::stream_dtype(logits, kOp, "logits");
  input.row_stride = logits.stride(0);
  input.rows = rows;
  input.vocab = logits.size(1);
  input.vocab_start = vocab_start;
  input.labels = vector_data<const int64_t>(labels, rows, logits, kOp, "labels");
  input.temperatures = vector_data<Real>(temperatures, rows, logits, kOp, "temperature");
  input.temperature = temperature;
  input.loss_mask = vector_data<bool>(loss_mask, rows, logits, kOp, "loss_mask");
  input.ignore_index = ignore_index;
  return input;
}

template <class Real>
LogprobGradient<Real> make_gradient(const LogprobInput<Real>& input, const Tensor& logits,
                                    const OptionalTensor& grad_logprobs, const OptionalTensor& grad_entropy,
                                    const OptionalTensor& grad_lse, const Tensor& logprobs, const Tensor& entropy,
                                    const Tensor& row_max, const Tensor& log_sum, const Tensor& grad_logits) {
  LogprobGradient<Real> gradient;
  gradient.grad_logprobs = vector_data<Real>(grad_logprobs, input.rows, logits, kOp, "grad_logprobs");
  gradient.grad_entropy = vector_data<Real>(grad_entropy, input.rows, logits, kOp, "grad_entropy");
  gradient.grad_lse = vector_data<Real>(grad_lse, input.rows, logits, kOp, "grad_lse");
  gradient.logprobs = vector_data<const Real>(logprobs, input.rows, logits, kOp, "logprobs");
  gradient.entropy = vector_data<const Real>(entropy, input.rows, logits, kOp, "entropy");
  gradient.row_max = vector_data<const Real>(row_max, input.rows, logits, kOp, "row_max");
  gradient.log_sum = vector_data<const Real>(log_sum, input.rows, logits, kOp, "log_sum");
  gradient.grad_logits = grad_logits.mutable_data_ptr();
  gradient.grad_row_stride = grad_logits.stride(0);
  gradient.fresh_memory = gradient.grad_logits != input.logits &&
                          static_cast<size_t>(grad_logits.numel()) * dtype_size_bytes(input.dtype) > kMappedBytes;
  AREAL_CHECK(input.rows <= 1 || gradient.grad_row_stride >= input.vocab, kOp,
              ": expected logits whose rows do not overlap (stride(0) >= ", input.vocab,
              ") when inplace_backward = True, got stride(0) = ", gradient.grad_row_stride);
  return gradient;
}

// Calls fn(Real{}) with the type of the per-row arrays.
template <class Fn>
auto with_real(const Tensor& logits, const Fn& fn) {
  return bind::stream_dtype(logits, kOp, "logits") == DType::kFloat64 ? fn(double{}) : fn(float{});
}

struct Cpu {
  template <class Real>
  static void forward(const Tensor&, const LogprobInput<Real>& input, const LogprobOutput<Real>& output) {
    logprob_forward_cpu(input, output);
  }
  template <class Real>
  static void backward(const Tensor&, const LogprobInput<Real>& input, const LogprobGradient<Real>& gradient) {
    logprob_backward_cpu(input, gradient);
  }
  template <class Real>
  static void partial(const Tensor&, const LogprobInput<Real>& input, int64_t vocab_total, LogprobPart<Real>* parts) {
    logprob_partial_cpu(input, vocab_total, parts);
  }
  template <class Real>
  static void merge(const Tensor&, const LogprobInput<Real>& input, const LogprobPart<Real>* parts, int64_t ranks,
                    const LogprobOutput<Real>& output) {
    logprob_merge_cpu(input, parts, ranks, output);
  }
};

#if defined(AREAL_WITH_CUDA)
// One int64 of pinned host memory, which kernels of any device write when a live row's label or temperature is out of
// range (logprob.h). Never freed: kernels may outlive the module's destructors.
volatile int64_t* bad_row_flag() {
  static int64_t* const flag = [] {
    const int64_t size = 1, stride = 1;
    AtenTensorHandle handle = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided_pinned(1, &size, &stride, aoti_torch_dtype_int64(),
                                                           aoti_torch_device_type_cpu(), 0, &handle));
    auto* data = static_cast<int64_t*>((new Tensor(handle))->mutable_data_ptr());
    *data = 0;
    return data;
  }();
  return flag;
}

// Reports what an earlier call's kernel found; there is no waiting for this call's.
void check_earlier_rows() {
  const int64_t row = *bad_row_flag();
  if (row == 0) return;
  *bad_row_flag() = 0;
  throw Error(format_message(kOp, ": expected labels in [0, V) and temperature > 0, got another value in row ", row - 1,
                             " of an earlier call (its outputs are NaN)"));
}

// Calls launch(scratch, stream) on the logits' device.
template <class Launch>
void launch_reading(const Tensor& logits, const LogprobInput<float>& input, const Launch& launch) {
  check_earlier_rows();
  const torch::stable::accelerator::DeviceGuard guard(logits.get_device_index());
  const Tensor workspace = empty({logprob_workspace_bytes(input)}, ScalarType::Byte, logits);
  launch(LogprobCudaScratch{workspace.mutable_data_ptr(), const_cast<int64_t*>(bad_row_flag())},
         bind::current_cuda_stream(logits.get_device_index()));
}

struct Cuda {
  static void forward(const Tensor& logits, const LogprobInput<float>& input, const LogprobOutput<float>& output) {
    launch_reading(logits, input, [&](const LogprobCudaScratch& scratch, void* stream) {
      logprob_forward_cuda(input, output, scratch, stream);
    });
  }
  static void partial(const Tensor& logits, const LogprobInput<float>& input, int64_t vocab_total,
                      LogprobPart<float>* parts) {
    launch_reading(logits, input, [&](const LogprobCudaScratch& scratch, void* stream) {
      logprob_partial_cuda(input, vocab_total, parts, scratch, stream);
    });
  }
  static void merge(const Tensor& logits, const LogprobInput<float>& input, const LogprobPart<float>* parts,
                    int64_t ranks, const LogprobOutput<float>& output) {
    const torch::stable::accelerator::DeviceGuard guard(logits.get_device_index());
    logprob_merge_cuda(input, parts, ranks, output, bind::current_cuda_stream(logits.get_device_index()));
  }
  static void backward(const Tensor& logits, const LogprobInput<float>& input, const LogprobGradient<float>& gradient) {
    const torch::stable::accelerator::DeviceGuard guard(logits.get_device_index());
    logprob_backward_cuda(input, gradient, bind::current_cuda_stream(logits.get_device_index()));
  }
  template <class... Args>
  static void forward(const Tensor&, const LogprobInput<double>&, const Args&...) {
    refuse_float64();
  }
  template <class... Args>
  static void partial(const Tensor&, const LogprobInput<double>&, const Args&...) {
    refuse_float64();
  }
  template <class... Args>
  static void merge(const Tensor&, const LogprobInput<double>&, const Args&...) {
    refuse_float64();
  }
  template <class... Args>
  static void backward(const Tensor&, const LogprobInput<double>&, const Args&...) {
    refuse_float64();
  }
  [[noreturn]] static void refuse_float64() {
    throw Error(format_message(kOp, ": expected logits dtype in {float32, bfloat16, float16} on CUDA, got float64"));
  }
};
#endif

template <class Real>
FiveTensors new_outputs(int64_t rows, const Tensor& logits) {
  const auto make = [&] { return empty({rows}, bind::kScalarType<Real>, logits); };
  return {make(), make(), make(), make(), make()};
}

template <class Real>
LogprobOutput<Real> output_data(const FiveTensors& out) {
  const auto data = [](const Tensor& tensor) { return static_cast<Real*>(tensor.mutable_data_ptr()); };
  return {data(std::get<0>(out)), data(std::get<1>(out)), data(std::get<2>(out)), data(std::get<3>(out)),
          data(std::get<4>(out))};
}

// inplace_backward is read by the autograd formula alone.
template <class Device>
FiveTensors forward(const Tensor& logits, const Tensor& labels, const OptionalTensor& temperatures, double temperature,
                    const OptionalTensor& loss_mask, int64_t ignore_index, bool /*inplace_backward*/) {
  return with_real(logits, [&]<class Real>(Real) {
    const auto input = make_input<Real>(logits, labels, temperatures, temperature, loss_mask, ignore_index, 0);
    FiveTensors out = new_outputs<Real>(input.rows, logits);
    Device::forward(logits, input, output_data<Real>(out));
    return out;
  });
}

// [T, 4], the fields of LogprobPart.
template <class Device>
Tensor partial(const Tensor& logits, const Tensor& labels, const OptionalTensor& temperatures, double temperature,
               const OptionalTensor& loss_mask, int64_t ignore_index, int64_t vocab_start, int64_t vocab_total) {
  return with_real(logits, [&]<class Real>(Real) {
    static_assert(sizeof(LogprobPart<Real>) == 4 * sizeof(Real));
    const auto input =
        make_input<Real>(logits, labels, temperatures, temperature, loss_mask, ignore_index, vocab_start);
    AREAL_CHECK(vocab_start >= 0 && input.vocab <= vocab_total - vocab_start, kOp, ": expected a shard of ",
                input.vocab, " columns from ", vocab_start, " on within a vocabulary of ", vocab_total);
    Tensor parts = empty({input.rows, 4}, bind::kScalarType<Real>, logits);
    Device::partial(logits, input, vocab_total, static_cast<LogprobPart<Real>*>(parts.mutable_data_ptr()));
    return parts;
  });
}

// The outputs as functions of this rank's logits, whose values only backward reads, and of parts [ranks, T, 4].
template <class Device>
FiveTensors merge(const Tensor& logits, const Tensor& parts, const Tensor& labels, const OptionalTensor& temperatures,
                  double temperature, const OptionalTensor& loss_mask, int64_t ignore_index, int64_t vocab_start,
                  bool /*inplace_backward*/) {
  return with_real(logits, [&]<class Real>(Real) {
    const auto input =
        make_input<Real>(logits, labels, temperatures, temperature, loss_mask, ignore_index, vocab_start);
    AREAL_CHECK(parts.dim() == 3 && parts.size(0) >= 1 && parts.size(1) == input.rows && parts.size(2) == 4, kOp,
                ": expected parts of shape [ranks, ", input.rows, ", 4]");
    AREAL_CHECK(
        parts.scalar_type() == bind::kScalarType<Real> && parts.is_contiguous() && parts.device() == logits.device(),
        kOp, ": expected contiguous parts of the outputs' type on the device of the logits");
    FiveTensors out = new_outputs<Real>(input.rows, logits);
    Device::merge(logits, input, static_cast<const LogprobPart<Real>*>(parts.const_data_ptr()), parts.size(0),
                  output_data<Real>(out));
    return out;
  });
}

template <class Device>
void backward_into(const Tensor& grad_logits, const OptionalTensor& grad_logprobs, const OptionalTensor& grad_entropy,
                   const OptionalTensor& grad_lse, const Tensor& logits, const Tensor& labels,
                   const OptionalTensor& temperatures, double temperature, const OptionalTensor& loss_mask,
                   int64_t ignore_index, const Tensor& logprobs, const Tensor& entropy, const Tensor& row_max,
                   const Tensor& log_sum, int64_t vocab_start) {
  with_real(logits, [&]<class Real>(Real) {
    const auto input =
        make_input<Real>(logits, labels, temperatures, temperature, loss_mask, ignore_index, vocab_start);
    const auto gradient = make_gradient<Real>(input, logits, grad_logprobs, grad_entropy, grad_lse, logprobs, entropy,
                                              row_max, log_sum, grad_logits);
    Device::backward(logits, input, gradient);
  });
}

template <class Device>
Tensor backward(const OptionalTensor& grad_logprobs, const OptionalTensor& grad_entropy, const OptionalTensor& grad_lse,
                const Tensor& logits, const Tensor& labels, const OptionalTensor& temperatures, double temperature,
                const OptionalTensor& loss_mask, int64_t ignore_index, const Tensor& logprobs, const Tensor& entropy,
                const Tensor& row_max, const Tensor& log_sum, int64_t vocab_start) {
  Tensor grad_logits = empty({logits.size(0), logits.size(1)}, logits.scalar_type(), logits);
  backward_into<Device>(grad_logits, grad_logprobs, grad_entropy, grad_lse, logits, labels, temperatures, temperature,
                        loss_mask, ignore_index, logprobs, entropy, row_max, log_sum, vocab_start);
  return grad_logits;
}

template <class Device>
void backward_inplace(const OptionalTensor& grad_logprobs, const OptionalTensor& grad_entropy,
                      const OptionalTensor& grad_lse, Tensor logits, const Tensor& labels,
                      const OptionalTensor& temperatures, double temperature, const OptionalTensor& loss_mask,
                      int64_t ignore_index, const Tensor& logprobs, const Tensor& entropy, const Tensor& row_max,
                      const Tensor& log_sum, int64_t vocab_start) {
  backward_into<Device>(logits, grad_logprobs, grad_entropy, grad_lse, logits, labels, temperatures, temperature,
                        loss_mask, ignore_index, logprobs, entropy, row_max, log_sum, vocab_start);
}

STABLE_TORCH_LIBRARY_FRAGMENT(areal_core, m) {
  m.def(
      "logprob_forward(Tensor logits, Tensor labels, Tensor? temperatures, float temperature, Tensor? loss_mask, "
      "int ignore_index, bool inplace_backward) "
      "-> (Tensor logprobs, Tensor entropy, Tensor lse, Tensor row_max, Tensor log_sum)");
  m.def(
      "logprob_partial(Tensor logits, Tensor labels, Tensor? temperatures, float temperature, Tensor? loss_mask, "
      "int ignore_index, int vocab_start, int vocab_total) -> Tensor");
  m.def(
      "logprob_merge(Tensor logits, Tensor parts, Tensor labels, Tensor? temperatures, float temperature, "
      "Tensor? loss_mask, int ignore_index, int vocab_start, bool inplace_backward) "
      "-> (Tensor logprobs, Tensor entropy, Tensor lse, Tensor row_max, Tensor log_sum)");
  m.def(
      "logprob_backward(Tensor? grad_logprobs, Tensor? grad_entropy, Tensor? grad_lse, Tensor logits, Tensor labels, "
      "Tensor? temperatures, float temperature, Tensor? loss_mask, int ignore_index, Tensor logprobs, Tensor entropy, "
      "Tensor row_max, Tensor log_sum, int vocab_start=0) -> Tensor");
  m.def(
      "logprob_backward_(Tensor? grad_logprobs, Tensor? grad_entropy, Tensor? grad_lse, Tensor(a!) logits, "
      "Tensor labels, Tensor? temperatures, float temperature, Tensor? loss_mask, int ignore_index, Tensor logprobs, "
      "Tensor entropy, Tensor row_max, Tensor log_sum, int vocab_start=0) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(areal_core, CPU, m) {
  m.impl("logprob_forward", TORCH_BOX(&forward<Cpu>));
  m.impl("logprob_partial", TORCH_BOX(&partial<Cpu>));
  m.impl("logprob_merge", TORCH_BOX(&merge<Cpu>));
  m.impl("logprob_backward", TORCH_BOX(&backward<Cpu>));
  m.impl("logprob_backward_", TORCH_BOX(&backward_inplace<Cpu>));
}

#if defined(AREAL_WITH_CUDA)
STABLE_TORCH_LIBRARY_IMPL(areal_core, CUDA, m) {
  m.impl("logprob_forward", TORCH_BOX(&forward<Cuda>));
  m.impl("logprob_partial", TORCH_BOX(&partial<Cuda>));
  m.impl("logprob_merge", TORCH_BOX(&merge<Cuda>));
  m.impl("logprob_backward", TORCH_BOX(&backward<Cuda>));
  m.impl("logprob_backward_", TORCH_BOX(&backward_inplace<Cuda>));
}
#endif

}  // namespace
}  // namespace areal
