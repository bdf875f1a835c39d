#include <algorithm>

#include "base/threads.h"
#include "ops/loss/loss_math.h"

namespace areal {
namespace {

template <class Real>
void sequences_of(const loss::PolicyLossArgs<Real>& args, int64_t begin, int64_t end) {
  AREAL_ISA_DISPATCH(policy_loss_sequences(args, begin, end));
}
template <class Real>
void block_of(const loss::PolicyLossArgs<Real>& args, int64_t block) {
  AREAL_ISA_DISPATCH(policy_loss_block(args, block));
}

// One thread, block after block: the order, and so every bit, is the same for any number of threads.
template <class Real>
void combine_blocks(const loss::PolicyLossArgs<Real>& args, int64_t blocks) {
  double totals[loss::kStatCount];
  for (int stat = 0; stat < loss::kStatCount; ++stat) {
    totals[stat] = loss::empty_stat(stat);
    for (int64_t b = 0; b < blocks; ++b) {
      totals[stat] = loss::join_stat(stat, totals[stat], args.scratch[stat * blocks + b]);
    }
  }
  loss::finish(args, totals);
}

template <class Real>
void run(const loss::PolicyLossArgs<Real>& args) {
  const int64_t blocks = loss::block_count(args.tokens);
  constexpr int64_t kGrainBlocks = 8;  // 16k tokens: about 50 us, well above the cost of waking a thread
  if (args.cu_seqlens != nullptr && args.tokens > 0) {
    const int64_t grain = std::max<int64_t>(kGrainBlocks * loss::kBlockTokens * args.sequences / args.tokens, 1);
    parallel_for(0, args.sequences, grain, [&](int64_t begin, int64_t end) { sequences_of(args, begin, end); });
  }
  parallel_for(0, blocks, kGrainBlocks, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) block_of(args, block);
  });
  combine_blocks(args, blocks);
}

}  // namespace

namespace loss {
void policy_loss_cpu(const PolicyLossArgs<float>& args) { run(args); }
void policy_loss_cpu(const PolicyLossArgs<double>& args) { run(args); }
}  // namespace loss
}  // namespace areal
