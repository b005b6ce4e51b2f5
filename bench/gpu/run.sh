#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds, checks and times the GPU's kernels and the service's GPU path in one call, the kernels beside BF16
# rivals in the same run, and writes bench/results/<date>-<gpu>-<commit>.{json,md}.
#
#   run.sh [--bin DIR] [--commit HASH] [--out DIR] [--plots DIR] [--sanitize] [--no-rivals]
#
#   --bin DIR    take tests and benchmarks, and the programs that they start (crumbd, crumbctl, gpu_engine,
#                e2e_engine), from there instead of building them (a machine without a compiler); libraries that
#                only they need may lie in DIR/lib
#   --plots DIR  where the plot of speed over context length goes (docs/design)
#   --sanitize   small shapes under compute-sanitizer too: memcheck, initcheck, synccheck, racecheck
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
bin=
commit=$(git -C "$root" rev-parse HEAD 2>/dev/null || echo unknown)
out=$root/bench/results
plots=$root/docs/design
sanitize=
rivals=yes
while [ $# -gt 0 ]; do
  case $1 in
    --bin) bin=$(cd "$2" && pwd); shift 2 ;;
    --commit) commit=$2; shift 2 ;;
    --out) out=$2; shift 2 ;;
    --plots) plots=$2; shift 2 ;;
    --sanitize) sanitize=yes; shift ;;
    --no-rivals) rivals=; shift ;;
    *) echo "run.sh: unknown option $1; see the first lines of $0" >&2; exit 2 ;;
  esac
done

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -z "$bin" ]; then
  cmake --preset release -S "$root" >"$work/configure.log"
  mapfile -t targets < <(ninja -C "$root/build/release" -t targets all |
    grep -oP '^(?!cmake_)(\w+_gpu_(test|bench)|gpu_\w*e2e_test)(?=: phony$)')
  [ ${#targets[@]} -gt 0 ] || { grep 'GPU kernels' "$work/configure.log" >&2; exit 1; }
  ninja -C "$root/build/release" "${targets[@]}" >"$work/build.log" || { tail -50 "$work/build.log" >&2; exit 1; }
  bin=$work/bin
  mkdir "$bin"
  # Without UCX there is no test of the service.
  for program in "$root"/build/release/tests/{{cuda,client}/gpu/*_gpu_test,client/e2e/gpu_*e2e_test} \
    "$root"/build/release/gpu-bench-bin/*_gpu_bench; do
    [ ! -e "$program" ] || ln -s "$program" "$bin"
  done
fi

# For the programs only: python3 has libraries of its own.
with_libraries() {
  LD_LIBRARY_PATH="$bin/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" "$@"
}

# A failed check ends the run: figures of wrong kernels are worth nothing.
for test in "$bin"/*_gpu_test "$bin"/gpu_*e2e_test; do
  [ -e "$test" ] || continue
  with_libraries "$test" --gtest_brief=1 >"$work/test.log" 2>&1 || { tail -40 "$work/test.log" >&2; exit 1; }
  echo "$(basename "$test"): $(tail -1 "$work/test.log")" | tee -a "$work/checks"
  ! grep -q 'no GPU can be used' "$work/test.log" || { echo "run.sh: there is no GPU here" >&2; exit 1; }
done
if [ -n "$sanitize" ]; then
  with_libraries "$here/sanitize.sh" "$bin" | tee -a "$work/checks"
fi

for bench in "$bin"/*_gpu_bench; do
  with_libraries "$bench" | tee -a "$work/ours" | cut -c1-150
done
: >"$work/rivals"
if [ -n "$rivals" ]; then
  python3 "$here/rivals.py" >"$work/rivals" || echo "run.sh: rivals stopped early; see above" >&2
fi
python3 "$here/report.py" --commit "$commit" --checks "$work/checks" --out "$out" "$work/ours" "$work/rivals"
python3 "$here/plot.py" --out "$plots/decode-speed.svg" "$work/ours" "$work/rivals"
