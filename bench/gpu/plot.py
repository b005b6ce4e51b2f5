#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Time of decode attention over context length: ours, cuDNN over BF16 and what the bytes allow, as one small SVG.

    plot.py --out FILE.svg LINES...        LINES: of decode_gpu_bench and rivals.py, or a result file of run.sh
"""
import argparse
import json
import math
import pathlib

WIDTH, HEIGHT = 430, 330  # Of a panel.
LEFT, RIGHT, TOP, BOTTOM = 62, 22, 34, 44
SERIES = (("Crumb, INT2", "#0b7285", ""), ("cuDNN, BF16", "#c92a2a", ""), ("INT2 bytes at copy speed", "#868e96", "5 4"))


def read_figures(paths):
    for path in paths:
        text = pathlib.Path(path).read_text()
        if path.endswith(".json"):
            result = json.loads(text)
            yield {"op": "copy", "gb_per_s": result["machine"]["copy_gb_per_s"]}
            yield from result["figures"]
            continue
        for line in text.splitlines():
            if line.startswith("{"):
                yield json.loads(line)


def curves(figures, sequences, copy):
    """[ours, rival, roofline], each a list of (context, microseconds)."""
    of_batch = sorted((figure for figure in figures
                       if figure["op"] == "decode_context" and figure["sequences"] == sequences),
                      key=lambda figure: figure["context"])
    ours = [figure for figure in of_batch if not figure.get("rival")]
    rival = [figure for figure in of_batch if figure.get("rival")]
    return ([(figure["context"], figure["ms"] * 1e3) for figure in ours],
            [(figure["context"], figure["ms"] * 1e3) for figure in rival],
            [(figure["context"], figure["bytes"] / copy / 1e3) for figure in ours])


class Axes:
    """Logarithmic both ways; powers of two across, of ten up."""

    def __init__(self, lines, x):
        points = [point for line in lines for point in line]
        self.x = x
        self.contexts = sorted({context for context, _ in points})
        self.low = math.floor(math.log10(min(time for _, time in points)))
        self.high = math.ceil(math.log10(max(time for _, time in points)))

    def place(self, context, time):
        across = math.log2(context / self.contexts[0]) / max(1, math.log2(self.contexts[-1] / self.contexts[0]))
        up = (math.log10(time) - self.low) / (self.high - self.low)
        return (self.x + LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM))

    def draw(self, title):
        left, right = self.x + LEFT, self.x + WIDTH - RIGHT
        yield f'<text x="{(left + right) / 2:.0f}" y="20" text-anchor="middle" font-weight="bold">{title}</text>'
        for power in range(self.low, self.high + 1):
            _, y = self.place(self.contexts[0], 10.0 ** power)
            yield f'<path d="M{left} {y:.1f}H{right}" stroke="#dee2e6"/>'
            yield f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0 ** power:g}</text>'
        for context in self.contexts:
            x, y = self.place(context, 10.0 ** self.low)
            yield f'<text x="{x:.1f}" y="{y + 16:.1f}" text-anchor="middle">{context // 1024}K</text>'
        yield f'<text x="{(left + right) / 2:.0f}" y="{HEIGHT - 8}" text-anchor="middle">tokens of context</text>'
        yield (f'<text transform="translate({self.x + 14} {HEIGHT / 2:.0f}) rotate(-90)" text-anchor="middle">'
               "µs a layer</text>")


def panel(figures, sequences, copy, x):
    lines = curves(figures, sequences, copy)
    axes = Axes(lines, x)
    yield from axes.draw(f"batch of {sequences}")
    for line, (_, colour, dashes) in zip(lines, SERIES):
        if not line:
            continue
        path = "L".join(f"{a:.1f} {b:.1f}" for a, b in (axes.place(*point) for point in line))
        yield f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"/>'
    for i, (name, colour, dashes) in enumerate(SERIES):
        y = TOP + 14 + 16 * i
        yield (f'<path d="M{x + LEFT + 10} {y - 4}h22" stroke="{colour}" stroke-width="2" '
               f'stroke-dasharray="{dashes}"/>')
        yield f'<text x="{x + LEFT + 38}" y="{y}">{name}</text>'


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("lines", nargs="+")
    arguments = parser.parse_args()
    figures = list(read_figures(arguments.lines))
    copy = next(figure["gb_per_s"] for figure in figures if figure["op"] == "copy")
    batches = sorted({figure["sequences"] for figure in figures if figure["op"] == "decode_context"})
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH * len(batches)}" height="{HEIGHT}" '
             'font-family="sans-serif" font-size="12">', '<rect width="100%" height="100%" fill="white"/>']
    for i, sequences in enumerate(batches):
        parts += panel(figures, sequences, copy, i * WIDTH)
    pathlib.Path(arguments.out).write_text("\n".join(parts + ["</svg>", ""]))


if __name__ == "__main__":
    main()
