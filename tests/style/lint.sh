#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# clang-format over the whole tree and clang-tidy over the product's sources, or over the files given.
#   lint.sh BUILD_DIR [FILE.cc ...]      BUILD_DIR holds compile_commands.json and generated sources
set -euo pipefail
cd "$(dirname "$0")/../.."
build=$1
shift

mapfile -t code < <(git ls-files -co --exclude-standard -- '*.h' '*.cc' '*.cu' '*.cuh')
echo "clang-format: ${#code[@]} files"
clang-format --dry-run -Werror "${code[@]}"

if [ $# -gt 0 ]; then
  files=("$@")
else
  mapfile -t files < <(git ls-files -co --exclude-standard -- 'proto/*.cc' 'cuda/*.cc' 'client/*.cc' 'daemon/*.cc')
fi
# With CUDA's compiler or without, some of these are not part of the build, and the Python package never is.
in_build() { case $1 in cuda/gpu/* | client/python/*) grep -q "/$1\"" "$build/compile_commands.json" ;; esac; }
mapfile -t files < <(for file in "${files[@]}"; do in_build "$file" && echo "$file"; done)
echo "clang-tidy: ${#files[@]} files, $(nproc) at a time"
total=${#files[@]}
count=0
printf '%s\n' "${files[@]}" |
  xargs -P "$(nproc)" -I{} sh -c 'clang-tidy --quiet -p "$1" "$2" 2>/dev/null && echo "ok $2" || { echo "FAILED $2"; exit 1; }' _ "$build" {} |
  while IFS= read -r line; do
    case "$line" in
      "ok "*) count=$((count + 1)); [ -t 1 ] && printf '\r[%d/%d] %-70s' "$count" "$total" "${line#ok }" || true ;;
      *) printf '%s\n' "$line" ;;
    esac
  done
echo "lint: green"
