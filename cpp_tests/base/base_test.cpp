#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "base/check.h"
#include "base/dtype.h"
#include "base/isa.h"
#include "base/segments.h"
#include "base/threads.h"

namespace areal {
namespace {

std::string message_of(const std::vector<int64_t>& cu_seqlens, int64_t tokens) {
  try {
    check_segments({cu_seqlens.data(), static_cast<int64_t>(cu_seqlens.size()) - 1}, tokens, "op");
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Segments, AcceptsEmptySequencesAndNoSequences) {
  EXPECT_EQ(message_of({0, 0, 3, 3, 7}, 7), "");
  EXPECT_EQ(message_of({0}, 0), "");
}

TEST(Segments, NamesTheBrokenInvariant) {
  EXPECT_EQ(message_of({1, 2}, 2), "op: expected cu_seqlens[0] = 0, got 1");
  EXPECT_EQ(message_of({0, 5, 3}, 3),
            "op: expected non-decreasing cu_seqlens, got cu_seqlens[1] = 5 > cu_seqlens[2] = 3");
  EXPECT_EQ(message_of({0, 5}, 4), "op: expected cu_seqlens[-1] = 4 (number of packed tokens), got 5");
}

TEST(DType, DispatchesToTheTypeOfItsSize) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64}) {
    const size_t size = dispatch_dtype(dtype, "op", [](auto tag) { return sizeof(typename decltype(tag)::type); });
    EXPECT_EQ(size, dtype_size_bytes(dtype));
  }
  EXPECT_THROW(dispatch_dtype(static_cast<DType>(9), "op", [](auto) { return 0; }), Error);
}

// A pool with a thread per piece, in which an exception that leaves a thread ends the program.
void threads_parallel_for(int64_t begin, int64_t end, int64_t grain, RangeFn fn) {
  std::vector<std::thread> threads;
  for (int64_t b = begin; b < end; b += grain) threads.emplace_back([=] { fn(b, std::min(end, b + grain)); });
  for (auto& thread : threads) thread.join();
}

TEST(ParallelFor, RunsEachIndexOnceWithAndWithoutAPool) {
  for (const bool pooled : {false, true}) {
    if (pooled) set_parallel_for(&threads_parallel_for, [] { return int64_t{4}; });
    std::vector<std::atomic<int>> hits(103);
    parallel_for(0, 103, 10, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) ++hits[static_cast<size_t>(i)];
    });
    for (const auto& hit : hits) EXPECT_EQ(hit.load(), 1);
  }
  set_parallel_for(nullptr, nullptr);
}

TEST(ParallelFor, HandsTheCallerOneOfTheExceptionsThrownInThePool) {
  set_parallel_for(&threads_parallel_for, [] { return int64_t{4}; });
  std::string text;
  try {
    parallel_for(0, 100, 10, [](int64_t begin, int64_t) {
      if (begin >= 50) throw Error("op: expected a small index, got " + std::to_string(begin));
    });
  } catch (const Error& error) {
    text = error.what();
  }
  set_parallel_for(nullptr, nullptr);
  EXPECT_EQ(text.substr(0, text.size() - 2), "op: expected a small index, got ");
}

TEST(Isa, CanBeLoweredAndNotRaisedPastTheMachine) {
  const Isa best = best_isa();
  set_active_isa(Isa::kBaseline);
  EXPECT_EQ(active_isa(), Isa::kBaseline);
  set_active_isa(best);
  if (best != Isa::kAvx512) {
    EXPECT_THROW(set_active_isa(Isa::kAvx512), Error);
  }
}

}  // namespace
}  // namespace areal
