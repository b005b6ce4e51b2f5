#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes one array of token ids of a NumPy archive as raw little-endian u32, for crumb-example.

    npz_to_tokens.py KEY OUT [TOKENS.npz]

Needs the standard library only: a bare machine has no NumPy.
"""
import array
import ast
import pathlib
import struct
import sys
import zipfile

# Beside the repository, and no part of it.
DEFAULT_TOKENS = pathlib.Path(__file__).resolve().parents[3] / "shared/data/accuracy/tokens_smollm2.npz"
TYPES = {"<i4": "i", "<u4": "I", "<i8": "q", "<u8": "Q"}


def read_npy(data):
    """The elements of a .npy file in order, and its shape."""
    if data[:6] != b"\x93NUMPY":
        raise ValueError("not a .npy file")
    if data[6] == 1:
        length, start = struct.unpack_from("<H", data, 8)[0], 10
    else:
        length, start = struct.unpack_from("<I", data, 8)[0], 12
    header = ast.literal_eval(data[start:start + length].decode("latin-1"))
    if header["descr"] not in TYPES or header["fortran_order"]:
        raise ValueError(f"expected rows of integers, found {header}")
    values = array.array(TYPES[header["descr"]])
    values.frombytes(data[start + length:])
    return values, header["shape"]


def main():
    key, target = sys.argv[1:3]
    source = pathlib.Path(sys.argv[3]) if len(sys.argv) > 3 else DEFAULT_TOKENS
    if not source.exists():
        sys.exit(f"error: no token ids at {source}; name a NumPy archive with the keys calib and eval")
    with zipfile.ZipFile(source) as archive:
        values, shape = read_npy(archive.read(f"{key}.npy"))
    pathlib.Path(target).write_bytes(array.array("I", values).tobytes())
    print(f"{key}: {' x '.join(map(str, shape))} tokens -> {target}")


if __name__ == "__main__":
    main()
