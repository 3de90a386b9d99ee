"""A small line chart as SVG text, for a page that stands alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from experiments.paper.html import text

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 36, 18, 50
LEGEND = HEIGHT - 8
COLOURS = ("#000000", "#0072b2", "#e69f00", "#009e73", "#cc79a7")
DASHES = ("", "6 3", "2 2", "8 3 2 3", "1 3")
"""Lines differ in grey, too."""
TICKS = 5

Points = Sequence[tuple[float, float]]


def line_chart(lines: Mapping[str, Points], x_label: str, y_label: str, title: str) -> str:
    """Named lines over one x axis; the title is for who cannot see it."""
    points = [point for line in lines.values() for point in line]
    x_low, x_high = _ends([x for x, _ in points])
    y_low, y_high = _ends([y for _, y in points])

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)
        down = TOP + (y_high - y) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)
        return round(across, 1), round(down, 1)

    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{text(title)}"'
        ' font-family="system-ui, sans-serif" font-size="12" fill="#1b1f24">'
    ]
    for share in (k / (TICKS - 1) for k in range(TICKS)):
        x, y = x_low + share * (x_high - x_low), y_low + share * (y_high - y_low)
        across, down = place(x, y)
        parts += [
            f'<path d="M{LEFT} {down}H{WIDTH - RIGHT}" stroke="#d0d7de"/>',
            f'<text x="{LEFT - 6}" y="{down + 4}" text-anchor="end">{y:.4f}</text>',
            f'<text x="{across}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{x:,.0f}</text>',
        ]
    for number, (name, line) in enumerate(lines.items()):
        colour, dash = COLOURS[number % len(COLOURS)], DASHES[number % len(DASHES)]
        path = " ".join(f"{x},{y}" for x, y in (place(*point) for point in line))
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"'
            f' stroke-dasharray="{dash}"/>'
        )
        across = LEFT + 12 + 150 * number
        parts += [
            f'<path d="M{across} {LEGEND - 4}h26" stroke="{colour}" stroke-width="2"'
            f' stroke-dasharray="{dash}"/>',
            f'<text x="{across + 32}" y="{LEGEND}">{text(name)}</text>',
        ]
    parts += [
        f'<text x="{WIDTH - RIGHT}" y="{LEGEND}" text-anchor="end">{text(x_label)}</text>',
        f'<text x="{LEFT + 4}" y="{TOP - 3}">{text(y_label)}</text></svg>',
    ]
    return "".join(parts)


def _ends(values: Sequence[float]) -> tuple[float, float]:
    """The range of some values, with room where they are all one."""
    low, high = min(values), max(values)
    if low == high:
        return low - 0.5 * (abs(low) or 1), high + 0.5 * (abs(high) or 1)
    return low, high
