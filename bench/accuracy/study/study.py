#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Research: whole-model perplexity of variants of the two-bit codec, on a GPU or (slowly) a CPU.

    study.py --model FILE.gguf --tokens NPZ --out results.json [--device cuda] [--texts 8] [--tokens-per-text 4096]
             [--budget SECONDS] [--only WORD,WORD]

Statistics come from the first 8 texts of the archive's key `calib`; choices per head are made on its texts 8 to 11,
on which `held` is a gap as well;
perplexity is over the texts of `eval`, positions 1,024 and later, with a sink of 64 and a recent window of 256 tokens
in BF16. Each result is printed and written as soon as it is there. Not the product: see docs/design/codec.md for that.
"""
import argparse
import json
import math
import sys
import time
import traceback
from dataclasses import replace

import numpy as np
import torch

import variants
from codec import Recipe, RowCodec, Statistics
from model import Model, causal, exact_attention

SINK, RECENT, PAGE, FIRST_QUERY = 64, 256, 64, 256
CALIBRATION_TEXTS = 8
BLOCK = 1024  # Queries at a time.


def history(q_from, q_to, k_from, k_to, device, recent=RECENT):
    """[queries, keys]: which keys a query reads from two-bit pages."""
    i = torch.arange(q_from, q_to, device=device)[:, None]
    j = torch.arange(k_from, k_to, device=device)[None]
    return (j >= SINK) & (j < torch.clamp(i + 1 - recent, min=0) // PAGE * PAGE)


def blocks(T, window):
    """(first query, end of queries, first key): a query block and the keys that it may see end with the block."""
    for a in range(0, T, BLOCK):
        yield a, min(a + BLOCK, T), max(0, a + 1 - window) if window else 0


def scores(q, k, scale):
    """q [B, H, Q, d], k [B, H_kv, K, d] -> [B, H_kv, group, Q, K]."""
    return (q.unflatten(1, (k.shape[1], -1)) @ k[:, :, None].mT) * scale


def history_weights(p, past):
    p = p * past
    return p * (1 - p)


class Calibration:
    """Attention that leaves the model as it is and sums up Statistics."""

    def __init__(self):
        self.statistics = {}

    def __call__(self, layer, q, k, v, scale, window):
        B, H, T, d = k.shape
        weight = torch.zeros(B, H, T, device=k.device)
        q_mass = torch.zeros(B, q.shape[1], T, device=k.device)
        for a, b, first in blocks(T, window):
            s = scores(q[:, :, a:b], k[:, :, first:b], scale).masked_fill(~causal(a, b, first, b, window, k.device), -math.inf)
            w = history_weights(s.softmax(-1), history(a, b, first, b, k.device))
            weight[:, :, first:b] += w.sum((2, 3))
            q_mass[:, :, a:b] = w.sum(-1).flatten(1, 2)
        late = slice(min(FIRST_QUERY, T // 2), None)

        def moment(x, w=None):  # x [B, H_kv, N, d] -> mean [H, d], E[x x^T] [H, d, d]
            x = x.double().transpose(0, 1).flatten(1, 2)
            w = torch.ones_like(x[..., 0]) if w is None else w.double().transpose(0, 1).flatten(1) + 1e-9
            w = w / w.sum(-1, keepdim=True)
            y = x * w[..., None]
            return y.sum(-2), y.mT @ x

        def scatter(x, w=None):
            mean, second = moment(x[:, :, SINK:], None if w is None else w[:, :, SINK:])
            return second - mean[..., None] * mean[:, None]
        group = lambda x: x.unflatten(1, (H, -1)).flatten(2, 3)
        q_mean, q_cov = moment(group(q[:, :, late]))
        h_mean, h_cov = moment(group(q[:, :, late]), group(q_mass[:, :, late, None])[..., 0])
        energy = ((k.double() @ q_cov) * k).sum(-1)
        self.statistics[layer] = Statistics(
            query=q_cov, query_mean=q_mean, query_history=h_cov, query_history_mean=h_mean,
            key=scatter(k), key_weighted=scatter(k, weight), key_mean=moment(k[:, :, SINK:])[0],
            value=scatter(v), value_energy=moment(v, energy)[1], value_weighted=scatter(v, weight),
            value_mean=moment(v[:, :, SINK:])[0])
        return exact_attention(layer, q, k, v, scale, window)


class TwoBit:
    """Attention over a two-bit history. codecs[layer] = (codec of K, codec of V)."""

    def __init__(self, codecs, recent=RECENT):
        self.codecs, self.recent = codecs, recent

    def __call__(self, layer, q, k, v, scale, window):
        key, value = self.codecs[layer]
        k_rows, v_rows = key.store(k), value.store(v)
        k_two, v_two = key.quantise(k_rows), value.quantise(v_rows)
        g = q.shape[1] // k.shape[1]
        q = (q.unflatten(1, (k.shape[1], g)) @ key.B[:, None]).flatten(1, 2)
        out = torch.empty(*q.shape[:-1], v.shape[-1], device=q.device)
        for a, b, first in blocks(k.shape[2], window):
            past = history(a, b, first, b, q.device, self.recent)
            s = torch.where(past, scores(q[:, :, a:b], k_two[:, :, first:b], scale), scores(q[:, :, a:b], k_rows[:, :, first:b], scale))
            p = s.masked_fill_(~causal(a, b, first, b, window, q.device), -math.inf).softmax(-1)
            del s
            o = (p * past) @ v_two[:, :, None, first:b]
            o += p.masked_fill_(past, 0) @ v_rows[:, :, None, first:b]
            out[:, :, a:b] = (o @ value.B.mT[:, None] + value.mean[:, None]).flatten(1, 2)
        return out


class Probe:
    """Exact attention that measures, layer by layer on exact inputs, what `codecs` would do to each head's output:
    sum over scored queries of |W_O (o - o')|^2, [layers, H_kv], and of |W_O o|^2."""

    def __init__(self, model, codecs):
        self.model, self.two_bit, self.error, self.size = model, TwoBit(codecs), {}, {}

    def __call__(self, layer, q, k, v, scale, window):
        exact = exact_attention(layer, q, k, v, scale, window)
        seen = self.two_bit(layer, q, k, v, scale, window)
        w = self.model.w[f"blk.{layer}.attn_output.weight"].unflatten(1, (q.shape[1], -1)).transpose(0, 1).contiguous()
        late = slice(q.shape[2] // 4, None)
        project = lambda o: (o[:, :, late] @ w.mT).unflatten(1, (k.shape[1], -1)).double().square().sum((0, 2, 3, 4))
        self.error[layer], self.size[layer] = project(exact - seen), project(exact)
        return exact

    def table(self):
        stack = lambda x: torch.stack([x[l] for l in sorted(x)])
        return stack(self.error), stack(self.size)


class Mixed:
    """A codec of one layer made of several: the choice per head."""

    def __init__(self, codecs, choice):
        self.codecs, self.choice = codecs, choice
        pick = lambda name: torch.stack([getattr(codecs[c], name)[h] for h, c in enumerate(choice)])
        self.mean, self.A, self.B = pick("mean"), pick("A"), pick("B")
        self.store = lambda rows: ((rows - self.mean) @ self.A).bfloat16().float()

    def quantise(self, x):
        out = torch.empty_like(x)
        for c in set(self.choice):
            at = [h for h, k in enumerate(self.choice) if k == c]
            out[:, at] = self.codecs[c].quantise(x)[:, at]
        return out


class Study:
    def __init__(self, options):
        self.options, self.start, self.rows, self.probes = options, time.time(), [], {}
        device = options.device
        self.model = Model(options.model, device)
        archive = np.load(options.tokens)
        load = lambda name, at: torch.from_numpy(archive[name][at, :options.tokens_per_text].astype(np.int64)).to(device)
        n = options.texts
        self.eval = load("eval", slice(0, n))
        self.held = load("calib", slice(8, 8 + min(n, 4)))
        calibration = Calibration()
        self.model.hidden(load("calib", slice(0, min(n, CALIBRATION_TEXTS))), calibration)
        self.statistics = calibration.statistics
        self.scored_from = min(1024, options.tokens_per_text // 4)
        self.say(f"calibrated {time.time() - self.start:.1f} s")
        self.base = self.perplexity(exact_attention)
        self.held_base = self.perplexity(exact_attention, self.held)
        self.add("bf16", self.base)

    def say(self, text):
        print(text, flush=True)

    def perplexity(self, attend, ids=None):
        total, count = self.model.loss(self.eval if ids is None else ids, attend, self.scored_from)
        return math.exp(total / count)

    def add(self, name, perplexity, seconds=0.0, **more):
        gap = 100 * (perplexity / self.base - 1)
        self.rows.append(dict(name=name, perplexity=perplexity, gap=gap, seconds=seconds, **more))
        extra = " ".join(f"{k} {v:.5f}" for k, v in more.items() if isinstance(v, float))
        self.say(f"{name:56s} {perplexity:9.4f} {gap:+8.3f} % {seconds:6.2f} s {extra}")
        with open(self.options.out, "w") as f:
            json.dump(self.rows, f, indent=1)

    def fit(self, key, value, only=None):
        """[layers] of codec pairs. `only`: a function of (layer, "key"|"value") that says what is quantised."""
        pairs = []
        for layer in range(self.model.layers):
            pair = []
            for recipe, of in ((key, "key"), (value, "value")):
                if only and not only(layer, of):
                    recipe = replace(recipe, exact=True)
                pair.append(RowCodec(recipe, self.statistics[layer], of))
            pairs.append(tuple(pair))
        return pairs

    def run(self, name, codecs, recent=RECENT, probe=None):
        """Perplexity of `codecs`, and the probe's error over all heads unless there is one already."""
        if self.left() < 0:
            raise TimeoutError(f"out of time before {name}")
        start = time.time()
        if probe is None and self.options.probe:
            probe = self.probe(codecs)
        perplexity = self.perplexity(TwoBit(codecs, recent))
        held = 100 * (self.perplexity(TwoBit(codecs, recent), self.held) / self.held_base - 1)
        more = dict(probe=(probe[0].sum() / probe[1].sum()).item(),
                    heads=(probe[0] / probe[1].sum(1, keepdim=True)).tolist()) if probe else {}
        self.add(name, perplexity, time.time() - start, held=held, **more)
        return probe

    def probe(self, codecs):
        probe = Probe(self.model, codecs)
        self.model.hidden(self.held, probe)
        return probe.table()

    def left(self):
        return self.options.budget - (time.time() - self.start)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--tokens-per-text", type=int, default=4096)
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no variant is started")
    parser.add_argument("--probe", action="store_true", help="also measure each head's output error on its own")
    parser.add_argument("--only", default="", help="run the experiments whose names hold one of these words")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    study = Study(options)
    for experiment in variants.ALL:
        words = [w for w in options.only.split(",") if w]
        if words and not any(w in experiment.__name__ for w in words):
            continue
        if study.left() < 0:
            study.say(f"out of time before {experiment.__name__}")
            break
        try:
            study.say(f"# {experiment.__name__}")
            experiment(study)
        except Exception:  # One failed experiment must not cost the others their turn.
            traceback.print_exc(file=sys.stdout)
        torch.cuda.empty_cache() if options.device == "cuda" else None


if __name__ == "__main__":
    main()
