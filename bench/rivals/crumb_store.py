#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Crumb itself: a crumbd of this build, and crumb_engine, which measures.

Modes:
  map   pages are read in place in the daemon's sealed memory; a get adds a copy of all of them
  ucx   pages are pulled into the client's memory over UCX (cma, tcp), their checksums verified

A prefix is kept as an engine publishes it: two bits a value, the sink (64 tokens) and a copy of the
last 256 tokens in BF16, so that a reader starts with full precision there.
"""
import json
import subprocess
import sys

import install
import measure
import processes

BF16_PAGES, BF16_PAGE_BYTES = 5, 9_437_184  # Sink and tail.
# Of prefixes. One that is being put, those that are there, and chunks that are not yet full.
ARENA_PREFIXES = 3


def main():
    processes.exit_on_sigterm()
    workload = measure.Workload(**json.loads(sys.argv[1]))
    socket = measure.scratch(workload, "crumbd.sock")
    capacity = ARENA_PREFIXES * (workload.data_bytes + BF16_PAGES * BF16_PAGE_BYTES)
    command = [install.CRUMBD, f"--listen.unix_socket={socket}", "--listen.metrics", "",
               f"--store.capacity={capacity}", f"--ucx.enabled={str(workload.mode == 'ucx').lower()}"]
    version = subprocess.run([install.CRUMBD, "--version"], check=True, text=True,
                             stdout=subprocess.PIPE)
    print(json.dumps({"op": "version", "text": version.stdout.strip()}), flush=True)
    try:
        with processes.running(command, measure.scratch(workload, "crumbd.log"),
                               ready_path=socket) as daemon:
            engine = [install.CRUMB_ENGINE, f"unix:{socket}", workload.mode, daemon.pid,
                      workload.pages, workload.repeat, workload.calls]
            done = subprocess.run([str(part) for part in engine], check=False,
                                  preexec_fn=processes.die_with_parent)
            return done.returncode
    except processes.BenchError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
