# SPDX-License-Identifier: Apache-2.0
"""Attention over a cache held at two bits, for whole texts at once, by the codec that serves it.

What a query sees is what decoding page by page would show it: the sink, then two-bit pages, then at least
`recent` tokens in bfloat16 before the query's own page. Queries of one page go through the kernel together, so
the last of them sees one page less at two bits than it would if it came alone.
"""
from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from crumb import codec
from crumb._model import Call
from crumb.profile import Profile

PAGE = codec.PAGE_TOKENS


def rounded_attention(call: Call) -> torch.Tensor:
    """The model's own attention over keys and values in bfloat16: what a cache without two-bit pages holds."""
    return call.exact(*(x.bfloat16().to(x.dtype) for x in (call.keys, call.values)))


@dataclass
class _Rows:
    """One layer of one text: all rows as stored, and history at two bits."""
    keys: torch.Tensor  # bfloat16 [H, T, dk], rotated.
    values: torch.Tensor
    pages: torch.Tensor  # uint8 [H, N, block bytes], from the sink on.
    queries: torch.Tensor  # float32 [Hq, T, dk], rotated.
    scale: float
    sink: int
    recent: int

    def history_end(self, first_query: int) -> int:
        """Where two-bit history ends for the queries of a page; no history: the sink's end."""
        return max(self.sink, (first_query - self.recent) // PAGE * PAGE)


class TwoBitAttention:
    """A handler of `Model.attention` for one text at a time; its threads share a layer's pages of queries."""

    def __init__(self, profile: Profile, *, sink: int | None = None, recent: int | None = None,
                 threads: int | None = None) -> None:
        """sink, recent: the profile's unless given. ValueError: windows that are no multiple of a page."""
        self.profile = profile
        self.sink = profile.sink_tokens if sink is None else sink
        self.recent = profile.recent_tokens if recent is None else recent
        for name, window in (("sink", self.sink), ("recent", self.recent)):
            if window % PAGE or window < 0:
                raise ValueError(f"{name} is {window} tokens; windows are whole pages of {PAGE} tokens")
        self._pool = ThreadPoolExecutor(threads or os.cpu_count() or 1)

    def __call__(self, call: Call) -> torch.Tensor:
        tokens = call.keys.shape[2]
        if 0 < call.window < PAGE:
            raise ValueError(f"layer {call.layer} has a sliding window of {call.window} tokens, less than a page of {PAGE}; "
                             "all that it sees stays in bfloat16, so there is nothing to evaluate")
        k, v = codec.rotate(self.profile, call.layer, *(x[0].float().cpu().contiguous() for x in (call.keys, call.values)))
        q = codec.rotate_queries(self.profile, call.layer, call.queries[0].float().cpu().contiguous())
        last_page = (tokens - 1) // PAGE * PAGE
        end = max(self.sink, (last_page - self.recent) // PAGE * PAGE)
        pages = codec.demote(self.profile, call.layer, k[:, self.sink:end], v[:, self.sink:end], rotated=True)
        rows = _Rows(k, v, pages, q, call.scale, self.sink, self.recent)
        out = torch.empty(*q.shape[:2], v.shape[-1])

        def attend(first: int) -> None:
            with torch.inference_mode():
                part = slice(first, min(first + PAGE, tokens))
                out[:, part] = self._page(call.layer, rows, part, call.window)
        list(self._pool.map(attend, range(0, tokens, PAGE)))
        return codec.unrotate_outputs(self.profile, call.layer, out)[None].to(call.queries.device)

    def _page(self, layer: int, rows: _Rows, part: slice, window: int) -> torch.Tensor:
        """Rotated outputs of the queries of one page."""
        end = rows.history_end(part.start)
        # Rows before `seen` are not seen by every query of the page, those before `first` by none.
        seen = max(0, part.stop - window) if window else 0
        first = max(0, part.start - window + 1) if window else 0
        if self.sink < seen < end:
            seen += -seen % PAGE  # The kernel takes whole pages of history.
        q = rows.queries[:, part]
        spans = [(min(seen, self.sink), self.sink), (max(seen, end), part.stop)] if end > self.sink else [(seen, part.stop)]
        windows = [(rows.keys[:, a:b], rows.values[:, a:b]) for a, b in spans if a < b]
        pages = rows.pages[:, max(0, seen - self.sink) // PAGE:(end - self.sink) // PAGE] if seen < end else None
        lse = torch.empty(*q.shape[:2], 1)
        out = codec.attend(self.profile, layer, q, pages, windows, scale=rows.scale, rotated=True, lse=lse)
        return out if first == seen else self._with_ragged(layer, rows, part, window, (first, seen), out, lse)

    def _with_ragged(self, layer: int, rows: _Rows, part: slice, window: int, ragged: tuple[int, int],
                     out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        """`out` merged with attention to the rows at a sliding window's edge, which each query sees a part of."""
        keys, values = self._floats(layer, rows, *ragged, rows.history_end(part.start))
        heads, n, _ = out.shape
        i = torch.arange(part.start, part.stop)[:, None]
        hidden = torch.arange(*ragged)[None] <= i - window
        q = rows.queries[:, part].unflatten(0, (keys.shape[0], -1))
        scores = (q @ keys[:, None].mT * rows.scale).masked_fill(hidden, float("-inf"))
        more = scores.logsumexp(-1, keepdim=True)
        top = torch.maximum(more, lse.view(*more.shape))
        p = (scores - top).exp()
        weight = (lse.view(*more.shape) - top).exp()
        total = p.sum(-1, keepdim=True) + weight
        merged = (p @ values[:, None] + out.view(*more.shape[:3], -1) * weight) / total
        return merged.reshape(heads, n, -1)

    def _floats(self, layer: int, rows: _Rows, first: int, last: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated rows [first, last) in float32, those of [sink, end) as their codes say."""
        keys, values = rows.keys[:, first:last].float(), rows.values[:, first:last].float()
        a, b = max(first, self.sink), min(last, end)
        if a < b:
            page, page_end = (a - self.sink) // PAGE, -(-(b - self.sink) // PAGE)
            k, v = codec.expand(self.profile, layer, rows.pages[:, page:page_end].contiguous(), rotated=True)
            at = self.sink + page * PAGE
            keys[:, a - first:b - first] = k[:, a - at:b - at].float()
            values[:, a - first:b - first] = v[:, a - at:b - at].float()
        return keys, values
