// A small world to move tensors in, after a plain plan: ranks with memory, transports of every kind.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "plain_plan.h"
#include "reshard/errors.h"
#include "reshard/executor.h"
#include "reshard/shared_memory.h"
#include "reshard/transports/inproc.h"
#include "reshard/transports/shm.h"
#include "reshard/transports/tcp.h"

namespace areal::reshard::testing {

// -- memory -----------------------------------------------------------------------------------------------------------

inline int64_t bytes_of(const Buffer& buffer) {
  int64_t bytes = buffer.item_bytes;
  for (const int64_t size : buffer.shape) bytes *= size;
  return bytes;
}

constexpr std::byte kGarbage{0xCD};

// One rank's buffers in one piece of shared memory, which any transport can use.
class RankMemory {
 public:
  explicit RankMemory(const RankStorage& storage) {
    int64_t total = 1;
    for (const Buffer& buffer : storage.buffers) {
      offsets_.push_back(total = (total + 63) / 64 * 64);
      sizes_.push_back(bytes_of(buffer));
      total += sizes_.back();
    }
    memory_.emplace(SharedMemory::create("areal-test", total));
    mapping_ = memory_->map(0, total, Access::kReadWrite);
    std::memset(mapping_.data(), static_cast<int>(kGarbage), mapping_.size_bytes());
  }
  std::vector<std::span<std::byte>> spans() const {
    std::vector<std::span<std::byte>> spans;
    for (size_t i = 0; i < sizes_.size(); ++i) {
      spans.emplace_back(mapping_.data() + offsets_[i], static_cast<size_t>(sizes_[i]));
    }
    return spans;
  }
  std::vector<ExposedBuffer> exposed() const {
    std::vector<ExposedBuffer> exposed;
    for (size_t i = 0; i < sizes_.size(); ++i) exposed.push_back({memory_->fd(), offsets_[i], sizes_[i]});
    return exposed;
  }

