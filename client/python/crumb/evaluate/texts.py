# SPDX-License-Identifier: Apache-2.0
"""Perplexity and divergence over texts, teacher-forced, a cache against another."""
from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any, Callable, Mapping, Sequence

import numpy as np
import torch
from tqdm import tqdm

from crumb._model import Handler, Model
from crumb.evaluate.two_bit import rounded_attention

# Logits at a time, 128 MB: four such arrays are alive.
_LOGITS = 1 << 25


@dataclass
class Score:
    """Of one cache, summed over scored positions."""
    nll: float = 0.0
    kl: float = 0.0  # From bfloat16's next-token distribution to this cache's, in nats.
    agreed: int = 0  # Positions whose likeliest token is bfloat16's.
    count: int = 0
    seconds: float = 0.0  # Of the model's passes over texts, logits aside.
    texts: list[float] = field(default_factory=list)  # Perplexity of each.

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll / self.count)

    def as_dict(self, base: "Score") -> dict[str, Any]:
        return {"perplexity": self.perplexity, "gap_percent": 100 * (self.perplexity / base.perplexity - 1),
                "kl": self.kl / self.count, "top1_agreement": self.agreed / self.count, "num_predictions": self.count,
                "seconds": round(self.seconds, 2), "texts": self.texts}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "Score":
        """What `as_dict` gave, to go on from."""
        count = int(saved["num_predictions"])
        return cls(nll=math.log(saved["perplexity"]) * count, kl=saved["kl"] * count,
                   agreed=round(saved["top1_agreement"] * count), count=count, seconds=saved["seconds"],
                   texts=list(saved["texts"]))


def evaluate(model: Model, texts: Sequence[np.ndarray], caches: Mapping[str, Handler], *, scored_from: int = 1024,
             quiet: bool = False, after_text: Callable[[dict[str, Score]], None] | None = None,
             before: Mapping[str, Score] | None = None) -> dict[str, Score]:
    """Score each cache (a name and an attention handler) beside "bf16", which is always there and first.

    Scored are the predictions of the positions `scored_from` and later of each text. `after_text` is shown the
    scores so far when a text is done; `before` are those of texts that an earlier run has done and `texts` has
    not, for the same caches. ValueError: a text without such a position.
    """
    for i, text in enumerate(texts):
        if len(text) < scored_from + 2:
            raise ValueError(f"text {i} has {len(text)} tokens and positions from {scored_from} on are scored, so at least "
                             f"{scored_from + 2} are needed: give longer texts, or score from an earlier position")
    handlers: dict[str, Handler] = {"bf16": rounded_attention, **caches}
    scores = dict(before) if before else {name: Score() for name in handlers}
    with tqdm(total=len(handlers) * sum(map(len, texts)), unit="tok", unit_scale=True, desc="evaluate",
              disable=quiet) as bar:
        for text in texts:
            states = {}
            for name, handler in handlers.items():
                start = time.monotonic()
                with model.attention(handler):
                    states[name] = model.hidden(text)[scored_from:-1]
                scores[name].seconds += time.monotonic() - start
                bar.update(len(text))
            _score(model, states, torch.as_tensor(text[scored_from + 1:]), scores)
            bar.set_postfix_str(" ".join(f"{name} {score.perplexity:.3f}" for name, score in scores.items()))
            if after_text is not None:
                after_text(scores)
    return scores


@torch.inference_mode()
def _score(model: Model, states: dict[str, torch.Tensor], targets: torch.Tensor, scores: dict[str, Score]) -> None:
    """Adds one text's predictions; states["bf16"] is what the others are held against."""
    before = {name: (score.nll, score.count) for name, score in scores.items()}
    rows = max(16, _LOGITS // model.vocabulary)
    for at in range(0, len(targets), rows):
        target = targets[at:at + rows, None].to(model.device)
        base = torch.log_softmax(model.logits(states["bf16"][at:at + rows]), -1)
        p, likeliest = base.exp(), base.argmax(-1)
        for name, state in states.items():
            score = scores[name]
            score.count += len(target)
            if name == "bf16":
                log_p = base
                score.agreed += len(target)
            else:
                log_p = model.logits(state[at:at + rows])
                log_p -= log_p.logsumexp(-1, keepdim=True)
                score.agreed += int((log_p.argmax(-1) == likeliest).sum())
            score.nll -= log_p.gather(-1, target).double().sum().item()
            if name != "bf16":
                score.kl += torch.linalg.vecdot(p, torch.sub(base, log_p, out=log_p)).double().sum().item()
    for name, score in scores.items():
        nll, count = before[name]
        score.texts.append(math.exp((score.nll - nll) / (score.count - count)))
