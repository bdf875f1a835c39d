// One registration function per stateful subsystem, defined in bind/<subsystem>.cpp and called by module.cpp. What they
// define has its types in areal_core/_C.pyi; python_tests/test_native_stub.py compares the two.
#pragma once

#include <pybind11/pybind11.h>

namespace areal::bind {

void register_decode(pybind11::module_& m);
void register_packing(pybind11::module_& m);
void register_reshard(pybind11::module_& m);
void register_reshard_executor(pybind11::module_& m);
void register_reshard_layout(pybind11::module_& m);
void register_reshard_plan(pybind11::module_& m);

}  // namespace areal::bind
