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
# The Python package is a build of its own (make python); without CUDA's compiler some files are part of none.
python=$(find build/python -maxdepth 2 -name compile_commands.json -printf '%h\n' -quit 2>/dev/null || true)
database() { case $1 in client/python/*) echo "$python" ;; *) echo "$build" ;; esac; }
in_build() {
  case $1 in
    cuda/gpu/* | client/python/*)
      local of
      of=$(database "$1")
      [ -n "$of" ] && grep -q "/$1\"" "$of/compile_commands.json"
      ;;
  esac
}
[ -n "$python" ] || echo "client/python/src is left out: make python makes its compile commands"
mapfile -t files < <(for file in "${files[@]}"; do in_build "$file" && echo "$(database "$file") $file"; done)
echo "clang-tidy: ${#files[@]} files, $(nproc) at a time"
total=${#files[@]}
count=0
printf '%s\n' "${files[@]}" |
  xargs -P "$(nproc)" -L 1 sh -c 'clang-tidy --quiet -p "$1" "$2" 2>/dev/null && echo "ok $2" || { echo "FAILED $2"; exit 1; }' _ |
  while IFS= read -r line; do
    case "$line" in
      "ok "*) count=$((count + 1)); [ -t 1 ] && printf '\r[%d/%d] %-70s' "$count" "$total" "${line#ok }" || true ;;
      *) printf '%s\n' "$line" ;;
    esac
  done
echo "lint: green"
