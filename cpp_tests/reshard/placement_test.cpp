#include "reshard/placement.h"

#include <map>
#include <set>

#include "layout_testing.h"

namespace areal::reshard {
namespace {

using Shape = std::vector<int64_t>;
using Placements = std::vector<Placement>;

// What every position of a mesh holds along a one-dimensional tensor.
std::vector<Indices> parts(int64_t size, const Mesh& mesh, const Placements& placements) {
  std::vector<Indices> out;
  for (int64_t position = 0; position < mesh.size(); ++position) {
    Indices held;
    for (const Box& box : local_boxes({size}, mesh, placements, position)) {
      const Indices elements = elements_of(box, {size});
      held.insert(held.end(), elements.begin(), elements.end());
    }
    out.push_back(held);
  }
  return out;
}

TEST(Placement, SmallInputs) {
  using All = std::vector<Indices>;
  EXPECT_EQ(parts(2, line(8), {Shard{}}), (All{{0}, {1}, {}, {}, {}, {}, {}, {}}));
  EXPECT_EQ(parts(10, line(4), {Shard{}}), (All{{0, 1, 2}, {3, 4, 5}, {6, 7, 8}, {9}}));
  EXPECT_EQ(parts(3, line(4), {Shard{}}), (All{{0}, {1}, {2}, {}}));
  EXPECT_EQ(parts(0, line(2), {Shard{}}), (All{{}, {}}));
  EXPECT_EQ(parts(1, line(2), {Shard{}}), (All{{0}, {}}));
  EXPECT_EQ(parts(3, line(2), {Replicate{}}), (All{{0, 1, 2}, {0, 1, 2}}));
  EXPECT_EQ(parts(5, line(3), {Shard{0, 4}}), (All{{0, 1, 2, 3}, {4}, {}}));
  EXPECT_EQ(parts(5, grid(2, 2), {Shard{}, Shard{}}), (All{{0, 1}, {2}, {3}, {4}}));
}

TEST(Placement, StridedShardsOfUnevenPieces) {
  using All = std::vector<Indices>;
  EXPECT_EQ(parts(8, line(2), {StridedShard{0, 2}}), (All{{0, 1, 4, 5}, {2, 3, 6, 7}}));
  EXPECT_EQ(parts(5, line(2), {StridedShard{0, 2}}), (All{{0, 1, 3}, {2, 4}}));
  EXPECT_EQ(parts(5, line(2), {StridedShard{0, 2, 2}}), (All{{0, 1, 3, 4}, {2}}));
  EXPECT_EQ(parts(9, line(4), {StridedShard{0, 2}}), (All{{0, 1, 5}, {2, 3, 6}, {4, 7}, {8}}));
  EXPECT_EQ(parts(0, line(2), {StridedShard{0, 2}}), (All{{}, {}}));
  EXPECT_EQ(parts(2, line(2), {StridedShard{0, 2}}), (All{{0, 1}, {}}));
  // A parameter of 5 rows, over 2 tensor-parallel ranks (3 and 2 rows), then each of these over 2 FSDP ranks.
  EXPECT_EQ(parts(5, grid(2, 2), {StridedShard{0, 2}, Shard{}}), (All{{0, 1}, {3}, {2}, {4}}));
}

TEST(Placement, NeighbouringStridedPiecesAreOneBox) {
  EXPECT_EQ(local_boxes({2, 3}, line(2), Placements{StridedShard{0, 2}}, 0), (std::vector<Box>{{2, {0, 0}, {2, 3}}}));
  EXPECT_EQ(local_boxes({8, 3}, line(2), Placements{StridedShard{0, 2}}, 1),
            (std::vector<Box>{{2, {2, 0}, {2, 3}}, {2, {6, 0}, {2, 3}}}));
}

// Property: each position holds what the oracle lists, in the order of its local index space.
void expect_held(const Shape& shape, const Mesh& mesh, const Placements& placements) {
  LocalPart part;
  for (int64_t position = 0; position < mesh.size(); ++position) {
    const std::vector<Indices> held = held_indices(shape, mesh, placements, position);
    part.assign(shape, mesh, placements, position);
    std::map<int64_t, int64_t> local_to_canonical;  // both flattened
    for (const LocalBox& local : part.boxes()) {
      const Indices canonical = elements_of(local.box, shape);
      Box there = local.box;
      there.start = local.local_start;
      const Indices at = elements_of(there, Shape(part.shape().begin(), part.shape().end()));
      for (size_t i = 0; i < at.size(); ++i) ASSERT_TRUE(local_to_canonical.emplace(at[i], canonical[i]).second);
    }
    Shape local_shape;
    for (const Indices& indices : held) local_shape.push_back(static_cast<int64_t>(indices.size()));
    ASSERT_EQ(Shape(part.shape().begin(), part.shape().end()), local_shape);
    ASSERT_EQ(static_cast<int64_t>(local_to_canonical.size()), product(local_shape));
    ASSERT_EQ(part.elements(), product(local_shape));
    for (const auto& [local, canonical] : local_to_canonical) {
      int64_t rest = local, expected = 0, stride = 1;
      for (size_t d = shape.size(); d-- > 0;) {
        expected += held[d][static_cast<size_t>(rest % local_shape[d])] * stride;
        rest /= local_shape[d];
        stride *= shape[d];
      }
      ASSERT_EQ(canonical, expected);
    }
  }
}

class Draw {
 public:
  explicit Draw(uint32_t seed) : random_(seed) {}
  int64_t below(int64_t bound) { return static_cast<int64_t>(random_() % static_cast<uint32_t>(bound)); }

