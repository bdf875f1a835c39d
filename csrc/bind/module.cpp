// The Python module areal_core._C. Importing it registers the torch ops (the *_torch.cpp files linked beside this
// one do that on load) and the pybind11 classes of each subsystem.
#include <pybind11/pybind11.h>
#include <torch/csrc/stable/ops.h>

#include "base/check.h"
#include "base/isa.h"
#include "base/loaded_symbol.h"
#include "base/threads.h"
#include "bind/bind.h"

namespace py = pybind11;

namespace {

// torch's pool runs our loops: torch.set_num_threads and its nesting rules then hold for them too.
void torch_parallel_for(int64_t begin, int64_t end, int64_t grain, areal::RangeFn fn) {
  torch::stable::parallel_for(begin, end, grain, [&](int64_t b, int64_t e) { fn(b, e); });
}

int64_t torch_num_threads() { return torch::stable::get_num_threads(); }

areal::Isa parse_isa(const std::string& name) {
  for (const areal::Isa isa : {areal::Isa::kBaseline, areal::Isa::kAvx2, areal::Isa::kAvx512}) {
    if (name == areal::isa_name(isa)) return isa;
  }
  throw areal::Error("set_active_isa: expected baseline, avx2 or avx512, got " + name);
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  areal::set_parallel_for(&torch_parallel_for, &torch_num_threads);
  py::register_exception<areal::Error>(m, "Error", PyExc_ValueError);

  m.attr("__version__") = AREAL_VERSION;
  m.attr("cuda_compiled") =
#if defined(AREAL_WITH_CUDA)
      true;
#else
      false;
#endif
  m.attr("cuda_archs") = AREAL_CUDA_ARCH_LIST;
  m.attr("compiler") = AREAL_COMPILER;
  m.def("best_isa", [] { return areal::isa_name(areal::best_isa()); });
  m.def("active_isa", [] { return areal::isa_name(areal::active_isa()); });
  m.def("set_active_isa", [](const std::string& name) { areal::set_active_isa(parse_isa(name)); });
  m.def("num_threads", &areal::num_threads);
  m.def(
      "has_loaded_symbol",
      [](const char* soname, const char* symbol) { return areal::loaded_symbol(soname, symbol) != nullptr; },
      py::arg("soname"), py::arg("symbol"));

  areal::bind::register_decode(m);
  areal::bind::register_packing(m);
  areal::bind::register_reshard(m);
  areal::bind::register_reshard_layout(m);
  areal::bind::register_reshard_plan(m);
  areal::bind::register_reshard_executor(m);
}
