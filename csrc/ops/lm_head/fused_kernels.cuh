// Logits to gradients through the policy loss, on sm_90. A cluster of blocks holds a row in its shared memory, a slice
// a block, so the row is read once and written once. Rows pass through each block as a pipeline of `stages` slices:
//
//   control warp  loads row i + stages - 1 - lag | merges row i's sums over the cluster, derives its gradient's plan
//   workers       add up row i                   | write the gradient of row i - lag, whose plan has been ready by then
//
// Nobody waits for more than the data it needs: a stage's mbarriers say that its slice has come (full), that the
// workers have summed it (summed), that all blocks of the cluster have sent their sums (joined), that the plan is there
// (planned), and that the slice is free again (empty). A cluster goes on to its next live row; rows that are not live
// need no pipeline, the workers fill them first.
#pragma once

#include "cuda/bulk_copy.cuh"
#include "cuda/cluster.cuh"
#include "cuda/vec.cuh"
#include "ops/lm_head/fused.h"
#include "ops/logprob/logprob_device.cuh"
#include "ops/loss/loss_math.h"

namespace areal::cuda {
namespace {

using logprob::Partial;
using logprob::RowGradient;
using FusedInput = LogprobInput<float>;
using FusedLane = loss::ScalarLane<float>;

constexpr int kWorkers = 256;
constexpr int kWorkerWarps = kWorkers / kWarp;
constexpr int kFusedThreads = kWorkers + kWarp;  // the last warp is the control warp
constexpr int kFusedUnroll = 2;                  // 16-byte vectors a thread holds at a time
constexpr int kMaxStages = 8;
constexpr int kMinStages = 3;
constexpr int kMaxLag = 2;
constexpr int kMaxClusterBlocks = 8;

// What a block knows of its slice of a row.
struct alignas(16) ClusterPart {
  Partial<float> partial;
  float label_logit;  // in the block that holds it
};

struct RowPlan {
  RowGradient<float> gradient;
  float label_gradient;
};

struct Stage {
  Mbarrier full, summed, joined, planned, empty;
  Partial<float> warps[kWorkerWarps];
  alignas(16) ClusterPart parts[kMaxClusterBlocks];  // of the blocks of the cluster, by rank
  RowPlan plan;
};

struct FusedShape {
  int stages;
  int lag;
  int slice_bytes;  // room for a slice; a multiple of 16
};

// Position in the ring of stages. parity is that of the barriers' phase in this use of the stage.
struct Turn {
  int stage = 0;
  unsigned parity = 0;

