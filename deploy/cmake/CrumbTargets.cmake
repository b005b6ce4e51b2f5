# SPDX-License-Identifier: Apache-2.0
#
# One helper a kind of target, so that a module's CMakeLists.txt says only what it is made of:
#
#   crumb_library(index SOURCES radix_index.cc radix_index.h PUBLIC crumb::base PRIVATE ...)
#   crumb_program(crumbd SOURCES main.cc DEPS crumb::server)
#   crumb_test(radix_index_test SOURCES radix_index_test.cc DEPS crumb::index LABELS unit)
#   crumb_bench(lookup_bench SOURCES lookup_bench.cc DEPS crumb::index)

# The repository's root, also for a project that takes only a part of it (client/python).
get_filename_component(CRUMB_SOURCE_DIR "${CMAKE_CURRENT_LIST_DIR}/../.." ABSOLUTE)

# What every target of ours compiles with. Third-party headers come in as SYSTEM.
add_library(crumb_options INTERFACE)
target_compile_features(crumb_options INTERFACE cxx_std_20)
# nvcc makes its own C++ of a .cu file, which -Wpedantic and the warnings of conversions do not like.
target_compile_options(crumb_options INTERFACE
  $<$<NOT:$<COMPILE_LANGUAGE:CUDA>>:-Wall;-Wextra;-Wpedantic;-Wshadow;-Wconversion;-Wsign-conversion;-Werror>
  $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra,-Werror;-Werror=all-warnings>)
# Rounding must be the same on every path (codec twins), so no contraction but where it is written.
target_compile_options(crumb_options INTERFACE
  $<$<NOT:$<COMPILE_LANGUAGE:CUDA>>:-ffp-contract=off>)
target_include_directories(crumb_options INTERFACE "${CRUMB_SOURCE_DIR}")
if(CRUMB_SANITIZE)
  target_compile_options(crumb_options INTERFACE
    -fsanitize=${CRUMB_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  target_link_options(crumb_options INTERFACE -fsanitize=${CRUMB_SANITIZE})
endif()
if(CRUMB_FUZZERS)  # Coverage for libFuzzer to steer by, in the libraries too.
  target_compile_options(crumb_options INTERFACE -fsanitize=fuzzer-no-link)
endif()

# For sources that use std::regex, of which GCC 12 takes parts for uninitialised when instrumented.
function(crumb_regex_sources)
  if(CRUMB_SANITIZE)
    set_source_files_properties(${ARGN} PROPERTIES COMPILE_OPTIONS -Wno-maybe-uninitialized)
  endif()
endfunction()

# Programs of a tsan build tell the sanitizer what Abseil's mutexes order: see the file.
if(CRUMB_SANITIZE STREQUAL "thread")
  add_library(crumb_tsan_abseil OBJECT "${CRUMB_SOURCE_DIR}/tests/support/tsan_abseil.cc")
  target_link_libraries(crumb_tsan_abseil PUBLIC crumb_options absl::status absl::synchronization)
endif()

find_program(CRUMB_MOLD mold)
if(CRUMB_MOLD)
  target_link_options(crumb_options INTERFACE -fuse-ld=mold)
endif()

function(crumb_link_sanitizer_support name)
  if(TARGET crumb_tsan_abseil)
    target_link_libraries(${name} PRIVATE crumb_tsan_abseil ${CMAKE_DL_LIBS})
  endif()
endfunction()

function(crumb_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES;PUBLIC;PRIVATE" ${ARGN})
  add_library(crumb_${name} STATIC ${ARG_SOURCES})
  add_library(crumb::${name} ALIAS crumb_${name})
  target_link_libraries(crumb_${name} PUBLIC crumb_options ${ARG_PUBLIC} PRIVATE ${ARG_PRIVATE})
endfunction()

function(crumb_program name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPS" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE crumb_options ${ARG_DEPS})
  crumb_link_sanitizer_support(${name})
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/bin")
endfunction()

function(crumb_test name)
  cmake_parse_arguments(ARG "" "TIMEOUT" "SOURCES;DEPS;LABELS" ${ARGN})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 120)
  endif()
  if(CRUMB_SANITIZE)
    math(EXPR ARG_TIMEOUT "6 * ${ARG_TIMEOUT}")
  endif()
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE crumb_options ${ARG_DEPS} GTest::gmock GTest::gtest_main)
  crumb_link_sanitizer_support(${name})
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES LABELS "${ARG_LABELS}" TIMEOUT ${ARG_TIMEOUT})
endfunction()

function(crumb_bench name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPS" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE crumb_options ${ARG_DEPS} benchmark::benchmark)
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/bench-bin")
endfunction()
