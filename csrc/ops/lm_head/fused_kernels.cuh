// Logits to gradients through the policy loss, on sm_90. A cluster of blocks holds a row in its shared memory, a slice
// a block, so the row is read once and written once. Rows pass through each block as a pipeline of `stages` slices:
//
//   loader   (a warp)   finds the cluster's next row to compute and starts the copy of its slice
//   workers  (8 warps)  add up row i, then write the gradient of row i - lag, whose plan has been ready by then
//   merger   (a warp)   merges the workers' sums, then those of the cluster's blocks, and plans the row's gradient
//
// Nobody waits for more than the data it needs: a stage's mbarriers say that its slice is there (full), that the
// workers have summed it (summed), that all blocks have sent their sums (joined), that the plan is there (planned), and
// that the slice is free again (empty). Rows that need no pipeline, masked ones, are filled by the workers first.
#pragma once

#include "cuda/bulk_copy.cuh"
#include "cuda/cluster.cuh"
#include "ops/lm_head/fused_slice.cuh"
#include "ops/loss/loss_math.h"

namespace areal::cuda {
namespace {

using FusedLane = loss::ScalarLane<float>;

constexpr int kWorkerWarps = kWorkers / kWarp;
constexpr int kFusedThreads = kWorkers + 2 * kWarp;  // then the loader and the merger
constexpr int kMaxStages = 8;
constexpr int kMinStages = 3;
constexpr int kMaxLag = 2;
constexpr int kMaxClusterBlocks = 8;

// Rows of a pipeline and how far writing is behind summing; stages > lag, or the workers would wait for themselves.
struct FusedShape {
  int stages;
  int lag;
  int slice_bytes;  // room for a slice; a multiple of 16
};

// What a block contributes to a row.
struct alignas(16) ClusterPart {
  Partial<float> partial;
  float label_logit;  // from the block that holds it
};

template <class T>
struct Stage {
  Mbarrier full, summed, joined, planned, empty;
  Slice<T> slice;
  Partial<float> warps[kWorkerWarps];
  ClusterPart parts[kMaxClusterBlocks];  // by rank
  RowPlan plan;
};
static_assert(sizeof(Stage<float>) % kBulkUnit == 0);  // the slices after the stages are aligned for bulk copies

// The shared memory of a block: the stages, then room for a slice for each.
template <class T>
struct Pipeline {
  Stage<T>* stages;
  FusedShape shape;

  __device__ __forceinline__ T* tile(int stage) const {
    return reinterpret_cast<T*>(reinterpret_cast<unsigned char*>(stages + shape.stages) + stage * shape.slice_bytes);
  }
};

// A place in the ring of stages. parity is that of the barriers' phase in this use of the stage.
struct Turn {
  int stage = 0;
  unsigned parity = 0;

