// What the engine keeps about requests: the queue's Request, the Prefix its samples share, the Sample in flight.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "decode/kv_pool.h"
#include "decode/sampling.h"
#include "decode/weights.h"

namespace areal::decode {

// The tokens of a response so far, each with the logprob it was drawn with and the version of the weights.
struct Response {
  std::vector<int32_t> token_ids;
  std::vector<float> logprobs;
  std::vector<int64_t> versions;
};

enum class FinishReason : int32_t { kStop = 0, kLength = 1 };

struct FinishedSample {
  int64_t request_id;
  int32_t sample_index;
  FinishReason reason;
  Response response;
};

// A sample that has not finished; submitting it again, to this engine or another, continues it.
struct UnfinishedSample {
  int64_t request_id;
  int32_t sample_index;
  std::vector<int32_t> prompt_ids;
  SamplingParams sampling;
  Response response;
};

struct Prefix;

struct Request {
  struct Pending {
    int32_t index;
    Response response;  // empty, but for a resumed sample
  };
  int64_t id = 0;
  std::vector<int32_t> prompt;
  SamplingParams sampling;
  std::deque<Pending> pending;     // samples that have no slot yet
  int64_t unfinished = 0;          // pending ones and those in flight
  std::shared_ptr<Prefix> prefix;  // for the pending samples; null until the first of them gets a slot
};

// The prompt of a request under the weights of its samples. Lives as long as a sample reads its pages or pending
// samples will.
struct Prefix {
  Prefix(KvPool& pool, const Request& owner) : request(owner), pages(pool) {}
  int64_t size() const { return static_cast<int64_t>(request.prompt.size()); }
  bool complete() const { return computed == size(); }

  const Request& request;  // outlives the prefix: only the request itself and its samples hold prefixes
  PageTable pages;
  int64_t computed = 0;       // positions in the cache
  std::vector<float> logits;  // of the first response token, kept while samples are pending
};

// A sample that holds a slot. It waits until its prefix is complete, then shares the prefix's pages.
struct Sample {
  Sample(KvPool& pool, std::shared_ptr<Request> of, Request::Pending&& pending)
      : request(std::move(of)),
        prefix(request->prefix),
        index(pending.index),
        response(std::move(pending.response)),
        pages(pool) {}
  int64_t length() const { return prefix->size() + static_cast<int64_t>(response.token_ids.size()); }
  // Makes room in the cache for the first `positions` positions.
  void reserve(int64_t positions) { pages.reserve(cache_slot(positions - 1, prefix->size()) + 1); }
  int32_t token(int64_t position) const {
    const int64_t prompt = prefix->size();
    return position < prompt ? request->prompt[static_cast<size_t>(position)]
                             : response.token_ids[static_cast<size_t>(position - prompt)];
  }

  std::shared_ptr<Request> request;
  std::shared_ptr<Prefix> prefix;
  int32_t index;
  Response response;
  std::shared_ptr<const Weights> weights;  // null while it waits for its prefix
  PageTable pages;
  int64_t computed = 0;  // positions in the cache
  bool finished = false;
  FinishReason reason = FinishReason::kLength;
};

}  // namespace areal::decode
