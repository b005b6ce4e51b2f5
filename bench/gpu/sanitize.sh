#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Small shapes of every op under each tool of compute-sanitizer; one line a tool.
#   sanitize.sh DIR      DIR holds the *_gpu_test programs
set -euo pipefail
bin=$1
shapes='*IsThePlainSums/1:*IsThePlainSums/25:*IsThePlainSums/44:*SettledHistory*:*Null*:*BeyondTheTable*:*Engines*'
shapes+=':*ExpandPagesGpuTest*/3:*AppendRowsGpuTest*/1:*OneBit*'
shapes+=':GpuBatchTest.PagesThatAPrefix*:GpuBatchTest.QueriesOf*:GpuBatchTest.SequenceWithNan*'
status=0
# Every warp has barriers of its own: more of them than synccheck expects.
for tool in memcheck initcheck "synccheck --num-cuda-barriers 262144" racecheck; do
  for test in "$bin"/*_gpu_test; do
    log=$(compute-sanitizer --tool $tool --error-exitcode 9 "$test" --gtest_brief=1 --gtest_filter="$shapes" 2>&1) ||
      { status=1; printf '%s\n' "$log" | tail -30 >&2; }
    echo "${tool%% *} $(basename "$test"): $(printf '%s\n' "$log" | grep -E 'SUMMARY' | tail -1 | sed 's/=* *//')"
  done
done
exit $status