  __device__ __forceinline__ void advance(int stages) {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

__device__ __forceinline__ void store_results(const LogprobOutput<float>& output, int64_t row,
                                              const logprob::RowResult<float>& result, float row_max) {
  output.logprobs[row] = result.logprob;
  output.entropy[row] = result.entropy;
  output.lse[row] = result.lse;
  if (output.row_max != nullptr) output.row_max[row] = row_max;
  if (output.log_sum != nullptr) output.log_sum[row] = result.log_sum;
}

// All rows of the cluster that are not computed: masked ones become 0, those out of range NaN.
template <class T>
__device__ __forceinline__ void fill_other_rows(const FusedLossArgs& args, const ClusterRows& rows) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int64_t row = rows.first; row < args.input.rows; row += kWarp * rows.stride) {
    for (unsigned left = rows.select(row, false); left != 0; left &= left - 1) {
      const int64_t other = rows.at(row, __ffs(static_cast<int>(left)) - 1);
      const bool live = args.input.live(other);
      const float value = live ? NAN : 0.0f;
      fill_row<T>(args.input, other, value);
      if (threadIdx.x >= kWarp || cluster_rank() != 0 || rows.at(row, lane) != other) continue;
      store_results(args.output, other, {value, value, value, value}, value);
      if (live) {
        atomicMax(reinterpret_cast<unsigned long long*>(args.bad_row), static_cast<unsigned long long>(other + 1));
      }
    }
  }
}

template <class T>
__device__ __forceinline__ void work(const FusedLossArgs& args, const Pipeline<T>& pipeline, const ClusterRows& rows) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  fill_other_rows<T>(args, rows);
  Turn summing, writing;
  bool more = true;
  for (int ahead = 0; more || ahead > 0;) {  // rows summed whose gradient is not written
    if (more) {
      Stage<T>& stage = pipeline.stages[summing.stage];
      mbarrier_wait(&stage.full, summing.parity);
      more = stage.slice.row != nullptr;
      if (more) {
        const float scale = stage.slice.scale;
        const auto merge = [scale](const Partial<float>& a, const Partial<float>& b) {
          return logprob::merge(a, b, scale);
        };
        const Partial<float> part = warp_reduce(sum_slice(stage.slice, pipeline.tile(summing.stage)), merge);
        if (lane == 0) {
          stage.warps[warp] = part;
          mbarrier_arrive(&stage.summed);
        }
        summing.advance(pipeline.shape.stages);
        ++ahead;
      }
    }
    if (ahead > pipeline.shape.lag || (!more && ahead > 0)) {
      Stage<T>& stage = pipeline.stages[writing.stage];
      mbarrier_wait(&stage.planned, writing.parity);
      write_gradient(stage.slice, pipeline.tile(writing.stage), stage.plan);
      __syncwarp();  // all lanes have read the stage
      if (lane == 0) mbarrier_arrive(&stage.empty);
      writing.advance(pipeline.shape.stages);
      --ahead;
    }
  }
}

// What the loss needs to know of a token besides its logprob and entropy.
__device__ __forceinline__ loss::TokenInputs<FusedLane> load_token(const loss::PolicyLossArgs<float>& args,
                                                                   int64_t row) {
  const auto load = [row](const float* values) { return values != nullptr ? values[row] : 0.0f; };
  loss::TokenInputs<FusedLane> token = {};
  token.live = args.loss_mask[row];
  token.keep = args.keep_mask == nullptr || args.keep_mask[row];
  token.proximal = load(args.proximal_logprobs);
  token.advantage = load(args.advantages);
  token.behavior = load(args.behavior_logprobs);
  token.reference = load(args.ref_logprobs);
  token.teacher = load(args.teacher_logprobs);
  return token;
}

// Derivatives of the token's term, which no other token takes part in; 0 where the loss masks it.
__device__ __forceinline__ loss::TokenLoss<float> derive_token(const loss::PolicyLossParams& params,
                                                               const loss::LossConstants<FusedLane>& constants,
                                                               const loss::TokenInputs<FusedLane>& token) {
  constexpr loss::SequenceTerms<FusedLane> kAlone = {0.0f, 0.0f, 0.0f, 1.0f};
  loss::TokenLoss<float> result = {};
  if (!token.live) return result;
  loss::NoStatistics<float> none;
  loss::with_variant(params, [&](auto variant) {
    result = loss::token_loss<decltype(variant), FusedLane>(constants, token, kAlone, none);
  });
  return result;
}

// What the merger needs of the loss for every row.
struct LossTerms {
  loss::LossConstants<FusedLane> constants;
  float scale;
};

// The outputs of a row and the plan of its gradient, from its sums; for one thread.
__device__ __forceinline__ logprob::RowResult<float> plan_row(const FusedLossArgs& args, const LossTerms& terms,
                                                              loss::TokenInputs<FusedLane> token, float temperature,
                                                              const ClusterPart& total, RowPlan* plan) {
  const auto result = logprob::finish_row(total.partial, total.label_logit, temperature);
  token.logprob = result.logprob;
  token.entropy = terms.constants.has_entropy ? result.entropy : 0.0f;
  const loss::TokenLoss<float> derived = derive_token(args.loss.params, terms.constants, token);
  const logprob::Upstream<float> up = {terms.scale * derived.grad_logprob, terms.scale * derived.grad_entropy, 0.0f};
  plan->gradient = logprob::row_gradient(up, total.partial.max, result.log_sum, result.entropy, temperature);
  plan->label_gradient = logprob::label_gradient(up, result.logprob, result.entropy, temperature);
  return result;
}

// Lane 0 puts a row into the stage, once that is free, and starts its copy. A slice without a row ends the pipeline.
template <class T>
__device__ __forceinline__ void load_slice(const Slice<T>& slice, const Pipeline<T>& pipeline, Turn& turn) {
  Stage<T>& stage = pipeline.stages[turn.stage];
  mbarrier_wait(&stage.empty, turn.parity ^ 1);  // in the first round nothing has to be waited for
  stage.slice = slice;
  const unsigned bytes = static_cast<unsigned>(slice.vectors) * kBulkUnit;
  mbarrier_arrive_expect(&stage.full, bytes);
  if (bytes > 0) bulk_load(pipeline.tile(turn.stage), slice.row + slice.offset, bytes, &stage.full);
  turn.advance(pipeline.shape.stages);
}

template <class T>
__device__ __forceinline__ void load(const FusedLossArgs& args, const Pipeline<T>& pipeline, const ClusterRows& rows) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  Turn turn;
  for (int64_t row = rows.first; row < args.input.rows; row += kWarp * rows.stride) {
    const unsigned selected = rows.select(row, true);
    for (unsigned left = lane == 0 ? selected : 0; left != 0; left &= left - 1) {
      load_slice(slice_of<T>(args.input, rows.at(row, __ffs(static_cast<int>(left)) - 1)), pipeline, turn);
    }
    __syncwarp();
  }
  if (lane == 0) load_slice(Slice<T>{}, pipeline, turn);
}

