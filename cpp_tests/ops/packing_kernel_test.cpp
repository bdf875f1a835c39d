// The CUDA launchers on host pointers, against the definition written out row by row.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "cuda_shim/orders.h"
#include "ops/packing/packing.h"
#include "ops/packing/streaming.h"

namespace areal {
namespace {

using Random = std::mt19937;

struct Map {
  std::vector<int64_t> source_begin, target_begin, target_end;
  int64_t shift = 0, source_rows = 0, target_rows = 0;

  SegmentMap view() const {
    return {.source_begin = source_begin.data(),
            .target_begin = target_begin.data(),
            .target_end = target_end.data(),
            .count = static_cast<int64_t>(source_begin.size()),
            .shift = shift,
            .source_rows = source_rows,
            .target_rows = target_rows};
  }
  // The source row of each target row, -1: filled.
  std::vector<int64_t> expected() const {
    std::vector<int64_t> rows(target_rows, -1);
    for (size_t s = 0; s < source_begin.size(); ++s) {
      const int64_t length = target_end[s] - target_begin[s];
      for (int64_t i = 0; i < length; ++i) {
        if (i - shift >= 0 && i - shift < length) rows[target_begin[s] + i] = source_begin[s] + i - shift;
      }
    }
    return rows;
  }
};

// Segments in shuffled source order, with gaps before, between and after them in both layouts; some are empty.
Map random_map(int segments, int max_length, int64_t shift, uint32_t seed) {
  Random random(seed);
  const auto up_to = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<uint32_t>(n + 1)); };
  std::vector<int64_t> lengths(segments);
  for (auto& length : lengths) length = up_to(2) == 0 ? 0 : up_to(max_length);
  Map map;
  map.source_begin.resize(segments);
  map.shift = shift;
  for (const int64_t length : lengths) {
    map.target_rows += up_to(2);
    map.target_begin.push_back(map.target_rows);
    map.target_end.push_back(map.target_rows += length);
  }
  map.target_rows += up_to(3);
  std::vector<int> order(segments);
  for (int s = 0; s < segments; ++s) order[s] = s;
  std::shuffle(order.begin(), order.end(), random);
  for (const int s : order) {
    map.source_begin[s] = map.source_rows += up_to(2);
    map.source_rows += lengths[s];
  }
  return map;
}

struct Buffers {
  std::vector<std::vector<unsigned char>> sources, targets;
  std::vector<RowTensor> tensors;
};

// One tensor for each row size, `offset_bytes` off the allocation's alignment.
Buffers make_buffers(const Map& map, const std::vector<int64_t>& row_bytes, int64_t offset_bytes) {
  Buffers buffers;
  Random random(7);
  for (const int64_t bytes : row_bytes) {
    auto& source = buffers.sources.emplace_back(map.source_rows * bytes + offset_bytes);
    for (auto& byte : source) byte = static_cast<unsigned char>(random());
    auto& target = buffers.targets.emplace_back(map.target_rows * bytes + offset_bytes, 0xee);
    RowTensor tensor{source.data() + offset_bytes, target.data() + offset_bytes, bytes, {}};
    const int64_t element_bytes = bytes & -bytes;
    for (int64_t i = 0; i < 16; ++i) tensor.fill.bytes[i] = static_cast<unsigned char>(0xa0 + i % element_bytes);
    buffers.tensors.push_back(tensor);
  }
  return buffers;
}

void expect_copied(const Map& map, const Buffers& buffers) {
  const std::vector<int64_t> rows = map.expected();
  for (const RowTensor& tensor : buffers.tensors) {
    for (int64_t row = 0; row < map.target_rows; ++row) {
      std::vector<unsigned char> want(tensor.row_bytes);
      for (int64_t i = 0; i < tensor.row_bytes; ++i) {
        want[i] = rows[row] < 0 ? tensor.fill.bytes[i % 16] : tensor.source[rows[row] * tensor.row_bytes + i];
      }
      ASSERT_EQ(std::memcmp(want.data(), tensor.target + row * tensor.row_bytes, want.size()), 0)
          << "row " << row << " of " << map.target_rows << ", row_bytes " << tensor.row_bytes << ", shift "
          << map.shift;
    }
  }
}

const std::vector<int64_t> kRowBytes = {1, 2, 4, 8, 16, 3, 6, 12, 24, 48, 80, 1040};

TEST(PackingKernels, CopySegmentsFollowsTheDefinition) {
  for (const int64_t shift : {0, 1, -1, 3}) {
    for (const int segments : {0, 1, 40}) {
      const Map map = random_map(segments, 9, shift, 11 + segments);
      cuda_shim::for_each_order(
          [&] {
            Buffers buffers = make_buffers(map, kRowBytes, 0);
            cuda::copy_segments(map.view(), buffers.tensors, nullptr);
            expect_copied(map, buffers);
          },
          1);
    }
  }
}

TEST(PackingKernels, CopySegmentsCrossesTiles) {
  const Map map = random_map(30, 400, 1, 5);  // more rows than one pass of the grid
  Buffers buffers = make_buffers(map, {4, 6}, 0);
  cuda::copy_segments(map.view(), buffers.tensors, nullptr);
  expect_copied(map, buffers);
}

TEST(PackingKernels, CopySegmentsTakesMoreTensorsThanALaunchHolds) {
  const Map map = random_map(5, 6, 0, 3);
  Buffers buffers = make_buffers(map, std::vector<int64_t>(35, 8), 0);
  cuda::copy_segments(map.view(), buffers.tensors, nullptr);
  expect_copied(map, buffers);
}

