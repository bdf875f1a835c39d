# The Python module areal_core._C: pybind11 classes and the registration of the torch ops, in one library.
# torch is found by asking the interpreter, not through TorchConfig.cmake (which drags in CUDA, MKL and flags).
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)
find_package(pybind11 CONFIG QUIET)
if(NOT pybind11_FOUND)
  execute_process(COMMAND ${Python_EXECUTABLE} -m pybind11 --cmakedir OUTPUT_VARIABLE pybind11_DIR
                  OUTPUT_STRIP_TRAILING_WHITESPACE)
  find_package(pybind11 CONFIG REQUIRED)
endif()

set(AREAL_TORCH_DIR "$ENV{AREAL_TORCH_DIR}" CACHE PATH "Folder of the torch package (default: ask the Python interpreter)")
if(NOT AREAL_TORCH_DIR)
  foreach(flag "" "-I")  # "": a torch in the build environment; -I: past pip's isolation, the user's own
    execute_process(
      COMMAND ${Python_EXECUTABLE} ${flag} -c
              "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
      OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE)
    if(found)
      set(AREAL_TORCH_DIR ${found} CACHE PATH "" FORCE)
      break()
    endif()
  endforeach()
endif()
set(stable_shim ${AREAL_TORCH_DIR}/include/torch/csrc/stable/c/shim.h)
set(has_parallel_for "")
if(EXISTS ${stable_shim})
  file(STRINGS ${stable_shim} has_parallel_for REGEX "torch_parallel_for" LIMIT_COUNT 1)  # new in torch 2.10
endif()
if(NOT has_parallel_for)
  message(FATAL_ERROR "torch >= 2.10 not found (AREAL_TORCH_DIR=${AREAL_TORCH_DIR}): pip install torch, or set AREAL_TORCH_DIR")
endif()
message(STATUS "torch: ${AREAL_TORCH_DIR}")

get_property(bind_sources GLOBAL PROPERTY AREAL_BIND_SOURCES)
get_property(torch_sources GLOBAL PROPERTY AREAL_TORCH_SOURCES)
pybind11_add_module(_C MODULE NO_EXTRAS ${bind_sources} ${torch_sources})
target_include_directories(_C SYSTEM PRIVATE ${AREAL_TORCH_DIR}/include)
target_compile_options(_C PRIVATE ${AREAL_WARNINGS})
set(arch_list "")
if(AREAL_WITH_CUDA)
  list(JOIN AREAL_CUDA_ARCHS " " arch_list)
endif()
target_compile_definitions(
  _C PRIVATE TORCH_TARGET_VERSION=0x020a000000000000  # built against the stable ABI of torch 2.10
             AREAL_VERSION="${PROJECT_VERSION}" AREAL_CUDA_ARCH_LIST="${arch_list}"
             AREAL_COMPILER="${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}")
target_link_libraries(_C PRIVATE areal_native ${AREAL_TORCH_DIR}/lib/libtorch_cpu.so)
target_link_options(_C PRIVATE -Wl,--exclude-libs,ALL -Wl,-z,nodelete $<$<CONFIG:Release>:-s>)
set_target_properties(_C PROPERTIES SKIP_BUILD_RPATH ON)  # `import torch` has loaded libtorch_cpu.so by then
if(AREAL_INPLACE)
  set_target_properties(_C PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${PROJECT_SOURCE_DIR}/areal_core)
endif()
install(TARGETS _C LIBRARY DESTINATION areal_core)
