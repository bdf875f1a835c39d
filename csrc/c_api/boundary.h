// What every function of the C API does at the border: reads versioned structs, checks what comes from outside, and
// turns exceptions into a status.
//
// A new function takes three steps: declare its struct and entry points in include/areal_core/<area>.h (every field 8
// bytes wide, outputs after inputs), and write here, in <area>.cpp, a make_<op>() from the struct to the arguments of
// csrc/ops, and the two entry points around it.
#pragma once

#include <areal_core/base.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "base/check.h"
#include "base/dtype.h"
#include "base/segments.h"

namespace areal::c_api {

// What this build or this version of the library cannot do.
class Unsupported : public Error {
 public:
  using Error::Error;
};

// Keeps the text of the exception being handled for areal_last_error() and returns its status.
areal_status report_current_exception() noexcept;

template <class Fn>
areal_status guarded(const Fn& fn) noexcept {
  try {
    fn();
    return AREAL_OK;
  } catch (...) {
    return report_current_exception();
  }
}

// Runs a call into areal::cuda; in a build without it the body is not even compiled to code.
template <class Fn>
areal_status guarded_cuda([[maybe_unused]] const Fn& fn, [[maybe_unused]] const char* op) noexcept {
#if defined(AREAL_WITH_CUDA)
  return guarded(fn);
#else
  return guarded([&] { throw Unsupported(std::string(op) + ": expected a library built with CUDA, got one without"); });
#endif
}

// A struct of the caller, whose first field is its size, as this version of the library knows it: fields that the
// caller does not have are zero, fields that the library does not have must be.
template <class T>
T read_struct(const T* given, const char* op, const char* name) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % 8 == 0);
  constexpr size_t kMaxBytes = 4096;
  AREAL_CHECK(given != nullptr, op, ": expected ", name, ", got NULL");
  const size_t size = given->size;
  AREAL_CHECK(size >= sizeof size && size <= kMaxBytes && size % 8 == 0, op, ": expected ", name, ".size = sizeof(*",
              name, "), got ", size);
  T known{};
  std::memcpy(&known, given, std::min(size, sizeof known));
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  for (size_t at = sizeof known; at < size; ++at) {
    if (bytes[at] != 0) {
      throw Unsupported(format_message(op, ": expected ", name, " without fields newer than this library, got one at ",
                                       "byte ", at, " (library ", AREAL_VERSION, ")"));
    }
  }
  return known;
}

// A required array: NULL only where it has no element.
template <class T>
T* required(T* pointer, int64_t elements, const char* op, const char* name) {
  AREAL_CHECK(pointer != nullptr || elements == 0, op, ": expected ", name, ", got NULL");
  return pointer;
}

// The same for an array that the struct has as void*.
template <class Real>
Real* real_array(void* pointer, int64_t elements, const char* op, const char* name) {
  return static_cast<Real*>(required(pointer, elements, op, name));
}
template <class Real>
const Real* real_array(const void* pointer, int64_t elements, const char* op, const char* name) {
  return static_cast<const Real*>(required(pointer, elements, op, name));
}

// A number of elements. No memory holds more than the bound, below which sizes in bytes do not overflow.
inline int64_t checked_count(int64_t value, const char* op, const char* name) {
  constexpr int64_t kMost = int64_t{1} << 48;
  AREAL_CHECK(value >= 0, op, ": expected ", name, " >= 0, got ", value);
  AREAL_CHECK(value <= kMost, op, ": expected ", name, " <= ", kMost, ", got ", value);
  return value;
}

inline bool checked_flag(int64_t value, const char* op, const char* name) {
  AREAL_CHECK(value == 0 || value == 1, op, ": expected ", name, " 0 or 1, got ", value);
  return value == 1;
}

// One of the values 0..last of an enum.
template <class Enum>
Enum checked_enum(int64_t value, Enum last, const char* op, const char* name) {
  const auto most = static_cast<int64_t>(last);
  AREAL_CHECK(value >= 0 && value <= most, op, ": expected ", name, " in 0..", most, ", got ", value);
  return static_cast<Enum>(value);
}

// A mask in host memory, whose bytes are checked: as bool, any byte but 0 and 1 is undefined.
inline const bool* host_mask(const uint8_t* mask, int64_t elements, const char* op, const char* name) {
  if (mask == nullptr) return nullptr;
  uint8_t bits = 0;
  for (int64_t i = 0; i < elements; ++i) bits |= mask[i];
  AREAL_CHECK(bits <= 1, op, ": expected ", name, " of bytes 0 and 1, got another value");
  return reinterpret_cast<const bool*>(mask);
}

enum class Memory { kHost, kDevice };

inline const bool* mask_in(Memory memory, const uint8_t* mask, int64_t elements, const char* op) {
  return memory == Memory::kHost ? host_mask(mask, elements, op, "loss_mask") : reinterpret_cast<const bool*>(mask);
}

// cu_seqlens of `sequences` + 1 elements; its values are checked in host memory only.
inline Segments segments_in(Memory memory, const int64_t* cu_seqlens, int64_t sequences, int64_t tokens,
                            const char* op) {
  checked_count(sequences, op, "sequences");
  checked_count(tokens, op, "tokens");
  const Segments segments{required(cu_seqlens, 1, op, "cu_seqlens"), sequences};
  if (memory == Memory::kHost) check_segments(segments, tokens, op);
  return segments;
}

// The caller's scratch of at least so many bytes, or on the host `own` where there is none.
template <class Args>
double* scratch_of(const Args& args, int64_t bytes, std::vector<double>* own, const char* op) {
  if (own != nullptr && args.scratch == nullptr) {
    own->resize(static_cast<size_t>(bytes) / sizeof(double));
    return own->data();
  }
  AREAL_CHECK(args.scratch_bytes >= bytes, op, ": expected scratch_bytes >= ", bytes, ", got ", args.scratch_bytes);
  return static_cast<double*>(required(args.scratch, bytes, op, "scratch"));
}

// Calls fn(float{}) or fn(double{}).
template <class Fn>
void with_real(int64_t dtype, const char* op, const Fn& fn) {
  const bool is_double = dtype == AREAL_FLOAT64;
  AREAL_CHECK(is_double || dtype == AREAL_FLOAT32, op, ": expected dtype AREAL_FLOAT32 or AREAL_FLOAT64, got ", dtype);
  is_double ? fn(double{}) : fn(float{});
}

}  // namespace areal::c_api
