#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Lines of JSON from the benchmarks and rivals.py -> one result file and its table in Markdown.

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
    of_shape = [figure for figure in figures if figure.get("rival") and (figure["op"], figure.get("shape")) == (op, shape)]
    return min(of_shape, key=lambda figure: figure["ms"], default=None)


def kind(figure):
    """How the launch was, beside its shape."""
    window = [f"window {figure['window_tokens']}"] if figure.get("window_tokens") else []
    return ", ".join([figure["shape"]] + window + (["overlapped"] if figure.get("overlapped") else []))


def table(figures, copy):
    yield "| op | shape | ms | goal | reached | GB/s | of copy | best BF16 rival | times faster |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for figure in figures:
        if "ms" not in figure or "shape" not in figure or figure.get("rival") or figure.get("service"):
            continue
        rate = figure["bytes"] / figure["ms"] / 1e6
        rival = best_rival(figures, figure["op"], figure["shape"])
        goal = figure.get("goal_ms") or (figure["roofline_ms"] if "roofline_ms" in figure else 0)
        shown = f"{goal:.4f}" + (" (roofline)" if "roofline_ms" in figure else "") if goal else ""
        reached = f"{100 * goal / figure['ms']:.0f} %" if goal else ""
        beside = f"{rival['ms']:.4f} ({rival['form']})" if rival else ""
        faster = f"{rival['ms'] / figure['ms']:.1f}" if rival else ""
        tflops = f", {figure['tflops']:.0f} TFLOP/s" if "tflops" in figure else ""
        yield (f"| {figure['op']} | {kind(figure)}{tflops} | {figure['ms']:.4f} | {shown} | {reached} | {rate:.0f} "
               f"| {100 * rate / copy:.0f} % | {beside} | {faster} |")


def shares(figures):
    """Figures that are a part of something else."""
    for figure in figures:
        if "share" in figure:
            yield (f"{figure['op']}, {figure['shape']}: {100 * figure['share']:.2f} % (goal {100 * figure['goal']:.1f} %) "
                   f"of {figure['prefill_tflop']:.0f} TFLOP in {figure['prefill_ms_at_600_tflops']:.0f} ms.")


def hosts(figures):
    """What the host does of an engine's step, and what demotion adds to one."""
    for figure in figures:
        if "begin_us" in figure:
            yield (f"{figure['op']}, {figure['shape']}: {figure['graph_ms']:.4f} ms in the graph; on the host "
                   f"{figure['begin_us']:.0f} us to begin, {figure['end_us']:.0f} to end, {figure['validate_us']:.0f} "
                   f"to validate; {figure['demoting_ms']:.4f} ms with a page of every sequence to demote.")


def contexts(figures):
    """Attention of one layer over context length."""
    ours = [figure for figure in figures if figure["op"] == "decode_context" and not figure.get("rival")]
    if not ours:
        return
    yield "| sequences | context | ms | GB/s | cuDNN, BF16 | times faster |"
    yield "|---|---|---|---|---|---|"
    for figure in ours:
        key = (figure["sequences"], figure["context"])
        rival = next((other for other in figures if other["op"] == "decode_context" and other.get("rival")
                      and (other["sequences"], other["context"]) == key), None)
        beside = f"{rival['ms']:.4f} | {rival['ms'] / figure['ms']:.1f}" if rival else " | "
        yield (f"| {key[0]} | {key[1]} | {figure['ms']:.4f} | {figure['bytes'] / figure['ms'] / 1e6:.0f} | {beside} |")


def service(figures):
    """What engines and the daemon do with one another on the GPU."""
    if not any(figure.get("service") for figure in figures):
        return
    yield "The service, daemon and engines in processes of their own; a prefix of an 8B model (36 layers, 8 KV heads of 128):"
    yield ""
    yield "| what | of | ms, median | least | most | runs | GB/s |"
    yield "|---|---|---|---|---|---|---|"
    for figure in figures:
        if figure.get("service") and figure["op"] != "first_token":
            rate = f"{figure['bytes'] / figure['ms'] / 1e6:.1f}" if figure["bytes"] else ""
            yield (f"| {figure['op']} | {figure['shape']} | {figure['ms']:.2f} | {figure['min_ms']:.2f} "
                   f"| {figure['max_ms']:.2f} | {figure['n']} | {rate} |")
    yield ""


def first_tokens(figures):
    """How long a second engine takes to its first token, beside computing the prompt anew."""
    estimates = {figure["tokens"]: figure for figure in figures if figure["op"] == "prefill_estimate"}
    products = next((figure["token_ms"] for figure in figures if figure["op"] == "token_products"), None)
    shown = [figure for figure in figures if figure["op"] == "first_token" and figure["tokens"] in estimates]
    if not shown or products is None:
        return
    yield "A second engine's time to its first token, in ms: from its lookup to the end of a decode step of all layers, validated;"
    yield f"with the matrix products of that token, {products:.2f} ms; and what computing the prompt would take at least, by the"
    yield "rates of matrix products and of causal attention. Products and rates are of this run."
    yield ""
    yield "| second engine | lookup to the step's end | with products | prompt computed | times faster |"
    yield "|---|---|---|---|---|"
    for figure in shown:
        whole = figure["ms"] + products
        estimate = estimates[figure["tokens"]]["estimate_ms"]
        yield (f"| {figure['shape']} | {figure['ms']:.2f} | {whole:.2f} | {estimate:.0f} | {estimate / whole:.0f} |")
    yield ""
    for tokens, figure in estimates.items():
        yield (f"{tokens} tokens: {figure['products_tflop']:.0f} TFLOP of products (2 x weights x tokens) at "
               f"{figure['products_tflops']:.0f} TFLOP/s and {figure['attention_tflop']:.0f} of attention (2 x tokens^2 x "
               f"heads x head_dim x layers) at {figure['attention_tflops']:.0f} ({figure['attention_by']}, "
               f"{figure['attention_measured_at']} tokens).")
    yield ""


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
              "checks": checks, "figures": [figure for figure in figures if {"ms", "share", "estimate_ms", "token_ms"} & figure.keys()],
              "versions": next((figure for figure in figures if figure["op"] == "rivals"), None)}
    stem = f"{now.date()}-{re.sub('[^A-Za-z0-9]+', '-', name).strip('-').lower()}-{arguments.commit[:12]}"
    folder = pathlib.Path(arguments.out)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{stem}.json").write_text(json.dumps(result, indent=1) + "\n")
    text = [f"# {name}, {now.date()}, {arguments.commit[:12]}", "",
            f"Copy within device memory: {copy:.0f} GB/s. 32 query and 8 KV heads of 128; medians of graph replays. Decode",
            "is of one layer, 36 in turns. Overlapped: the launch may begin while the one before it ends. Reached: the",
            "goal's time as a share of the measured.", "",
            *table(figures, copy), "", *shares(figures), "", *hosts(figures), "", "Attention of one layer over context length:", "",
            *contexts(figures), "", *service(figures), *first_tokens(figures), "Checks:", "", *(f"    {line}" for line in checks), ""]
    (folder / f"{stem}.md").write_text("\n".join(text))
    print("\n".join(text))


if __name__ == "__main__":
    main()
