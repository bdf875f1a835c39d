# areal_sources(CORE ... ISA ... CUDA ... CUDA_SM90 ... TORCH ... BIND ...): each folder of csrc names its files once, by kind.
#   CORE   plain C++                         TORCH  schema and registration of torch ops (stable ABI)
#   ISA    C++ compiled once per instruction BIND   pybind11 registration
#          set, inside namespace areal::AREAL_ISA
#   CUDA   .cu files: nvcc for the module, the host compiler for the CPU shim of the tests
#   CUDA_SM90  likewise, for sm_90 and later alone (clusters, bulk copies); their launchers ask the device
function(areal_sources)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "" "CORE;ISA;CUDA;CUDA_SM90;TORCH;BIND")
  if(arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "areal_sources: expected CORE, ISA, CUDA, CUDA_SM90, TORCH or BIND, got ${arg_UNPARSED_ARGUMENTS}")
  endif()
  foreach(kind CORE ISA CUDA CUDA_SM90 TORCH BIND)
    list(TRANSFORM arg_${kind} PREPEND ${CMAKE_CURRENT_SOURCE_DIR}/)
    set_property(GLOBAL APPEND PROPERTY AREAL_${kind}_SOURCES ${arg_${kind}})
  endforeach()
endfunction()

# The instruction sets of the target machine and their flags.
set(AREAL_ISAS baseline)
set(AREAL_ISA_FLAGS_baseline "")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  set(AREAL_X86 ON)
  list(APPEND AREAL_ISAS avx2 avx512)
  set(AREAL_ISA_FLAGS_avx2 -mavx2 -mfma -mf16c)
  set(AREAL_ISA_FLAGS_avx512 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx2 -mfma -mf16c -mprefer-vector-width=512)
endif()

# Warnings are errors for those who work on the project; a compiler newer than ours must not break an install.
set(AREAL_WARNINGS -Wall -Wextra)
if(AREAL_WERROR)
  list(APPEND AREAL_WARNINGS -Werror)
endif()
