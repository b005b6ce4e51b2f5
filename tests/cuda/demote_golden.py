# SPDX-License-Identifier: Apache-2.0
"""Computes the golden values of demote_test.cc: the codec and the page format written once more, from their
description alone, in exact rational arithmetic with one rounding an operation. Takes some minutes; names of codecs
as arguments leave the others out.

  python3 tests/cuda/demote_golden.py [kOscarInt2] [kOscarInt2Lm] [kOscarInt2Aware] [kOscarInt2Tilted]
"""
import math
import struct
import sys
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


def metric(i, j):
    return 2 + Fraction(i % 5, 4) if i == j else Fraction((i * j + i + j) % 11 - 5, 64)


def query_mean(i):
    return Fraction(i * 13 % 9 - 4, 16)


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


def sum_over(terms):
    quarters = [Fraction(0)] * 4
    for i in range(0, len(terms), 2):
        quarters[i // 2 % 4] = f32(quarters[i // 2 % 4] + f32(terms[i] + terms[i + 1]))
    return f32(f32(quarters[0] + quarters[1]) + f32(quarters[2] + quarters[3]))


def by_deviation(row, _):
    dim = len(row)
    mean = f32(sum_over(row) / dim)
    row = [f32(x - mean) for x in row]
    squares = sum_over([f32(x * x) for x in row])
    far_square = f32(squares * f32(f32(Fraction(99142, 100000)) / dim))
    outer = [f32(x * x) > far_square for x in row]
    codes = [1 - out if x < 0 else 2 + out for x, out in zip(row, outer)]
    along = sum_over([f32(abs(x) * Fraction(1 + 2 * out, 2)) for x, out in zip(row, outer)])
    scale = f16(f32(squares / along))
    minimum = f16(f32(mean - f32(scale * f32(Fraction(sum(codes), dim)))))
    return minimum, scale, codes


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


def dot(a, b):
    total = Fraction(0)
    for x, y in zip(a, b):
        total = f32(total + x * y)
    return total


def total(a):
    return dot(a, [1] * len(a))


class Readers:
    """The refit of a row x for the queries that attend to it. One float operation a call of f32."""

    ones_m = {}  # By dim: the metric times the row of ones.

    def __init__(self, x):
        dim = len(x)
        columns = [[metric(i, j) for i in range(dim)] for j in range(dim)]
        if dim not in self.ones_m:
            self.ones_m[dim] = [total(column) for column in columns]
        self.x, self.m1, self.mx = x, self.ones_m[dim], [dot(x, column) for column in columns]
        mean = [query_mean(i) for i in range(dim)]
        score = dot(mean, x)
        root = f32(Fraction(math.isqrt(dim << 240), 1 << 120))
        scale = f32(1 / root)
        self.t = [f32(scale * f32(mx - score * m) + m) for mx, m in zip(self.mx, mean)]
        self.ones2, self.x_ones, self.x2 = total(self.m1), dot(x, self.m1), dot(x, self.mx)
        self.t_ones, self.tx = total(self.t), dot(self.t, x)

    def refit(self, e2, found):
        b, a, codes = found
        mul = lambda x, y: f32(x * y)
        error = [f32(x - f32(mul(code, a) + b)) for x, code in zip(self.x, codes)]
        ex, e1, et = dot(error, self.mx), dot(error, self.m1), dot(error, self.t)
        size = f32(f32(self.x2 + mul(b, mul(b, self.ones2))) + e2)
        v2 = f32(size - 2 * f32(f32(mul(b, self.x_ones) + ex) - mul(b, e1)))
        v1 = f32(f32(self.x_ones - mul(b, self.ones2)) - e1)
        ve = f32(f32(ex - mul(b, e1)) - e2)
        vt = f32(f32(self.tx - mul(b, self.t_ones)) - et)
        vv, vo = f32(v2 + mul(vt, vt)), f32(v1 + mul(vt, self.t_ones))
        oo = f32(self.ones2 + mul(self.t_ones, self.t_ones))
        ev, eo = f32(ve + mul(vt, et)), f32(e1 + mul(self.t_ones, et))
        determinant = f32(mul(vv, oo) - mul(vo, vo))
        stretch = f32(f32(mul(ev, oo) - mul(eo, vo)) / determinant)
        share, p, r, scale, minimum = f32(Fraction(1, 1000)), Fraction(0), Fraction(0), a, b
        if v2 > mul(share, size) and determinant > mul(share, mul(vv, oo)) and abs(stretch) < Fraction(1, 2):
            scale = max(f16(f32(a + mul(a, stretch))), Fraction(1, 2**24))
            p = f32(f32(scale - a) / a)
            minimum = f16(f32(b + f32(f32(eo - mul(p, vo)) / oo)))
            r = f32(minimum - b)
        gain = f32(mul(p, ev) + mul(r, eo))
        curve = f32(mul(mul(p, p), vv) + f32(mul(f32(2 * p), mul(r, vo)) + mul(mul(r, r), oo)))
        loss = f32(f32(e2 + mul(et, et)) - f32(2 * gain - curve))
        return loss, (minimum, scale, codes)


def tilted(row):
    readers = Readers(row)
    candidates = (readers.refit(*with_feedback(row, ratio)) for ratio in RATIOS)
    return min(candidates, key=lambda found: found[0])[1]


def demote(key_dim, value_dim, quantise_key, quantise_value):
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
        minimum, scale, codes = quantise_value(row, Fraction(92, 100))
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
    codecs = {"kOscarInt2": (lambda row: nearest(row, Fraction(96, 100)), nearest),
              "kOscarInt2Lm": (lambda row: by_deviation(row, None), by_deviation),
              "kOscarInt2Aware": (aware, nearest), "kOscarInt2Tilted": (tilted, nearest)}
    for name in sys.argv[1:] or codecs:
        for key_dim, value_dim in ((64, 64), (128, 128), (256, 256), (128, 64)):
            block = demote(key_dim, value_dim, *codecs[name])
            head = ", ".join(f"0x{byte:02x}" for byte in block[:8])
            meta = ", ".join(f"0x{byte:02x}" for byte in block[16 * (key_dim + value_dim) :][:8])
            print(f"    {{{key_dim}, {value_dim}, CodecId::{name}, 0x{crc32c(block):08x},")
            print(f"     {{{head}}},\n     {{{meta}}}}},", flush=True)


if __name__ == "__main__":
    main()
