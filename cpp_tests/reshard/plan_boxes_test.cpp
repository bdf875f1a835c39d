// Boxes of the planner: pieces, intersections, cuts and chunks.
#include <gtest/gtest.h>

#include <random>

#include "base/check.h"
#include "plan_testing.h"
#include "reshard/plan_chunks.h"
#include "reshard/refine.h"

namespace areal::reshard {
namespace {

const std::vector<std::vector<int64_t>> kShapes = {{},     {1},       {7},       {2, 3},   {1, 5},
                                                   {5, 1}, {3, 2, 4}, {1, 1, 6}, {2, 1, 3}};

Box whole(const std::vector<int64_t>& shape) {
  Box box;
  box.dims = int(shape.size());
  std::copy(shape.begin(), shape.end(), box.size.begin());
  return box;
}

std::vector<int64_t> elements_of_all(const std::vector<Box>& boxes, const std::vector<int64_t>& shape) {
  std::vector<int64_t> all;
  for (const Box& box : boxes) {
    EXPECT_FALSE(box.empty());
    const std::vector<int64_t> some = elements_of(box, shape);
    all.insert(all.end(), some.begin(), some.end());
  }
  return all;
}

TEST(PlanBoxes, AnIntervalIsAFewBoxesInOrder) {
  for (const auto& shape : kShapes) {
    const Box box = whole(shape);
    for (int64_t begin = 0; begin <= box.elements(); ++begin) {
      for (int64_t end = begin; end <= box.elements(); ++end) {
        std::vector<Box> boxes;
        append_interval(box, begin, end, &boxes);
        std::vector<int64_t> wanted(size_t(end - begin));
        std::iota(wanted.begin(), wanted.end(), begin);
        EXPECT_EQ(elements_of_all(boxes, shape), wanted);
        EXPECT_LE(boxes.size(), std::max<size_t>(1, 2 * shape.size()) - (shape.empty() ? 0 : 1));
      }
    }
  }
}

TEST(PlanBoxes, FittingPiecesFollowOneAnother) {
  for (const auto& shape : kShapes) {
    const Box box = whole(shape);
    for (int64_t most = 1; most <= box.elements() + 1; ++most) {
      std::vector<Box> boxes;
      append_fitting(box, most, &boxes);
      std::vector<int64_t> wanted(size_t(box.elements()));
      std::iota(wanted.begin(), wanted.end(), 0);
      EXPECT_EQ(elements_of_all(boxes, shape), wanted);
      for (const Box& piece : boxes) EXPECT_LE(piece.elements(), most);
      EXPECT_TRUE(most < box.elements() || boxes.size() == 1);
    }
  }
}

TEST(PlanBoxes, ChunksTakeAsManyAtomsAsFit) {
  Message message{};
  pack_chunks({50, 50, 1, 100, 3}, 100, &message);
  ASSERT_EQ(message.chunks.size(), 4u);
  EXPECT_EQ(message.bytes, 204);
  const std::vector<std::array<int64_t, 3>> wanted = {{100, 0, 2}, {1, 2, 1}, {100, 3, 1}, {3, 4, 1}};
  for (size_t i = 0; i < wanted.size(); ++i) {
    const Chunk& chunk = message.chunks[i];
    EXPECT_EQ(chunk.id, int32_t(i));
    EXPECT_EQ((std::array{chunk.bytes, chunk.first_atom, chunk.atom_count}), wanted[i]);
  }
}

TEST(PlanBoxes, PiecesAreDisjointAndKnowTheirHolders) {
  std::mt19937 random(5);
  for (int round = 0; round < 300; ++round) {
    const std::vector<int64_t> shape = {4, 5, 3};
    std::vector<Box> boxes;
    std::vector<int32_t> holders;
    std::map<int64_t, std::set<int32_t>> wanted;
    for (int32_t holder = 0; holder < int32_t(1 + random() % 6); ++holder) {
      Box box = whole(shape);
      for (size_t d = 0; d < 3; ++d) {
        box.start[d] = int64_t(random() % uint64_t(shape[d]));
        box.size[d] = 1 + int64_t(random() % uint64_t(shape[d] - box.start[d]));
      }
      if (holder > 0 && random() % 3 == 0) box = boxes.back();
      boxes.push_back(box);
      holders.push_back(holder);
      for (const int64_t e : elements_of(box, shape)) wanted[e].insert(holder);
    }
    const Pieces pieces = disjoint_pieces(boxes, holders);
    std::map<int64_t, std::set<int32_t>> got;
    for (size_t i = 0; i < pieces.boxes.size(); ++i) {
      const auto& group = pieces.groups[size_t(pieces.group_of[i])];
      for (const int64_t e : elements_of(pieces.boxes[i], shape)) {
        EXPECT_TRUE(got.try_emplace(e, group.begin(), group.end()).second) << "element " << e << " is in two pieces";
      }
      EXPECT_TRUE(i == 0 || pieces.boxes[i - 1].start < pieces.boxes[i].start);
    }
    EXPECT_EQ(got, wanted);
    EXPECT_EQ(std::set(pieces.groups.begin(), pieces.groups.end()).size(), pieces.groups.size());
  }
}

TEST(PlanBoxes, WhatNobodyHoldsIsNamed) {
  const auto pieces = [](int64_t start, int64_t size) {
    Box box = whole({size});
    box.start[0] = start;
    const std::vector<int32_t> holders = {0};
    return std::make_shared<const Pieces>(disjoint_pieces(std::vector{box}, holders));
  };
  try {
    refine(pieces(2, 5), pieces(0, 9), "w");
    ADD_FAILURE() << "expected an error";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "plan: tensor 'w': expected a holder of [0:2] in the source, got none");
  }
}

}  // namespace
}  // namespace areal::reshard
