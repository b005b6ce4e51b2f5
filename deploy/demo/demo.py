#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Three engines, one system prompt: the first computes and publishes it, the second maps its pages,
the third pulls them over UCX. Prints what each did, as measured, and writes it to a JSON file.

    demo.py --bin DIR --model GGUF --profile FILE [--system-file FILE] [--out demo.json] [--check]

`--check` asserts what must hold apart from time: reuse, no copy by map, equal answers.
"""
import argparse
import json
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "bench/report"))
import figures
import machine

SCHEMA = 1
QUESTIONS = ["My order A-104233 has not arrived. Where is it?",
             "Can I return a book that I bought last week?",
             "Can I return a book that I bought last week?"]
PLANES = ["auto", "map", "ucx"]
TITLES = ["1: cold, publishes", "2: maps", "3: pulls over UCX"]
START_SECONDS = 20
PROGRAMS = ["crumbd", "crumbctl", "crumb-example"]
SKIPPED = 77  # As CTest has it.


class Daemon:
    """A crumbd of its own in a temporary folder; stopped whatever happens."""

    def __init__(self, binaries, folder):
        self.binaries, self.folder = binaries, pathlib.Path(folder)
        self.address = f"unix:{self.folder}/crumbd.sock"
        self.log = open(self.folder / "crumbd.log", "wb")
        self.process = subprocess.Popen(
            [binaries / "crumbd", "--listen.unix_socket", self.folder / "crumbd.sock", "--listen.metrics", "none",
             "--ucx.enabled", "true", "--store.capacity", "256MiB"], stdout=self.log, stderr=self.log)

    def wait_until_up(self):
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            if self.ctl("status", check=False).returncode == 0:
                return
            time.sleep(0.1)
        sys.exit(f"crumbd did not come up; its log:\n{(self.folder / 'crumbd.log').read_text()}")

    def ctl(self, *arguments, check=True):
        return subprocess.run([self.binaries / "crumbctl", "--address", self.address, *arguments],
                              check=check, capture_output=True, text=True)

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.log.close()


def ask(options, daemon, question, plane, publish):
    """One engine, a process of its own; its figures."""
    command = [options.bin / "crumb-example", "generate", "--json", "--model", options.model, "--profile",
               options.profile, "--system-file", options.system_file, "--prompt", question, "--address",
               daemon.address, "--data-plane", plane, "--max-new-tokens", str(options.max_new_tokens)]
    result = subprocess.run(command + (["--publish"] if publish else []), capture_output=True, text=True)
    if result.returncode != 0:
        log = (daemon.folder / "crumbd.log").read_text()
        sys.exit(f"the engine failed: {result.stderr}\ncrumbd's log:\n{log[-4000:]}")
    return json.loads(result.stdout)


def size(count):
    return f"{count / 1e6:.2f} MB" if count >= 1e5 else f"{count} B"


def table(runs):
    cold = runs[0]["time_to_first_token_ms"]
    rows = [("prompt tokens", lambda r: str(r["prompt_tokens"])),
            ("reused tokens", lambda r: str(r["reused_tokens"])),
            ("time to first token", lambda r: f"{r['time_to_first_token_ms']:.0f} ms"),
            ("  times shorter", lambda r: f"{cold / r['time_to_first_token_ms']:.1f}"),
            ("decode tokens/s", lambda r: f"{r['decode_tokens_per_second']:.1f}"),
            ("bytes copied", lambda r: size(r["copied_bytes"])),
            ("held at 2 bits", lambda r: size(r["own_int2_bytes"] + r["shared_int2_bytes"])),
            ("held in BF16", lambda r: size(r["own_bf16_bytes"] + r["shared_bf16_bytes"])),
            ("all in BF16 would be", lambda r: size(r["bf16_equivalent_bytes"]))]
    lines = [" " * 22 + "".join(f"{title:>20}" for title in TITLES)]
    lines += [f"{name:22}" + "".join(f"{cell(run):>20}" for run in runs) for name, cell in rows]
    return "\n".join(lines)


def as_figures(runs):
    """What the table shows, each beside what it is held against; bench/README.md lists the fields."""
    cold = runs[0]["time_to_first_token_ms"]
    for title, run in zip(TITLES, runs):
        program = f"engine {title}"
        yield figures.Figure(program, "prompt", run["prompt_tokens"], "tokens")
        yield figures.Figure(program, "reused", run["reused_tokens"], "tokens", limit=run["prompt_tokens"],
                             limit_name="the prompt")
        yield figures.Figure(program, "time to first token", run["time_to_first_token_ms"], "ms", "lower",
                             limit=cold, limit_name="engine 1, cold", target=None if run is runs[0] else cold / 8)
        yield figures.Figure(program, "decode", run["decode_tokens_per_second"], "tokens/s")
        yield figures.Figure(program, "copied", run["copied_bytes"], "B", "lower")
        yield figures.Figure(program, "held", sum(run[f"{owner}_{encoding}_bytes"] for owner in ("own", "shared")
                                                  for encoding in ("int2", "bf16")), "B", "lower",
                             limit=run["bf16_equivalent_bytes"], limit_name="all in BF16")


def check(runs):
    cold, mapped, pulled = runs
    problems = []
    expect = lambda holds, what: holds or problems.append(what)
    expect(cold["reused_tokens"] == 0, "engine 1 was not cold")
    expect("published" in cold, f"engine 1 did not publish: {cold['cache_status']}")
    for run, plane in ((mapped, "map"), (pulled, "ucx")):
        expect(run["reused_tokens"] > 0, f"nothing was reused over {plane}: {run['cache_status']}")
        expect(run["data_plane"] == plane, f"pages came by {run['data_plane']} instead of {plane}")
        expect(run["cache_status"] == "OK", f"{plane}: {run['cache_status']}")
    expect(mapped["copied_bytes"] == 0, "mapped pages were copied")
    expect(pulled["copied_bytes"] > 0, "pulled pages were not copied")
    expect(mapped["answer_tokens"] == pulled["answer_tokens"], "the answers over map and UCX differ")
    return problems


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bin", type=pathlib.Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--profile", required=True)
    parser.add_argument("--system-file", default=HERE / "system_prompt.txt")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if not pathlib.Path(options.model).exists():
        print(f"no model at {options.model}; run deploy/fetch-model.sh")
        return SKIPPED
    for program in PROGRAMS:
        if not (options.bin / program).exists():
            sys.exit(f"no {program} in {options.bin}; make build builds it into build/release/bin")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))

    with tempfile.TemporaryDirectory(prefix="crumb-demo-") as folder:
        daemon = Daemon(options.bin, folder)
        try:
            daemon.wait_until_up()
            runs = []
            for title, question, plane in zip(TITLES, QUESTIONS, PLANES):
                print(f"Engine {title} ...", flush=True)
                runs.append(ask(options, daemon, question, plane, publish=not runs))
            tree = daemon.ctl("tree").stdout
        finally:
            daemon.stop()

    print("\n" + table(runs) + "\n")
    for title, question, run in zip(TITLES, QUESTIONS, runs):
        print(f"Engine {title}\n  Q: {question}\n  A: {run['answer'].strip()}\n")
    print("crumbctl tree\n" + tree)
    problems = check(runs) if options.check else []
    if options.out:
        engines = [{"name": title, "question": question, **run}
                   for title, question, run in zip(TITLES, QUESTIONS, runs)]
        options.out.write_text(json.dumps(
            {"schema": SCHEMA, "machine": machine.describe(),
             "figures": [figure.as_dict() for figure in as_figures(runs)], "engines": engines}, indent=1))
        print(f"Figures: {options.out}")
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
