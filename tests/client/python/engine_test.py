# SPDX-License-Identifier: Apache-2.0
"""The demo's model through transformers and through the example engine: two programs, one answer.

Skipped where the model (make model) or the engine (make build) is not.
"""
import json
import pathlib
import subprocess

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: make python PYTHON_EXTRAS=models")
pytest.importorskip("transformers", reason="transformers is not installed: make python PYTHON_EXTRAS=models")
pytest.importorskip("gguf", reason="gguf is not installed: make python PYTHON_EXTRAS=models")

from safetensors import safe_open
from safetensors.numpy import save_file

from crumb import calibrate, evaluate
from crumb import profile as profiles
from crumb._model import Model

ROOT = pathlib.Path(__file__).resolve().parents[3]
GGUF = ROOT / "build/models/SmolLM2-135M-Instruct.Q4_1.gguf"
ENGINE = ROOT / "build/release/bin/crumb-example"
PROFILE = ROOT / "deploy/profiles/smollm2-135m-instruct.safetensors"
TOKENS = 640

pytestmark = pytest.mark.skipif(not (GGUF.exists() and ENGINE.exists()),
                                reason="needs the demo's model and the example engine: make build model")


def engine(*arguments):
    return subprocess.run([ENGINE, *map(str, arguments), "--model", GGUF], check=True, capture_output=True, text=True).stdout


def order(dim):
    """transformers stores rotary pairs half a head apart, a Llama's GGUF file side by side."""
    return np.r_[np.arange(0, dim, 2), np.arange(1, dim, 2)]


def reordered(path, out):
    """The engine's profile for keys and queries in transformers' order of channels."""
    with safe_open(path, "np") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}
    channels = order(int(metadata["key_dim"]))
    for name, tensor in tensors.items():
        if name.startswith(("key_rotation", "query_rotation")):
            tensors[name] = np.ascontiguousarray(tensor[..., channels, :])
        elif name == "key_mean":
            tensors[name] = np.ascontiguousarray(tensor[..., channels])
    save_file(tensors, out, metadata)
    return profiles.load(out)


@pytest.fixture(scope="module")
def model():
    return Model(str(GGUF))


@pytest.fixture(scope="module")
def text(model, tmp_path_factory):
    """(ids, their .u32 file): the begin of this project's own guide."""
    words = (ROOT / "docs/guide/calibrating.md").read_text()
    ids = np.asarray(model.tokenizer()(words)["input_ids"][:TOKENS], dtype=np.int64)
    path = tmp_path_factory.mktemp("text") / "text.u32"
    ids.astype("<u4").tofile(path)
    return ids, path


def test_both_collect_the_same_statistics(model, text, tmp_path):
    ids, path = text
    engine("collect", "--tokens", path, "--text-tokens", TOKENS, "--out", tmp_path / "engine")
    theirs = profiles.load_statistics(tmp_path / "engine")
    ours = calibrate.collect(model, [ids], tmp_path / "ours", quiet=True).statistics
    channels = order(theirs.key_dim)
    for name in ("query_moment", "key_moment", "value_moment", "value_covariance"):
        a, b = getattr(ours, name), getattr(theirs, name)
        if not name.startswith("value"):
            b = b[..., channels, :][..., channels]
        norm = lambda x: np.sqrt(np.square(x).sum((-1, -2)))
        apart = (norm(a - b) / norm(b)).max(-1)
        assert apart[0] < 1e-6, (name, apart[0])  # The first layer's input is the same.
        # The engine's cache is bfloat16, so what its later layers see is another by a little.
        assert apart.max() < 1e-2, (name, apart.argmax(), apart.max())


def test_both_find_the_same_perplexity(model, text, tmp_path):
    ids, path = text
    profile = reordered(PROFILE, tmp_path / "profile")
    scores = evaluate.evaluate(model, [ids], {"two bits": evaluate.TwoBitAttention(profile)}, scored_from=400, quiet=True)
    common = ("perplexity", "--tokens", path, "--text-tokens", TOKENS, "--scored-from", 400)
    for name, more, tolerance in (("bf16", (), 2e-3), ("two bits", ("--profile", PROFILE), 1e-2)):
        theirs = json.loads(engine(*common, *more))["perplexity"]
        assert scores[name].perplexity == pytest.approx(theirs, rel=tolerance), name
