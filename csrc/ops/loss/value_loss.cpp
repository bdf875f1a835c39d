#include "base/threads.h"
#include "ops/loss/value_loss_math.h"

namespace areal {
namespace {

template <class Real>
void block_of(const loss::ValueLossArgs<Real>& args, int64_t block) {
  AREAL_ISA_DISPATCH(value_loss_block(args, block));
}

template <class Real>
void run(const loss::ValueLossArgs<Real>& args) {
  const int64_t blocks = loss::value_block_count(args.tokens);
  constexpr int64_t kGrainBlocks = 8;
  parallel_for(0, blocks, kGrainBlocks, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) block_of(args, block);
  });
  double totals[loss::kValueStatCount] = {};  // in block order, for any number of threads
  for (int stat = 0; stat < loss::kValueStatCount; ++stat) {
    for (int64_t b = 0; b < blocks; ++b) totals[stat] += args.scratch[stat * blocks + b];
  }
  loss::finish(args, totals);
}

}  // namespace

namespace loss {
void value_loss_cpu(const ValueLossArgs<float>& args) { run(args); }
void value_loss_cpu(const ValueLossArgs<double>& args) { run(args); }
}  // namespace loss
}  // namespace areal
