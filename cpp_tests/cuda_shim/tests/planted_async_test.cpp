// Kernels with one planted bug each in mbarriers and bulk copies, which every build must find; what only the race build
// or AddressSanitizer sees is tested there alone.
#include <cmath>
#include <vector>

#include "cuda/bulk_copy.cuh"
#include "cuda/launch.cuh"
#include "cuda_shim/orders.h"
#include "cuda_shim/tests/finding.h"

namespace areal::cuda {
namespace {

using cuda_shim::finding_of;
using cuda_shim::Variant;
using cuda_shim::variant;
using testing::AllOf;
using testing::AnyOf;
using testing::ContainsRegex;
using testing::HasSubstr;

template <class Body, class Matcher>
void expect_in_every_order(Body body, Matcher matcher) {
  cuda_shim::for_each_order([&] { EXPECT_THAT(finding_of(body), matcher); });
}

constexpr unsigned kFloats = 64, kBytes = kFloats * sizeof(float);

struct Tile {
  alignas(16) float values[kFloats];
  Mbarrier full;
};

// One load of a tile by thread 0, read by all 64, right but for what the template plants.
enum class Plant {
  kNothing,
  kNoWait,
  kWrongParity,
  kExpectTooMuch,
  kExpectTooLittle,
  kTooFewBytes,
  kOddBytes,
  kOddSource,
  kNoInitFence,
  kNoInit,
  kArrivesTwice,
  kExits,
};

template <Plant kPlant>
__global__ void load_kernel(const float* in, float* out) {
  AREAL_DYNAMIC_SHARED(Tile, tile);
  const unsigned thread = threadIdx.x;
  if (thread == 0 && kPlant != Plant::kNoInit) {
    mbarrier_init(&tile->full, 1);
    if (kPlant != Plant::kNoInitFence) mbarrier_init_fence();
  }
  __syncthreads();
  if (thread == 0) {
    unsigned expected = kBytes, bytes = kBytes;
    if (kPlant == Plant::kExpectTooMuch) expected += 16;
    if (kPlant == Plant::kExpectTooLittle) expected -= 16;
    if (kPlant == Plant::kTooFewBytes) bytes -= 16;
    if (kPlant == Plant::kOddBytes) bytes -= 4;
    mbarrier_arrive_expect(&tile->full, expected);
    bulk_load(tile->values, in + (kPlant == Plant::kOddSource ? 1 : 0), bytes, &tile->full);
    if (kPlant == Plant::kArrivesTwice) mbarrier_arrive(&tile->full);
  }
  if (kPlant == Plant::kExits) return;
  if (kPlant != Plant::kNoWait) mbarrier_wait(&tile->full, kPlant == Plant::kWrongParity ? 1 : 0);
  out[thread] = tile->values[thread];
}

struct Loaded {
  std::vector<float> out;
  std::string finding;
};

template <Plant kPlant>
Loaded run_load() {
  struct alignas(16) Row {
    float values[kFloats + 4];
  } in;
  for (unsigned i = 0; i < kFloats + 4; ++i) in.values[i] = static_cast<float>(i);
  Loaded result{std::vector<float>(kFloats, -1.0f), ""};
  result.finding = finding_of(
      [&] { AREAL_LAUNCH(load_kernel<kPlant>, 1, kFloats, sizeof(Tile), nullptr, in.values, result.out.data()); });
  return result;
}

template <Plant kPlant, class Matcher>
void expect_load_finding(Matcher matcher) {
  cuda_shim::for_each_order([&] { EXPECT_THAT(run_load<kPlant>().finding, matcher); });
}

TEST(PlantedAsync, NothingIsPlanted) {
  cuda_shim::for_each_order([&] {
    const Loaded loaded = run_load<Plant::kNothing>();
    EXPECT_EQ(loaded.finding, "");
    for (unsigned i = 0; i < kFloats; ++i) EXPECT_EQ(loaded.out[i], static_cast<float>(i));
  });
}

// The plain build shows NaN, as long as the copy is late; the others say what happened.
template <Plant kPlant>
void expect_premature_read() {
  const cuda_shim::ScopedOrder late(cuda_shim::Order::kForward);
  if (variant() == Variant::kAsan) {
    EXPECT_DEATH(run_load<kPlant>(), "use-after-poison");
  } else if (variant() == Variant::kRace) {
    EXPECT_THAT(run_load<kPlant>().finding,
                AllOf(ContainsRegex("write-read race in shared memory .dynamic.: write by a bulk copy at bulk_copy.cuh:"
                                    "[0-9]+ < planted_async_test.cpp:"),
                      HasSubstr("nothing orders them")));
  } else {
    EXPECT_TRUE(std::isnan(run_load<kPlant>().out[5]));
  }
}

TEST(PlantedAsyncDeathTest, ATileIsReadWithoutWaiting) { expect_premature_read<Plant::kNoWait>(); }
TEST(PlantedAsyncDeathTest, ATileIsReadAfterWaitingForTheWrongParity) { expect_premature_read<Plant::kWrongParity>(); }

TEST(PlantedAsync, ReadersRaceWithACopyInEveryOrder) {
  if (variant() != Variant::kRace) GTEST_SKIP();
  expect_load_finding<Plant::kNoWait>(ContainsRegex("race in shared memory [^;]*by a bulk copy"));
  expect_load_finding<Plant::kWrongParity>(ContainsRegex("race in shared memory [^;]*by a bulk copy"));
}

TEST(PlantedAsync, APhaseExpectsMoreBytesThanCome) {
  expect_load_finding<Plant::kExpectTooMuch>(AllOf(HasSubstr("deadlock in kernel 'load_kernel<kPlant>'"),
                                                   HasSubstr("wait at an mbarrier at "),
                                                   HasSubstr("0 arrivals and 16 bytes never came in phase 0")));
  expect_load_finding<Plant::kTooFewBytes>(HasSubstr("0 arrivals and 16 bytes never came"));
}

TEST(PlantedAsync, APhaseExpectsFewerBytesThanCome) {
  expect_load_finding<Plant::kExpectTooLittle>(
      AllOf(HasSubstr("brings 16 bytes more than its mbarrier was told to expect"),
            HasSubstr("planted_async_test.cpp:"), HasSubstr("thread (0,0,0)")));
}

TEST(PlantedAsync, ABulkCopyIsMisaligned) {
  expect_load_finding<Plant::kOddBytes>(HasSubstr("expected the number of bytes to be a multiple of 16"));
  expect_load_finding<Plant::kOddSource>(HasSubstr("expected the source's address to be a multiple of 16"));
}

TEST(PlantedAsync, AnMbarrierIsNotReady) {
  expect_load_finding<Plant::kNoInit>(HasSubstr("mbarrier: used before its initialisation"));
  expect_load_finding<Plant::kNoInitFence>(HasSubstr("expected mbarrier_init_fence"));
}

TEST(PlantedAsync, AThreadArrivesOnceTooOften) {
  const cuda_shim::ScopedOrder late(cuda_shim::Order::kForward);
  EXPECT_THAT(run_load<Plant::kArrivesTwice>().finding, HasSubstr("mbarrier: more arrivals than the 1 of a phase"));
}

TEST(PlantedAsync, ABlockExitsBeforeItsCopyIsDone) {
  const cuda_shim::ScopedOrder late(cuda_shim::Order::kForward);
  EXPECT_THAT(run_load<Plant::kExits>().finding,
              HasSubstr("the block exits while shared memory is still to be written"));
}

// Two loads on one phase that was told of one: the phase ends before the second has come.
__global__ void early_phase_kernel(const float* in, float* out) {
  AREAL_DYNAMIC_SHARED(Tile, tile);
  if (threadIdx.x == 0) {
    mbarrier_init(&tile->full, 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect(&tile->full, 128);
    bulk_load(tile->values, in, 128, &tile->full);
    bulk_load(tile->values + 32, in + 32, 128, &tile->full);
  }
  __syncthreads();
  mbarrier_wait(&tile->full, 0);
  out[threadIdx.x] = tile->values[threadIdx.x];
  if (threadIdx.x == 0) mbarrier_arrive_expect(&tile->full, 128);
  mbarrier_wait(&tile->full, 1);
}

TEST(PlantedAsyncDeathTest, APhaseEndsBeforeASecondCopy) {
  const cuda_shim::ScopedOrder late(cuda_shim::Order::kForward);
  alignas(16) float in[kFloats] = {};
  std::vector<float> out(kFloats);
  const auto run = [&] { AREAL_LAUNCH(early_phase_kernel, 1, kFloats, sizeof(Tile), nullptr, in, out.data()); };
  if (variant() == Variant::kAsan) {
    EXPECT_DEATH(run(), "use-after-poison");
  } else {
    EXPECT_THAT(finding_of(run), HasSubstr("phase ended before it did, for it was told to expect fewer bytes"));
  }
}

// Thread 0 loads again before all have read the tile.
__global__ void reload_kernel(const float* in, float* out) {
  AREAL_DYNAMIC_SHARED(Tile, tile);
  if (threadIdx.x == 0) {
    mbarrier_init(&tile->full, 1);
    mbarrier_init_fence();
  }
  __syncthreads();
  for (int round = 0; round < 2; ++round) {
    if (threadIdx.x == 0) {  // missing: a barrier after the last round's reads
      mbarrier_arrive_expect(&tile->full, kBytes);
      bulk_load(tile->values, in, kBytes, &tile->full);
    }
    mbarrier_wait(&tile->full, round);
    out[threadIdx.x] = tile->values[threadIdx.x];
  }
}

TEST(PlantedAsync, ATileIsLoadedAgainBeforeAllHaveReadIt) {
  if (variant() != Variant::kRace) GTEST_SKIP();
  alignas(16) float in[kFloats] = {};
  std::vector<float> out(kFloats);
  expect_in_every_order([&] { AREAL_LAUNCH(reload_kernel, 1, kFloats, sizeof(Tile), nullptr, in, out.data()); },
                        AnyOf(HasSubstr("read-write race in shared memory (dynamic): "),
                              HasSubstr("write-read race in shared memory (dynamic): write by a bulk copy"),
                              HasSubstr("wait at an mbarrier")));
}

template <bool kFences, bool kWaits>
__global__ void store_kernel(float* out) {
  AREAL_DYNAMIC_SHARED(Tile, tile);
  tile->values[threadIdx.x] = 1.0f;
  if (kFences) fence_async_proxy();
  __syncthreads();
  if (threadIdx.x == 0) {
    bulk_store(out, tile->values, kBytes);
    bulk_commit();
    if (kWaits) bulk_wait_read<0>();
  }
  __syncthreads();
  tile->values[threadIdx.x] = 2.0f;
  if (threadIdx.x == 0) bulk_wait<0>();
}

template <bool kFences, bool kWaits>
std::string store_finding(float* first) {
  alignas(16) float out[kFloats] = {};
  std::string finding =
      finding_of([&] { AREAL_LAUNCH((store_kernel<kFences, kWaits>), 1, kFloats, sizeof(Tile), nullptr, out); });
  *first = out[0];
  return finding;
}

TEST(PlantedAsync, StoresNeedAFenceBeforeAndAWaitAfter) {
  const cuda_shim::ScopedOrder late(cuda_shim::Order::kForward);
  float first = 0.0f;
  EXPECT_EQ((store_finding<true, true>(&first)), "");
  EXPECT_EQ(first, 1.0f);
  const std::string no_wait = store_finding<true, false>(&first);
  EXPECT_EQ(first, 2.0f);  // the tile was overwritten before the copy had read it
  if (variant() != Variant::kRace) return;
  EXPECT_THAT(no_wait, HasSubstr("read-write race in shared memory (dynamic): read by a bulk copy"));
  EXPECT_THAT((store_finding<false, true>(&first)), HasSubstr("no fence_async_proxy between a write and a bulk copy"));
}

__global__ void unwaited_store_kernel(float* out) {
  AREAL_DYNAMIC_SHARED(Tile, tile);
  tile->values[threadIdx.x] = 1.0f;
  fence_async_proxy();
  __syncthreads();
  if (threadIdx.x == 0) {
    bulk_store(out, tile->values, kBytes);
    bulk_commit();
  }
}

TEST(PlantedAsync, ABlockExitsBeforeItsStoreHasReadSharedMemory) {
  const cuda_shim::ScopedOrder late(cuda_shim::Order::kForward);
  alignas(16) float out[kFloats] = {};
  EXPECT_THAT(finding_of([&] { AREAL_LAUNCH(unwaited_store_kernel, 1, kFloats, sizeof(Tile), nullptr, out); }),
              HasSubstr("the block exits while its shared memory is still to be read"));
}

TEST(PlantedAsyncDeathTest, ABulkCopyLeavesItsBounds) {
  alignas(16) float in[kFloats] = {};
  float out[kFloats];
  const auto past_shared = [&] { AREAL_LAUNCH(load_kernel<Plant::kNothing>, 1, kFloats, 64, nullptr, in, out); };
  if (variant() != Variant::kAsan) {
    EXPECT_THAT(finding_of(past_shared), HasSubstr("mbarrier: expected 8 aligned bytes of the block's dynamic shared"));
    return;
  }
  const auto row = std::make_unique<float[]>(kFloats - 4);
  EXPECT_THAT(finding_of([&] {
                AREAL_LAUNCH(load_kernel<Plant::kNothing>, 1, kFloats, sizeof(Tile), nullptr, row.get(), out);
              }),
              HasSubstr("bulk copy of 256 bytes: byte 240 of its source is out of bounds"));
}

}  // namespace
}  // namespace areal::cuda
