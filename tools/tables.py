"""Writes the tables of README.md and docs/*.md from results/*.json.

    python tools/tables.py            # write every table anew
    python tools/tables.py --check    # exit code 1 if a table is stale
    python tools/tables.py NAME ...   # print tables

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``; NAME is a key of ``TABLES``.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from ell0 import certify, recipe
from ell0.results import (
    CHOSEN,
    CLIPPED,
    EQUAL,
    HARDENED,
    MONOTONE,
    OPTIMAL,
    OPTIMAL_CHOSEN,
    OURS,
    PLAIN,
    WORST_CASE,
    Measurement,
    Results,
    Share,
)

ROOT = Path(__file__).resolve().parent.parent
PLACE = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
NONE, MISSING = "-", "not measured"


# Measured before a clean commit was asked for. A name leaves this list when its file is measured again; none is added.
UNCLEAN = (
    "cifar-best", "cifar-certified", "cifar-rivals", "cifar-trades",
    "mnist-baselines", "mnist-fig1a", "mnist-fig1b", "mnist-rivals",
    "mnist-table1",
)  # fmt: skip


def clean_results(name: str) -> Results:
    """A results file; raises ValueError if it was not measured from a clean commit."""
    results = Results.load(ROOT / "results" / f"{name}.json")
    if name not in UNCLEAN and (results.commit is None or results.commit.endswith("-dirty")):
        raise ValueError(f"results/{name}.json must name a clean commit, got {results.commit}: measure it again")
    return results


class Files(dict[str, Results]):
    """Results files by name, read when they are asked for; they are the sources of a table."""

    def __missing__(self, name: str) -> Results:
        self[name] = clean_results(name)
        return self[name]

    def has(self, name: str) -> bool:
        return name in self or (ROOT / "results" / f"{name}.json").exists()

    def seek(self, *names: str, **entries: Any) -> Measurement | None:
        """The one measurement with these entries, of the first file that has it; None if none of them is there yet."""
        for name in names:
            path = ROOT / "results" / f"{name}.json"
            if path.exists() and (self.get(name) or clean_results(name)).select(**entries):
                return self[name].find(**entries)
        return None


@dataclass(frozen=True)
class MarkdownTable:
    """A head and lines of cells. note: what all cells have in common."""

    head: Sequence[str]
    lines: Sequence[Sequence[str | Measurement]]
    note: str = ""

    def text(self, files: Files) -> str:
        figures = [cell for line in self.lines for cell in line if isinstance(cell, Measurement)]
        columns = [
            {cell.n for cell in column if isinstance(cell, Measurement)} for column in zip(*self.lines, strict=True)
        ]
        head, notes = list(self.head), [self.note]
        # How many rows a figure is over stands in the head of its column, or once if it is the same for all.
        if len({cell.n for cell in figures}) == 1 and figures[0].n:
            notes.append(f"n = {figures[0].n:,}")
        else:
            sizes = [next(iter(column)) if len(column) == 1 else None for column in columns]
            head = [f"{words}, n = {n:,}" if n else words for words, n in zip(head, sizes, strict=True)]
        spread = {kind_of(cell) for cell in figures if has_spread(cell)}
        if spread:
            notes.append("in brackets " + ("95 % intervals" if spread <= {"share", "count"} else "lowest and highest"))
        cells = [[shown(cell) for cell in line] for line in self.lines]
        below = "; ".join([*filter(None, notes), measured(files.values())])
        return "\n".join([*(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *cells)), "", below])


def kind_of(cell: Measurement) -> str:
    unit = cell.get("unit")
    if unit in ("x", "x faster"):
        return "ratio"
    if unit in ("seconds", "bytes"):
        return str(unit)
    return "count" if cell.what in ("median_distance", "distance", "certified_radius", "median_radius") else "share"


def has_spread(cell: Measurement) -> bool:
    return cell.low is not None and (cell.low != cell.high or kind_of(cell) == "share")


def shown(cell: str | Measurement) -> str:
    """A figure with its interval and, where there is one, the paper's."""
    if isinstance(cell, str):
        return cell
    kind = kind_of(cell)
    unit = {"share": " %", "seconds": " s", "bytes": " MiB"}.get(kind, "")

    def form(value: float, digits: int = 1) -> str:
        if kind == "share":
            return f"{100 * value:.{digits}f}"
        if kind == "ratio":
            return f"{value:.1f}" if cell.value < 20 else f"{value:.0f}"
        if kind == "bytes":
            return f"{value / 2**20:,.0f}"
        return f"{value:g}" if kind == "count" else f"{value:.3g}" if value < 100 else f"{value:,.0f}"

    words = form(cell.value) + unit
    if has_spread(cell):
        words += f" ({form(cell['low'])}-{form(cell['high'])})"
    return words if cell.paper is None else f"{words}, paper {form(cell.paper, 2)}{unit}"


def measured(files: Iterable[Results]) -> str:
    """Device, commands and commits of some files, in the same words for every table."""
    places: dict[str, list[str]] = {}
    for one in files:
        commit = f", commit {one.commit}" if one.commit else ""
        places.setdefault(one.device, []).append(f"`{one.command}`{commit}")
    if not places:
        return "nothing measured yet."
    return "measured " + "; ".join(f"on {device} by {'; '.join(commands)}" for device, commands in places.items()) + "."


def unclean(files: Files) -> MarkdownTable:
    """The results that name no clean commit, and what each cost."""
    lines = [[f"`{name}`", f"{files[name].seconds:.0f} s"] for name in UNCLEAN]
    return MarkdownTable(["results", "time"], lines)


def digits(files: Files) -> MarkdownTable:
    """The default recipe: what is proven, and what stands under all attacks."""
    results, budgets = files["digits"], (1, 2, 3)
    lines = []
    for clean in results.select(what="clean_accuracy"):
        worst = [results.find(classifier=clean["classifier"], attack=WORST_CASE, budget=m, beta=100.0) for m in budgets]
        proven = ["" if one.certified is None else f"{100 * one.certified:.0f} - " for one in worst]
        cells = [f"{words}{100 * one.value:.0f} %" for words, one in zip(proven, worst, strict=True)]
        lines.append([clean["classifier"], f"{100 * clean.value:.1f} %", *cells])
    note = f"proven - robust accuracy of {worst[0].n} test images, values within 100; {results.seconds:.0f} s"
    return MarkdownTable(["digits", "clean", *(f"{m} changed" for m in budgets)], lines, note)


def attacks(files: Files) -> MarkdownTable:
    """What each attack leaves standing of a trained F(10), and for how many queries."""
    results = files["bench-attacks-cpu"]
    lines = []
    for narrow in results.select(what="attack", beta=1.0):
        wide = results.find(what="attack", attack=narrow["attack"], beta=100.0)
        lines.append([narrow["attack"], narrow, wide, f"{wide['queries']:.0f}"])
    for dear in results.select(what="equal price"):
        restarts = f" in {dear['restarts']} restarts" if dear["restarts"] > 1 else ""
        words = f"sparse_rs, limit {dear['limit']:,} queries{restarts}"
        lines.append([words, NONE, dear, f"{dear['queries']:.0f}"])
    clean = results.find(what="clean")
    note = f"F(10), {clean['epochs']} epochs on clean MNIST, clean accuracy {shown(clean)}; {dear['budget']} changed"
    return MarkdownTable(["robust accuracy", "values within 1", "within 100", "queries an image"], lines, note)


