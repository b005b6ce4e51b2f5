# SPDX-License-Identifier: Apache-2.0
"""Figures as a picture: one bar a figure, as a share of its limit. SVG, nothing to load."""
import html

ROW, BAR, TOP, BOTTOM = 22, 12, 64, 34
LABEL_WIDTH, PLOT_WIDTH, NOTE_WIDTH = 360, 420, 420
FULL_SCALE = 1.5  # Shares beyond are cut off, and say so.
REACHED, MISSED, PLAIN = "#2a7f62", "#c0553a", "#5b7fa6"


def draw(figures, caption):
    """The SVG text of the figures that have a limit."""
    shown = [figure for figure in figures if figure.ratio is not None]
    width = LABEL_WIDTH + PLOT_WIDTH + NOTE_WIDTH
    height = TOP + ROW * len(shown) + BOTTOM
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _text(12, 22, "Share of the limit (1.0: as fast as the limit; right is better)", size=15),
        _text(12, 42, caption, fill="#555555", size=11),
    ]
    body += _axis(height)
    for index, figure in enumerate(shown):
        body += _bar(figure, TOP + ROW * index)
    return "\n".join(body + ["</svg>", ""])


def _x(share):
    return LABEL_WIDTH + PLOT_WIDTH * min(share, FULL_SCALE) / FULL_SCALE


def _axis(height):
    for share in (0, 0.25, 0.5, 0.75, 1.0, 1.25):
        strong = share == 1.0
        yield (f'<line x1="{_x(share):.1f}" x2="{_x(share):.1f}" y1="{TOP - 6}" '
               f'y2="{height - BOTTOM + 4}" stroke="{"#222222" if strong else "#dddddd"}"/>')
        yield _text(_x(share), height - BOTTOM + 18, f"{share:g}", anchor="middle", size=11)


def _bar(figure, y):
    colour = {True: REACHED, False: MISSED, None: PLAIN}[figure.meets_target]
    middle = y + ROW / 2 + 4
    yield _text(LABEL_WIDTH - 8, middle, figure.name, anchor="end")
    yield (f'<rect x="{LABEL_WIDTH}" y="{y + (ROW - BAR) / 2}" height="{BAR}" '
           f'width="{_x(figure.ratio) - LABEL_WIDTH:.1f}" fill="{colour}"/>')
    if figure.target and figure.limit:
        share = (figure.target / figure.limit if figure.better == "higher"
                 else figure.limit / figure.target)
        if share <= FULL_SCALE:
            yield (f'<line x1="{_x(share):.1f}" x2="{_x(share):.1f}" y1="{y + 2}" '
                   f'y2="{y + ROW - 2}" stroke="#222222" stroke-width="2" stroke-dasharray="3 2"/>')
    cut = " (cut off)" if figure.ratio > FULL_SCALE else ""
    note = (f"{figure.ratio:.2f}{cut}: {figure.value:.4g} of {figure.limit:.4g} {figure.unit}, "
            f"{figure.limit_name}")
    yield _text(LABEL_WIDTH + PLOT_WIDTH + 8, middle, note[:72], fill="#333333", size=11)


def _text(x, y, text, anchor="start", fill="#111111", size=12):
    return (f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}" '
            f'font-size="{size}">{html.escape(text)}</text>')
