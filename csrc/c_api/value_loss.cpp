#include "ops/loss/value_loss.h"

#include <areal_core/loss.h>

#include <limits>
#include <vector>

#include "c_api/boundary.h"

namespace areal::c_api {
namespace {

static_assert(int{AREAL_VALUE_STAT_COUNT} == int{loss::kValueStatCount}, "a longer array breaks programs: add a field");

double off_or(double value, const char* op, const char* name) {
  AREAL_CHECK(value >= 0, op, ": expected ", name, " > 0, or 0 for none, got ", value);
  return value == 0 ? std::numeric_limits<double>::infinity() : value;
}

template <class Real>
loss::ValueLossArgs<Real> make_value_loss(const areal_value_loss_args& args, Memory memory, double* scratch,
                                          const char* op) {
  const int64_t tokens = args.tokens;
  AREAL_CHECK(args.clip == 0 || args.old_values != nullptr || tokens == 0, op,
              ": expected old_values with clip set, got NULL");
  loss::ValueLossArgs<Real> native{};
  native.tokens = tokens;
  native.clip = off_or(args.clip, op, "clip");
  native.huber_delta = off_or(args.huber_delta, op, "huber_delta");
  native.values = real_array<Real>(args.values, tokens, op, "values");
  native.old_values = static_cast<const Real*>(args.old_values);
  native.returns = real_array<Real>(args.returns, tokens, op, "returns");
  native.loss_mask = mask_in(memory, required(args.loss_mask, tokens, op, "loss_mask"), tokens, op);
  native.normalizer = args.normalizer;
  native.loss = real_array<Real>(args.loss, 1, op, "loss");
  native.stats = required(args.stats, 1, op, "stats");
  native.grad = real_array<Real>(args.grad_values, tokens, op, "grad_values");
  native.scale = real_array<Real>(args.scale, 1, op, "scale");
  native.scratch = scratch;
  return native;
}

}  // namespace
}  // namespace areal::c_api

using namespace areal::c_api;

int64_t areal_value_loss_scratch_bytes(int64_t tokens) {
  namespace loss = areal::loss;
  return loss::kValueStatCount * loss::value_block_count(tokens < 0 ? 0 : tokens) * int64_t{sizeof(double)};
}

areal_status areal_value_loss_cpu(const areal_value_loss_args* args) {
  constexpr const char* op = "areal_value_loss_cpu";
  return guarded([&] {
    const auto given = read_struct(args, op, "args");
    std::vector<double> own;
    double* const scratch =
        scratch_of(given, areal_value_loss_scratch_bytes(checked_count(given.tokens, op, "tokens")), &own, op);
    with_real(given.dtype, op, [&]<class Real>(Real) {
      areal::loss::value_loss_cpu(make_value_loss<Real>(given, Memory::kHost, scratch, op));
    });
  });
}

areal_status areal_value_loss_cuda(const areal_value_loss_args* args, void* stream) {
  constexpr const char* op = "areal_value_loss_cuda";
  return guarded_cuda(
      [&] {
        const auto given = read_struct(args, op, "args");
        double* const scratch =
            scratch_of(given, areal_value_loss_scratch_bytes(checked_count(given.tokens, op, "tokens")), nullptr, op);
        with_real(given.dtype, op, [&]<class Real>(Real) {
          areal::cuda::value_loss(make_value_loss<Real>(given, Memory::kDevice, scratch, op), stream);
        });
      },
      op);
}
