# SPDX-License-Identifier: Apache-2.0
"""Two-bit codecs for rows of K and V, fitted to calibration activations: what a reader of a page would see.

Rows are [..., H, T, d] with one transform a KV head. A transform is a pair (A, B), B = A^-T: rows are stored as
(k - mean) A, queries are read as q B, so scores stay as they are; A need not be orthogonal. Levels are code * scale + min
with fp16 scale and min, one pair a row or group, as page format v1 holds them.
"""
import math
from dataclasses import dataclass, replace

import torch

NEVER = float("inf")


# ---- linear algebra, batched over heads, in double precision
def hadamard(d, device):
    h = torch.ones(1, 1, dtype=torch.float64, device=device)
    while h.shape[0] < d:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return h / math.sqrt(d)


def eye(x):
    return torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)


def mean_diagonal(x):
    return x.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]


def damped(x, damping):
    return x + damping * mean_diagonal(x) * eye(x)


def power(x, exponent, damping=0.0):
    e, u = torch.linalg.eigh(damped(x, damping))
    return (u * e.clamp_min(1e-12)[..., None, :] ** exponent) @ u.mT


def rotation(metric, kind):
    """Orthogonal [H, d, d]. oscar: U H P; top: as oscar, the largest eigenvalue's vector goes to the all-ones direction,
    which a row's minimum holds to fp16; hadamard; none."""
    d, h = metric.shape[-1], hadamard(metric.shape[-1], metric.device)
    if kind == "none":
        return eye(metric).expand_as(metric)
    if kind == "hadamard":
        return h.expand_as(metric)
    e, u = torch.linalg.eigh(metric)
    if kind == "top":
        return u.flip(-1) @ h
    bits = int(math.log2(d))
    reverse = torch.tensor([int(format(i, f"0{bits}b")[::-1], 2) for i in range(d)], device=metric.device)
    place = torch.empty(d, dtype=torch.long, device=metric.device)
    place[reverse] = torch.arange(d - 1, -1, -1, device=metric.device)
    return u @ h[:, place]


def feedback_factor(metric, damping):
    return torch.linalg.cholesky(torch.linalg.inv(damped(metric, damping)), upper=True)


# ---- rounding
def half(x):
    return x.clamp(-65504, 65504).half().float()


def ranges(x, ratios, group):
    """(min, scale), each [C, ..., T, d / group], of the candidate clip ratios; 0 is the whole range."""
    y = x.unflatten(-1, (-1, group))
    low, high = y.amin(-1), y.amax(-1)
    ordered = y.abs().sort(-1).values if any(r > 0 for r in ratios) else None
    cuts = [half(ordered[..., min(int(r * group), group - 1)]) if r > 0 else high.abs() + low.abs() for r in ratios]
    low = torch.stack([torch.maximum(low, -c) for c in cuts])
    high = torch.stack([torch.minimum(high, c) for c in cuts])
    low = half(low)
    return low, half((high - low) / 3).clamp_min(2.0 ** -24)


def nearest(x, low, scale):
    return ((x - low) / scale + .5).floor().clamp(0, 3)


def spread(levels, group):
    return levels.repeat_interleave(group, -1)


