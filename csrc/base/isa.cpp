#include "base/isa.h"

#include <atomic>

#include "base/check.h"

namespace areal {
namespace {

Isa detect() {
#if defined(AREAL_X86)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (avx512) return Isa::kAvx512;
  if (avx2) return Isa::kAvx2;
#endif
  return Isa::kBaseline;
}

std::atomic<Isa>& active() {
  static std::atomic<Isa> isa{best_isa()};
  return isa;
}

}  // namespace

Isa best_isa() {
  static const Isa isa = detect();
  return isa;
}

Isa active_isa() { return active().load(std::memory_order_relaxed); }

void set_active_isa(Isa isa) {
  AREAL_CHECK(isa <= best_isa(), "set_active_isa: expected an instruction set of this machine (up to ",
              isa_name(best_isa()), "), got ", isa_name(isa));
  active().store(isa, std::memory_order_relaxed);
}

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kBaseline:
      return "baseline";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
  }
  return "unknown";
}

}  // namespace areal