TEST(PackingKernels, CopySegmentsTakesMisalignedRows) {
  const Map map = random_map(5, 6, 0, 3);
  for (const int64_t offset : {1, 2, 4, 8}) {
    Buffers buffers = make_buffers(map, {16, 48, 8}, offset);
    cuda::copy_segments(map.view(), buffers.tensors, nullptr);
    expect_copied(map, buffers);
  }
}

TEST(PackingKernels, CopySegmentsOnTheHostAgrees) {
  for (const int64_t shift : {0, 1, -1, 3}) {
    const Map map = random_map(40, 9, shift, 17);
    Buffers buffers = make_buffers(map, kRowBytes, 0);
    check_segment_map(map.view(), "test");
    copy_segments_cpu(map.view(), buffers.tensors);
    expect_copied(map, buffers);
  }
}

TEST(PackingKernels, LargeTargetsOnTheHostAreStreamed) {
  const Map map = random_map(40, 500, 1, 29);
  for (const int64_t offset : {0, 1}) {
    Buffers buffers = make_buffers(map, {1, 3, 8, 1500}, offset);
    for (RowTensor& tensor : buffers.tensors) {  // one byte for all, as most fills are
      if (tensor.row_bytes != 8) std::fill(std::begin(tensor.fill.bytes), std::end(tensor.fill.bytes), 0x5a);
    }
    ASSERT_GT(map.target_rows * 1512, int64_t{4} << 20);
    copy_segments_cpu(map.view(), buffers.tensors);
    expect_copied(map, buffers);
  }
}

TEST(Streaming, EveryPlaceOfTheEnds) {
  for (const int64_t bytes : {0, 1, 63, 64, 255, 256, 257, 319, 320, 700}) {
    for (const int64_t offset : {0, 1, 31, 63}) {
      std::vector<unsigned char> source(bytes + 3), target(bytes + 130, 0xee), want = target;
      for (int64_t i = 0; i < bytes + 3; ++i) source[i] = static_cast<unsigned char>(i * 7 + 1);
      streaming::copy(target.data() + offset, source.data() + 3, bytes);
      streaming::fence();
      std::copy_n(source.begin() + 3, bytes, want.begin() + offset);
      ASSERT_EQ(target, want) << bytes << " bytes at " << offset;
      streaming::fill(target.data() + offset, 0x11, bytes);
      streaming::fence();
      std::fill_n(want.begin() + offset, bytes, 0x11);
      ASSERT_EQ(target, want) << bytes << " bytes at " << offset;
    }
  }
}

TEST(PackingKernels, BrokenMapsStayInsideTheTensors) {
  Map map = random_map(20, 9, 0, 23);
  map.target_begin[3] = -5;
  map.target_end[7] = int64_t{1} << 40;
  map.source_begin[11] = int64_t{1} << 40;
  map.source_begin[12] = -(int64_t{1} << 40);
  Buffers buffers = make_buffers(map, {8}, 0);
  cuda::copy_segments(map.view(), buffers.tensors, nullptr);  // the sanitizer builds watch
}

TEST(PackingKernels, PositionIds) {
  const std::vector<int64_t> cu_seqlens = {0, 0, 3, 3, 1030, 1031, 1031};
  for (const int64_t sequences : {int64_t{0}, int64_t{6}}) {
    const int64_t tokens = cu_seqlens[sequences];
    std::vector<int64_t> out(tokens, -1);
    cuda_shim::for_each_order([&] { cuda::position_ids({cu_seqlens.data(), sequences}, tokens, out.data(), nullptr); },
                              1);
    for (int64_t s = 0; s < sequences; ++s) {
      for (int64_t t = cu_seqlens[s]; t < cu_seqlens[s + 1]; ++t) ASSERT_EQ(out[t], t - cu_seqlens[s]);
    }
  }
}

TEST(PackingKernels, MaskExtents) {
  for (const int64_t columns : {0, 1, 31, 33, 100}) {
    constexpr int64_t kRows = 21;
    std::vector<unsigned char> mask(kRows * columns);
    std::vector<int64_t> want(3 * kRows), got(3 * kRows, -1);
    Random random(static_cast<uint32_t>(columns));
    for (int64_t s = 0; s < kRows && columns > 0; ++s) {
      for (int64_t i = 0; i < columns; ++i) mask[s * columns + i] = s > 0 && random() % (1 + s % 5) == 0 ? 1 : 0;
      int64_t first = columns, end = 0;
      for (int64_t i = 0; i < columns; ++i) {
        if (mask[s * columns + i] == 0) continue;
        ++want[2 * kRows + s];
        first = std::min(first, i);
        end = i + 1;
      }
      want[s] = end > 0 ? first : 0;
      want[kRows + s] = end > 0 ? end - first : 0;
    }
    const MaskExtents out{got.data(), got.data() + kRows, got.data() + 2 * kRows};
    cuda_shim::for_each_order([&] { cuda::mask_extents(mask.data(), kRows, columns, out, nullptr); }, 1);
    EXPECT_EQ(got, want) << columns << " columns";
    std::fill(got.begin(), got.end(), -1);
    mask_extents_cpu(mask.data(), kRows, columns, out);
    EXPECT_EQ(got, want) << columns << " columns on the host";
  }
}

}  // namespace
}  // namespace areal