def round_with_feedback(x, factor, low, scale, group, block=16):
    """codes of x [C, B, H, T, d] (consumed); factor [H, d, d] upper. One channel after the other."""
    codes = torch.empty_like(x)
    d = x.shape[-1]
    ratio = factor / factor.diagonal(dim1=-2, dim2=-1)[..., None]
    for begin in range(0, d, block):
        end = min(begin + block, d)
        part = x[..., begin:end].clone()
        errors = torch.empty_like(part)
        for i in range(end - begin):
            a, b = low[..., (begin + i) // group], scale[..., (begin + i) // group]
            code = nearest(part[..., i], a, b)
            codes[..., begin + i] = code
            errors[..., i] = part[..., i] - (code * b + a)
            if i + 1 < end - begin:
                part[..., i + 1:] -= errors[..., i, None] * ratio[:, None, begin + i, begin + i + 1:end]
        if end < d:
            x[..., end:] -= errors @ ratio[:, begin:end, end:]
    return codes


@dataclass
class Recipe:
    """What a codec does to K or to V; see the fields' comments. Defaults are the repository's oscar-int2-aware for K."""
    mean: bool = True          # Rows are shifted by the head's mean row.
    scatter: float = 0.0       # A = S^(-scatter / 2) R with S the rows' covariance: 0 orthogonal, 1 whitens.
    scatter_damping: float = .03
    weighted_scatter: bool = False  # S of rows weighted by the attention that they receive from beyond the window.
    rotation: str = "oscar"
    metric: str = "plain"      # E[q q^T] of all queries, or "history": weighted by their attention to the history.
    damping: float = .01
    feedback: bool = True
    ratios: tuple = (0, .98, .95, .90)
    group: int = 0             # 0: the head's dim.
    refit: int = 0             # Least squares of (scale, min) after rounding, so many times (again through feedback).
    tilt: float = 0.0          # Weight of the queries that attend to the row itself, t = E[q] + C k / sqrt(d).
    tilt_mean: bool = True     # False: t = M k / sqrt(d), M as the feedback has it: nothing new to store.
    sweeps: int = 0            # Coordinate descent over the codes.
    per_layer: bool = False    # One rotation for all heads of a layer, as first published.
    exact: bool = False        # Not quantised at all (ablations).


@dataclass
class Statistics:
    """Of one layer's KV heads: moments [H, d, d] and means [H, d] in double precision."""
    query: torch.Tensor
    query_mean: torch.Tensor
    query_history: torch.Tensor
    query_history_mean: torch.Tensor
    key: torch.Tensor
    key_weighted: torch.Tensor
    key_mean: torch.Tensor
    value: torch.Tensor
    value_energy: torch.Tensor
    value_weighted: torch.Tensor
    value_mean: torch.Tensor


class RowCodec:
    """A recipe fitted to one layer: K if `of` is "key"."""

    def __init__(self, recipe, s, of):
        self.recipe, is_key = recipe, of == "key"
        mean = s.key_mean if is_key else s.value_mean
        scatter = {("key", 0): s.key, ("key", 1): s.key_weighted, ("value", 0): s.value,
                   ("value", 1): s.value_weighted}[of, recipe.weighted_scatter]
        if is_key:
            metric, query_mean = (s.query, s.query_mean) if recipe.metric == "plain" else (s.query_history, s.query_history_mean)
        else:
            metric, query_mean = eye(scatter).expand_as(scatter), torch.zeros_like(mean)
        self.mean = mean.float()[:, None] if recipe.mean else torch.zeros_like(mean).float()[:, None]
        shape = power(scatter, -recipe.scatter / 2, recipe.scatter_damping)
        # A scale of A changes nothing but fp16's range: keep rows as large as they were.
        shape = shape * (mean_diagonal(scatter) / mean_diagonal(shape @ scatter @ shape.mT)).sqrt()
        back = torch.linalg.inv(shape)
        inner = back @ metric @ back.mT
        # An orthogonal transform of values has no metric to follow: spread their energy, as published.
        guide = inner if is_key else shape @ (s.value_energy if not recipe.scatter else s.value) @ shape
        guide = guide.mean(0, keepdim=True).expand_as(guide) if recipe.per_layer else guide
        r = rotation(guide, recipe.rotation)
        a = shape @ r
        self.A, self.B = a.float(), (back.mT @ r).float()
        inner = r.mT @ inner @ r
        self.factor = feedback_factor(inner, recipe.damping).float()
        self.metric = damped(inner, recipe.damping).float()
        m = (query_mean[:, None] @ back.mT @ r)
        self.query_mean = m.float()
        self.query_cov = (inner - m.mT @ m).float()
        self.inv_sqrt_d = a.shape[-1] ** -.5
        self.group = recipe.group or a.shape[-1]

    def store(self, rows):
        return ((rows - self.mean) @ self.A).bfloat16().float()

    def _direction(self, x):
        """t of each row: the mean of the queries that attend to it, were queries Gaussian."""
        if not self.recipe.tilt_mean:
            return self.inv_sqrt_d * x @ self.metric * self.recipe.tilt ** .5
        return (self.query_mean + self.inv_sqrt_d * x @ self.query_cov) * self.recipe.tilt ** .5

    def _times_metric(self, e, t):
        y = e @ self.metric
        return y if t is None else y + (e * t).sum(-1, keepdim=True) * t

    def _refit(self, x, codes, low, scale, t):
        """Least squares of (scale, min) of each group in turn, the other groups as they are."""
        g = self.group
        for k in range(x.shape[-1] // g):
            at = slice(k * g, (k + 1) * g)
            rest = x - (codes * spread(scale, g) + spread(low, g))
            rest[..., at] = x[..., at]
            c, one = torch.zeros_like(x), torch.zeros_like(x)
            c[..., at], one[..., at] = codes[..., at], 1
            wc, wo = self._times_metric(c, t), self._times_metric(one, t)
            cc, co, oo = (c * wc).sum(-1), (c * wo).sum(-1), (one * wo).sum(-1)
            cx, ox = (rest * wc).sum(-1), (rest * wo).sum(-1)
            det = cc * oo - co * co
            new = (cx * oo - ox * co) / det
            ok = (det > 1e-6 * cc * oo) & (new > 0)
            new = half(torch.where(ok, new, scale[..., k])).clamp_min(2.0 ** -24)
            scale[..., k] = new
            low[..., k] = half((ox - new * co) / oo)
        return low, scale

    def _loss(self, e, t):
        return (e * self._times_metric(e, t)).sum(-1)

    def quantise(self, x):
        """Stored rows [B, H, T, d] as their codes say they are."""
        r, g = self.recipe, self.group
        if r.exact:
            return x
        low, scale = ranges(x, r.ratios, g)
        if not r.feedback:
            codes = nearest(x, spread(low, g), spread(scale, g))
            if len(r.ratios) == 1:
                return codes[0] * spread(scale[0], g) + spread(low[0], g)
        else:
            codes = round_with_feedback(x.expand(len(r.ratios), *x.shape).clone(), self.factor, low, scale, g)
        t = self._direction(x) if r.tilt else None
        for again in range(r.refit):
            if again:
                codes = round_with_feedback(x.expand_as(codes).clone(), self.factor, low, scale, g)
            low, scale = self._refit(x.expand_as(codes), codes, low, scale, t)
        for _ in range(r.sweeps):
            codes = self._descend(x, codes, low, scale, t)
            if r.refit:
                low, scale = self._refit(x.expand_as(codes), codes, low, scale, t)
        seen = codes * spread(scale, g) + spread(low, g)
        best = self._loss(x - seen, t).argmin(0)
        return seen.gather(0, best[None, ..., None].expand(1, *x.shape))[0]

    def _descend(self, x, codes, low, scale, t):
        """One sweep: each code moves to its best level, the others held. The gradient is kept up to date."""
        g, codes = self.group, codes.clone()
        e = x - (codes * spread(scale, g) + spread(low, g))
        grad = e @ self.metric
        te = None if t is None else (e * t).sum(-1)
        for i in range(x.shape[-1]):
            s = scale[..., i // g]
            slope, curve = grad[..., i], self.metric[:, i, i, None]
            if t is not None:
                slope, curve = slope + te * t[..., i], curve + t[..., i] ** 2
            new = (codes[..., i] + slope / curve / s + .5).floor().clamp(0, 3)
            move = (new - codes[..., i]) * s
            codes[..., i] = new
            grad -= move[..., None] * self.metric[:, None, i]
            if t is not None:
                te = te - move * t[..., i]
        return codes
