# SPDX-License-Identifier: Apache-2.0
#
# CUDA where nvcc is: sets CRUMB_HAVE_CUDA. Everything builds and passes without it; ops on the GPU
# then answer UNIMPLEMENTED.
#
#   crumb_cuda_sources(gpu launch/op.cu gpu/op.cc ...)      adds sources that need CUDA to crumb_gpu
#   crumb_gpu_test(op_gpu_test SOURCES op_test.cc DEPS crumb::gpu)      a test that needs a GPU
#   crumb_gpu_bench(op_gpu_bench SOURCES op_bench.cc DEPS crumb::gpu)   a program for bench/gpu/run.sh

option(CRUMB_CUDA "Build the GPU's kernels where nvcc is found" ON)
set(CRUMB_HAVE_CUDA OFF)

# Hopper first: 90a is the target that is tuned. 80 also serves 8.6 and 8.9; the PTX is for what
# comes later, compiled by its driver.
set(CRUMB_CUDA_ARCHITECTURES "80-real;90a-real;90-virtual" CACHE STRING
  "Compute capabilities to compile for, as CMAKE_CUDA_ARCHITECTURES")

function(crumb_find_cuda)
  if(NOT CRUMB_CUDA)
    message(STATUS "GPU kernels: off (CRUMB_CUDA is OFF)")
    return()
  endif()
  if(CRUMB_SANITIZE OR CRUMB_FUZZERS)
    message(STATUS "GPU kernels: off (a sanitized build checks the host's code)")
    return()
  endif()
  if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
    find_program(CRUMB_NVCC nvcc HINTS /usr/local/cuda/bin)
    if(NOT CRUMB_NVCC)
      message(STATUS "GPU kernels: off (no nvcc in the PATH or in /usr/local/cuda/bin)")
      return()
    endif()
    set(ENV{CUDACXX} "${CRUMB_NVCC}")
  endif()
  set(CMAKE_CUDA_ARCHITECTURES "${CRUMB_CUDA_ARCHITECTURES}")
  include(CheckLanguage)
  check_language(CUDA)
  if(NOT CMAKE_CUDA_COMPILER)
    message(STATUS "GPU kernels: off (the nvcc that was found cannot compile: $ENV{CUDACXX})")
    return()
  endif()
  set(CRUMB_HAVE_CUDA ON PARENT_SCOPE)
endfunction()
crumb_find_cuda()

if(CRUMB_HAVE_CUDA)
  set(CMAKE_CUDA_ARCHITECTURES "${CRUMB_CUDA_ARCHITECTURES}")
  enable_language(CUDA)
  find_package(CUDAToolkit REQUIRED)
  # CMake 3.25 does not know that nvcc 13 speaks C++20.
  if(NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
    set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
  endif()
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_RUNTIME_LIBRARY Static)  # Programs start on machines that have no CUDA at all.
  message(STATUS "GPU kernels: on (nvcc ${CMAKE_CUDA_COMPILER_VERSION}, for ${CMAKE_CUDA_ARCHITECTURES})")
endif()

function(crumb_cuda_sources name)
  target_sources(crumb_${name} PRIVATE ${ARGN})
  target_link_libraries(crumb_${name} PRIVATE CUDA::cudart_static)
  # The page format's constexpr arithmetic is used on the device as it is.
  target_compile_options(crumb_${name} PRIVATE
    $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr>)
endfunction()

# Skips with a message where there is no device.
function(crumb_gpu_test name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPS" ${ARGN})
  if(CRUMB_HAVE_CUDA)
    crumb_test(${name} SOURCES ${ARG_SOURCES} DEPS ${ARG_DEPS} CUDA::cudart_static
      LABELS gpu TIMEOUT 600)
    set_tests_properties(${name} PROPERTIES SKIP_REGULAR_EXPRESSION "no GPU can be used")
  endif()
endfunction()

function(crumb_gpu_bench name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPS" ${ARGN})
  if(CRUMB_HAVE_CUDA)
    add_executable(${name} ${ARG_SOURCES})
    target_link_libraries(${name} PRIVATE crumb_options ${ARG_DEPS} CUDA::cudart_static)
    target_compile_options(${name} PRIVATE
      $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr>)
    set_target_properties(${name} PROPERTIES
      RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/gpu-bench-bin")
  endif()
endfunction()
