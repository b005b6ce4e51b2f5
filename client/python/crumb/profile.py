# SPDX-License-Identifier: Apache-2.0
"""Model profiles: everything that two engines must agree on before they share a page.

A profile is one safetensors file that says how a model's keys and values are rotated and rounded; its
identity is the file's SHA-256. Profiles are immutable.

    profile = crumb.profile.load("profile.safetensors")
    print(profile.codec, profile.id)
"""
from __future__ import annotations

import os

from crumb import _native
from crumb._native import Profile, Statistics

__all__ = ["Profile", "Statistics", "check", "fit", "load", "load_statistics", "parse"]


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


def fit(statistics: Statistics, *, codec: str = "oscar-int2-tilted", rotation: str = "head",
        sink_tokens: int = 64, recent_tokens: int = 256) -> tuple[Profile, list[str]]:
    """Fit a profile to a model's statistics; also gives what makes the fit doubtful, in words.

    codec: "oscar-int2" (as published), "oscar-int2-aware" or "oscar-int2-tilted".
    rotation: one a "head", one a "layer" (not under "oscar-int2-tilted"), or the "hadamard" matrix alone.

    The program `crumb-calibrate fit` does the same and has more options. ValueError: a head_dim that is not
    a power of two, or an option out of range.
    """
    profile, warnings = _native.fit_profile(statistics, codec, rotation, sink_tokens, recent_tokens)
    return profile, list(warnings)


def check(profile: Profile, *, num_layers: int, num_kv_heads: int, key_dim: int, value_dim: int) -> None:
    """Hold a profile against a model's geometry. ValueError names every number that differs."""
    wanted = dict(num_layers=num_layers, num_kv_heads=num_kv_heads, key_dim=key_dim, value_dim=value_dim)
    differ = [f"{name} is {getattr(profile, name)} where the model has {value}"
              for name, value in wanted.items() if getattr(profile, name) != value]
    if differ:
        raise ValueError(f"the profile (of '{profile.model}', {profile.id[:8]}) is not of this model: "
                         + ", ".join(differ))

