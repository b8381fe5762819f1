"""Which measurement is which: classifier, attack and effort; groups, and the lowest of a group."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from typing import TypeVar

from ..results import Measurement
from .formatting import number

Key = TypeVar("Key", bound=Hashable)
Rows = list[Measurement]

_SETTING = ("classifier", "k", "adversarial", "attack", "budget", "queries", "steps", "beta", "box", "protocol", "unit")


def within(row: Measurement) -> str | None:
    """The box of a row, in words. A named or written ``box`` is made ``beta`` times as wide."""
    beta, box = row.get("beta"), row.get("box")
    if beta is None or box is None:
        return f"within {box}" if box else None if beta is None else f"within ±{number(beta)}"
    box = "the normalised range" if box == "normalised" else box
    return f"within {box}" if beta == 1 and box.startswith("[") else f"within {number(beta)} times {box}"


def beta_words(row: Measurement) -> str | None:
    return f"values {within(row)}" if within(row) else None


def who(row: Measurement) -> str:
    return str(row.get("classifier", "The classifier"))


def attack_of(row: Measurement) -> str:
    return str(row.get("attack", "one attack"))


def effort_of(row: Measurement) -> str:
    words = [f"{number(row[key])} {key}" for key in ("queries", "steps") if row.get(key) is not None]
    return ", ".join(words) or "robust accuracy"


def spent_on(row: Measurement) -> tuple[float, float]:
    return row.get("queries") or 0, row.get("steps") or 0


def box_of(row: Measurement) -> float:
    return float(row.get("beta") or 0)


def attack_words(row: Measurement) -> str:
    """An attack with its parameters, except queries and steps."""
    more = [f"{key} = {number(value)}" for key, value in row.identity.items() if key not in _SETTING]
    protocol = "paper protocol" if row.get("protocol") == "paper" else row.get("protocol")
    return ", ".join(filter(None, [attack_of(row), *more, beta_words(row), protocol]))


def grouped(rows: Iterable[Measurement], key: Callable[[Measurement], Key]) -> list[tuple[Key, Rows]]:
    """The rows by their key, in the order of its first appearance."""
    groups: dict[Key, Rows] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return list(groups.items())


def least_of(rows: Iterable[Measurement], *keys: str) -> Rows:
    """The lowest row for each classifier, budget and value of these keys, as a robust row withstands everything.

    Its beta becomes that of the widest box, which holds the points of the others.
    """
    least = []
    for _, some in grouped(rows, lambda row: tuple(row.get(key) for key in ("classifier", "budget", *keys))):
        widest = sorted(some, key=box_of, reverse=True)
        lowest = min(widest, key=lambda row: row.value)
        least.append(replace(lowest, identity={**lowest.identity, "beta": widest[0].get("beta")}))
    return least
