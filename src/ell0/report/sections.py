"""A run as the page shows it: which figures stand in which section, and in which words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..results import CLEAN, WORST_CASE, Measurement, Results, Row, Share
from .charts import Axis, Chart, ChartPoint, Series
from .formatting import NONE, Cell, duration, figure_words, finite, number, paper_share, percent, several, span
from .run_files import Exhibit, LogLine, Run
from .selection import (
    Rows,
    attack_of,
    attack_words,
    beta_words,
    box_of,
    effort_of,
    grouped,
    least_of,
    spent_on,
    who,
    within,
)
from .verdicts import Flag, Verdict, flags_of, verdict_of

_SHARES = Axis("robust accuracy", ends=(0.0, 100.0), unit=" %")
_ENDS = ("final_loss", "train_accuracy", "validation_accuracy")
_COUNTED = {
    "positions": "pixels with a changed channel",
    "fallen": "pixels with a channel that fell, as the paper's code",
}
_PARTS = (set[str](), {"over"}, {"part"})
_STAGES = {"training_seconds": "training", "epoch_seconds": "one epoch", "attack_seconds": "attacks in training"}


@dataclass(frozen=True)
class PageTable:
    head: tuple[str, ...]
    lines: tuple[tuple[str | Cell, ...], ...]


@dataclass(frozen=True)
class Section:
    """A heading, then what there is of it, in this order. folded: the table lies behind a summary, below charts."""

    heading: str
    words: str = ""
    charts: Sequence[Chart] = ()
    table: PageTable | None = None
    caption: str = ""
    folded: bool = True
    accuracies: dict[str, Any] | None = None
    certified: dict[str, Any] | None = None
    exhibits: Sequence[Exhibit] = ()
    panel: dict[str, Any] | None = None


@dataclass(frozen=True)
class View:
    """units, items: what is changed, and in what.  scale: what values mean, where the data is known.

    spread: what stands beside a figure, and around a line.
    """

    results: Results
    verdict: Verdict
    sections: Sequence[Section]
    state: str = ""
    recipe: str = ""
    units: str = "inputs"
    items: str = "rows"
    scale: str = ""
    flags: Sequence[Flag] = ()
    spread: str = "95 % interval"

    @property
    def flagged(self) -> str:
        """How many flags there are, in words."""
        words = "1 flag: read it" if len(self.flags) == 1 else f"{len(self.flags)} flags: read them"
        return f"{words} before the figures." if self.flags else ""


def view_of(
    run: Run,
    along: Sequence[Section] = (),
    bound: Sequence[str] | None = None,
    published: Sequence[Row] | None = None,
) -> View:
    """along: sections that stand behind the curves.  bound, published: default: the run's own.

    bound: classifiers that were trained on their bound.  published: figures of others.
    """
    bound = run.bound if bound is None else bound
    published = run.quoted if published is None else published
    # What was measured on another split served to choose, and stands apart from the figures that count.
    rows = [row for row in run.results.rows if row.get("split", "test") == "test"]
    shares = [row for row in rows if finite(row.value)]
    clean, certified = ([row for row in shares if row.what == f"{kind}_accuracy"] for kind in ("clean", "certified"))
    radii, medians = ([row for row in rows if row.what == what] for what in ("certified_radius", "median_distance"))
    # What an attack of a cascade left standing is no figure of that attack: it was given what others had left.
    every = [row for row in shares if row.what == "robust_accuracy" and "attacked" not in row.beside]
    robust, of_right, of_part = ([row for row in every if row.keys() & {"over", "part"} == some] for some in _PARTS)
    # Where some budgets count features, those in pixels stand apart: the two are no points of one curve.
    pixels = [row for row in robust if row.get("unit") == "pixel"]
    apart = pixels if len(pixels) < len(robust) else []
    worst = [row for row in robust if attack_of(row) == WORST_CASE and row not in apart]
    single = [row for row in robust if attack_of(row) != WORST_CASE and row not in apart]
    times = [row for row in rows if row.what.endswith("_seconds")]
    ends = [row for row in rows if row.what in _ENDS]
    seen = {id(row) for row in (*clean, *certified, *radii, *every, *medians, *times, *ends)}
    others = [row for row in run.results.rows if id(row) not in seen]
    styles = {name: i for i, name in enumerate(dict.fromkeys([*(who(row) for row in rows), *run.logs]))}
    counted = {row["unit"] for row in run.results.rows if row.get("budget") is not None and "unit" in row}
    units = "pixels" if counted == {"pixel"} or (run.data and run.data.shape[0] == 1) else "inputs"
    items = "images" if run.data or run.exhibits or "pixel" in counted else "rows"
    scale = "The values of clean images lie within ±1." if run.data else ""
    verdict = verdict_of(clean, certified, worst, single, units, items)
    quoted = [Measurement.of(**{"what": NONE, **row}) for row in published]
    sections = (
        Section("Accuracy", accuracies=_accuracies(clean, worst, single, bound) if clean or worst or single else None),
        Section("Attack it yourself", panel=run.panel),
        Section("Robust accuracy over budget and queries", charts=list(_curves(clean, worst, single, styles, units))),
        *along,
        certified_section(certified, radii, [*worst, *apart], units, clean, quoted, styles) if certified else None,
        _listing("Counted in pixels", "Robust accuracy where one change is one pixel, with all its channels", apart),
        _listing(
            "Of the rows classified rightly", "Robust accuracy as a share of the rows classified rightly", of_right
        ),
        _listing("Of some of the rows", "Robust accuracy of the first rows that an attack was given", of_part),
        Section("Clean and attacked images", exhibits=run.exhibits),
        _medians(medians, units, items) if medians else None,
        _training(run.logs, ends, styles),
        _times(times, [*single, *worst, *medians]),
        _listing("Published figures", "Figures that others published; not run here", quoted),
        _listing("Other figures", "All other rows of the results file", others),
    )
    shown = [
        one for one in sections if one and (one.accuracies or one.charts or one.table or one.exhibits or one.panel)
    ]
    flags = flags_of(rows, worst, single, verdict.classifier)
    return View(run.results, verdict, shown, run.state, run.text, units, items, scale, flags)


def _accuracies(clean: Rows, worst: Rows, single: Rows, bound: Sequence[str]) -> dict[str, Any]:
    """classifiers: each with a row of it, its clean accuracy and its budgets, which are the lines of a table.

    boxes: of the worst case, with the n of each; worst: its cells.  groups: attacks as configured, with their numbers
    of queries and the n of each; cells: theirs.  mixed: whether figures are over different n, clean_n those of clean.
    bound: classifiers that were trained on their bound.
    """
    groups = [(group, grouped(sorted(rows, key=spent_on), effort_of)) for group, rows in grouped(single, attack_words)]
    boxes = grouped(sorted(worst, key=box_of, reverse=True), within)
    falling = sorted(single, key=lambda row: -row.value)  # of rows that say the same the lowest counts
    every = [*clean, *worst, *single]
    classifiers = []
    for name, rows in grouped(every, who):
        budgets = sorted({row["budget"] for row in rows if row.get("budget") is not None}) or [None]
        largest = max((row for row in clean if who(row) == name), key=lambda row: row.n or 0, default=None)
        classifiers.append((name, rows[0], Cell.share(largest) if largest else None, budgets))
    return {
        "classifiers": classifiers,
        "boxes": [(box, {row.n for row in rows}) for box, rows in boxes],
        "worst": {
            (who(row), row.get("budget"), within(row)): Cell.share(row) for row in least_of(worst, "beta", "box")
        },
        "decided": {(who(row), row.get("budget")): row.decided for row in least_of(worst)},
        "groups": [(group, [(effort, {row.n for row in rows}) for effort, rows in some]) for group, some in groups],
        "cells": {(who(row), row.get("budget"), attack_words(row), effort_of(row)): Cell.share(row) for row in falling},
        "mixed": len({row.n for row in every}) > 1,
        "clean_n": {row.n for row in clean},
        "bound": bound,
        "has_paper": any(row.paper is not None for row in every),
        "paper_n": sorted({share.n for row in every if (share := paper_share(row))}),
        "has_k": any("k" in row for row in every),
    }


def start_of(row: Measurement, among: Iterable[Measurement]) -> Measurement | None:
    """The same rows without a change: their clean accuracy, or what a worst case of as many rows says of it."""
    for one in among:
        if who(one) == who(row) and one.n == row.n and one.n and (one.what == "clean_accuracy" or CLEAN in one.decided):
            given = {**row.identity, "n": one.n, "budget": 0}
            if CLEAN not in one.decided:
                return Measurement.of(row.what, one.value, **given, low=one.low, high=one.high)
            share = Share(one.n - one.decided[CLEAN], one.n)
            # Of several seeds it is a mean, whose interval is not that of one share.
            return Measurement.of(row.what, float(share) if "seeds" in one.beside else share, **given)
    return None


def _curves(clean: Rows, worst: Rows, single: Rows, styles: dict[str, int], units: str) -> Iterator[Chart]:
    """The worst case and each attack with most queries over the budget, then each attack over its queries."""
    panels = [("Worst case over the budget", "all attacks and value sets", "budget", least_of(worst))]
    for group, rows in grouped(single, attack_words):
        most = max(rows, key=spent_on)
        some = [row for row in rows if spent_on(row) == spent_on(most)]
        panels.append(("One attack over the budget", f"{group}, {effort_of(most)}", "budget", some))
    for (budget, group), rows in grouped(single, lambda row: (row.get("budget") or 0, attack_words(row))):
        title = f"Over the queries, {several(budget, units)} changed"
        panels.append((title, group, "queries", rows))
    for title, note, along, rows in panels:
        rows = [row for row in rows if row.get(along)]
        words = f"{units} changed" if along == "budget" else along
        axis = Axis(words, "values") if along == "budget" else Axis("queries of the attack", "log values")
        if along == "budget" and rows and rows == (rows := _ladder(rows)):
            # From no change on, unless each point of a line is another classifier.
            firsts = [some[0] for _, some in grouped(rows, who)]
            rows = [*filter(None, (start_of(row, [*clean, *worst]) for row in firsts)), *rows]
        if len({row[along] for row in rows}) > 1:
            yield Chart(title, note, axis, _SHARES, _lines(rows, along, styles, words))


def _ladder(rows: Rows) -> Rows:
    """Classifiers that were each attacked at their own k alone become one line, over k = budget."""
    own = {name for name, some in grouped(rows, who) if {row.get("budget") for row in some} == {some[0].get("k")}}
    if sum(who(row) in own for row in rows) < 3:
        return rows
    one = {"classifier": "F(k), k = budget"}
    return [replace(row, identity={**row.identity, **one}) if who(row) in own else row for row in rows]


def _lines(rows: Rows, along: str, styles: dict[str, int], words: str) -> list[Series]:
    lines = []
    for name in sorted({who(row) for row in rows}, key=lambda name: styles.get(name, len(styles))):
        mine = sorted((row for row in rows if who(row) == name), key=lambda row: row[along])
        theirs = [replace(row, value=row.paper, low=None, high=None) for row in mine if row.paper is not None]
        points, paper = ([_share_point(row, along, words) for row in some] for some in (mine, theirs))
        lines.append(Series(name, styles.get(name, len(styles)), points, paper))
    return lines


def _share_point(row: Measurement, along: str, words: str) -> ChartPoint:
    """A share with its interval, over an entry of its identity."""
    low, high = (None if end is None or not finite(end) else 100 * end for end in (row.low, row.high))
    return ChartPoint(row[along], 100 * row.value, low, high, f"{several(row[along], words)} {figure_words(row)}")


def certified_section(
    certified: Rows,
    radii: Rows,
    worst: Rows,
    units: str,
    clean: Sequence[Measurement] = (),
    quoted: Sequence[Measurement] = (),
    styles: Mapping[str, int] | None = None,
) -> Section:
    """What is proven over the budget, then the sandwich: certified <= true <= attacked."""
    styles = styles or {name: i for i, name in enumerate(dict.fromkeys(map(who, certified)))}
    votes = {who(row): number(row.beside["forwards"]) for row in certified if "forwards" in row.beside}
    medians = []
    for row in (row for row in radii if finite(row.value)):
        interval, terms = span(row, number), _terms(row, units)
        value = f"{who(row)} {number(row.value)}{f' ({interval})' if interval else ''}"
        medians.append(value if terms == "any value" else f"{value}, {terms}")
    lines = []
    for row in certified:
        attacked, gap = _attacked(row, worst), NONE
        if attacked and attacked.certified is not None:
            gap = percent(attacked.value - attacked.certified)
        stands = Cell.share(attacked) if attacked else NONE
        lines.append((who(row), number(row.get("budget")), _terms(row, units), Cell.share(row), stands, gap))
    under_attack = [one for row in certified if (one := _attacked(row, worst))]
    sized = (_sized("certified", certified), _sized("stands under attack", under_attack))
    head = ("classifier", f"{units} changed", "values", *sized, "neither proven nor broken")
    return Section(
        "Proven and broken",
        charts=[*_proven(certified, clean, quoted, units, styles), *_sandwich(certified, worst, units, styles)],
        table=PageTable(head, tuple(lines)),
        caption="Certified accuracy, the worst case of all attacks, and the share of the attacked rows in between",
        certified={"bounds": {who(row) for row in certified} > {*votes}, "votes": votes, "medians": medians},
    )


def _sized(words: str, rows: Rows) -> str:
    """The words with the n of the rows."""
    sizes = sorted({row.n for row in rows if row.n})
    return f"{words}, n = {' or '.join(map(number, sizes))}" if sizes else words


def _terms(row: Measurement, units: str, sure: bool = True) -> str:
    """What a certificate is about, beside its budget.  sure: also how sure it is."""
    method, confidence = row.get("method", "best"), row.beside.get("confidence") if sure else None
    by = None if method == "best" else f"by {method}"
    chance = None if confidence is None else f"with {percent(confidence)} confidence"
    pixels = "counted in pixels" if row.get("unit") == "pixel" and units != "pixels" else None
    return ", ".join(filter(None, [beta_words(row) or "any value", pixels, by, chance]))


def _proven(
    certified: Rows, clean: Sequence[Measurement], quoted: Sequence[Measurement], units: str, styles: Mapping[str, int]
) -> Iterator[Chart]:
    """Certified accuracy over the budget, a line for each classifier, from its clean accuracy on; published medians."""
    for terms, rows in grouped(certified, lambda row: _terms(row, units, sure=False)):
        lines: list[Series] = []
        for (name, sure), some in grouped(rows, lambda row: (who(row), row.beside.get("confidence"))):
            # The clean accuracy of as many rows: of others it may lie below what is proven.
            start = [row for row in clean if who(row) == name and row.n == some[0].n][:1]
            some = [*(replace(row, identity={**row.identity, "budget": 0}) for row in start), *some]
            points = [_share_point(row, "budget", units) for row in sorted(some, key=lambda row: row["budget"])]
            words = name if sure is None else f"{name}, with {percent(sure)} confidence"
            lines.append(Series(words, styles[name], points))
        medians = [row for row in quoted if row.what == "certified_radius" and "beta" not in rows[0]]
        medians = [row for row in medians if row.get("unit", "feature") == rows[0].get("unit", "feature")]
        for style, row in enumerate(medians, len(styles)):
            # A median of r: half of the rows are certified at r.
            point = ChartPoint(row.value, 50.0, words=str(row.get("source", NONE)))
            words = f"{who(row)}, published median {number(row.value)}"
            lines.append(Series(words, style, [point], published=True))
        if len({point.x for line in lines for point in line.points}) > 1:
            axes = Axis(f"{units} changed", "values"), Axis("certified accuracy", ends=(0.0, 100.0), unit=" %")
            yield Chart("Proven over the budget", terms, *axes, lines)


def _attacked(row: Measurement, worst: Rows) -> Measurement | None:
    """The worst case that the certificate bounds: within its box, or, if it has none, within the widest."""
    same = [one for one in worst if all(one.get(key) == row.get(key) for key in ("classifier", "budget", "unit"))]
    boxed = [one for one in same if row.get("beta") in (None, one.get("beta"))]
    return max(boxed, key=box_of, default=None)


def _sandwich(certified: Rows, worst: Rows, units: str, styles: Mapping[str, int]) -> Iterator[Chart]:
    """For each classifier and box what is proven and what stands; of the attacked rows, where those are fewer."""
    for (name, terms), rows in grouped(certified, lambda row: (who(row), _terms(row, units))):
        rows = sorted(rows, key=lambda row: row["budget"])
        attacked = [one for row in rows if (one := _attacked(row, worst)) is not None]
        if len(rows) < 2 or not attacked:
            continue
        sizes = {one.n for one in attacked}
        if len(sizes) == 1 and sizes != {row.n for row in rows} and None not in {one.certified for one in attacked}:
            terms += f"; the {number(sizes.pop())} rows that were attacked"
            rows = [Measurement("certified_accuracy", one["certified"], identity=one.identity) for one in attacked]
            if start := start_of(attacked[0], attacked):
                rows, attacked = [start, *rows], [start, *attacked]
        both = [
            Series(words, style, [_share_point(row, "budget", units) for row in some])
            for style, (words, some) in enumerate(
                {"certified": rows, "stands under attack": attacked}.items(), len(styles)
            )
        ]
        axis = Axis("share of rows", ends=(0.0, 100.0), unit=" %")
        yield Chart(name, terms, Axis(f"{units} changed", "values"), axis, both)


def _training(logs: dict[str, list[LogLine]], ends: Rows, styles: dict[str, int]) -> Section:
    refreshes = sorted({row["epoch"] for log in logs.values() for row in log if row.get("attack_seconds")})
    charts = []
    for key in ("loss", "train_accuracy", "validation_accuracy"):
        title, scale, unit = ("Loss", 1, "") if key == "loss" else ("Accuracy", 100, " %")
        note = "validation split" if key == "validation_accuracy" else "training batches"
        lines = []
        for name, log in logs.items():
            found = [(row["epoch"], scale * row[key]) for row in log if finite(row.get(key))]
            points = [ChartPoint(x, y, words=f"epoch {x} {number(round(y, 4))}{unit}") for x, y in found]
            lines += [Series(name, styles[name], points)] if points else []
        positive = all(point.y > 0 for line in lines for point in line.points)
        if lines:
            y = Axis(title.lower(), "log" if key == "loss" and positive else "linear", unit=unit)
            charts.append(Chart(title, note, Axis("epoch"), y, lines, refreshes))
    table = _pivot((who(row), row.what.replace("_", " "), _cell(row)) for row in ends)
    return Section("Training", "", charts, table, "At the end of training", folded=False)


def _medians(rows: Rows, units: str, items: str) -> Section:
    lines = []
    for row in rows:
        repeats = row.get("repeats")  # how often the attack ran on a row, of which the nearest point counts
        runs = None if repeats is None else "one run" if repeats == 1 else f"the nearest of {number(repeats)} runs"
        rule = f"rule {row['rule']}" if "rule" in row else None
        attack = ", ".join(filter(None, [str(row.get("attack", NONE)), rule, runs]))
        what = _COUNTED.get(row.get("count", ""), f"{row.get('unit', units[:-1])}s changed")
        lines.append((who(row), attack, within(row) or NONE, what, Cell.plain(row), number(row.n)))
    table = PageTable(("classifier", "attack", "values", "counted", "median distance", "n"), tuple(lines))
    changed = f"Median number of changes that the attack made, over the test {items}, with 95 % interval"
    return Section("Median distance", table=table, caption=f"{changed}; a stronger attack may need fewer")


def _times(rows: Rows, evaluated: Rows) -> Section:
    """Times that were measured as such, then what the evaluations took."""
    took = []
    for row in rows:
        paper = None if row.paper is None else duration(row.paper)
        stage = _STAGES.get(row.what, row.what.removesuffix("_seconds").replace("_", " "))
        took.append((who(row), stage, Cell(duration(row.value), paper=paper)))
    timed = [row for row in evaluated if row.seconds is not None]
    for (name, attack), some in grouped(timed, lambda row: (who(row), attack_of(row))):
        took.append((name, f"evaluation, {attack}", Cell(duration(sum(row.seconds or 0 for row in some)))))
    return Section("Times", table=_pivot(took), caption="Time of each stage")


def _cell(row: Measurement) -> Cell:
    return Cell.share(row) if row.what.endswith("accuracy") else Cell.plain(row)


def _pivot(figures: Iterable[tuple[str, str, Cell]]) -> PageTable | None:
    """A line for each classifier, a column for each thing that was measured on it."""
    lines: dict[str, dict[str, Cell]] = {}
    for classifier, what, cell in figures:
        lines.setdefault(classifier, {})[what] = cell
    columns = list(dict.fromkeys(what for line in lines.values() for what in line))
    content = tuple((name, *(line.get(what, NONE) for what in columns)) for name, line in lines.items())
    return PageTable(("classifier", *columns), content) if lines else None


def _listing(heading: str, caption: str, rows: Rows) -> Section | None:
    """Rows as they are: a column for each of their keys, the figure last."""
    keys = list(dict.fromkeys(key for row in rows for key in (*row.identity, "n", "flags") if key in row))
    lines: list[tuple[str | Cell, ...]] = []
    for row in rows:
        entries = [number("; ".join(row.flags) or None if key == "flags" else row.get(key)) for key in keys]
        lines.append((row.what.replace("_", " "), *entries, _cell(row)))
    table = PageTable(("what", *keys, "figure"), tuple(lines))
    return Section(heading, table=table, caption=caption) if rows else None
