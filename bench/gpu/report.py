#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Lines of JSON from decode_gpu_bench and rivals.py -> one result file and its table in Markdown.

    report.py --commit HASH --checks FILE --out FOLDER LINES...
"""
import argparse
import datetime
import json
import pathlib
import re
import subprocess


def gpu_name():
    done = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
                          capture_output=True, text=True, check=False)
    return (done.stdout.splitlines() or ["unknown, unknown"])[0].split(", ")


def read_lines(paths):
    for path in paths:
        for line in pathlib.Path(path).read_text().splitlines():
            if line.startswith("{"):
                yield json.loads(line)


def best_rival(figures, op, shape):
    of_shape = [figure for figure in figures if figure.get("rival") and (figure["op"], figure["shape"]) == (op, shape)]
    return min(of_shape, key=lambda figure: figure["ms"], default=None)


def table(figures, copy):
    yield ("| op | shape | window | overlapped | ms | goal | GB/s | of copy | best BF16 rival | times faster |")
    yield ("|---|---|---|---|---|---|---|---|---|---|")
    for figure in figures:
        if "ms" not in figure or figure.get("rival"):
            continue
        rate = figure["bytes"] / figure["ms"] / 1e6
        rival = best_rival(figures, figure["op"], figure["shape"])
        goal = f"{figure['goal_ms']:.3f}" if figure.get("goal_ms") else ""
        beside = f"{rival['ms']:.4f} ({rival['form']})" if rival else ""
        faster = f"{rival['ms'] / figure['ms']:.1f}" if rival else ""
        yield (f"| {figure['op']} | {figure['shape']} | {figure.get('window_tokens', 0)} "
               f"| {'yes' if figure.get('overlapped') else 'no'} | {figure['ms']:.4f} | {goal} | {rate:.0f} "
               f"| {100 * rate / copy:.0f} % | {beside} | {faster} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--checks", required=True, help="what the tests said")
    parser.add_argument("--out", required=True)
    parser.add_argument("lines", nargs="+")
    arguments = parser.parse_args()
    figures = list(read_lines(arguments.lines))
    copy = next(figure["gb_per_s"] for figure in figures if figure["op"] == "copy")
    name, driver = gpu_name()
    now = datetime.datetime.now(datetime.timezone.utc)
    checks = pathlib.Path(arguments.checks).read_text().strip().splitlines()
    result = {"schema": 1, "machine": {"gpu": name, "driver": driver, "copy_gb_per_s": copy,
                                       "date": now.isoformat(timespec="seconds"), "commit": arguments.commit},
              "checks": checks, "figures": [figure for figure in figures if "ms" in figure],
              "versions": next((figure for figure in figures if figure["op"] == "rivals"), None)}
    stem = f"{now.date()}-{re.sub('[^A-Za-z0-9]+', '-', name).strip('-').lower()}-{arguments.commit[:12]}"
    folder = pathlib.Path(arguments.out)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{stem}.json").write_text(json.dumps(result, indent=1) + "\n")
    text = [f"# {name}, {now.date()}, {arguments.commit[:12]}", "",
            f"Copy within device memory: {copy:.0f} GB/s. One layer, 32 query and 8 KV heads of 128; medians of graph",
            "replays over 36 layers in turns. Overlapped: the launch may begin while the one before it ends.", "",
            *table(figures, copy), "", "Checks:", "", *(f"    {line}" for line in checks), ""]
    (folder / f"{stem}.md").write_text("\n".join(text))
    print("\n".join(text))


if __name__ == "__main__":
    main()
