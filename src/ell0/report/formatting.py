"""Figures as text: shares with their intervals, numbers, times."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from ..results import Figure, Measurement, Share

NONE = "\N{EN DASH}"
INFERRED = 512
"""Rows that the paper's robust accuracies seem to be over: it does not say, but they are multiples of 1/512."""
_ROUNDING = 1e-12  # of an end that is 0 or 1, in results files from elsewhere
GAP = "\u00a0"  # between a figure and its unit no line ends


@dataclass(frozen=True)
class Cell:
    """A figure as it stands in a table: the value, its interval, and the paper's beside it.

    against: how the two intervals lie: ``"meets"``, ``"above"`` or ``"below"`` the paper's; None without one.
    """

    value: str
    interval: str | None = None
    paper: str | None = None
    against: str | None = None

    @classmethod
    def share(cls, row: Measurement) -> Self:
        paper = None if row.paper is None else percent(row.paper)
        return cls(percent(row.value), span(row, tenths), paper, _against(row, paper_share(row)))

    @classmethod
    def plain(cls, row: Measurement) -> Self:
        paper, interval = None if row.paper is None else number(row.paper), span(row, number)
        return cls(number(row.value), interval, paper, _against(row, None) if interval else None)


def _against(row: Measurement, paper: Share | None) -> str | None:
    if row.paper is None or not finite(row.value):
        return None
    low, high = ends(row)
    if low > (paper.high if paper else row.paper) + _ROUNDING:
        return "above"
    return "below" if high < (paper.low if paper else row.paper) - _ROUNDING else "meets"


def paper_share(row: Measurement) -> Share | None:
    """The paper's figure with the interval that it would have; None where its n is not even inferred."""
    if row.paper is None or not 0 <= row.paper <= 1 or not row.paper_n:
        return None
    return Share(round(row.paper * row.paper_n), row.paper_n)


def ends(row: Measurement) -> tuple[float, float]:
    """The ends of a figure's interval; the figure, if it has none."""
    return row.value if row.low is None else row.low, row.value if row.high is None else row.high


def finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def percent(value: Any) -> str:
    return f"{100 * value:.1f}{GAP}%" if finite(value) else NONE


def tenths(value: Any) -> str:
    """A share in per cent, without the sign."""
    return f"{100 * value:.1f}"


def span(row: Measurement | Figure, form: Callable[[Any], str]) -> str | None:
    """An interval, low to high."""
    return f"{form(row.low)}{NONE}{form(row.high)}" if finite(row.low) and finite(row.high) else None


def number(value: Any) -> str:
    """At most four digits that count, thousands set apart."""
    if isinstance(value, bool) or not finite(value):
        return NONE if value is None else str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def several(count: Any, units: str) -> str:
    """``1 pixel``, ``3 pixels``.  units: the word for several."""
    return f"{number(count)} {units.replace('ies', 'ys')[:-1] if count == 1 else units}"


def duration(seconds: Any) -> str:
    if not finite(seconds):
        return NONE
    if seconds < 60:
        return f"{seconds:.3g}{GAP}s" if seconds < 10 else f"{seconds:.1f}{GAP}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,}{GAP}h {minutes}{GAP}min" if hours else f"{minutes}{GAP}min {rest}{GAP}s"


def figure_words(row: Measurement) -> str:
    interval = span(row, tenths)
    return percent(row.value) + (f" ({interval})" if interval else "")
