// Python face of the decode engine: areal_core._C.DecodeEngine. Arrays cross the border whole; nothing happens per
// token, and the GIL is released while the engine works.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <condition_variable>
#include <memory>
#include <mutex>

#include "bind/bind.h"
#include "decode/engine.h"

namespace py = pybind11;

namespace areal::bind {
namespace {

using decode::Engine;
using decode::FinishedSample;
using decode::NamedTensor;
using decode::OnUpdate;
using decode::Response;
using decode::SamplingParams;
using decode::UnfinishedSample;

template <class T>
using Array = py::array_t<T, py::array::c_style | py::array::forcecast>;

// A mutex that serves in order of arrival: a thread that calls decode() in a loop can't shut others out.
class FairMutex {
 public:
  void lock() {
    std::unique_lock guard(mutex_);
    const uint64_t ticket = next_++;
    turn_.wait(guard, [&] { return ticket == serving_; });
  }
  void unlock() {
    {
      const std::lock_guard guard(mutex_);
      ++serving_;
    }
    turn_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable turn_;
  uint64_t next_ = 0, serving_ = 0;
};

template <class T>
std::vector<T> to_vector(const Array<T>& array) {
  return {array.data(), array.data() + array.size()};
}

template <class T>
py::array_t<T> to_array(const std::vector<T>& values) {
  return py::array_t<T>(static_cast<py::ssize_t>(values.size()), values.data());
}

OnUpdate parse_on_update(const std::string& name) {
  if (name == "recompute") return OnUpdate::kRecompute;
  if (name == "keep") return OnUpdate::kKeep;
  AREAL_CHECK(name == "finish", "load_weights: expected on_update in {recompute, keep, finish}, got ", name);
  return OnUpdate::kFinish;
}

DType parse_dtype(const std::string& tensor, const std::string& name) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16})
    if (name == dtype_name(dtype)) return dtype;
  throw Error(format_message("load_weights: expected ", tensor, " in float32 or bfloat16, got ", name));
}

// The samples end to end, cut by cu_lengths.
py::tuple pack_finished(const std::vector<FinishedSample>& finished) {
  const auto count = static_cast<py::ssize_t>(finished.size());
  py::array_t<int64_t> request_id(count), cu_lengths(count + 1);
  py::array_t<int32_t> sample_index(count), reason(count);
  int64_t total = 0;
  cu_lengths.mutable_at(0) = 0;
  for (py::ssize_t i = 0; i < count; ++i) {
    const FinishedSample& sample = finished[static_cast<size_t>(i)];
    request_id.mutable_at(i) = sample.request_id;
    sample_index.mutable_at(i) = sample.sample_index;
    reason.mutable_at(i) = static_cast<int32_t>(sample.reason);
    cu_lengths.mutable_at(i + 1) = total += static_cast<int64_t>(sample.response.token_ids.size());
  }
  py::array_t<int32_t> token_ids(total);
  py::array_t<float> logprobs(total);
  py::array_t<int64_t> versions(total);
  for (py::ssize_t i = 0; i < count; ++i) {
    const Response& response = finished[static_cast<size_t>(i)].response;
    const int64_t begin = cu_lengths.at(i);
    std::copy(response.token_ids.begin(), response.token_ids.end(), token_ids.mutable_data() + begin);
    std::copy(response.logprobs.begin(), response.logprobs.end(), logprobs.mutable_data() + begin);
    std::copy(response.versions.begin(), response.versions.end(), versions.mutable_data() + begin);
  }
  return py::make_tuple(request_id, sample_index, reason, cu_lengths, token_ids, logprobs, versions);
}

// An Engine and the lock that lets several Python threads share it.
class LockedEngine {
 public:
  LockedEngine(const decode::DecoderConfig& config, const decode::EngineOptions& options) : engine_(config, options) {}

  // Runs fn(engine) without the GIL, when its turn has come.
  template <class Fn>
  auto with(Fn&& fn) {
    const py::gil_scoped_release release;
    const std::lock_guard guard(mutex_);
    return fn(engine_);
  }

  void submit(int64_t request_id, const Array<int32_t>& prompt_ids, int64_t n, const SamplingParams& sampling) {
    std::vector<int32_t> prompt = to_vector(prompt_ids);
    with([&](Engine& engine) { engine.submit(request_id, std::move(prompt), n, sampling); });
  }

  void resume(int64_t request_id, int32_t sample_index, const Array<int32_t>& prompt_ids,
              const SamplingParams& sampling, const Array<int32_t>& token_ids, const Array<float>& logprobs,
              const Array<int64_t>& versions) {
    UnfinishedSample sample{request_id,
                            sample_index,
                            to_vector(prompt_ids),
                            sampling,
                            {to_vector(token_ids), to_vector(logprobs), to_vector(versions)}};
    with([&](Engine& engine) { engine.resume(std::move(sample)); });
  }

  py::tuple decode(int64_t max_steps, const py::object& watch) {
    const int64_t* address = nullptr;
    if (!watch.is_none()) {
      const auto counter = py::cast<py::array>(watch);
      AREAL_CHECK(counter.dtype().equal(py::dtype::of<int64_t>()) && counter.size() == 1,
                  "decode: expected watch to be an int64 array of 1 element, got ", counter.size(), " of ",
                  py::str(counter.dtype()).cast<std::string>());
      address = static_cast<const int64_t*>(counter.data());
    }
    return pack_finished(with([&](Engine& engine) { return engine.decode(max_steps, address); }));
  }

