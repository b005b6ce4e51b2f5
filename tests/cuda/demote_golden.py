# SPDX-License-Identifier: Apache-2.0
"""Computes the golden values of demote_test.cc: the codec and the page format written once more, from their
description alone, in exact rational arithmetic with one rounding an operation. Takes some minutes.

  python3 tests/cuda/demote_golden.py
"""
import struct
from fractions import Fraction

PAGE_TOKENS = 64
RATIOS = (None, Fraction(98, 100), Fraction(95, 100), Fraction(90, 100))


def round_binary(x, precision, min_exponent):
    """Nearest number of `precision` significant bits, ties to even; steps never below 2^min_exponent."""
    if x == 0:
        return Fraction(0)
    exponent = abs(x.numerator).bit_length() - x.denominator.bit_length()
    if abs(x) < Fraction(2) ** exponent:
        exponent -= 1
    step = Fraction(2) ** max(exponent - precision + 1, min_exponent)
    return round(x / step) * step  # Fraction.__round__ goes to even.


def f32(x):
    return round_binary(x, 24, -149)


def f16(x):
    return max(Fraction(-65504), min(Fraction(65504), round_binary(x, 11, -24)))


def half_bytes(x):
    return struct.pack("<e", float(x))


def row_value(token, channel, salt):
    """Exact in bfloat16: an integer of eight bits over 64."""
    return Fraction((token * 7919 + channel * 104729 + token * channel * 31 + salt) % 509 - 254, 64)


def feedback(i, j):
    return 1 + Fraction(i % 7, 8) if i == j else Fraction((i * 31 + j * 17) % 13 - 6, 64)


def tau(row, ratio):
    order = sorted(abs(x) for x in row)
    return f16(order[min(int(ratio * len(row)), len(row) - 1)])


def levels(low, high):
    minimum = f16(low)
    return minimum, max(f16(f32(f32(high - minimum) / 3)), Fraction(1, 2**24))


def code_of(x, minimum, scale):
    return max(0, min(3, f32(f32(f32(x - minimum) / scale) + Fraction(1, 2)).__floor__()))


def nearest(row, ratio):
    cut = tau(row, ratio)
    row = [max(-cut, min(cut, x)) for x in row]
    minimum, scale = levels(min(row), max(row))
    return minimum, scale, [code_of(x, minimum, scale) for x in row]


def with_feedback(row, ratio):
    low, high = min(row), max(row)
    if ratio:
        cut = tau(row, ratio)
        low, high = max(low, -cut), min(high, cut)
    minimum, scale = levels(low, high)
    row, loss, codes = list(row), Fraction(0), []
    for i, _ in enumerate(row):
        code = code_of(row[i], minimum, scale)
        error = f32(f32(row[i] - f32(code * scale + minimum)) / feedback(i, i))
        codes.append(code)
        loss = f32(loss + error * error)
        for j in range(i + 1, len(row)):
            row[j] = f32(row[j] - error * feedback(i, j))
    return loss, (minimum, scale, codes)


def aware(row):
    return min((with_feedback(row, ratio) for ratio in RATIOS), key=lambda found: found[0])[1]


def demote(key_dim, value_dim, quantise_key):
    keys, values = bytearray(16 * key_dim), bytearray(16 * value_dim)
    key_meta, value_meta = bytearray(256), bytearray(256)
    for token in range(PAGE_TOKENS):
        tile, half, g = token // 16, token % 16 // 8, token % 8
        at = 4 * (8 * g + 4 * half + tile)
        minimum, scale, codes = quantise_key([row_value(token, c, 0) for c in range(key_dim)])
        key_meta[at : at + 4] = half_bytes(scale) + half_bytes(minimum)
        for channel, code in enumerate(codes):
            t, j = channel % 16 // 4, channel % 4
            word, lane = tile * (key_dim // 32) + channel // 32, 4 * g + t
            shift = 2 * half + 4 * (channel % 32 // 16)
            keys[(word // 4 * 32 + lane) * 16 + word % 4 * 4 + j] |= code << shift
        row = [row_value(token, c, 71) for c in range(value_dim)]
        minimum, scale, codes = nearest(row, Fraction(92, 100))
        value_meta[at : at + 4] = half_bytes(scale) + half_bytes(minimum)
        for channel, code in enumerate(codes):
            word, lane = channel // 16 * 2 + half, 4 * (channel % 8) + token % 4
            shift = 2 * (channel % 16 // 8) + 4 * (token % 8 // 4)
            values[(word // 4 * 32 + lane) * 16 + word % 4 * 4 + token // 16] |= code << shift
    return bytes(keys + values + key_meta + value_meta)


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def main():
    codecs = (("kOscarInt2", lambda row: nearest(row, Fraction(96, 100))), ("kOscarInt2Aware", aware))
    for name, quantise in codecs:
        for key_dim, value_dim in ((64, 64), (128, 128), (256, 256), (128, 64)):
            block = demote(key_dim, value_dim, quantise)
            head = ", ".join(f"0x{byte:02x}" for byte in block[:8])
            meta = ", ".join(f"0x{byte:02x}" for byte in block[16 * (key_dim + value_dim) :][:8])
            print(f"    {{{key_dim}, {value_dim}, CodecId::{name}, 0x{crc32c(block):08x},")
            print(f"     {{{head}}},\n     {{{meta}}}}},", flush=True)


if __name__ == "__main__":
    main()
