#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes unicode_table.inc: the ranges of letters and numbers, from Python's own Unicode data.

    python3 unicode_table.py > unicode_table.inc
"""
import sys
import unicodedata


def ranges():
    """(first, last, class) of each run of letters (L) or numbers (N)."""
    start, kind = 0, None
    for point in range(sys.maxunicode + 2):
        category = unicodedata.category(chr(point))[0] if point <= sys.maxunicode else None
        category = category if category in ("L", "N") else None
        if category != kind:
            if kind:
                yield start, point - 1, kind
            start, kind = point, category


def main():
    print("// SPDX-License-Identifier: Apache-2.0")
    print(f"// Unicode {unicodedata.unidata_version}; made by unicode_table.py.")
    print("// clang-format off")
    entries = [f"{{{first:#x},{last:#x},{kind}}}" for first, last, kind in ranges()]
    line = ""
    for entry in entries:
        if len(line) + len(entry) + 1 > 100:
            print(line)
            line = ""
        line += entry + ","
    print(line)


if __name__ == "__main__":
    main()
