# SPDX-License-Identifier: Apache-2.0
"""The experiments of study.py, in order of promise. What they gave is in docs/design/quality.md."""
from dataclasses import replace

import torch

from codec import Recipe
from study import Mixed

AWARE = Recipe()  # oscar-int2-aware.
PUBLISHED = replace(AWARE, mean=False, feedback=False, ratios=(.96,))
VALUES = Recipe(mean=False, feedback=False, ratios=(.92,))
TILTED = replace(AWARE, scatter=.5, refit=1, tilt=1.)  # oscar-int2-tilted.
EXACT = Recipe(exact=True)


def keys(study, name, base, changes, values=EXACT):
    for change in changes:
        study.run(f"{name} {change}", study.fit(replace(base, **change), values))


def values_of(study, base, changes):
    for change in changes:
        study.run(f"V {change}", study.fit(EXACT, replace(base, **change)))


def reproduce(study):
    study.run("published, one rotation a layer", study.fit(replace(PUBLISHED, per_layer=True), replace(VALUES, per_layer=True)))
    study.run("published, one rotation a head", study.fit(PUBLISHED, VALUES))
    keys(study, "aware", AWARE, [dict(), dict(mean=False), dict(rotation="hadamard")], VALUES)
    study.run("aware, hadamard, K group 128, V .94",
              study.fit(replace(AWARE, rotation="hadamard", group=min(128, study.model.dim)), replace(VALUES, ratios=(.94,))))
    study.run("aware, K only", study.fit(AWARE, EXACT))
    study.run("V only", study.fit(EXACT, VALUES))


def tilted(study):
    """K scaled by its own scatter or not, tilted with or without the mean query, under each rotation."""
    keys(study, "tilted", TILTED, [dict(scatter=s, **c) for s in (.5, 0.) for c in (
        dict(), dict(rotation="top"), dict(rotation="hadamard"), dict(rotation="top", tilt_mean=False))], VALUES)


def scatter(study):
    keys(study, "aware", AWARE, [dict(scatter=s, rotation=r) for s in (.5, .75) for r in ("hadamard", "oscar", "top", "none")]
         + [dict(scatter=1., rotation="top", scatter_damping=.1), dict(rotation="top"), dict(rotation="hadamard")])


def refinements(study):
    for rotation in ("hadamard", "top"):
        keys(study, rotation, replace(AWARE, scatter=.5, rotation=rotation), [
            dict(refit=1), dict(refit=2), dict(refit=1, tilt=1.), dict(refit=2, tilt=1.), dict(refit=2, tilt=.3), dict(tilt=1.),
            dict(damping=.03), dict(damping=.1), dict(metric="history"), dict(weighted_scatter=True),
            dict(ratios=(.98, .94, .89, .83)), dict(refit=1, tilt=1., sweeps=2)])


def without_scatter(study):
    keys(study, "tilted", replace(TILTED, rotation="top", scatter=0.), [
        dict(tilt=3.), dict(tilt=3., tilt_mean=False), dict(tilt=.3, tilt_mean=False), dict(ratios=(.95,)), dict(ratios=(.98,)),
        dict(ratios=(.98, .92)), dict(metric="history"), dict(damping=.001), dict(damping=.1), dict(refit=2, sweeps=1), dict(mean=False)])


def values(study):
    values_of(study, VALUES, [dict(rotation="hadamard"), dict(ratios=(.94,)), dict(ratios=(.95,)), dict(mean=True)])
    base = replace(VALUES, feedback=True, refit=1, ratios=AWARE.ratios)
    values_of(study, base, [
        dict(refit=0), dict(), dict(rotation="hadamard"), dict(rotation="top"), dict(scatter=.5, rotation="hadamard"),
        dict(scatter=.5, rotation="hadamard", mean=True), dict(scatter=.5, rotation="hadamard", weighted_scatter=True)])


def choices(study):
    """The best recipe of each head by the probe, for K with exact V and for V with exact K."""
    of_keys = [replace(b, **c) for b in (
        replace(AWARE, scatter=.5, rotation="hadamard"), replace(AWARE, scatter=.5, rotation="top"), AWARE,
        replace(AWARE, scatter=.75, rotation="hadamard"), replace(AWARE, scatter=.25, rotation="hadamard"))
        for c in (dict(refit=1), dict(refit=2, tilt=1.), dict(damping=.1, refit=1))]
    v = replace(VALUES, feedback=True, mean=True, rotation="hadamard", refit=1, ratios=AWARE.ratios)
    of_values = [VALUES, replace(VALUES, ratios=(.95,)), v, replace(v, scatter=.5), replace(v, scatter=1.),
                 replace(v, scatter=.5, weighted_scatter=True)]
    fitted = [study.fit(r, EXACT) for r in of_keys], [study.fit(EXACT, r) for r in of_values]
    chosen = [torch.stack([study.probe(f)[0] for f in fits]).argmin(0).tolist() for fits in fitted]
    for of, choice, n in zip("KV", chosen, map(len, fitted)):
        study.say(f"chosen for {of}: {[sum(c == i for row in choice for c in row) for i in range(n)]}")
    codecs = [tuple(Mixed([f[layer][of] for f in fitted[of]], chosen[of][layer]) for of in (0, 1))
              for layer in range(study.model.layers)]
    study.run("mixed", codecs)
    study.run("mixed, recent 128", codecs, recent=128)


ALL = [reproduce, tilted, scatter, refinements, without_scatter, values, choices]
