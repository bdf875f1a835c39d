// The value loss of one block of tokens. Columns of tokens keep their own sums: without them the compiler may not
// vectorise, because it would have to reorder additions.
#include "ops/loss/value_loss_math.h"

namespace areal::AREAL_ISA {
namespace {

using loss::ValueLossArgs;

constexpr int kColumns = 16;

struct ColumnSums {
  double of[loss::kValueStatCount][kColumns] = {};
};

// Tokens [begin, begin + count), at most a column each.
template <class Real>
inline __attribute__((always_inline)) void add_row(const ValueLossArgs<Real>& a, const loss::ValueBounds<Real>& bounds,
                                                   int64_t begin, int count, ColumnSums& sums) {
  for (int i = 0; i < count; ++i) {
    const int64_t t = begin + i;
    const bool live = a.loss_mask[t];
    const Real value = live ? a.values[t] : Real(0), target = live ? a.returns[t] : Real(0);
    const Real old_value = live && a.old_values != nullptr ? a.old_values[t] : value;
    const loss::ValueTerm<Real> term = loss::value_term(bounds, value, old_value, target);
    a.grad[t] = term.grad;
    double token[loss::kValueStatCount] = {};
    loss::value_stats(term, value, target, token);
    token[loss::kValueLiveTokens] = live;
    for (int stat = 0; stat < loss::kValueStatCount; ++stat) sums.of[stat][i] += token[stat];
  }
}

template <class Real>
inline __attribute__((always_inline)) void run_block(const ValueLossArgs<Real>& a, int64_t block) {
  const loss::ValueBounds<Real> bounds = {static_cast<Real>(a.clip), static_cast<Real>(a.huber_delta)};
  const int64_t begin = block * loss::kValueBlockTokens, limit = begin + loss::kValueBlockTokens;
  const int64_t blocks = loss::value_block_count(a.tokens), end = limit < a.tokens ? limit : a.tokens;
  ColumnSums sums;
  int64_t t = begin;
  for (; t + kColumns <= end; t += kColumns) add_row(a, bounds, t, kColumns, sums);
  add_row(a, bounds, t, static_cast<int>(end - t), sums);
  for (int stat = 0; stat < loss::kValueStatCount; ++stat) {
    double total = 0;
    for (int i = 0; i < kColumns; ++i) total += sums.of[stat][i];
    a.scratch[stat * blocks + block] = total;
  }
}

}  // namespace

void value_loss_block(const ValueLossArgs<float>& args, int64_t block) { run_block(args, block); }
void value_loss_block(const ValueLossArgs<double>& args, int64_t block) { run_block(args, block); }

}  // namespace areal::AREAL_ISA
