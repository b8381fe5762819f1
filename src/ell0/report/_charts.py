"""Line charts as SVG. Colours, dashes and fonts are the page's: an element says only which series it belongs to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from xml.etree import ElementTree as ET

from markupsafe import Markup

WIDTH, HEIGHT = 360, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 6, 12, 46
_PAD = 14  # between the axes and the outermost values, so that a mark stands clear of them
_GLYPH = 7.6  # width of a digit at the page's 13 units, generously
_SHAPES = ("circle", "square", "diamond", "up", "down")
COLOURS = 6
DASHES = 4


@dataclass(frozen=True)
class Point:
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
    points: Sequence[Point]
    paper: Sequence[Point] = ()


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

    def svg(self, ident: str) -> Markup:
        xs = [p.x for one in self.series for p in (*one.points, *one.paper)]
        ys = [
            v for one in self.series for p in (*one.points, *one.paper) for v in (p.y, p.low, p.high) if v is not None
        ]
        x = _Scale(self.x, xs, _LEFT + _PAD, WIDTH - _RIGHT - _PAD)
        y = _Scale(self.y, ys, HEIGHT - _BOTTOM, _TOP)
        root = ET.Element("svg", viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img")
        root.set("aria-labelledby", f"{ident}-title {ident}-desc")
        ET.SubElement(root, "title", id=f"{ident}-title").text = f"{self.title}, {self.note}"
        ET.SubElement(root, "desc", id=f"{ident}-desc").text = self.description()
        self._axes(root, x, y)
        for at in self.lines:
            _line(root, "refresh", x(at), _TOP, x(at), HEIGHT - _BOTTOM)
        for one in self.series:
            _band(root, one, x, y)
        for one in self.series:
            path = " ".join(f"{x(p.x):.1f},{y(p.y):.1f}" for p in one.points)
            ET.SubElement(root, "polyline", {"class": f"line {classes(one.style)}", "points": path})
        for one in self.series:
            for p in one.paper:
                words = f"{one.name}, the paper, {p.words}"
                mark(root, one.style, x(p.x), y(p.y), 6, "paper").append(_title(words))
            every = max(1, len(one.points) // 8)
            for p in one.points[::every]:
                mark(root, one.style, x(p.x), y(p.y), 3.4).append(_title(f"{one.name}, {p.words}"))
        return Markup(ET.tostring(root, encoding="unicode"))

    def _axes(self, root: ET.Element, x: _Scale, y: _Scale) -> None:
        for value in y.ticks():
            _line(root, "grid", _LEFT, y(value), WIDTH - _RIGHT, y(value))
            _label(root, _LEFT - 7, y(value) + 4.5, "end", f"{value:,.10g}{self.y.unit}")
        _line(root, "axis", _LEFT, HEIGHT - _BOTTOM, WIDTH - _RIGHT, HEIGHT - _BOTTOM)
        for value in x.ticks():
            _line(root, "axis", x(value), HEIGHT - _BOTTOM, x(value), HEIGHT - _BOTTOM + 4)
            _label(root, x(value), HEIGHT - _BOTTOM + 18, "middle", f"{value:,.10g}")
        _label(root, (_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 8, "middle", self.x.label, "name")


def legend_mark(style: int, *, paper: bool = False) -> Markup:
    """A piece of line with its mark, for a legend in the page's text."""
    root = ET.Element("svg", {"viewBox": "0 0 30 14", "class": "key", "aria-hidden": "true"})
    if not paper:
        ET.SubElement(root, "polyline", {"class": f"line {classes(style)}", "points": "1,7 29,7"})
    mark(root, style, 15, 7, 5 if paper else 3.8, "paper" if paper else "")
    return Markup(ET.tostring(root, encoding="unicode"))


def classes(style: int) -> str:
    return f"c{style % COLOURS} d{style % DASHES}"


def mark(root: ET.Element, style: int, x: float, y: float, r: float, kind: str = "") -> ET.Element:
    shape = _SHAPES[style % len(_SHAPES)]
    name = f"mark {classes(style)} {kind}".rstrip()
    if shape == "circle":
        return ET.SubElement(root, "circle", {"class": name, "cx": f"{x:.1f}", "cy": f"{y:.1f}", "r": f"{r:g}"})
    s, t = 0.9 * r, 1.25 * r
    corners = {
        "square": [(-s, -s), (s, -s), (s, s), (-s, s)],
        "diamond": [(0, -t), (t, 0), (0, t), (-t, 0)],
        "up": [(0, -t), (t, s), (-t, s)],
        "down": [(0, t), (t, -s), (-t, -s)],
    }[shape]
    points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners)
    return ET.SubElement(root, "polygon", {"class": name, "points": points})


def _band(root: ET.Element, one: Series, x: _Scale, y: _Scale) -> None:
    known = [p for p in one.points if p.low is not None and p.high is not None]
    if len(known) < 2:
        for p in known:
            _line(root, f"whisker {classes(one.style)}", x(p.x), y(p.low or 0.0), x(p.x), y(p.high or 0.0))
        return
    way = [(p.x, p.high) for p in known] + [(p.x, p.low) for p in reversed(known)]
    points = " ".join(f"{x(a):.1f},{y(b or 0.0):.1f}" for a, b in way)
    ET.SubElement(root, "polygon", {"class": f"band {classes(one.style)}", "points": points})


def _line(root: ET.Element, kind: str, x1: float, y1: float, x2: float, y2: float) -> None:
    ends = {"x1": f"{x1:.1f}", "y1": f"{y1:.1f}", "x2": f"{x2:.1f}", "y2": f"{y2:.1f}"}
    ET.SubElement(root, "line", {"class": kind, **ends})


def _label(root: ET.Element, x: float, y: float, anchor: str, text: str, kind: str = "tick") -> None:
    place = {"x": f"{x:.1f}", "y": f"{y:.1f}", "text-anchor": anchor, "class": kind}
    ET.SubElement(root, "text", place).text = text


def _title(words: str) -> ET.Element:
    title = ET.Element("title")
    title.text = words
    return title


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