  py::tuple load_weights(const py::list& tensors, int64_t version, const std::string& on_update) {
    const OnUpdate mode = parse_on_update(on_update);
    std::vector<NamedTensor> named;
    named.reserve(tensors.size());
    for (const py::handle item : tensors) {
      auto [name, address, dtype, shape] =
          py::cast<std::tuple<std::string, uintptr_t, std::string, std::vector<int64_t>>>(item);
      named.push_back({name, reinterpret_cast<const void*>(address), parse_dtype(name, dtype), std::move(shape)});
    }
    const auto update = with([&](Engine& engine) { return engine.load_weights(named, version, mode); });
    return py::make_tuple(update.interrupted_samples, update.recomputed_tokens, update.seconds);
  }

  py::list unfinished() {
    py::list list;
    for (const UnfinishedSample& sample : with([](Engine& engine) { return engine.unfinished(); })) {
      const Response& response = sample.response;
      list.append(py::make_tuple(sample.request_id, sample.sample_index, to_array(sample.prompt_ids), sample.sampling,
                                 to_array(response.token_ids), to_array(response.logprobs),
                                 to_array(response.versions)));
    }
    return list;
  }

  py::dict stats() {
    const decode::EngineStats stats = with([](Engine& engine) { return engine.stats(); });
    py::dict dict;
    dict["generated_tokens"] = stats.generated_tokens;
    dict["prefill_tokens"] = stats.prefill_tokens;
    dict["recomputed_tokens"] = stats.recomputed_tokens;
    dict["finished_samples"] = stats.finished_samples;
    dict["aborted_samples"] = stats.aborted_samples;
    dict["steps"] = stats.steps;
    dict["kv_pages_used"] = stats.kv_pages_used;
    dict["busy_seconds"] = stats.busy_seconds;
    return dict;
  }

 private:
  FairMutex mutex_;
  Engine engine_;
};

}  // namespace

void register_decode(py::module_& m) {
  py::class_<SamplingParams>(m, "DecodeSampling")
      .def(py::init([](int64_t max_new_tokens, double temperature, double top_p, int64_t top_k,
                       std::vector<int32_t> stop_token_ids, uint64_t seed) {
             return SamplingParams{max_new_tokens, temperature, top_p, top_k, std::move(stop_token_ids), seed};
           }),
           py::kw_only(), py::arg("max_new_tokens"), py::arg("temperature"), py::arg("top_p"), py::arg("top_k"),
           py::arg("stop_token_ids"), py::arg("seed"))
      .def_readonly("max_new_tokens", &SamplingParams::max_new_tokens)
      .def_readonly("temperature", &SamplingParams::temperature)
      .def_readonly("top_p", &SamplingParams::top_p)
      .def_readonly("top_k", &SamplingParams::top_k)
      .def_readonly("stop_token_ids", &SamplingParams::stop_token_ids)
      .def_readonly("seed", &SamplingParams::seed);

  py::class_<LockedEngine>(m, "DecodeEngine")
      .def(py::init([](int64_t vocab_size, int64_t hidden_size, int64_t intermediate_size, int64_t num_layers,
                       int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, double rope_theta,
                       double rms_norm_eps, bool tie_word_embeddings, bool qkv_bias, int64_t max_slots,
                       int64_t max_context, int64_t prefill_rows, int64_t threads) {
             return std::make_unique<LockedEngine>(
                 decode::DecoderConfig{vocab_size, hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads,
                                       head_dim, rope_theta, rms_norm_eps, tie_word_embeddings, qkv_bias},
                 decode::EngineOptions{max_slots, max_context, prefill_rows, threads});
           }),
           py::kw_only(), py::arg("vocab_size"), py::arg("hidden_size"), py::arg("intermediate_size"),
           py::arg("num_layers"), py::arg("num_heads"), py::arg("num_kv_heads"), py::arg("head_dim"),
           py::arg("rope_theta"), py::arg("rms_norm_eps"), py::arg("tie_word_embeddings"), py::arg("qkv_bias"),
           py::arg("max_slots"), py::arg("max_context"), py::arg("prefill_rows"), py::arg("threads"))
      .def("submit", &LockedEngine::submit)
      .def("resume", &LockedEngine::resume)
      .def("abort",
           [](LockedEngine& self, int64_t id) { return self.with([&](Engine& engine) { return engine.abort(id); }); })
      .def("unfinished", &LockedEngine::unfinished)
      .def("decode", &LockedEngine::decode)
      .def("load_weights", &LockedEngine::load_weights)
      .def("stats", &LockedEngine::stats)
      .def_property_readonly(
          "version", [](LockedEngine& self) { return self.with([](Engine& engine) { return engine.version(); }); })
      .def_property_readonly(
          "num_active",
          [](LockedEngine& self) { return self.with([](Engine& engine) { return engine.num_active(); }); })
      .def_property_readonly("num_waiting", [](LockedEngine& self) {
        return self.with([](Engine& engine) { return engine.num_waiting(); });
      });
}

}  // namespace areal::bind
