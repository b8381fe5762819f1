"""A run as the page shows it: which figures stand where, and in which words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..data import SETS
from ..results import CLEAN, Measurement, Results
from ._charts import Axis, Chart, Point, Series
from ._gallery import Exhibit, exhibits
from ._parts import Part, Table, certified_part, other_units_part
from ._read import Epoch, Run
from ._rows import (
    Rows,
    attack_of,
    attack_words,
    effort_of,
    figure_words,
    grouped,
    is_worst,
    least_of,
    spent_on,
    who,
    with_entries,
)
from ._verdict import Flag, Verdict, flags_of, verdict_of
from ._words import NONE, Cell, duration, finite, number, paper_share, percent, whole

_SHARES = Axis("robust accuracy", ends=(0.0, 100.0), unit=" %")
_STAGES = {"training_seconds": "training", "epoch_seconds": "one epoch", "attack_seconds": "attacks in training"}
_ENDS = ("final_loss", "train_accuracy", "validation_accuracy")


@dataclass(frozen=True)
class Line:
    """A line of the table of accuracies.  span: lines of its classifier, on the first of them, else 0."""

    classifier: str
    about: str
    span: int
    clean: Cell | None
    budget: Any
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
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class View:
    """state: what is to be known before the verdict, of a run that has not come to its end.

    units, items: what is changed, and in what.  scale: in which words values are told, where the data is known.
    """

    name: str
    state: str
    results: Results
    recipe: str | None
    units: str
    items: str
    scale: str
    verdict: Verdict
    flags: tuple[Flag, ...]
    accuracies: Accuracies | None
    charts: tuple[Chart, ...]
    medians: Table | None
    exhibits: tuple[Exhibit, ...]
    training: tuple[Chart, ...]
    ends: Table | None
    times: Table | None
    quoted: Table | None
    others: Table | None
    parts: tuple[Part, ...] = ()

    @property
    def flagged(self) -> str:
        """How many flags there are, in words."""
        if len(self.flags) == 1:
            return "1 flag: read it before the figures."
        return f"{len(self.flags)} flags: read them before the figures." if self.flags else ""


def view(run: Run) -> View:
    # What was measured on another split served to choose, and stands apart from the figures that count.
    rows = [row for row in run.results.rows if row.get("split", "test") == "test"]
    shares = [row for row in rows if finite(row.get("value"))]
    clean = [row for row in shares if row.get("what") == "clean_accuracy"]
    certified = [row for row in shares if row.get("what") == "certified_accuracy"]
    radii = [row for row in rows if row.get("what") == "certified_radius"]
    worst = [row for row in shares if is_worst(row)]
    # What an attack of a cascade left standing is no figure of that attack: it was given what others had left.
    single = [
        row
        for row in shares
        if row.get("what") == "robust_accuracy" and not is_worst(row) and "attacked" not in row.beside
    ]
    # Where some budgets count features, those in pixels stand apart: the two are no points of one curve.
    apart = [row for row in (*worst, *single) if row.get("unit") == "pixel"]
    if any(row.get("unit") != "pixel" for row in (*worst, *single)):
        worst, single = ([row for row in some if row.get("unit") != "pixel"] for some in (worst, single))
    else:
        apart = []
    medians = [row for row in rows if row.get("what") == "median_distance"]
    times = [row for row in rows if str(row.get("what", "")).endswith("_seconds")]
    ends = [row for row in rows if row.get("what") in _ENDS]
    seen = {id(row) for row in (*clean, *certified, *radii, *worst, *single, *apart, *medians, *times, *ends)}
    order = list(dict.fromkeys([*(who(row) for row in rows), *run.logs]))
    styles = {name: i for i, name in enumerate(order)}
    units = "pixels" if _is_pixels(run) else "inputs"
    items = "images" if _is_images(run) else "rows"
    verdict = verdict_of(clean, certified, worst, single, units, items)
    return View(
        name=run.results.name,
        state=_state(run),
        results=run.results,
        recipe=run.text,
        units=units,
        items=items,
        scale=_scale(run) if run.data in SETS else "",
        verdict=verdict,
        flags=tuple(flags_of(rows, worst, single, verdict.classifier)),
        accuracies=_accuracies(clean, worst, single) if clean or worst or single else None,
        charts=tuple(_over_budget(worst, single, styles, units)) + tuple(_over_queries(single, styles, units)),
        medians=_medians(medians),
        exhibits=tuple(exhibits(run.gallery, SETS[run.data].classes if run.data in SETS else ()))
        if run.gallery
        else (),
        training=tuple(_training(run.logs, styles)),
        ends=_pivot((who(row), _stage(row), _any(row)) for row in ends),
        times=_times(times, [*single, *worst, *medians]),
        quoted=_listing(run.quoted),
        others=_listing([row for row in run.results.rows if id(row) not in seen]),
        parts=(
            *((certified_part(certified, radii, [*worst, *apart], units),) if certified else ()),
            *((other_units_part(apart, "pixel"),) if apart else ()),
        ),
    )


def _scale(run: Run) -> str:
    """Of a run on [0, 1] values are told as on [-1, 1], where the attacker can do the same."""
    if any(row.get("scale") == "unit" for row in run.results.rows):
        return "Values are told as if clean images lay within ±1; the networks were given images in 0 to 1."
    return "The values of clean images lie within ±1."


def _state(run: Run) -> str:
    done = run.done()
    if done is None and run.text is None:
        return ""
    if done is None:
        return "A recipe that it uses is not beside this run: whether it is finished is not known."
    there, asked = done
    if there == asked:
        return ""
    return f"Unfinished: {there:,} of the {asked:,} figures that the recipe asks for are there."


def _is_images(run: Run) -> bool:
    return run.gallery is not None or run.data in SETS or any(row.get("unit") == "pixel" for row in run.results.rows)


def _is_pixels(run: Run) -> bool:
    """Whether a changed unit is a pixel: it is said so, or an image has one channel."""
    said = {row["unit"] for row in run.results.rows if row.get("budget") is not None and "unit" in row}
    if said == {"pixel"} or (run.data in SETS and SETS[run.data].shape[0] == 1):
        return True
    return run.gallery is not None and run.gallery.clean.shape[1] == 1


def _accuracies(clean: Rows, worst: Rows, single: Rows) -> Accuracies:
    groups = [(group, grouped(sorted(rows, key=spent_on), effort_of)) for group, rows in grouped(single, attack_words)]
    boxes = grouped(sorted(worst, key=lambda row: -(row.get("beta") or 0)), lambda row: row.get("beta"))
    falling = sorted(single, key=lambda row: -row["value"])  # of rows that say the same the lowest counts
    cells = {(who(row), row.get("budget"), attack_words(row), effort_of(row)): Cell.share(row) for row in falling}
    widths = {(who(row), row.get("budget"), row.get("beta")): Cell.share(row) for row in least_of(worst, "beta")}
    least = {(who(row), row.get("budget")): row for row in least_of(worst)}
    every = [*clean, *worst, *single]
    lines = []
    for name, rows in grouped(every, who):
        budgets = sorted({row["budget"] for row in rows if row.get("budget") is not None}) or [None]
        largest = max((row for row in rows if row in clean), key=lambda row: row.get("n") or 0, default=None)
        for budget in budgets:
            lines.append(
                Line(
                    name,
                    _about(rows[0]),
                    len(budgets) if budget is budgets[0] else 0,
                    Cell.share(largest) if largest else None,
                    NONE if budget is None else number(budget),
                    tuple(
                        cells.get((name, budget, group, effort)) for group, efforts in groups for effort, _ in efforts
                    ),
                    tuple(widths.get((name, budget, beta)) for beta, _ in boxes),
                    tuple(_decided(least[name, budget])) if (name, budget) in least else (),
                )
            )
    return Accuracies(
        groups=tuple((group, tuple(_column(effort, rows) for effort, rows in efforts)) for group, efforts in groups),
        worst=tuple(_column("all attacks" if b is None else f"within ±{number(b)}", rows) for b, rows in boxes),
        mixed=len({row.get("n") for row in (*worst, *single)}) > 1,
        has_paper=any(row.get("paper") is not None for row in every),
        paper_n=tuple(sorted({share.n for row in every if (share := paper_share(row))})),
        has_k=any(row.get("k") is not None for row in every),
        lines=tuple(lines),
    )


def _column(words: str, rows: Rows) -> Column:
    sizes = {row.get("n") for row in rows}
    return Column(words, whole(sizes.pop()) if len(sizes) == 1 else None)


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
        yield f"wrong from the start {number(wrong)}"


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
    budgets: dict[Any, set[Any]] = {}
    for row in rows:
        budgets.setdefault(row.get("classifier"), set()).add(row.get("budget"))
    own = [row for row in rows if budgets[row.get("classifier")] == {row.get("k")}]
    if len(own) < 3:
        return rows
    return [with_entries(row, classifier="F(k), k = budget") if row in own else row for row in rows]


def _lines(rows: Rows, along: str, styles: dict[str, int], words: str) -> Iterator[Series]:
    for name in sorted({who(row) for row in rows}, key=lambda name: styles.get(name, len(styles))):
        mine = sorted((row for row in rows if who(row) == name), key=lambda row: row[along])
        mine = [row for row in mine if finite(row["value"])]
        points = [
            Point(
                row[along], 100 * row["value"], _hundred(row.get("low")), _hundred(row.get("high")),
                f"{number(row[along])} {words} {figure_words(row)}",
            )
            for row in mine
        ]  # fmt: skip
        paper = [
            Point(row[along], 100 * row["paper"], words=f"{number(row[along])} {words} {percent(row['paper'])}")
            for row in mine
            if row.get("paper") is not None
        ]
        if points:
            yield Series(name, styles.get(name, len(styles)), points, paper)


def _hundred(value: Any) -> float | None:
    return 100 * value if finite(value) else None


def _training(logs: dict[str, list[Epoch]], styles: dict[str, int]) -> Iterator[Chart]:
    refreshes = sorted({row["epoch"] for log in logs.values() for row in log if row.get("attack_seconds")})
    for title, note, key in (
        ("Loss", "training batches", "loss"),
        ("Accuracy", "training batches", "train_accuracy"),
        ("Accuracy", "validation split", "validation_accuracy"),
    ):
        scale, unit = (1, "") if key == "loss" else (100, " %")
        lines = []
        for name, log in logs.items():
            points = [
                Point(
                    row["epoch"],
                    scale * row[key],
                    words=f"epoch {row['epoch']} {number(round(scale * row[key], 4))}{unit}",
                )
                for row in log
                if finite(row.get(key))
            ]
            if points:
                lines.append(Series(name, styles[name], points))
        positive = all(point.y > 0 for line in lines for point in line.points)
        if lines:
            y = Axis(title.lower(), "log" if key == "loss" and positive else "linear", unit=unit)
            yield Chart(title, note, Axis("epoch"), y, tuple(lines), refreshes)


def _medians(rows: Rows) -> Table | None:
    if not rows:
        return None
    head = ("classifier", "attack", "values", "median distance", "n")
    return Table(
        head,
        tuple(
            (
                str(who(row)),
                _tried(row),
                NONE if row.get("beta") is None else f"within ±{number(row['beta'])}",
                Cell.plain(row),
                number(row.get("n")),
            )
            for row in rows
        ),
    )


def _tried(row: Measurement) -> str:
    """The attack of a median, and how often it ran on a row, of which the nearest point counts."""
    name, repeats = str(row.get("attack", NONE)), row.get("repeats")
    if not finite(repeats):
        return name
    return f"{name}, one run" if repeats == 1 else f"{name}, the nearest of {number(repeats)} runs"


def _times(rows: Rows, measured: Rows) -> Table | None:
    """Times that were measured as such, then what the evaluations took."""
    took = [(who(row), _stage(row), _took(row.get("value"), row.get("paper"))) for row in rows]
    timed = [row for row in measured if finite(row.get("seconds"))]
    for (name, attack), some in grouped(timed, lambda row: (who(row), attack_of(row))):
        took.append((name, f"evaluation, {attack}", _took(sum(row["seconds"] for row in some))))
    return _pivot(took)


def _took(seconds: Any, paper: Any = None) -> Cell:
    return Cell(duration(seconds), None, None if paper is None else duration(paper), None)


def _stage(row: Measurement) -> str:
    what = str(row["what"])
    return _STAGES.get(what, what.removesuffix("_seconds").replace("_", " "))


def _any(row: Measurement) -> Cell:
    return Cell.share(row) if str(row.get("what", "")).endswith("accuracy") else Cell.plain(row)


def _pivot(figures: Iterable[tuple[str, str, Cell]]) -> Table | None:
    """A line for each classifier, a column for each thing that was measured on it."""
    lines: dict[str, dict[str, Cell]] = {}
    columns: list[str] = []
    for classifier, what, cell in figures:
        lines.setdefault(classifier, {})[what] = cell
        columns += [what] if what not in columns else []
    content = tuple((name, *(line.get(what, NONE) for what in columns)) for name, line in lines.items())
    return Table(("classifier", *columns), content) if lines else None


def _listing(rows: Sequence[Measurement]) -> Table | None:
    """Rows as they are: a column for each of their keys, the figure last."""
    if not rows:
        return None
    keys = list(dict.fromkeys(key for row in rows for key in row.identity))
    head = ("what", *keys, "figure")
    return Table(head, tuple(
        (
            str(row.get("what", NONE)).replace("_", " "),
            *(number(row.get(key)) for key in keys),
            _any(row),
        )
        for row in rows
    ))  # fmt: skip
