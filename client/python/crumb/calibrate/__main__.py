# SPDX-License-Identifier: Apache-2.0
"""The command line: python -m crumb.calibrate collect."""
from __future__ import annotations

import argparse
import sys

from crumb import _commandline as commandline


def _collect(options: argparse.Namespace) -> int:
    from crumb import _texts
    from crumb.calibrate.collector import SHORTEST_TEXT, collect
    model = commandline.load_model(options)
    texts = _texts.read(options.text, tokenizer=model.tokenizer(), vocabulary=model.vocabulary,
                        text_tokens=options.text_tokens, least_tokens=SHORTEST_TEXT, limit=options.tokens, key=options.key,
                        default_key=options.default_key)
    a = model.attention_of
    skipped = model.model.config.num_hidden_layers - a.num_layers
    print(f"{model.name}: {a.num_layers} layers with attention{f' ({skipped} without)' if skipped > 0 else ''}, "
          f"{a.num_query_heads} query heads on {a.num_kv_heads} KV heads, head_dim {a.key_dim} of K and {a.value_dim} of V"
          + (f"; sliding windows of {', '.join(map(str, sorted({w for w in a.windows if w})))} tokens in "
             f"{sum(map(bool, a.windows))} layers" if any(a.windows) else ""), file=sys.stderr)
    done = collect(model, texts, options.out, restart=options.restart)
    s = done.statistics
    if s.num_tokens < s.key_dim * 64:
        print(f"warning: {s.num_tokens} tokens are few for head_dim {s.key_dim}; some 30,000 are usual", file=sys.stderr)
    before = f" ({done.num_texts_before} texts were there already)" if done.num_texts_before else ""
    print(f"{options.out}: statistics of {s.num_texts} texts, {s.num_tokens} tokens{before}; "
          f"{done.tokens_per_second:.0f} tokens/s")
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m crumb.calibrate", description="Statistics of your own model, for "
                                     "`crumb-calibrate fit`.")
    commands = parser.add_subparsers(dest="command", required=True)
    collect = commands.add_parser(
        "collect", help="run a model over texts and write the statistics of its attention",
        description="Runs a model over texts and writes the statistics of its attention. Memory does not grow with the "
        "texts. A run that was broken off goes on when it is started again.")
    commandline.add_model(collect)
    commandline.add_texts(collect, default_key="calib")
    collect.add_argument("--tokens", type=commandline.positive, default=32768, metavar="N",
                         help="tokens in all (%(default)s)")
    collect.add_argument("--out", required=True, help="the statistics file")
    collect.add_argument("--restart", action="store_true", help="leave what an earlier run has done")
    collect.set_defaults(run=_collect)
    return commandline.run(parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
