#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs every benchmark program and prints each figure beside its limit.

Writes the figures as JSON and as a picture. A program that fails is named with its reason and the
others go on; the exit status is then 1. bench/README.md says what the fields are.
"""
import argparse
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import time

import figures
import machine
import plot
import table

SCHEMA = 1


def main():
    args = parse_args()
    programs = [path for path in sorted(args.bin_dir.glob("*"))
                if path.is_file() and path.stat().st_mode & 0o100 and args.filter.search(path.name)]
    if not programs:
        print(f"no benchmark program in {args.bin_dir} matches; build first: make build",
              file=sys.stderr)
        return 1
    host = machine.describe()
    print(machine.headline(host), end="\n\n", flush=True)

    found, problems = [], []
    for number, program in enumerate(programs, 1):
        print(f"[{number}/{len(programs)}] {program.name} ... ", end="", flush=True)
        start = time.monotonic()
        new, wrong = run_program(program, args)
        print(f"{len(new)} figures, {time.monotonic() - start:.0f} s"
              + (f", {len(wrong)} problems" if wrong else ""), flush=True)
        found += new
        problems += wrong

    print("\n" + as_table(found))
    for problem in problems:
        print(f"not measured: {problem}")
    write(args, host, found, problems)
    return 1 if problems else 0


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin-dir", type=pathlib.Path,
                        default=machine.ROOT / "build/release/bench-bin")
    parser.add_argument("--json", type=pathlib.Path, default=machine.ROOT / "build/bench.json")
    parser.add_argument("--svg", type=pathlib.Path, default=machine.ROOT / "build/bench.svg")
    parser.add_argument("--filter", type=re.compile, default=re.compile(""),
                        help="only programs whose name matches this pattern")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=600, help="seconds a program")
    return parser.parse_args()


def run_program(program, args):
    """(figures, problems) of one program."""
    log_path = args.json.parent / "bench-logs" / f"{program.name}.log"
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="crumb-bench-") as folder, open(log_path, "wb") as log:
        out = pathlib.Path(folder) / "report.json"
        command = [program.resolve(), f"--benchmark_out={out}", "--benchmark_out_format=json",
                   f"--benchmark_repetitions={args.repetitions}"]
        try:
            done = subprocess.run(command, cwd=machine.ROOT, stdin=subprocess.DEVNULL, stdout=log,
                                  stderr=subprocess.STDOUT, timeout=args.timeout, check=False)
        except subprocess.TimeoutExpired:
            return [], [f"{program.name}: took longer than {args.timeout:.0f} s; see {log_path}"]
        text = out.read_text() if out.exists() else ""
    return read_report(program.name, text, done.returncode, log_path)


def read_report(name, text, returncode, log_path):
    """(figures, problems) out of what a program wrote and how it ended."""
    problems = []
    if returncode != 0:
        problems.append(f"{name}: exit status {returncode}; {last_line(log_path)} ({log_path})")
    try:
        new, wrong = figures.from_google_benchmark(name, json.loads(text))
    except ValueError:
        if not problems:
            problems.append(f"{name}: wrote no report; {last_line(log_path)} ({log_path})")
        return [], problems
    if not new and not wrong and not problems:
        problems.append(f"{name}: its report has no benchmarks ({log_path})")
    return new, problems + wrong


def last_line(path):
    lines = path.read_text(errors="replace").split("\n") if path.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")


def as_table(found):
    """Figures with a limit first, program by program, then the others."""
    rows = []
    for figure in sorted(found, key=lambda one: (one.ratio is None and one.target is None)):
        sign = ">=" if figure.better == "higher" else "<="
        rows.append([
            figure.name, table.number(figure.value), figure.unit, table.number(figure.limit),
            "" if figure.ratio is None else f"{100 * figure.ratio:.0f} %",
            "" if figure.target is None else f"{sign} {table.number(figure.target)}",
            {True: "met", False: "MISSED", None: ""}[figure.meets_target],
            figure.limit_name,
        ])
    if not rows:
        return "no figures"
    return table.render(
        rows, ["figure", "value", "unit", "limit", "of limit", "target", "", "what the limit is"],
        "lrlrrrl")


def write(args, host, found, problems):
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(
        {"schema": SCHEMA, "machine": host, "figures": [one.as_dict() for one in found],
         "not_measured": problems}, indent=2) + "\n")
    args.svg.write_text(plot.draw(found, machine.headline(host)))
    print(f"\nwrote {args.json} and {args.svg}")


if __name__ == "__main__":
    sys.exit(main())
