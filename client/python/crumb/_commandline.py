# SPDX-License-Identifier: Apache-2.0
"""What the package's commands have in common: options, and errors as one line."""
from __future__ import annotations

import argparse
import sys
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from crumb._model import Model


def positive(text: str) -> int:
    value = int(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="a Hugging Face model folder, or a .gguf file")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"],
                        help="what the model computes in (%(default)s)")
    parser.add_argument("--device", default="cpu", help="where the model runs (%(default)s)")
    parser.add_argument("--threads", type=positive, help="of the CPU (all)")


def add_texts(parser: argparse.ArgumentParser, default_key: str) -> None:
    parser.add_argument("--text", required=True, nargs="+", metavar="FILE",
                        help="UTF-8 text, or token ids: .npz, .npy, or .u32 (raw little-endian)")
    parser.add_argument("--key", default=None, help=f"the array of an .npz to read (\"{default_key}\" where there is one)")
    parser.add_argument("--text-tokens", type=positive, default=4096, metavar="N",
                        help="tokens a text at most; longer ones are cut (%(default)s)")
    parser.set_defaults(default_key=default_key)


def load_model(options: argparse.Namespace) -> "Model":
    from crumb._model import Model, quiet_loading
    import torch
    if options.threads:
        torch.set_num_threads(options.threads)
    with quiet_loading():
        return Model(options.model, dtype=options.dtype, device=options.device)


def run(parser: argparse.ArgumentParser, arguments: list[str] | None) -> int:
    """Parse and run; errors of the user's input and of the system are a line on stderr and status 1."""
    options = parser.parse_args(arguments)
    warnings.showwarning = lambda message, *_, **__: print(f"warning: {message}", file=sys.stderr)
    try:
        return int(options.run(options))
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("broken off; start it again to go on", file=sys.stderr)
        return 130
