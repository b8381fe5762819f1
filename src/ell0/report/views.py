"""A run as the page shows it: which figures stand where, and in which words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..data import SETS
from ..results import CLEAN, Measurement, Results
from .charts import Axis, Chart, ChartPoint, Series
from .formatting import Cell, finite, number, paper_share, percent
from .gallery import exhibits
from .run_files import Run
from .sections import (
    Section,
    certified_section,
    listing,
    medians_section,
    other_units_section,
    share_point,
    times_section,
    training_section,
)  # fmt: skip
from .selection import (
    Rows,
    attack_words,
    box_of,
    effort_of,
    grouped,
    is_worst,
    least_of,
    spent_on,
    who,
    with_entries,
)  # fmt: skip
from .verdicts import Flag, Verdict, flags_of, verdict_of

_SHARES = Axis("robust accuracy", ends=(0.0, 100.0), unit=" %")
_ENDS = ("final_loss", "train_accuracy", "validation_accuracy")


@dataclass(frozen=True)
class AccuracyLine:
    """A line of the table of accuracies.  span: lines of its classifier, on the first of them, else 0."""

    classifier: str
    about: str
    span: int
    clean: Cell | None
    budget: str
    cells: tuple[Cell | None, ...]
    worst: tuple[Cell | None, ...]
    decided: tuple[str, ...]


@dataclass(frozen=True)
class Column:
    """n: how many rows its figures are over, where that is one number."""

    words: str
    n: str | None


@dataclass(frozen=True)
class Accuracies:
    """groups: an attack as configured, and the numbers of queries it was run with, a column each.

    worst: columns of the worst case, one for each box of values.  mixed: whether figures are over different n.
    paper_n: numbers of rows at which intervals of the paper's figures were taken.  has_k: whether k is told of some.
    """

    groups: tuple[tuple[str, tuple[Column, ...]], ...]
    worst: tuple[Column, ...]
    mixed: bool
    has_paper: bool
    paper_n: tuple[int, ...]
    has_k: bool
    lines: tuple[AccuracyLine, ...]


@dataclass(frozen=True)
class View:
    """state: what is to be known before the verdict, of a run that has not come to its end.

    units, items: what is changed, and in what.  scale: in which words values are told, where the data is known.
    """

    results: Results
    verdict: Verdict
    sections: tuple[Section, ...]
    state: str = ""
    recipe: str | None = None
    units: str = "inputs"
    items: str = "rows"
    scale: str = ""
    flags: tuple[Flag, ...] = ()

    @property
    def flagged(self) -> str:
        """How many flags there are, in words."""
        if len(self.flags) == 1:
            return "1 flag: read it before the figures."
        return f"{len(self.flags)} flags: read them before the figures." if self.flags else ""


def view_of(run: Run) -> View:
    # What was measured on another split served to choose, and stands apart from the figures that count.
    rows = [row for row in run.results.rows if row.get("split", "test") == "test"]
    shares = [row for row in rows if finite(row.value)]
    clean, certified = ([row for row in shares if row.what == f"{kind}_accuracy"] for kind in ("clean", "certified"))
    radii, medians = ([row for row in rows if row.what == what] for what in ("certified_radius", "median_distance"))
    # What an attack of a cascade left standing is no figure of that attack: it was given what others had left.
    robust = [row for row in shares if row.what == "robust_accuracy" and "attacked" not in row.beside]
    # Where some budgets count features, those in pixels stand apart: the two are no points of one curve.
    pixels = [row for row in robust if row.get("unit") == "pixel"]
    apart = pixels if len(pixels) < len(robust) else []
    robust = [row for row in robust if row.get("unit") != "pixel"] if apart else robust
    worst, single = ([row for row in robust if is_worst(row) == kind] for kind in (True, False))
    times = [row for row in rows if row.what.endswith("_seconds")]
    ends = [row for row in rows if row.what in _ENDS]
    seen = {id(row) for row in (*clean, *certified, *radii, *worst, *single, *apart, *medians, *times, *ends)}
    others = [row for row in run.results.rows if id(row) not in seen]
    styles = {name: i for i, name in enumerate(dict.fromkeys([*(who(row) for row in rows), *run.logs]))}
    data = SETS.get(run.data or "")
    gallery = tuple(exhibits(run.gallery, data.classes if data else ())) if run.gallery else ()
    units, items = "pixels" if _is_pixels(run) else "inputs", "images" if _is_images(run) else "rows"
    verdict = verdict_of(clean, certified, worst, single, units, items)
    sections = (
        Section("Accuracy", accuracies=_accuracies(clean, worst, single) if clean or worst or single else None),
        Section(
            "Robust accuracy over budget and queries",
            charts=(*_over_budget(worst, single, styles, units), *_over_queries(single, styles, units)),
        ),
        certified_section(certified, radii, [*worst, *apart], units) if certified else None,
        other_units_section(apart, "pixel") if apart else None,
        Section("Clean and attacked images", exhibits=gallery),
        medians_section(medians, units, items) if medians else None,
        training_section(run.logs, ends, styles),
        times_section(times, [*single, *worst, *medians]),
        listing("Published figures", "Figures that others published; not run here", run.quoted) if run.quoted else None,
        listing("Other figures", "All other rows of the results file", others) if others else None,
    )
    return View(
        run.results,
        verdict,
        tuple(one for one in sections if one and (one.accuracies or one.charts or one.table or one.exhibits)),
        state=run.state,
        recipe=run.text,
        units=units,
        items=items,
        scale="The values of clean images lie within ±1." if data else "",
        flags=tuple(flags_of(rows, worst, single, verdict.classifier)),
    )


def _is_images(run: Run) -> bool:
    return run.gallery is not None or run.data in SETS or any(row.get("unit") == "pixel" for row in run.results.rows)


def _is_pixels(run: Run) -> bool:
    """Whether a changed unit is a pixel: the rows say so, or an image has one channel."""
    said = {row["unit"] for row in run.results.rows if row.get("budget") is not None and "unit" in row}
    one_channel = run.data in SETS and SETS[run.data].shape[0] == 1
    return said == {"pixel"} or one_channel or (run.gallery is not None and run.gallery.clean.shape[1] == 1)


def _accuracies(clean: Rows, worst: Rows, single: Rows) -> Accuracies:
    groups = [(group, grouped(sorted(rows, key=spent_on), effort_of)) for group, rows in grouped(single, attack_words)]
    boxes = grouped(sorted(worst, key=box_of, reverse=True), lambda row: row.get("beta"))
    falling = sorted(single, key=lambda row: -row.value)  # of rows that say the same the lowest counts
    cells = {(who(row), row.get("budget"), attack_words(row), effort_of(row)): Cell.share(row) for row in falling}
    widths = {(who(row), row.get("budget"), row.get("beta")): Cell.share(row) for row in least_of(worst, "beta")}
    decided = {(who(row), row.get("budget")): tuple(_decided(row)) for row in least_of(worst)}
    every = [*clean, *worst, *single]
    lines = []
    for name, rows in grouped(every, who):
        budgets = sorted({row["budget"] for row in rows if row.get("budget") is not None}) or [None]
        largest = max((row for row in clean if who(row) == name), key=lambda row: row.n or 0, default=None)
        for budget in budgets:
            lines.append(
                AccuracyLine(
                    name,
                    _about(rows[0]),
                    len(budgets) if budget is budgets[0] else 0,
                    Cell.share(largest) if largest else None,
                    number(budget),
                    tuple(cells.get((name, budget, group, effort)) for group, some in groups for effort, _ in some),
                    tuple(widths.get((name, budget, beta)) for beta, _ in boxes),
                    decided.get((name, budget), ()),
                )
            )
    return Accuracies(
        groups=tuple((group, tuple(_column(effort, rows) for effort, rows in efforts)) for group, efforts in groups),
        worst=tuple(_column("all attacks" if b is None else f"within ±{number(b)}", rows) for b, rows in boxes),
        mixed=len({row.n for row in (*worst, *single)}) > 1,
        has_paper=any(row.paper is not None for row in every),
        paper_n=tuple(sorted({share.n for row in every if (share := paper_share(row))})),
        has_k=any("k" in row for row in every),
        lines=tuple(lines),
    )


def _column(words: str, rows: Rows) -> Column:
    n = rows[0].n if len({row.n for row in rows}) == 1 else None
    return Column(words, None if n is None else number(n))


def _about(row: Measurement) -> str:
    words = [] if row.get("k") is None else [f"k = {number(row['k'])}"]
    if row.get("adversarial") is not None:
        words.append("adversarial training" if row["adversarial"] else "no attack in training")
    return ", ".join(words)


def _decided(row: Measurement) -> Iterator[str]:
    """The attacks that broke rows, the one with most first, with their counts."""
    counts = {name: count for name, count in row.decided.items() if count}
    wrong = counts.pop(CLEAN, 0)
    for name, count in sorted(counts.items(), key=lambda item: -item[1]):
        yield f"{name} {number(count)}"
    if wrong:
        yield f"misclassified without attack {number(wrong)}"


def _over_budget(worst: Rows, single: Rows, styles: dict[str, int], units: str) -> Iterator[Chart]:
    panels = [("Worst case over the budget", "all attacks and value sets", least_of(worst))]
    for group, rows in grouped(single, attack_words):
        most = max(rows, key=spent_on)
        some = [row for row in rows if spent_on(row) == spent_on(most)]
        panels.append(("One attack over the budget", f"{group}, {effort_of(most)}", some))
    for title, note, rows in panels:
        rows = [row for row in rows if row.get("budget") is not None]
        if len({row["budget"] for row in rows}) > 1:
            lines = tuple(_lines(_ladder(rows), "budget", styles, f"{units} changed"))
            yield Chart(title, note, Axis(f"{units} changed", "values"), _SHARES, lines)


def _over_queries(single: Rows, styles: dict[str, int], units: str) -> Iterator[Chart]:
    spent = [row for row in single if (row.get("queries") or 0) > 0]
    for (budget, group), rows in grouped(spent, lambda row: (row.get("budget") or 0, attack_words(row))):
        if len({row["queries"] for row in rows}) > 1:
            title = f"Over the queries, {number(budget)} {units[:-1] if budget == 1 else units} changed"
            lines = tuple(_lines(rows, "queries", styles, "queries"))
            yield Chart(title, group, Axis("queries of the attack", "log values"), _SHARES, lines)


def _ladder(rows: Rows) -> Rows:
    """Classifiers that were each attacked at their own k alone become one line, over k = budget."""
    groups = grouped(rows, who)
    own = {name for name, some in groups if {row.get("budget") for row in some} == {some[0].get("k")}}
    if sum(who(row) in own for row in rows) < 3:
        return rows
    return [with_entries(row, classifier="F(k), k = budget") if who(row) in own else row for row in rows]


def _lines(rows: Rows, along: str, styles: dict[str, int], words: str) -> Iterator[Series]:
    for name in sorted({who(row) for row in rows}, key=lambda name: styles.get(name, len(styles))):
        mine = sorted((row for row in rows if who(row) == name), key=lambda row: row[along])
        paper = [
            ChartPoint(row[along], 100 * row.paper, words=f"{number(row[along])} {words} {percent(row.paper)}")
            for row in mine
            if row.paper is not None
        ]
        yield Series(name, styles.get(name, len(styles)), [share_point(row, along, words) for row in mine], paper)
