// How tokens are drawn from a row of logits.
#pragma once

#include <cstdint>
#include <vector>

#include "decode/kernels.h"

namespace areal::decode {

struct SamplingParams {
  int64_t max_new_tokens = 0;
  double temperature = 1.0;  // 0: greedy
  double top_p = 1.0;
  int64_t top_k = 0;  // 0: all
  std::vector<int32_t> stop_token_ids;
  uint64_t seed = 0;

  bool operator==(const SamplingParams&) const = default;
};

// Throws areal::Error naming the field that is out of range.
void check_sampling(const SamplingParams& sampling, int64_t vocab_size);

struct DrawnToken {
  int32_t id;
  // ln of the probability the token was drawn with: softmax at the temperature, restricted to top_k and then top_p and
  // renormalised. A greedy token has no such probability; its logprob is that of the softmax at temperature 1.
  float logprob;
};

// Draws tokens; owns the scratch of one vocabulary.
class Sampler {
 public:
  Sampler(const Kernels& kernels, int64_t vocab_size);

  // Draws by inverting the cumulative distribution at `uniform` in [0, 1). Among equal probabilities the lower id is
  // kept first, greedy included. False (and no token) when a logit is NaN or +inf, or all are -inf.
  bool draw(const float* logits, const SamplingParams& sampling, double uniform, DrawnToken* token);

 private:
  void keep_candidates(const SamplingParams& sampling, double total);

  const Kernels& kernels_;
  std::vector<float> terms_;
  std::vector<int32_t> candidates_;  // kept ids, most likely first
};

}  // namespace areal::decode
