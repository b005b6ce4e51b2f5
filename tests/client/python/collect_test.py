# SPDX-License-Identifier: Apache-2.0
"""python -m crumb.calibrate collect, on small models of several kinds."""
import os

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: make python PYTHON_EXTRAS=models")
pytest.importorskip("transformers", reason="transformers is not installed: make python PYTHON_EXTRAS=models")

import torch
import transformers

import models
from crumb import _texts
from crumb import profile as profiles
from crumb._model import Model
from crumb.calibrate import collect
from crumb.calibrate.__main__ import main

MOMENTS = ("query_moment", "query_mean", "key_moment", "key_mean", "value_moment", "value_mean", "value_covariance",
           "value_attention_covariance")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return models.save(models.llama(), tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("make, heads, dims, windows", [
    (models.llama, (4, 2), (32, 32), [0, 0]),
    (lambda: models.llama(num_key_value_heads=1), (4, 1), (32, 32), [0, 0]),
    (models.gemma3, (4, 1), (32, 32), [200, 0]),
    (models.deepseek, (4, 4), (64, 32), [0, 0]),
], ids=["llama", "one KV head", "gemma3", "K and V of different head_dim"])
def test_statistics_are_of_what_the_models_cache_holds(tmp_path, make, heads, dims, windows):
    folder = models.save(make(), tmp_path / "model")
    texts = models.texts(2)
    s = collect(Model(str(folder)), texts, tmp_path / "stats", quiet=True).statistics
    assert (s.num_query_heads, s.num_kv_heads) == heads and (s.key_dim, s.value_dim) == dims
    assert (s.num_layers, s.num_texts, s.num_tokens) == (2, 2, 800)
    assert list(s.attention_windows) == windows
    assert s.num_reservoir_keys == 512 and s.num_reservoir_queries == 128
    for layer in range(2):
        # A model's own cache forgets what is beyond a window; DeepSeek's holds latents.
        if windows[layer] or make is models.deepseek:
            continue
        rows = [models.cache_of(folder, text)[layer] for text in texts]
        for of, at in (("key", 0), ("value", 1)):
            late = [r[at][:, 64:].astype(np.float64) for r in rows]
            mean = np.mean([x.mean(1) for x in late], 0)
            moment = np.mean([x.transpose(0, 2, 1) @ x / x.shape[1] for x in late], 0)
            assert np.allclose(getattr(s, f"{of}_mean")[layer], mean, rtol=1e-4, atol=1e-5)
            assert np.allclose(getattr(s, f"{of}_moment")[layer], moment, rtol=1e-4, atol=1e-5)


def test_a_hooked_model_computes_what_it_did(llama):
    ids = models.texts(1)[0]
    plain = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    with torch.inference_mode():
        expected = plain(torch.as_tensor(ids)[None]).logits[0]
    model = Model(str(llama))
    with model.attention(lambda call: call.exact()):
        actual = model.logits(model.hidden(ids))
    assert torch.allclose(actual, expected, atol=1e-4)


def test_queries_are_scaled_as_scores_over_the_root_of_key_dim_would_have_them(tmp_path):
    """Gemma's scores are q . k / sqrt(query_pre_attn_scalar)."""
    texts = models.texts(1)
    found = []
    for scalar in (16, 64):
        folder = models.save(models.gemma3(query_pre_attn_scalar=scalar), tmp_path / str(scalar))
        found.append(collect(Model(str(folder)), texts, tmp_path / "stats", quiet=True).statistics)
    # The first layer's queries are alike but for the scale: twice, four times the moment.
    assert np.allclose(found[0].query_moment[0], 4 * found[1].query_moment[0], rtol=1e-4)


def test_a_run_that_was_broken_off_goes_on(llama, tmp_path, monkeypatch):
    texts = models.texts(4)
    whole = collect(Model(str(llama)), texts, tmp_path / "whole", quiet=True).statistics
    model = Model(str(llama))
    hidden, seen = model.hidden, []

    def broken(ids):
        seen.append(ids)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return hidden(ids)
    monkeypatch.setattr(model, "hidden", broken)
    with pytest.raises(KeyboardInterrupt):
        collect(model, texts, tmp_path / "stats", checkpoint_seconds=0, quiet=True)
    assert sorted(os.listdir(tmp_path)) == ["stats.partial", "stats.partial.json", "whole"]
    done = collect(Model(str(llama)), texts, tmp_path / "stats", quiet=True)
    assert (done.num_texts_before, done.num_tokens) == (2, 800)
    for name in MOMENTS:
        assert np.allclose(getattr(done.statistics, name), getattr(whole, name), rtol=1e-9, atol=1e-12), name
    assert sorted(os.listdir(tmp_path)) == ["stats", "whole"]


def test_what_is_done_of_other_texts_is_refused_until_it_is_given_up(llama, tmp_path, monkeypatch):
    model = Model(str(llama))
    texts = models.texts(3)
    hidden = model.hidden
    monkeypatch.setattr(model, "hidden", lambda ids: hidden(ids) if ids is texts[0] else (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        collect(model, texts, tmp_path / "stats", checkpoint_seconds=0, quiet=True)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="stats.partial is of a run over another model or other texts.*--restart"):
        collect(model, texts[1:], tmp_path / "stats", quiet=True)
    assert collect(model, texts[1:], tmp_path / "stats", restart=True, quiet=True).num_texts_before == 0


def test_rows_that_are_not_finite_are_named_and_nothing_is_written(tmp_path):
    folder = models.save(models.llama(), tmp_path / "model")
    model = Model(str(folder))
    with torch.no_grad():
        model.model.model.layers[1].self_attn.v_proj.weight[5] = float("nan")
    with pytest.raises(ValueError, match="values of layer 1, token 0, head 0, channel 5 is NaN"):
        collect(model, models.texts(1), tmp_path / "stats", quiet=True)
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.parametrize("config, model_class, message", [
    (lambda: transformers.BertConfig(**models.COMMON, is_decoder=False), transformers.BertLMHeadModel,
     "layer 0 .* attends to later tokens too, so it has no KV cache"),
    (lambda: transformers.MambaConfig(vocab_size=96, hidden_size=64, num_hidden_layers=2, bos_token_id=0, eos_token_id=0,
                                      pad_token_id=0), None, "no KV cache|cannot load it as a causal model"),
    (lambda: transformers.Gemma2Config(**models.COMMON, num_key_value_heads=2, head_dim=32), None,
     r"layer 0 \(Gemma2Attention\) caps its scores"),
    (lambda: models.llama(head_dim=16), None, "head_dim of K is 16; pages hold multiples of 32"),
], ids=["bert", "mamba", "gemma2", "head_dim 16"])
def test_models_that_cannot_be_served_are_refused_by_what_they_do(tmp_path, config, model_class, message):
    folder = models.save(config(), tmp_path / "model", model_class)
    with pytest.raises(ValueError, match=message):
        Model(str(folder))


def test_layers_of_different_geometry_are_refused_by_layer(llama):
    """A model whose second layer answers with half of its query heads."""
    model = Model(str(llama))
    attention = model.model.model.layers[1].self_attn
    attention.q_proj = torch.nn.Linear(64, 64, bias=False)
    attention.o_proj = torch.nn.Linear(64, 64, bias=False)
    with pytest.raises(ValueError, match="layer 1 has 2 query heads, 2 KV heads, .* where layer 0 has 4 query heads"):
        model._probe()


def test_the_command_writes_what_the_fit_reads(llama, tmp_path, capsys):
    ids = tmp_path / "texts.npz"
    np.savez(ids, calib=np.stack(models.texts(2)), eval=np.stack(models.texts(1)))
    out = tmp_path / "stats.safetensors"
    assert main(["collect", "--model", str(llama), "--text", str(ids), "--tokens", "700", "--out", str(out)]) == 0
    assert "statistics of 2 texts, 700 tokens" in capsys.readouterr().out
    fitted, _ = profiles.fit(profiles.load_statistics(out))
    profiles.check(fitted, num_layers=2, num_kv_heads=2, key_dim=32, value_dim=32)


@pytest.mark.parametrize("text, message", [
    (np.arange(200), "the longest text has 200 tokens; at least 257 are needed"),
    (np.full(400, 96), "token id 96 is beyond the model's vocabulary of 96 tokens"),
    ("words", "text needs the model's tokenizer and there is none"),
], ids=["short", "another tokenizer's", "no tokenizer"])
def test_texts_that_cannot_be_used_are_refused_by_file(llama, tmp_path, capsys, text, message):
    path = tmp_path / ("text.txt" if isinstance(text, str) else "text.u32")
    path.write_bytes(text.encode() if isinstance(text, str) else (text % 97).astype("<u4").tobytes())
    out = tmp_path / "stats"
    assert main(["collect", "--model", str(llama), "--text", str(path), "--out", str(out)]) == 1
    error = capsys.readouterr().err
    assert str(path) in error and message in error and not out.exists()


def test_files_that_are_too_short_are_left_out_beside_others(tmp_path):
    for name, ids in (("short.u32", np.arange(50)), ("long.u32", np.arange(300) % 96)):
        ids.astype("<u4").tofile(tmp_path / name)
    with pytest.warns(UserWarning, match="1 of 2 files are left out, they are shorter than 257 tokens.*short.u32"):
        texts = _texts.read([str(tmp_path / "short.u32"), str(tmp_path / "long.u32")], tokenizer=None, vocabulary=96,
                            text_tokens=4096, least_tokens=257)
    assert [len(text) for text in texts] == [300]
