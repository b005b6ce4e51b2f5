# SPDX-License-Identifier: Apache-2.0
#
# Every third-party package, found once. deploy/install-dependencies.sh installs them.

find_package(Threads REQUIRED)
find_package(Protobuf MODULE REQUIRED)  # Debian and Ubuntu ship no config file for it.
find_package(gRPC CONFIG REQUIRED)
find_package(absl CONFIG REQUIRED)
find_package(prometheus-cpp CONFIG REQUIRED COMPONENTS core)
find_package(PkgConfig REQUIRED)
pkg_check_modules(microhttpd REQUIRED IMPORTED_TARGET libmicrohttpd)
pkg_check_modules(libzip REQUIRED IMPORTED_TARGET libzip)
pkg_check_modules(ucx REQUIRED IMPORTED_TARGET ucx)  # Its CMake file names no folder that exists, on Ubuntu 24.04.
find_package(spdlog CONFIG REQUIRED)
find_package(CLI11 CONFIG REQUIRED)
find_package(tomlplusplus CONFIG REQUIRED)
find_package(nlohmann_json CONFIG REQUIRED)
find_package(Eigen3 CONFIG REQUIRED)
find_package(OpenSSL REQUIRED COMPONENTS Crypto)
if(CRUMB_TESTS)
  find_package(GTest CONFIG REQUIRED)
endif()
if(CRUMB_BENCHMARKS)
  find_package(benchmark CONFIG REQUIRED)
endif()
