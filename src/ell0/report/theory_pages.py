"""The pages of `ell0 theory` and `ell0 theory malware`."""

from __future__ import annotations

import math
from collections.abc import Iterable

from markupsafe import Markup

from ..results import (
    CHOSEN,
    CLIPPED,
    EQUAL,
    HARDENED,
    MONOTONE,
    OPTIMAL,
    OPTIMAL_CHOSEN,
    OURS,
    PLAIN,
    Measurement,
    Results,
)
from .charts import Axis, Chart, ChartPoint, Series
from .formatting import Cell, figure_words, number, percent
from .sections import PageTable, Section, View
from .selection import grouped
from .verdicts import Verdict

_ERRORS = Axis("robust error", ends=(0.0, 100.0), unit=" %")
_LOWER, _BAYES = "lower bound of any classifier", "Bayes, no attack"
_STYLES = {EQUAL: 0, OPTIMAL: 5, CHOSEN: 1, CLIPPED: 2, _LOWER: 3, _BAYES: 4}
_MALWARE_STYLES = {PLAIN: 0, HARDENED: 2, MONOTONE: 3, OURS: 1}
_OPT, _TRUNC = "\N{GREEK SMALL LETTER ALPHA}_opt", "\N{GREEK SMALL LETTER ALPHA}_trunc"
_COLUMNS = (EQUAL, OPTIMAL, CHOSEN, OPTIMAL_CHOSEN, CLIPPED)
_TOLERATED = {
    "k_trunc_bayes": EQUAL,
    "k_trunc": f"{OPTIMAL}: k_trunc",
    "k_chosen": CHOSEN,
    "k_opt_bound": "any classifier, at most",
}
_EXPONENTS = {"alpha_opt_bound": f"{_OPT}, at most", "alpha_trunc_bound": f"{_TRUNC}, at least", "c1": "c₁", "c2": "c₂"}


def theory_view(results: Results) -> View:
    """The page of `ell0.theory.figures`."""
    errors = results.select(what="robust_error")
    parts = [_over_budget(results, decay, some) for decay, some in grouped(errors, lambda row: row["decay"])]
    parts += [_tolerated(results)] * bool(results.select(what="k_trunc"))
    parts += [_over_k(results.select(what="robust_error_over_k")), _exponents(results)]
    # The verdict is that of the dimension and budget nearest to those of MNIST and five pixels.
    near = min(errors, key=lambda row: (abs(math.log(row["d"] / 784)), abs(row["budget"] - 5), row["decay"]))
    here = {key: near[key] for key in ("d", "budget", "decay")}
    chosen, clipped = (results.find(classifier=name, **here) for name in (CHOSEN, CLIPPED))
    paper = next(iter(results.select(classifier=OPTIMAL, **here)), results.find(classifier=EQUAL, **here))
    bound = results.find(what="lower_bound", **here)
    headline = Markup(
        "If an attacker changes {} of {} inputs, the truncated classifier errs on <strong>{}</strong> with k = m, and "
        "on <strong>{}</strong> with <strong>k = {}</strong>."
    ).format(near["budget"], number(near["d"]), percent(paper.value), percent(chosen.value), chosen["k"])
    note = Markup(
        "The first has the {} weights, the second the Bayes weights. Clipping the terms instead gives {}. Every "
        "classifier errs on at least {}. This is with {}. k and clip were chosen on other draws than those that "
        "measured them."
    ).format(
        "best" if paper["classifier"] == OPTIMAL else "Bayes",
        *map(percent, (clipped.value, bound.value)),
        _signal(near["decay"]),
    )
    return View(results, Verdict("Exact worst case, Gaussian mixture", headline, (note,)), tuple(parts))


