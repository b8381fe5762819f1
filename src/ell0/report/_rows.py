"""Rows of results: who was measured, with what, and which of them say the same."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

from ..results import Row
from ._words import beta_words, number, percent, span, tenths

Key = TypeVar("Key", bound=Hashable)

FIGURE = ("what", "value", "low", "high", "n", "paper", "paper_n", "seconds", "certified", "forwards", "confidence")
_SETTING = (
    "classifier",
    "k",
    "adversarial",
    "attack",
    "budget",
    "queries",
    "steps",
    "beta",
    "protocol",
    "unit",
    "flags",
)


def is_worst(row: Row) -> bool:
    return row.get("attack") == "worst case"


def who(row: Row) -> str:
    return str(row.get("classifier", "The classifier"))


def attack_of(row: Row) -> str:
    return str(row.get("attack", "one attack"))


def figure_words(row: Row) -> str:
    interval = span(row, tenths)
    return percent(row.get("value")) + (f" ({interval})" if interval else "")


def effort_of(row: Row) -> str:
    words = [f"{number(row[key])} {key}" for key in ("queries", "steps") if row.get(key) is not None]
    return ", ".join(words) or "robust accuracy"


def spent_on(row: Row) -> tuple[float, float]:
    return row.get("queries") or 0, row.get("steps") or 0


def attack_words(row: Row) -> str:
    """An attack with all that it was given, its queries or steps aside."""
    given = {key: row[key] for key in row if key not in (*FIGURE, *_SETTING) and not key.startswith("decided by ")}
    more = [f"{key} = {number(value)}" for key, value in given.items()]
    unit = "unit pixel" if row.get("unit") == "pixel" else None
    protocol = "paper protocol" if row.get("protocol") == "paper" else row.get("protocol")
    return ", ".join(filter(None, [attack_of(row), *more, unit, beta_words(row.get("beta")), protocol]))


def grouped(rows: Iterable[Row], key: Callable[[Row], Key]) -> list[tuple[Key, list[Row]]]:
    """The rows by their key, in the order of its first appearance."""
    groups: dict[Key, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return list(groups.items())


def least_of(rows: Iterable[Row], *keys: str) -> list[Row]:
    """One row for each classifier and budget, and value of these keys: the lowest, as nothing may break a robust row.

    It speaks of the widest box, which holds the points of the others.
    """
    groups = grouped(rows, lambda row: tuple(row.get(key) for key in ("classifier", "budget", *keys)))
    least = []
    for _, some in groups:
        widest = sorted(some, key=lambda row: -(row.get("beta") or 0))
        least.append({**min(widest, key=lambda row: row["value"]), "beta": widest[0].get("beta")})
    return least
