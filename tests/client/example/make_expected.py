#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes data/expected_*.json from other implementations of the same model file: the tokenizers
library for token ids, PyTorch transformers for logits.

Needs torch, transformers, gguf, tokenizers and the model of deploy/fetch-model.sh.

    python3 make_expected.py MODEL.gguf data
"""
import json
import pathlib
import sys

import torch
from gguf import GGUFReader
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

torch.set_grad_enabled(False)

TEXTS = [
    "", " ", "a", "Hello, world!", "  two leading spaces", "trailing spaces   ", "a  b   c    d",
    "tabs\tand\t\ttabs", "lines\nand\n\nlines\n\n\n  indented", "\r\n windows \r\n", "\n \n \n",
    "I'm sure you'll say he'd've done what they're doing; it's 'tis, 'S 'LL",
    "3.14159 2,718 1e-10 0x1F 2024-11-29", "a  1 b 22  333   4444", " 1", "  12", "x1y2z3", "½ Ⅷ ² ٣ 一二三",
    "naïve café Ünïcödé ÅÄÖ åäö ß ﬁ", "日本語のテキスト。 中文，标点！ 한국어", "Привет, мир! Γειά σου Κόσμε",
    "שלום עולם مرحبا بالعالم नमस्ते दुनिया", "👋🏽 family: 👨‍👩‍👧‍👦 flag: 🇩🇪 ❤️", "e\u0301 combining a\u0308\u0323",
    "non\u00a0breaking\u2003em\u3000ideographic\u200bzero-width", "\u2028line\u2029paragraph\u0085next",
    "def f(x: int) -> dict[str, list]:\n    return {\"key\": [x**2, x // 3]}  # done\n",
    "{\"type\": \"function\", \"parameters\": {\"limit\": {\"minimum\": 1, \"maximum\": 100}}}",
    "http://example.com/a?b=c&d=%20#frag", "!!!???...---___***", "$100 €200 £3 ¥4 100% #1 @me",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "supercalifragilisticexpialidocious",
    "\x00\x01\x7f control", "MiXeD CaSe 'quoted' \"double\" `ticks`", "tail'", "''s 's's", "don’t ‘curly’ “quotes”",
    "\ud7ff\ue000\ufffd\U0010ffff", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝟙𝟚𝟛",
]

CHAT = [
    [("user", "What is the capital of France?")],
    [("system", "You are a terse assistant. Answer in one sentence."), ("user", "Why is the sky blue?")],
    [("system", "You convert units."), ("user", "How many feet are in 3 miles?"),
     ("assistant", "There are 15,840 feet in 3 miles."), ("user", "And in 5 miles?")],
]
LONG_TEXT = " ".join(
    f"Record {i}: the {a} {b} was seen near the {c} at {7 * i % 24}:{13 * i % 60:02d}."
    for i, (a, b, c) in enumerate((x, y, z) for x in ("red", "small", "quick", "old") for y in ("fox", "owl", "hare")
                                  for z in ("river", "mill", "bridge")))


def reference_tokenizer(reader):
    """SmolLM's own tokenizer, put together from the file's vocabulary and merges."""
    field = lambda name: reader.fields[f"tokenizer.ggml.{name}"].contents()
    tokens, types, merges = field("tokens"), field("token_type"), field("merges")
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, [tuple(m.split(" ")) for m in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False)
                                  for t, kind in zip(tokens, types) if kind == 3])
    return tokenizer


def chat_text(messages):
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in messages) + "<|im_start|>assistant\n"


def bf16_rows(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **_):
    """Attention over keys and values as the cache keeps them: rounded to bfloat16."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.bfloat16().float().repeat_interleave(group, 1) for x in (key, value))
    past = key.shape[2] - query.shape[2]
    mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(past)
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


def top(logits, count=20):
    values, ids = logits.topk(count)
    return {"ids": ids.tolist(), "logits": [round(v, 5) for v in values.tolist()]}


def main():
    file, out = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    tokenizer = reference_tokenizer(GGUFReader(file))
    plain = [{"text": t, "ids": (ids := tokenizer.encode(t).ids), "decoded": tokenizer.decode(ids)} for t in TEXTS]
    chats = [{"messages": [{"role": r, "content": t} for r, t in m], "ids": tokenizer.encode(chat_text(m)).ids}
             for m in CHAT]
    (out / "expected_tokens.json").write_text(json.dumps({"texts": plain, "chats": chats}, indent=1))

    ALL_ATTENTION_FUNCTIONS.register("bf16_rows", bf16_rows)
    load = lambda attention: AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, attn_implementation=attention).eval()
    exact, rounded = load("eager"), load("bf16_rows")
    prompts = [c["ids"] for c in chats] + [tokenizer.encode(LONG_TEXT).ids]
    cases = []
    for ids in prompts:
        text = torch.tensor([ids])
        answer = rounded.generate(text, attention_mask=torch.ones_like(text), max_new_tokens=24, do_sample=False)
        cases.append({"ids": ids, "bf16": top(rounded(text).logits[0, -1]), "float": top(exact(text).logits[0, -1]),
                      "greedy": answer[0, len(ids):].tolist(), "text": tokenizer.decode(answer[0, len(ids):].tolist())})
        print(len(ids), cases[-1]["text"])
    (out / "expected_logits.json").write_text(json.dumps({"prompts": cases}, indent=1))


if __name__ == "__main__":
    main()
