# SPDX-License-Identifier: Apache-2.0
"""python -m crumb.evaluate: attention against masks written out, scores against their definitions."""
import json
import math

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: make python PYTHON_EXTRAS=models")
pytest.importorskip("transformers", reason="transformers is not installed: make python PYTHON_EXTRAS=models")

import torch

import models
from crumb import _model, codec
from crumb import profile as profiles
from crumb._model import Model
from crumb.calibrate import collect
from crumb.evaluate import TwoBitAttention, evaluate, passkey, rounded_attention
from crumb.evaluate.__main__ import main
from crumb.evaluate.retrieval import Depth


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """(model, {codec: profile}, folder) of a small Gemma."""
    folder = tmp_path_factory.mktemp("gemma")
    models.save(models.gemma3(), folder / "model")
    model = Model(str(folder / "model"))
    statistics = collect(model, models.texts(2, 600), folder / "stats", quiet=True).statistics
    fitted = {name: profiles.fit(statistics, codec=name)[0] for name in ("oscar-int2", "oscar-int2-aware", "oscar-int2-tilted")}
    for name, profile in fitted.items():
        profile.write(folder / f"{name}.safetensors")
    return model, fitted, folder


def written_out(profile, call, sink, recent):
    """Attention with a mask a query, over rows as the codec has them: [Hq, T, dv]."""
    q, k, v = (x[0].float() for x in (call.queries, call.keys, call.values))
    tokens, group = q.shape[1], q.shape[0] // k.shape[0]
    rows_k, rows_v = codec.rotate(profile, call.layer, k.contiguous(), v.contiguous())
    whole = tokens // 64 * 64
    pages = codec.demote(profile, call.layer, rows_k[:, :whole], rows_v[:, :whole], rotated=True)
    two_k, two_v = codec.expand(profile, call.layer, pages, rotated=True)
    q = codec.rotate_queries(profile, call.layer, q.contiguous())
    i, j = torch.arange(tokens)[:, None], torch.arange(tokens)[None]
    visible = (j <= i) & (j > i - call.window) if call.window else j <= i
    # What a query's page sees at two bits.
    past = (j >= sink) & (j < ((i // 64 * 64 - recent) // 64 * 64))
    pad = lambda x: torch.cat([x, torch.zeros(x.shape[0], tokens - whole, x.shape[2])], 1)
    out = []
    for head in range(q.shape[0]):
        kv = head // group
        exact = q[head] @ rows_k[kv].float().T
        coarse = q[head] @ pad(two_k.float())[kv].T
        p = (torch.where(past, coarse, exact) * call.scale).masked_fill(~visible, -math.inf).softmax(-1)
        out.append((p * past) @ pad(two_v.float())[kv] + (p * ~past) @ rows_v[kv].float())
    return codec.unrotate_outputs(profile, call.layer, torch.stack(out))


@pytest.mark.parametrize("sink, recent", [(64, 256), (64, 64), (0, 128), (128, 0)])
@pytest.mark.parametrize("window", [0, 512, 200, 100])
def test_each_query_sees_what_its_page_would_see_while_decoding(served, sink, recent, window):
    if recent == 0:
        recent = 64  # The kernel wants the queries' own rows; they are always there.
    model, fitted, folder = served
    profile = fitted["oscar-int2-aware"]
    folder = models.save(models.gemma3(sliding_window=window or 200), folder / f"window{window}{sink}{recent}")
    other = Model(str(folder))
    cache = TwoBitAttention(profile, sink=sink, recent=recent, threads=2)
    place = 0 if window else 1
    seen = []

    def both(call):
        if call.layer == place:
            actual, expected = cache(call)[0], written_out(profile, call, sink, recent)
            seen.append((actual - expected).abs().max() / expected.abs().max())
        return call.exact()
    with other.attention(both):
        other.hidden(models.texts(1, 1000)[0])
    # Expansion rounds levels to bfloat16, the kernel's digits end at 16 bits.
    assert len(seen) == 1 and seen[0] < 1e-2


def test_a_mask_that_is_no_window_is_refused_by_layer(served, monkeypatch):
    _, _, folder = served
    model = Model(str(folder / "model"))

    def with_a_hole(*arguments, **named):
        mask = torch.ones(1, 1, 400, 400, dtype=torch.bool).tril()
        mask[..., 7] = False
        return mask
    monkeypatch.setattr(_model, "sdpa_mask", with_a_hole)
    with pytest.raises(ValueError, match="layer 0 .* has a mask that is neither causal nor a sliding window of 200"):
        with model.attention(rounded_attention):
            model.hidden(models.texts(1)[0])


@pytest.mark.parametrize("window", [1, 70, 300])
def test_exact_attention_under_a_window_is_that_of_the_whole_mask(served, window):
    _, _, folder = served
    model = Model(str(models.save(models.gemma3(sliding_window=window), folder / f"exact{window}")))
    differ = []

    def both(call):
        if call.window:
            k, v = (x.repeat_interleave(4, 1) for x in (call.keys, call.values))
            whole = torch.nn.functional.scaled_dot_product_attention(call.queries, k, v, attn_mask=call.mask, scale=call.scale)
            differ.append((call.exact() - whole).abs().max() / whole.abs().max())
        return call.exact()
    with model.attention(both):
        model.hidden(models.texts(1, 1000)[0])
    assert len(differ) == 1 and differ[0] < 1e-5


def test_windows_are_whole_pages(served):
    with pytest.raises(ValueError, match="recent is 100 tokens; windows are whole pages of 64"):
        TwoBitAttention(served[1]["oscar-int2-aware"], recent=100)


def test_scores_are_their_definitions(served):
    model, fitted, _ = served
    texts = models.texts(2, 700)
    caches = {name: TwoBitAttention(profile) for name, profile in fitted.items()}
    scores = evaluate(model, texts, caches, scored_from=400, quiet=True)
    for name, handler in {"bf16": rounded_attention, **caches}.items():
        nll, kl, agreed = [], [], []
        for text in texts:
            log_p = []
            for one in (rounded_attention, handler):
                with model.attention(one):
                    log_p.append(model.logits(model.hidden(text))[400:-1].double().log_softmax(-1))
            nll.append(-log_p[1][torch.arange(299), torch.as_tensor(text[401:])])
            kl.append((log_p[0].exp() * (log_p[0] - log_p[1])).sum(-1))
            agreed.append(log_p[0].argmax(-1) == log_p[1].argmax(-1))
        nll, kl, agreed = map(torch.cat, (nll, kl, agreed))
        s = scores[name]
        assert s.count == 2 * 299 and len(s.texts) == 2
        assert s.perplexity == pytest.approx(nll.mean().exp().item(), rel=1e-4)
        assert s.kl / s.count == pytest.approx(kl.mean().item(), rel=1e-2, abs=1e-5)
        assert s.agreed == int(agreed.sum())
    assert scores["bf16"].kl == 0 and scores["oscar-int2"].kl > scores["oscar-int2-aware"].kl > 0


def test_texts_without_a_scored_position_are_refused(served):
    with pytest.raises(ValueError, match="text 0 has 400 tokens and positions from 1024 on are scored, so at least 1026"):
        evaluate(served[0], models.texts(1), {}, quiet=True)


class Words:
    """A tokenizer of one token a character."""

    def __call__(self, text, add_special_tokens=True, **_):
        return {"input_ids": [ord(letter) % models.VOCABULARY for letter in text]}


def test_a_model_that_finds_nothing_is_said_to_find_nothing(served):
    model, fitted, _ = served
    found = passkey(model, Words(), {"two": TwoBitAttention(fitted["oscar-int2-aware"])}, tokens=700, depths=(0.2, 0.5),
                    tries=1, quiet=True)
    assert [(d.depth, d.found, d.tries) for d in found["bf16"]] == [(0.2, 0, 1), (0.5, 0, 1)]
    assert list(found) == ["bf16", "two"]


@pytest.mark.parametrize("finds", [False, True])
def test_the_command_asks_for_a_passkey_at_several_depths(served, tmp_path, capsys, monkeypatch, finds):
    _, _, folder = served
    ids, out = tmp_path / "texts.u32", tmp_path / "out.json"
    models.texts(1, 700)[0].astype("<u4").tofile(ids)
    monkeypatch.setattr(Model, "tokenizer", lambda self: Words())
    if finds:  # What a model that can do it would answer: two bits lose one of four.
        depths = lambda found: [Depth(depth, found, 4) for depth in (0.1, 0.7)]
        monkeypatch.setattr("crumb.evaluate.passkey", lambda model, tokenizer, caches, *, tokens: {
            name: depths(4 if name == "bf16" else 3) for name in ("bf16", *caches)})
    assert main(["--model", str(folder / "model"), "--text", str(ids), "--scored-from", "400", "--json", str(out),
                 "--passkey", "400", "--profile", str(folder / "oscar-int2-aware.safetensors")]) == 0
    printed, report = capsys.readouterr().out, json.loads(out.read_text())
    assert list(report["passkey"]) == ["bf16", "oscar-int2-aware, recent 256"]
    if finds:
        assert "oscar-int2-aware, recent 256: 0.1: 3/4, 0.7: 3/4" in printed
        assert report["passkey"]["bf16"][1] == {"depth": 0.7, "found": 4, "tries": 4}
    else:
        assert "passkey of 400 tokens: the model does not find it in BF16 either" in printed
        assert len(report["passkey"]["bf16"]) == 4


def test_the_command_prints_and_writes_every_codec_and_window(served, tmp_path, capsys):
    _, fitted, folder = served
    ids = tmp_path / "texts.u32"
    np.concatenate(models.texts(1, 700)).astype("<u4").tofile(ids)
    out = tmp_path / "out.json"
    arguments = ["--model", str(folder / "model"), "--text", str(ids), "--scored-from", "400", "--recent", "128", "256",
                 "--json", str(out), "--profile", *(str(folder / f"{name}.safetensors") for name in fitted)]
    assert main(arguments) == 0
    report = json.loads(out.read_text())
    names = [f"{name}, recent {recent}" for name in fitted for recent in (128, 256)]
    assert list(report["caches"]) == ["bf16", *names]
    printed = capsys.readouterr().out
    assert all(name in printed for name in names)
    assert {p["id"] for p in report["profiles"].values()} == {p.id for p in fitted.values()}


def test_an_evaluation_that_was_broken_off_goes_on(served, tmp_path, capsys, monkeypatch):
    _, _, folder = served
    ids, whole, broken = tmp_path / "texts.npy", tmp_path / "whole.json", tmp_path / "broken.json"
    np.save(ids, np.stack(models.texts(3, 700)))
    arguments = ["--model", str(folder / "model"), "--text", str(ids), "--scored-from", "400", "--profile",
                 str(folder / "oscar-int2-aware.safetensors"), "--json"]
    assert main([*arguments, str(whole)]) == 0
    hidden, seen = Model.hidden, []

    def count(model, ids):
        seen.append(ids)
        return hidden(model, ids)

    def break_off(model, ids):
        if len(seen) == 3:  # In the second text, whose two caches are not both done.
            raise KeyboardInterrupt
        return count(model, ids)
    monkeypatch.setattr(Model, "hidden", break_off)
    monkeypatch.setattr(Model, "_probe", lambda self, probe=Model._probe: (probe(self), seen.clear())[0])
    assert main([*arguments, str(broken)]) == 130
    monkeypatch.setattr(Model, "hidden", count)
    assert main([*arguments, str(broken)]) == 0
    assert len(seen) == 4 and "1 of 3 texts were there already" in capsys.readouterr().err
    first, again = (json.loads(path.read_text())["caches"] for path in (whole, broken))
    for name in first:
        for figure in ("perplexity", "kl", "top1_agreement", "num_predictions", "texts"):
            assert again[name][figure] == pytest.approx(first[name][figure], rel=1e-9), (name, figure)
    # A finished run is none to go on with, nor is one that is given up.
    assert main([*arguments, str(broken)]) == 0 and len(seen) == 6
    broken.write_text(broken.read_text().replace('"finished": true', '"finished": false'))
    assert main([*arguments, str(broken), "--restart"]) == 0 and len(seen) == 6


def test_a_profile_of_another_model_is_refused(served, tmp_path, capsys):
    _, _, folder = served
    other = models.save(models.llama(), tmp_path / "llama")
    ids = tmp_path / "texts.u32"
    models.texts(1, 700)[0].astype("<u4").tofile(ids)
    assert main(["--model", str(other), "--text", str(ids), "--profile", str(folder / "oscar-int2.safetensors"),
                 "--scored-from", "400"]) == 1
    assert "num_kv_heads is 1 where the model has 2" in capsys.readouterr().err