def attacks_reference(files: Files) -> MarkdownTable:
    """Sparse-RS against its authors' code, Pointwise against foolbox's."""
    results = files["bench-attacks-cpu"]
    ours, theirs = (results.find(what="reference", attack=f"sparse_rs{own}") for own in ("", " of the authors"))
    near, far = (results.find(what="distance", attack=name) for name in ("pointwise", "foolbox PointwiseAttack"))
    faster = [f"{results.find(what=what).value:.0f} times" for what in ("overhead", "speed")]
    lines = [
        [f"sparse_rs, robust accuracy, {ours['limit']:,} queries", shown(ours), shown(theirs), faster[0]],
        ["pointwise, median changed features, 10 repeats", f"{near.value:g}", f"{far.value:g}", faster[1]],
    ]
    note = f"n = {ours.n:,} and {near.n:,}; the speed of sparse_rs counts the attack's own work, without the model's"
    return MarkdownTable(["", "ell0", "reference", "faster"], lines, note)


def peers(files: Files) -> MarkdownTable:
    """The same question to each tool: what one writes, what it takes, and what it finds."""
    rows = files["bench-peers-cpu"].select(what="tool")
    keys = {"knows": "", "lines": "", "times": ".2f"}
    lines = [[row["attack"], *(f"{row.beside[key]:{form}}" for key, form in keys.items()), row] for row in rows]
    head = ["tool", "knows", "lines", "processor time, ell0 = 1", f"robust accuracy, {rows[0]['budget']} pixels"]
    return MarkdownTable(
        head, lines, "each with its defaults unless it says otherwise; a small CNN on digits; less is a stronger attack"
    )


def mnist_training(files: Files) -> MarkdownTable:
    """What the paper's training of F(10) takes."""
    results = files["mnist-f10"]
    took, attacks = results.find(what="training_seconds"), results.find(what="attack_seconds")
    topk = files["bench-train-h200"].find(what="training", mode="topk")
    return MarkdownTable(
        ["F(10), 250 epochs, 9 attacks on 60,000 images", "ell0", "with torch.topk, estimated", "paper"],
        [["seconds", f"{took.value:,.0f}", f"{topk.value:,.0f}", f"{took.paper:,.0f}"],
         ["of them attacks", f"{attacks.value:,.0f}", f"{topk['attack_seconds']:,.0f}", NONE]],
    )  # fmt: skip


def mnist_ablation(files: Files) -> MarkdownTable:
    """Randomised ablation and F(10) under the same attacks, and what these cost."""
    search, pointwise = of(what="robust_accuracy", attack="sparse_rs"), of(what="median_distance", attack="pointwise")
    pairs = [(m, beta) for beta in (1.0, 100.0) for m in (8, 12)]
    asked = {"clean": of(what="clean_accuracy"), "certified, 8 changed": of(what="certified_accuracy", budget=8)}
    asked |= {f"Sparse-RS, {m} changed within {beta:g}": of(**search, budget=m, beta=beta) for m, beta in pairs}
    asked |= {f"Pointwise, median changed within {beta:g}": of(**pointwise, beta=beta) for beta in (1.0, 100.0)}

    def column(name: str) -> list[str | Measurement]:
        rows = [files.seek("mnist-ablation", classifier=name, **which) for which in asked.values()]
        attacks = [row for row in rows if row is not None and "queries" in row.beside]
        passes = sum(row.beside["queries"] * row.beside["passes"] for row in attacks)
        costs = [*(f"{row.beside['passes']:,}" for row in attacks[:1]), f"{passes:,}"]
        costs.append(f"{sum(row['seconds'] for row in attacks):,.0f}")
        missing = NONE if any(rows) else MISSING
        return [*(row or missing for row in rows), *(costs if attacks else [missing] * 3)]

    names = {"ablation to 45 pixels": "ablation(45)", "F(10)": "F(10)"}
    words = [*asked, "forward passes a prediction", "forward passes of all attacks", "seconds of all attacks"]
    lines = [list(line) for line in zip(words, *map(column, names.values()), strict=True)]
    return MarkdownTable(
        ["the first 100 test images", *names], lines, "Sparse-RS with 1,000 queries, Pointwise 3 times"
    )


def certify_cost(files: Files) -> MarkdownTable:
    """What certificates cost, and a training step on a bound."""
    devices = [files[f"bench-certify-{device}"] for device in ("h200", "cpu")]
    lines = [
        [words, *(shown(one.find(**which)) for one in devices)]
        for words, which in (
            ("10,000 certificates by intervals", of(what="certificates", method="ibp")),
            ("10,000 certificates by intervals and lines", of(what="certificates", method="best")),
            ("training step on the exact bound, times a plain step", of(what="step, exact bound")),
            ("training step on the quick bound, times a plain step", of(what="step, quick bound")),
        )
    ]
    note = "784-512(100)-10, all budgets up to 32; in brackets lowest and highest"
    return MarkdownTable(["MNIST", "GPU", "CPU"], lines, note)


def votes_cost(files: Files) -> MarkdownTable:
    """What votes cost over image size, parts and classes, on each device that measured it."""
    found = [files[name] for name in ("bench-votes-h200", "bench-votes-cpu") if files.has(name)]
    titles = ["GPU" if one.name.endswith("h200") else "CPU" for one in found]
    lines = []
    for row in found[-1].select(what="votes"):
        which = {key: row[key] for key in ("network", "side", "parts", "classes")}
        cells: list[str | Measurement] = []
        for one in found:
            growth = one.select(what="growth", **which)
            cells += [f"{growth[0].value:.1f}" if growth else NONE, one.find(what="votes", **which)]
        kind = "residual MLP" if row["network"] == "mlp" else "convolutions"
        lines.append([kind, f"{row['side']} x {row['side']}", f"{row['parts']:,}", f"{row['classes']:,}", *cells])
    head = [f"{title}: {words}" for title in titles for words in ("passes", "certificates, times the passes")]
    note = "passes of an image, times those of 32 x 32 in 16 parts; smaller networks on the CPU, initial weights"
    return MarkdownTable(["network", "image", "parts", "classes", *head], lines, note)


