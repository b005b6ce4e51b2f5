# SPDX-License-Identifier: Apache-2.0
"""Runs a model over texts and sums up what its attention saw.

Memory does not grow with the texts: each text's layers go into running sums in double precision as the model
computes them. What is done is kept beside the output from time to time, and a run that was broken off goes on
from there.
"""
from __future__ import annotations

import hashlib
import json
import math
import os
import pathlib
import time
from dataclasses import dataclass
from typing import Any, Sequence

import numpy as np
import torch
from tqdm import tqdm

from crumb import _native
from crumb._files import write_atomically
from crumb._model import Attention, Call, Model
from crumb.profile import Statistics

# A text of this many tokens or fewer has no query with two-bit history.
SHORTEST_TEXT = _native.FIRST_QUERY_TOKEN + 1


@dataclass(frozen=True)
class Collected:
    """What a run did: the statistics, and its own share of the work."""
    statistics: Statistics
    num_texts_before: int  # That an earlier run had done.
    num_tokens: int  # By this run.
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds if self.seconds else 0.0


def collect(model: Model, texts: Sequence[np.ndarray], out: str | os.PathLike[str], *, restart: bool = False,
            checkpoint_seconds: float = 60.0, quiet: bool = False) -> Collected:
    """Write the statistics of `texts` (arrays of token ids) to `out`, whole or not at all.

    A run that was broken off left `out`.partial; the next one over the same model and texts goes on from it
    unless `restart`. ValueError: a text too short, NaN in what attention sees (named by layer, token and
    channel), a partial file of other texts. OSError: the disk is full, or the folder does not exist; `out` is as
    it was then.
    """
    progress = _Progress(pathlib.Path(out), _run_id(model, texts))
    for i, text in enumerate(texts):
        if len(text) < SHORTEST_TEXT:
            raise ValueError(f"text {i} has {len(text)} tokens; at least {SHORTEST_TEXT} are needed, or none of its queries "
                             "has two-bit history")
    if not texts:
        raise ValueError("there are no texts to collect from")
    collector, done = progress.start(model, restart)
    begin = last = time.monotonic()
    with tqdm(total=sum(map(len, texts)), initial=sum(map(len, texts[:done])), unit="tok", unit_scale=True,
              desc="collect", disable=quiet) as bar:
        for number, text in enumerate(texts[done:], done + 1):
            with model.attention(_Summing(collector, model.attention_of)):
                model.hidden(text)
            bar.update(len(text))
            if number < len(texts) and time.monotonic() - last >= checkpoint_seconds:
                progress.save(collector.finish())
                last = time.monotonic()
    statistics = collector.finish()
    seconds = time.monotonic() - begin
    statistics.write(os.fspath(out))
    progress.remove()
    return Collected(statistics, done, sum(map(len, texts[done:])), seconds)


class _Summing:
    """Leaves attention as it is and gives each layer's rows to the collector."""

    def __init__(self, collector: _native.StatisticsCollector, attention: Attention) -> None:
        self._collector, self._root_dim = collector, math.sqrt(attention.key_dim)

    def __call__(self, call: Call) -> torch.Tensor:
        # As if the scores were q . k / sqrt(key_dim), which is what a profile is fitted for.
        scale = call.scale * self._root_dim
        queries = call.queries if abs(scale - 1) < 1e-6 else call.queries * scale
        self._collector.add_text(call.layer, *map(_by_token, (queries, call.keys, call.values)))
        return call.exact()


def _by_token(rows: torch.Tensor) -> np.ndarray:
    """[1, heads, tokens, dim] -> float32 [tokens, heads, dim], dense."""
    return rows[0].transpose(0, 1).to("cpu", torch.float32).contiguous().numpy()


def _run_id(model: Model, texts: Sequence[np.ndarray]) -> str:
    """Names the work: what the model looks like and all token ids."""
    digest = hashlib.sha256(repr((model.path, model.attention_of)).encode())
    for text in texts:
        digest.update(len(text).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(text, dtype="<i8").tobytes())
    return digest.hexdigest()


class _Progress:
    """The files beside `out` that hold what a run has done: statistics, and of which run they are."""

    def __init__(self, out: pathlib.Path, run: str) -> None:
        self._statistics = out.with_name(out.name + ".partial")
        self._note = out.with_name(out.name + ".partial.json")
        self._run = run

    def start(self, model: Model, restart: bool) -> tuple[_native.StatisticsCollector, int]:
        """A collector and how many texts it has seen already."""
        if restart:
            self.remove()
        a = model.attention_of
        options: dict[str, Any] = dict(model=model.name, num_layers=a.num_layers, num_kv_heads=a.num_kv_heads,
                                       num_query_heads=a.num_query_heads, key_dim=a.key_dim, value_dim=a.value_dim,
                                       attention_windows=list(a.windows))
        if not (self._statistics.exists() and self._note.exists()):
            return _native.StatisticsCollector(**options), 0
        note = json.loads(self._note.read_text())
        if note.get("run") != self._run:
            raise ValueError(f"{self._statistics} is of a run over another model or other texts; finish that run, or start "
                             "this one anew with --restart")
        statistics = Statistics.load(os.fspath(self._statistics))
        return _native.StatisticsCollector.resume(statistics), statistics.num_texts

    def save(self, statistics: Statistics) -> None:
        # The note never changes within a run, so each file may be replaced by itself.
        if not self._note.exists():
            write_atomically(self._note, json.dumps({"run": self._run}))
        statistics.write(os.fspath(self._statistics))

    def remove(self) -> None:
        self._statistics.unlink(missing_ok=True)
        self._note.unlink(missing_ok=True)
