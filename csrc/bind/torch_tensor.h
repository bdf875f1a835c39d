// Small helpers of the *_torch.cpp files, over torch's stable ABI. `op` and `name` appear in the error text.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <initializer_list>
#include <optional>
#include <span>
#include <vector>

#include "base/check.h"
#include "base/dtype.h"
#include "base/loaded_symbol.h"
#include "base/segments.h"

namespace areal::bind {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline DType stream_dtype(const Tensor& tensor, const char* op, const char* name) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Half:
      return DType::kFloat16;
    case ScalarType::Double:
      return DType::kFloat64;
    default:
      throw Error(format_message(op, ": expected ", name, " dtype in {float32, bfloat16, float16, float64}, got ",
                                 torch::headeronly::toString(tensor.scalar_type())));
  }
}

// Calls fn(float{}) or fn(double{}), by the dtype of the tensor.
template <class Fn>
auto with_real(const Tensor& tensor, const char* op, const char* name, const Fn& fn) {
  const ScalarType dtype = tensor.scalar_type();
  AREAL_CHECK(dtype == ScalarType::Float || dtype == ScalarType::Double, op, ": expected ", name,
              " dtype in {float32, float64}, got ", torch::headeronly::toString(dtype));
  return dtype == ScalarType::Double ? fn(double{}) : fn(float{});
}

template <class T>
inline constexpr ScalarType kScalarType = [] {
  if constexpr (std::is_same_v<T, float>)
    return ScalarType::Float;
  else if constexpr (std::is_same_v<T, double>)
    return ScalarType::Double;
  else if constexpr (std::is_same_v<T, int64_t>)
    return ScalarType::Long;
  else if constexpr (std::is_same_v<T, int32_t>)
    return ScalarType::Int;
  else if constexpr (std::is_same_v<T, uint8_t>)
    return ScalarType::Byte;
  else
    return ScalarType::Bool;
}();

// The data of a contiguous 1-D tensor of `size` elements of type T, on the device of `like`.
template <class T>
T* vector_data(const Tensor& tensor, int64_t size, const Tensor& like, const char* op, const char* name) {
  using torch::headeronly::toString;
  AREAL_CHECK(tensor.scalar_type() == kScalarType<std::remove_const_t<T>>, op, ": expected ", name,
              " dtype = ", toString(kScalarType<std::remove_const_t<T>>), ", got ", toString(tensor.scalar_type()));
  AREAL_CHECK(tensor.dim() == 1 && tensor.size(0) == size, op, ": expected ", name, " of shape [", size, "], got ",
              tensor.dim(), "-D with ", tensor.numel(), " elements");
  AREAL_CHECK(tensor.is_contiguous(), op, ": expected contiguous ", name, ", got stride ", tensor.stride(0));
  AREAL_CHECK(tensor.device() == like.device(), op, ": expected ", name, " on the device of the first tensor");
  return static_cast<T*>(tensor.data_ptr());
}

// The same for an optional tensor: nullptr when there is none.
template <class T>
const T* vector_data(const std::optional<Tensor>& tensor, int64_t size, const Tensor& like, const char* op,
                     const char* name) {
  return tensor.has_value() ? vector_data<const T>(*tensor, size, like, op, name) : nullptr;
}

// A new contiguous tensor on the device of `like`. (Straight to the C shim: new_empty costs a boxed dispatch.)
inline Tensor empty(std::span<const int64_t> sizes, ScalarType type, const Tensor& like) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * (sizes[i] > 1 ? sizes[i] : 1);
  int32_t device = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device));
  const int32_t dtype = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                                                  dtype, device, like.get_device_index(), &handle));
  return Tensor(handle);
}

inline Tensor empty(std::initializer_list<int64_t> shape, ScalarType type, const Tensor& like) {
  return empty(std::span(shape.begin(), shape.size()), type, like);
}

// torch's current stream on a CUDA device. Looked up at run time: only libtorch_cuda, which a CPU-only torch does
// not have, exports the function.
inline void* current_cuda_stream(int32_t device_index) {
  using Fn = AOTITorchError (*)(int32_t, void**);
  static const Fn get = reinterpret_cast<Fn>(loaded_symbol("libtorch_cuda.so", "aoti_torch_get_current_cuda_stream"));
  AREAL_CHECK(get != nullptr, "current_cuda_stream: expected a torch built with CUDA, got one without");
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(get(device_index, &stream));
  return stream;
}

// Runs the CPU or the CUDA entry point, for the device of `like`: cpu() or cuda(stream).
template <class Cpu, class Cuda>
void on_device([[maybe_unused]] const Tensor& like, const Cpu& cpu, [[maybe_unused]] const Cuda& cuda) {
#if defined(AREAL_WITH_CUDA)
  if (like.is_cuda()) {
    const torch::stable::accelerator::DeviceGuard guard(like.get_device_index());
    return cuda(current_cuda_stream(like.get_device_index()));
  }
#endif
  cpu();
}

// cu_seqlens [S+1] as a view whose values nobody has checked.
inline Segments unchecked_segments(const Tensor& cu_seqlens, const Tensor& like, const char* op,
                                   const char* name = "cu_seqlens") {
  const int64_t size = cu_seqlens.numel();
  AREAL_CHECK(size >= 1, op, ": expected ", name, " with at least 1 element, got 0");
  return {vector_data<const int64_t>(cu_seqlens, size, like, op, name), size - 1};
}

// The same, its values checked against the number of packed tokens: on the host only.
inline Segments make_segments(const Tensor& cu_seqlens, int64_t tokens, const Tensor& like, const char* op) {
  const Segments segments = unchecked_segments(cu_seqlens, like, op);
  if (!cu_seqlens.is_cuda()) check_segments(segments, tokens, op);
  return segments;
}

}  // namespace areal::bind