def votes_search(files: Files) -> MarkdownTable:
    """What was tried with votes of parts: a line for each candidate, and for each rule."""
    budgets, lines, n = (1, 2, 4, 8, 10, 13, 16, 20), list[list[str]](), list[str]()
    searches = [f"votes-search{part}" for part in ("", "-seen", "-members", "-colours", "-rates")]
    for found in [files[name] for name in searches if files.has(name)]:
        for row in found.select(what="certified_radius"):
            which = {"classifier": row["classifier"], "method": row.get("method")}
            shares = [found.find(what="certified_accuracy", **which, budget=m) for m in (0, *budgets)]
            words = f"{row['classifier']}, {row['method']}" if "method" in row else row["classifier"]
            network = {"mlp": "residual MLP", "cnn": "convolutions"}.get(row["network"], row["network"])
            epochs = f"{row.beside['epochs']}" if "epochs" in row.beside else NONE
            cells = [f"{100 * share.value:.1f} %" for share in shares]
            radius = f"{row.value:g}" if row.value >= 0 else "none"
            lines.append([words, network, f"{row['trained_for']}", epochs, *cells, radius])
            n = [f"n = {row.n:,}"]
    head = ["CIFAR-10, validation", "network", "trained for", "epochs", "clean", *(f"{m} changed" for m in budgets)]
    return MarkdownTable([*head, "median radius"], lines, "; ".join(["pixels of any value", *n]))


def votes_in_part(files: Files) -> MarkdownTable:
    """Votes with bounds inside their parts, between a plain vote and the bound of one network."""
    budgets, lines, found = (0, 1, 4, 8, 10, 13, 16), [], files["votes-in-part"]
    for row in found.select(what="certified_radius"):
        which = {"classifier": row["classifier"], "parts": row.get("parts"), "inside": row.get("inside")}
        shares = [found.find(what="certified_accuracy", **which, budget=m) for m in budgets]
        words = f"{row['parts']} parts, " if "parts" in row else "one network, bounds"
        words += (f"bounds for {row['inside']} inside" if row["inside"] else "a plain vote") if "parts" in row else ""
        lines.append([words, *(f"{100 * share.value:.1f} %" for share in shares), f"{row.value:g}"])
    notes = [f"{row['images']:,} training images, {row['epochs']} epochs; n = {row.n:,}" for row in found.rows[:1]]
    head = ["MNIST, validation", "clean", *(f"{m} changed" for m in budgets[1:]), "median radius"]
    return MarkdownTable(head, lines, "; ".join(notes))


def theory(files: Files) -> MarkdownTable:
    """Robust error on the paper's Gaussian mixture under the best attack there is."""
    results = files["theory"]
    lines: list[list[str | Measurement]] = []
    for (decay, d), budgets in MIXTURES.items():
        for budget in budgets:
            here = {"d": d, "decay": decay, "budget": budget}
            cells = [results.find(classifier=name, **here) for name in WEIGHTINGS.values()]
            bound = f"{100 * results.find(what='lower_bound', **here).value:.1f} %"
            lines.append([f"{d:,}, {SIGNALS[decay]}", f"{budget}", *cells, f"{cells[2]['k']:,}", bound])
    clean = results.find(what="bayes_error", d=784, decay=0.0)
    return MarkdownTable(
        ["inputs, signal", "changed", *WEIGHTINGS, "that k", "lower bound"],
        lines,
        f"{100 * clean.value:.1f} % without an attack",
    )


def tolerated(files: Files) -> MarkdownTable:
    """The largest budgets at which the robust error on the mixture is at most eps."""
    results, lines = files["theory"], []
    for row in results.select(what="k_trunc"):
        here = {key: row[key] for key in ("d", "decay", "eps")}
        found = [results.find(what=what, **here) for what in ("k_trunc_bayes", "k_trunc", "k_chosen", "k_opt_bound")]
        if here["d"] > 100:
            counts = [f"{one.value:.0f}" + f" ({one.low}-{one.high})" * (one.low != one.high) for one in found]
            lines.append([f"{here['d']:,}, {SIGNALS[here['decay']]}", f"{100 * here['eps']:.0f} %", *counts])
    head = ["inputs, signal", "robust error", *list(WEIGHTINGS)[:3], "any classifier, at most"]
    return MarkdownTable(head, lines, "in brackets what 95 % intervals of the errors leave open")


MIXTURES = {
    (0.0, 784): (1, 5, 10),
    (0.0, 10_000): (10, 30),
    (0.0, 1_000_000): (30, 100, 300),
    (0.5, 784): (1, 5, 10),
    (0.5, 10_000): (10, 30),
}
SIGNALS = {0.0: "even", 0.5: "i^-0.5"}
WEIGHTINGS = {
    "k = budget, Bayes weights": EQUAL,
    "k = budget, best weights": OPTIMAL,
    "k chosen, Bayes weights": CHOSEN,
    "k chosen, best weights": OPTIMAL_CHOSEN,
    "clipped": CLIPPED,
}


Entries = dict[str, Any]
File = str | tuple[str, ...]
Rows = dict[str, tuple[File, Entries]]
"""Words of a line, and for it a results file and entries of its measurements; several files: see `Files.seek`."""
Make = Callable[[Files], MarkdownTable]


def grid(head: str, rows: Mapping[str, tuple[File, Entries]], columns: dict[str, Entries], note: str = "") -> Make:
    """A table whose cells are the measurements with the entries of their row and their column."""

    def make(files: Files) -> MarkdownTable:
        lines = [
            [words, *(cell(files, file, {**which, **asked}) for asked in columns.values())]
            for words, (file, which) in rows.items()
        ]
        return MarkdownTable([head, *columns], lines, "; ".join(filter(None, [note, *waiting(lines)])))

    def cell(files: Files, file: File, asked: Entries) -> str | Measurement:
        if asked.get("what") in asked.pop("never", ()):  # it has no such figure
            return NONE
        file = asked.pop("files", file)
        return files[file].find(**asked) if isinstance(file, str) else files.seek(*file, **asked) or MISSING

    return make


def of(**entries: Any) -> Entries:
    return entries


def classifiers(file: File, names: dict[str, str]) -> Rows:
    """Lines of one file: words -> classifier."""
    return {words: (file, of(classifier=name)) for words, name in names.items()}


def boxes(budgets: Sequence[int], unit: str = "feature") -> dict[str, Entries]:
    """Clean accuracy, and the worst case at these budgets within two boxes of values."""
    worst = of(attack=WORST_CASE, unit=unit, over=None)
    return {"clean": of(what="clean_accuracy")} | {
        f"{m} changed within {beta:g}": of(**worst, budget=m, beta=beta) for beta in (1.0, 100.0) for m in budgets
    }


def mnist_baselines(*budgets: int) -> Make:
    """What each part of the defence does; the last line is proven, at any value."""

    def make(files: Files) -> MarkdownTable:
        parts = {
            "plain network": "F(0) plain", "inputs clamped to [-1, 1]": "F(0) clamped", "truncation": "F(10) plain"
        }  # fmt: skip
        trained = {"adversarial training": "F(0)", "truncation and adversarial training": "F(10)"}
        rows = classifiers("mnist-baselines", parts) | classifiers("mnist-table1", trained)
        note = "all attacks with 1,000 queries and 100 steps; 5,000 and 300 where the training was adversarial"
        attacked = grid("MNIST", rows, boxes(budgets), note)(files)
        own = of(classifier="wide F(0) for 6, seed 0")
        certified = files["mnist-certified-wide-6"]
        proven = [shown(certified.find(**own, what="certified_accuracy", budget=m)) for m in budgets]
        clean = certified.find(**own, what="clean_accuracy")
        last: list[str | Measurement] = [f"trained on the bound, **proven**, n = {clean.n:,}", clean, *proven, *proven]
        return MarkdownTable(attacked.head, [*attacked.lines, last], note)

    return make


