#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Installs the distribution's packages that Crumb is built with, those that are missing and no
# others. For Debian 12 and Ubuntu 24.04, as root or with sudo. Safe to run again.
set -euo pipefail

packages=(
  # Tools
  g++ cmake ninja-build ccache mold make git pkg-config python3 python3-pip ca-certificates unzip
  # Libraries, in the order of deploy/cmake/CrumbDependencies.cmake
  libprotobuf-dev protobuf-compiler libgrpc++-dev protobuf-compiler-grpc libabsl-dev
  prometheus-cpp-dev libmicrohttpd-dev libzip-dev libucx-dev ucx-utils libspdlog-dev libcli11-dev libtomlplusplus-dev
  nlohmann-json3-dev libeigen3-dev libssl-dev libgtest-dev libgmock-dev libbenchmark-dev
)
case "${1:-}" in
  "") ;;
  --lint) packages+=(clang clang-tidy clang-format) ;;
  --fuzz)
    # The fuzzer's runtime is a package of clang's version, which differs between distributions.
    version=$(apt-cache depends clang | sed -n 's/.*Depends: clang-\([0-9]\+\)$/\1/p')
    packages+=(clang "libclang-rt-${version:-14}-dev")
    ;;
  # redis-tools has the server's program under another name, and starts no service.
  --python) packages+=(python3-venv python3-dev) ;;
  --rivals) packages+=(python3-venv redis-tools) ;;
  *) echo "usage: $0 [--lint|--fuzz|--python|--rivals]" >&2; exit 2 ;;
esac

if ! command -v dpkg-query >/dev/null; then
  echo "error: this script knows Debian and Ubuntu only; install the equivalents of: ${packages[*]}" >&2
  exit 1
fi
missing=()
for package in "${packages[@]}"; do
  state=$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null || true)
  [ "$state" = installed ] || missing+=("$package")
done
if [ ${#missing[@]} -eq 0 ]; then
  exit 0
fi

as_root=()
if [ "$(id -u)" -ne 0 ]; then
  if ! command -v sudo >/dev/null; then
    echo "error: not root and no sudo; as root run: apt-get install ${missing[*]}" >&2
    exit 1
  fi
  as_root=(sudo)
fi
echo "Installing ${#missing[@]} packages: ${missing[*]}"
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
  apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
