#include "decode/engine.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <thread>

#include "base/threads.h"

namespace areal::decode {
namespace {

// Random weights under their names.
struct Model {
  explicit Model(const DecoderConfig& shape, uint32_t seed) : config(shape), generator(seed) {
    const int64_t hidden = config.hidden_size;
    add("model.embed_tokens.weight", {config.vocab_size, hidden});
    for (int64_t l = 0; l < config.num_layers; ++l) {
      const std::string layer = "model.layers." + std::to_string(l) + ".";
      add(layer + "input_layernorm.weight", {hidden});
      add(layer + "self_attn.q_proj.weight", {config.q_size(), hidden});
      add(layer + "self_attn.k_proj.weight", {config.kv_size(), hidden});
      add(layer + "self_attn.v_proj.weight", {config.kv_size(), hidden});
      add(layer + "self_attn.o_proj.weight", {hidden, config.q_size()});
      add(layer + "post_attention_layernorm.weight", {hidden});
      add(layer + "mlp.gate_proj.weight", {config.intermediate_size, hidden});
      add(layer + "mlp.up_proj.weight", {config.intermediate_size, hidden});
      add(layer + "mlp.down_proj.weight", {hidden, config.intermediate_size});
    }
    add("model.norm.weight", {hidden});
    add("lm_head.weight", {config.vocab_size, hidden});
  }

  Model(const Model&) = delete;  // tensors point into storage

  void add(const std::string& name, std::vector<int64_t> shape) {
    int64_t size = 1;
    for (const int64_t n : shape) size *= n;
    std::normal_distribution<float> normal(0.0f, 1.5f / std::sqrt(static_cast<float>(shape.back())));
    auto& values = storage.emplace_back(static_cast<size_t>(size));
    for (float& value : values) value = shape.size() == 1 ? 1.0f : normal(generator);
    tensors.push_back({name, values.data(), DType::kFloat32, std::move(shape)});
  }

