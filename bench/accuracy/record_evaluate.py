#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Joins what `python -m crumb.evaluate --json` wrote, each of other texts of one model, into one recorded result.

    record_evaluate.py --out FILE [--commit COMMIT] EVALUATE.json ...

So the texts of a long evaluation may be spread over processes or machines. bench/README.md says what the fields are.
"""
import argparse
import json
import math
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "report"))
import figures
import machine

SCHEMA = 1


def join(reports):
    """One list of runs, in the order of the first report's caches. ValueError: reports of different things."""
    for field in ("model", "scored_from", "profiles"):
        if any(report[field] != reports[0][field] for report in reports):
            raise ValueError(f"the reports differ in '{field}'; only texts may be others")
    runs = []
    for name in reports[0]["caches"]:
        parts = [report["caches"][name] for report in reports]
        count = sum(part["num_predictions"] for part in parts)
        mean = lambda field: sum(field(part) * part["num_predictions"] for part in parts) / count
        perplexity = math.exp(mean(lambda part: math.log(part["perplexity"])))
        profile = reports[0]["profiles"].get(name, {"id": "", "sink": None, "recent": None})
        runs.append({
            "name": name, "profile_id": profile["id"], "sink_tokens": profile["sink"], "recent_tokens": profile["recent"],
            "scored_from": reports[0]["scored_from"], "num_predictions": count, "perplexity": perplexity,
            "gap": perplexity / (runs[0]["perplexity"] if runs else perplexity) - 1,
            "kl": mean(lambda part: part["kl"]), "top1_agreement": mean(lambda part: part["top1_agreement"]),
            "seconds": sum(part["seconds"] for part in parts),
            "texts": [{"text": i, "perplexity": p} for i, p in enumerate(t for part in parts for t in part["texts"])]})
    return runs


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("reports", type=pathlib.Path, nargs="+", help="in the order of their texts")
    parser.add_argument("--commit", help="what was measured, where it is not what is checked out")
    options = parser.parse_args(arguments)
    reports = [json.loads(path.read_text()) for path in options.reports]
    try:
        runs = join(reports)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    model = reports[0]["model"]
    rows = [figures.Figure("evaluate", f"{model} {run['name']}", run["perplexity"], "perplexity", "lower",
                           limit=runs[0]["perplexity"], limit_name="BF16, the same texts") for run in runs]
    host = machine.describe()
    if options.commit:
        host |= {"commit": options.commit, "commit_dirty": False}
    options.out.write_text(json.dumps(
        {"schema": SCHEMA, "machine": host, "figures": [row.as_dict() for row in rows], "model": model,
         "texts": list(range(len(runs[0]["texts"]))), "runs": runs}, indent=1) + "\n")
    for run in runs:
        print(f"{run['name']:40} perplexity {run['perplexity']:8.4f}  {100 * run['gap']:+7.2f} %  KL {run['kl']:.5f}  "
              f"top-1 {100 * run['top1_agreement']:.2f} %")
    return 0


if __name__ == "__main__":
    sys.exit(main())