  Shape shape(int64_t most_dims, int64_t most) {
    Shape shape;
    for (int64_t dims = below(most_dims + 1); dims > 0; --dims) shape.push_back(below(most));
    return shape;
  }
  Mesh mesh() {
    Shape shape;
    std::vector<std::string> names;
    for (int64_t dims = 1 + below(3); dims > 0; --dims) {
      shape.push_back(1 + below(4));
      names.emplace_back(1, static_cast<char>('a' + dims));
    }
    std::vector<int32_t> ranks(static_cast<size_t>(product(shape)));
    std::iota(ranks.begin(), ranks.end(), 100);
    std::shuffle(ranks.begin(), ranks.end(), random_);
    return Mesh(ranks, shape, names);
  }
  Placements placements(const Shape& shape, const Mesh& mesh) {
    Placements placements;
    for (size_t k = 0; k < mesh.shape().size(); ++k) {
      const int kind = shape.empty() ? 0 : static_cast<int>(below(4));
      const int dim = shape.empty() ? 0 : static_cast<int>(below(static_cast<int64_t>(shape.size())));
      const int64_t chunk = below(3) > 0 ? 0 : 12 + below(3);  // holds all: later ranks are empty
      if (kind == 0) placements.push_back(Replicate{});
      if (kind == 1 || kind == 2) placements.push_back(Shard{dim, chunk});
      if (kind == 3) placements.push_back(StridedShard{dim, 1 + below(5), chunk});
    }
    return placements;
  }

