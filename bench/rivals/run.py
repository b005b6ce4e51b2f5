#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs other KV-page stores beside crumbd, on the same prefix, and prints one table.

A prefix is 8,192 tokens of an 8B model (36 layers, 8 KV heads, head_dim 128): 128 pages. Crumb keeps
them at two bits; the rivals get pages of the same size (int2) and of their own format's (bf16).
Everything runs on the loopback address and is stopped on any exit. A store that cannot be installed
or started is named with its reason, and the others go on; the exit status is then 1.
"""
import argparse
import json
import pathlib
import signal
import sys
import tempfile
import time

import comparison
import install
import processes

import machine  # By comparison's path: bench/report.

SCHEMA = 1
HERE = pathlib.Path(__file__).resolve().parent
TOKENS_PER_PAGE = 64
FORMATS = {"int2": 1_327_104, "bf16": 9_437_184}  # Bytes a page.
# Client and server each hold the pages, the client twice, and most servers need room for two puts.
MEMORY_FACTOR = 5.5


def main():
    args = parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    args.folder.mkdir(parents=True, exist_ok=True)
    host = machine.describe()
    print(machine.headline(host))
    print(f"prefix: {args.pages} pages, {args.pages * TOKENS_PER_PAGE:,} tokens\n", flush=True)

    rows, problems = [], []
    for rival in install.RIVALS:
        if rival.key not in args.stores:
            continue
        try:
            python = install.python_of(rival, args.folder)
        except processes.BenchError as error:
            print(f"{rival.title}: not installed: {error}", flush=True)
            problems.append(f"{rival.title}: not installed: {error}")
            continue
        for page_format in (one for one in args.formats if one in rival.formats):
            for mode in rival.modes:
                measure_one(rival, python, mode, page_format, args, rows, problems)

    rows.sort(key=lambda row: row["format"] != "int2")
    print("\n" + comparison.as_table(rows) if rows else "\nnothing measured")
    print_versions(rows)
    for problem in problems:
        print(f"not measured: {problem}")
    write(args, host, rows, problems)
    return 1 if problems else 0


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    keys = [rival.key for rival in install.RIVALS]
    parser.add_argument("--stores", nargs="+", choices=keys, default=keys)
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS), default=list(FORMATS))
    parser.add_argument("--pages", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=10, help="timed puts and gets")
    parser.add_argument("--calls", type=int, default=100, help="timed attaches and checks")
    parser.add_argument("--timeout", type=float, default=300, help="seconds a mode")
    parser.add_argument("--folder", type=pathlib.Path, default=machine.ROOT / "build/rivals",
                        help="for environments and logs")
    parser.add_argument("--json", type=pathlib.Path, default=machine.ROOT / "build/rivals.json")
    args = parser.parse_args()
    if min(args.pages, args.repeat, args.calls) < 1:
        parser.error("counts must be positive")
    return args


def measure_one(rival, python, mode, page_format, args, rows, problems):
    """Adds the row of one store in one mode, and what went wrong."""
    name = f"{rival.title}, {mode}, {page_format}"
    print(f"{name} ... ", end="", flush=True)
    needed = MEMORY_FACTOR * FORMATS[page_format] * args.pages
    if needed > available_memory():
        problem = (f"needs about {needed / 1e9:.1f} GB of memory, {available_memory() / 1e9:.1f} GB "
                   "are available; try --pages or --formats int2")
        output = ""
    else:
        start = time.monotonic()
        output, problem = run_store(rival, python, mode, page_format, args)
    row = comparison.row_of(rival.title, mode, page_format, FORMATS[page_format], args.pages,
                            args.pages * TOKENS_PER_PAGE, output)
    if output:
        rows.append(row)
        print(f"{comparison.summary(row)} ({time.monotonic() - start:.0f} s)", flush=True)
    if problem:
        print(f"    {problem}", flush=True)
        problems.append(f"{name}: {problem}")


def run_store(rival, python, mode, page_format, args):
    """(records, problem) of a store's script in a process group of its own."""
    log_path = args.folder / f"{rival.key}-{mode}-{page_format}.log"
    with tempfile.TemporaryDirectory(prefix="crumb-rivals-") as folder:
        workload = {"mode": mode, "page_bytes": FORMATS[page_format], "pages": args.pages,
                    "repeat": args.repeat, "calls": args.calls, "folder": folder}
        output, problem = processes.run_group([python, HERE / rival.script, json.dumps(workload)],
                                              log_path, args.timeout)
    return output, problem and f"{problem} ({log_path})"


def available_memory():
    for line in pathlib.Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def print_versions(rows):
    print()
    for title in dict.fromkeys(row["store"] for row in rows):
        versions = {row["version"] for row in rows if row["store"] == title}
        print(f"{title}: {', '.join(sorted(versions))}")


def write(args, host, rows, problems):
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(
        {"schema": SCHEMA, "machine": host, "pages": args.pages,
         "tokens": args.pages * TOKENS_PER_PAGE, "rows": rows, "not_measured": problems},
        indent=2) + "\n")
    print(f"\nwrote {args.json}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
