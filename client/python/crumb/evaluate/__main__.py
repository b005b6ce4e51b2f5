# SPDX-License-Identifier: Apache-2.0
"""The command line: python -m crumb.evaluate."""
from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from crumb import _commandline as commandline
from crumb._files import write_atomically

if TYPE_CHECKING:
    from crumb.evaluate import Score


def _caches(options: argparse.Namespace, model: Any) -> dict[str, Any]:
    """Name -> handler, of every profile in every recent window."""
    from crumb import profile as profiles
    from crumb.evaluate.two_bit import TwoBitAttention
    caches: dict[str, Any] = {}
    a = model.attention_of
    for path in options.profile:
        profile = profiles.load(path)
        profiles.check(profile, num_layers=a.num_layers, num_kv_heads=a.num_kv_heads, key_dim=a.key_dim,
                       value_dim=a.value_dim)
        for recent in options.recent or [profile.recent_tokens]:
            cache = TwoBitAttention(profile, recent=recent, threads=options.threads)
            name = f"{profile.codec}, recent {recent}"
            caches[name if name not in caches else f"{name}, {os.path.basename(path)}"] = cache
    return caches


def _run(options: argparse.Namespace) -> int:
    from crumb import _texts
    from crumb.evaluate import evaluate, passkey
    model = commandline.load_model(options)
    caches = _caches(options, model)
    tokenizer = model.tokenizer()
    texts = _texts.read(options.text, tokenizer=tokenizer, vocabulary=model.vocabulary, text_tokens=options.text_tokens,
                        least_tokens=options.scored_from + 2, key=options.key, default_key=options.default_key)
    texts = texts[:options.texts] if options.texts else texts
    report: dict[str, Any] = {
        "model": model.name, "scored_from": options.scored_from,
        "profiles": {name: {"id": cache.profile.id, "sink": cache.sink, "recent": cache.recent}
                     for name, cache in caches.items()},
        "text_ids": [hashlib.sha256(text.astype("<i8").tobytes()).hexdigest() for text in texts], "finished": False}
    before = {} if options.restart else _unfinished(options.json, report)
    done = len(before["bf16"].texts) if before else 0
    if done:
        print(f"{options.json}: {done} of {len(texts)} texts were there already", file=sys.stderr)

    def write(scores: dict[str, Any]) -> None:
        report["caches"] = {name: score.as_dict(scores["bf16"]) for name, score in scores.items()}
        _write(options.json, report)
    write(evaluate(model, texts[done:], caches, scored_from=options.scored_from, after_text=write, before=before))
    _print_scores(report["caches"])
    if options.passkey and tokenizer is None:
        print("passkey: not asked, there is no tokenizer beside the model")
    elif options.passkey:
        found = passkey(model, tokenizer, caches, tokens=options.passkey)
        report["passkey"] = {name: [{"depth": d.depth, "found": d.found, "tries": d.tries} for d in depths]
                             for name, depths in found.items()}
        _print_passkey(options.passkey, found)
    report["finished"] = True
    _write(options.json, report)
    return 0


def _unfinished(path: str | None, report: dict[str, Any]) -> dict[str, Score]:
    """The scores of texts that a run which was broken off has left at `path`; none unless it was of the same work."""
    from crumb.evaluate import Score
    if path is None or not os.path.exists(path):
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            left = json.load(file)
        if left["finished"] or any(left[key] != report[key] for key in ("model", "scored_from", "profiles", "text_ids")):
            return {}
        return {name: Score.from_dict(saved) for name, saved in left["caches"].items()}
    except (ValueError, KeyError, TypeError):  # Another program's file: it is replaced, as ever.
        return {}


def _write(path: str | None, report: dict[str, Any]) -> None:
    """Whole or not at all, after each text: what hours have measured is not lost by the next minute."""
    if path is not None:
        write_atomically(path, json.dumps(report, indent=1) + "\n")


def _print_scores(caches: dict[str, Any]) -> None:
    width = max(map(len, caches))
    print(f"{'cache':{width}}  perplexity      gap   mean KL  top-1 as BF16")
    for name, s in caches.items():
        print(f"{name:{width}}  {s['perplexity']:10.4f} {s['gap_percent']:+7.2f} %  {s['kl']:8.5f}  {100 * s['top1_agreement']:11.2f} %")


def _print_passkey(tokens: int, found: dict[str, Any]) -> None:
    if not any(depth.found for depth in found["bf16"]):
        print(f"passkey of {tokens} tokens: the model does not find it in BF16 either, so it says nothing")
        return
    print(f"passkey of {tokens} tokens, found at depth")
    for name, depths in found.items():
        print(f"  {name}: " + ", ".join(f"{d.depth:.1f}: {d.found}/{d.tries}" for d in depths))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m crumb.evaluate", description="What two bits cost your model: perplexity, mean divergence of the next "
        "token's distribution and agreement of its likeliest token with BF16, by codec and window. The codec is the one "
        "that serves: history is demoted page by page, and attention reads the pages.")
    commandline.add_model(parser)
    parser.add_argument("--profile", required=True, nargs="+", metavar="FILE", help="profiles of this model")
    commandline.add_texts(parser, default_key="eval")
    parser.add_argument("--texts", type=commandline.positive, metavar="N", help="the first N texts only")
    parser.add_argument("--recent", type=int, nargs="+", metavar="TOKENS",
                        help="recent windows in BF16 to try (the profile's); multiples of 64")
    parser.add_argument("--scored-from", type=commandline.positive, default=1024, metavar="POSITION",
                        help="score predictions from here on, where there is history (%(default)s)")
    parser.add_argument("--passkey", type=int, default=0, metavar="TOKENS",
                        help="also hide a number in prompts of this many tokens and ask for it (0: do not)")
    parser.add_argument("--json", metavar="FILE", help="also write all figures here, after each text; a run that was broken "
                        "off goes on from there when it is started again")
    parser.add_argument("--restart", action="store_true", help="leave what a run that was broken off has done")
    parser.set_defaults(run=_run)
    return commandline.run(parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
