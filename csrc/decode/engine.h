// Continuous batching over a fixed number of slots. Requests wait in order of arrival; each has n samples, which share
// the keys and values of their prompt; a sample that finishes leaves at once and the next one takes its slot. A step
// advances every sample in flight by one token and fills prompts and caches beside them, in one batch.
//
// A sample's tokens and logprobs depend on the weights, its prompt and its sampling parameters, and on nothing else:
// not on what else is in the batch, not on the number of slots or threads (see kernels.h), not on being resumed.
//
// Not thread-safe: one call at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "decode/forward.h"
#include "decode/sequence.h"

namespace areal::decode {

struct EngineOptions {
  int64_t max_slots = 256;     // samples in flight
  int64_t max_context = 0;     // tokens of prompt and response together
  int64_t prefill_rows = 256;  // prompt tokens a step takes on beside the samples in flight
  int64_t threads = 1;
};

// What happens to the samples in flight when new weights arrive. They resume at a token boundary in any case.
enum class OnUpdate : int32_t {
  kRecompute = 0,  // their keys and values are computed anew: from here on all is as if under the new weights
  kKeep = 1,       // they go on with the keys and values they have
  kFinish = 2,     // they stay on the old weights until they are done
};

struct UpdateStats {
  int64_t interrupted_samples = 0;  // in flight, with keys and values
  int64_t recomputed_tokens = 0;
  double seconds = 0.0;
};

struct EngineStats {
  int64_t generated_tokens = 0;
  int64_t prefill_tokens = 0;  // of prompts and of resumed samples
  int64_t recomputed_tokens = 0;
  int64_t finished_samples = 0;
  int64_t aborted_samples = 0;
  int64_t steps = 0;
  int64_t kv_pages_used = 0;  // now
  double busy_seconds = 0.0;  // in decode()
};

class Engine {
 public:
  Engine(const DecoderConfig& config, const EngineOptions& options);

  // Queues n samples. Throws areal::Error for an empty or too long prompt, a token outside the vocabulary, a bad
  // sampling parameter, or an id that is in use.
  void submit(int64_t request_id, std::vector<int32_t> prompt, int64_t n, const SamplingParams& sampling);
  // Queues one sample that was begun elsewhere; of the same request, several can be resumed.
  void resume(UnfinishedSample sample);
  // Forgets a request. Returns the number of its samples that had not finished.
  int64_t abort(int64_t request_id);
  // All samples in flight or waiting, as they are; they go on.
  std::vector<UnfinishedSample> unfinished() const;

  // Runs up to max_steps steps; fewer when nothing is left to do, or when *watch (unless null), which another thread or
  // process may write, exceeds version(). Returns the samples that finished. When a model's logits are not finite,
  // throws areal::Error and leaves every sample as it was.
  std::vector<FinishedSample> decode(int64_t max_steps, const int64_t* watch);

  // A tensor that is missing, unknown or misshapen throws areal::Error and leaves the engine as it was.
  UpdateStats load_weights(const std::vector<NamedTensor>& tensors, int64_t version, OnUpdate on_update);
  int64_t version() const { return current_ == nullptr ? -1 : current_->version; }

  int64_t num_active() const { return static_cast<int64_t>(active_.size()); }
  int64_t num_waiting() const;  // samples without a slot
  EngineStats stats() const;

 private:
  // Positions [begin, end) of a prefix (sample null) or of a sample, to be computed.
  struct Span {
    Prefix* prefix;
    Sample* sample;
    int64_t begin, end;
  };
  // Logits to compute, and what to draw from them.
  struct Wanted {
    int32_t row;
    Prefix* prefix;
    Sample* sample;
  };
  struct Draw {
    Sample* sample;
    DrawnToken token;
  };

  void check_request(const std::vector<int32_t>& prompt, const SamplingParams& sampling) const;
  void check_resumed(const UnfinishedSample& sample) const;
  int64_t response_limit(int64_t prompt_size, const SamplingParams& sampling) const;
  std::shared_ptr<Request> add_request(int64_t id, std::vector<int32_t> prompt, const SamplingParams& sampling);

  void step();
  void admit();
  void advance(const Weights& weights);
  void collect(const Weights& weights);
  void add_span(const Span& span);
  void draw_all(const Weights& weights);
  DrawnToken draw(const float* logits, const Prefix& prefix, int32_t index, int64_t position);
  void commit();
  void attach(Sample* sample);
  void append(Sample* sample, DrawnToken token);
  void retire(std::vector<FinishedSample>* finished);
  int64_t recompute();
  void run_spans(const std::vector<Span>& spans);

  DecoderConfig config_;
  EngineOptions options_;
  const Kernels& kernels_;
  KvPool pool_;
  Forward forward_;
  Sampler sampler_;
  std::shared_ptr<Weights> current_, spare_;
  std::deque<std::shared_ptr<Request>> waiting_;  // those with pending samples
  std::unordered_map<int64_t, std::shared_ptr<Request>> requests_;
  std::vector<std::shared_ptr<Prefix>> filling_;  // prefixes not yet complete, under the current weights
  std::vector<std::unique_ptr<Sample>> active_;
  EngineStats stats_;
  // Of the step in progress.
  std::vector<Span> spans_;
  std::vector<Wanted> wanted_;
  std::vector<int32_t> wanted_rows_;
  std::vector<Draw> draws_;
};

}  // namespace areal::decode
