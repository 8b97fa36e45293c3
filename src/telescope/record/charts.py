"""Draws a line chart with intervals as SVG, without a plotting library."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

COLORS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
WIDTH, HEIGHT = 640, 360  # pixels
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 36, 44
NUM_TICKS = 5


@dataclass(frozen=True, slots=True)
class Point:
    """A value at x, with the bounds of its interval if it has one."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


def line_chart(series: Mapping[str, Sequence[Point]], *, title: str) -> str:
    """Returns an SVG image with one line per series, over training steps. Raises ValueError without points."""
    points = [point for line in series.values() for point in line]
    if not points:
        raise ValueError("a chart needs points")
    xs = [point.x for point in points]
    ys = [value for point in points for value in (point.y, point.low, point.high) if value is not None]
    x_of = _scale(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    margin = (max(ys) - min(ys)) * 0.05 or abs(max(ys)) * 0.1 or 1.0
    y_low, y_high = min(ys) - margin, max(ys) + margin
    y_of = _scale(y_low, y_high, HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14" font-weight="bold">{escape(title)}</text>',
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">training step</text>',
    ]
    for tick in range(NUM_TICKS):
        value = y_low + (y_high - y_low) * tick / (NUM_TICKS - 1)
        y = y_of(value)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#e5e7eb"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    known = sorted(set(xs))
    every = -(-len(known) // 8)
    for x in [*known[:-1:every], known[-1]]:  # at most eight
        parts.append(f'<text x="{x_of(x):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{x:g}</text>')
    for number, (name, line) in enumerate(series.items()):
        color = COLORS[number % len(COLORS)]
        places = [(x_of(p.x), y_of(p.y)) for p in sorted(line, key=lambda p: p.x)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        for point in line:
            x = x_of(point.x)
            if point.low is not None and point.high is not None:
                parts.append(f'<path d="M{x:.1f} {y_of(point.low):.1f}V{y_of(point.high):.1f}" stroke="{color}"/>')
            parts.append(f'<circle cx="{x:.1f}" cy="{y_of(point.y):.1f}" r="3" fill="{color}"/>')
        y = TOP + 14 * number
        parts.append(f'<text x="{WIDTH - RIGHT}" y="{y}" text-anchor="end" fill="{color}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    span = high - low
    return lambda value: (start + end) / 2 if span == 0 else start + (value - low) / span * (end - start)
