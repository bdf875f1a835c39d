// A seeded fuzzer: mutates a corpus and feeds what comes of it to a consumer, which must accept or throw, never crash.
//
// A run takes AREAL_FUZZ_SECONDS (default 2) from AREAL_FUZZ_SEED (default 1); a failure prints the input in hex.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "base/check.h"

namespace areal::reshard {

class Mutator {
 public:
  explicit Mutator(uint64_t seed) : random_(seed) {}

  uint64_t below(uint64_t end) { return random_() % end; }

  std::string mutate(std::string text, const std::vector<std::string>& corpus) {
    for (uint64_t left = 1 + below(4); left > 0; --left) step(text, corpus);
    return text;
  }

 private:
  void step(std::string& text, const std::vector<std::string>& corpus) {
    const size_t at = below(text.size() + 1);
    switch (below(6)) {
      case 0:
        if (at < text.size()) text[at] = static_cast<char>(text[at] ^ (1 << below(8)));
        break;
      case 1:
        if (at < text.size()) text[at] = static_cast<char>(below(256));
        break;
      case 2:
        text.erase(at, 1 + below(16));
        break;
      case 3:
        text.insert(at, std::string(1 + below(16), static_cast<char>(below(256))));
        break;
      case 4: {  // a number at a limit, over what is there
        constexpr uint64_t kLimits[] = {
            0, 1, 63, 64, 1u << 31, uint64_t{1} << 32, uint64_t{1} << 62, ~uint64_t{0} >> 1, ~uint64_t{0}};
        const uint64_t limit = kLimits[below(std::size(kLimits))] + below(3) - 1;
        const size_t bytes = below(2) == 0 ? 4 : 8;
        if (at + bytes <= text.size()) std::memcpy(text.data() + at, &limit, bytes);
        break;
      }
      default: {  // the end of another one
        const std::string& other = corpus[below(corpus.size())];
        text.resize(at);
        text += other.substr(below(other.size() + 1));
      }
    }
  }

  std::mt19937_64 random_;
};

inline std::string hex(const std::string& text) {
  std::string out;
  for (const unsigned char c : text) {
    out += "0123456789abcdef"[c >> 4];
    out += "0123456789abcdef"[c & 15];
  }
  return out;
}

inline double environment_number(const char* name, double otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::atof(text);
}

// accept(input) returns "" for an input it takes rightly, or what is wrong with having taken it; it throws areal::Error
// for those it refuses. What it takes joins the corpus.
template <class Accept>
void fuzz(std::vector<std::string> corpus, const Accept& accept) {
  using Clock = std::chrono::steady_clock;
  Mutator mutator(static_cast<uint64_t>(environment_number("AREAL_FUZZ_SEED", 1)));
  const auto end = Clock::now() + std::chrono::duration<double>(environment_number("AREAL_FUZZ_SECONDS", 2));
  int64_t taken = 0, refused = 0;
  while (taken + refused < 1000 || Clock::now() < end) {
    const std::string input = mutator.mutate(corpus[mutator.below(corpus.size())], corpus);
    try {
      const std::string wrong = accept(input);
      ASSERT_EQ(wrong, "") << hex(input);
      ++taken;
      if (corpus.size() < 2000 && mutator.below(8) == 0 && input.size() < 4096) corpus.push_back(input);
    } catch (const Error&) {
      ++refused;
    }
  }
  EXPECT_GT(taken, 0);
  EXPECT_GT(refused, 0);
  std::cout << "  " << taken << " taken, " << refused << " refused\n";
}

}  // namespace areal::reshard
