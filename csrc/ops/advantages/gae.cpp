#include "ops/advantages/gae.h"

#include "ops/advantages/sequence_loop.h"

namespace areal {
namespace {

void sequences(const advantages::GaeArgs<float>& args, int64_t begin, int64_t end) {
  AREAL_ISA_DISPATCH(gae_sequences(args, begin, end));
}
void sequences(const advantages::GaeArgs<double>& args, int64_t begin, int64_t end) {
  AREAL_ISA_DISPATCH(gae_sequences(args, begin, end));
}

template <class Real>
void run(const advantages::GaeArgs<Real>& args) {
  advantages::for_each_range(args.segments, [&](int64_t begin, int64_t end) { sequences(args, begin, end); });
}

}  // namespace

namespace advantages {
void gae_cpu(const GaeArgs<float>& args) { run(args); }
void gae_cpu(const GaeArgs<double>& args) { run(args); }
}  // namespace advantages
}  // namespace areal