def malware_view(results: Results) -> View:
    """The page of `ell0.theory.malware`."""
    evasion = results.select(what="evasion")
    accuracy, alarms, medians = (
        {row["classifier"]: row for row in results.select(what=what)}
        for what in ("clean_accuracy", "false_positive_rate", "median_radius")
    )
    chart = Chart(
        "Evasion over added features",
        f"{evasion[0].n:,} malware rows of the test split",
        Axis("features added"),
        Axis("malware taken for harmless", ends=(0.0, 100.0), unit=" %"),
        _series(evasion, "classifier", "budget", "added", _MALWARE_STYLES),
    )
    curve: list[tuple[str | Cell, ...]] = [
        (f"{m}", *map(Cell.share, some)) for m, some in grouped(evasion, lambda row: row["budget"])
    ]
    names = {"C": "C =", "k": "k =", "trained_for": "trained for"}
    costs = []
    for name, row in accuracy.items():
        settings = ", ".join(f"{words} {number(row[key])}" for key, words in names.items() if key in row)
        costs.append((name, settings, Cell.share(row), Cell.share(alarms[name]), Cell.plain(medians[name])))
    head = ("detector", "chosen", "accuracy", "false positives", "median certified radius")
    data = [
        (f"{row['split']} rows", number(row.value), f"{number(row['malware'])} of them malware")
        for row in results.select(what="rows")
    ]
    about = {
        "features": "0 or 1 each",
        "repeated rows": "left out, so that no row is in two splits",
        "conflicting rows": "left out: labelled both malware and harmless",
    }
    data += [(what, number(results.find(what=what).value), words) for what, words in about.items()]
    parts = (
        Section(
            "Evasion",
            "The attacker adds features to malware and removes none. The detectors are linear, so the fewest additions "
            "that evade are known exactly: no attack needs fewer. No addition evades weights of at least 0, which miss "
            "the same malware at any number.",
            (chart,),
            PageTable(("added", *accuracy), tuple(curve)),
            "Share of malware taken for harmless, with 95 % interval",
        ),
        Section(
            "What it costs",
            "The certified radius of a row is the number of additions, whichever they are, under which it stays "
            "detected, or all features if none helps the attacker; a missed row counts as minus 1.",
            table=PageTable(head, tuple(costs)),
            caption="On the test split, with 95 % intervals",
        ),
        Section(
            "The data",
            "Thresholds, C and the budget trained for were chosen on the validation split.",
            table=PageTable(("what", "number", "about them"), tuple(data)),
            caption="The rows of training, validation and test",
        ),
    )
    ours, plain = (results.find(what="evasion", classifier=name, budget=5) for name in (OURS, PLAIN))
    headline = Markup(
        "Five added features hide <strong>{}</strong> of the malware from logistic regression, and "
        "<strong>{}</strong> from TruncatedLinearClassifier."
    ).format(percent(plain.value), percent(ours.value))
    note = Markup(
        "Both were set to {} false positives on the validation split. Without an attack they classify {} and {} of the "
        "test rows right."
    ).format(percent(ours["rate"]), figure_words(accuracy[PLAIN]), figure_words(accuracy[OURS]))
    k_is_0 = "k is 0: nothing is truncated, and ours is a linear classifier trained exactly against additions."
    notes = [note, Markup(k_is_0)]
    if "over_cost" in ours:
        words = "No candidate was as accurate as asked on the validation split: this one, the nearest, loses {} more."
        notes.append(Markup(words).format(percent(ours["over_cost"])))
    return View(results, Verdict("Exact worst case, add-only attacker", headline, tuple(notes)), parts)


def _over_budget(results: Results, decay: float, errors: list[Measurement]) -> Section:
    charts = []
    lines: list[tuple[str | Cell, ...]] = []
    for d, some in grouped(errors, lambda row: row["d"]):
        bounds = results.select(what="lower_bound", d=d, decay=decay)
        bayes = results.find(what="bayes_error", d=d, decay=decay)
        ends = [_point(bayes, m, "changed") for m in (bounds[0]["budget"], bounds[-1]["budget"])]
        series = [
            *_series([r for r in some if r["classifier"] in _STYLES], "classifier", "budget", "changed", _STYLES),
            Series(_LOWER, _STYLES[_LOWER], [_point(row, row["budget"], "changed") for row in bounds]),
            Series(_BAYES, _STYLES[_BAYES], ends),
        ]
        axis = Axis("inputs changed, m", "log")
        charts.append(Chart(f"d = {number(d)}", f"n = {some[0].n:,} draws", axis, _ERRORS, series))
        for bound in bounds:
            found = {row["classifier"]: row for row in some if row["budget"] == bound["budget"]}
            shares = [Cell.share(found[name]) if name in found else "not measured" for name in _COLUMNS]
            k = number(found[CHOSEN]["k"])
            lines.append((number(d), number(bound["budget"]), k, *shares, Cell.share(bound)))
    return Section(
        f"Robust error over budget: {_signal(decay)}",
        "The worst case is a closed form of the sorted products, so these are errors under the best possible attack, "
        "with values of any size. The paper's classifier has k = m and the best weights, those of least robust error. "
        "They are searched for up to d = 10,000; for a signal spread evenly the Bayes weights, which are best without "
        "an attack, are taken for them. The lower bound holds for every classifier.",
        tuple(charts),
        PageTable(("d", "m", "k", *_COLUMNS, "lower bound"), tuple(lines)),
        "Robust error with 95 % interval; k is the one chosen",
    )


