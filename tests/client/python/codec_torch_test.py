# SPDX-License-Identifier: Apache-2.0
"""crumb.codec on PyTorch's CPU tensors: as on NumPy arrays, in place."""
import numpy as np
import pytest

from codec_test import split_cache
from conftest import text
from crumb import codec

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make python PYTHON_EXTRAS=models")


def test_tensors_give_what_arrays_give(profile):
    queries, _, pages, windows = split_cache(profile, 0)
    expected = codec.attend(profile, 0, queries, pages, windows)
    tensor = torch.from_numpy
    bfloat = lambda bits: tensor(bits.view(np.int16)).view(torch.bfloat16)
    out = codec.attend(profile, 0, tensor(queries.copy()), tensor(pages), [(bfloat(k), bfloat(v)) for k, v in windows])
    assert isinstance(out, torch.Tensor) and np.array_equal(out.numpy(), expected)


def test_stored_rows_and_pages_are_tensors_of_their_types(profile):
    _, keys, values = map(torch.from_numpy, text(1, 128))
    k, v = codec.rotate(profile, 0, keys, values)
    assert k.dtype == v.dtype == torch.bfloat16
    pages = codec.demote(profile, 0, k, v, rotated=True)
    assert pages.dtype == torch.uint8
    assert torch.equal(pages, codec.demote(profile, 0, keys, values))
    expanded, _ = codec.expand(profile, 0, pages)
    assert expanded.dtype == torch.bfloat16 and expanded.shape == keys.shape


def test_bfloat16_tensors_are_read_without_a_copy(profile):
    """A view of a larger tensor: its heads are apart, and what the codec sees are its own bytes."""
    _, keys, values = text(2, 256)
    k, v = codec.rotate(profile, 0, *map(torch.from_numpy, (keys, values)))
    before = codec.demote(profile, 0, k[:, 64:128], v[:, 64:128], rotated=True)
    k[:, 64:128] = 0
    after = codec.demote(profile, 0, k[:, 64:128], v[:, 64:128], rotated=True)
    assert not torch.equal(before, after)


def test_a_tensor_with_a_gradient_is_read_and_gets_none(profile):
    _, keys, values = map(torch.from_numpy, text(1, 64))
    pages = codec.demote(profile, 0, keys.clone().requires_grad_(), values)
    assert torch.equal(pages, codec.demote(profile, 0, keys, values))


def test_a_tensor_elsewhere_is_refused_by_name(aware):
    keys = torch.empty(2, 64, 64, device="meta")
    with pytest.raises(ValueError, match="keys is on meta; the codec reads CPU tensors: pass keys.cpu()"):
        codec.demote(aware, 0, keys, torch.empty(2, 64, 32))


def test_half_precision_is_refused_by_name(aware):
    _, keys, values = map(torch.from_numpy, text(1, 64))
    with pytest.raises(ValueError, match="keys is of float16"):
        codec.demote(aware, 0, keys.half(), values)
