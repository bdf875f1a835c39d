#include "ops/advantages/gae.h"

#include "base/threads.h"

namespace areal {
namespace {

void sequences(const advantages::GaeArgs<float>& args, int64_t begin, int64_t end) {
  AREAL_ISA_DISPATCH(gae_sequences(args, begin, end));
}
void sequences(const advantages::GaeArgs<double>& args, int64_t begin, int64_t end) {
  AREAL_ISA_DISPATCH(gae_sequences(args, begin, end));
}

// A sequence is the unit of work, so the bits do not depend on the threads.
template <class Real>
void run(const advantages::GaeArgs<Real>& args) {
  const int64_t count = args.segments.count;
  if (count == 0) return;
  constexpr int64_t kGrainTokens = 16384;
  const int64_t mean_tokens = args.segments.tokens() / count + 1;
  parallel_for(0, count, kGrainTokens / mean_tokens + 1,
               [&](int64_t begin, int64_t end) { sequences(args, begin, end); });
}

}  // namespace

namespace advantages {
void gae_cpu(const GaeArgs<float>& args) { run(args); }
void gae_cpu(const GaeArgs<double>& args) { run(args); }
}  // namespace advantages
}  // namespace areal
