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

    def svg(self, ident: str) -> Markup:
        points = [p for one in self.series for p in (*one.points, *one.paper)]
        x = _Scale(self.x, [p.x for p in points], _LEFT + _PAD, WIDTH - _RIGHT - _PAD)
        heights = [v for p in points for v in (p.y, p.low, p.high) if v is not None]
        y = _Scale(self.y, heights, HEIGHT - _BOTTOM, _TOP)
        root = ET.Element("svg", {"viewBox": f"0 0 {WIDTH} {HEIGHT}", "role": "img"})
        root.set("aria-labelledby", f"{ident}-title {ident}-desc")
        _add(root, "title", f"{self.title}, {self.note}", id=f"{ident}-title")
        _add(root, "desc", self.description(), id=f"{ident}-desc")
        self._axes(root, x, y)
        for at in self.lines:
            _line(root, "refresh", x(at), _TOP, x(at), HEIGHT - _BOTTOM)
        for one in self.series:
            _band(root, one, x, y)
        for one in self.series:
            way = " ".join(f"{x(p.x):.1f},{y(p.y):.1f}" for p in one.points)
            _add(root, "polyline", kind=f"line {classes(one.style)}", points=way)
        for one in self.series:
            for p in one.paper:
                _add(_mark(root, one.style, x(p.x), y(p.y), 6, "paper"), "title", f"{one.name}, the paper, {p.words}")
            for p in one.points[:: max(1, len(one.points) // 8)]:
                _add(_mark(root, one.style, x(p.x), y(p.y), 3.4), "title", f"{one.name}, {p.words}")
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
        _add(root, "polyline", kind=f"line {classes(style)}", points="1,7 29,7")
    _mark(root, style, 15, 7, 5 if paper else 3.8, "paper" if paper else "")
    return Markup(ET.tostring(root, encoding="unicode"))


def classes(style: int) -> str:
    return f"c{style % COLOURS} d{style % DASHES}"


def _add(parent: ET.Element, tag: str, text: str | None = None, **attributes: float | str) -> ET.Element:
    """A new element in another. kind: its class."""
    words = {key: value if isinstance(value, str) else f"{value:.1f}" for key, value in attributes.items()}
    element = ET.SubElement(parent, tag, {("class" if key == "kind" else key): value for key, value in words.items()})
    element.text = text
    return element


def _mark(root: ET.Element, style: int, x: float, y: float, r: float, kind: str = "") -> ET.Element:
    shape = _SHAPES[style % len(_SHAPES)]
    name = f"mark {classes(style)} {kind}".rstrip()
    if shape == "circle":
        return _add(root, "circle", kind=name, cx=x, cy=y, r=r)
    s, t = 0.9 * r, 1.25 * r
    corners = {
        "square": [(-s, -s), (s, -s), (s, s), (-s, s)],
        "diamond": [(0, -t), (t, 0), (0, t), (-t, 0)],
        "up": [(0, -t), (t, s), (-t, s)],
        "down": [(0, t), (t, -s), (-t, -s)],
    }[shape]
    return _add(root, "polygon", kind=name, points=" ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners))


def _band(root: ET.Element, one: Series, x: _Scale, y: _Scale) -> None:
    known = [(x(p.x), y(p.low), y(p.high)) for p in one.points if p.low is not None and p.high is not None]
    if len(known) == 1:
        ((at, low, high),) = known
        _line(root, f"whisker {classes(one.style)}", at, low, at, high)
    elif known:
        way = [(at, high) for at, _, high in known] + [(at, low) for at, low, _ in reversed(known)]
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in way)
        _add(root, "polygon", kind=f"band {classes(one.style)}", points=points)


def _line(root: ET.Element, kind: str, x1: float, y1: float, x2: float, y2: float) -> None:
    _add(root, "line", kind=kind, x1=x1, y1=y1, x2=x2, y2=y2)


def _label(root: ET.Element, x: float, y: float, anchor: str, text: str, kind: str = "tick") -> None:
    _add(root, "text", text, x=x, y=y, kind=kind).set("text-anchor", anchor)


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
