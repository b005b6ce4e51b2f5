# SPDX-License-Identifier: Apache-2.0
"""crumb.codec on NumPy arrays: against attention written out, and what it refuses."""
import numpy as np
import pytest

from conftest import KEY_DIM, KV_HEADS, QUERY_HEADS, VALUE_DIM, rows, text
from crumb import codec


def to_float(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def softmax_attention(queries, keys, values, scale, visible):
    """[Hq, n, dv] in double: the formula, a head after the other."""
    group = queries.shape[0] // keys.shape[0]
    out = []
    for head, q in enumerate(queries.astype(np.float64)):
        scores = q @ keys[head // group].astype(np.float64).T * scale
        scores = np.where(visible, scores, -np.inf)
        p = np.exp(scores - scores.max(1, keepdims=True))
        out.append(p / p.sum(1, keepdims=True) @ values[head // group].astype(np.float64))
    return np.stack(out)


def split_cache(profile, layer, tokens=512, recent=128):
    """(queries of the last 32 tokens, all stored rows, pages, windows)."""
    queries, keys, values = text(10 * layer, tokens)
    k, v = codec.rotate(profile, layer, keys, values)
    end = tokens - recent
    pages = codec.demote(profile, layer, k[:, 64:end], v[:, 64:end], rotated=True)
    windows = [(k[:, :64], v[:, :64]), (k[:, end:], v[:, end:])]
    return queries[:, -32:], (k, v), pages, windows


def test_attention_over_pages_is_softmax_over_what_the_pages_hold(profile):
    layer, tokens, recent = 1, 512, 128
    queries, (k, v), pages, windows = split_cache(profile, layer, tokens, recent)
    out = codec.attend(profile, layer, queries, pages, windows)

    seen_k, seen_v = to_float(k), to_float(v)
    expanded_k, expanded_v = codec.expand(profile, layer, pages, rotated=True)
    seen_k[:, 64:tokens - recent], seen_v[:, 64:tokens - recent] = to_float(expanded_k), to_float(expanded_v)
    visible = np.arange(tokens) <= np.arange(tokens - 32, tokens)[:, None]
    expected = softmax_attention(codec.rotate_queries(profile, layer, queries), seen_k, seen_v, KEY_DIM ** -0.5,
                                 visible)
    expected = codec.unrotate_outputs(profile, layer, expected.astype(np.float32))
    # Expansion rounds to bfloat16 and the kernel's digits end at 16 bits.
    assert np.abs(out - expected).max() < 1e-2 * np.abs(expected).max()


def test_without_history_attention_is_exact_to_the_rounding_of_stored_rows(profile):
    queries, keys, values = text(0, 128)
    k, v = codec.rotate(profile, 0, keys, values)
    out = codec.attend(profile, 0, queries, None, [(k, v)])
    visible = np.tri(128, dtype=bool)
    expected = softmax_attention(queries, keys, values, KEY_DIM ** -0.5, visible)
    assert np.abs(out - expected).max() < 3e-2 * np.abs(expected).max()


def test_parts_merge_by_their_lse(profile):
    layer = 0
    queries, _, pages, windows = split_cache(profile, layer)
    q = codec.rotate_queries(profile, layer, queries)
    whole = codec.attend(profile, layer, q, pages, windows, rotated=True)
    parts = []
    for some, window in ((pages[:, :2], windows[1:]), (pages[:, 2:], windows[1:])):
        lse = np.empty((*q.shape[:2], 1), np.float32)
        parts.append((codec.attend(profile, layer, q, some, window, rotated=True, lse=lse), lse))
    only = np.empty((*q.shape[:2], 1), np.float32)
    recent = codec.attend(profile, layer, q, None, windows[1:], rotated=True, lse=only)
    # history + recent twice, less recent once, is all but the sink.
    weight = [np.exp(lse.astype(np.float64)) for _, lse in parts]
    total = sum(weight) - np.exp(only.astype(np.float64))
    merged = (sum(o * w for (o, _), w in zip(parts, weight)) - recent * np.exp(only.astype(np.float64))) / total
    expected = codec.attend(profile, layer, q, pages, windows[1:], rotated=True)
    assert np.abs(merged - expected).max() < 1e-2 * np.abs(expected).max()
    assert np.abs(whole - expected).max() > 0


def test_demotion_of_model_rows_is_rotation_then_demotion(profile):
    _, keys, values = text(3, 192)
    k, v = codec.rotate(profile, 0, keys, values)
    once = codec.demote(profile, 0, keys, values)
    assert once.dtype == np.uint8 and once.shape == (KV_HEADS, 3, profile.block_bytes)
    assert np.array_equal(once, codec.demote(profile, 0, k, v, rotated=True))


def test_expanded_rows_are_near_the_models_rows(profile):
    _, keys, values = text(0, 256)
    k, v = codec.expand(profile, 0, codec.demote(profile, 0, keys, values))
    for got, want in ((to_float(k), keys), (to_float(v), values)):
        centred = want - want.mean(1, keepdims=True)
        assert np.square(got - want).mean() < 0.5 * np.square(centred).mean()


def test_slices_of_tokens_are_read_in_place(profile):
    _, keys, values = text(5, 256)
    k, v = codec.rotate(profile, 0, keys, values)
    part = codec.demote(profile, 0, k[:, 64:192], v[:, 64:192], rotated=True)
    whole = codec.demote(profile, 0, k, v, rotated=True)
    assert np.array_equal(part, whole[:, 1:3])


def test_bfloat16_rows_give_what_their_floats_give(profile):
    _, keys, values = text(6, 64)
    bits = [(array.view(np.uint32) >> 16).astype(np.uint16) for array in (keys, values)]
    floats = [to_float(array) for array in bits]
    assert np.array_equal(codec.demote(profile, 0, *bits), codec.demote(profile, 0, *floats))


@pytest.mark.parametrize("change, message", [
    (dict(keys=rows(0, KV_HEADS, 64, 32)), r"keys has the shape \[2, 64, 32\]; \[2, rows, 64\] is expected"),
    (dict(keys=rows(0, 3, 64, KEY_DIM)), r"keys has the shape \[3, 64, 64\]"),
    (dict(values=rows(0, KV_HEADS, 128, VALUE_DIM)), r"values has the shape \[2, 128, 32\]; \[2, 64, 32\]"),
    (dict(keys=rows(0, KV_HEADS, 64, KEY_DIM).astype(np.float64)), "keys is of float64"),
    (dict(keys=rows(0, KV_HEADS, KEY_DIM, 64).transpose(0, 2, 1)), "keys .* is not dense within a head"),
    (dict(keys=rows(0, KV_HEADS, 64, KEY_DIM)[0]), r"keys has the shape \[64, 64\]"),
    (dict(keys=[1, 2]), "keys is a list"),
    (dict(layer=2), "layer 2 is not of the profile, which has layers 0 to 1"),
])
def test_demotion_refuses_and_names(aware, change, message):
    _, keys, values = text(0, 64)
    arguments = dict(layer=0, keys=keys, values=values) | change
    with pytest.raises(ValueError, match=message):
        codec.demote(aware, **arguments)


def test_pages_are_whole(aware):
    _, keys, values = text(0, 100)
    with pytest.raises(ValueError, match="keys has 100 rows; whole pages of 64"):
        codec.demote(aware, 0, keys, values)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_rows_that_are_not_finite_are_named_by_place(profile, bad):
    _, keys, values = text(0, 128)
    keys[1, 70, 3] = bad
    k, v = codec.rotate(profile, 1, keys, values)
    with pytest.raises(ValueError, match="layer 1, KV head 1, rows from 64: .*token 6"):
        codec.demote(profile, 1, k, v, rotated=True)


def test_attention_refuses_and_names(aware):
    queries, _, pages, windows = split_cache(aware, 0)
    with pytest.raises(ValueError, match="queries has 5 heads; a multiple of the profile's 2 KV heads"):
        codec.attend(aware, 0, queries[:5], pages, windows)
    with pytest.raises(ValueError, match="pages is of float32; uint8 is expected"):
        codec.attend(aware, 0, queries, pages.astype(np.float32), windows)
    with pytest.raises(ValueError, match=r"a window's values has the shape \[2, 64, 32\]; \[2, 128, 32\]"):
        codec.attend(aware, 0, queries, pages, [(windows[1][0], windows[0][1])])
    with pytest.raises(ValueError, match="num_queries is 32"):
        codec.attend(aware, 0, queries, pages, [(windows[0][0][:, :8], windows[0][1][:, :8])])
