# SPDX-License-Identifier: Apache-2.0
"""What the tests of the Python package share: rows with structure, and profiles fitted to them."""
import numpy as np
import pytest

from crumb import profile as profiles
from crumb._native import StatisticsCollector

LAYERS, KV_HEADS, QUERY_HEADS, KEY_DIM, VALUE_DIM = 2, 2, 6, 64, 32
CODECS = ("oscar-int2", "oscar-int2-lm", "oscar-int2-aware", "oscar-int2-tilted")


def rows(seed, heads, tokens, dim):
    """float32 [heads, tokens, dim], correlated and off centre as keys are."""
    generator = np.random.default_rng(seed)
    mix = generator.normal(size=(heads, dim, dim)) * np.geomspace(0.5, 0.02, dim)[:, None]
    centre = generator.normal(size=(heads, 1, dim)) * 0.5
    return (generator.normal(size=(heads, tokens, dim)) @ mix + centre).astype(np.float32)


def text(seed, tokens=512):
    """(queries, keys, values) of one layer, head after head."""
    return (rows(seed, QUERY_HEADS, tokens, KEY_DIM), rows(seed + 1, KV_HEADS, tokens, KEY_DIM),
            rows(seed + 2, KV_HEADS, tokens, VALUE_DIM))


def by_token(array):
    return np.ascontiguousarray(array.transpose(1, 0, 2))


def new_collector(model="m", num_layers=1):
    return StatisticsCollector(model=model, num_layers=num_layers, num_kv_heads=KV_HEADS, num_query_heads=QUERY_HEADS,
                               key_dim=KEY_DIM, value_dim=VALUE_DIM)


@pytest.fixture(scope="session")
def statistics():
    collector = new_collector("a model of random rows", LAYERS)
    for layer in range(LAYERS):
        collector.add_text(layer, *map(by_token, text(10 * layer)))
    return collector.finish()


@pytest.fixture(scope="session", params=CODECS)
def profile(statistics, request):
    return profiles.fit(statistics, codec=request.param)[0]


@pytest.fixture(scope="session")
def aware(statistics):
    return profiles.fit(statistics, codec="oscar-int2-aware")[0]
