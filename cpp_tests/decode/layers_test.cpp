#include <cmath>

#include "decode/kv_pool.h"
#include "kernel_test.h"

namespace areal::decode {
namespace {

class LayersTest : public KernelTest {};

TEST_P(LayersTest, RmsNormOfEverySize) {
  for (int64_t size = 1; size <= 70; ++size) {
    const int64_t ld = round_up(size, kPad);
    const std::vector<float> x = pad_rows(random(3 * size), size), weight = pad_rows(random(size), size);
    const int32_t index[] = {2, 0};
    std::vector<float> out(static_cast<size_t>(2 * ld));
    kernels().rms_norm({x.data(), ld, index, weight.data(), 1e-5f, out.data(), ld, 2, size});
    for (int64_t i = 0; i < 2; ++i) {
      const float* row = x.data() + index[i] * ld;
      double square = 0.0;
      for (int64_t j = 0; j < size; ++j) square += static_cast<double>(row[j]) * static_cast<double>(row[j]);
      const double scale = 1.0 / std::sqrt(square / static_cast<double>(size) + 1e-5);
      for (int64_t j = 0; j < size; ++j) {
        const double expected =
            static_cast<double>(row[j]) * scale * static_cast<double>(weight[static_cast<size_t>(j)]);
        EXPECT_NEAR(out[static_cast<size_t>(i * ld + j)], expected, 1e-6 * (1.0 + std::fabs(expected)));
      }
      for (int64_t j = size; j < ld; ++j) EXPECT_EQ(out[static_cast<size_t>(i * ld + j)], 0.0f);
    }
  }
}

// One sequence of `count` positions through rope and attention, against the definition in fp64. The cache starts as
// NaN, so reading what was never written shows.
class AttentionTest : public KernelTest {
 protected:
  void check(int64_t heads, int64_t kv_heads, int64_t dim, int64_t count) {
    for (const int64_t prompt : {count, count / 2 + 1, int64_t{1}}) check(heads, kv_heads, dim, count, prompt);
  }

  void check(int64_t heads, int64_t kv_heads, int64_t dim, int64_t count, int64_t prompt) {
    DecoderConfig config;
    config.num_layers = 1;
    config.num_kv_heads = kv_heads;
    config.head_dim = dim;
    const int64_t pool_pages = count / kPage + 4;
    KvPool pool(config, pool_pages);
    const KvLayer kv = pool.layer(0);
    std::fill_n(kv.pages, pool_pages * kv_heads * kv.head_floats, NAN);
    pool.allocate();  // so that page i of the sequence is not page i of the pool
    PageTable pages(pool);
    pages.reserve(cache_slot(count - 1, prompt) + 1);

    const int64_t size = (heads + 2 * kv_heads) * dim, ld = round_up(size, kPad), ldo = round_up(heads * dim, kPad);
    const std::vector<float> raw = pad_rows(random(count * size), size);
    std::vector<float> qkv = raw, cos = random(count * dim / 2), sin = random(count * dim / 2),
                       out(static_cast<size_t>(count * ldo)), scores(static_cast<size_t>(heads * (count + 2 * kPage)));
    std::vector<int64_t> position, prompts(static_cast<size_t>(count), prompt);
    std::vector<const int32_t*> table(static_cast<size_t>(count), pages.data());
    for (int64_t i = 0; i < count; ++i) position.push_back(i);
    const BatchRows batch{position.data(), prompts.data(), table.data()};
    kernels().rope({qkv.data(), ld, heads, cos.data(), sin.data(), kv, batch, 0, count});
    kernels().attention({qkv.data(), ld, heads, out.data(), ldo, kv, batch, 0, count, scores.data()});

    const auto rotated = [&](int64_t row, int64_t head, int64_t d) {
      const int64_t half = dim / 2, j = d % half;
      const float* x = raw.data() + row * ld + head * dim;
      const double u = x[j], w = x[j + half], c = cos[static_cast<size_t>(row * half + j)],
                   s = sin[static_cast<size_t>(row * half + j)];
      return d < half ? u * c - w * s : w * c + u * s;
    };
    for (int64_t i = 0; i < count; i += 1 + count / 5) {
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t kv_head = h / (heads / kv_heads);
        std::vector<double> score(static_cast<size_t>(i + 1), 0.0);
        double top = -1e300, total = 0.0;
        for (int64_t p = 0; p <= i; ++p) {
          double& s = score[static_cast<size_t>(p)];
          for (int64_t d = 0; d < dim; ++d) s += rotated(i, h, d) * rotated(p, heads + kv_head, d);
          s /= std::sqrt(static_cast<double>(dim));
          top = std::max(top, s);
        }
        for (double& s : score) total += s = std::exp(s - top);
        for (int64_t d = 0; d < dim; ++d) {
          double expected = 0.0;
          for (int64_t p = 0; p <= i; ++p)
            expected += score[static_cast<size_t>(p)] / total *
                        static_cast<double>(raw[static_cast<size_t>(p * ld + (heads + kv_heads + kv_head) * dim + d)]);
          const double got = out[static_cast<size_t>(i * ldo + h * dim + d)];
          ASSERT_TRUE(std::fabs(got - expected) <= 3e-5)
              << "heads " << heads << "/" << kv_heads << " dim " << dim << " prompt " << prompt << " position " << i
              << ": " << got << " not " << expected;
        }
      }
    }
  }
};

TEST_P(AttentionTest, EveryHeadSize) {
  for (int64_t dim = 2; dim <= 70; dim += 2) check(2, 1, dim, 19);
  check(2, 2, 128, 40);
}

TEST_P(AttentionTest, EveryGroupSize) {
  for (int64_t group = 1; group <= 9; ++group)
    for (const int64_t kv_heads : {1, 2}) check(group * kv_heads, kv_heads, 12, 21);
}

TEST_P(AttentionTest, EveryLength) {
  for (int64_t count = 1; count <= 50; ++count) check(4, 4, 16, count);
  check(4, 2, 64, 300);
}

AREAL_ALL_ISAS(LayersTest);
AREAL_ALL_ISAS(AttentionTest);

TEST(CacheSlot, TheResponseStartsOnAPageOfItsOwn) {
  EXPECT_EQ(cache_slot(0, 1), 0);
  EXPECT_EQ(cache_slot(1, 1), 16);
  EXPECT_EQ(cache_slot(15, 16), 15);
  EXPECT_EQ(cache_slot(16, 16), 16);
  EXPECT_EQ(cache_slot(16, 17), 16);
  EXPECT_EQ(cache_slot(20, 17), 35);
}

TEST(KvPoolTest, PagesAreSharedByCountAndReturned) {
  DecoderConfig config;
  config.num_layers = 2;
  config.num_kv_heads = 1;
  config.head_dim = 4;
  KvPool pool(config, 8);
  {
    PageTable a(pool);
    {
      PageTable prompt(pool), b(pool);
      prompt.reserve(40);
      EXPECT_EQ(pool.used_pages(), 3);
      a.share(prompt);
      b.share(prompt);
      EXPECT_EQ(pool.used_pages(), 3);
      a.reserve(49);
      b.reserve(65);
      EXPECT_EQ(pool.used_pages(), 6);
      EXPECT_TRUE(std::equal(prompt.data(), prompt.data() + 3, a.data()));
      EXPECT_NE(a.data()[3], b.data()[3]);
    }
    EXPECT_EQ(pool.used_pages(), 4);
  }
  EXPECT_EQ(pool.used_pages(), 0);
  PageTable all(pool);
  all.reserve(8 * kPage);
  EXPECT_THROW(pool.allocate(), Error);
}

}  // namespace
}  // namespace areal::decode
