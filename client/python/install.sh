#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds the package's wheel into build/python/dist and installs it, with pytest, in the virtual
# environment build/python/venv. Build requirements come from PyPI.
#
#   install.sh [EXTRA]      EXTRA: "models" also installs PyTorch and transformers (several GB)
set -euo pipefail
cd "$(dirname "$0")/../.."
extras=test${1:+,$1}
out=build/python
mkdir -p "$out"
rm -f "$out/installed"

[ -x "$out/venv/bin/python" ] || python3 -m venv "$out/venv"
if command -v ccache >/dev/null; then
  export CMAKE_C_COMPILER_LAUNCHER=ccache CMAKE_CXX_COMPILER_LAUNCHER=ccache
fi
rm -rf "$out/dist"
pip=("$out/venv/bin/python" -m pip --quiet --disable-pip-version-check)
# Not in an environment of pip's own, which would be gone when clang-tidy asks for nanobind's headers.
mapfile -t requires < <("$out/venv/bin/python" -c 'import tomllib
print(*tomllib.load(open("client/python/pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")')
"${pip[@]}" install "${requires[@]}"
"${pip[@]}" wheel --no-build-isolation --no-deps --wheel-dir "$out/dist" client/python
"${pip[@]}" install "$(echo "$out"/dist/crumb-*.whl)[$extras]"
"${pip[@]}" install --no-deps --force-reinstall "$out"/dist/crumb-*.whl
touch "$out/installed"
echo "The package is in $out/venv and its wheel in $out/dist"