def certified(
    head: str, sources: Mapping[str, tuple[str, Entries]], budgets: Sequence[int], rivals: str = "", whole: bool = True
) -> Make:
    """Certified accuracy at any value, ours and the rivals': means over classifiers; last the published medians.

    whole: with a line for what is not measured.
    """

    def make(files: Files) -> MarkdownTable:
        lines, most = [], 0
        for words, (name, which) in sources.items():
            rows = files[name].rows if files.has(name) else []
            rows = [row for row in rows if row.get("classifier") in which["classifiers"]]
            radii = [row for row in rows if row.what == "certified_radius" and by(row, which)]
            if not radii:
                lines += [[words, MISSING, *[NONE] * (2 + len(budgets))]] if whole else []
                continue
            proven = [row for row in rows if row.what == "certified_accuracy" and by(row, which)]
            shares = [[row for row in rows if row.what == "clean_accuracy"]]
            shares += [[row for row in proven if row["budget"] == m] for m in budgets]
            most = most or radii[0].n or 0
            words += f", mean of {len(radii)} seeds" if len(radii) > 1 else ""
            words += f", n = {radii[0].n:,}" if radii[0].n != most else ""
            cells = [f"{100 * mean(some):.1f} %" if some else NONE for some in shares]
            lines.append(
                [
                    words,
                    *cells,
                    f"{mean(radii):.3g}" if mean(radii) >= 0 else "none",
                    f"{radii[0].beside.get('forwards', 1):,}",
                ]
            )
        for row in recipe.load(rivals).quoted if rivals else ():
            lines.append([f"{row['classifier']}, published", *[NONE] * (1 + len(budgets)), f"{row['value']:g}", NONE])
        names = ["clean", *(f"{m} changed" for m in budgets), "median radius", "forward passes"]
        notes = ["pixels of any value", *([f"n = {most:,}"] if most else []), *waiting(lines)]
        return MarkdownTable([head, *names], lines, "; ".join(notes))

    def by(row: Measurement, which: Entries) -> bool:
        """Whether a row is of the rule asked for, or of none."""
        rule = row.get("method") if row.get("method") in get_args(certify.Rule) else None
        return bool(rule == which.get("method"))

    return make


def sandwich(head: str, file: str, names: Mapping[str, str], budgets: Sequence[int]) -> Make:
    """What is proven of some networks, and what stands under all attacks.  names: words of a line -> classifier."""

    def make(files: Files) -> MarkdownTable:
        lines: list[list[str | Measurement]] = []
        for words, name in names.items():
            worst = of(classifier=name, attack=WORST_CASE, beta=100.0)
            rows = [files.seek(file, **worst, budget=m) for m in budgets]
            lines.append([f"{words}proven", *(f"{100 * row['certified']:.1f} %" if row else MISSING for row in rows)])
            lines.append([f"{words}all attacks, values within 100", *(row or MISSING for row in rows)])
        found = [cell for line in lines for cell in line if isinstance(cell, Measurement)]
        notes = [spent(found)] if found else []
        return MarkdownTable([head, *(f"{m} changed" for m in budgets)], lines, "; ".join([*notes, *waiting(lines)]))

    return make


@dataclass(frozen=True)
class Printed:
    """A number of the paper, and where ours stands.

    value: a share or count; text if it is not to be compared.  n: rows of the paper's share.
    files, which: results files, of which the first that has ours counts, and its entries.
    why: a reason of its own for not being measured.  never: titles of columns that it has no place in.
    """

    words: str
    value: float | str
    files: tuple[str, ...]
    which: Entries
    n: int | None = None
    why: str = ""
    never: Sequence[str] = ()

    def agrees(self, found: Measurement) -> bool:
        """Whether the paper's number lies in our interval, or ours in the paper's."""
        assert not isinstance(self.value, str)
        theirs = Share(round(self.value * self.n), self.n) if self.n else None
        inside = theirs is not None and theirs.low <= found.value <= theirs.high
        return inside or found.get("low", found.value) <= self.value <= found.get("high", found.value)

    def verdict(self, found: dict[str, Measurement]) -> str:
        """Under which titles of measurements the numbers agree."""
        if isinstance(self.value, str) or not found:
            return NONE
        titles = [title for title, one in found.items() if self.agrees(one)]
        if titles:
            return "yes" if len(titles) == len(found) else ", ".join(titles)
        sides = {"higher" if one.value > self.value else "lower" for one in found.values()}
        return f"no, {' or '.join(sorted(sides))} here"


def waiting(lines: Sequence[Sequence[str | Measurement]]) -> list[str]:
    """The words below a table in which a figure is missing."""
    return [f"{MISSING} yet"] if any(MISSING in line for line in lines) else []


def beside(head: str, numbers: Sequence[Printed], columns: dict[str, Entries] | None = None, note: str = "") -> Make:
    """Numbers of the paper, one a line, beside ours.

    columns: titles, and further entries or other files of ours; in a classifier's name {} is that of the line.
    """
    columns = columns or {"here": {}}

    def make(files: Files) -> MarkdownTable:
        heads, lines = [head, "paper", *columns, "n", "agrees", "command"], [line(files, one) for one in numbers]
        words = [note, "in brackets 95 % intervals, of times the shortest and longest", *waiting(lines)]
        return MarkdownTable(heads, lines, "; ".join(filter(None, words)))

    def line(files: Files, one: Printed) -> list[str]:
        found = {}
        for title, more in columns.items():
            asked = {"files": one.files, **one.which, **more}
            if "classifier" in more:
                asked["classifier"] = more["classifier"].format(one.which["classifier"])
            row = files.seek(*(names := asked.pop("files")), **asked)
            if row is None and asked.get("over") == "right" and "budget" in asked:
                row = of_the_right(files, names, asked)
            if row is not None:
                found[title] = replace(row, paper=None)
        printed = one.value
        if not isinstance(printed, str):
            like = Measurement.of(**{"what": "share", **one.which}, value=printed)
            printed = f"{100 * printed:.4g} %" if kind_of(like) == "share" else shown(like)
        none = {
            title: NONE if title in one.never else f"{MISSING}: {one.why}" if one.why else MISSING for title in columns
        }
        cells = [shown(found[title]) if title in found else none[title] for title in columns]
        rows = " / ".join(f"{n:,}" for n in sorted({row.n for row in found.values() if row.n})) or NONE
        commands = [files[name].command for name in one.files if name in files and found]
        commands += [f"ell0 run {name}" for name in one.files[::-1] if name in recipe.names()]
        return [one.words, printed, *cells, rows, one.verdict(found), f"`{commands[0]}`" if commands else NONE]

    return make


