# SPDX-License-Identifier: Apache-2.0
"""Retrieval: a number hidden in filler text, asked for at its end.

A model that decodes greedily says the number if and only if each of its tokens is the likeliest after those before
it, so one pass over the prompt with its answer tells, and nothing is generated.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping, Sequence

import numpy as np
import torch
from tqdm import tqdm

from crumb import _texts
from crumb._model import Handler, Model
from crumb.evaluate.two_bit import rounded_attention

_FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
_HINT = "The pass key is {key}. Remember it. {key} is the pass key. "
_QUESTION = "What is the pass key? The pass key is"


@dataclass(frozen=True)
class Depth:
    """How a cache did at one depth."""
    depth: float  # Of the hint in the prompt: 0 its begin, 1 its end.
    found: int
    tries: int


def prompt(tokenizer: Any, key: int, depth: float, tokens: int) -> tuple[np.ndarray, int]:
    """Ids of a prompt of about `tokens` tokens followed by its answer, and how many of them the answer is."""
    encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
    hint, question, filler = encode(_HINT.format(key=key)), encode(_QUESTION), encode(_FILLER)
    answer = encode(f"{_QUESTION} {key}")[len(question):]
    first = _texts.first_token(tokenizer)
    count = max(1, (tokens - len(hint) - len(question) - len(answer)) // len(filler))
    before = round(count * depth)
    ids = ([] if first is None else [first]) + filler * before + hint + filler * (count - before) + question + answer
    return np.asarray(ids, dtype=np.int64), len(answer)


def passkey(model: Model, tokenizer: Any, caches: Mapping[str, Handler], *, tokens: int = 2048,
            depths: Sequence[float] = (0.1, 0.3, 0.5, 0.7), tries: int = 4, seed: int = 1,
            quiet: bool = False) -> dict[str, list[Depth]]:
    """How often each cache, and "bf16", finds a random five-digit number at each depth."""
    generator = np.random.default_rng(seed)
    handlers: dict[str, Handler] = {"bf16": rounded_attention, **caches}
    found = {name: [0] * len(depths) for name in handlers}
    with tqdm(total=len(handlers) * len(depths) * tries, unit="prompt", desc="passkey", disable=quiet) as bar:
        for place, depth in enumerate(depths):
            for key in generator.integers(10000, 100000, size=tries):
                ids, answer = prompt(tokenizer, int(key), depth, tokens)
                for name, handler in handlers.items():
                    with model.attention(handler):
                        logits = model.logits(model.hidden(ids)[-answer - 1:-1])
                    said = logits.argmax(-1).cpu()
                    found[name][place] += bool(torch.equal(said, torch.as_tensor(ids[-answer:])))
                    bar.update()
    return {name: [Depth(depth, count, tries) for depth, count in zip(depths, counts)] for name, counts in found.items()}
