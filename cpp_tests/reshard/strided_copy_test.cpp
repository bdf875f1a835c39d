#include "reshard/strided_copy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "base/check.h"
#include "base/isa.h"

namespace areal::reshard {
namespace {

constexpr std::byte kUntouched{0xEE};

// Memory that starts `shift` bytes after a line.
class Memory {
 public:
  Memory(size_t bytes, size_t shift) : bytes_(bytes), store_(bytes + shift + 128, kUntouched) {
    const size_t head = (64 - reinterpret_cast<uintptr_t>(store_.data()) % 64) % 64;
    data_ = store_.data() + head + shift;
  }
  std::byte* data() { return data_; }
  void fill(uint64_t seed) {
    std::mt19937_64 random(seed);
    for (size_t i = 0; i < bytes_; ++i) data_[i] = static_cast<std::byte>(random());
  }
  // Bytes outside [0, bytes) that are no longer as they were.
  bool overrun() const {
    const auto touched = [](std::byte b) { return b != kUntouched; };
    const auto first = store_.begin() + (static_cast<const std::byte*>(data_) - store_.data());
    return std::any_of(store_.begin(), first, touched) ||
           std::any_of(first + static_cast<int64_t>(bytes_), store_.end(), touched);
  }

 private:
  size_t bytes_;
  std::vector<std::byte> store_;
  std::byte* data_;
};

// A box inside a larger row-major tensor.
struct Region {
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;  // elements
  int64_t span = 1;              // elements from the first to behind the last