def of_the_right(files: Files, names: Sequence[str], asked: Entries) -> Measurement | None:
    """A robust accuracy among the rows right without an attack; None unless both shares are of the same rows."""
    robust = files.seek(*names, **{**asked, "over": None})
    clean = files.seek(*names, what="clean_accuracy", classifier=asked["classifier"])
    if robust is None or clean is None or robust.n != clean.n or not robust.n:
        return None
    return Measurement.of(**asked, value=Share(round(robust.value * robust.n), round(clean.value * robust.n)))


def sources(classifier: str, table: int) -> tuple[str, ...]:
    """The results files of a classifier in a table of the paper: CIFAR-10 is run a network at a time, or as a whole."""
    if classifier.startswith("F"):
        return (f"mnist-table{table}",)
    part = "base" if classifier == "VGG base" else recipe.slug(classifier)
    return f"cifar-table{table}-{part}", f"cifar-table{table}"


def figures(classifier: str, table: int) -> list[Entries]:
    """What a table of the paper says of a classifier, as the recipe has it."""
    return [one for one in recipe.load(sources(classifier, table)[-1]).paper if one["classifier"] == classifier]


def paper_table_1(names: Sequence[str], columns: dict[str, Entries], **which: Any) -> Make:
    """Table 1 of the paper, of some classifiers."""
    search = of(attack="sparse_rs", part=None, **which)
    attacked = [title for title, more in columns.items() if more.get("over") or more.get("values")]
    numbers = []
    for name in names:
        never = ["another training"] if name == "VGG(0)" else []
        for figure in figures(name, 1):
            entries = {key: value for key, value in figure.items() if key not in ("value", "n")}
            if "budget" not in figure:
                clean = Printed(f"{name}, clean", figure["value"], sources(name, 1), entries, 10_000)
                numbers.append(replace(clean, never=[*never, *attacked]))
                continue
            words = f"{name}, {figure['budget']} changed, {figure['queries']:,} queries"
            shares = figure["value"], sources(name, 1), entries | search, figure["n"]
            numbers.append(Printed(words, *shares, never=never))
    note = "Sparse-RS with values within 100; the paper's intervals are those of 512 images"
    return beside("Table 1", numbers, columns, note)


def paper_table_2(names: Sequence[str], ways: dict[str, Entries]) -> Make:
    """Medians by each way of counting, in bold where the paper's agrees."""

    def make(files: Files) -> MarkdownTable:
        numbers = {}
        for name in names:
            for figure in figures(name, 2):
                entries = of(classifier=name, what="median_distance", beta=figure["beta"])
                numbers[f"{name}, within {figure['beta']:g}"] = Printed("", figure["value"], sources(name, 2), entries)
        lines = [["paper", *(f"{one.value:g}" for one in numbers.values())]]
        lines += [[words, *(cell(files, one, way) for one in numbers.values())] for words, way in ways.items()]
        command = f"`ell0 run {sources(names[0], 2)[-1]}`"
        note = f"{command}; bold where the paper's number lies in the interval; in brackets 95 % intervals"
        return MarkdownTable(["median, Pointwise", *numbers], lines, "; ".join([note, *waiting(lines)]))

    def cell(files: Files, one: Printed, way: Entries) -> str:
        found = files.seek(*one.files, **one.which, **way)
        if found is None:
            return MISSING
        words = f"{shown(replace(found, paper=None))}, n = {found.n:,}"
        return f"**{words}**" if one.agrees(found) else words

    return make


def paper_figure_1(files: Files) -> MarkdownTable:
    """Figure 1 of the paper, which prints no numbers: robust accuracy over budgets."""
    search = of(what="robust_accuracy", attack="sparse_rs", queries=1000, beta=100.0, over=None)
    lines = []
    for m in range(1, 16):
        asked = [("mnist-fig1a", "F(0)"), ("mnist-fig1a", f"F({m})"), ("mnist-fig1b", "F(0)"), ("mnist-fig1b", "F(10)")]
        found = [files.seek(file, classifier=name, budget=m, **search) for file, name in asked]
        lines.append([f"{m}", *(MISSING if one is None else replace(one, paper=None) for one in found)])
    trained = []
    for file in ("mnist-fig1a", "mnist-fig1b"):
        time = files.seek(file, what="epoch_seconds", classifier="F(0)")
        words = "" if time is None else f", {time.n} epochs in {time.get('precision', 'fp32')}"
        trained.append(f"{file[-2:]} by `ell0 run {file}`{words}")
    head = ["changed = k_adv", "1a: F(0)", "1a: F(k), k = k_adv", "1b: F(0)", "1b: F(10)"]
    return MarkdownTable(
        head, lines, "; ".join(["Sparse-RS, 1,000 queries, values within 100", *trained, *waiting(lines)])
    )


def cifar_times(files: Files) -> MarkdownTable:
    """How long a network of the paper takes with all that is measured of it."""
    parts = ("cifar-vgg10", "cifar-table1-vgg10", "cifar-table2-vgg10", "cifar-worst-vgg10")
    seconds = [files[name].seconds for name in parts]
    cells = [f"{one:,.0f} s" for one in (*seconds, seconds[0] + max(seconds[1:]))]
    heads = ["one H200, the last three side by side", "training", "Table 1", "Table 2", "all attacks", "in all"]
    return MarkdownTable(heads, [["VGG(10)", *cells]])


def paper_differences(files: Files) -> MarkdownTable:
    """The numbers of the paper that agree with none of ours."""
    compared = ("paper-table1-mnist", "paper-table1-cifar", "paper-text")
    rows = [row for name in compared for row in TABLES[name](files).lines]
    lines = [[*row[:3], *row[-3:]] for row in rows if str(row[-2]).startswith("no,")]
    return MarkdownTable(["number", "paper", "here", "n", "agrees", "command"], lines, "in brackets 95 % intervals")


def paper_theorem_2(files: Files) -> MarkdownTable:
    """Theorem 2 of the paper where it applies."""
    lines = []
    for n in (10, 20, 50, 100, 300):
        asked = ("c1", "c2", "alpha_trunc_bound", "alpha_opt_bound")
        found = [files.seek("theory", what=what, decay=0.0, log10_d=n) for what in asked]
        lines.append([f"1e{n}", *("does not apply" if one is None else f"{one.value:.3f}" for one in found)])
    return MarkdownTable(["d", "c_1", "c_2", "log_d k_trunc, at least", "log_d k*, at most"], lines)


def mean(rows: Iterable[Measurement]) -> float:
    return statistics.mean(row.value for row in rows)


def spent(rows: Sequence[Measurement]) -> str:
    return f"{rows[0]['queries']:,} queries, {rows[0]['steps']} steps"


