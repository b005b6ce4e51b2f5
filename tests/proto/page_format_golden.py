#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints the golden bytes of page_format_test.cc, packed word by word from docs/design/page_format.md.

Written apart from proto/page/page_format.h and the other way round: that header asks where an element
lies, this asks what lies in each field of each word.
"""
import struct

TOKENS = 64


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def key_code(token, channel):
    return (token * 5 + channel * 3 + (token * channel) // 7) % 4


def value_code(token, channel):
    return (token * 3 + channel * 5 + (token * channel) // 11 + 1) % 4


def pack_words(words_of_lane, code_of_field):
    """Words of each lane in vectors of four; code_of_field(word, g, t, byte, field)."""
    out = bytearray()
    for vector in range(words_of_lane // 4):
        for lane in range(32):
            for word in range(4 * vector, 4 * vector + 4):
                value = 0
                for byte in range(4):
                    for field in range(4):
                        code = code_of_field(word, lane // 4, lane % 4, byte, field)
                        value |= code << (8 * byte + 2 * field)
                out += struct.pack("<I", value)
    return bytes(out)


def pack_meta(pair_of_token):
    pairs = [0] * TOKENS
    for tile in range(4):
        for half in range(2):
            for g in range(8):
                pairs[g * 8 + half * 4 + tile] = pair_of_token(16 * tile + 8 * half + g)
    return b"".join(struct.pack("<I", pair) for pair in pairs)


def pack_block(key_dim, value_dim):
    steps = key_dim // 32

    def key_field(word, g, t, byte, field):
        tile, step = divmod(word, steps)
        token = 16 * tile + g + (8 if field in (1, 3) else 0)
        channel = 32 * step + 4 * t + byte + (16 if field >= 2 else 0)
        return key_code(token, channel)

    def value_field(word, g, t, byte, field):
        tile, kk = divmod(word, 2)
        channel = 16 * tile + g + (8 if field in (1, 3) else 0)
        token = 16 * byte + 8 * kk + (4 if field >= 2 else 0) + t
        return value_code(token, channel)

    return (pack_words(4 * steps, key_field) + pack_words(value_dim // 8, value_field) +
            pack_meta(lambda token: 0x3C000000 + token) +
            pack_meta(lambda token: 0xBC000000 + token))


def main():
    for key_dim, value_dim in ((32, 32), (64, 64), (128, 128), (256, 256), (128, 64), (64, 128)):
        block = pack_block(key_dim, value_dim)
        values = TOKENS * key_dim // 4
        print(f'{{{key_dim}, {value_dim}, {len(block)}, 0x{crc32c(block):08x}, '
              f'"{block[:16].hex()}", "{block[values:values + 16].hex()}"}},')


if __name__ == "__main__":
    main()
