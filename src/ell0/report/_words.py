"""Figures as words: shares with their intervals, times, names."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from ..evaluation import Share
from ..results import Measurement

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
        paper, share = row.get("paper"), paper_share(row)
        low, high = (share.low, share.high) if share else (paper, paper)
        return cls(
            percent(row.get("value")),
            span(row, tenths),
            None if paper is None else percent(paper),
            _against(row, low, high),
        )

    @classmethod
    def plain(cls, row: Measurement) -> Self:
        paper = row.get("paper")
        interval = span(row, number)
        return cls(
            number(row.get("value")),
            interval,
            None if paper is None else number(paper),
            _against(row, paper, paper) if interval else None,
        )


def paper_share(row: Measurement) -> Share | None:
    """The paper's figure with the interval that it would have; None where its n is not even inferred."""
    paper, n = row.get("paper"), row.get("paper_n")
    known = isinstance(paper, int | float) and 0 <= paper <= 1 and isinstance(n, int) and n > 0
    return Share(round(row["paper"] * row["paper_n"]), row["paper_n"]) if known else None


def _against(row: Measurement, low: float | None, high: float | None) -> str | None:
    if low is None or high is None or not finite(row.get("value")):
        return None
    ours = ends(row)
    if ours[0] > high + _ROUNDING:
        return "above"
    return "below" if ours[1] < low - _ROUNDING else "meets"


def ends(row: Measurement) -> tuple[float, float]:
    """From where to where a figure's interval goes; without one it is the figure."""
    low, high = (row[key] if finite(row.get(key)) else row["value"] for key in ("low", "high"))
    return low, high


def finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def percent(value: Any) -> str:
    return f"{100 * value:.1f}{GAP}%" if finite(value) else NONE


def tenths(value: float) -> str:
    """A share in per cent, without the sign."""
    return f"{100 * value:.1f}"


def span(row: Mapping[str, Any], form: Callable[[float], str]) -> str | None:
    """The interval of a row, low to high."""
    if not finite(row.get("low")) or not finite(row.get("high")):
        return None
    return f"{form(row['low'])}{NONE}{form(row['high'])}"


def number(value: Any) -> str:
    """At most four digits that count, thousands set apart."""
    if isinstance(value, bool) or not finite(value):
        return NONE if value is None else str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def whole(value: Any) -> str | None:
    return f"{value:,}" if isinstance(value, int) else None


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


def series(words: list[str]) -> str:
    """``a, b and c``."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))
