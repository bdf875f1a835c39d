#include "reshard/arena_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "base/check.h"

namespace areal::reshard {
namespace {

std::vector<TensorSpec> random_specs(std::mt19937& random) {
  std::vector<TensorSpec> specs(random() % 20);
  for (size_t i = 0; i < specs.size(); ++i) {
    const auto item_bytes = int64_t{1} << random() % 4;
    specs[i] = {"t" + std::to_string(random() % 1000) + "." + std::to_string(i), "int", item_bytes, {}};
    for (auto dims = random() % 4; dims > 0; --dims) specs[i].shape.push_back(static_cast<int64_t>(random() % 12));
  }
  return specs;
}

void expect_error(const std::string& part, const auto& call) {
  try {
    call();
    ADD_FAILURE() << "expected an error with '" << part << "'";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

TEST(ArenaLayout, IgnoresTheOrderOfInput) {
  std::mt19937 random(1);
  for (int round = 0; round < 50; ++round) {
    std::vector<TensorSpec> specs = random_specs(random);
    const ArenaLayout layout(specs);
    std::shuffle(specs.begin(), specs.end(), random);
    EXPECT_EQ(ArenaLayout(specs).digest(), layout.digest());
    EXPECT_EQ(layout.tensors(), ArenaLayout(specs).tensors());
  }
}

TEST(ArenaLayout, PlacesTensorsInOrderOnCacheLinesWithoutOverlap) {
  std::mt19937 random(2);
  for (int round = 0; round < 50; ++round) {
    const ArenaLayout layout(random_specs(random));
    int64_t end = 0, payload = 0;
    for (int64_t i = 0; i < layout.count(); ++i) {
      const TensorSpec& spec = layout.tensors()[size_t(i)];
      EXPECT_EQ(layout.offset_bytes(i) % ArenaLayout::kAlignmentBytes, 0);
      EXPECT_GE(layout.offset_bytes(i), end);
      EXPECT_LT(layout.offset_bytes(i), end + ArenaLayout::kAlignmentBytes);
      EXPECT_EQ(layout.find(spec.name), i);
      end = layout.offset_bytes(i) + spec.bytes();
      payload += spec.bytes();
    }
    EXPECT_GE(layout.arena_bytes(), std::max(end, int64_t{64}));
    EXPECT_EQ(layout.payload_bytes(), payload);
  }
}

TEST(ArenaLayout, DigestCoversNameDtypeItemSizeAndShape) {
  const TensorSpec spec{"w", "bfloat16", 2, {4, 6}};
  const uint64_t digest = ArenaLayout({spec}).digest();
  for (const TensorSpec& other : {TensorSpec{"v", "bfloat16", 2, {4, 6}}, TensorSpec{"w", "float16", 2, {4, 6}},
                                  TensorSpec{"w", "bfloat16", 4, {4, 6}}, TensorSpec{"w", "bfloat16", 2, {6, 4}},
                                  TensorSpec{"w", "bfloat16", 2, {24}}, TensorSpec{"w", "bfloat16", 2, {4, 6, 1}}}) {
    EXPECT_NE(ArenaLayout({other}).digest(), digest);
    EXPECT_NE(ArenaLayout({spec}).tensors(), ArenaLayout({other}).tensors());
  }
}

TEST(ArenaLayout, FindsNoUnknownName) {
  const ArenaLayout layout({{"b", "int", 1, {}}, {"d", "int", 1, {}}});
  for (const char* name : {"", "a", "c", "e", "bb"}) EXPECT_EQ(layout.find(name), std::nullopt) << name;
}

TEST(ArenaLayout, SerializesToAnEqualLayout) {
  std::mt19937 random(3);
  for (int round = 0; round < 50; ++round) {
    const ArenaLayout layout(random_specs(random));
    const ArenaLayout parsed = ArenaLayout::parse(layout.serialize());
    EXPECT_EQ(parsed.tensors(), layout.tensors());
    EXPECT_EQ(parsed.digest(), layout.digest());
  }
}

TEST(ArenaLayout, ParseRejectsEveryTruncationAndAppendedBytes) {
  const std::string text = ArenaLayout({{"a", "int", 4, {2, 3}}, {"b", "float", 4, {}}}).serialize();
  for (size_t length = 0; length < text.size(); ++length) {
    EXPECT_THROW(ArenaLayout::parse(std::string_view(text).substr(0, length)), Error) << length;
  }
  EXPECT_THROW(ArenaLayout::parse(text + '\0'), Error);
}

TEST(ArenaLayout, ParseSurvivesEveryFlippedBit) {  // any layout or an Error, never a crash
  std::string text = ArenaLayout({{"a", "int", 4, {2, 3}}, {"b", "float", 4, {7}}}).serialize();
  const uint64_t digest = ArenaLayout::parse(text).digest();
  for (size_t bit = 0; bit < 8 * text.size(); ++bit) {
    text[bit / 8] = static_cast<char>(text[bit / 8] ^ (1 << bit % 8));
    try {
      EXPECT_NE(ArenaLayout::parse(text).digest(), digest) << bit;
    } catch (const Error&) {
    }
    text[bit / 8] = static_cast<char>(text[bit / 8] ^ (1 << bit % 8));
  }
}

TEST(ArenaLayout, NamesWhatItRefuses) {
  expect_error("with a name", [] { ArenaLayout({{"", "int", 4, {}}}); });
  expect_error("'twin' twice", [] { ArenaLayout({{"twin", "int", 4, {}}, {"twin", "int", 4, {}}}); });
  expect_error("'w': expected sizes >= 0, got [2, -1]", [] { ArenaLayout({{"w", "int", 4, {2, -1}}}); });
  expect_error("'w': expected an element size", [] { ArenaLayout({{"w", "int", 0, {}}}); });
  expect_error("'w': expected fewer than 2^63", [] { ArenaLayout({{"w", "int", 8, {int64_t{1} << 40, 1 << 22}}}); });
  expect_error("2^63 bytes in all", [] {
    const int64_t huge = int64_t{1} << 62;
    ArenaLayout({{"a", "int", 1, {huge}}, {"b", "int", 1, {huge}}});
  });
}

TEST(ArenaLayout, EmptyDimensionsMakeEmptyTensorsHoweverLargeTheOthers) {
  EXPECT_EQ((TensorSpec{"w", "int", 8, {int64_t{1} << 62, int64_t{1} << 62, 0}}.bytes()), 0);
}

// The oracle paints every byte of the target with the plan and compares with what the layout says.
void expect_exact_cover(const ArenaLayout& layout, const ArenaPlan& plan) {
  std::vector<int> painted(size_t(layout.arena_bytes()), 0);
  for (const ArenaPiece& piece : plan.pieces) {
    ASSERT_GT(piece.bytes, 0);
    ASSERT_EQ(piece.target_offset_bytes, layout.offset_bytes(piece.tensor) + piece.source_offset_bytes);
    for (int64_t i = 0; i < piece.bytes; ++i) ++painted[size_t(piece.target_offset_bytes + i)];
  }
  for (int64_t tensor = 0; tensor < layout.count(); ++tensor) {
    for (int64_t i = 0; i < layout.tensors()[size_t(tensor)].bytes(); ++i) {
      ASSERT_EQ(painted[size_t(layout.offset_bytes(tensor) + i)]--, 1) << "tensor " << tensor << " byte " << i;
    }
  }
  EXPECT_EQ(std::count(painted.begin(), painted.end(), 0), layout.arena_bytes()) << "pieces in the padding";
}

TEST(ArenaPlan, CoversEveryByteOnceAtTheLowerBound) {
  std::mt19937 random(4);
  for (int round = 0; round < 200; ++round) {
    const ArenaLayout layout(random_specs(random));
    const ArenaPlan plan = make_arena_plan(layout, 64 * (1 + random() % 20));
    expect_exact_cover(layout, plan);
    EXPECT_EQ(plan.payload_bytes, layout.payload_bytes());
  }
}

TEST(ArenaPlan, ChunksHoldAllPiecesInOrderAndAllButTheLastAreFull) {
  std::mt19937 random(5);
  for (int round = 0; round < 200; ++round) {
    const ArenaLayout layout(random_specs(random));
    const int64_t chunk_bytes = 64 * static_cast<int64_t>(1 + random() % 20);
    const ArenaPlan plan = make_arena_plan(layout, chunk_bytes);
    int64_t next_piece = 0, end = 0;
    for (size_t i = 0; i < plan.chunks.size(); ++i) {
      const ArenaChunk& chunk = plan.chunks[i];
      ASSERT_EQ(chunk.first_piece, next_piece);
      ASSERT_GT(chunk.piece_count, 0);
      next_piece += chunk.piece_count;
      const ArenaPiece &first = plan.pieces[size_t(chunk.first_piece)], &last = plan.pieces[size_t(next_piece - 1)];
      EXPECT_EQ(chunk.target_offset_bytes, first.target_offset_bytes);
      EXPECT_EQ(chunk.target_offset_bytes + chunk.span_bytes, last.target_offset_bytes + last.bytes);
      EXPECT_GE(chunk.target_offset_bytes, end);
      EXPECT_LE(chunk.span_bytes, chunk_bytes);
      if (i + 1 < plan.chunks.size()) {
        EXPECT_GT(chunk.span_bytes, chunk_bytes - ArenaLayout::kAlignmentBytes);
      }
      end = chunk.target_offset_bytes + chunk.span_bytes;
    }
    EXPECT_EQ(next_piece, int64_t(plan.pieces.size()));
  }
}

TEST(ArenaPlan, IsDeterministicAndItsDigestCoversLayoutAndChunking) {
  std::vector<TensorSpec> specs = {{"a", "int", 4, {1000}}, {"b", "int", 1, {7}}, {"c", "int", 8, {3, 5}}};
  const ArenaLayout layout(specs);
  const ArenaPlan plan = make_arena_plan(layout, 1024);
  std::reverse(specs.begin(), specs.end());
  EXPECT_EQ(make_arena_plan(ArenaLayout(specs), 1024).digest, plan.digest);
  EXPECT_EQ(make_arena_plan(ArenaLayout(specs), 1024).pieces, plan.pieces);
  EXPECT_EQ(make_arena_plan(ArenaLayout(specs), 1024).chunks, plan.chunks);
  EXPECT_NE(make_arena_plan(layout, 2048).digest, plan.digest);
  specs[0].shape = {5, 3};
  EXPECT_NE(make_arena_plan(ArenaLayout(specs), 1024).digest, plan.digest);
}

TEST(ArenaPlan, MoreThanTwoToThe31Elements) {
  const ArenaLayout layout({{"a", "int", 2, {int64_t{3} << 31}}, {"b", "int", 1, {3}}});
  const ArenaPlan plan = make_arena_plan(layout, kMaxChunkBytes);
  EXPECT_EQ(plan.payload_bytes, (int64_t{3} << 32) + 3);
  EXPECT_EQ(plan.pieces.back(), (ArenaPiece{1, 0, int64_t{3} << 32, 3}));
  EXPECT_EQ(plan.chunks.size(), 193u);
}

TEST(ArenaPlan, RefusesBrokenChunkSizes) {
  const ArenaLayout layout({{"a", "int", 4, {2}}});
  for (const int64_t chunk_bytes : {int64_t{0}, int64_t{-64}, int64_t{65}, kMaxChunkBytes + 64}) {
    expect_error("expected chunk_bytes", [&] { make_arena_plan(layout, chunk_bytes); });
  }
}

}  // namespace
}  // namespace areal::reshard
