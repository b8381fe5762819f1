"""Several runs as one: a line for each classifier, seeds as their mean, and figures over what a sweep varies."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import mean

from ..results import WORST_CASE, Measurement, Results
from .charts import Axis, Chart, ChartPoint, Series
from .formatting import figure_words, number, several
from .run_files import Run
from .sections import Section, View, view_of
from .selection import Rows, attack_of, grouped, least_of, who

_SEED = re.compile(r"[-, ]*\bseed ?\d+\b")
_WHATS = ("clean_accuracy", "robust_accuracy", "certified_accuracy", "certified_radius", "median_distance")
_SPREAD = "95 % interval; where there are several seeds, from the lowest to the highest of them"
_MEANS = "A figure of several seeds is their mean; in brackets stand the lowest and the highest of them."


def comparison(runs: Sequence[Run]) -> View | None:
    """The view of all figures of some runs together; None if they are no accuracies."""
    rows, bound = _together(runs)
    if not any(row.what.endswith("_accuracy") for row in rows):
        return None
    data = {run.data.name if run.data else None: run.data for run in runs}
    seeds = any("seeds" in row.beside for row in rows)
    run = Run(Results("comparison", "", rows=rows), data=data.popitem()[1] if len(data) == 1 else None)
    units = view_of(run).units
    over = {"k": "k", "budget": "the budget of the attack in training"}
    charts = {words: [*_along(rows, key, words, units)] for key, words in over.items()}
    along = [Section(f"Over {words}", charts=found) for words, found in charts.items() if found]
    # Of several data sets they would be points of other curves.
    alike = len({each.plan and each.plan.data.name for each in runs}) == 1
    published = [row for each in runs for row in each.quoted] if alike else []
    view = view_of(run, along, bound, list({json.dumps(row, sort_keys=True): row for row in published}.values()))
    shown = [part for part in view.sections if part.heading != "Other figures"]
    state = " ".join(f"{run.results.name}: {run.state}" for run in runs if run.state)
    view = replace(view, sections=shown, state=state)
    verdict = replace(view.verdict, notes=(*view.verdict.notes, _MEANS))
    return replace(view, verdict=verdict, spread=_SPREAD) if seeds else view


def _together(runs: Sequence[Run]) -> tuple[Rows, list[str]]:
    """The figures of all runs, named by run and classifier; those that differ in nothing but a seed become one.

    Then the names of those that were trained on their bound.
    """
    found: dict[tuple[str, str, str], Rows] = {}
    bound: list[tuple[str, str]] = []
    seen: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for run in runs:
        name = _SEED.sub("", run.results.name)
        seen[run.results.name, tuple(run.results.seeds)] += 1
        again = seen[run.results.name, tuple(run.results.seeds)]  # the same run twice is no second seed
        name += f" ({again})" if again > 1 else ""
        bound += [(name, _SEED.sub("", each)) for each in run.bound]
        for row in run.results.rows:
            if row.what in _WHATS and row.get("split", "test") == "test" and "attacked" not in row.beside:
                classifier = _SEED.sub("", who(row))
                key = json.dumps({**row.key, "classifier": None}, sort_keys=True)
                found.setdefault((name, classifier, key), []).append(row)
    labels = _labels([(name, classifier) for name, classifier, _ in found])
    rows = [_mean(some, labels[name, classifier]) for (name, classifier, _), some in found.items()]
    return rows, [labels[pair] for pair in bound if pair in labels]


def _labels(pairs: Sequence[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """The shortest names that tell lines apart: the classifier's, the run's, or both."""
    pairs = list(dict.fromkeys(pairs))
    for part in (1, 0):
        if len({pair[part] for pair in pairs}) == len(pairs):
            return {pair: pair[part] for pair in pairs}
    return {(name, classifier): f"{name}: {classifier}" for name, classifier in pairs}


def _mean(rows: Rows, label: str) -> Measurement:
    first = replace(rows[0], identity={**rows[0].identity, "classifier": label})
    if len(rows) == 1:
        return first
    values, sizes = [row.value for row in rows], {row.n for row in rows}
    decided = {name: round(mean(row.decided.get(name, 0) for row in rows)) for name in first.decided}
    proven = [row.certified for row in rows if row.certified is not None]
    return replace(
        first, value=mean(values), low=min(values), high=max(values), n=first.n if len(sizes) == 1 else None,
        decided=decided, certified=mean(proven) if len(proven) == len(rows) else None, seconds=None,
        flags=tuple(dict.fromkeys(flag for row in rows for flag in row.flags)),
        beside={**first.beside, "seeds": len(rows)},
    )  # fmt: skip


def _along(rows: Rows, key: str, words: str, units: str) -> Iterator[Chart]:
    """Robust and certified accuracy over k, or over the training's budget in the names of a sweep, at each budget."""
    robust = [row for row in rows if row.what == "robust_accuracy" and not row.keys() & {"over", "part"}]
    worst = [row for row in robust if attack_of(row) == WORST_CASE]
    kinds = {"worst case" if worst else "the strongest attack": least_of(worst or robust)}
    kinds["proven"] = [row for row in rows if row.what == "certified_accuracy"]
    for kind, some in kinds.items():
        for budget, group in sorted(grouped(some, lambda row: row.get("budget") or 0)):
            lines: dict[str, list[ChartPoint]] = {}
            for row in group:
                if (place := _place(row, key)) is not None:
                    name, at = place
                    low, high = (None if end is None else 100 * end for end in (row.low, row.high))
                    point = ChartPoint(at, 100 * row.value, low, high, f"{words} {number(at)} {figure_words(row)}")
                    lines.setdefault(name, []).append(point)
            whole = {
                name: sorted(points, key=lambda point: point.x) for name, points in lines.items() if len(points) > 1
            }
            if whole and budget:
                title = f"{several(budget, units)} changed"
                series = [Series(name, style, points) for style, (name, points) in enumerate(whole.items())]
                yield Chart(
                    title, kind, Axis(words, "values"), Axis("share of rows", ends=(0.0, 100.0), unit=" %"), series
                )


def _place(row: Measurement, key: str) -> tuple[str, float] | None:
    """The name of the line on which a figure lies, and where on it; None if it has no place."""
    label = who(row)
    if key == "k":
        at = row.get("k")
        name = re.sub(rf"-k{at}\b|(?<=\(){at}(?=\))", lambda found: "" if found[0].startswith("-") else "k", label)
        return None if at is None else (name, at)
    swept = re.search(r"-budget(\d+)", label)
    return (label.replace(swept[0], ""), int(swept[1])) if swept else None