def forward(data: str, k: int = 10, **more: Any) -> Entries:
    return of(what="forward", data=data, k=k, **(more or of(to="dense", prepared=True)))


def layers(file: str, kinds: dict[str, Entries]) -> Rows:
    kinds = {
        "forward, MNIST": forward("mnist"),
        "forward, MNIST with 10 numbers at +-100": forward("mnist+10@100"),
        "forward, Gaussian": forward("gaussian"),
        **kinds,
    }
    return {words: (file, which) for words, which in kinds.items()}


def printed(words: str, value: float | str, *files: str, **which: Any) -> Printed:
    return Printed(words, value, files, which)


CLEAN, RHO = of(what="clean_accuracy"), of(what="median_distance")
EPOCH, TRAINED = of(what="epoch_seconds"), of(what="training_seconds")
ABS, ABLATION, VGG_0, VGG_10 = (of(classifier=name) for name in ("ABS", "ablation(45)", "VGG(0)", "VGG(10)"))
AT_12 = of(what="robust_accuracy", attack="sparse_rs", budget=12, over=None)
TEXT = [
    printed("base classifier, MNIST, as the paper says", 0.993, "mnist-baselines", **CLEAN, classifier="F(0) plain"),
    printed("the same, images normalised", 0.993, "mnist-scale", **CLEAN, classifier="F(0) plain, normalised"),
    printed("the same, larger rate, images moved", 0.993, "mnist-base", **CLEAN, classifier="F(0) base, moved"),
    printed("base classifier, CIFAR-10, approximately", 0.91, "cifar-base", **CLEAN, classifier="VGG base"),
    printed("ABS, 12 changed within 1, 10,000 queries", 0.45, "mnist-abs", **ABS, **AT_12, beta=1.0, queries=10_000),
    Printed("ABS, 12 changed within 1, as its authors report it", 0.78, (), {}, why="a figure of another paper"),
    printed("ABS, 12 changed within 100, 10,000 queries", 0.0, "mnist-abs", **ABS, **AT_12, beta=100.0, queries=10_000),
    printed("ABS, 12 changed within 100, 100 queries", 0.0, "mnist-abs", **ABS, **AT_12, beta=100.0, queries=100),
    printed("ABS, rho within 1, by the text", 22, "mnist-abs", **ABS, **RHO, beta=1.0),
    printed("ABS, rho within 1, by the caption of Table 2", 21, "mnist-abs", **ABS, **RHO, beta=1.0),
    printed("ABS, rho within 100", 1, "mnist-abs", **ABS, **RHO, beta=100.0),
    printed("ablation, rho within 1, as its authors report it", 31, "mnist-ablation", **ABLATION, **RHO, beta=1.0),
    printed("ablation, rho within 100", "not effective", "mnist-ablation", **ABLATION, **RHO, beta=100.0),
    printed("ablation, 12 changed within 1", "could not test", "mnist-ablation", **ABLATION, **AT_12, beta=1.0),
    printed("ablation, 12 changed within 100", "could not test", "mnist-ablation", **ABLATION, **AT_12, beta=100.0),
    *(
        printed(f"epoch of F({k})", words, "bench-train-h200", what="epoch", unit="seconds", k=k)
        for k, words in ((0, "0.5 s"), (10, "29-30 s"), (1, "26-27 s"))
    ),
    printed("epoch of VGG(0)", "13-14 s", *sources("VGG(0)", 1), "cifar-vgg0", **EPOCH, **VGG_0),
    printed("epoch of VGG(10)", "32-33 s", *sources("VGG(10)", 1), "cifar-vgg10", **EPOCH, **VGG_10),
    printed("training of F(10)", "roughly 5 days", "mnist-f10", **TRAINED),
    printed("training of VGG(10)", "roughly 5 days", *sources("VGG(10)", 1), "cifar-vgg10", **TRAINED, **VGG_10),
]
"""Numbers of the paper's text."""

VOTES: dict[str, tuple[str, Entries]] = {
    f"vote of {parts} parts, for {m} changed": (
        f"cifar-votes-{size}",
        of(classifiers=[f"votes for {m}, seed {seed}" for seed in range(3)]),
    )
    for size, parts, m in (("small", 16, 4), ("middle", 64, 12), ("large", 128, 20))
}
BOUNDS: dict[str, tuple[str, Entries]] = {
    f"bound for {m} changed": ("cifar-certified", of(classifiers=[f"F(0) for {m}"])) for m in (2, 8)
}
RIVALS: dict[str, tuple[str, Entries]] = {
    words: ("cifar-rivals", of(classifiers=[name], method=rule))
    for words, name, rule in (
        ("partition into 115 (FPA)", "partition(115)", None),
        ("partition into 115 (FPA), plurality", "partition(115)", "plurality"),
        ("ablation to 25 pixels", "ablation(25)", None),
        ("ablation to 75 pixels", "ablation(75)", None),
    )
}
SEARCH = of(attack="sparse_rs", beta=100.0, unit="feature", over=None)
UNDER_12 = {
    "clean": CLEAN,
    "12 changed within 1": of(**AT_12, beta=1.0, queries=10_000),
    "the same, all attacks": of(**{**AT_12, "attack": WORST_CASE}, beta=1.0),
    "12 changed within 100, 100 queries": of(**AT_12, beta=100.0, queries=100),
    "the same, 10,000 queries": of(**AT_12, beta=100.0, queries=10_000),
    "rho within 1": of(**RHO, beta=1.0),
    "rho within 100": of(**RHO, beta=100.0),
}
ROWS = {"of all rows": of(over=None), "of the rows classified rightly": of(over="right")}
SCALE = [(3, 5000), (5, 5000), (8, 300), (8, 1000), (8, 5000)]
TIMES = {"training": "training", "of them attacks": "attack", "one epoch": "epoch"}
INPUTS = {"MNIST": "mnist", "MNIST with 10 numbers at +-100": "mnist+10@100", "Gaussian": "gaussian"}
INPUTS |= {"80 % zeros": "zeros80"}
WEIGHTS = {"initial weights": of(weights="initial"), "weights of a trained F(10)": of(weights="trained")}
DETECTORS = {PLAIN: PLAIN, "the same, C chosen against evasion": HARDENED, "the same, weights of at least 0": MONOTONE}
DETECTORS |= {f"`{OURS}`": OURS}


def counted(file: str, samples: str, inputs: Sequence[str], back: Mapping[str, Entries]) -> Make:
    """The layer for k beyond those whose terms are listed.  inputs: of the forward rows.  back: other rows."""
    ahead = of(what="forward", to="dense", prepared=True)
    kinds = {f"forward, {its}": of(**ahead, data=data) for its, data in INPUTS.items() if its in inputs} | dict(back)
    rows = {
        f"{words}, {weights} weights": (file, of(**which, weights=weights))
        for words, which in kinds.items()
        for weights in ("initial", "trained")
    }
    columns = {f"k = {k}": of(k=k) for k in (16, 32, 64, 100, 200, 300, 391)}
    return grid(f"{samples} samples, 784 -> 1568", rows, columns, "medians, times the dense layer")