// The merger's part for one row: the sums of the block's workers, then of the cluster, then the plan.
template <class T>
__device__ __forceinline__ void merge_and_plan(const FusedLossArgs& args, const LossTerms& terms, Stage<T>& stage,
                                               unsigned parity, const T* tile) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const Slice<T>& slice = stage.slice;
  const loss::TokenInputs<FusedLane> token = load_token(args.loss, slice.index);  // on its way while the workers sum
  const float scale = slice.scale;
  const auto merge = [scale](const Partial<float>& a, const Partial<float>& b) { return logprob::merge(a, b, scale); };
  const Partial<float> nothing = logprob::empty_partial<float>();

  float label_logit = 0.0f;
  if (slice.label_rank == cluster_rank()) {
    const int64_t in_tile = slice.label - slice.offset;
    const bool inside = in_tile >= 0 && in_tile < int64_t{slice.vectors} * kVectorLength<T>;
    label_logit = to_float(inside ? tile[in_tile] : slice.row[slice.label]);
  }
  mbarrier_wait(&stage.summed, parity);
  const Partial<float> own = warp_reduce(lane < kWorkerWarps ? stage.warps[lane] : nothing, merge);
  cluster_publish(ClusterPart{own, label_logit}, stage.parts);
  if (lane < static_cast<int>(cluster_size())) mbarrier_arrive_at(&stage.joined, static_cast<unsigned>(lane));

  mbarrier_wait(&stage.joined, parity);
  const auto merge_parts = [&merge](const ClusterPart& a, const ClusterPart& b) {
    return ClusterPart{merge(a.partial, b.partial), 0.0f};
  };
  ClusterPart total = cluster_collect(stage.parts, ClusterPart{nothing, 0.0f}, merge_parts);
  __syncwarp();  // all lanes have read what others may write again once the workers have the plan
  if (lane == 0) {
    total.label_logit = stage.parts[slice.label_rank].label_logit;
    const int64_t row = slice.index;
    const auto result = plan_row(args, terms, token, slice.temperature, total, &stage.plan);
    mbarrier_arrive(&stage.planned);
    if (cluster_rank() == 0) store_results(args.output, row, result, total.partial.max);
  }
}

template <class T>
__device__ __forceinline__ void merge_rows(const FusedLossArgs& args, const Pipeline<T>& pipeline) {
  const LossTerms terms = {loss::loss_constants<FusedLane>(args.loss), *args.scale};
  for (Turn turn;; turn.advance(pipeline.shape.stages)) {
    Stage<T>& stage = pipeline.stages[turn.stage];
    mbarrier_wait(&stage.full, turn.parity);
    if (stage.slice.row == nullptr) return;
    merge_and_plan(args, terms, stage, turn.parity, static_cast<const T*>(pipeline.tile(turn.stage)));
  }
}

template <class T>
__global__ void __launch_bounds__(kFusedThreads, 2)
    fused_loss_kernel(const FusedLossArgs args, const FusedShape shape) {
  AREAL_DYNAMIC_SHARED(Stage<T>, stages);
  if (threadIdx.x == 0) {
    for (int s = 0; s < shape.stages; ++s) {
      mbarrier_init(&stages[s].full, 1);
      mbarrier_init(&stages[s].summed, kWorkerWarps);
      mbarrier_init(&stages[s].joined, cluster_size());
      mbarrier_init(&stages[s].planned, 1);
      mbarrier_init(&stages[s].empty, kWorkerWarps);
    }
    mbarrier_init_fence();
  }
  cluster_arrive();  // no block sends to another one's stages before they are ready
  cluster_wait();
  const Pipeline<T> pipeline = {stages, shape};
  const ClusterRows rows = {args.input, cluster_index(), cluster_count()};
  if (threadIdx.x < kWorkers) {
    work(args, pipeline, rows);
  } else if (threadIdx.x < kWorkers + kWarp) {
    load(args, pipeline, rows);
  } else {
    merge_rows(args, pipeline);
  }
}

}  // namespace
}  // namespace areal::cuda
