#include "reshard/box.h"

#include <random>

#include "layout_testing.h"
#include "reshard/layout_overlap.h"
#include "reshard/mesh.h"

namespace areal::reshard {
namespace {

TEST(Box, IntersectionIsWhatBothHold) {
  std::mt19937 random(1);
  const auto draw = [&](int64_t below) { return static_cast<int64_t>(random() % static_cast<uint32_t>(below)); };
  for (int round = 0; round < 500; ++round) {
    const std::vector<int64_t> shape = {5, 6};
    Box boxes[2];
    for (Box& box : boxes) {
      box.dims = 2;
      for (size_t d = 0; d < 2; ++d) {
        box.start[d] = draw(shape[d]);
        box.size[d] = draw(shape[d] - box.start[d] + 1);
      }
    }
    Indices a = elements_of(boxes[0], shape), b = elements_of(boxes[1], shape), common;
    std::set_intersection(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(common));
    const auto met = intersect(boxes[0], boxes[1]);
    ASSERT_EQ(met ? elements_of(*met, shape) : Indices{}, common) << box_text(boxes[0]) << box_text(boxes[1]);
    ASSERT_EQ(met, intersect(boxes[1], boxes[0]));
  }
}

TEST(Box, ScalarsShareTheirElement) {
  const Box scalar;
  EXPECT_EQ(scalar.elements(), 1);
  EXPECT_FALSE(scalar.empty());
  EXPECT_EQ(intersect(scalar, scalar), scalar);
  EXPECT_EQ(box_text(scalar), "[]");
}

TEST(Box, EmptyBoxesShareNothing) {
  const Box empty{1, {2}, {0}}, all{1, {0}, {4}};
  EXPECT_TRUE(empty.empty());
  EXPECT_EQ(intersect(empty, all), std::nullopt);
  EXPECT_EQ(box_text({2, {3, 0}, {2, 896}}), "[3:5, 0:896]");
}

TEST(Mesh, FindsRanksAndCoordinates) {
  const Mesh mesh({7, 3, 11, 0, 5, 9}, {3, 2}, {"dp", "tp"});
  EXPECT_EQ(mesh.size(), 6);
  EXPECT_EQ(mesh.position_of(11), 2);
  EXPECT_EQ(mesh.position_of(0), 3);
  for (const int32_t absent : {-1, 1, 4, 12}) EXPECT_EQ(mesh.position_of(absent), std::nullopt) << absent;
  EXPECT_EQ(mesh.coordinate(3), (std::vector<int64_t>{1, 1}));
  EXPECT_EQ(mesh.coordinate_along(0, 5), 2);
}

TEST(Mesh, NamesWhatItRefuses) {
  expect_error("shape of 1 to 8 dimensions, got 0", [] { Mesh({}, {}, {}); });
  expect_error("sizes >= 1, got [0]", [] { Mesh({}, {0}, {"dp"}); });
  expect_error("shape of 3 ranks, got [2, 2]", [] { Mesh({0, 1, 2}, {2, 2}, {"dp", "tp"}); });
  const int64_t huge = int64_t{1} << 40;
  expect_error("shape of 1 ranks", [&] { Mesh({0}, {huge, huge}, {"dp", "tp"}); });
  expect_error("1 dim_names, got 2", [] { Mesh({0}, {1}, {"dp", "tp"}); });
  expect_error("not empty", [] { Mesh({0}, {1}, {""}); });
  expect_error("'dp' twice", [] { Mesh({0}, {1, 1}, {"dp", "dp"}); });
  expect_error("unique ranks, got 4 twice", [] { Mesh({4, 1, 4}, {3}, {"dp"}); });
  expect_error("ranks >= 0, got -2", [] { Mesh({-2, 1}, {2}, {"dp"}); });
}

Indices elements_of(const ElementSet& set) {
  Indices out = {set.first};
  for (size_t d = 0; d < static_cast<size_t>(set.dims); ++d) {
    const Indices outer = out;
    for (int64_t i = 1; i < set.size[d]; ++i) {
      for (const int64_t element : outer) out.push_back(element + i * set.stride[d]);
    }
  }
  std::sort(out.begin(), out.end());
  return out;
}

TEST(ElementSet, MeetsExactlyWhereElementsAreShared) {
  std::mt19937 random(2);
  int met = 0, apart = 0;
  for (int round = 0; round < 20000; ++round) {
    ElementSet sets[2];
    for (ElementSet& set : sets) {
      std::vector<int64_t> sizes, strides;
      int64_t reach = 0;
      for (auto dims = random() % 4; dims > 0; --dims) {
        sizes.push_back(1 + static_cast<int64_t>(random() % 4));
        strides.push_back(reach + 1 + static_cast<int64_t>(random() % 5));
        reach += (sizes.back() - 1) * strides.back();
      }
      set = element_set(static_cast<int64_t>(random() % 40), sizes, strides);
      ASSERT_TRUE(is_nested(set));
    }
    const Indices a = elements_of(sets[0]), b = elements_of(sets[1]);
    Indices common;
    std::set_intersection(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(common));
    ASSERT_EQ(sets[0].last, a.back());
    ASSERT_EQ(meet(sets[0], sets[1]), !common.empty());
    ASSERT_EQ(meet(sets[1], sets[0]), !common.empty());
    ++(common.empty() ? apart : met);
  }
  EXPECT_GT(met, 1000);
  EXPECT_GT(apart, 1000);
}

TEST(ElementSet, NestedSetsNameNoElementTwice) {
  std::mt19937 random(3);
  for (int round = 0; round < 5000; ++round) {
    std::vector<int64_t> sizes, strides;
    for (auto dims = random() % 4; dims > 0; --dims) {
      sizes.push_back(1 + static_cast<int64_t>(random() % 4));
      strides.push_back(static_cast<int64_t>(random() % 12));
    }
    const ElementSet set = element_set(0, sizes, strides);
    Indices elements = elements_of(set);
    ASSERT_EQ(static_cast<int64_t>(elements.size()), product(sizes));
    if (is_nested(set)) {
      ASSERT_EQ(std::unique(elements.begin(), elements.end()), elements.end());
    }
  }
}

TEST(ElementSet, LargeInterleavedSetsAreToldApartAtOnce) {  // gate and up columns alternate, over 2^40 elements
  const int64_t columns = int64_t{1} << 20;
  const ElementSet gate = element_set(0, {{columns, columns}}, {{2 * columns, 2}});
  const ElementSet up = element_set(1, {{columns, columns}}, {{2 * columns, 2}});
  EXPECT_FALSE(meet(gate, up));
  EXPECT_TRUE(meet(gate, gate));
  EXPECT_TRUE(meet(up, element_set(2 * columns * columns - 1, {}, {})));
}

}  // namespace
}  // namespace areal::reshard
