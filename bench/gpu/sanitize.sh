#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Small shapes of every op under each tool of compute-sanitizer; one line a tool.
#   sanitize.sh DIR      DIR holds the *_gpu_test programs
set -euo pipefail
bin=$1
shapes='*IsThePlainSums/1:*IsThePlainSums/25:*IsThePlainSums/44:*SettledHistory*:*Null*:*BeyondTheTable*'
shapes+=':*EnginesTensors*:*ExpandPagesGpuTest*/3:*ExpandPagesGpuTest*/25:*ExpandPagesGpuTest*/47'
shapes+=':*TiltedKeys*:*AppendRowsGpuTest*/1:*OneBit*'
shapes+=':GpuBatchTest.PagesThatAPrefix*:GpuBatchTest.QueriesOf*:GpuBatchTest.SequenceWithNan*'
# Fifty launches in a row take racecheck minutes.
launches=':*LaunchesInARow*'

# One program under one tool. synccheck is told how many barriers a block has, and keeps as many for
# each. What it finds in the code is too few, since every warp has a ring of them: it warns that it
# lost some, and a launch fails. Far more leave it without memory, and every launch that it then
# cannot follow is an error.
check() {
  local filter=$shapes options=()
  [ "$1" = racecheck ] || filter+=$launches
  [ "$1" != synccheck ] || options=(--num-cuda-barriers 512)
  # The tools call a program that launches nothing an error.
  [ -n "$("$2" --gtest_list_tests --gtest_filter="$filter" | grep '^  ')" ] || return 0
  local log status=0
  log=$(compute-sanitizer --tool "$1" "${options[@]}" --error-exitcode 9 "$2" --gtest_brief=1 \
    --gtest_filter="$filter" 2>&1) || status=1
  [ $status = 0 ] || printf '%s\n' "$log" | tail -30 >&2
  echo "$1 $(basename "$2"): $(printf '%s\n' "$log" | grep -E 'SUMMARY' | tail -1 | sed 's/=* *//')"
  return $status
}
export -f check
export shapes launches

# Several at once: most of their time is the tools' own, on the CPU.
for tool in memcheck initcheck synccheck racecheck; do
  for test in "$bin"/*_gpu_test; do
    printf '%s\0%s\0' "$tool" "$test"
  done
done | xargs -0 -n 2 -P "$(($(nproc) / 2))" bash -c 'check "$@"' _
