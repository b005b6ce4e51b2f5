# SPDX-License-Identifier: Apache-2.0
"""Model profiles: everything that two engines must agree on before they share a page.

A profile is one safetensors file that says how a model's keys and values are rotated and rounded; its
identity is the file's SHA-256. Profiles are immutable.

    profile = crumb.profile.load("profile.safetensors")
    print(profile.codec, profile.id)
"""
from __future__ import annotations

import os
from typing import Literal

from crumb import _native
from crumb._native import Profile, Statistics

__all__ = ["Codec", "KeyRanges", "Profile", "Rotation", "Statistics", "ValueLevels", "check", "fit", "load", "load_statistics", "parse"]

Codec = Literal["oscar-int2", "oscar-int2-lm", "oscar-int2-aware", "oscar-int2-tilted"]
Rotation = Literal["head", "layer", "hadamard"]
ValueLevels = Literal["range", "deviation"]
KeyRanges = Literal["codec", "narrow", "chosen"]


def load(path: str | os.PathLike[str]) -> Profile:
    """Read a profile and check all of it.

    ValueError names the tensor and what is wrong with it: a malformed or truncated file, NaN, a rotation
    that is not orthogonal, another format, codec or page size. FileNotFoundError: no such file.
    """
    return Profile.load(os.fspath(path))


def parse(file: bytes) -> Profile:
    """A profile from its file's bytes, after the checks of `load`."""
    return Profile.parse(file)


def load_statistics(path: str | os.PathLike[str]) -> Statistics:
    """Read a statistics file, as `python -m crumb.calibrate collect` writes it, and check all of it.

    ValueError: malformed, of no texts, NaN, a matrix that is not symmetric. FileNotFoundError: no such file.
    """
    return Statistics.load(os.fspath(path))


def fit(statistics: Statistics, *, codec: Codec = "oscar-int2-tilted", rotation: Rotation = "head",
        key_rotation: Rotation | None = None, value_rotation: Rotation | None = None, sink_tokens: int = 64,
        recent_tokens: int = 256, value_levels: ValueLevels = "range", key_ranges: KeyRanges = "codec",
        key_clip: float = 0.96, value_clip: float = 0.92, shift_keys: bool = True, damping: float = 0.01,
        choose: bool = True, key_margin: float = 0.5, value_margin: float = 0.1, threads: int = 0) -> tuple[Profile, list[str]]:
    """Fit a profile to a model's statistics; also gives what makes the fit doubtful, in words.

    codec: "oscar-int2" (as published), "oscar-int2-lm", "oscar-int2-aware" or "oscar-int2-tilted".
    rotation: one a "head", one a "layer" (for keys not under "oscar-int2-tilted"), or the "hadamard" matrix alone.
    key_rotation, value_rotation: that of keys or of values, where they differ.
    sink_tokens, recent_tokens: how many of the first and of the last tokens stay in bfloat16.
    value_levels: values within their clipped "range", or by each row's mean and "deviation", so that none comes back
        smaller; under "oscar-int2" always the one, under "oscar-int2-lm" the other.
    key_ranges: which ranges a key tries under codecs with feedback: those of the "codec", "narrow" ones, or "chosen"
        head by head; with other ones than the codec's pages are demoted on the CPU alone.
    key_clip, value_clip: the share of a row's channels that its range must hold; 0 turns clipping off. Keys are
        clipped under "oscar-int2" alone.
    shift_keys: subtract each head's mean key; not under "oscar-int2".
    damping: added to the diagonal of the metric, in units of its mean: how far a few thousand tokens are believed.
    choose: under "oscar-int2-tilted", give a head another recipe where attention on the statistics' rows loses less
        by it, on both halves of the rows and by these shares: key_margin, value_margin.
    threads: how many fit; 0 is one a processor.

    The same profile, byte for byte, as `crumb-calibrate fit` makes of the same statistics and options. ValueError: a
    head_dim that is not a power of two, or an option out of range.
    """
    options = _native.FitOptions()
    options.set_codec(codec)
    options.set_key_rotation(key_rotation or rotation)
    options.set_value_rotation(value_rotation or rotation)
    options.set_sink_tokens(sink_tokens)
    options.set_recent_tokens(recent_tokens)
    options.set_value_levels(value_levels)
    options.set_key_ranges(key_ranges)
    options.key_clip, options.value_clip = key_clip, value_clip
    options.shift_keys, options.damping = shift_keys, damping
    options.choose, options.key_margin, options.value_margin = choose, key_margin, value_margin
    options.threads = threads
    profile, warnings = _native.fit_profile(statistics, options)
    return profile, list(warnings)


def check(profile: Profile, *, num_layers: int, num_kv_heads: int, key_dim: int, value_dim: int) -> None:
    """Hold a profile against a model's geometry. ValueError names every number that differs."""
    wanted = dict(num_layers=num_layers, num_kv_heads=num_kv_heads, key_dim=key_dim, value_dim=value_dim)
    differ = [f"{name} is {getattr(profile, name)} where the model has {value}"
              for name, value in wanted.items() if getattr(profile, name) != value]
    if differ:
        raise ValueError(f"the profile (of '{profile.model}', {profile.id[:8]}) is not of this model: "
                         + ", ".join(differ))
