#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Decode and prefill attention over BF16 through PyTorch (cuDNN, FlashAttention), and FlashInfer where installed.

Prints a line of JSON a figure, as decode_gpu_bench does: the best form of each rival, one layer, buffers in
turns so that no cache holds what the next call reads, timed as replays of a CUDA graph.

    rivals.py [--quick]
"""
import argparse
import json
import statistics
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

HEADS, KV_HEADS, DIM = 32, 8, 128
GROUP = HEADS // KV_HEADS
SHAPES = [("1x32K", 1, 32768, 12), ("1x100K", 1, 99968, 6), ("8x32K", 8, 32768, 4), ("32x32K", 32, 32768, 2)]
CALLS = 12
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


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


def attend(query, key, value, backend):
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(query, key, value, enable_gqa=query.shape[1] != key.shape[1])


def decode_forms(sequences):
    """Queries of one token: 32 heads with GQA, or the heads of a group as queries of one KV head."""
    return {"gqa": random_bf16(sequences, HEADS, 1, DIM), "grouped": random_bf16(sequences, KV_HEADS, GROUP, DIM)}


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


def split_decode(shapes):
    for name, sequences, context, buffers in shapes:
        caches = [(random_bf16(sequences, KV_HEADS, context, DIM), random_bf16(sequences, KV_HEADS, context, DIM))
                  for _ in range(buffers)]
        for rival, backend in BACKENDS.items():
            candidates = {
                f"{rival} {form}": [
                    lambda k=caches[i % buffers][0], v=caches[i % buffers][1], q=query, b=backend: attend(q, k, v, b)
                    for i in range(CALLS)]
                for form, query in decode_forms(sequences).items()}
            emit("split_decode", name, rival, best_of(candidates))
        del caches
        torch.cuda.empty_cache()


def contexts(no_cache_bytes=400e6):
    """cuDNN over context length, for plots beside ours: the form that is the best of both at every length measured."""
    for sequences in (1, 32):
        query = random_bf16(sequences, HEADS, 1, DIM)
        for context in (1024 << i for i in range(8)):
            row_bytes = 2 * 2 * sequences * KV_HEADS * context * DIM
            buffers = max(2, min(64, int(no_cache_bytes / row_bytes)))
            caches = [(random_bf16(sequences, KV_HEADS, context, DIM), random_bf16(sequences, KV_HEADS, context, DIM))
                      for _ in range(buffers)]
            calls = [lambda k=key, v=value, q=query: attend(q, k, v, BACKENDS["cudnn"]) for key, value in caches]
            best = best_of({"cudnn gqa": calls * -(-CALLS // buffers)})
            if best is not None:
                print(json.dumps({"op": "decode_context", "rival": "cudnn", "form": best[1], "sequences": sequences,
                                  "context": context, "ms": round(best[0], 5)}), flush=True)
            del caches, calls
            torch.cuda.empty_cache()


def attend_with_lse(query, key, value, backend):
    if backend == SDPBackend.CUDNN_ATTENTION:
        return torch.ops.aten._scaled_dot_product_cudnn_attention(query, key, value, None, True)[:2]
    return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)[:2]


def merge(first, second, rows):
    """Two partials of the same rows [rows, DIM], merged by their LSE."""
    out_a, lse_a = first[0].reshape(rows, DIM), first[1].reshape(rows, 1)
    out_b, lse_b = second[0].reshape(rows, DIM), second[1].reshape(rows, 1)
    share = torch.sigmoid(lse_a - lse_b)
    return out_a * share + out_b * (1 - share)


def shared_decode(sequences=32, prefix=99968, private=1024, buffers=4):
    """A cascade: the prefix once with all rows of a KV head as its queries, then each private part."""
    prefixes = [(random_bf16(1, KV_HEADS, prefix, DIM), random_bf16(1, KV_HEADS, prefix, DIM)) for _ in range(buffers)]
    privates = [(random_bf16(sequences, KV_HEADS, private, DIM), random_bf16(sequences, KV_HEADS, private, DIM))
                for _ in range(buffers)]
    shared_query = random_bf16(1, KV_HEADS, sequences * GROUP, DIM)
    own_query = random_bf16(sequences, KV_HEADS, GROUP, DIM)
    rows = sequences * HEADS

    def cascade(i, backend):
        shared = attend_with_lse(shared_query, *prefixes[i % buffers], backend)
        own = attend_with_lse(own_query, *privates[i % buffers], backend)
        return merge(shared, own, rows)

    for rival, backend in BACKENDS.items():
        calls = [lambda i=i, b=backend: cascade(i, b) for i in range(CALLS)]
        emit("shared_decode", f"{sequences} on 100K+1K", f"{rival} cascade", best_of({f"{rival} cascade": calls}))


def prefill_attention(queries=2048, prefix=32768, buffers=2):
    """All rows of the cache for every query: the chunk's own triangle, which causality halves, is 3 % of it."""
    query = random_bf16(1, HEADS, queries, DIM)
    rows = prefix + 64 + queries
    caches = [(random_bf16(1, KV_HEADS, rows, DIM), random_bf16(1, KV_HEADS, rows, DIM)) for _ in range(buffers)]
    for rival, backend in BACKENDS.items():
        calls = [lambda k=key, v=value, b=backend: attend(query, k, v, b) for key, value in caches]
        emit("prefill_attention", "2K over 32K", rival, best_of({f"{rival} gqa": calls}))


def emit(op, shape, rival, result):
    if result is not None:
        print(json.dumps({"op": op, "shape": shape, "rival": rival, "form": result[1], "ms": round(result[0], 5)}),
              flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the two small shapes only")
    arguments = parser.parse_args()
    print(json.dumps({"op": "rivals", "torch": torch.__version__, "cudnn": torch.backends.cudnn.version()}))
    split_decode(SHAPES[:2] if arguments.quick else SHAPES)
    if not arguments.quick:
        shared_decode()
        prefill_attention()
        contexts()
    try:
        import flashinfer  # noqa: F401 pylint: disable=unused-import
    except ImportError:
        print("FlashInfer is not installed: not measured", file=sys.stderr)


if __name__ == "__main__":
    main()
