# SPDX-License-Identifier: Apache-2.0
"""The two-bit codec: rows of K and V to pages and back, and attention over pages as they are.

Every function works on one layer, all KV heads at once. Arrays have the shape [heads, tokens, dim], as
PyTorch's attention has them for one sequence; NumPy arrays and PyTorch CPU tensors are read in place, and
the result is of the first argument's library. What lies in one head must be dense; heads may be apart, so
``keys[:, 64:128]`` needs no copy. bfloat16 is ``torch.bfloat16``, or in NumPy its bits as ``uint16``.

Keys are taken after RoPE. Rows are stored *rotated*; a query that is rotated too gives the same scores.

    stored_k, stored_v = rotate(profile, layer, keys, values)            # bfloat16
    pages = demote(profile, layer, stored_k[:, 64:128], stored_v[:, 64:128])
    out = attend(profile, layer, queries, pages, [(sink_k, sink_v), (recent_k, recent_v)])

Other threads run while these do. Every error is a ValueError that names the argument.
"""
from __future__ import annotations

from typing import Sequence

from crumb import _native
from crumb._arrays import Array, ArrayT, empty, readable, shape3
from crumb._native import PAGE_TOKENS, Profile

__all__ = ["PAGE_TOKENS", "attend", "demote", "expand", "rotate", "rotate_queries", "unrotate_outputs"]


def rotate(profile: Profile, layer: int, keys: ArrayT, values: ArrayT) -> tuple[ArrayT, ArrayT]:
    """The rows as they are stored: keys less their mean, times the rotation, rounded to bfloat16; values so too.

    keys [H, T, key_dim] and values [H, T, value_dim], float32 or bfloat16. Returns two bfloat16 arrays.
    """
    k, v = readable("keys", keys), readable("values", values)
    stored_k = empty(keys, shape3("keys", k), "bfloat16")
    stored_v = empty(keys, shape3("values", v), "bfloat16")
    _native.rotate_keys(profile, layer, k, stored_k)
    _native.rotate_values(profile, layer, v, stored_v)
    return stored_k, stored_v


def rotate_queries(profile: Profile, layer: int, queries: ArrayT) -> ArrayT:
    """Queries [Hq, T, key_dim] (float32 or bfloat16) as `attend(..., rotated=True)` takes them, in float32."""
    q = readable("queries", queries)
    out = empty(queries, shape3("queries", q), "float32")
    _native.rotate_queries(profile, layer, q, out)
    return out


def unrotate_outputs(profile: Profile, layer: int, outputs: ArrayT) -> ArrayT:
    """Rotated outputs of attention [Hq, T, value_dim] back in the model's space, in float32."""
    o = readable("outputs", outputs)
    out = empty(outputs, shape3("outputs", o), "float32")
    _native.unrotate_outputs(profile, layer, o, out)
    return out


def demote(profile: Profile, layer: int, keys: ArrayT, values: ArrayT, *, rotated: bool = False) -> ArrayT:
    """Whole pages of rows at two bits: uint8 [H, T / 64, profile.block_bytes].

    keys [H, T, key_dim] and values [H, T, value_dim]: float32 or bfloat16 rows of the model, or with
    `rotated` the bfloat16 rows that `rotate` gave. T is a multiple of 64. NaN and infinity are refused by
    their place. The bytes depend on the input alone, not on the machine.
    """
    if not rotated:
        keys, values = rotate(profile, layer, keys, values)
    k, v = readable("keys", keys), readable("values", values)
    heads, rows, _ = shape3("keys", k)
    pages = empty(keys, (heads, rows // PAGE_TOKENS, profile.block_bytes), "uint8")
    _native.demote(profile, layer, k, v, pages)
    return pages


def expand(profile: Profile, layer: int, pages: ArrayT, *, rotated: bool = False) -> tuple[ArrayT, ArrayT]:
    """Pages [H, N, block_bytes] back to bfloat16 rows: keys [H, 64 N, key_dim], values [H, 64 N, value_dim].

    The rows are the model's, or with `rotated` as they are stored.
    """
    p = readable("pages", pages)
    heads, count, _ = shape3("pages", p)
    keys = empty(pages, (heads, count * PAGE_TOKENS, profile.key_dim), "bfloat16")
    values = empty(pages, (heads, count * PAGE_TOKENS, profile.value_dim), "bfloat16")
    _native.expand(profile, layer, p, rotated, keys, values)
    return keys, values


def attend(profile: Profile, layer: int, queries: ArrayT, pages: Array | None,
           windows: Sequence[tuple[Array, Array]], *, scale: float | None = None, rotated: bool = False,
           lse: ArrayT | None = None) -> ArrayT:
    """Attention over two-bit history and bfloat16 rows, one softmax over both: float32 [Hq, n, value_dim].

    queries: [Hq, n, key_dim], the last n tokens; Hq is a multiple of the profile's KV heads.
    pages: [H, N, block_bytes] of `demote`, which every query sees; None: no history.
    windows: (keys, values) of rotated bfloat16 rows in order of position: the sink, the recent window and
        the queries' own rows, which come last. Query i of n sees all of them but the last n - 1 - i.
    scale: of the scores; 1 / sqrt(key_dim) unless given.
    rotated: queries are rotated and outputs stay so; queries are float32 then.
    lse: receives the log of the sum of exp(score), float32 [Hq, n, 1], for merging with attention over
        other rows that were rotated by the same profile.
    """
    q = readable("queries", queries) if rotated else rotate_queries(profile, layer, queries)
    heads, count, _ = shape3("queries", q)
    if pages is None:
        pages = empty(queries, (profile.num_kv_heads, 0, profile.block_bytes), "uint8")
    out = empty(queries, (heads, count, profile.value_dim), "float32")
    _native.attend(profile, q, readable("pages", pages),
                   [(readable("a window's keys", k), readable("a window's values", v)) for k, v in windows],
                   profile.key_dim ** -0.5 if scale is None else scale, out, lse)
    return out if rotated else unrotate_outputs(profile, layer, out)
