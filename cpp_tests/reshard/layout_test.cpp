#include "reshard/layout.h"

#include <map>

#include "layout_testing.h"

namespace areal::reshard {
namespace {

using Shape = std::vector<int64_t>;

TensorLayout tensor(std::string name, Shape shape, std::vector<Placement> placements, Storage storage = {}) {
  return {{std::move(name), "bfloat16", 2, std::move(shape)}, 0, std::move(placements), std::move(storage)};
}

const Buffer& buffer_named(const RankStorage& storage, const std::string& name) {
  return *std::find_if(storage.buffers.begin(), storage.buffers.end(), [&](const Buffer& b) { return b.name == name; });
}

// (tensor, canonical element) at every element of a buffer; {-1, -1} where there is none.
using Contents = std::vector<std::pair<int64_t, int64_t>>;

Contents contents(const Layout& layout, const RankStorage& storage, const std::string& name) {
  const Buffer& buffer = buffer_named(storage, name);
  Contents out(static_cast<size_t>(product(buffer.shape)), {-1, -1});
  for (const Region& region : storage.regions) {
    if (&storage.buffers[static_cast<size_t>(region.buffer)] != &buffer) continue;
    const Indices elements = elements_of(region.box, layout.tensors()[static_cast<size_t>(region.tensor)].spec.shape);
    for (size_t i = 0; i < elements.size(); ++i) {
      auto rest = static_cast<int64_t>(i);
      int64_t at = region.offset;
      for (auto d = static_cast<size_t>(region.box.dims); d-- > 0;) {
        at += rest % region.box.size[d] * region.strides[d];
        rest /= region.box.size[d];
      }
      auto& held = out.at(static_cast<size_t>(at));
      EXPECT_EQ(held, (std::pair<int64_t, int64_t>{-1, -1})) << "two regions at " << at;
      held = {region.tensor, elements[i]};
    }
  }
  return out;
}

// Appends rows [begin, end) of a tensor with `columns` columns.
void append_rows(Contents& out, int64_t tensor, int64_t begin, int64_t end, int64_t columns) {
  for (int64_t i = begin * columns; i < end * columns; ++i) out.emplace_back(tensor, i);
}

TEST(Layout, DefaultStorageIsABufferOfItsOwn) {
  const Layout layout({line(4)}, {tensor("w", {10, 3}, {Shard{}}), tensor("a", {}, {Replicate{}})});
  const RankStorage last = layout.storage(3);
  ASSERT_EQ(last.buffers.size(), 2u);
  EXPECT_EQ(last.buffers[0], (Buffer{"a", "bfloat16", 2, {}}));
  EXPECT_EQ(last.buffers[1], (Buffer{"w", "bfloat16", 2, {1, 3}}));
  EXPECT_EQ(last.fully_covered, (std::vector<bool>{true, true}));
  Contents expected;
  append_rows(expected, 1, 9, 10, 3);
  EXPECT_EQ(contents(layout, last, "w"), expected);
  EXPECT_EQ(contents(layout, last, "a"), (Contents{{0, 0}}));
  EXPECT_TRUE(layout.storage(7).buffers.empty()) << "not of the mesh";
}

TEST(Layout, EmptyPartsHaveEmptyBuffers) {
  const Layout layout({line(4)}, {tensor("w", {3, 2}, {Shard{}})});
  const RankStorage storage = layout.storage(3);
  EXPECT_EQ(storage.buffers, (std::vector<Buffer>{{"w", "bfloat16", 2, {0, 2}}}));
  EXPECT_TRUE(storage.regions.empty());
  EXPECT_TRUE(storage.fully_covered[0]);
}

// Qwen2.5-7B in the small: 4 query heads to a KV head, head size 2, hidden size 3, two groups a rank, two ranks.
TEST(Layout, MegatronInterleavesTheGroupsOfHeads) {
  const int64_t hidden = 3, q_rows = 8, kv_rows = 2, group = (q_rows + 2 * kv_rows) * hidden;
  const Storage q{"qkv", Shape{24, hidden}, 0, {}, q_rows, group};
  const Storage k{"qkv", Shape{24, hidden}, q_rows * hidden, {}, kv_rows, group};
  const Storage v{"qkv", Shape{24, hidden}, (q_rows + kv_rows) * hidden, {}, kv_rows, group};
  const Layout layout({line(2)}, {tensor("q", {32, hidden}, {Shard{}}, q), tensor("k", {8, hidden}, {Shard{}}, k),
                                  tensor("v", {8, hidden}, {Shard{}}, v)});
  for (int64_t rank = 0; rank < 2; ++rank) {
    Contents expected;
    for (int64_t g = 2 * rank; g < 2 * rank + 2; ++g) {
      append_rows(expected, 1, g * q_rows, (g + 1) * q_rows, hidden);
      append_rows(expected, 0, g * kv_rows, (g + 1) * kv_rows, hidden);
      append_rows(expected, 2, g * kv_rows, (g + 1) * kv_rows, hidden);
    }
    const RankStorage storage = layout.storage(static_cast<int32_t>(rank));
    EXPECT_EQ(contents(layout, storage, "qkv"), expected);
    EXPECT_EQ(storage.regions.size(), 6u) << "one for each tensor and group";
    EXPECT_TRUE(storage.fully_covered[0]);
  }
}

TEST(Layout, GroupsThatFollowOneAnotherAreOneRegion) {
  const Storage storage{"", {}, 0, {}, 2, 2 * 3};
  EXPECT_EQ(Layout({line(1)}, {tensor("w", {8, 3}, {Replicate{}}, storage)}).storage(0).regions.size(), 1u);
}

TEST(Layout, GroupsCutBoxesThatCrossThem) {  // strided shards of three rows each, in groups of two
  const Storage storage{"", Shape{6, 2}, 0, {}, 2, 8};
  const Layout layout({line(2)}, {tensor("w", {8}, {StridedShard{0, 2}}, Storage{"", Shape{9}, 0, {}, 2, 5})});
  Contents expected(9, {-1, -1});
  expected[0] = {0, 2}, expected[1] = {0, 3}, expected[5] = {0, 6}, expected[6] = {0, 7};
  EXPECT_EQ(contents(layout, layout.storage(1), "w"), expected);
  EXPECT_FALSE(layout.storage(1).fully_covered[0]);
}

TEST(Layout, VllmStacksWhatIsFused) {
  const int64_t hidden = 3;
  const auto part = [&](const char* name, int64_t rows, int64_t offset_rows) {
    return tensor(name, {rows * 2, hidden}, {Shard{}}, {"qkv_proj", Shape{8, hidden}, offset_rows * hidden, {}, 0, 0});
  };
  const Layout layout({line(2)}, {part("q", 4, 0), part("k", 2, 4), part("v", 2, 6)});
  Contents expected;
  append_rows(expected, 1, 4, 8, hidden);
  append_rows(expected, 0, 2, 4, hidden);
  append_rows(expected, 2, 2, 4, hidden);
  EXPECT_EQ(contents(layout, layout.storage(1), "qkv_proj"), expected);
}

TEST(Layout, TransposedAndAlternatingColumns) {  // [hidden, 2 * inner], gate and up column by column
  const int64_t inner = 3, hidden = 4;
  const auto part = [&](const char* name, int64_t offset) {
    return tensor(name, {inner, hidden}, {Replicate{}}, {"gate_up", Shape{hidden, 2 * inner}, offset, {2, 2 * inner}});
  };
  const Layout layout({line(1)}, {part("gate", 0), part("up", 1)});
  Contents expected;
  for (int64_t column = 0; column < hidden; ++column) {
    for (int64_t row = 0; row < inner; ++row) {
      expected.emplace_back(0, row * hidden + column);
      expected.emplace_back(1, row * hidden + column);
    }
  }
  EXPECT_EQ(contents(layout, layout.storage(0), "gate_up"), expected);
  EXPECT_TRUE(layout.storage(0).fully_covered[0]);
}

TEST(Layout, PaddingIsCoveredByNothing) {  // 10 rows in 4 shards of 3
  const Layout layout({line(4)}, {tensor("w", {10, 2}, {Shard{0, 3}}, {"", Shape{3, 2}})});
  EXPECT_TRUE(layout.storage(0).fully_covered[0]);
  const RankStorage last = layout.storage(3);
  EXPECT_FALSE(last.fully_covered[0]);
  Contents expected;
  append_rows(expected, 0, 9, 10, 2);
  expected.resize(6, {-1, -1});
  EXPECT_EQ(contents(layout, last, "w"), expected);
}

TEST(Layout, FlatTensorsShareTheWindowsOfOneBuffer) {  // 5 + 4 elements, padded to 12 over 3 ranks
  const Layout layout({line(3)}, {tensor("a", {5}, {Flat{4, 0}}, {"flat", Shape{4}}),
                                  tensor("b", {2, 2}, {Flat{4, 5}}, {"flat", Shape{4}})});
  EXPECT_EQ(contents(layout, layout.storage(0), "flat"), (Contents{{0, 0}, {0, 1}, {0, 2}, {0, 3}}));
  EXPECT_EQ(contents(layout, layout.storage(1), "flat"), (Contents{{0, 4}, {1, 0}, {1, 1}, {1, 2}}));
  EXPECT_EQ(contents(layout, layout.storage(2), "flat"), (Contents{{1, 3}, {-1, -1}, {-1, -1}, {-1, -1}}));
  EXPECT_FALSE(layout.storage(2).fully_covered[0]);
}

TEST(Layout, RaggedBoxesLieOneBehindTheOther) {
  const Ragged ragged{{{{2, {1, 0}, {1, 3}}, {2, {0, 1}, {1, 2}}}}};
  const Layout layout({line(1)}, {tensor("w", {2, 3}, {ragged})});
  EXPECT_EQ(layout.storage(0).buffers[0].shape, Shape{5});
  EXPECT_EQ(contents(layout, layout.storage(0), "w"), (Contents{{0, 3}, {0, 4}, {0, 5}, {0, 1}, {0, 2}}));
}

TEST(Layout, BoxesAreThoseOfThePlacements) {
  const Layout layout({line(4), grid(2, 2)}, {tensor("w", {10, 3}, {Shard{}})});
  EXPECT_EQ(layout.boxes(0, 3), (std::vector<Box>{{2, {9, 0}, {1, 3}}}));
  EXPECT_TRUE(layout.boxes(0, 4).empty());
  EXPECT_EQ(layout.find("w"), 0);
  EXPECT_EQ(layout.find("v"), std::nullopt);
  EXPECT_EQ(layout.ranks(), (std::vector<int32_t>{0, 1, 2, 3}));
}

TEST(Layout, IgnoresTheOrderOfInput) {
  std::vector<TensorLayout> tensors = {tensor("a", {4}, {Shard{}}), tensor("b", {4, 2}, {Shard{1}}),
                                       tensor("c", {2, 2}, {Replicate{}, Shard{}})};
  tensors[2].mesh = 1;
  const Layout layout({line(2), grid(2, 2)}, tensors);
  for (TensorLayout& t : tensors) t.mesh = t.spec.name == "c" ? 0 : t.spec.name == "b" ? 1 : 2;
  std::swap(tensors[0], tensors[2]);
  const Layout other({grid(2, 2), line(2), line(2)}, tensors);
  EXPECT_EQ(other.digest(), layout.digest());
  EXPECT_EQ(other.tensors(), layout.tensors());
  EXPECT_EQ(other.meshes(), layout.meshes());
}

TEST(Layout, DigestCoversAllThatIsDescribed) {
  const TensorLayout base = tensor("w", {4, 6}, {Shard{}}, {"b", Shape{30}, 2, {6, 1}, 1, 8});
  std::vector<TensorLayout> others(13, base);
  others[0].spec.name = "v";
  others[1].spec.dtype = "float16";
  others[2].spec.item_bytes = 4;
  others[3].spec.shape = {6, 4};
  others[4].placements = {Replicate{}};
  others[5].placements = {Shard{1}};
  others[6].placements = {Shard{0, 2}};
  others[7].storage.buffer = "c";
  others[8].storage.buffer_shape = Shape{31};
  others[9].storage.offset = 3;
  others[10].storage.strides = {7, 1};
  others[11].storage.group_rows = 2;
  others[12].storage.group_stride = 9;
  for (const Placement& placement :
       {Placement{StridedShard{0, 2}}, Placement{StridedShard{0, 3}}, Placement{StridedShard{0, 2, 3}}}) {
    others.push_back(base);
    others.back().placements = {placement};
  }
  for (const Placement& placement :
       {Placement{Flat{}}, Placement{Flat{24}}, Placement{Flat{24, 0}}, Placement{Flat{24, 1}},
        Placement{Ragged{{{}, {}}}}, Placement{Ragged{{{{2, {}, {1, 1}}}, {}}}},
        Placement{Ragged{{{}, {{2, {}, {1, 1}}}}}}}) {
    others.push_back(base);
    others.back().placements = {placement};
    others.back().storage = {"b", Shape{30}, 2, {}, 0, 0};
  }
  others.back().storage.buffer_shape.reset();
  std::map<uint64_t, size_t> seen = {{Layout({line(2)}, {base}).digest(), others.size()}};
  size_t repeated = 0;
  for (size_t i = 0; i < others.size(); ++i) {
    if (!seen.emplace(Layout({line(2)}, {others[i]}).digest(), i).second) ++repeated;
  }
  EXPECT_EQ(repeated, 1u) << "Flat{24} and Flat{24, 0} are the same, nothing else is";
  EXPECT_NE(Layout({line(2, "tp")}, {base}).digest(), Layout({line(2)}, {base}).digest());
  EXPECT_NE(Layout({Mesh({1, 0}, {2}, {"dp"})}, {base}).digest(), Layout({line(2)}, {base}).digest());
}

// Random storage of one tensor: the regions put every element where the formula of Storage says.
TEST(Layout, RegionsFollowTheFormulaOfStorage) {
  std::mt19937 random(4);
  const auto draw = [&](int64_t below) { return static_cast<int64_t>(random() % static_cast<uint32_t>(below)); };
  for (int round = 0; round < 1000; ++round) {
    const Shape shape = {1 + draw(9), 1 + draw(5)};
    const int64_t pitch = shape[1] + draw(3), group_rows = draw(5), group_stride = group_rows * pitch + draw(4);
    const Storage storage{"b", Shape{400}, draw(7), {pitch, 1}, group_rows, group_rows > 0 ? group_stride : 0};
    const std::vector<Placement> placements = {draw(2) > 0 ? Placement{StridedShard{0, 1 + draw(3)}}
                                                           : Placement{StridedShard{1, 1 + draw(3)}}};
    const Mesh mesh = line(1 + draw(3));
    const Layout layout({mesh}, {tensor("w", shape, placements, storage)});
    for (int32_t rank = 0; rank < mesh.size(); ++rank) {
      const std::vector<Indices> held = held_indices(shape, mesh, placements, rank);
      Contents expected(400, {-1, -1});
      for (size_t i = 0; i < held[0].size(); ++i) {
        for (size_t j = 0; j < held[1].size(); ++j) {
          const auto row = static_cast<int64_t>(i);
          const int64_t start =
              group_rows > 0 ? row / group_rows * group_stride + row % group_rows * pitch : row * pitch;
          expected.at(static_cast<size_t>(storage.offset + start) + j) = {0, held[0][i] * shape[1] + held[1][j]};
        }
      }
      ASSERT_EQ(contents(layout, layout.storage(rank), "b"), expected);
    }
  }
}

void expect_refused(const std::string& part, std::vector<TensorLayout> tensors) {
  expect_error(part, [&] { Layout({line(2)}, std::move(tensors)); });
}

TEST(Layout, NamesWhatItRefuses) {
  const std::vector<Placement> shard = {Shard{}}, flat = {Flat{}};
  expect_refused("unique names, got 'w' twice", {tensor("w", {4}, shard), tensor("w", {4}, shard)});
  expect_refused("with a name", {tensor("", {4}, shard)});
  expect_refused("'w': expected 1 placements", {tensor("w", {4}, {})});
  expect_refused("'w': expected fewer than 2^63", {tensor("w", {int64_t{1} << 62}, shard)});
  TensorLayout elsewhere = tensor("w", {4}, shard);
  elsewhere.mesh = 1;
  expect_refused("'w': expected one of 1 meshes, got mesh 1", {elsewhere});
  elsewhere.mesh = -1;
  expect_refused("got mesh -1", {elsewhere});
  expect_refused("offset in [0, 2^56] elements, got -1", {tensor("w", {4}, shard, {"", {}, -1})});
  expect_refused("strides in [0, 2^56]", {tensor("w", {4}, shard, {"", {}, 0, {-1}})});
  expect_refused("group_rows in [0, 2^56]", {tensor("w", {4}, shard, {"", {}, 0, {}, -2})});
  expect_refused("group_stride in [0, 2^56]", {tensor("w", {4}, shard, {"", {}, 0, {}, 1, kMaxStorageElements + 1})});
  expect_refused("1 strides, one for each dimension, got 2", {tensor("w", {4}, shard, {"", {}, 0, {2, 1}})});
  expect_refused("without group_stride where group_rows is 0, got 8", {tensor("w", {4}, shard, {"", {}, 0, {}, 0, 8})});
  expect_refused("no groups of rows in a scalar", {tensor("w", {}, {Replicate{}}, {"", {}, 0, {}, 1, 1})});
  expect_refused("without strides and groups for a Flat", {tensor("w", {4}, flat, {"", {}, 0, {1}})});
  expect_refused("without strides and groups for a Flat", {tensor("w", {4}, flat, {"", {}, 0, {}, 1, 1})});
  expect_refused("with the buffer_shape of a Flat", {tensor("w", {4}, {Flat{0, 3}})});
  expect_refused("'w': expected sizes >= 0, got [-3]", {tensor("w", {4}, shard, {"", Shape{-3}})});
}

void expect_storage_refused(const std::string& part, std::vector<TensorLayout> tensors) {
  const Layout layout({line(2)}, std::move(tensors));
  expect_error(part, [&] { layout.storage(1); });
}

TEST(Layout, StorageOfARankNamesWhatItRefuses) {
  const std::vector<Placement> all = {Replicate{}}, shard = {Shard{}};
  const auto in = [](Shape shape, int64_t offset, Shape strides = {}) { return Storage{"b", shape, offset, strides}; };
  expect_storage_refused("'w' on rank 1: expected storage within buffer 'b' of shape [5], got elements beyond it",
                         {tensor("w", {4}, all, in({5}, 2))});
  expect_storage_refused("within buffer 'w' of shape [2], got elements beyond it for [2:4]",
                         {tensor("w", {4}, shard, {"", {}, 1})});
  expect_storage_refused("within buffer", {tensor("w", {4, 2}, all, in({9}, 0, {3, 1}))});
  expect_storage_refused("within buffer", {tensor("w", {4}, all, {"b", Shape{7}, 0, {}, 2, 6})});
  expect_storage_refused("within buffer", {tensor("w", {2}, all, in({9}, 0, {kMaxStorageElements}))});
  expect_storage_refused("'z' on rank 1: expected storage of its own in buffer 'b', got an overlap with tensor 'w'",
                         {tensor("w", {4}, all, in({9}, 0)), tensor("z", {4}, all, in({9}, 3))});
  expect_storage_refused("overlap", {tensor("w", {4}, all, in({9}, 0, {2})), tensor("z", {1}, all, in({9}, 4))});
  expect_storage_refused("lay elements apart", {tensor("w", {4}, all, in({9}, 0, {0}))});
  expect_storage_refused("lay elements apart", {tensor("w", {2, 4}, all, in({9}, 0, {3, 1}))});
  expect_storage_refused("'z' on rank 1: expected buffer 'b' of shape [9] as other tensors say, got [10]",
                         {tensor("w", {4}, all, in({9}, 0)), tensor("z", {4}, all, in({10}, 4))});
  TensorLayout other = tensor("z", {4}, all, in({9}, 4));
  other.spec.dtype = "float16";
  expect_storage_refused("of dtype bfloat16 as other tensors say, got float16",
                         {tensor("w", {4}, all, in({9}, 0)), other});
  expect_storage_refused("groups of rows", {tensor("w", {int64_t{1} << 21}, all, {"b", Shape{1 << 23}, 0, {}, 1, 2})});
}

TEST(Layout, BuffersAreSweptOneByOne) {  // the same elements of another buffer are no overlap
  std::vector<TensorLayout> tensors;
  for (const char* buffer : {"a", "b"}) {
    for (const int64_t offset : {0, 4}) {
      const std::string name = buffer + std::to_string(offset);
      tensors.push_back(tensor(name, {4}, {Replicate{}}, {buffer, Shape{8}, offset}));
    }
  }
  EXPECT_EQ(Layout({line(1)}, tensors).storage(0).fully_covered, (std::vector<bool>{true, true}));
}

TEST(Layout, OverlapAcrossTheRegionsOfOneTensorIsFound) {  // groups closer than their rows reach
  expect_storage_refused("overlap with tensor 'w'", {tensor("w", {4}, {Replicate{}}, {"b", Shape{9}, 0, {2}, 2, 2})});
}

TEST(Layout, MoreThanTwoToThe31Elements) {
  const int64_t rows = int64_t{1} << 32;
  const Layout layout({line(2)}, {tensor("w", {rows, 3}, {Shard{}}, {"b", Shape{rows, 6}, 3, {6, 1}})});
  const RankStorage storage = layout.storage(1);
  ASSERT_EQ(storage.regions.size(), 1u);
  EXPECT_EQ(storage.regions[0].box, (Box{2, {rows / 2, 0}, {rows / 2, 3}}));
  EXPECT_EQ(storage.regions[0].offset, 3);
  EXPECT_FALSE(storage.fully_covered[0]);
}

}  // namespace
}  // namespace areal::reshard
