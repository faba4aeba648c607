"""Line charts as SVG text."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 420, 280
LEFT, RIGHT, TOP, BOTTOM = 64, 14, 34, 46
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22")

Points = list[tuple[float, float]]


@dataclass
class Chart:
    """Lines by name; ``log_x`` has an axis of powers of two that is marked at the points themselves."""

    title: str
    x_label: str
    y_label: str
    lines: dict[str, Points]
    log_x: bool = False
    marks: bool = False
    from_zero: bool = False


def svg(charts: list[Chart], columns: int = 2) -> str:
    """The charts side by side, row by row. A chart without points has axes alone."""
    rows = math.ceil(len(charts) / columns)
    size = f'width="{WIDTH * columns}" height="{HEIGHT * rows}"'
    drawn = [_chart(chart, index % columns * WIDTH, index // columns * HEIGHT) for index, chart in enumerate(charts)]
    style = "font-family='sans-serif' font-size='11'"
    return f"<svg xmlns='http://www.w3.org/2000/svg' {size} {style}>\n<rect {size} fill='white'/>\n{''.join(drawn)}</svg>\n"


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About ``count`` round numbers that reach from below ``low`` to above ``high``."""
    span = (high - low) or abs(high) or 1.0
    step = 10.0 ** math.floor(math.log10(span / count))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= count)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [index * step for index in range(first, max(last, first + 1) + 1)]


def _chart(chart: Chart, left: float, top: float) -> str:
    points = [point for line in chart.lines.values() for point in line] or [(1.0, 0.0)]
    x_ticks = sorted({x for x, _ in points}) if chart.log_x else ticks(*_range(x for x, _ in points))
    y_ticks = ticks(*_range([y for _, y in points] + [0.0] * chart.from_zero))
    scale = math.log2 if chart.log_x else float
    x_low, x_high = scale(x_ticks[0]), scale(x_ticks[-1])

    def place(x: float, y: float) -> tuple[float, float]:
        across = (scale(x) - x_low) / ((x_high - x_low) or 1)
        up = (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return left + LEFT + across * (WIDTH - LEFT - RIGHT), top + HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    drawn = [_text(left + WIDTH / 2, top + 16, chart.title, "middle")]
    drawn.append(_text(left + WIDTH / 2, top + HEIGHT - 8, chart.x_label, "middle"))
    drawn.append(_text(left + 8, top + TOP - 8, chart.y_label, "start"))
    for x in x_ticks:
        drawn.append(_text(place(x, y_ticks[0])[0], top + HEIGHT - BOTTOM + 16, f"{x:g}", "middle"))
    for y in y_ticks:
        (x_start, height), (x_end, _) = place(x_ticks[0], y), place(x_ticks[-1], y)
        x_end = max(x_end, left + WIDTH - RIGHT)
        drawn.append(f"<path d='M{x_start:.1f} {height:.1f}H{x_end:.1f}' stroke='#ddd'/>\n")
        drawn.append(_text(left + LEFT - 6, height + 4, f"{y:g}" if abs(y) < 1e5 else f"{y / 1e3:g}k", "end"))
    for index, (name, line) in enumerate(chart.lines.items()):
        colour, places = COLOURS[index % len(COLOURS)], [place(*point) for point in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        drawn.append(f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='1.5'/>\n")
        drawn += [f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3' fill='{colour}'/>\n" for x, y in places if chart.marks]
        if len(chart.lines) > 1:
            drawn.append(_text(left + WIDTH - RIGHT, top + TOP + 12 + 14 * index, name, "end", colour))
    return "".join(drawn)


def _range(values: Iterable[float]) -> tuple[float, float]:
    values = list(values)
    return min(values), max(values)


def _text(x: float, y: float, text: str, anchor: str, colour: str = "#333") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' fill='{colour}'>{escape(text)}</text>\n"