  DecoderConfig config;
  std::mt19937 generator;
  std::deque<std::vector<float>> storage;
  std::vector<NamedTensor> tensors;
};

DecoderConfig shape(int64_t hidden, int64_t heads) {
  DecoderConfig config;
  config.vocab_size = 50;
  config.hidden_size = hidden;
  config.intermediate_size = 2 * hidden;
  config.num_layers = 2;
  config.num_heads = heads;
  config.num_kv_heads = heads / 2;
  config.head_dim = hidden / heads;
  return config;
}

SamplingParams sampling(int64_t max_new_tokens) {
  SamplingParams params;
  params.max_new_tokens = max_new_tokens;
  params.stop_token_ids = {7};
  return params;
}

using Samples = std::map<std::pair<int64_t, int32_t>, FinishedSample>;

void collect(std::vector<FinishedSample> finished, Samples* samples) {
  for (FinishedSample& sample : finished) {
    const auto key = std::pair(sample.request_id, sample.sample_index);
    EXPECT_TRUE(samples->emplace(key, std::move(sample)).second);
  }
}

void expect_same(const Samples& a, const Samples& b) {
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [key, sample] : a) {
    EXPECT_EQ(sample.response.token_ids, b.at(key).response.token_ids);
    EXPECT_EQ(sample.response.logprobs, b.at(key).response.logprobs);
  }
}

// Runs each index of the range in a thread of its own.
void thread_per_index(int64_t begin, int64_t end, int64_t, RangeFn fn) {
  std::vector<std::thread> threads;
  for (int64_t i = begin; i < end; ++i) threads.emplace_back([&, i] { fn(i, i + 1); });
  for (std::thread& thread : threads) thread.join();
}

TEST(DecodeEngine, ThreadsChangeNothing) {
  const Model model(shape(256, 8), 1);
  Samples runs[2];
  for (const int64_t threads : {1, 3}) {
    if (threads > 1) set_parallel_for(&thread_per_index, [] { return int64_t{3}; });
    EngineOptions options;
    options.max_slots = 32;
    options.max_context = 64;
    options.threads = threads;
    Engine engine(model.config, options);
    engine.load_weights(model.tensors, 0, OnUpdate::kRecompute);
    for (int64_t id = 0; id < 4; ++id)
      engine.submit(id, std::vector<int32_t>(static_cast<size_t>(20 + id), 3), 8, sampling(6));
    collect(engine.decode(100, nullptr), &runs[threads > 1]);
  }
  set_parallel_for(nullptr, nullptr);
  EXPECT_EQ(runs[0].size(), 32u);
  expect_same(runs[0], runs[1]);
}

// Random sequences of calls: every sample is finished, aborted or still there; pages come back; versions rise within a
// sample; and whatever was never touched by an update or an abort is what an undisturbed engine gives.
TEST(DecodeEngine, RandomSchedules) {
  const DecoderConfig config = shape(24, 4);
  const Model a(config, 1), b(config, 2), c(config, 3);
  const Model* models[] = {&a, &b, &c};
  for (uint32_t seed = 0; seed < 40; ++seed) {
    std::mt19937 generator(seed);
    const auto pick = [&](int64_t low, int64_t high) {
      return std::uniform_int_distribution<int64_t>(low, high)(generator);
    };
    EngineOptions options;
    options.max_slots = pick(1, 9);
    options.max_context = 48;
    options.prefill_rows = pick(1, 40);
    Engine engine(config, options), calm(config, {64, 48, 512, 1});
    engine.load_weights(a.tensors, 0, OnUpdate::kRecompute);
    calm.load_weights(a.tensors, 0, OnUpdate::kRecompute);
    Samples samples, expected;
    int64_t submitted = 0, aborted = 0, version = 0;
    for (int64_t id = 0; id < 60; ++id) {
      const int64_t what = pick(0, 9);
      if (what < 5) {
        std::vector<int32_t> prompt(static_cast<size_t>(pick(1, 40)));
        for (int32_t& token : prompt) token = static_cast<int32_t>(pick(0, 49));
        const int64_t n = pick(1, 5);
        calm.submit(id, prompt, n, sampling(12));
        engine.submit(id, std::move(prompt), n, sampling(12));
        submitted += n;
      } else if (what == 5) {
        aborted += engine.abort(pick(0, id));
      } else if (what == 6 && seed % 2 == 0) {
        ++version;
        engine.load_weights(models[version % 3]->tensors, version, static_cast<OnUpdate>(pick(0, 2)));
      } else {
        collect(engine.decode(pick(0, 6), nullptr), &samples);
      }
      ASSERT_EQ(engine.num_active() + engine.num_waiting() + static_cast<int64_t>(samples.size()) + aborted, submitted);
      ASSERT_EQ(static_cast<int64_t>(engine.unfinished().size()), engine.num_active() + engine.num_waiting());
      ASSERT_LE(engine.num_active(), options.max_slots);
    }
    collect(engine.decode(10000, nullptr), &samples);
    collect(calm.decode(10000, nullptr), &expected);
    EXPECT_EQ(static_cast<int64_t>(samples.size()) + aborted, submitted);
    EXPECT_EQ(engine.stats().kv_pages_used, 0);
    EXPECT_EQ(engine.stats().aborted_samples, aborted);
    for (const auto& [key, sample] : samples) {
      const std::vector<int64_t>& versions = sample.response.versions;
      EXPECT_TRUE(std::is_sorted(versions.begin(), versions.end()));
      if (versions.back() > 0) continue;
      EXPECT_EQ(sample.response.token_ids, expected.at(key).response.token_ids);
      EXPECT_EQ(sample.response.logprobs, expected.at(key).response.logprobs);
    }
  }
}

TEST(DecodeEngine, OldWeightsAreFreedWhenTheLastSampleThatFinishesOnThemIsDone) {
  const DecoderConfig config = shape(24, 4);
  const Model model(config, 1);
  Engine engine(config, {4, 48, 64, 1});
  for (int64_t version = 0; version < 20; ++version) {
    engine.load_weights(model.tensors, version, OnUpdate::kFinish);
    engine.submit(version, {1, 2, 3}, 1, sampling(30));
    engine.decode(2, nullptr);
  }
  engine.decode(1000, nullptr);
  EXPECT_EQ(engine.num_active() + engine.num_waiting(), 0);
  EXPECT_EQ(engine.version(), 19);
}

TEST(DecodeEngine, ConfigsThatDescribeNoModelAreRefused) {
  const auto message = [](DecoderConfig config) -> std::string {
    try {
      Engine engine(config, {4, 48, 64, 1});
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  DecoderConfig config = shape(24, 4);
  config.num_kv_heads = 3;
  EXPECT_NE(message(config).find("num_heads to be a multiple of num_kv_heads = 3, got 4"), std::string::npos);
  config = shape(24, 4);
  config.head_dim = 5;
  EXPECT_NE(message(config).find("even head_dim, got 5"), std::string::npos);
  config.vocab_size = 0;
  EXPECT_NE(message(config).find("vocab_size > 0, got 0"), std::string::npos);
}

}  // namespace
}  // namespace areal::decode
