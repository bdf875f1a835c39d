#include "decode/engine.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/check.h"

namespace areal::decode {
namespace {

const DecoderConfig& checked(const DecoderConfig& config, const EngineOptions& options) {
  check_config(config);
  AREAL_CHECK(options.max_slots >= 1, "engine: expected max_slots >= 1, got ", options.max_slots);
  AREAL_CHECK(options.max_context >= 2, "engine: expected max_context >= 2, got ", options.max_context);
  AREAL_CHECK(options.prefill_rows >= 1, "engine: expected prefill_rows >= 1, got ", options.prefill_rows);
  AREAL_CHECK(options.threads >= 1, "engine: expected threads >= 1, got ", options.threads);
  return config;
}

// Enough for every sample in flight to hold a whole context, with a partial page each for prompt and response, so
// allocation can't fail.
int64_t pool_pages(const EngineOptions& options) {
  return options.max_slots * (round_up(options.max_context, kPage) / kPage + 1);
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

Engine::Engine(const DecoderConfig& config, const EngineOptions& options)
    : config_(checked(config, options)),
      options_(options),
      kernels_(active_kernels()),
      pool_(config, pool_pages(options)),
      forward_(config, kernels_, options.max_slots + options.prefill_rows, options.max_context, options.threads),
      sampler_(kernels_, config.vocab_size) {}

void Engine::check_request(const std::vector<int32_t>& prompt, const SamplingParams& sampling) const {
  check_sampling(sampling, config_.vocab_size);
  const int64_t size = static_cast<int64_t>(prompt.size());
  AREAL_CHECK(size >= 1, "submit: expected a prompt of at least 1 token, got an empty one");
  AREAL_CHECK(size < options_.max_context,
              "submit: expected a prompt shorter than max_context = ", options_.max_context, " tokens, got ", size);
  for (const int32_t id : prompt) {
    AREAL_CHECK(id >= 0 && id < config_.vocab_size, "submit: expected prompt_ids in [0, ", config_.vocab_size,
                "), got ", id);
  }
}

std::shared_ptr<Request> Engine::add_request(int64_t id, std::vector<int32_t> prompt, const SamplingParams& sampling) {
  auto request = std::make_shared<Request>();
  request->id = id;
  request->prompt = std::move(prompt);
  request->sampling = sampling;
  requests_.emplace(id, request);
  waiting_.push_back(request);
  return request;
}

void Engine::submit(int64_t request_id, std::vector<int32_t> prompt, int64_t n, const SamplingParams& sampling) {
  check_request(prompt, sampling);
  AREAL_CHECK(n >= 1, "submit: expected n >= 1, got ", n);
  AREAL_CHECK(!requests_.contains(request_id), "submit: expected a request_id that is not in use, got ", request_id);
  const auto request = add_request(request_id, std::move(prompt), sampling);
  for (int64_t i = 0; i < n; ++i) request->pending.push_back({static_cast<int32_t>(i), {}});
  request->unfinished = n;
}

void Engine::check_resumed(const UnfinishedSample& sample) const {
  const auto& [ids, logprobs, versions] = sample.response;
  AREAL_CHECK(logprobs.size() == ids.size() && versions.size() == ids.size(),
              "resume: expected logprobs and versions for each of ", ids.size(), " tokens, got ", logprobs.size(),
              " and ", versions.size());
  const int64_t limit = response_limit(static_cast<int64_t>(sample.prompt_ids.size()), sample.sampling);
  AREAL_CHECK(static_cast<int64_t>(ids.size()) < limit, "resume: expected a response of fewer than ", limit,
              " tokens, got ", ids.size());
  for (const int32_t id : ids) {
    AREAL_CHECK(id >= 0 && id < config_.vocab_size, "resume: expected token_ids in [0, ", config_.vocab_size, "), got ",
                id);
  }
  AREAL_CHECK(ids.empty() || !std::ranges::count(sample.sampling.stop_token_ids, ids.back()),
              "resume: expected a response that does not end in a stop token, got ", ids.empty() ? -1 : ids.back());
}

int64_t Engine::response_limit(int64_t prompt_size, const SamplingParams& sampling) const {
  return std::min(sampling.max_new_tokens, options_.max_context - prompt_size);
}

void Engine::resume(UnfinishedSample sample) {
  check_request(sample.prompt_ids, sample.sampling);
  check_resumed(sample);
  std::shared_ptr<Request> request;
  if (const auto found = requests_.find(sample.request_id); found != requests_.end()) {
    request = found->second;
    AREAL_CHECK(request->prompt == sample.prompt_ids && request->sampling == sample.sampling,
                "resume: expected the prompt and the sampling parameters of request_id ", sample.request_id,
                ", got others");
    const auto same = [&](const auto& other) { return other.index == sample.sample_index; };
    const bool in_use = std::ranges::any_of(request->pending, same) ||
                        std::ranges::any_of(active_, [&](const auto& a) { return a->request == request && same(*a); });
    AREAL_CHECK(!in_use, "resume: expected a sample_index that is not in use, got ", sample.sample_index);
    if (request->pending.empty()) waiting_.push_back(request);
  } else {
    request = add_request(sample.request_id, std::move(sample.prompt_ids), sample.sampling);
  }
  request->pending.push_back({sample.sample_index, std::move(sample.response)});
  ++request->unfinished;
}

int64_t Engine::abort(int64_t request_id) {
  const auto found = requests_.find(request_id);
  if (found == requests_.end()) return 0;
  const std::shared_ptr<Request> request = found->second;
  std::erase_if(active_, [&](const auto& sample) { return sample->request == request; });
  std::erase_if(filling_, [&](const auto& prefix) { return &prefix->request == request.get(); });
  std::erase(waiting_, request);
  request->prefix.reset();
  requests_.erase(found);
  stats_.aborted_samples += request->unfinished;
  return request->unfinished;
}

std::vector<UnfinishedSample> Engine::unfinished() const {
  std::vector<UnfinishedSample> samples;
  const auto add = [&](const Request& request, int32_t index, const Response& response) {
    samples.push_back({request.id, index, request.prompt, request.sampling, response});
  };
  for (const auto& sample : active_) add(*sample->request, sample->index, sample->response);
  for (const auto& request : waiting_)
    for (const auto& pending : request->pending) add(*request, pending.index, pending.response);
  return samples;
}

int64_t Engine::num_waiting() const {
  int64_t samples = 0;
  for (const auto& request : waiting_) samples += static_cast<int64_t>(request->pending.size());
  return samples;
}

EngineStats Engine::stats() const {
  EngineStats stats = stats_;
  stats.kv_pages_used = pool_.used_pages();
  return stats;
}

std::vector<FinishedSample> Engine::decode(int64_t max_steps, const int64_t* watch) {
  AREAL_CHECK(current_ != nullptr, "decode: expected load_weights before it, got none");
  AREAL_CHECK(max_steps >= 0, "decode: expected max_steps >= 0, got ", max_steps);
  const auto start = std::chrono::steady_clock::now();
  std::vector<FinishedSample> finished;
  for (int64_t i = 0; i < max_steps && !(active_.empty() && waiting_.empty()); ++i) {
    if (watch != nullptr && __atomic_load_n(watch, __ATOMIC_ACQUIRE) > version()) break;
    step();
    retire(&finished);
  }
  stats_.busy_seconds += seconds_since(start);
  return finished;
}

UpdateStats Engine::load_weights(const std::vector<NamedTensor>& tensors, int64_t version, OnUpdate on_update) {
  const auto start = std::chrono::steady_clock::now();
  if (spare_ == nullptr || spare_.use_count() > 1) spare_ = std::make_shared<Weights>();
  pack_weights(config_, kernels_, tensors, spare_.get());
  spare_->version = version;
  std::swap(current_, spare_);

  UpdateStats update;
  for (const auto& sample : active_) {
    if (sample->weights == nullptr) continue;
    if (on_update != OnUpdate::kFinish) {
      sample->weights = current_;
      ++update.interrupted_samples;
    }
  }
  // Prompts nobody has drawn from yet start again under the new weights; pending samples get a new prefix.
  for (const auto& request : waiting_)
    if (request->prefix != nullptr && request->prefix->complete()) request->prefix.reset();
  for (const auto& prefix : filling_) prefix->computed = 0;
  if (on_update == OnUpdate::kRecompute) update.recomputed_tokens = recompute();
  stats_.recomputed_tokens += update.recomputed_tokens;
  update.seconds = seconds_since(start);
  return update;
}

int64_t Engine::recompute() {
  std::vector<Span> prompts, responses;
  for (const auto& sample : active_) {
    if (sample->weights == nullptr) continue;
    Prefix* prefix = sample->prefix.get();
    if (prefix->computed != 0) {  // the first of the samples that share it
      prefix->computed = 0;
      prompts.push_back({prefix, nullptr, 0, prefix->size()});
    }
    responses.push_back({prefix, sample.get(), prefix->size(), sample->length() - 1});
  }
  int64_t tokens = 0;
  for (const auto* spans : {&prompts, &responses})
    for (const Span& span : *spans) tokens += span.end - span.begin;
  run_spans(prompts);
  for (const Span& span : responses) span.sample->reserve(span.end);
  run_spans(responses);
  return tokens;
}

}  // namespace areal::decode
