#include "decode/sampling.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"

namespace areal::decode {

void check_sampling(const SamplingParams& sampling, int64_t vocab_size) {
  AREAL_CHECK(sampling.max_new_tokens >= 1, "sampling: expected max_new_tokens >= 1, got ", sampling.max_new_tokens);
  AREAL_CHECK(std::isfinite(sampling.temperature) && sampling.temperature >= 0.0,
              "sampling: expected a finite temperature >= 0, got ", sampling.temperature);
  AREAL_CHECK(sampling.top_p > 0.0 && sampling.top_p <= 1.0, "sampling: expected top_p in (0, 1], got ",
              sampling.top_p);
  AREAL_CHECK(sampling.top_k >= 0, "sampling: expected top_k >= 0, got ", sampling.top_k);
  for (const int32_t id : sampling.stop_token_ids) {
    AREAL_CHECK(id >= 0 && id < vocab_size, "sampling: expected stop_token_ids in [0, ", vocab_size, "), got ", id);
  }
}

Sampler::Sampler(const Kernels& kernels, int64_t vocab_size)
    : kernels_(kernels), terms_(static_cast<size_t>(vocab_size)) {}

bool Sampler::draw(const float* logits, const SamplingParams& sampling, double uniform, DrawnToken* token) {
  const int64_t vocab_size = static_cast<int64_t>(terms_.size());
  const bool greedy = sampling.temperature == 0.0;
  const float inverse_temperature = greedy ? 1.0f : static_cast<float>(1.0 / sampling.temperature);
  const auto [max, all] = kernels_.softmax_terms(logits, vocab_size, inverse_temperature, terms_.data());
  if (!std::isfinite(all)) return false;

  double total = all;
  if (greedy) {
    token->id = static_cast<int32_t>(std::find(logits, logits + vocab_size, max) - logits);
  } else if (sampling.top_p == 1.0 && (sampling.top_k == 0 || sampling.top_k >= vocab_size)) {
    token->id = static_cast<int32_t>(kernels_.find_cumulative(terms_.data(), vocab_size, uniform * total));
  } else {
    keep_candidates(sampling, all);
    total = 0.0;
    for (const int32_t id : candidates_) total += static_cast<double>(terms_[static_cast<size_t>(id)]);
    token->id = candidates_.back();
    double before = 0.0;
    for (const int32_t id : candidates_) {
      before += static_cast<double>(terms_[static_cast<size_t>(id)]);
      if (before > uniform * total) {
        token->id = id;
        break;
      }
    }
  }
  const double distance = static_cast<double>(logits[token->id]) - static_cast<double>(max);
  token->logprob = static_cast<float>(distance * static_cast<double>(inverse_temperature) - std::log(total));
  return true;
}

// top_k keeps the k most likely ids; top_p the fewest of those whose share of their sum reaches top_p.
void Sampler::keep_candidates(const SamplingParams& sampling, double total) {
  const auto likelier = [this](int32_t a, int32_t b) {
    const float x = terms_[static_cast<size_t>(a)], y = terms_[static_cast<size_t>(b)];
    return x > y || (x == y && a < b);
  };
  // Ids below (1 - top_p) / size of the whole sum to less than 1 - top_p, so top_p never reaches them: no need to sort
  // them. Half of that bound leaves room for rounding. With top_k the share is of another sum, and no id is skipped.
  const double share = sampling.top_k > 0 ? 0.0 : 0.5 * (1.0 - sampling.top_p) / static_cast<double>(terms_.size());
  const float floor = static_cast<float>(share * total);
  candidates_.clear();
  for (size_t id = 0; id < terms_.size(); ++id) {
    if (terms_[id] > 0.0f && terms_[id] >= floor) candidates_.push_back(static_cast<int32_t>(id));
  }
  if (sampling.top_k > 0 && sampling.top_k < static_cast<int64_t>(candidates_.size())) {
    std::nth_element(candidates_.begin(), candidates_.begin() + sampling.top_k, candidates_.end(), likelier);
    candidates_.resize(static_cast<size_t>(sampling.top_k));
    total = 0.0;
    for (const int32_t id : candidates_) total += static_cast<double>(terms_[static_cast<size_t>(id)]);
  }
  std::sort(candidates_.begin(), candidates_.end(), likelier);
  if (sampling.top_p == 1.0) return;
  double before = 0.0;
  size_t kept = 0;
  while (kept < candidates_.size() && before < sampling.top_p * total) {
    before += static_cast<double>(terms_[static_cast<size_t>(candidates_[kept++])]);
  }
  candidates_.resize(kept);
}

}  // namespace areal::decode