 private:
  std::mt19937 random_;
};

TEST(Placement, HoldsWhatTheOracleLists) {
  Draw draw(1);
  for (int round = 0; round < 2000; ++round) {
    const Shape shape = draw.shape(3, 12);
    const Mesh mesh = draw.mesh();
    const Placements placements = draw.placements(shape, mesh);
    check_placements("w", shape, mesh, placements);
    expect_held(shape, mesh, placements);
    if (HasFatalFailure()) return;
  }
}

// How often each element of the tensor is held, over all ranks.
std::vector<int64_t> times_held(const Shape& shape, const Mesh& mesh, const Placements& placements) {
  std::vector<int64_t> times(static_cast<size_t>(product(shape)));
  for (int64_t position = 0; position < mesh.size(); ++position) {
    for (const Box& box : local_boxes(shape, mesh, placements, position)) {
      EXPECT_FALSE(box.empty());
      for (const int64_t element : elements_of(box, shape)) ++times[static_cast<size_t>(element)];
    }
  }
  return times;
}

TEST(Placement, EveryElementIsHeldOncePerReplica) {
  Draw draw(2);
  for (int round = 0; round < 2000; ++round) {
    const Shape shape = draw.shape(3, 9);
    const Mesh mesh = draw.mesh();
    const Placements placements = draw.placements(shape, mesh);
    int64_t replicas = 1;
    for (size_t k = 0; k < placements.size(); ++k) {
      if (std::holds_alternative<Replicate>(placements[k])) replicas *= mesh.shape()[k];
    }
    ASSERT_EQ(times_held(shape, mesh, placements), std::vector<int64_t>(size_t(product(shape)), replicas));
  }
}

TEST(Flat, HoldsAnIntervalInFewBoxes) {
  Draw draw(3);
  for (int round = 0; round < 3000; ++round) {
    const Shape shape = draw.shape(4, 6);
    const int64_t size = product(shape), ranks = 1 + draw.below(6), offset = draw.below(2) * draw.below(40);
    const int64_t least = (offset + size + ranks - 1) / ranks, chunk = draw.below(2) * (least + draw.below(5));
    const int64_t step = chunk > 0 ? chunk : least;
    const Mesh mesh = line(ranks);
    int64_t next = 0;
    LocalPart part;
    for (int64_t position = 0; position < ranks; ++position) {
      part.assign(shape, mesh, Placements{Flat{chunk, offset}}, position);
      EXPECT_TRUE(part.flat());
      EXPECT_LE(part.boxes().size(), shape.empty() ? 1 : 2 * shape.size() - 1);
      int64_t held = 0;
      for (const LocalBox& local : part.boxes()) {
        ASSERT_EQ(offset + next, position * step + local.local_start[0]) << "elements keep their order in the buffer";
        for (const int64_t element : elements_of(local.box, shape)) ASSERT_EQ(element, next++);
        held += local.box.elements();
        ASSERT_LE(local.local_start[0] + local.box.elements(), step);
      }
      ASSERT_EQ(part.elements(), held);
    }
    ASSERT_EQ(next, size);
  }
}

TEST(Flat, BesideReplicasEveryReplicaHoldsTheSame) {
  const Placements placements = {Replicate{}, Flat{}};
  EXPECT_EQ(times_held({3, 5}, grid(2, 4), placements), std::vector<int64_t>(15, 2));
  EXPECT_EQ(local_boxes({3, 5}, grid(2, 4), placements, 1),
            (std::vector<Box>{{2, {0, 4}, {1, 1}}, {2, {1, 0}, {1, 3}}}));
}

TEST(Ragged, HoldsItsBoxesInTheirOrder) {
  const Ragged ragged{{{{2, {2, 0}, {1, 4}}, {2, {0, 0}, {1, 2}}, {2, {0, 2}, {0, 2}}}, {}, {{2, {0, 0}, {3, 4}}}}};
  LocalPart part;
  part.assign(Shape{3, 4}, line(3), Placements{ragged}, 0);
  ASSERT_EQ(part.boxes().size(), 2u);
  EXPECT_EQ(part.boxes()[1].box, (Box{2, {0, 0}, {1, 2}}));
  EXPECT_EQ(part.boxes()[1].local_start[0], 4);
  EXPECT_EQ(part.shape().size(), 1u);
  EXPECT_EQ(part.shape()[0], 6);
  part.assign(Shape{3, 4}, line(3), Placements{ragged}, 1);
  EXPECT_TRUE(part.boxes().empty());
  EXPECT_EQ(part.shape()[0], 0);
}

TEST(Placement, ScalarsAndMoreThanTwoToThe31Elements) {
  const Box scalar;
  EXPECT_EQ(local_boxes({}, line(2), Placements{Replicate{}}, 1), std::vector<Box>{scalar});
  EXPECT_EQ(local_boxes({}, line(2), Placements{Flat{}}, 0), std::vector<Box>{scalar});
  EXPECT_EQ(local_boxes({}, line(2), Placements{Flat{}}, 1), std::vector<Box>{});
  const int64_t rows = int64_t{3} << 31, columns = 5;
  EXPECT_EQ(local_boxes({rows, columns}, line(4), Placements{Shard{}}, 3),
            (std::vector<Box>{{2, {rows / 4 * 3, 0}, {rows / 4, columns}}}));
  EXPECT_EQ(local_boxes({rows, columns}, line(4), Placements{Flat{}}, 1),
            (std::vector<Box>{{2, {rows / 4, 0}, {rows / 4, columns}}}));
  EXPECT_EQ(local_boxes({rows, columns}, line(2), Placements{StridedShard{0, 2}}, 1),
            (std::vector<Box>{{2, {rows / 4, 0}, {rows / 4, columns}}, {2, {rows / 4 * 3, 0}, {rows / 4, columns}}}));
  const int64_t huge = int64_t{1} << 62;
  EXPECT_EQ(local_boxes({huge, huge, 0}, line(2), Placements{Flat{}}, 0), std::vector<Box>{});
  // As many elements as there may be, not divisible.
  const int64_t part = huge / 3 + 1;
  EXPECT_EQ(local_boxes({huge}, line(3), Placements{Shard{}}, 2), (std::vector<Box>{{1, {2 * part}, {part - 2}}}));
  EXPECT_EQ(local_boxes({huge}, line(3), Placements{Flat{}}, 2), (std::vector<Box>{{1, {2 * part}, {part - 2}}}));
  EXPECT_EQ(local_boxes({huge}, line(1), Placements{StridedShard{0, 3}}, 0), (std::vector<Box>{{1, {0}, {huge}}}));
}

TEST(Placement, NamesWhatItRefuses) {
  const auto check = [](const Shape& shape, const Mesh& mesh, const Placements& placements) {
    check_placements("w", shape, mesh, placements);
  };
  expect_error("'w': expected 2 placements, one for each dimension of its mesh, got 1",
               [&] { check({4}, grid(2, 2), {Replicate{}}); });
  expect_error("Shard over mesh dimension 'tp' of a dimension of shape [4, 4], got dim = 2",
               [&] { check({4, 4}, grid(2, 2), {Replicate{}, Shard{2}}); });
  expect_error("got dim = -1", [&] { check({4}, line(2), {Shard{-1}}); });
  expect_error("shape [], got dim = 0", [&] { check({}, line(2), {StridedShard{}}); });
  expect_error("chunk of at least 3 for 5 elements over 2 ranks, got 2", [&] { check({5}, line(2), {Shard{0, 2}}); });
  expect_error("chunk of at least 2 for 3 elements over 2 ranks, got 1",
               [&] { check({5}, grid(2, 2), {Shard{}, Shard{0, 1}}); });
  expect_error("with a chunk in [0", [&] { check({5}, line(2), {Shard{0, -1}}); });
  expect_error("with a chunk in [0", [&] { check({5}, line(2), {Shard{0, int64_t{1} << 62}}); });
  expect_error("split_factor in [1, 65536], got 0", [&] { check({5}, line(2), {StridedShard{0, 0}}); });
  expect_error("split_factor in [1, 65536], got 65537", [&] { check({5}, line(2), {StridedShard{0, 65537}}); });
  expect_error("chunk of at least 2 for 3 elements", [&] { check({5}, line(2), {StridedShard{0, 2, 1}}); });
  expect_error("chunk of at least 4", [&] { check({2, 3}, line(2), {Flat{3, 1}}); });
  expect_error("offset >= 0 and an end up to 2^62, got -1", [&] { check({2}, line(2), {Flat{0, -1}}); });
  const int64_t most = int64_t{1} << 62;
  expect_error("an end up to 2^62", [&] { check({2}, line(2), {Flat{0, most - 1}}); });
  expect_error("nothing but Replicate beside Flat", [&] { check({4}, grid(2, 2), {Flat{}, Shard{}}); });
  expect_error("nothing but Replicate beside Flat", [&] { check({4}, grid(2, 2), {Shard{}, Flat{}}); });
  expect_error("nothing but Replicate beside Flat", [&] { check({4}, grid(2, 2), {Flat{}, Flat{}}); });
  expect_error("boxes for the 2 ranks of mesh dimension 'dp', got 1", [&] { check({4}, line(2), {Ragged{{{}}}}); });
  expect_error("inside shape [4], got [3:5] at 1 of mesh dimension 'dp'",
               [&] { check({4}, line(2), {Ragged{{{}, {{1, {3}, {2}}}}}}); });
  expect_error("inside shape [4]", [&] { check({4}, line(1), {Ragged{{{Box{}}}}}); });
  expect_error("inside shape [4]", [&] { check({4}, line(1), {Ragged{{{{1, {-1}, {2}}}}}}); });
  expect_error("inside shape [4]", [&] { check({4}, line(1), {Ragged{{{{1, {1}, {-1}}}}}}); });
  expect_error("disjoint Ragged boxes, got [0:2] and [1:3]",
               [&] { check({4}, line(1), {Ragged{{{{1, {0}, {2}}, {1, {1}, {2}}}}}}); });
  expect_error("sizes >= 0, got shape [-4]", [&] { check({-4}, line(1), {Replicate{}}); });
  const int64_t huge = int64_t{1} << 40;
  expect_error("elements up to 2^62", [&] { check({huge, huge}, line(1), {Replicate{}}); });
  expect_error("elements up to 2^62", [&] { check({most + 1}, line(2), {Shard{}}); });
  expect_error("elements up to 2^62", [&] { check({0, most + 1}, line(2), {StridedShard{1, 2}}); });
  expect_error("at most 6 dimensions", [&] { check(Shape(7, 1), line(1), {Replicate{}}); });
  expect_error("a position in [0, 2), got 2", [] { local_boxes({4}, line(2), Placements{Shard{}}, 2); });
  expect_error("boxes of a tensor on one rank", [] {
    local_boxes({262144, 262144}, grid(2, 2), Placements{StridedShard{0, 65536}, StridedShard{1, 65536}}, 0);
  });
}

}  // namespace
}  // namespace areal::reshard
