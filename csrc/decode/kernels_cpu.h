// What the ISA sources of this folder offer each other; the table in kernels_cpu.cpp gathers them.
#pragma once

#include "decode/kernels.h"

namespace areal::AREAL_ISA {

extern const int64_t kDecodePanelColumns;

void decode_pack(const decode::PackArgs& args);
void decode_gemm(const decode::GemmArgs& args);
void decode_rms_norm(const decode::RmsNormArgs& args);
void decode_rope(const decode::RopeArgs& args);
void decode_attention(const decode::AttentionArgs& args);
decode::SoftmaxTerms decode_softmax_terms(const float* logits, int64_t size, float inverse_temperature, float* terms);
int64_t decode_find_cumulative(const float* terms, int64_t size, double target);

}  // namespace areal::AREAL_ISA
