// Schemas, argument checks and registration of the moments. The public functions and the fake kernels are in
// areal_core/ops/moments.py.
#include "bind/torch_tensor.h"
#include "ops/advantages/moments.h"

namespace areal {
namespace {

using advantages::ExactSum;
using advantages::kParts;
using advantages::MomentArgs;
using advantages::Range;
using bind::empty;
using bind::on_device;
using bind::ScalarType;
using bind::Tensor;
using bind::vector_data;
using OptionalTensor = std::optional<Tensor>;

template <class Real>
MomentArgs<Real> make_args(const Tensor& numbers, const OptionalTensor& loss_mask, const char* op) {
  const int64_t count = numbers.numel();
  return {count, vector_data<const Real>(numbers, count, numbers, op, "numbers"),
          vector_data<bool>(loss_mask, count, numbers, op, "loss_mask")};
}

Tensor moment_ranges(const Tensor& numbers, const OptionalTensor& loss_mask) {
  constexpr const char* op = "moment_ranges";
  return bind::with_real(numbers, op, "numbers", [&]<class Real>(Real) {
    const MomentArgs<Real> args = make_args<Real>(numbers, loss_mask, op);
    const Tensor parts = empty({kParts, 3}, ScalarType::Double, numbers);
    auto* out = static_cast<Range*>(parts.mutable_data_ptr());
    on_device(
        numbers, [&] { advantages::ranges_cpu(args, out); }, [&](void* stream) { cuda::ranges(args, out, stream); });
    return parts;
  });
}

Tensor moment_sums(const Tensor& numbers, const OptionalTensor& loss_mask, const Tensor& range,
                   const OptionalTensor& mean) {
  constexpr const char* op = "moment_sums";
  return bind::with_real(numbers, op, "numbers", [&]<class Real>(Real) {
    const MomentArgs<Real> args = make_args<Real>(numbers, loss_mask, op);
    const auto* of = reinterpret_cast<const Range*>(vector_data<const double>(range, 3, numbers, op, "range"));
    const double* about = vector_data<double>(mean, 1, numbers, op, "mean");
    const Tensor parts = empty({kParts, 2}, ScalarType::Double, numbers);
    auto* out = static_cast<ExactSum*>(parts.mutable_data_ptr());
    on_device(
        numbers, [&] { advantages::sums_cpu(args, of, about, out); },
        [&](void* stream) { cuda::sums(args, of, about, out, stream); });
    return parts;
  });
}

Tensor normalize(const Tensor& numbers, const OptionalTensor& loss_mask, const Tensor& mean, const Tensor& scale) {
  constexpr const char* op = "normalize";
  return bind::with_real(numbers, op, "numbers", [&]<class Real>(Real) {
    const MomentArgs<Real> args = make_args<Real>(numbers, loss_mask, op);
    const auto* about = vector_data<const double>(mean, 1, numbers, op, "mean");
    const auto* factor = vector_data<const double>(scale, 1, numbers, op, "scale");
    const Tensor normalized = empty({args.count}, bind::kScalarType<Real>, numbers);
    auto* out = static_cast<Real*>(normalized.mutable_data_ptr());
    on_device(
        numbers, [&] { advantages::normalize_cpu(args, about, factor, out); },
        [&](void* stream) { cuda::normalize(args, about, factor, out, stream); });
    return normalized;
  });
}

STABLE_TORCH_LIBRARY_FRAGMENT(areal_core, m) {
  m.def("moment_ranges(Tensor numbers, Tensor? loss_mask) -> Tensor");
  m.def("moment_sums(Tensor numbers, Tensor? loss_mask, Tensor range, Tensor? mean) -> Tensor");
  m.def("normalize(Tensor numbers, Tensor? loss_mask, Tensor mean, Tensor scale) -> Tensor");
}

template <class Library>
void register_ops(Library& m) {
  m.impl("moment_ranges", TORCH_BOX(&moment_ranges));
  m.impl("moment_sums", TORCH_BOX(&moment_sums));
  m.impl("normalize", TORCH_BOX(&normalize));
}

STABLE_TORCH_LIBRARY_IMPL(areal_core, CPU, m) { register_ops(m); }
#if defined(AREAL_WITH_CUDA)
STABLE_TORCH_LIBRARY_IMPL(areal_core, CUDA, m) { register_ops(m); }
#endif

}  // namespace
}  // namespace areal
