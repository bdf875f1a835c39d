#include <pybind11/stl.h>

#include "base/check.h"
#include "bind/bind.h"
#include "ops/packing/allocation.h"

namespace py = pybind11;

namespace areal::bind {
namespace {

PackMethod parse_method(const std::string& name) {
  if (name == "ffd") return PackMethod::kFfd;
  if (name == "mffd") return PackMethod::kMffd;
  if (name == "kk") return PackMethod::kKk;
  throw Error(
      format_message("allocate_microbatches: expected method in {\"ffd\", \"mffd\", \"kk\"}, got \"", name, "\""));
}

// Whether an argument that is either "error" or `other` is the other.
bool parse_policy(const char* argument, const std::string& name, const char* other) {
  AREAL_CHECK(name == "error" || name == other, "allocate_microbatches: expected ", argument, " in {\"error\", \"",
              other, "\"}, got \"", name, "\"");
  return name == other;
}

// A list of ints. By hand: 2.6 ns an element, where pybind11's own conversion takes 12.
std::vector<int64_t> to_vector(const py::list& list) {
  std::vector<int64_t> values(list.size());
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = PyLong_AsLongLong(PyList_GET_ITEM(list.ptr(), static_cast<py::ssize_t>(i)));
    if (values[i] == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
  }
  return values;
}

// By hand for the same reason.
py::list to_lists(const Bins& bins) {
  py::list lists(bins.size());
  for (size_t b = 0; b < bins.size(); ++b) {
    py::list indices(bins[b].size());
    for (size_t i = 0; i < bins[b].size(); ++i) {
      PyObject* index = PyLong_FromLongLong(bins[b][i]);
      if (index == nullptr) throw py::error_already_set();
      PyList_SET_ITEM(indices.ptr(), static_cast<py::ssize_t>(i), index);
    }
    PyList_SET_ITEM(lists.ptr(), static_cast<py::ssize_t>(b), indices.release().ptr());
  }
  return lists;
}

template <class Allocate>
py::list without_lock(const Allocate& allocate) {
  Bins bins;
  {
    const py::gil_scoped_release unlocked;
    bins = allocate();
  }
  return to_lists(bins);
}

}  // namespace

void register_packing(py::module_& m) {
  m.def(
      "allocate_microbatches",
      [](const py::list& list, int64_t max_tokens, int64_t min_bins, int64_t multiple_of, const std::string& method,
         const std::string& oversized, const std::string& too_few) {
        const std::vector<int64_t> lengths = to_vector(list);
        const AllocateOptions options{.max_tokens = max_tokens,
                                      .min_bins = min_bins,
                                      .multiple_of = multiple_of,
                                      .method = parse_method(method),
                                      .oversized_alone = parse_policy("oversized", oversized, "alone"),
                                      .allow_empty = parse_policy("too_few", too_few, "empty")};
        return without_lock([&] { return allocate_microbatches(lengths, options); });
      },
      py::arg("lengths"), py::arg("max_tokens"), py::arg("min_bins"), py::arg("multiple_of"), py::arg("method"),
      py::arg("oversized"), py::arg("too_few"));
  m.def(
      "partition_balanced",
      [](const py::list& list, int64_t bins, double linear_cost, double quadratic_cost, bool equal_size,
         std::optional<int64_t> max_tokens) {
        const std::vector<int64_t> lengths = to_vector(list);
        const PartitionOptions options{bins, linear_cost, quadratic_cost, equal_size, max_tokens};
        return without_lock([&] { return partition_balanced(lengths, options); });
      },
      py::arg("lengths"), py::arg("bins"), py::arg("linear_cost"), py::arg("quadratic_cost"), py::arg("equal_size"),
      py::arg("max_tokens"));
}

}  // namespace areal::bind