def backward(gradient: str, data: str) -> Entries:
    return of(what="backward", gradient=gradient, data=INPUTS[data])


ON_CPU: Any = (
    "256", tuple(INPUTS),
    {
        "training step, MNIST": of(what="step", data="mnist"),
        **{f"gradient to the input, {data}": backward("input", data) for data in ("MNIST", "80 % zeros")},
    },
)  # fmt: skip
ON_H200: Any = (
    "8,192", ("MNIST", "Gaussian"),
    {f"gradient to the {to}, MNIST": backward(to, "MNIST") for to in ("input", "weight")},
)  # fmt: skip


TABLES: dict[str, Make] = {
    "unclean": unclean,
    "digits": digits,
    "attacks": attacks,
    "attacks-reference": attacks_reference,
    "peers": peers,
    "mnist-table1": grid(
        "MNIST",
        {
            f"{name}, {m} changed": (("mnist-table1",), of(classifier=name, budget=m))
            for name in ("F(0)", "F(10)")
            for m in (3, 5, 8)
        },
        {f"Sparse-RS, {q:,} queries": of(**SEARCH, queries=q, part=None) for q in (300, 1000, 5000)}
        | {"the same on the first 1,000 rows": of(**SEARCH, queries=5000, files=("mnist-scale",))}
        | {
            f"all attacks, values within {beta:g}": of(attack=WORST_CASE, beta=beta, over=None) for beta in (100.0, 1.0)
        },
        "Sparse-RS with values within 100; all attacks with 5,000 queries, 300 steps",
    ),
    "mnist-training": mnist_training,
    "mnist-front": mnist_baselines(5),
    "mnist-baselines": mnist_baselines(3, 5, 8),
    "mnist-abs": grid(
        "MNIST",
        classifiers(("mnist-abs",), {"ABS": "ABS", "F(10)": "F(10)", "trained on the bound": "F(0) for 10, seed 0"}),
        UNDER_12,
        "Sparse-RS with 10,000 queries where none are named; all attacks with 1,000 more and 100 steps",
    ),
    "mnist-abs-binary": grid(
        "MNIST",
        classifiers(("mnist-abs",), {"ABS on binary images": "ABS binary"}),
        {words: asked for words, asked in UNDER_12.items() if words not in list(UNDER_12)[1:3]},
    ),
    "mnist-base": grid(
        "base classifier on MNIST",
        classifiers("mnist-baselines", {"rate 0.001, 250 epochs, as in the paper": "F(0) plain"})
        | classifiers(("mnist-scale",), {"the same, images normalised as in its supplement": "F(0) plain, normalised"})
        | classifiers(
            "mnist-base",
            {"rate 0.05, 20 epochs": "F(0) base", "rate 0.05, 40 epochs, images moved": "F(0) base, moved"},
        ),
        {"clean accuracy": of(what="clean_accuracy")},
    ),
    "mnist-scale": grid(
        "MNIST",
        classifiers(
            ("mnist-scale",),
            {
                f"{name}, {words}": name + more
                for name in ("F(0)", "F(10)")
                for words, more in (("images in [-1, 1]", ""), ("images normalised", ", normalised"))
            },
        ),
        {"clean": of(what="clean_accuracy")}
        | {f"{m} changed, {q:,} queries": of(**SEARCH, budget=m, queries=q) for m, q in SCALE},
        "Sparse-RS with values within 100",
    ),
    "mnist-k": grid(
        "MNIST, small networks",
        classifiers("mnist-k", {f"F({k})": f"F({k})" for k in (0, 10, 50, 100, 227)}),
        {"clean": of(what="clean_accuracy")}
        | {f"{m} changed within 100": of(attack=WORST_CASE, over=None, budget=m, beta=100.0) for m in (5, 8)},
        "all attacks with 1,000 queries and 100 steps",
    ),
    "mnist-ablation": mnist_ablation,
    "mnist-certified": certified(
        "MNIST",
        {
            "bound for 6 changed, wide, bent images, 1 seed": (
                "mnist-certified-wide-6",
                of(classifiers=["wide F(0) for 6, seed 0"]),
            )
        }
        | {
            f"bound for {m} changed": ("mnist-certified", of(classifiers=[f"F(0) for {m}, seed {i}" for i in range(3)]))
            for m in (6, 10, 16)
        }
        | {
            "bound for 22 changed, bounded loss": (
                "mnist-certified-22",
                of(classifiers=[f"F(0) for 22, seed {i}" for i in range(3)]),
            ),
            "the same by the cross-entropy, 1 seed": (
                "mnist-certified-22-plain",
                of(classifiers=["F(0) for 22, cross-entropy"]),
            ),
        }
        | {
            f"vote of {parts} parts, for {m} changed": (
                "mnist-votes",
                of(classifiers=[f"votes for {m}, seed {i}" for i in range(3)]),
            )
            for parts, m in ((16, 4), (49, 10), (98, 24))
        }
        | {"partition into 60 (FPA)": ("mnist-rivals", of(classifiers=["partition(60)"]))}
        | {"ablation to 45 pixels": ("mnist-rivals", of(classifiers=["ablation(45)"]))},
        (1, 4, 8, 10, 16, 20, 24),
        "mnist-rivals",
    ),
    "mnist-sandwich": sandwich("MNIST", "mnist-sandwich", {"": "F(0) for 10"}, (4, 8, 12, 16)),
    "cifar-all-attacks": grid(
        "CIFAR-10, changed pixels",
        {
            words: ((f"cifar-worst-{part}", "cifar-worst"), of(classifier=name))
            for words, name, part in (
                ("VGG(0)", "VGG(0)", "vgg0"),
                ("VGG(10)", "VGG(10)", "vgg10"),
                ("VGG(10), another training", "VGG(10)", "again"),
            )
        },
        boxes((3, 8), "pixel"),
        "all attacks with 5,000 queries, 200 steps",
    ),
    "cifar-best": grid(
        "CIFAR-10",
        classifiers("cifar-best", {"clamped, an attack in every step": "VGG clamped, TRADES"}),
        {"clean": of(what="clean_accuracy")}
        | {
            f"{m} {unit}s within 1": of(attack=WORST_CASE, unit=unit, budget=m, beta=1.0)
            for unit, m in (("feature", 3), ("feature", 8), ("pixel", 20))
        },
        "all attacks with 5,000 queries, 300 steps",
    ),
    "cifar-times": cifar_times,
    "cifar-training": grid(
        "CIFAR-10, 250 epochs",
        {
            name: ((f"cifar-{recipe.slug(name)}", *sources(name, 1)), of(classifier=name))
            for name in ("VGG(0)", "VGG(10)")
        }
        | {"VGG base": (("cifar-base", *sources("VGG base", 2)), of(classifier="VGG base", never=["attack_seconds"]))},
        {words: of(what=f"{what}_seconds") for words, what in TIMES.items()},
        "an epoch is the median of all",
    ),
    "cifar-certified": certified(
        "CIFAR-10",
        VOTES | BOUNDS | RIVALS,
        (1, 2, 4, 8, 10, 13, 16, 20),
        "cifar-rivals",
        whole=False,
    ),
    "cifar-front": certified("CIFAR-10", VOTES | BOUNDS | RIVALS, (1, 4, 8, 13, 20), "cifar-rivals", whole=False),
    "cifar-votes-sandwich": sandwich(
        "CIFAR-10",
        "cifar-votes-sandwich",
        {f"{parts} parts, ": f"votes for {m}, seed 0" for parts, m in ((16, 4), (64, 12), (128, 20))},
        (1, 2, 4, 6, 8, 10, 13, 16, 20, 24),
    ),
    "fashion-votes": certified(
        "Fashion-MNIST",
        {"vote of 16 parts, for 4 changed": ("fashion-votes", of(classifiers=["votes for 4, seed 0"]))},
        (1, 2, 4, 6),
    ),
    "votes-search": votes_search,
    "votes-in-part": votes_in_part,
    "certify-cost": certify_cost,
    "theory": theory,
    "tolerated": tolerated,
    "malware": grid(
        "evasion",
        {
            f"{title}, {words}": (f"malware-{file}", of(classifier=name))
            for title, file in (("Drebin-215", "drebin215"), ("DefenseDroid", "defensedroid_prs"))
            for words, name in DETECTORS.items()
        },
        {"accuracy": of(what="clean_accuracy"), "median radius": of(what="median_radius")}
        | {f"{m} added": of(what="evasion", budget=m) for m in (1, 2, 5, 10)},
    ),
    "malware-votes": grid(
        "certified",
        {
            f"{title}, {words}": ((f"votes-{file}",), of(classifier=name))
            for title, file in (("Drebin-215", "drebin215"), ("DefenseDroid", "defensedroid_prs"))
            for words, name in ((f"`{OURS}`", OURS), ("vote over groups of features", "vote of parts"))
        },
        {"accuracy": of(what="clean_accuracy"), "median radius": of(what="certified_radius")}
        | {f"{m} changed": of(what="certified_accuracy", budget=m) for m in (1, 2, 4, 8)},
    ),
    "votes-cost": votes_cost,
    "layer-cpu": grid(
        "256 samples, 784 -> 1568, k = 10",
        layers(
            "bench-layer-cpu",
            {
                "forward, 80 % zeros": forward("zeros80"),
                "training step, weights prepared each time, MNIST": of(what="step", k=10, data="mnist"),
                "gradient to the input, MNIST": of(what="backward", gradient="input", k=10, data="mnist"),
                "forward with torch.topk, times ours": forward("mnist", to="topk"),
                "forward with torch.topk, times ours, k = 100": forward("mnist", 100, to="topk"),
            },
        ),
        WEIGHTS,
        "medians, times the dense layer",
    ),
    "layer-cpu-k": counted("bench-layer-cpu", *ON_CPU),
    "layer-avx2-k": counted("bench-layer-avx2-cpu", *ON_CPU),
    "layer-h200-k": counted("bench-layer-h200", *ON_H200),
    "layer-h200": grid(
        "8,192 samples, 784 -> 1568, k = 10",
        layers(
            "bench-layer-h200",
            {f"gradient to the {to}, MNIST": of(**backward(to, "MNIST"), k=10) for to in ("input", "weight")},
        ),
        WEIGHTS,
        "medians, times the dense layer",
    ),
    "train-h200": grid(
        "F(10)",
        {
            "training step, 256 images, eager": ("bench-train-h200", of(what="step", mode="eager")),
            "training step, 256 images, CUDA graph": ("bench-train-h200", of(what="step", mode="graph")),
            "training epoch, CUDA graph": ("bench-train-h200", of(what="epoch", k=10)),
            "Sparse-RS, 60,000 images, 300 queries each": ("bench-attacks-h200", of(what="attack")),
        },
        {"times F(0)": of(unit="x")},
        "medians",
    ),
    "paper-table1-mnist": paper_table_1(
        ["F(0)", "F(10)"],
        ROWS
        | {
            "of the first 1,000 rows": of(over=None, files=["mnist-scale"]),
            "images normalised": of(over=None, files=["mnist-scale"], classifier="{}, normalised"),
        },
        values="corners",
    ),
    "paper-table1-cifar": paper_table_1(
        ["VGG(0)", "VGG(10)"],
        ROWS
        | {
            "any colour": of(over=None, values="corners"),
            "another training": of(over=None, files=["cifar-table1-again"]),
        },
        values="black-white",
        unit="pixel",
    ),
    "paper-table2-mnist": paper_table_2(
        ["F(0)", "F(0) plain", "F(10)"],
        {
            f"{words}, {'the fewest of 10 runs' if repeats == 10 else 'one run'}": of(**way, repeats=repeats)
            for words, way in {
                "as the authors counted": of(rule="foolbox-flat", count="fallen"),
                "changed pixels": of(rule="foolbox-flat", count="changed"),
                "as the authors counted, noise pixel by pixel": of(rule="foolbox", count="fallen"),
                "changed pixels, noise pixel by pixel": of(rule="foolbox", count="changed"),
                "changed pixels, our rule": of(rule=None, count=None),
            }.items()
            for repeats in ((10,) if way["rule"] == "foolbox" else (10, 1))
        },
    ),
    "paper-table2-cifar": paper_table_2(
        ["VGG(0)", "VGG base", "VGG(10)"],
        {
            f"{words}, the fewest of 10 runs": of(rule="foolbox", count=count, repeats=10)
            for words, count in (
                ("as the authors counted", "fallen"),
                ("changed pixels", "positions"),
                ("changed numbers", "changed"),
            )
        },
    ),
    "paper-figure1": paper_figure_1,
    "paper-differences": paper_differences,
    "paper-theorem2": paper_theorem_2,
    "paper-text": beside("text", TEXT, note="the paper's epochs on an RTX-3080, its trainings on two GTX-1080"),
}


def table(name: str) -> str:
    """A table and, below it, where its figures come from."""
    if name not in TABLES:
        raise LookupError(f"there is no table {name!r}; there are {', '.join(TABLES)}")
    files = Files()
    return TABLES[name](files).text(files)


def main(words: Sequence[str]) -> int:
    check, stale = list(words) == ["--check"], []
    try:
        if words and not check:
            print("\n\n".join(map(table, words)))
            return 0
        for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
            old = path.read_text()
            new = PLACE.sub(lambda place: f"{place[1]}{table(place['name'])}\n{place[3]}", old)
            if new != old:
                stale.append(path.name)
                if not check:
                    path.write_text(new)
    except (LookupError, OSError, ValueError) as error:
        print(f"a table cannot be made: {error}", file=sys.stderr)
        return 2
    if check and stale:
        print(f"tables are stale in {', '.join(stale)}: run tools/tables.py", file=sys.stderr)
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