  __device__ __forceinline__ void advance(int stages) {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

// The rows of this cluster: its index, and from there on in strides of the number of clusters.
struct ClusterRows {
  const FusedInput& input;
  int64_t first, stride;

  // Has a gradient to compute: live, and neither label nor temperature out of range.
  __device__ __forceinline__ bool in_range(int64_t row) const {
    const int64_t label = input.labels[row];
    const float temperature = input.row_temperature(row);
    return label >= 0 && label < input.vocab && temperature >= 1.17549435e-38f && temperature < INFINITY;
  }
  // The first row to compute from `row` on, or one past the end.
  __device__ __forceinline__ int64_t next(int64_t row) const {
    while (row < input.rows && !(input.live(row) && in_range(row))) row += stride;
    return row;
  }
};

// The part of a row that this block holds: vectors that begin `offset` elements into the row; the first block also
// takes the elements before the first vector, the last block those after the last one (`ends`, fewer than a vector).
template <class T>
struct Slice {
  T* row;
  int64_t offset;
  int vectors;
  int head;
  int tail;
  int64_t tail_offset;
  unsigned owner;  // rank of the block that holds the column given to slice_of()

  __device__ __forceinline__ bool has_ends(int thread) const {
    return (thread == kWorkers - 1 && head > 0) || (thread == kWorkers - 2 && tail > 0);
  }
  __device__ __forceinline__ int64_t ends_offset(int thread) const { return thread == kWorkers - 1 ? 0 : tail_offset; }
  __device__ __forceinline__ int ends_count(int thread) const { return thread == kWorkers - 1 ? head : tail; }
};

template <class T>
__device__ __forceinline__ Slice<T> slice_of(const FusedInput& input, int64_t row, int64_t column) {
  constexpr int kLength = kVectorLength<T>;
  T* x = static_cast<T*>(const_cast<void*>(input.logits)) + row * input.row_stride;
  const RowCut cut = cut_row(x, input.vocab);
  const int64_t blocks = cluster_size(), rank = cluster_rank();
  const int64_t each = max((cut.vectors + blocks - 1) / blocks, int64_t{1});
  const int64_t begin = min(rank * each, cut.vectors), end = min(begin + each, cut.vectors);
  const int64_t tail_offset = cut.head + cut.vectors * kLength;
  unsigned owner = 0;
  if (column >= tail_offset) {
    owner = static_cast<unsigned>(blocks - 1);
  } else if (column >= cut.head) {
    owner = static_cast<unsigned>((column - cut.head) / kLength / each);
  }
  return {x,
          cut.head + begin * kLength,
          static_cast<int>(end - begin),
          rank == 0 ? cut.head : 0,
          rank == blocks - 1 ? cut.tail : 0,
          tail_offset,
          owner};
}

// A worker's sums over its elements of a slice; `full` says when the tile is there.
template <class T>
__device__ __forceinline__ Partial<float> sum_slice(const Slice<T>& slice, const T* tile, Mbarrier* full,
                                                    unsigned parity, float scale) {
  constexpr int kLength = kVectorLength<T>;
  const int thread = static_cast<int>(threadIdx.x);
  Partial<float> part = logprob::empty_partial<float>();
  if (slice.has_ends(thread)) {  // of global memory, while the tile is on its way
    float x[1][kLength];
    load_part(slice.row + slice.ends_offset(thread), slice.ends_count(thread), -INFINITY, x[0]);
    logprob::accumulate(part, x, scale);
  }
  mbarrier_wait(full, parity);
  int i = thread;
  for (; i + (kFusedUnroll - 1) * kWorkers < slice.vectors; i += kFusedUnroll * kWorkers) {
    float x[kFusedUnroll][kLength];
#pragma unroll
    for (int u = 0; u < kFusedUnroll; ++u) load_vector<false>(tile + (i + u * kWorkers) * kLength, x[u]);
    logprob::accumulate(part, x, scale);
  }
  for (; i < slice.vectors; i += kWorkers) {
    float x[1][kLength];
    load_vector<false>(tile + i * kLength, x[0]);
    logprob::accumulate(part, x, scale);
  }
  return part;
}

// Replaces the label's element, where it lies in the vector at `offset`.
template <int kLength>
__device__ __forceinline__ void patch_label(float (&x)[kLength], int64_t offset, int64_t label, float value) {
#pragma unroll
  for (int k = 0; k < kLength; ++k) x[k] = offset + k == label ? value : x[k];
}

// A worker's elements of the slice's gradient, from the tile to global memory.
template <class T>
__device__ __forceinline__ void write_gradient(const Slice<T>& slice, const T* tile, const RowPlan& plan,
                                               int64_t label) {
  constexpr int kLength = kVectorLength<T>;
  const int thread = static_cast<int>(threadIdx.x);
  const RowGradient<float> math = plan.gradient;
  float x[kLength] = {};
  if (slice.has_ends(thread)) {
    const int64_t offset = slice.ends_offset(thread);
    const int count = slice.ends_count(thread);
    if (!math.zero) {
      load_part(slice.row + offset, count, 0.0f, x);
      logprob::to_gradient(x, math);
      patch_label(x, offset, label, plan.label_gradient);
    }
    store_part(slice.row + offset, count, x);
  }
  for (int i = thread; i < slice.vectors; i += kWorkers) {
    const int64_t offset = slice.offset + int64_t{i} * kLength;
    if (!math.zero) {
      load_vector<false>(tile + i * kLength, x);
      logprob::to_gradient(x, math);
      patch_label(x, offset, label, plan.label_gradient);
    } else {
      for (float& value : x) value = 0.0f;
    }
    store_vector(slice.row + offset, x);
  }
}

// A worker's elements of a row that is not computed.
template <class T>
__device__ __forceinline__ void fill_row(const FusedInput& input, int64_t row, float value) {
  constexpr int kLength = kVectorLength<T>;
  const int thread = static_cast<int>(threadIdx.x);
  const Slice<T> slice = slice_of<T>(input, row, 0);
  float x[kLength];
#pragma unroll
  for (int k = 0; k < kLength; ++k) x[k] = value;
  if (slice.has_ends(thread)) store_part(slice.row + slice.ends_offset(thread), slice.ends_count(thread), x);
  for (int i = thread; i < slice.vectors; i += kWorkers)
    store_vector(slice.row + slice.offset + int64_t{i} * kLength, x);
}

__device__ __forceinline__ void store_results(const LogprobOutput<float>& output, int64_t row,
                                              const logprob::RowResult<float>& result, float row_max) {
  output.logprobs[row] = result.logprob;
  output.entropy[row] = result.entropy;
  output.lse[row] = result.lse;
  if (output.row_max != nullptr) output.row_max[row] = row_max;
  if (output.log_sum != nullptr) output.log_sum[row] = result.log_sum;
}

// All rows of the cluster that next() passes over: masked ones become 0, those out of range NaN.
template <class T>
__device__ __forceinline__ void fill_other_rows(const FusedLossArgs& args, const ClusterRows& rows) {
  for (int64_t row = rows.first; row < args.input.rows; row += rows.stride) {
    const bool live = args.input.live(row);
    if (live && rows.in_range(row)) continue;
    const float value = live ? NAN : 0.0f;
    fill_row<T>(args.input, row, value);
    if (threadIdx.x != 0 || cluster_rank() != 0) continue;
    store_results(args.output, row, {value, value, value, value}, value);
    if (live) {
      atomicMax(reinterpret_cast<unsigned long long*>(args.bad_row), static_cast<unsigned long long>(row + 1));
    }
  }
}

// The shared memory of a block: the stages, then a tile for each.
template <class T>
struct FusedMemory {
  Stage* stages;
  unsigned char* tiles;
  int tile_bytes;

  __device__ __forceinline__ T* tile(int stage) const { return reinterpret_cast<T*>(tiles + stage * tile_bytes); }
};

template <class T>
__device__ __forceinline__ void work(const FusedLossArgs& args, const FusedShape& shape, const ClusterRows& rows,
                                     const FusedMemory<T>& memory) {
  const FusedInput& input = args.input;
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  fill_other_rows<T>(args, rows);
  Turn summing, writing;
  int summed = 0;  // rows ahead of the one to write
  int64_t ahead = rows.next(rows.first), behind = ahead;
  while (behind < input.rows) {
    if (ahead < input.rows) {
      Stage& stage = memory.stages[summing.stage];
      const float scale = static_cast<float>(logprob::kLog2E) / input.row_temperature(ahead);
      const auto merge = [scale](const Partial<float>& a, const Partial<float>& b) {
        return logprob::merge(a, b, scale);
      };
      const Slice<T> slice = slice_of<T>(input, ahead, 0);
      const Partial<float> part =
          warp_reduce(sum_slice(slice, memory.tile(summing.stage), &stage.full, summing.parity, scale), merge);
      if (lane == 0) {
        stage.warps[warp] = part;
        mbarrier_arrive(&stage.summed);
      }
      summing.advance(shape.stages);
      ++summed;
      ahead = rows.next(ahead + rows.stride);
    }
    if (summed > shape.lag || ahead >= input.rows) {
      Stage& stage = memory.stages[writing.stage];
      mbarrier_wait(&stage.planned, writing.parity);
      const Slice<T> slice = slice_of<T>(input, behind, 0);
      write_gradient(slice, memory.tile(writing.stage), stage.plan, input.labels[behind]);
      __syncwarp();  // all lanes have read the tile and the plan
      if (lane == 0) mbarrier_arrive(&stage.empty);
      writing.advance(shape.stages);
      --summed;
      behind = rows.next(behind + rows.stride);
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

// The plan of a row's gradient from its sums, and its outputs; for one thread.
template <class T>
__device__ __forceinline__ void plan_row(const FusedLossArgs& args, const loss::LossConstants<FusedLane>& constants,
                                         loss::TokenInputs<FusedLane> token, int64_t row, const ClusterPart& total,
                                         RowPlan* plan) {
  const float temperature = args.input.row_temperature(row);
  const auto result = logprob::finish_row(total.partial, total.label_logit, temperature);
  token.logprob = result.logprob;
  token.entropy = constants.has_entropy ? result.entropy : 0.0f;
  const loss::TokenLoss<float> derived = derive_token(args.loss.params, constants, token);
  const float scale = *args.scale;
  const logprob::Upstream<float> up = {scale * derived.grad_logprob, scale * derived.grad_entropy, 0.0f};
  plan->gradient = logprob::row_gradient(up, total.partial.max, result.log_sum, result.entropy, temperature);
  plan->label_gradient = logprob::label_gradient(up, result.logprob, result.entropy, temperature);
  if (cluster_rank() == 0) store_results(args.output, row, result, total.partial.max);
}

// The control warp's part for one row: the sums of the block's workers, then of the cluster, then the plan.
template <class T>
__device__ __forceinline__ void merge_and_plan(const FusedLossArgs& args,
                                               const loss::LossConstants<FusedLane>& constants, int64_t row,
                                               Stage& stage, unsigned parity, const T* tile) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t label = args.input.labels[row];
  const float scale = static_cast<float>(logprob::kLog2E) / args.input.row_temperature(row);
  const Slice<T> slice = slice_of<T>(args.input, row, label);
  const loss::TokenInputs<FusedLane> token = load_token(args.loss, row);  // on its way while the workers add up
  const auto merge = [scale](const Partial<float>& a, const Partial<float>& b) { return logprob::merge(a, b, scale); };
  const Partial<float> nothing = logprob::empty_partial<float>();

  mbarrier_wait(&stage.full, parity);
  mbarrier_wait(&stage.summed, parity);
  ClusterPart part = {warp_reduce(lane < kWorkerWarps ? stage.warps[lane] : nothing, merge), 0.0f};
  if (slice.owner == cluster_rank()) {
    const int64_t in_tile = label - slice.offset;
    const bool inside = in_tile >= 0 && in_tile < int64_t{slice.vectors} * kVectorLength<T>;
    part.label_logit = to_float(inside ? tile[in_tile] : slice.row[label]);
  }
  cluster_publish(part, stage.parts);
  if (lane < static_cast<int>(cluster_size())) mbarrier_arrive_at(&stage.joined, static_cast<unsigned>(lane));

  mbarrier_wait(&stage.joined, parity);
  const auto merge_parts = [&merge](const ClusterPart& a, const ClusterPart& b) {
    return ClusterPart{merge(a.partial, b.partial), 0.0f};
  };
  ClusterPart total = cluster_collect(stage.parts, {nothing, 0.0f}, merge_parts);
  __syncwarp();  // all lanes have read what the workers may write again once they have the plan
  if (lane == 0) {
    total.label_logit = stage.parts[slice.owner].label_logit;
    plan_row<T>(args, constants, token, row, total, &stage.plan);
    mbarrier_arrive(&stage.planned);
  }
}

template <class T>
__device__ __forceinline__ void load_slice(const FusedInput& input, int64_t row, Stage& stage, T* tile) {
  const Slice<T> slice = slice_of<T>(input, row, 0);
  const unsigned bytes = static_cast<unsigned>(slice.vectors) * 16u;
  mbarrier_arrive_expect(&stage.full, bytes);
  if (bytes > 0) bulk_load(tile, slice.row + slice.offset, bytes, &stage.full);
}

template <class T>
__device__ __forceinline__ void control(const FusedLossArgs& args, const FusedShape& shape, const ClusterRows& rows,
                                        const FusedMemory<T>& memory) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const auto constants = loss::loss_constants<FusedLane>(args.loss);
  Turn loading, merging;
  int64_t to_load = rows.next(rows.first), row = to_load;
  const auto load_next = [&] {
    if (lane == 0) load_slice(args.input, to_load, memory.stages[loading.stage], memory.tile(loading.stage));
    loading.advance(shape.stages);
    to_load = rows.next(to_load + rows.stride);
  };
  for (int i = 0; i < shape.stages && to_load < args.input.rows; ++i) load_next();
  for (int merged = 0; row < args.input.rows; ++merged, row = rows.next(row + rows.stride)) {
    if (merged > shape.lag && to_load < args.input.rows) {
      mbarrier_wait(&memory.stages[loading.stage].empty, loading.parity ^ 1);
      load_next();
    }
    merge_and_plan(args, constants, row, memory.stages[merging.stage], merging.parity,
                   static_cast<const T*>(memory.tile(merging.stage)));
    merging.advance(shape.stages);
  }
}

template <class T>
__global__ void __launch_bounds__(kFusedThreads, 2)
    fused_loss_kernel(const FusedLossArgs args, const FusedShape shape) {
  AREAL_DYNAMIC_SHARED(Stage, stages);
  const FusedMemory<T> memory = {stages, reinterpret_cast<unsigned char*>(stages + shape.stages), shape.slice_bytes};
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
  const ClusterRows rows = {args.input, cluster_index(), cluster_count()};
  if (threadIdx.x < kWorkers) {
    work(args, shape, rows, memory);
  } else {
    control(args, shape, rows, memory);
  }
}

}  // namespace
}  // namespace areal::cuda
