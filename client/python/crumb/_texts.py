# SPDX-License-Identifier: Apache-2.0
"""Texts as token ids: UTF-8 files through a model's tokenizer, or ids as they are."""
from __future__ import annotations

import pathlib
import warnings
from typing import Any, Sequence

import numpy as np

# More characters a token than any tokenizer makes of running text; bounds what is read of a file.
_CHARACTERS_A_TOKEN = 32


def read(paths: Sequence[str], *, tokenizer: Any, vocabulary: int, text_tokens: int, least_tokens: int,
         limit: int | None = None, key: str | None = None, default_key: str | None = None) -> list[np.ndarray]:
    """Texts of `text_tokens` ids each (int64), at most `limit` tokens in all, in the files' order.

    paths: ``.npz`` (array `key`, or `default_key` if it has that; a text a row), ``.npy``, ``.u32`` (raw little-endian ids, one text after the
        other), and anything else is UTF-8 text for `tokenizer`, which is cut into texts; each begins with
        the tokenizer's first token where it has one. A last part of fewer than `least_tokens` is dropped.

    Files that give no text of `least_tokens` are left out with a warning. ValueError names the file: none gives
    one, an id beyond the vocabulary, no tokenizer for UTF-8 text, a limit below one text.
    """
    texts: list[np.ndarray] = []
    short: list[str] = []
    left = limit if limit is not None else np.iinfo(np.int64).max
    if left < least_tokens:
        raise ValueError(f"{left} tokens are asked for; a text needs at least {least_tokens}, "
                         "or none of its queries has two-bit history")
    for name in paths:
        if left < least_tokens:
            break
        path = pathlib.Path(name)
        found = _of_file(path, tokenizer, text_tokens, left, key, default_key)
        kept = 0
        for text in found:
            text = text[:left]
            if len(text) < least_tokens:
                continue
            _check(path, text, vocabulary)
            texts.append(text)
            left -= len(text)
            kept += 1
        if kept == 0:
            short.append(f"{path}: the longest text has {max(map(len, found), default=0)} tokens")
    if not texts:
        raise ValueError(f"{short[0]}; at least {least_tokens} are needed, more than the windows that stay in "
                         "bfloat16: give a longer file, or join several")
    if short:
        warnings.warn(f"{len(short)} of {len(paths)} files are left out, they are shorter than {least_tokens} tokens; "
                      f"the first is {short[0]}", stacklevel=2)
    return texts


def _check(path: pathlib.Path, text: np.ndarray, vocabulary: int) -> None:
    low, high = text.min(), text.max()
    if low < 0 or high >= vocabulary:
        raise ValueError(f"{path}: token id {low if low < 0 else high} is beyond the model's vocabulary of "
                         f"{vocabulary} tokens: ids of another tokenizer?")


def _of_file(path: pathlib.Path, tokenizer: Any, text_tokens: int, left: int, key: str | None,
             default_key: str | None) -> list[np.ndarray]:
    if path.suffix == ".u32":
        if path.stat().st_size % 4:
            raise ValueError(f"{path}: {path.stat().st_size} bytes are no whole number of ids of 4 bytes")
        return _cut(np.fromfile(path, dtype="<u4").astype(np.int64), text_tokens, None)
    if path.suffix == ".npy":
        return _rows(path, np.load(path, allow_pickle=False), text_tokens)
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as archive:
            names = list(archive)
            if key is None:
                key = default_key if default_key in names else names[0] if len(names) == 1 else None
            if key not in names:
                raise ValueError(f"{path}: " + (f"no array '{key}'" if key else "several arrays")
                                 + f"; it has {', '.join(names)}: choose by --key")
            return _rows(path, archive[key], text_tokens)
    if tokenizer is None:
        raise ValueError(f"{path}: text needs the model's tokenizer and there is none beside the model; "
                         "give token ids (.npz, .npy or .u32)")
    with open(path, encoding="utf-8") as file:
        try:
            text = file.read(min(left, 1 << 40) * _CHARACTERS_A_TOKEN)
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8 at byte {error.start}; give plain text, or token ids as "
                             ".npz, .npy or .u32") from error
    ids = np.asarray(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=np.int64)
    return _cut(ids, text_tokens, first_token(tokenizer))


def first_token(tokenizer: Any) -> int | None:
    """What the tokenizer puts before a text; None: nothing."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    ids = tokenizer("a")["input_ids"]
    return int(ids[0]) if len(ids) > len(plain) and ids[0] != plain[0] else None


def _cut(ids: np.ndarray, text_tokens: int, first: int | None) -> list[np.ndarray]:
    step = text_tokens - (first is not None)
    parts = [ids[at:at + step] for at in range(0, len(ids), step)]
    return parts if first is None else [np.concatenate([[first], part]) for part in parts]


def _rows(path: pathlib.Path, array: np.ndarray, text_tokens: int) -> list[np.ndarray]:
    if array.ndim not in (1, 2) or array.dtype.kind not in "iu":
        raise ValueError(f"{path}: an array of {array.dtype} with the shape {list(array.shape)}; integers [texts, tokens] "
                         "are expected")
    return [part for row in np.atleast_2d(array) for part in _cut(row.astype(np.int64), text_tokens, None)]
