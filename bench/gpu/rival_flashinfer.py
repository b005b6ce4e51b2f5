# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's paged attention over BF16, for rivals.py: every form that could be the fastest is a candidate.

A page holds 16 or 64 tokens of all KV heads, K and V apart, in the order [page, head, token, dim]; pages of a sequence
follow each other. plan() is not timed: an engine calls it once a step, for all layers.
"""
import functools

import flashinfer
import torch

from rival_timing import CALLS, DIM, GROUP, HEADS, KV_HEADS, SHAPES, best_of, emit, random_bf16

WORKSPACE_BYTES = 512 << 20
LAYOUT = "HND"


@functools.cache
def workspace():
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


def index(values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def pages_of(sequences, tokens, page_tokens, first=0):
    """Page tables of sequences of one length, page after page: indptr, indices, tokens of the last page."""
    pages = -(-tokens // page_tokens)
    return (index([i * pages for i in range(sequences + 1)]),
            torch.arange(first, first + sequences * pages, dtype=torch.int32, device="cuda"),
            index([tokens - (pages - 1) * page_tokens] * sequences))


def caches(num_pages, page_tokens, buffers):
    shape = (num_pages, KV_HEADS, page_tokens, DIM)
    return [(random_bf16(*shape), random_bf16(*shape)) for _ in range(buffers)]


def decode_wrapper(form, sequences, context, page_tokens):
    options = {"tensor cores": {"use_tensor_cores": True, "backend": "fa2"},
               "tensor cores fa3": {"use_tensor_cores": True, "backend": "fa3"},
               "cuda cores": {"use_tensor_cores": False}}[form]
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(), LAYOUT, **options)
    wrapper.plan(*pages_of(sequences, context, page_tokens), HEADS, KV_HEADS, DIM, page_tokens,
                 q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16)
    return wrapper


def prefill_wrapper(backend, queries, table, page_tokens, causal=False):
    """Of one level: `queries` of each sequence of `table`."""
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), LAYOUT, backend=backend)
    sequences = len(table[0]) - 1
    wrapper.plan(index([i * queries for i in range(sequences + 1)]), *table, HEADS, KV_HEADS, DIM, page_tokens,
                 causal=causal, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16)
    return wrapper


def attempt(make):
    """What `make` makes; a function that raises why not, where this FlashInfer has no such form."""
    try:
        return make()
    except Exception as error:
        reason = error

        def refuse(*_):
            raise reason

        return refuse


def split_decode(shapes):
    for name, sequences, context, buffers in shapes:
        query = random_bf16(sequences, HEADS, DIM)
        best = None
        for page_tokens in (16, 64):
            pool = caches(sequences * -(-context // page_tokens), page_tokens, buffers)
            candidates = {}
            for form in ("tensor cores", "tensor cores fa3", "cuda cores"):
                wrapper = attempt(lambda f=form, p=page_tokens: decode_wrapper(f, sequences, context, p).run)
                candidates[f"flashinfer {form}, pages of {page_tokens}"] = [
                    lambda run=wrapper, cache=pool[i % buffers]: run(query, cache) for i in range(CALLS)]
            found = best_of(candidates)
            best = min(filter(None, (best, found)), default=None)
            del pool, candidates
            torch.cuda.empty_cache()
        emit("split_decode", name, "flashinfer", best)


def shared_decode(sequences=32, prefix=99968, private=1024, page_tokens=64, buffers=4):
    """Its cascade: one level over the prefix for all rows, one over each sequence's own pages, merged."""
    shared = pages_of(1, prefix, page_tokens)
    own = pages_of(sequences, private, page_tokens, first=len(shared[1]))
    pool = caches(len(shared[1]) + len(own[1]), page_tokens, buffers)
    query = random_bf16(sequences, HEADS, DIM)

    def multi_level():
        wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace(), LAYOUT)
        wrapper.plan([index([0, sequences]), index(list(range(sequences + 1)))], *map(list, zip(shared, own)),
                     HEADS, KV_HEADS, DIM, page_tokens, q_data_type=torch.bfloat16)
        return wrapper.run

    def two_levels():
        levels = [prefill_wrapper("fa2", sequences, shared, page_tokens), prefill_wrapper("fa2", 1, own, page_tokens)]

        def run(q, cache):
            out, lse = levels[1].run(q, cache, return_lse=True)
            flashinfer.merge_state_in_place(out, lse, *levels[0].run(q, cache, return_lse=True))
            return out

        return run

    candidates = {name: [lambda run=run, cache=pool[i % buffers]: run(query, cache) for i in range(CALLS)]
                  for name, run in (("flashinfer MultiLevelCascade", attempt(multi_level)),
                                    ("flashinfer cascade of fa2", attempt(two_levels)))}
    emit("shared_decode", f"{sequences} on 100K+1K", "flashinfer", best_of(candidates))


def prefill_attention(queries=2048, prefix=32768, page_tokens=64, buffers=2):
    table = pages_of(1, prefix + 64 + queries, page_tokens)
    pool = caches(len(table[1]), page_tokens, buffers)
    query = random_bf16(queries, HEADS, DIM)
    candidates = {}
    for backend in ("fa3", "fa2"):
        run = attempt(lambda b=backend: prefill_wrapper(b, queries, table, page_tokens, causal=True).run)
        candidates[f"flashinfer {backend}"] = [lambda r=run, cache=cache: r(query, cache) for cache in pool]
    emit("prefill_attention", "2K over 32K", "flashinfer", best_of(candidates))


def check():
    """That what is timed is attention: one small decode against the plain sums."""
    tokens, page_tokens = 1000, 16
    (keys, values), = caches(-(-tokens // page_tokens), page_tokens, 1)
    query = random_bf16(1, HEADS, DIM)
    out = decode_wrapper("tensor cores", 1, tokens, page_tokens).run(query, (keys, values)).double()
    rows = [cache.transpose(1, 2).reshape(-1, KV_HEADS, DIM)[:tokens].double() for cache in (keys, values)]
    scores = torch.einsum("kgd,tkd->kgt", query.double().view(KV_HEADS, GROUP, DIM), rows[0]) / DIM**0.5
    expected = torch.einsum("kgt,tkd->kgd", scores.softmax(-1), rows[1]).reshape(1, HEADS, DIM)
    error = ((out - expected).norm() / expected.norm()).item()
    assert error < 1e-2, f"FlashInfer differs from the plain sums by {error}"


def measure(quick):
    check()
    split_decode(SHAPES[:2] if quick else SHAPES)
    if not quick:
        shared_decode()
        prefill_attention()
