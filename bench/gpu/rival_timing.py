# SPDX-License-Identifier: Apache-2.0
"""What rivals.py and its parts have in common: shapes, timing by replays of a CUDA graph, a line of JSON a figure."""
import json
import statistics
import sys

import torch

HEADS, KV_HEADS, DIM = 32, 8, 128
GROUP = HEADS // KV_HEADS
# Name, sequences, tokens of context, caches in turns.
SHAPES = [("1x32K", 1, 32768, 12), ("1x100K", 1, 99968, 6), ("8x32K", 8, 32768, 4), ("32x32K", 32, 32768, 2)]
CALLS = 12


def graph_ms(calls, replays=15):
    """Milliseconds a call of `calls`, a list of functions run one after the other in one graph; a median."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    times = []
    for i in range(replays + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i >= 2:
            times.append(begin.elapsed_time(end) / len(calls))
    return statistics.median(times)


def random_bf16(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def best_of(candidates):
    """(ms, name) of the fastest candidate that works: {name: list of calls}."""
    results = []
    for name, calls in candidates.items():
        try:
            results.append((graph_ms(calls), name))
        except Exception as error:  # A form that a backend does not have is no candidate.
            print(f"{name}: {str(error).splitlines()[0][:160]}", file=sys.stderr)
            torch.cuda.synchronize()
    return min(results) if results else None


def emit(op, shape, rival, result):
    if result is not None:
        print_line({"op": op, "shape": shape, "rival": rival, "form": result[1], "ms": round(result[0], 5)})


def print_line(figure):
    print(json.dumps(figure), flush=True)
