#include "ops/logprob/logprob.h"

#include <areal_core/logprob.h>

#include <limits>

#include "c_api/boundary.h"

namespace areal::c_api {
namespace {

template <class Real>
LogprobInput<Real> make_input(const areal_logprob_input& given, Memory memory, const char* op) {
  LogprobInput<Real> input;
  input.dtype = checked_enum(given.dtype, DType::kFloat64, op, "dtype");
  input.rows = checked_count(given.rows, op, "rows");
  input.vocab = checked_count(given.vocab, op, "vocab");
  input.logits = required(given.logits, input.rows * input.vocab, op, "logits");
  input.row_stride = given.row_stride;
  AREAL_CHECK(input.rows <= 1 || input.row_stride >= input.vocab || input.row_stride == 0, op,
              ": expected row_stride >= vocab = ", input.vocab, " (or 0: the same row), got ", input.row_stride);
  input.vocab_start = checked_count(given.vocab_start, op, "vocab_start");
  input.labels = required(given.labels, input.rows, op, "labels");
  input.ignore_index = given.ignore_index;
  input.temperatures = static_cast<const Real*>(given.temperatures);
  input.temperature = given.temperatures == nullptr ? given.temperature : 1.0;
  AREAL_CHECK(
      input.temperature >= std::numeric_limits<float>::min() && input.temperature <= std::numeric_limits<float>::max(),
      op, ": expected temperature > 0 and finite, got ", input.temperature);
  input.loss_mask = mask_in(memory, given.loss_mask, input.rows, op);
  return input;
}

// For the functions over the whole vocabulary.
template <class Real>
LogprobInput<Real> whole(const LogprobInput<Real>& input, const char* op) {
  AREAL_CHECK(input.vocab_start == 0, op, ": expected vocab_start = 0 (a shard goes to areal_logprob_partial), got ",
              input.vocab_start);
  return input;
}

template <class Real>
LogprobInput<Real> shard(const LogprobInput<Real>& input, int64_t vocab_total, const char* op) {
  AREAL_CHECK(input.vocab <= vocab_total - input.vocab_start, op,
              ": expected vocab_total >= vocab_start + vocab = ", input.vocab_start + input.vocab, ", got ",
              vocab_total);
  return input;
}

template <class Real>
LogprobOutput<Real> make_output(const areal_logprob_output& given, int64_t rows, const char* op) {
  return {real_array<Real>(given.logprobs, rows, op, "logprobs"), real_array<Real>(given.entropy, rows, op, "entropy"),
          real_array<Real>(given.lse, rows, op, "lse"), real_array<Real>(given.row_max, rows, op, "row_max"),
          real_array<Real>(given.log_sum, rows, op, "log_sum")};
}

template <class Real>
LogprobGradient<Real> make_gradient(const areal_logprob_gradient& given, const LogprobInput<Real>& input,
                                    const char* op) {
  AREAL_CHECK(input.rows <= 1 || given.grad_row_stride >= input.vocab, op,
              ": expected grad_row_stride >= vocab = ", input.vocab, ", got ", given.grad_row_stride);
  LogprobGradient<Real> gradient;
  gradient.grad_logprobs = static_cast<const Real*>(given.grad_logprobs);
  gradient.grad_entropy = static_cast<const Real*>(given.grad_entropy);
  gradient.grad_lse = static_cast<const Real*>(given.grad_lse);
  gradient.logprobs = real_array<Real>(given.logprobs, input.rows, op, "logprobs");
  gradient.entropy = real_array<Real>(given.entropy, input.rows, op, "entropy");
  gradient.row_max = real_array<Real>(given.row_max, input.rows, op, "row_max");
  gradient.log_sum = real_array<Real>(given.log_sum, input.rows, op, "log_sum");
  gradient.grad_logits = required(given.grad_logits, input.rows * input.vocab, op, "grad_logits");
  gradient.grad_row_stride = given.grad_row_stride;
  return gradient;
}

// parts of `shares` ranks, aligned to what a row takes.
template <class Real, class Pointer>
auto make_parts(Pointer* parts, int64_t rows, int64_t shares, const char* op) {
  using Part = std::conditional_t<std::is_const_v<Pointer>, const LogprobPart<Real>, LogprobPart<Real>>;
  AREAL_CHECK(shares >= 1, op, ": expected ranks >= 1, got ", shares);
  required(parts, rows, op, "parts");
  AREAL_CHECK(reinterpret_cast<uintptr_t>(parts) % alignof(Part) == 0, op, ": expected parts aligned to ",
              alignof(Part), " bytes, got ", static_cast<const void*>(parts));
  return static_cast<Part*>(parts);
}

// Calls fn(float{}) or fn(double{}) with the type of the arrays that go with logits of this dtype.
template <class Fn>
void with_row_real(int64_t dtype, const Fn& fn) {
  dtype == AREAL_FLOAT64 ? fn(double{}) : fn(float{});
}

LogprobCudaScratch make_scratch(const areal_logprob_scratch* given, const LogprobInput<float>& input, const char* op) {
  const auto scratch = read_struct(given, op, "scratch");
  const int64_t bytes = logprob_workspace_bytes(input);
  AREAL_CHECK(scratch.workspace_bytes >= bytes, op, ": expected scratch.workspace_bytes >= ", bytes, ", got ",
              scratch.workspace_bytes);
  return {.workspace = required(scratch.workspace, bytes, op, "scratch.workspace"),
          .bad_row = required(scratch.bad_row, input.rows, op, "scratch.bad_row")};
}

LogprobInput<float> make_device_input(const areal_logprob_input* given, const char* op) {
  const areal_logprob_input input = read_struct(given, op, "input");
  AREAL_CHECK(input.dtype != AREAL_FLOAT64, op, ": expected dtype other than AREAL_FLOAT64 on CUDA, got it");
  return make_input<float>(input, Memory::kDevice, op);
}

}  // namespace
}  // namespace areal::c_api

