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
    interval: str | None
    paper: str | None
    against: str | None

    @classmethod
    def share(cls, row: Measurement) -> Self:
        share = paper_share(row)
        ends = (share.low, share.high) if share else (row.paper, row.paper)
        return cls(percent(row.value), span(row, tenths), _or_none(percent, row.paper), _against(row, *ends))

    @classmethod
    def plain(cls, row: Measurement) -> Self:
        interval = span(row, number)
        against = _against(row, row.paper, row.paper) if interval else None
        return cls(number(row.value), interval, _or_none(number, row.paper), against)


def _or_none(form: Callable[[float], str], value: float | None) -> str | None:
    return None if value is None else form(value)


def _against(row: Measurement, low: float | None, high: float | None) -> str | None:
    if low is None or high is None or not finite(row.value):
        return None
    ours = ends(row)
    if ours[0] > high + _ROUNDING:
        return "above"
    return "below" if ours[1] < low - _ROUNDING else "meets"


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


def tenths(value: float) -> str:
    """A share in per cent, without the sign."""
    return f"{100 * value:.1f}"


def span(row: Measurement | Figure, form: Callable[[float], str]) -> str | None:
    """An interval, low to high."""
    if row.low is None or row.high is None or not finite(row.low) or not finite(row.high):
        return None
    return f"{form(row.low)}{NONE}{form(row.high)}"


def number(value: Any) -> str:
    """At most four digits that count, thousands set apart."""
    if isinstance(value, bool) or not finite(value):
        return NONE if value is None else str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def duration(seconds: Any) -> str:
    if not finite(seconds):
        return NONE
    if seconds < 60:
        return f"{seconds:.3g}{GAP}s" if seconds < 10 else f"{seconds:.1f}{GAP}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,}{GAP}h {minutes}{GAP}min" if hours else f"{minutes}{GAP}min {rest}{GAP}s"


def beta_words(beta: Any) -> str | None:
    return None if beta is None else f"values within ±{number(beta)}"


def enumeration(words: list[str]) -> str:
    """``a, b and c``."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))
