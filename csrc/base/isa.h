// Which build of a CPU kernel runs. Every source marked ISA in CMake is compiled once per instruction set, inside
// `namespace areal::AREAL_ISA`; AREAL_ISA_DISPATCH picks the one that active_isa() names.
#pragma once

#include <cstdint>

namespace areal {

enum class Isa : int32_t { kBaseline = 0, kAvx2 = 1, kAvx512 = 2 };

// The best instruction set that both this build and this machine have.
Isa best_isa();
// The one in use: best_isa() until set_active_isa() says otherwise.
Isa active_isa();
// For tests and benches. Throws areal::Error if the machine or the build lacks it.
void set_active_isa(Isa isa);
const char* isa_name(Isa isa);

}  // namespace areal

#if defined(AREAL_X86)
#define AREAL_ISA_DECLARE(...) \
  namespace baseline {         \
  __VA_ARGS__;                 \
  }                            \
  namespace avx2 {             \
  __VA_ARGS__;                 \
  }                            \
  namespace avx512 {           \
  __VA_ARGS__;                 \
  }
#define AREAL_ISA_DISPATCH(call)    \
  switch (::areal::active_isa()) {  \
    case ::areal::Isa::kAvx512:     \
      return ::areal::avx512::call; \
    case ::areal::Isa::kAvx2:       \
      return ::areal::avx2::call;   \
    case ::areal::Isa::kBaseline:   \
      break;                        \
  }                                 \
  return ::areal::baseline::call
#else
#define AREAL_ISA_DECLARE(...) \
  namespace baseline {         \
  __VA_ARGS__;                 \
  }
#define AREAL_ISA_DISPATCH(call) return ::areal::baseline::call
#endif