  Region(std::vector<int64_t> box, const std::vector<int64_t>& slack) : sizes(std::move(box)), strides(sizes.size()) {
    int64_t stride = 1;
    for (size_t d = sizes.size(); d-- > 0;) {
      strides[d] = stride;
      span += (sizes[d] - 1) * stride;
      stride *= sizes[d] + slack[d];
    }
  }
  int64_t elements() const {
    int64_t product = 1;
    for (const int64_t size : sizes) product *= size;
    return product;
  }
};

// What the copies must do, an element at a time.
void gather(std::byte* packed, const std::byte* storage, const Region& region, int64_t item_bytes) {
  std::vector<int64_t> index(region.sizes.size());
  for (int64_t i = 0; i < region.elements(); ++i) {
    int64_t rest = i, at = 0;
    for (size_t d = region.sizes.size(); d-- > 0; rest /= region.sizes[d]) {
      at += rest % region.sizes[d] * region.strides[d];
    }
    std::memcpy(packed + i * item_bytes, storage + at * item_bytes, static_cast<size_t>(item_bytes));
  }
}

class StridedCopies : public testing::TestWithParam<Isa> {
 protected:
  void SetUp() override {
    if (GetParam() > best_isa()) GTEST_SKIP() << "this machine lacks " << isa_name(GetParam());
    set_active_isa(GetParam());
  }
  void TearDown() override { set_active_isa(best_isa()); }
};

struct Case {
  std::vector<Region> sources, targets;
  int64_t item_bytes;
  size_t source_shift, target_shift, packed_shift;
  Stores stores;
};

// Several regions one behind the other, as the atoms of a chunk.
Case random_case(uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto below = [&](uint64_t n) { return static_cast<int64_t>(random() % n); };
  Case c;
  c.item_bytes = std::array<int64_t, 5>{1, 2, 4, 8, 3}[static_cast<size_t>(below(5))];
  c.stores = below(2) == 0 ? Stores::kCached : Stores::kNonTemporal;
  const bool lines = below(2) == 0;
  c.source_shift = lines ? 0 : static_cast<size_t>(below(64));
  c.target_shift = lines ? 0 : static_cast<size_t>(below(64));
  c.packed_shift = lines ? 0 : static_cast<size_t>(below(64));
  for (int64_t part = below(4) + 1; part-- > 0;) {
    const auto dims = static_cast<size_t>(below(4));
    std::vector<int64_t> sizes(dims), source_slack(dims), target_slack(dims);
    for (size_t d = 0; d < dims; ++d) {
      const bool inner = d + 1 == dims;
      const std::array<int64_t, 6> lengths{1, 3, 64, 129, 256, 5000};
      sizes[d] = inner ? lengths[static_cast<size_t>(below(dims == 1 ? 6 : 5))] : below(dims == 3 ? 7 : 90) + 1;
      source_slack[d] = below(2) * (lines ? 64 : below(70));
      target_slack[d] = below(2) * (lines ? 64 : below(70));
    }
    c.sources.emplace_back(sizes, source_slack);
    c.targets.emplace_back(sizes, target_slack);
  }
  return c;
}

void check_case(uint64_t seed) {
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  const Case c = random_case(seed);
  int64_t total = 0, source_bytes = 0, target_bytes = 0;
  for (size_t i = 0; i < c.sources.size(); ++i) {
    total += c.sources[i].elements() * c.item_bytes;
    source_bytes += c.sources[i].span * c.item_bytes;
    target_bytes += c.targets[i].span * c.item_bytes;
  }
  Memory source(static_cast<size_t>(source_bytes), c.source_shift), packed(static_cast<size_t>(total), c.packed_shift);
  Memory target(static_cast<size_t>(target_bytes), c.target_shift),
      moved(static_cast<size_t>(target_bytes), c.target_shift);
  source.fill(seed);
  Packer packer(packed.data(), total, c.stores);
  Mover mover(total, c.stores);
  std::vector<std::byte> expected(static_cast<size_t>(total));
  std::byte *from = source.data(), *to = moved.data(), *wire = expected.data();
  for (size_t i = 0; i < c.sources.size(); ++i) {
    const Region &s = c.sources[i], &t = c.targets[i];
    const auto packed_as = packed_strides(s.sizes);
    packer.add(from, make_strided_copy(c.item_bytes, s.sizes, s.strides, std::span(packed_as).first(s.sizes.size())));
    mover.add(to, from, make_strided_copy(c.item_bytes, s.sizes, s.strides, t.strides));
    gather(wire, from, s, c.item_bytes);
    from += s.span * c.item_bytes;
    to += t.span * c.item_bytes;
    wire += s.elements() * c.item_bytes;
  }
  const uint64_t hash = xxh3_64(expected.data(), expected.size());
  EXPECT_EQ(packer.finish(), hash);
  EXPECT_EQ(mover.finish(), hash);
  ASSERT_EQ(std::memcmp(packed.data(), expected.data(), expected.size()), 0);
  Unpacker unpacker(packed.data(), total, c.stores);
  to = target.data();
  for (const Region& t : c.targets) {
    const auto packed_as = packed_strides(t.sizes);
    unpacker.add(to, make_strided_copy(c.item_bytes, t.sizes, std::span(packed_as).first(t.sizes.size()), t.strides));
    to += t.span * c.item_bytes;
  }
  EXPECT_EQ(unpacker.finish(), hash);
  std::vector<std::byte> again(expected.size());
  std::byte *at = target.data(), *moved_at = moved.data();
  wire = again.data();
  for (const Region& t : c.targets) {
    gather(wire, at, t, c.item_bytes);
    ASSERT_EQ(std::memcmp(at, moved_at, static_cast<size_t>(t.span * c.item_bytes)), 0) << "slack was written";
    at += t.span * c.item_bytes;
    moved_at += t.span * c.item_bytes;
    wire += t.elements() * c.item_bytes;
  }
  EXPECT_EQ(again, expected);
  EXPECT_FALSE(packed.overrun() || target.overrun() || moved.overrun());
}

TEST_P(StridedCopies, MoveEveryElementWhereItBelongs) {
  for (uint64_t seed = 0; seed < 400; ++seed) {
    check_case(seed);
    if (HasFatalFailure()) return;
  }
}

TEST_P(StridedCopies, LeaveWhatLiesBetweenTheRunsAlone) {
  for (const Stores stores : {Stores::kCached, Stores::kNonTemporal}) {
    for (int64_t run = 1; run <= 300; ++run) {
      const std::vector<int64_t> sizes{5, run}, strides{run + 64, 1};
      const auto packed_as = packed_strides(sizes);
      Memory packed(static_cast<size_t>(5 * run), 0), target(static_cast<size_t>(5 * (run + 64)), 0);
      packed.fill(1);
      Unpacker unpacker(packed.data(), 5 * run, stores);
      unpacker.add(target.data(), make_strided_copy(1, sizes, std::span(packed_as).first(2), strides));
      unpacker.finish();
      for (int64_t row = 0; row < 5; ++row) {
        const std::byte* at = target.data() + row * (run + 64);
        ASSERT_EQ(std::memcmp(at, packed.data() + row * run, static_cast<size_t>(run)), 0);
        ASSERT_TRUE(std::all_of(at + run, at + run + 64, [](std::byte b) { return b == kUntouched; })) << run;
      }
    }
  }
}

TEST(StridedCopy, HasAsFewDimensionsAsTheStridesAllow) {
  const std::vector<int64_t> sizes{4, 1, 8, 16};
  const auto dense = packed_strides(sizes);
  const std::span<const int64_t> packed = std::span(dense).first(4);
  const StridedCopy whole = make_strided_copy(2, sizes, packed, packed);
  EXPECT_EQ(whole.dims, 0);
  EXPECT_EQ(whole.run_bytes, 4 * 8 * 16 * 2);
  const StridedCopy rows = make_strided_copy(2, sizes, std::vector<int64_t>{1000, 1, 32, 1}, packed);
  EXPECT_EQ(rows.dims, 2);
  EXPECT_EQ(rows.run_bytes, 32);
  EXPECT_EQ(rows.counts[0], 4);
  EXPECT_EQ(rows.source_strides[1], 64);
  EXPECT_EQ(rows.target_strides[0], 256);
  EXPECT_EQ(rows.bytes(), whole.bytes());
  EXPECT_EQ(
      make_strided_copy(2, std::vector<int64_t>{3, 0}, std::vector<int64_t>{9, 1}, std::vector<int64_t>{9, 1}).bytes(),
      0);
  EXPECT_EQ(make_strided_copy(8, {}, {}, {}).run_bytes, 8);
}

TEST(StridedCopy, RefusesMoreOrFewerBytesThanWereSaid) {
  Memory memory(256, 0);
  const StridedCopy row =
      make_strided_copy(1, std::vector<int64_t>{100}, std::vector<int64_t>{1}, std::vector<int64_t>{1});
  Packer packer(memory.data(), 101, Stores::kCached);
  packer.add(memory.data() + 128, row);
  EXPECT_THROW(packer.finish(), Error);
  Unpacker unpacker(memory.data(), 99, Stores::kCached);
  EXPECT_THROW(unpacker.add(memory.data() + 128, row), Error);
}

TEST_P(StridedCopies, TheStreamsHashIsThatOfTheWhole) {
  Memory memory(5000, 0), target(5000, 0);
  memory.fill(3);
  std::mt19937_64 random(5);
  for (size_t bytes = 0; bytes < 5000; bytes += bytes < 400 ? 1 : 97) {
    for (const size_t longest : {size_t{1}, size_t{63}, size_t{200}, size_t{3000}}) {
      Xxh3Stream stream(bytes);
      for (size_t at = 0; at < bytes;) {
        const size_t piece = std::min<size_t>(random() % longest + 1, bytes - at);
        stream.copy(target.data() + at, memory.data() + at, piece, Stores::kNonTemporal);
        at += piece;
      }
      store_fence();
      ASSERT_EQ(stream.finish(), xxh3_64(memory.data(), bytes)) << bytes << " in pieces of at most " << longest;
      ASSERT_EQ(std::memcmp(target.data(), memory.data(), bytes), 0);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(EveryIsa, StridedCopies, testing::Values(Isa::kBaseline, Isa::kAvx2, Isa::kAvx512),
                         [](const auto& info) { return isa_name(info.param); });

}  // namespace
}  // namespace areal::reshard