 private:
  std::vector<int64_t> offsets_, sizes_;
  std::optional<SharedMemory> memory_;
  Mapping mapping_;
};

// The bytes of one element: of its tensor and its global index, so that every misplaced one shows.
inline void element_bytes(int64_t tensor, int64_t index, uint64_t salt, std::span<std::byte> bytes) {
  uint64_t value = (static_cast<uint64_t>(tensor) << 40 ^ static_cast<uint64_t>(index)) * 0x9E3779B97F4A7C15u + salt;
  for (std::byte& byte : bytes) {
    byte = static_cast<std::byte>(value >> 56);
    value = value * 0xD1342543DE82EF95u + 1;
  }
}

// Calls fn(bytes of the element in its buffer, tensor, global index) for every element a rank holds.
inline void for_each_element(const Layout& layout, const RankStorage& storage,
                             std::span<const std::span<std::byte>> buffers,
                             const std::function<void(std::span<std::byte>, int64_t, int64_t)>& fn) {
  for (const Region& region : storage.regions) {
    const TensorSpec& spec = layout.tensors()[static_cast<size_t>(region.tensor)].spec;
    for (int64_t i = 0; i < region.box.elements(); ++i) {
      int64_t rest = i, at = region.offset, index = 0, stride = 1;
      for (int d = region.box.dims; d-- > 0;) {
        const auto k = static_cast<size_t>(d);
        const int64_t coordinate = rest % region.box.size[k];
        rest /= region.box.size[k];
        at += coordinate * region.strides[k];
        index += (region.box.start[k] + coordinate) * stride;
        stride *= spec.shape[k];
      }
      const auto item = static_cast<size_t>(spec.item_bytes);
      fn(buffers[static_cast<size_t>(region.buffer)].subspan(static_cast<size_t>(at) * item, item), region.tensor,
         index);
    }
  }
}

// -- transports -------------------------------------------------------------------------------------------------------

enum class Kind { kInproc, kInprocStaged, kShm, kShmStaged, kTcp };

inline const char* kind_name(Kind kind) {
  constexpr const char* kNames[] = {"inproc", "inproc_staged", "shm", "shm_staged", "tcp"};
  return kNames[static_cast<size_t>(kind)];
}

inline std::vector<std::byte> token(const char* text = "a token of a test run") {
  const auto bytes = std::as_bytes(std::span(text, std::strlen(text)));
  return {bytes.begin(), bytes.end()};
}

using Endpoints = std::map<int32_t, std::shared_ptr<Transport>>;

// Runs fn(rank) for every rank, each in a thread of its own.
template <class Ranks>
void in_threads(const Ranks& ranks, const std::function<void(int32_t)>& fn) {
  std::vector<std::thread> threads;
  for (const int32_t rank : ranks) threads.emplace_back([&fn, rank] { fn(rank); });
  for (std::thread& thread : threads) thread.join();
}

inline Endpoints connect(Kind kind, const std::vector<int32_t>& ranks, const std::map<int32_t, RankMemory>& targets) {
  Endpoints endpoints;
  if (kind == Kind::kInproc || kind == Kind::kInprocStaged) {
    InprocGroup group(ranks);
    for (const int32_t rank : ranks) {
      const bool exposes = kind == Kind::kInproc && targets.contains(rank);
      endpoints[rank] = group.endpoint(rank, exposes ? targets.at(rank).spans() : std::vector<std::span<std::byte>>{});
    }
    return endpoints;
  }
  std::map<int32_t, std::string> addresses;
  std::map<int32_t, std::shared_ptr<SocketEndpoint>> sockets;
  for (const int32_t rank : ranks) {
    const bool exposes = kind == Kind::kShm && targets.contains(rank);
    if (kind == Kind::kTcp) {
      sockets[rank] = std::make_shared<TcpTransport>(rank, token());
    } else {
      sockets[rank] = std::make_shared<ShmTransport>(
          rank, token(), exposes ? targets.at(rank).exposed() : std::vector<ExposedBuffer>{});
    }
    addresses[rank] = sockets[rank]->address();
  }
  in_threads(ranks, [&](int32_t rank) { sockets.at(rank)->connect(addresses, Deadline(30)); });
  endpoints.insert(sockets.begin(), sockets.end());
  return endpoints;
}

// -- a world ----------------------------------------------------------------------------------------------------------

class World {
 public:
  World(std::shared_ptr<PlainPlan> plan, Kind kind, const ExecutorOptions& options = {})
      : plan_(std::move(plan)), kind_(kind), options_(options) {
    for (const int32_t rank : plan_->source().ranks()) sources_.try_emplace(rank, plan_->source().storage(rank));
    for (const int32_t rank : plan_->target().ranks()) targets_.try_emplace(rank, plan_->target().storage(rank));
    for (const auto& [rank, memory] : sources_) ranks_.push_back(rank);
    for (const auto& [rank, memory] : targets_) {
      if (!sources_.contains(rank)) ranks_.push_back(rank);
    }
    reconnect();
  }

  void reconnect() {
    executors_.clear();
    endpoints_.clear();
    endpoints_ = connect(kind_, ranks_, targets_);
    for (const int32_t rank : ranks_) {
      executors_[rank] = std::make_unique<Executor>(plan_, rank, endpoints_.at(rank), options_);
    }
  }

  BoundBuffers buffers(int32_t rank) const {
    BoundBuffers bound;
    if (sources_.contains(rank)) {
      for (const auto span : sources_.at(rank).spans()) bound.source.push_back(span);
    }
    if (targets_.contains(rank)) bound.target = targets_.at(rank).spans();
    return bound;
  }

  void fill(uint64_t salt) {
    for (const auto& [rank, memory] : sources_) {
      for_each_element(plan_->source(), plan_->source().storage(rank), memory.spans(),
                       [&](std::span<std::byte> bytes, int64_t tensor, int64_t index) {
                         element_bytes(tensor, index, salt, bytes);
                       });
    }
  }

  // Every element of every target is that of `salt`, and padding is zero.
  void check(uint64_t salt) {
    for (const auto& [rank, memory] : targets_) {
      const RankStorage storage = plan_->target().storage(rank);
      const auto spans = memory.spans();
      for_each_element(plan_->target(), storage, spans, [&](std::span<std::byte> bytes, int64_t tensor, int64_t index) {
        std::vector<std::byte> expected(bytes.size());
        const std::string& name = plan_->target().tensors()[static_cast<size_t>(tensor)].spec.name;
        element_bytes(*plan_->source().find(name), index, salt, expected);
        ASSERT_EQ(std::memcmp(bytes.data(), expected.data(), bytes.size()), 0)
            << "rank " << rank << ", " << name << ", element " << index;
        std::memset(bytes.data(), 0, bytes.size());
      });
      for (const std::span<std::byte> span : spans) {
        ASSERT_TRUE(std::ranges::all_of(span, [](std::byte b) { return b == std::byte{0}; }))
            << "padding of rank " << rank;
        std::memset(span.data(), static_cast<int>(kGarbage), span.size());
      }
    }
  }