def _tolerated(results: Results) -> Section:
    lines = []
    rows = [row for row in results.rows if row.what in _TOLERATED]
    for (d, decay, eps), some in grouped(rows, lambda row: (row["d"], row["decay"], row["eps"])):
        found = {row.what: row for row in some}
        signal = _signal(decay).removeprefix("signal ").removeprefix("that ")
        lines.append((number(d), signal, percent(eps), *(count(found[what]) for what in _TOLERATED)))
    words = (
        "The largest m with a robust error of at most ε. With k = m and the best weights this is the paper's "
        "k_trunc(ε). No classifier tolerates more than the last column. So k_opt(ε), what the best classifier "
        "tolerates, lies between the other columns and the last. In brackets: what the 95 % intervals of the errors "
        "leave open."
    )
    head = ("d", "signal", "ε", *_TOLERATED.values())
    return Section("Tolerated budgets", words, table=PageTable(head, tuple(lines)), caption="Inputs changed, m")


def count(row: Measurement) -> str:
    """A whole number, with its interval where that holds more than one."""
    return f"{row.value:,.0f}" + (f" ({row.low}-{row.high})" if row.low != row.high else "")


def _over_k(rows: list[Measurement]) -> Section:
    charts = []
    for (d, decay), some in grouped(rows, lambda row: (row["d"], row["decay"])):
        series = _series(some, "budget", "k", "k", {})
        note = f"{_signal(decay)}, n = {number(some[0].n)} draws"
        charts.append(Chart(f"d = {number(d)}", note, Axis("k", "log"), _ERRORS, series))
    words = (
        "These lines have the Bayes weights. Each begins at k = m, the k of the paper. Dropping far more terms than "
        "the attacker can change pays: what is left lies closer together, so a change moves the sum less."
    )
    return Section("Choosing k", words, tuple(charts))


def _exponents(results: Results) -> Section:
    charts = []
    rows = [row for row in results.rows if row.what in _EXPONENTS and math.isfinite(row.value)]
    for (decay, eps), some in grouped(rows, lambda row: (row["decay"], row["eps"])):
        series = []
        for i, (what, name) in enumerate(_EXPONENTS.items()):
            found = [(row["log10_d"], row.value) for row in some if row.what == what]
            points = [ChartPoint(x, alpha, words=f"d = 10^{x}: {number(alpha)}") for x, alpha in found]
            series += [Series(name, i, points)] * bool(points)
        note = f"robust error ε = {eps:g}, {_signal(decay)}"
        axes = Axis("log₁₀ d", "log"), Axis("exponent of d")
        charts.append(Chart("How fast the tolerated budget grows", note, *axes, series))
    words = (
        f"At a robust error ε, truncation with k = m and the best weights tolerates d to the power {_TRUNC} changes, "
        f"and the best classifier d to the power {_OPT}. Theorem 2 of the paper: {_TRUNC}(ε) is at least "
        f"{_OPT}(ε - c₁) - c₂. It needs an ε between 0.159 + c₁ and 1/2, and there is none below d = 6.8 · 10⁹. All "
        f"lines but that of c₁ begin where it applies to this ε; {_TRUNC} begins where its bound reaches one change. "
        "The constant in the lemma behind it is 2 here; the paper has 8."
    )
    return Section("Where the theorem applies", words, tuple(charts))


def _signal(decay: float) -> str:
    return "signal spread evenly" if decay == 0 else f"signal that falls as i^-{decay:g}"


def _series(rows: Iterable[Measurement], line: str, x: str, words: str, styles: dict[str, int]) -> list[Series]:
    return [
        Series(name if styles else f"m = {name}", styles.get(name, i), [_point(row, row[x], words) for row in some])
        for i, (name, some) in enumerate(grouped(rows, lambda row: row[line]))
    ]


def _point(row: Measurement, x: float, words: str) -> ChartPoint:
    low, high = (None if end is None else 100 * end for end in (row.low, row.high))
    at = f"k = {number(x)}" if words == "k" else f"{number(x)} {words}"
    return ChartPoint(x, 100 * row.value, low, high, f"{at}: {figure_words(row)}")
