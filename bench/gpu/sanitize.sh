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
status=0
# synccheck is told how many barriers a block has, and keeps as many for each. What it finds in the
# code is too few, since every warp has a ring of them: it warns that it lost some, and a launch
# fails. Far more leave it without memory, and every launch that it then cannot follow is an error.
for tool in memcheck initcheck "synccheck --num-cuda-barriers 512" racecheck; do
  filter=$shapes
  [ "$tool" = racecheck ] || filter+=':*LaunchesInARow*'  # Fifty launches take it minutes.
  for test in "$bin"/*_gpu_test; do
    log=$(compute-sanitizer --tool $tool --error-exitcode 9 "$test" --gtest_brief=1 --gtest_filter="$filter" 2>&1) ||
      { status=1; printf '%s\n' "$log" | tail -30 >&2; }
    echo "${tool%% *} $(basename "$test"): $(printf '%s\n' "$log" | grep -E 'SUMMARY' | tail -1 | sed 's/=* *//')"
  done
done
exit $status
