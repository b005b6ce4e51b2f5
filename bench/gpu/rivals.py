#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Decode and prefill attention over BF16 through PyTorch (cuDNN, FlashAttention), and FlashInfer where installed.

Prints a line of JSON a figure, as decode_gpu_bench does: the best form of each rival, one layer, buffers in
turns so that no cache holds what the next call reads, timed as replays of a CUDA graph.

    rivals.py [--quick]
"""
import argparse
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from rival_timing import CALLS, DIM, GROUP, HEADS, KV_HEADS, SHAPES, best_of, emit, graph_ms, print_line, random_bf16

BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def attend(query, key, value, backend):
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(query, key, value, enable_gqa=query.shape[1] != key.shape[1])


def decode_forms(sequences):
    """Queries of one token: 32 heads with GQA, or the heads of a group as queries of one KV head."""
    return {"gqa": random_bf16(sequences, HEADS, 1, DIM), "grouped": random_bf16(sequences, KV_HEADS, GROUP, DIM)}


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
                print_line({"op": "decode_context", "rival": "cudnn", "form": best[1], "sequences": sequences,
                            "context": context, "ms": round(best[0], 5)})
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


# What a prompt costs that is computed anew, beside the time that an engine needs which finds it in the service: the
# matrix products of an 8B model (Qwen3-8B: rows of 4,096, 12,288 inside of the MLP, a vocabulary of 151,936) and causal
# attention, each at the rate measured here. Left out is all else of a prefill, so that it counts as faster than it is.
LAYERS, HIDDEN, INNER, VOCABULARY = 36, 4096, 12288, 151936
PRODUCTS = [(HIDDEN, (HEADS + 2 * KV_HEADS) * DIM), (HEADS * DIM, HIDDEN), (HIDDEN, 2 * INNER), (INNER, HIDDEN)]


def products_ms(rows, layers):
    """Milliseconds of a layer's products, each of `layers` layers with weights of its own."""
    inputs = {width: random_bf16(rows, width) for width, _ in PRODUCTS}
    calls = [lambda x=inputs[width], w=random_bf16(out, width): F.linear(x, w)
             for _ in range(layers) for width, out in PRODUCTS]
    return graph_ms(calls) * len(PRODUCTS)


def prefill_estimate(prompts=(8192, 99968), rows=8192):
    layer_ms = products_ms(rows, layers=2)
    weights = sum(width * out for width, out in PRODUCTS)
    for tokens in prompts:
        longest = min(tokens, 32768)
        heads = [random_bf16(1, count, longest, DIM) for count in (HEADS, KV_HEADS, KV_HEADS)]

        def causal(backend):
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)

        attention = best_of({name: [lambda b=backend: causal(b)] for name, backend in BACKENDS.items()})
        products_tflop = 2e-12 * weights * tokens * LAYERS
        attention_tflop = 2e-12 * tokens**2 * HEADS * DIM * LAYERS
        products_rate = 2e-9 * weights * rows / layer_ms
        attention_rate = 2e-9 * longest**2 * HEADS * DIM / attention[0]
        print_line({"op": "prefill_estimate", "tokens": tokens,
                    "estimate_ms": round(1e3 * (products_tflop / products_rate + attention_tflop / attention_rate), 1),
                    "products_tflop": round(products_tflop, 1), "products_tflops": round(products_rate, 1),
                    "attention_tflop": round(attention_tflop, 1), "attention_tflops": round(attention_rate, 1),
                    "attention_by": attention[1], "attention_measured_at": longest})
    torch.cuda.empty_cache()


def token_products():
    """Those of one token of all layers, and the last one: what a decode step takes besides attention."""
    last = random_bf16(VOCABULARY, HIDDEN)
    row = random_bf16(1, HIDDEN)
    print_line({"op": "token_products",
                "token_ms": round(products_ms(1, LAYERS) * LAYERS + graph_ms([lambda: F.linear(row, last)] * 4), 3)})
    torch.cuda.empty_cache()


def measure_flashinfer(quick):
    """The version that was measured, or why there was none."""
    try:
        import flashinfer
        import rival_flashinfer
    except ImportError as error:
        print(f"FlashInfer is not installed ({error}): not measured", file=sys.stderr)
        return "not installed, not measured"
    rival_flashinfer.measure(quick)
    return flashinfer.__version__


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the two small shapes only")
    arguments = parser.parse_args()
    split_decode(SHAPES[:2] if arguments.quick else SHAPES)
    if not arguments.quick:
        shared_decode()
        prefill_attention()
        contexts()
        prefill_estimate()
        token_products()
    print_line({"op": "rivals", "torch": torch.__version__, "cudnn": torch.backends.cudnn.version(),
                "flashinfer": measure_flashinfer(arguments.quick)})


if __name__ == "__main__":
    main()