  // One update of all ranks. Returns what each did; an error of any rank is in errors() instead.
  std::map<int32_t, TransferStats> run(uint64_t epoch, double seconds = 30) {
    std::mutex mutex;
    std::map<int32_t, TransferStats> stats;
    errors_.clear();
    in_threads(ranks_, [&](int32_t rank) {
      try {
        const TransferStats one = executors_.at(rank)->run(epoch, buffers(rank), Deadline(seconds));
        const std::lock_guard lock(mutex);
        stats[rank] = one;
      } catch (...) {
        const std::lock_guard lock(mutex);
        errors_[rank] = std::current_exception();
      }
    });
    return stats;
  }

  const std::map<int32_t, std::exception_ptr>& errors() const { return errors_; }
  std::string error_text(int32_t rank) const {
    try {
      if (errors_.contains(rank)) std::rethrow_exception(errors_.at(rank));
    } catch (const std::exception& error) {
      return error.what();
    }
    return "";
  }
  template <class E>
  bool failed_with(int32_t rank) const {
    try {
      if (errors_.contains(rank)) std::rethrow_exception(errors_.at(rank));
    } catch (const E&) {
      return true;
    } catch (...) {
    }
    return false;
  }

  Executor& executor(int32_t rank) { return *executors_.at(rank); }
  Endpoints& endpoints() { return endpoints_; }
  const std::vector<int32_t>& ranks() const { return ranks_; }
  const std::shared_ptr<PlainPlan>& plan() const { return plan_; }

 private:
  std::shared_ptr<PlainPlan> plan_;
  Kind kind_;
  ExecutorOptions options_;
  std::map<int32_t, RankMemory> sources_, targets_;
  std::vector<int32_t> ranks_;
  Endpoints endpoints_;
  std::map<int32_t, std::unique_ptr<Executor>> executors_;
  std::map<int32_t, std::exception_ptr> errors_;
};

// -- layouts ----------------------------------------------------------------------------------------------------------

inline std::vector<int32_t> ranks_from(int32_t first, int32_t count) {
  std::vector<int32_t> ranks;
  for (int32_t i = 0; i < count; ++i) ranks.push_back(first + i);
  return ranks;
}

// A linear model over `count` ranks from `first` on: columns, rows, a vector, a scalar, and a padded vocabulary.
inline std::shared_ptr<const Layout> tensor_parallel(int32_t first, int32_t count, int64_t item_bytes = 2) {
  const Mesh mesh(ranks_from(first, count), {count}, {"tp"});
  const auto spec = [&](const char* name, std::vector<int64_t> shape) {
    return TensorSpec{name, "bfloat16", item_bytes, std::move(shape)};
  };
  const int64_t vocabulary_rows = (101 + count - 1) / count + 3;
  Storage padded;
  padded.buffer_shape = {vocabulary_rows, 24};
  return std::make_shared<Layout>(std::vector<Mesh>{mesh},
                                  std::vector<TensorLayout>{{spec("down", {33, 130}), 0, {Shard{1}}, {}},
                                                            {spec("embed", {101, 24}), 0, {Shard{0}}, padded},
                                                            {spec("norm", {70}), 0, {Replicate{}}, {}},
                                                            {spec("scale", {}), 0, {Replicate{}}, {}},
                                                            {spec("up", {67, 40}), 0, {Shard{0}}, {}}});
}

// The same as FSDP1 would hold it: intervals of flattened tensors.
inline std::shared_ptr<const Layout> flat(int32_t first, int32_t count, int64_t item_bytes = 2) {
  const auto like = tensor_parallel(first, count, item_bytes);
  std::vector<TensorLayout> tensors = like->tensors();
  for (TensorLayout& tensor : tensors) {
    tensor.storage = {};
    if (!tensor.spec.shape.empty()) tensor.placements = {Flat{}};
  }
  return std::make_shared<Layout>(like->meshes(), tensors);
}

}  // namespace areal::reshard::testing
