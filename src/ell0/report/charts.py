"""Line charts as SVG: charts.py says where everything stands, chart.svg.jinja draws it, page.css gives it colours."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

WIDTH, HEIGHT = 360, 260  # of the drawing
LEFT, RIGHT, TOP, BOTTOM = 52, 354, 28, 214  # the axes in it
COLOURS, DASHES = 6, 4
_PAD = 14  # between the axes and the outermost values, so that a mark stands clear of them
_GLYPH = 7.6  # width of a digit at the page's 13 units, generously
# Circle, square, diamond and triangles: where the corners are, in radii.
_SHAPES: tuple[list[tuple[float, float]], ...] = (
    [],
    [(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)],
    [(0, -1.25), (1.25, 0), (0, 1.25), (-1.25, 0)],
    [(0, -1.25), (1.25, 0.9), (-1.25, 0.9)],
    [(0, 1.25), (1.25, -0.9), (-1.25, -0.9)],
)

TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
)


@dataclass(frozen=True)
class ChartPoint:
    x: float
    y: float
    low: float | None = None
    high: float | None = None
    words: str = ""


@dataclass(frozen=True)
class Series:
    """One line. style: picks colour, shape and dash, so that any two of them differ in more than colour.

    published: figures of others, hollow marks without a line.
    """

    name: str
    style: int
    points: list[ChartPoint]
    paper: Sequence[ChartPoint] = ()
    published: bool = False


@dataclass(frozen=True)
class Axis:
    """kind: ``"linear"`` with round ticks, ``"values"`` or ``"log values"`` with a tick at each given value, ``"log"``.

    ends: from where to where, else as far as the data goes.  unit: behind each tick.
    """

    label: str
    kind: Literal["linear", "values", "log values", "log"] = "linear"
    ends: tuple[float, float] | None = None
    unit: str = ""


@dataclass(frozen=True)
class Chart:
    """note: what the lines were measured with.  lines: where on x a vertical line stands."""

    title: str
    note: str
    x: Axis
    y: Axis
    series: list[Series]
    lines: Sequence[float] = ()

    def drawing(self) -> dict[str, Any]:
        """What the template draws, in units of the drawing: ticks with labels, lines, bands, marks with titles."""
        points = [p for one in self.series for p in (*one.points, *one.paper)]
        x, columns = _scale(self.x, [p.x for p in points], LEFT + _PAD, RIGHT - _PAD)
        heights = [v for p in points for v in (p.y, p.low, p.high) if v is not None]
        y, rows = _scale(self.y, heights, BOTTOM, TOP)

        def way(places: Sequence[tuple[float, float | None]]) -> str:
            return " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in places if value is not None)

        bands, lines, marks = [], [], []
        for one in self.series:
            style = classes(one.style)
            bands.append(
                (style, way([*((p.x, p.high) for p in one.points), *((p.x, p.low) for p in one.points[::-1])]))
            )
            lines += [] if one.published else [(style, way([(p.x, p.y) for p in one.points]))]
            for p in one.paper:
                title = f"{one.name}, the paper, {p.words}"
                marks.append((f"{style} paper", mark(one.style, x(p.x), y(p.y), 6), title))
            hollow = " paper" if one.published else ""
            for p in one.points[:: max(1, len(one.points) // 8)]:
                path = mark(one.style, x(p.x), y(p.y), 6 if hollow else 3.4)
                marks.append((style + hollow, path, f"{one.name}, {p.words}"))
        return {
            "rows": [(y(value), f"{value:,.10g}{self.y.unit}") for value in rows],
            "columns": [(x(value), f"{value:,.10g}") for value in columns],
            "refreshes": [x(at) for at in self.lines],
            "bands": [band for band in bands if band[1]],
            "lines": lines,
            "marks": marks,
        }

    def svg(self, name: str) -> Markup:
        """The drawing. name: begins the ids of its title and description, so it occurs once in a page."""
        axes = {"LEFT": LEFT, "RIGHT": RIGHT, "TOP": TOP, "BOTTOM": BOTTOM, "WIDTH": WIDTH, "HEIGHT": HEIGHT}
        template = TEMPLATES.get_template("chart.svg.jinja")
        return Markup(template.render(axes, chart=self, name=name, **self.drawing()))


def legend_mark(style: int, hollow: bool = False) -> Markup:
    """A line with its mark, or the hollow mark of figures of others."""
    line = "" if hollow else f'<polyline class="line {classes(style)}" points="1,7 29,7"/>'
    path = f'<path class="mark {classes(style)}{" paper" * hollow}" d="{mark(style, 15, 7, 5 if hollow else 3.8)}"/>'
    return Markup(f'<svg viewBox="0 0 30 14" class="key" aria-hidden="true">{line}{path}</svg>')


def classes(style: int) -> str:
    return f"c{style % COLOURS} d{style % DASHES}"


def mark(style: int, x: float, y: float, r: float) -> str:
    """The outline of a mark, as a path."""
    corners = _SHAPES[style % len(_SHAPES)]
    if not corners:
        return f"M{x - r:.1f},{y:.1f}a{r:g},{r:g} 0 1,0 {2 * r:g},0a{r:g},{r:g} 0 1,0 {-2 * r:g},0z"
    return "M" + "L".join(f"{x + r * dx:.1f},{y + r * dy:.1f}" for dx, dy in corners) + "z"


def _scale(axis: Axis, given: list[float], start: float, end: float) -> tuple[Callable[[float], float], list[float]]:
    """Where a value stands, and the values with a label: as many as have room, the ends first."""
    turn: Callable[[float], float] = math.log10 if "log" in axis.kind else float
    values = sorted(set(given))
    low, high = axis.ends or (values[0], values[-1])
    if axis.kind == "linear" and not axis.ends:
        step = _step(low, high)
        low, high = math.floor(low / step) * step, math.ceil(high / step) * step
    low, high = turn(low), turn(high)
    if low == high:
        low, high = low - max(0.5, abs(low) / 2), high + max(0.5, abs(high) / 2)

    def place(value: float) -> float:
        return start + (turn(value) - low) / (high - low) * (end - start)

    def room(value: float) -> float:
        return 10 if start > end else _GLYPH * len(f"{value:,.10g}") / 2 + 4

    if axis.kind == "log":
        values = [round(m * 10.0**d, 12) for d in range(math.floor(low), math.ceil(high) + 1) for m in (1, 3)]
    elif axis.kind == "linear":
        step = _step(low, high)
        values = [round(i * step, 12) for i in range(math.floor(low / step), math.ceil(high / step) + 1)]
    inside = [value for value in values if low - 1e-9 <= turn(value) <= high + 1e-9]
    kept: list[float] = []
    for value in [*inside[:1], *inside[-1:], *inside[1:-1]]:
        if all(abs(place(value) - place(other)) >= room(value) + room(other) for other in kept):
            kept.append(value)
    return place, sorted(kept)


def _step(low: float, high: float) -> float:
    """A round step that makes about five of the way."""
    raw = (high - low) / 5 or 1.0
    power = 10.0 ** math.floor(math.log10(raw))
    return next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * (1 - 1e-9))
