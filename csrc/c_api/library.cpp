// Versions, errors and the instruction set.
#include <exception>
#include <new>
#include <string>
#include <string_view>

#include "base/isa.h"
#include "c_api/boundary.h"

namespace areal::c_api {
namespace {

constexpr std::string_view kCudaPrefix = "CUDA: ";  // of cuda/launch.cuh

std::string& last_error() {
  thread_local std::string text;
  return text;
}

areal_status keep(areal_status status, const char* text) noexcept {
  try {
    last_error() = text;
  } catch (...) {  // no memory for the text; the status says what happened
  }
  return status;
}

}  // namespace

areal_status report_current_exception() noexcept {
  try {
    throw;
  } catch (const Unsupported& error) {
    return keep(AREAL_UNSUPPORTED, error.what());
  } catch (const Error& error) {
    const bool is_cuda = std::string_view(error.what()).starts_with(kCudaPrefix);
    return keep(is_cuda ? AREAL_CUDA_ERROR : AREAL_INVALID_ARGUMENT, error.what());
  } catch (const std::bad_alloc&) {
    return keep(AREAL_OUT_OF_MEMORY, "out of memory");
  } catch (const std::exception& error) {
    return keep(AREAL_INTERNAL_ERROR, error.what());
  } catch (...) {
    return keep(AREAL_INTERNAL_ERROR, "unknown exception");
  }
}

}  // namespace areal::c_api

int64_t areal_abi_version(void) { return AREAL_ABI_VERSION; }

const char* areal_version(void) { return AREAL_VERSION; }

int64_t areal_has_cuda(void) {
#if defined(AREAL_WITH_CUDA)
  return 1;
#else
  return 0;
#endif
}

const char* areal_isa(void) { return areal::isa_name(areal::active_isa()); }

const char* areal_last_error(void) { return areal::c_api::last_error().c_str(); }
