"""Sections of a run's page beside its accuracies: what is proven, and what was counted in other units."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..results import Measurement
from ._charts import Axis, Chart, Point, Series
from ._rows import Rows, attack_words, figure_words, grouped, is_worst, who
from ._words import NONE, Cell, beta_words, finite, number, percent, series

_ANY = "any value"


@dataclass(frozen=True)
class Table:
    head: tuple[str, ...]
    lines: tuple[tuple[str | Cell, ...], ...]


@dataclass(frozen=True)
class Part:
    """A section of a page beside the accuracies of networks: words, then charts, then a table."""

    heading: str
    words: str
    charts: tuple[Chart, ...] = ()
    table: Table | None = None
    caption: str = ""


def certified_part(certified: Rows, radii: Rows, worst: Rows, units: str) -> Part:
    """The sandwich: certified <= true <= attacked.

    certified: rows of certified accuracy.  radii: of the median radius.  worst: of the worst case of all attacks.
    """
    words = f"Certified: no attacker who changes so many {units} changes the answer. "
    if any(row.beside.get("forwards") is None for row in certified):
        words += (
            "That is proven, in one pass through the network, so the true robust accuracy lies between what is "
            "certified and what still stands under attack. "
        )
    votes = {who(row): number(row.beside["forwards"]) for row in certified if row.beside.get("forwards") is not None}
    if votes:
        each = series([f"{name} in {forwards} forwards" for name, forwards in votes.items()])
        words += f"By a vote, proven unless a confidence is named, which holds for each row by itself: {each}. "
    medians = [f"{who(row)} {_median(row, units)}" for row in radii if finite(row.get("value"))]
    if medians:
        words += f"The median certified radius, a misclassified row counted as -1: {series(medians)}."
    lines = []
    for row in certified:
        attacked = _attacked(row, worst)
        share = None if attacked is None else attacked.certified
        gap = NONE if attacked is None or share is None else percent(attacked["value"] - share)
        lines.append(
            (
                who(row),
                number(row.get("budget")),
                _terms(row, units),
                Cell.share(row),
                NONE if attacked is None else Cell.share(attacked),
                gap,
            )
        )
    head = ("classifier", f"{units} changed", "values", "certified", "stands under attack", "neither proven nor broken")
    return Part(
        "Proven and broken",
        words.rstrip(),
        tuple(_sandwich(certified, worst, units)),
        Table(head, tuple(lines)),
        "Certified accuracy, the worst case of all attacks, and the share of the attacked rows in between",
    )


def other_units_part(rows: Rows, unit: str) -> Part:
    """Figures that were counted in another unit than the rest."""
    head = ("classifier", f"{unit}s changed", "attack", "robust accuracy", "n")
    lines = [
        (
            who(row),
            number(row.get("budget")),
            f"worst case, {beta_words(row.get('beta'))}" if is_worst(row) else attack_words(row),
            Cell.share(row),
            number(row.get("n")),
        )
        for row in rows
    ]
    words = f"Here a change counts by the {unit}, with all its channels."
    return Part(f"Counted in {unit}s", words, (), Table(head, tuple(lines)), f"Robust accuracy by {unit}s changed")


def _terms(row: Measurement, units: str) -> str:
    """What a certificate is about, beside its budget."""
    pixels = row.get("unit") == "pixel" and units != "pixels"
    method = None if row.get("method", "best") == "best" else f"by {row['method']}"
    sure = None if row.beside.get("confidence") is None else f"with {percent(row.beside['confidence'])} confidence"
    words = [beta_words(row.get("beta")) or _ANY, "counted in pixels" if pixels else None, method, sure]
    return ", ".join(filter(None, words))


def _median(row: Measurement, units: str) -> str:
    interval = f" ({number(row['low'])}{NONE}{number(row['high'])})" if finite(row.get("low")) else ""
    terms = _terms(row, units)
    return f"{number(row['value'])}{interval}{'' if terms == _ANY else f', {terms}'}"


def _attacked(row: Measurement, worst: Rows) -> Measurement | None:
    """The worst case that the certificate bounds: within its box, or, if it has none, within the widest."""
    same = [
        one for one in worst if all(one.get(key) == row.get(key) for key in ("classifier", "budget", "unit"))
        and (row.get("beta") is None or one.get("beta") == row["beta"])
    ]  # fmt: skip
    return max(same, key=lambda one: one.get("beta") or 0, default=None)


def _sandwich(certified: Rows, worst: Rows, units: str) -> Iterator[Chart]:
    """For each classifier and box what is proven and, above it, what stands.

    Where fewer rows were attacked than certified, the chart is of those, as far as their proven share is known.
    """
    for (name, terms), rows in grouped(certified, lambda row: (who(row), _terms(row, units))):
        rows = sorted(rows, key=lambda row: row["budget"])
        if len(rows) < 2:
            continue
        attacked = [one for row in rows if (one := _attacked(row, worst)) is not None]
        sizes = {one.get("n") for one in attacked}
        if (
            len(sizes) == 1
            and sizes != {row.get("n") for row in rows}
            and None not in {one.certified for one in attacked}
        ):
            terms += f"; the {number(sizes.pop())} rows that were attacked"
            rows = [Measurement("certified_accuracy", one["certified"], identity=one.identity) for one in attacked]
        both = [Series("certified", 0, [_point(row, units) for row in rows])]
        if attacked:
            both.append(Series("stands under attack", 1, [_point(row, units) for row in attacked]))
        axis = Axis("share of rows", ends=(0.0, 100.0), unit=" %")
        yield Chart(name, terms, Axis(f"{units} changed", "values"), axis, tuple(both))


def _point(row: Measurement, units: str) -> Point:
    low, high = (100 * row[key] if finite(row.get(key)) else None for key in ("low", "high"))
    return Point(row["budget"], 100 * row["value"], low, high, f"{number(row['budget'])} {units} {figure_words(row)}")