using namespace areal::c_api;

areal_status areal_logprob_forward_cpu(const areal_logprob_input* input, const areal_logprob_output* output) {
  constexpr const char* op = "areal_logprob_forward_cpu";
  return guarded([&] {
    const auto in = read_struct(input, op, "input");
    const auto out = read_struct(output, op, "output");
    with_row_real(in.dtype, [&]<class Real>(Real) {
      areal::logprob_forward_cpu(whole(make_input<Real>(in, Memory::kHost, op), op),
                                 make_output<Real>(out, in.rows, op));
    });
  });
}

areal_status areal_logprob_backward_cpu(const areal_logprob_input* input, const areal_logprob_gradient* gradient) {
  constexpr const char* op = "areal_logprob_backward_cpu";
  return guarded([&] {
    const auto in = read_struct(input, op, "input");
    const auto grad = read_struct(gradient, op, "gradient");
    with_row_real(in.dtype, [&]<class Real>(Real) {
      const auto native = make_input<Real>(in, Memory::kHost, op);
      areal::logprob_backward_cpu(native, make_gradient(grad, native, op));
    });
  });
}

areal_status areal_logprob_workspace_bytes(const areal_logprob_input* input, int64_t* bytes) {
  constexpr const char* op = "areal_logprob_workspace_bytes";
  return guarded_cuda(
      [&] { *required(bytes, 1, op, "bytes") = areal::logprob_workspace_bytes(make_device_input(input, op)); }, op);
}

areal_status areal_logprob_forward_cuda(const areal_logprob_input* input, const areal_logprob_output* output,
                                        const areal_logprob_scratch* scratch, void* stream) {
  constexpr const char* op = "areal_logprob_forward_cuda";
  return guarded_cuda(
      [&] {
        const auto in = whole(make_device_input(input, op), op);
        const auto out = make_output<float>(read_struct(output, op, "output"), in.rows, op);
        areal::logprob_forward_cuda(in, out, make_scratch(scratch, in, op), stream);
      },
      op);
}

areal_status areal_logprob_backward_cuda(const areal_logprob_input* input, const areal_logprob_gradient* gradient,
                                         void* stream) {
  constexpr const char* op = "areal_logprob_backward_cuda";
  return guarded_cuda(
      [&] {
        const auto in = make_device_input(input, op);
        areal::logprob_backward_cuda(in, make_gradient(read_struct(gradient, op, "gradient"), in, op), stream);
      },
      op);
}

areal_status areal_logprob_partial_cpu(const areal_logprob_input* input, int64_t vocab_total, void* parts) {
  constexpr const char* op = "areal_logprob_partial_cpu";
  return guarded([&] {
    const auto in = read_struct(input, op, "input");
    with_row_real(in.dtype, [&]<class Real>(Real) {
      areal::logprob_partial_cpu(shard(make_input<Real>(in, Memory::kHost, op), vocab_total, op), vocab_total,
                                 make_parts<Real>(parts, in.rows, 1, op));
    });
  });
}

areal_status areal_logprob_merge_cpu(const areal_logprob_input* input, const void* parts, int64_t ranks,
                                     const areal_logprob_output* output) {
  constexpr const char* op = "areal_logprob_merge_cpu";
  return guarded([&] {
    const auto in = read_struct(input, op, "input");
    const auto out = read_struct(output, op, "output");
    with_row_real(in.dtype, [&]<class Real>(Real) {
      areal::logprob_merge_cpu(make_input<Real>(in, Memory::kHost, op), make_parts<Real>(parts, in.rows, ranks, op),
                               ranks, make_output<Real>(out, in.rows, op));
    });
  });
}

areal_status areal_logprob_partial_cuda(const areal_logprob_input* input, int64_t vocab_total, void* parts,
                                        const areal_logprob_scratch* scratch, void* stream) {
  constexpr const char* op = "areal_logprob_partial_cuda";
  return guarded_cuda(
      [&] {
        const auto in = shard(make_device_input(input, op), vocab_total, op);
        areal::logprob_partial_cuda(in, vocab_total, make_parts<float>(parts, in.rows, 1, op),
                                    make_scratch(scratch, in, op), stream);
      },
      op);
}

areal_status areal_logprob_merge_cuda(const areal_logprob_input* input, const void* parts, int64_t ranks,
                                      const areal_logprob_output* output, void* stream) {
  constexpr const char* op = "areal_logprob_merge_cuda";
  return guarded_cuda(
      [&] {
        const auto in = make_device_input(input, op);
        const auto out = make_output<float>(read_struct(output, op, "output"), in.rows, op);
        areal::logprob_merge_cuda(in, make_parts<float>(parts, in.rows, ranks, op), ranks, out, stream);
      },
      op);
}
