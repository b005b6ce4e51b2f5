# SPDX-License-Identifier: Apache-2.0
"""Plain text tables."""


def render(rows, header=None, align=""):
    """Rows of strings as aligned lines. `align` has one letter a column: l (default) or r."""
    every = ([header] if header else []) + rows
    widths = [max(len(row[i]) for row in every) for i in range(len(every[0]))]

    def line(row):
        cells = (cell.rjust(width) if align[i:i + 1] == "r" else cell.ljust(width)
                 for i, (cell, width) in enumerate(zip(row, widths)))
        return "  ".join(cells).rstrip()

    lines = [line(row) for row in rows]
    if header:
        lines[:0] = [line(header), "  ".join("-" * width for width in widths)]
    return "\n".join(lines)


def number(value):
    """Three significant digits and no exponent: what a reader compares at a glance."""
    if value is None:
        return ""
    if value == 0:
        return "0"
    size = abs(value)
    for scale, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if size >= scale:
            return number(value / scale) + suffix
    if size >= 100:
        return f"{value:,.0f}"
    decimals = 1 if size >= 10 else 2 if size >= 1 else 3
    return f"{value:.{decimals}f}"
