"""Sections of a page: text, charts and tables of some measurements."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..results import Measurement
from .charts import Axis, Chart, ChartPoint, Series
from .formatting import NONE, Cell, beta_words, duration, enumeration, finite, number, percent
from .gallery import Exhibit
from .run_files import LogLine
from .selection import Rows, attack_of, attack_words, box_of, figure_words, grouped, is_worst, who

_ANY = "any value"
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
    charts: tuple[Chart, ...] = ()
    table: PageTable | None = None
    caption: str = ""
    folded: bool = True
    accuracies: object = None
    exhibits: tuple[Exhibit, ...] = ()


def certified_section(certified: Rows, radii: Rows, worst: Rows, units: str) -> Section:
    """The sandwich: certified <= true <= attacked.

    certified: rows of certified accuracy.  radii: of the median radius.  worst: of the worst case of all attacks.
    """
    words = f"Certified: no attacker who changes this many {units} can change the answer. "
    if any("forwards" not in row.beside for row in certified):
        words += (
            "Bounds prove it in one pass through the network, so the true robust accuracy lies between the certified "
            "one and the one under attack. "
        )
    votes = {who(row): number(row.beside["forwards"]) for row in certified if "forwards" in row.beside}
    if votes:
        each = enumeration([f"{name} with {forwards} forward passes a row" for name, forwards in votes.items()])
        words += f"Votes certify {each}; where a confidence is given, each certificate holds with that probability. "
    medians = [f"{who(row)} {_median(row, units)}" for row in radii if finite(row.value)]
    if medians:
        words += f"Median certified radius (a misclassified row counts as -1): {enumeration(medians)}."
    lines = []
    for row in certified:
        attacked = _attacked(row, worst)
        share = None if attacked is None else attacked.certified
        gap = NONE if attacked is None or share is None else percent(attacked.value - share)
        stands = NONE if attacked is None else Cell.share(attacked)
        lines.append((who(row), number(row.get("budget")), _terms(row, units), Cell.share(row), stands, gap))
    head = ("classifier", f"{units} changed", "values", "certified", "stands under attack", "neither proven nor broken")
    return Section(
        "Proven and broken",
        words.rstrip(),
        tuple(_sandwich(certified, worst, units)),
        PageTable(head, tuple(lines)),
        "Certified accuracy, the worst case of all attacks, and the share of the attacked rows in between",
    )


def other_units_section(rows: Rows, unit: str) -> Section:
    """Figures that were counted in another unit than the rest."""
    head = ("classifier", f"{unit}s changed", "attack", "robust accuracy", "n")
    lines = []
    for row in rows:
        attack = f"worst case, {beta_words(row.get('beta'))}" if is_worst(row) else attack_words(row)
        lines.append((who(row), number(row.get("budget")), attack, Cell.share(row), number(row.n)))
    words = f"Here one change is one {unit}, with all its channels."
    table = PageTable(head, tuple(lines))
    return Section(f"Counted in {unit}s", words, table=table, caption=f"Robust accuracy by {unit}s changed")


def _terms(row: Measurement, units: str) -> str:
    """What a certificate is about, beside its budget."""
    pixels = row.get("unit") == "pixel" and units != "pixels"
    method = None if row.get("method", "best") == "best" else f"by {row['method']}"
    confidence = row.beside.get("confidence")
    sure = None if confidence is None else f"with {percent(confidence)} confidence"
    words = [beta_words(row.get("beta")) or _ANY, "counted in pixels" if pixels else None, method, sure]
    return ", ".join(filter(None, words))


def _median(row: Measurement, units: str) -> str:
    interval = f" ({number(row.low)}{NONE}{number(row.high)})" if finite(row.low) else ""
    terms = _terms(row, units)
    return f"{number(row.value)}{interval}{'' if terms == _ANY else f', {terms}'}"


def _attacked(row: Measurement, worst: Rows) -> Measurement | None:
    """The worst case that the certificate bounds: within its box, or, if it has none, within the widest."""
    same = [one for one in worst if all(one.get(key) == row.get(key) for key in ("classifier", "budget", "unit"))]
    boxed = [one for one in same if row.get("beta") in (None, one.get("beta"))]
    return max(boxed, key=box_of, default=None)


def _sandwich(certified: Rows, worst: Rows, units: str) -> Iterator[Chart]:
    """For each classifier and box what is proven and, above it, what stands.

    Where fewer rows were attacked than certified, the chart is of those, as far as their proven share is known.
    """
    for (name, terms), rows in grouped(certified, lambda row: (who(row), _terms(row, units))):
        rows = sorted(rows, key=lambda row: row["budget"])
        if len(rows) < 2:
            continue
        attacked = [one for row in rows if (one := _attacked(row, worst)) is not None]
        sizes = {one.n for one in attacked}
        if len(sizes) == 1 and sizes != {row.n for row in rows} and None not in {one.certified for one in attacked}:
            terms += f"; the {number(sizes.pop())} rows that were attacked"
            rows = [Measurement("certified_accuracy", one["certified"], identity=one.identity) for one in attacked]
        both = [Series("certified", 0, [share_point(row, "budget", units) for row in rows])]
        if attacked:
            both.append(Series("stands under attack", 1, [share_point(row, "budget", units) for row in attacked]))
        axis = Axis("share of rows", ends=(0.0, 100.0), unit=" %")
        yield Chart(name, terms, Axis(f"{units} changed", "values"), axis, tuple(both))


def share_point(row: Measurement, along: str, words: str) -> ChartPoint:
    """A share with its interval, over an entry of its identity."""
    low, high = (None if end is None or not finite(end) else 100 * end for end in (row.low, row.high))
    return ChartPoint(row[along], 100 * row.value, low, high, f"{number(row[along])} {words} {figure_words(row)}")


def training_section(logs: dict[str, list[LogLine]], ends: Rows, styles: dict[str, int]) -> Section:
    table = _pivot((who(row), _stage(row), _any(row)) for row in ends)
    return Section("Training", "", tuple(_training(logs, styles)), table, "At the end of training", folded=False)


def _training(logs: dict[str, list[LogLine]], styles: dict[str, int]) -> Iterator[Chart]:
    refreshes = sorted({row["epoch"] for log in logs.values() for row in log if row.get("attack_seconds")})
    for title, note, key in (
        ("Loss", "training batches", "loss"),
        ("Accuracy", "training batches", "train_accuracy"),
        ("Accuracy", "validation split", "validation_accuracy"),
    ):
        scale, unit = (1, "") if key == "loss" else (100, " %")
        lines = []
        for name, log in logs.items():
            found = [(row["epoch"], scale * row[key]) for row in log if finite(row.get(key))]
            points = [ChartPoint(x, y, words=f"epoch {x} {number(round(y, 4))}{unit}") for x, y in found]
            lines += [Series(name, styles[name], points)] if points else []
        positive = all(point.y > 0 for line in lines for point in line.points)
        if lines:
            y = Axis(title.lower(), "log" if key == "loss" and positive else "linear", unit=unit)
            yield Chart(title, note, Axis("epoch"), y, tuple(lines), refreshes)


def medians_section(rows: Rows, units: str, items: str) -> Section:
    lines = []
    for row in rows:
        box = NONE if row.get("beta") is None else f"within ±{number(row['beta'])}"
        lines.append((who(row), _repeated(row), box, Cell.plain(row), number(row.n)))
    table = PageTable(("classifier", "attack", "values", "median distance", "n"), tuple(lines))
    caption = (
        f"Median number of {units} that the attack changed, over the test {items}, with 95 % interval; a stronger "
        "attack may need fewer"
    )
    return Section("Median distance", table=table, caption=caption)


def _repeated(row: Measurement) -> str:
    """The attack of a median, and how often it ran on a row, of which the nearest point counts."""
    name, repeats = str(row.get("attack", NONE)), row.get("repeats")
    if repeats is None:
        return name
    return f"{name}, one run" if repeats == 1 else f"{name}, the nearest of {number(repeats)} runs"


def times_section(rows: Rows, evaluated: Rows) -> Section:
    """Times that were measured as such, then what the evaluations took."""
    took = [(who(row), _stage(row), _took(row.value, row.paper)) for row in rows]
    timed = [row for row in evaluated if row.seconds is not None]
    for (name, attack), some in grouped(timed, lambda row: (who(row), attack_of(row))):
        took.append((name, f"evaluation, {attack}", _took(sum(row.seconds or 0 for row in some))))
    return Section("Times", table=_pivot(took), caption="Time of each stage")


def _took(seconds: float, paper: float | None = None) -> Cell:
    return Cell(duration(seconds), None, None if paper is None else duration(paper), None)


def _stage(row: Measurement) -> str:
    return _STAGES.get(row.what, row.what.removesuffix("_seconds").replace("_", " "))


def _any(row: Measurement) -> Cell:
    return Cell.share(row) if row.what.endswith("accuracy") else Cell.plain(row)


def _pivot(figures: Iterable[tuple[str, str, Cell]]) -> PageTable | None:
    """A line for each classifier, a column for each thing that was measured on it."""
    lines: dict[str, dict[str, Cell]] = {}
    for classifier, what, cell in figures:
        lines.setdefault(classifier, {})[what] = cell
    columns = list(dict.fromkeys(what for line in lines.values() for what in line))
    content = tuple((name, *(line.get(what, NONE) for what in columns)) for name, line in lines.items())
    return PageTable(("classifier", *columns), content) if lines else None


def listing(heading: str, caption: str, rows: Sequence[Measurement]) -> Section:
    """Rows as they are: a column for each of their keys, the figure last."""
    keys = list(dict.fromkeys(key for row in rows for key in row.identity))
    flags = ("flags",) if any(row.flags for row in rows) else ()
    lines: list[tuple[str | Cell, ...]] = []
    for row in rows:
        entries = [*(number(row.get(key)) for key in keys), *("; ".join(row.flags) for _ in flags)]
        lines.append((row.what.replace("_", " "), *entries, _any(row)))
    return Section(heading, table=PageTable(("what", *keys, *flags, "figure"), tuple(lines)), caption=caption)
