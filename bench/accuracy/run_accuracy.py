#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Perplexity of the demo's model through the example engine with the real codec: everything in BF16,
the recipe as published, oscar-int2-aware, and the shipped profile (oscar-int2-tilted). Writes build/accuracy.json.

    run_accuracy.py --bin DIR --model GGUF --profile FILE --tokens NPZ --out JSON [--texts 1]

bench/README.md says what the fields of the JSON are. With all texts, the exit status is 1 when a perplexity is
further from its reference than it may be.
"""
import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "report"))
import figures
import machine

import npz_to_tokens

SCHEMA = 1
ALL_TEXTS = 8
CALIBRATION_TEXTS = 8
# Name -> (perplexity in PyTorch over all texts, allowed distance).
REFERENCES = {"bf16": (7.1964, 0.005), "oscar-int2 per layer": (8.9338, 0.02), "oscar-int2-aware": (7.4539, 0.02),
              "oscar-int2-tilted": (7.3137, 0.02)}


def fit(options, folder, name, *flags):
    """A profile of its own, from statistics of the calibration texts, which are collected once."""
    statistics, profile = folder / "statistics.safetensors", folder / f"{name}.safetensors"
    if not statistics.exists():
        unpack(options, "calib", folder / "calib.u32")
        subprocess.run([options.bin / "crumb-example", "collect", "--model", options.model, "--tokens", folder / "calib.u32",
                        "--texts", str(CALIBRATION_TEXTS), "--out", statistics], check=True)
    subprocess.run([options.bin / "crumb-calibrate", "fit", statistics, "--out", profile, *flags],
                   check=True, stdout=subprocess.DEVNULL)
    return profile


def unpack(options, key, target):
    subprocess.run([sys.executable, HERE / "npz_to_tokens.py", key, target, options.tokens], check=True)


def perplexity(options, tokens, profile):
    command = [options.bin / "crumb-example", "perplexity", "--model", options.model, "--tokens", tokens,
               "--texts", ",".join(map(str, range(options.texts)))]
    command += ["--profile", profile] if profile else []
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def as_figures(runs):
    for run in runs:
        yield figures.Figure("accuracy", run["name"], run["perplexity"], "perplexity", "lower",
                             limit=runs[0]["perplexity"], limit_name="BF16, the same texts")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bin", type=pathlib.Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--profile", required=True)
    parser.add_argument("--tokens", type=pathlib.Path, default=npz_to_tokens.DEFAULT_TOKENS)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--texts", type=int, default=1, help=f"the first so many of the {ALL_TEXTS} texts")
    options = parser.parse_args()
    if not options.tokens.exists():
        print(f"error: no token ids at {options.tokens}; name a NumPy archive with the keys calib and eval",
              file=sys.stderr)
        return 1

    host = machine.describe()
    runs = []
    with tempfile.TemporaryDirectory(prefix="crumb-accuracy-") as name:
        folder = pathlib.Path(name)
        unpack(options, "eval", folder / "eval.u32")
        print(f"Scoring text{'s' if options.texts > 1 else ''} 0..{options.texts - 1} of {ALL_TEXTS}")
        published = fit(options, folder, "published", "--codec", "oscar-int2", "--rotation", "per-layer")
        aware = fit(options, folder, "aware", "--codec", "oscar-int2-aware")
        profiles = zip(REFERENCES, (None, published, aware, options.profile))
        for label, profile in profiles:
            run = {"name": label, **perplexity(options, folder / "eval.u32", profile)}
            reference, allowed = REFERENCES[label]
            run["gap"] = run["perplexity"] / runs[0]["perplexity"] - 1 if runs else 0.0
            run["reference"] = reference
            if options.texts == ALL_TEXTS:
                run["within"] = abs(run["perplexity"] / reference - 1) <= allowed
            runs.append(run)
            print(f"{label:24} perplexity {run['perplexity']:7.4f}  {100 * run['gap']:+6.2f} %  "
                  f"(reference over all texts {reference})  {run['seconds']:.0f} s", flush=True)
    options.out.write_text(json.dumps(
        {"schema": SCHEMA, "machine": host, "figures": [figure.as_dict() for figure in as_figures(runs)],
         "texts": list(range(options.texts)), "runs": runs}, indent=1))
    print(f"Figures: {options.out}")
    missed = [run["name"] for run in runs if run.get("within") is False]
    if missed:
        print(f"error: further from the reference than allowed: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
