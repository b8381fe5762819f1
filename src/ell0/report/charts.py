"""Line charts: where everything stands. The page draws them, in its colours, dashes and fonts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

LEFT, RIGHT, TOP, BOTTOM = 52, 354, 12, 214  # the axes, in a drawing of 360 by 260
_PAD = 14  # between the axes and the outermost values, so that a mark stands clear of them
_GLYPH = 7.6  # width of a digit at the page's 13 units, generously
_SHAPES = ("circle", "square", "diamond", "up", "down")
COLOURS = 6
DASHES = 4


@dataclass(frozen=True)
class ChartPoint:
    x: float
    y: float
    low: float | None = None
    high: float | None = None
    words: str = ""


@dataclass(frozen=True)
class Series:
    """One line. style: picks colour, shape and dash, so that any two of them differ in more than colour."""

    name: str
    style: int
    points: Sequence[ChartPoint]
    paper: Sequence[ChartPoint] = ()


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
    series: Sequence[Series]
    lines: Sequence[float] = ()

    @property
    def has_paper(self) -> bool:
        return any(one.paper for one in self.series)

    @property
    def has_bands(self) -> bool:
        return any(point.low is not None for one in self.series for point in one.points)

    def description(self) -> str:
        """The lines in words, for who does not see them."""
        parts = [f"{self.y.label} over {self.x.label}"]
        for one in self.series:
            ends = [one.points[0], one.points[-1]] if len(one.points) > 12 else one.points
            parts.append(f"{one.name}: " + ", ".join(point.words for point in ends))
            if one.paper:
                parts.append(f"{one.name} in the paper: " + ", ".join(point.words for point in one.paper))
        return "; ".join(parts) + "."

    def drawing(self) -> dict[str, Any]:
        """What the template draws, in units of the drawing: ticks with labels, lines, bands, marks with titles."""
        points = [p for one in self.series for p in (*one.points, *one.paper)]
        x = _Scale(self.x, [p.x for p in points], LEFT + _PAD, RIGHT - _PAD)
        y = _Scale(self.y, [v for p in points for v in (p.y, p.low, p.high) if v is not None], BOTTOM, TOP)
        bands, lines, marks = [], [], []
        for one in self.series:
            style, known = classes(one.style), [p for p in one.points if p.low is not None and p.high is not None]
            ends = [(p.x, p.high) for p in known] + [(p.x, p.low) for p in reversed(known)]
            way = [f"{x(at):.1f},{y(end):.1f}" for at, end in ends if end is not None]
            bands += [(f"{'band' if len(known) > 1 else 'whisker'} {style}", " ".join(way))] if known else []
            lines.append((style, " ".join(f"{x(p.x):.1f},{y(p.y):.1f}" for p in one.points)))
            for p in one.paper:
                marks.append(
                    (f"{style} paper", mark(one.style, x(p.x), y(p.y), 6), f"{one.name}, the paper, {p.words}")
                )
            for p in one.points[:: max(1, len(one.points) // 8)]:
                marks.append((style, mark(one.style, x(p.x), y(p.y), 3.4), f"{one.name}, {p.words}"))
        return {
            "rows": [(y(value), f"{value:,.10g}{self.y.unit}") for value in y.ticks()],
            "columns": [(x(value), f"{value:,.10g}") for value in x.ticks()],
            "refreshes": [x(at) for at in self.lines],
            "bands": bands,
            "lines": lines,
            "marks": marks,
        }


def classes(style: int) -> str:
    return f"c{style % COLOURS} d{style % DASHES}"


def mark(style: int, x: float, y: float, r: float) -> str:
    """The outline of a mark, as a path."""
    s, t = 0.9 * r, 1.25 * r
    corners = {
        "square": [(-s, -s), (s, -s), (s, s), (-s, s)],
        "diamond": [(0, -t), (t, 0), (0, t), (-t, 0)],
        "up": [(0, -t), (t, s), (-t, s)],
        "down": [(0, t), (t, -s), (-t, -s)],
    }.get(_SHAPES[style % len(_SHAPES)])
    if corners is None:
        return f"M{x - r:.1f},{y:.1f}a{r:g},{r:g} 0 1,0 {2 * r:g},0a{r:g},{r:g} 0 1,0 {-2 * r:g},0z"
    return "M" + "L".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners) + "z"


class _Scale:
    """Maps values of an axis to units of the drawing."""

    def __init__(self, axis: Axis, values: Sequence[float], start: float, end: float) -> None:
        self._axis, self._values, self._start, self._end = axis, sorted(set(values)), start, end
        low, high = axis.ends or (self._values[0], self._values[-1])
        if axis.kind == "linear" and not axis.ends:
            step = _step(low, high)
            low, high = math.floor(low / step) * step, math.ceil(high / step) * step
        self._low, self._high = self._turn(low), self._turn(high)
        if self._low == self._high:
            self._low, self._high = self._low - 0.5, self._high + 0.5

    def __call__(self, value: float) -> float:
        share = (self._turn(value) - self._low) / (self._high - self._low)
        return self._start + share * (self._end - self._start)

    def _turn(self, value: float) -> float:
        return math.log10(value) if "log" in self._axis.kind else value

    def ticks(self) -> list[float]:
        """Values with a label: as many as have room, the ends first."""
        if "values" in self._axis.kind:
            wanted = self._values
        elif self._axis.kind == "log":
            decades = range(math.floor(self._low), math.ceil(self._high) + 1)
            wanted = [round(m * 10.0**d, 12) for d in decades for m in (1, 3)]
        else:
            step = _step(self._low, self._high)
            first, last = math.ceil(self._low / step - 1e-9), math.floor(self._high / step + 1e-9)
            wanted = [round(i * step, 12) for i in range(first, last + 1)]
        inside = [v for v in wanted if self._low - 1e-9 <= self._turn(v) <= self._high + 1e-9]
        kept: list[float] = []
        for value in [*inside[:1], *inside[-1:], *inside[1:-1]]:
            if all(abs(self(value) - self(other)) >= self._room(value, other) for other in kept):
                kept.append(value)
        return sorted(kept)

    def _room(self, a: float, b: float) -> float:
        upright = self._start > self._end
        return 20 if upright else _GLYPH * (len(f"{a:,.10g}") + len(f"{b:,.10g}")) / 2 + 8


def _step(low: float, high: float) -> float:
    """A round step that makes about five of the way."""
    raw = (high - low) / 5 or 1.0
    power = 10.0 ** math.floor(math.log10(raw))
    return next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * (1 - 1e-9))
