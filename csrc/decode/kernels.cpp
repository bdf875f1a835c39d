#include "decode/kernels.h"

namespace areal::decode {

const Kernels& active_kernels() { AREAL_ISA_DISPATCH(decode_kernels()); }

}  // namespace areal::decode
