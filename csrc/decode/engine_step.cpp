// One step of the engine: give free slots to pending samples, then per set of weights in use (one, but for samples that
// finish on old weights) compute a batch, draw a token for every sample whose cache is up to date, and commit. Nothing
// changes before commit(), so an error in between leaves the samples as they were.
#include <algorithm>
#include <utility>

#include "base/check.h"
#include "decode/engine.h"
#include "decode/philox.h"

namespace areal::decode {

void Engine::step() {
  ++stats_.steps;
  admit();
  std::vector<const Weights*> generations{current_.get()};
  for (const auto& sample : active_) {
    const Weights* weights = sample->weights.get();
    if (weights != nullptr && std::ranges::find(generations, weights) == generations.end())
      generations.push_back(weights);
  }
  for (const Weights* weights : generations) {
    collect(*weights);
    if (forward_.rows() == 0) continue;
    forward_.run(*weights, pool_);
    draw_all(*weights);
    commit();
  }
}

void Engine::admit() {
  while (!waiting_.empty() && num_active() < options_.max_slots) {
    const std::shared_ptr<Request> request = waiting_.front();
    if (request->prefix == nullptr) {
      request->prefix = std::make_shared<Prefix>(pool_, *request);
      request->prefix->pages.reserve(request->prefix->size());
      filling_.push_back(request->prefix);
    }
    Prefix& prefix = *request->prefix;
    const bool draws = prefix.complete() && request->pending.front().response.token_ids.empty();
    DrawnToken token{};
    if (draws) token = draw(prefix.logits.data(), prefix, request->pending.front().index, 0);

    auto sample = std::make_unique<Sample>(pool_, request, std::move(request->pending.front()));
    request->pending.pop_front();
    if (prefix.complete()) attach(sample.get());
    if (draws) append(sample.get(), token);
    active_.push_back(std::move(sample));
    if (request->pending.empty()) {
      request->prefix.reset();
      waiting_.pop_front();
    }
  }
}

// Chooses the rows of the batch: one for each sample, and with what room is left, more for samples that have to catch
// up and for prompts, in order of arrival.
void Engine::collect(const Weights& weights) {
  forward_.clear();
  spans_.clear();
  wanted_.clear();
  int64_t room = forward_.max_rows() - num_active();
  for (const auto& sample : active_) {
    if (sample->weights.get() != &weights || sample->finished) continue;
    const int64_t left = sample->length() - sample->computed, rows = 1 + std::min(left - 1, room);
    room -= rows - 1;
    sample->reserve(sample->computed + rows);
    add_span({sample->prefix.get(), sample.get(), sample->computed, sample->computed + rows});
    if (rows == left) wanted_.push_back({static_cast<int32_t>(forward_.rows() - 1), nullptr, sample.get()});
  }
  if (&weights != current_.get()) return;
  for (const auto& prefix : filling_) {
    const int64_t left = prefix->size() - prefix->computed, rows = std::min(left, room);
    if (rows == 0) break;
    room -= rows;
    add_span({prefix.get(), nullptr, prefix->computed, prefix->computed + rows});
    if (rows == left) wanted_.push_back({static_cast<int32_t>(forward_.rows() - 1), prefix.get(), nullptr});
  }
}

void Engine::add_span(const Span& span) {
  spans_.push_back(span);
  const int32_t* pages = span.sample != nullptr ? span.sample->pages.data() : span.prefix->pages.data();
  for (int64_t p = span.begin; p < span.end; ++p) {
    const int32_t token =
        span.sample != nullptr ? span.sample->token(p) : span.prefix->request.prompt[static_cast<size_t>(p)];
    forward_.add_row(token, p, span.prefix->size(), pages);
  }
}

void Engine::draw_all(const Weights& weights) {
  draws_.clear();
  for (size_t begin = 0; begin < wanted_.size(); begin += static_cast<size_t>(forward_.logits_rows())) {
    const size_t end = std::min(wanted_.size(), begin + static_cast<size_t>(forward_.logits_rows()));
    wanted_rows_.clear();
    for (size_t i = begin; i < end; ++i) wanted_rows_.push_back(wanted_[i].row);
    const float* logits = forward_.logits(weights, wanted_rows_.data(), static_cast<int64_t>(end - begin));
    for (size_t i = begin; i < end; ++i, logits += forward_.logits_ld()) {
      const Wanted& wanted = wanted_[i];
      if (wanted.sample != nullptr) {
        const Sample& sample = *wanted.sample;
        const int64_t position = static_cast<int64_t>(sample.response.token_ids.size());
        draws_.push_back({wanted.sample, draw(logits, *sample.prefix, sample.index, position)});
        continue;
      }
      for (const auto& sample : active_) {
        if (sample->prefix.get() == wanted.prefix && sample->response.token_ids.empty())
          draws_.push_back({sample.get(), draw(logits, *wanted.prefix, sample->index, 0)});
      }
      if (wanted.prefix->request.prefix.get() == wanted.prefix)
        wanted.prefix->logits.assign(logits, logits + config_.vocab_size);
    }
  }
}

DrawnToken Engine::draw(const float* logits, const Prefix& prefix, int32_t index, int64_t position) {
  const Request& request = prefix.request;
  const double uniform = philox_uniform(request.sampling.seed, static_cast<uint64_t>(request.id),
                                        static_cast<uint32_t>(index), static_cast<uint32_t>(position));
  DrawnToken token;
  AREAL_CHECK(sampler_.draw(logits, request.sampling, uniform, &token),
              "decode: expected finite logits for request_id ", request.id, ", sample_index ", index,
              ", response token ", position, ", got NaN or infinity");
  return token;
}

void Engine::commit() {
  for (const Span& span : spans_) {
    (span.sample != nullptr ? span.sample->computed : span.prefix->computed) = span.end;
    stats_.prefill_tokens += span.end - span.begin - (span.sample != nullptr ? 1 : 0);
  }
  if (std::erase_if(filling_, [](const auto& prefix) { return prefix->complete(); }) > 0) {
    for (const auto& sample : active_)
      if (sample->weights == nullptr && sample->prefix->complete()) attach(sample.get());
  }
  for (const Draw& draw : draws_) append(draw.sample, draw.token);
}

void Engine::attach(Sample* sample) {
  const Prefix& prefix = *sample->prefix;
  sample->weights = current_;
  sample->pages.share(prefix.pages);
  sample->computed = prefix.size();
}

void Engine::append(Sample* sample, DrawnToken token) {
  auto& [ids, logprobs, versions] = sample->response;
  const SamplingParams& sampling = sample->request->sampling;
  ids.push_back(token.id);
  logprobs.push_back(token.logprob);
  versions.push_back(sample->weights->version);
  ++stats_.generated_tokens;
  const bool stop = std::ranges::find(sampling.stop_token_ids, token.id) != sampling.stop_token_ids.end();
  sample->reason = stop ? FinishReason::kStop : FinishReason::kLength;
  sample->finished = stop || static_cast<int64_t>(ids.size()) == response_limit(sample->prefix->size(), sampling);
}

void Engine::retire(std::vector<FinishedSample>* finished) {
  for (const auto& sample : active_) {
    if (!sample->finished) continue;
    Request& request = *sample->request;
    finished->push_back({request.id, sample->index, sample->reason, std::move(sample->response)});
    ++stats_.finished_samples;
    if (--request.unfinished == 0) requests_.erase(request.id);
  }
  std::erase_if(active_, [](const auto& sample) { return sample->finished; });
}

// Computes the spans, as many rows at a time as a batch holds.
void Engine::run_spans(const std::vector<Span>& spans) {
  const auto run = [&] {
    if (forward_.rows() > 0) forward_.run(*current_, pool_);
    forward_.clear();
    for (const Span& span : spans_) (span.sample != nullptr ? span.sample->computed : span.prefix->computed) = span.end;
    spans_.clear();
  };
  spans_.clear();
  forward_.clear();
  for (Span span : spans) {
    while (span.begin < span.end) {
      const int64_t end = std::min(span.end, span.begin + forward_.max_rows() - forward_.rows());
      add_span({span.prefix, span.sample, span.begin, end});
      span.begin = end;
      if (forward_.rows() == forward_.max_rows()) run();
    }
  }
  run();
}

}  // namespace areal::decode
