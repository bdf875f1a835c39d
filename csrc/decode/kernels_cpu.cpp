// The table of kernels of one instruction set.
#include "decode/kernels_cpu.h"

#include "base/simd.h"

namespace areal::AREAL_ISA {

const decode::Kernels& decode_kernels() {
  constexpr Isa isa = kLanes == 16 ? Isa::kAvx512 : kLanes == 8 ? Isa::kAvx2 : Isa::kBaseline;
  static const decode::Kernels table{isa,
                                     kLanes,
                                     kDecodePanelColumns,
                                     &decode_pack,
                                     &decode_gemm,
                                     &decode_rms_norm,
                                     &decode_rope,
                                     &decode_attention,
                                     &decode_softmax_terms,
                                     &decode_find_cumulative};
  return table;
}

}  // namespace areal::AREAL_ISA
