"""The pages of `ell0 theory` and `ell0 theory malware`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

from ..results import Measurement, Results
from ..theory import CHOSEN, CLIPPED, EQUAL, HARDENED, OURS, PLAIN
from ._charts import Axis, Chart, Point, Series
from ._parts import Part, Table
from ._rows import figure_words, grouped
from ._verdict import Verdict
from ._view import View
from ._words import Cell, number, percent, span, tenths

_ERRORS = Axis("robust error", ends=(0.0, 100.0), unit=" %")
_LOWER, _BAYES = "lower bound of any classifier", "Bayes, no attack"
_ALPHA = "\N{GREEK SMALL LETTER ALPHA}"
_STYLES = {EQUAL: 0, CHOSEN: 1, CLIPPED: 2, _LOWER: 3, _BAYES: 4}
_MALWARE_STYLES = {PLAIN: 0, HARDENED: 2, OURS: 1}


def theory_view(results: Results) -> View:
    rows = results.rows
    errors = [row for row in rows if row["what"] == "robust_error"]
    over_k = [row for row in rows if row["what"] == "robust_error_over_k"]
    parts = [_over_budget(decay, some, rows) for decay, some in grouped(errors, lambda row: row["decay"])]
    if over_k:
        parts.append(_over_k(over_k))
    parts += _exponents(rows)
    return _view(results, _theory_verdict(errors, rows), parts)


def malware_view(results: Results) -> View:
    evasion = [row for row in results.rows if row["what"] == "evasion"]
    accuracy, alarms, medians = (
        {row["classifier"]: row for row in results.rows if row["what"] == what}
        for what in ("clean_accuracy", "false_positive_rate", "median_radius")
    )
    series = [
        Series(name, _MALWARE_STYLES.get(name, 3), [_point(row, row["budget"], "added") for row in some])
        for name, some in grouped(evasion, lambda row: row["classifier"])
    ]
    n = evasion[0]["n"]
    chart = Chart(
        "Evasion over added features",
        f"{n:,} malware rows of the test split",
        Axis("features added"),
        Axis("malware taken for harmless", ends=(0.0, 100.0), unit=" %"),
        series,
    )
    at = {(row["classifier"], row["budget"]): row for row in evasion}
    added = dict.fromkeys(row["budget"] for row in evasion)
    curve: tuple[tuple[str | Cell, ...], ...] = tuple(
        (f"{m}", *(Cell.share(at[name, m]) for name in accuracy)) for m in added
    )
    parts = [
        Part(
            "Evasion",
            "The attacker adds features to malware and takes none away. The detectors are linear, so the fewest "
            "additions that evade are known exactly: no attack could do better.",
            (chart,),
            Table(("added", *accuracy), curve),
            "Share of malware taken for harmless, with 95 % interval",
        ),
        Part(
            "What it costs",
            "The certified radius of a row is how many additions, whichever they are, it stays detected under; a "
            "missed row counts as minus 1.",
            table=Table(
                ("detector", "chosen", "accuracy", "false positives", "median certified radius"),
                tuple(
                    (name, _settings(row), Cell.share(row), Cell.share(alarms[name]), Cell.plain(medians[name]))
                    for name, row in accuracy.items()
                ),
            ),
            caption="On the test split, with 95 % intervals",
        ),
        _about(results.rows),
    ]
    return _view(results, _malware_verdict(evasion, accuracy), parts)


def _view(results: Results, verdict: Verdict, parts: Sequence[Part]) -> View:
    return View(
        name=results.name, state="", results=results, recipe=None, units="inputs", items="rows", scale="",
        verdict=verdict, flags=(), accuracies=None, charts=(), medians=None, exhibits=(), training=(), ends=None,
        times=None, quoted=None, others=None, parts=tuple(parts),
    )  # fmt: skip


def _theory_verdict(errors: list[Measurement], rows: list[Measurement]) -> Verdict:
    """At the dimension and budget nearest to those of MNIST and five pixels."""
    near = min(errors, key=lambda row: (abs(math.log(row["d"] / 784)), abs(row["budget"] - 5), row["decay"]))
    here = {key: near[key] for key in ("d", "budget", "decay")}
    equal, chosen, clipped = (_one(errors, classifier=name, **here) for name in (EQUAL, CHOSEN, CLIPPED))
    bound = _one(rows, what="lower_bound", **here)
    headline = Markup(
        "Of {} inputs, {} may change: the truncated classifier errs on <strong>{}</strong> with k = m, and on "
        "<strong>{}</strong> with <strong>k = {}</strong>."
    ).format(number(near["d"]), near["budget"], percent(equal["value"]), percent(chosen["value"]), chosen["k"])
    note = Markup(
        "Clipping the terms instead: {}. No classifier of any kind errs on less than {}. This is with {}. The draws "
        "that chose k and clip are not those that measured them."
    ).format(percent(clipped["value"]), percent(bound["value"]), _signal(near["decay"]))
    return Verdict("Exact worst case, Gaussian mixture", headline, (note,))


def _malware_verdict(evasion: list[Measurement], accuracy: dict[str, Measurement]) -> Verdict:
    ours, plain = (_one(evasion, classifier=name, budget=5) for name in (OURS, PLAIN))
    headline = Markup(
        "Five added features hide <strong>{}</strong> of the malware from logistic regression, and "
        "<strong>{}</strong> from TruncatedLinearClassifier."
    ).format(percent(plain["value"]), percent(ours["value"]))
    rate = percent(ours["rate"])
    note = Markup(
        "Both were set to {} false positives on the validation split. Without an attack {} and {} of the test rows are "
        "classified right."
    ).format(rate, figure_words(accuracy[PLAIN]), figure_words(accuracy[OURS]))
    notes = [note]
    if ours["k"] == 0:
        words = "With k = 0 nothing is truncated: ours is a linear classifier trained exactly against additions."
        notes.append(Markup(words))
    if "over_cost" in ours:
        words = "No candidate was as accurate as asked on the validation split: this one, the nearest, loses {} more."
        notes.append(Markup(words).format(percent(ours["over_cost"])))
    return Verdict("Exact worst case, add-only attacker", headline, tuple(notes))


def _over_budget(decay: float, errors: list[Measurement], rows: list[Measurement]) -> Part:
    charts = []
    lines: list[tuple[str | Cell, ...]] = []
    for d, some in grouped(errors, lambda row: row["d"]):
        budgets = sorted({row["budget"] for row in some})
        bayes = _one(rows, what="bayes_error", d=d, decay=decay)
        bounds = [_one(rows, what="lower_bound", d=d, decay=decay, budget=m) for m in budgets]
        series = [
            Series(name, _STYLES[name], [_point(row, row["budget"], "changed") for row in of_name])
            for name, of_name in grouped(some, lambda row: row["classifier"])
        ]
        series.append(Series(_LOWER, _STYLES[_LOWER], [_point(row, row["budget"], "changed") for row in bounds]))
        ends = [budgets[0], budgets[-1]]
        series.append(Series(_BAYES, _STYLES[_BAYES], [_point(bayes, m, "changed") for m in ends]))
        note = f"n = {some[0]['n']:,} draws"
        charts.append(Chart(f"d = {number(d)}", note, Axis("inputs changed, m", "log"), _ERRORS, series))
        for budget, bound in zip(budgets, bounds, strict=True):
            at = {row["classifier"]: row for row in some if row["budget"] == budget}
            lines.append(
                (
                    f"{number(d)}",
                    f"{number(budget)}",
                    Cell.share(at[EQUAL]),
                    Cell.share(at[CHOSEN]),
                    number(at[CHOSEN]["k"]),
                    Cell.share(at[CLIPPED]),
                    Cell.share(bound),
                )
            )
    head = ("d", "m", "k = m", "k chosen", "k", "clipped", "lower bound")
    return Part(
        f"Robust error over budget: {_signal(decay)}",
        "The classifiers use the Bayes weight. Their worst case is a closed form of the sorted products, so these are "
        "errors under the best attack there is, with values without limit. The lower bound holds for every classifier.",
        tuple(charts),
        Table(head, tuple(lines)),
        "Robust error with 95 % interval",
    )


def _over_k(rows: list[Measurement]) -> Part:
    charts = []
    for (d, decay), some in grouped(rows, lambda row: (row["d"], row["decay"])):
        series = [
            Series(f"m = {m}", i, [_point(row, row["k"], "k") for row in of_m])
            for i, (m, of_m) in enumerate(grouped(some, lambda row: row["budget"]))
        ]
        note = f"{_signal(decay)}, n = {number(some[0]['n'])} draws"
        charts.append(Chart(f"d = {number(d)}", note, Axis("k", "log"), _ERRORS, series))
    return Part(
        "Choosing k",
        "Each line begins at k = m, the choice of the paper. Dropping far more terms than the attacker can change "
        "pays: the terms that are left lie closer together, so that a change moves the sum less.",
        tuple(charts),
    )


def _exponents(rows: list[Measurement]) -> list[Part]:
    names = {
        "alpha_opt_bound": f"{_ALPHA}_opt, at most",
        "alpha_trunc_bound": f"{_ALPHA}_trunc, at least",
        "c1": "c₁",
        "c2": "c₂",
    }
    some = [row for row in rows if row["what"] in names]
    if not some:
        return []
    charts = []
    for (decay, eps), of_decay in grouped(some, lambda row: (row["decay"], row["eps"])):
        series = [
            Series(names[what], i, [_number(row, row["log10_d"]) for row in found])
            for i, what in enumerate(names)
            if (found := [row for row in of_decay if row["what"] == what and math.isfinite(row["value"])])
        ]
        note = f"robust error ε = {eps:g}, {_signal(decay)}"
        axis = Axis("log₁₀ d", "log")
        charts.append(Chart("How fast the tolerated budget grows", note, axis, Axis("exponent of d"), series))
    words = (
        f"Theorem 2 of the paper: at a robust error ε, truncation with k = m tolerates d to the power {_ALPHA}_trunc "
        f"changes, and {_ALPHA}_trunc(ε) is at least {_ALPHA}_opt(ε - c₁) - c₂, where {_ALPHA}_opt is the best "
        "there is. It says something only where ε lies between 0.159 + c₁ and 1/2, which no ε does below "
        "d = 6.8 · 10⁹: a line begins where it says something. Here the constant in the lemma behind it is 2; "
        "the paper has 8."
    )
    return [Part("Where the theorem speaks", words, tuple(charts))]


def _about(rows: list[Measurement]) -> Part:
    lines: list[tuple[str | Cell, ...]] = [
        (f"{row['split']} rows", number(row["value"]), f"{number(row['malware'])} of them malware")
        for row in rows
        if row["what"] == "rows"
    ]
    for what, words in (
        ("features", "0 or 1 each"),
        ("repeated rows", "left out, so that no row stands in two splits"),
        ("conflicting rows", "left out: seen as malware and as harmless"),
    ):
        lines += [(what, number(row["value"]), words) for row in rows if row["what"] == what]
    return Part(
        "The data",
        "Thresholds, C, the budget trained for and, of several candidates, k were chosen on the validation split.",
        table=Table(("what", "number", "about them"), tuple(lines)),
        caption="What was trained and tested on",
    )


def _settings(row: Measurement) -> str:
    names = {"C": "C =", "k": "k =", "trained_for": "trained for"}
    return ", ".join(f"{words} {number(row[key])}" for key, words in names.items() if key in row)


def _signal(decay: float) -> str:
    return "signal spread evenly" if decay == 0 else f"signal that falls as i^-{decay:g}"


def _point(row: Measurement, x: float, what: str) -> Point:
    low, high = (100 * row[key] if key in row else None for key in ("low", "high"))
    interval = span(row, tenths)
    words = f"{number(x)} {what}" if what != "k" else f"k = {number(x)}"
    return Point(
        x, 100 * row["value"], low, high, f"{words}: {percent(row['value'])}" + (f" ({interval})" if interval else "")
    )


def _number(row: Measurement, x: float) -> Point:
    return Point(x, row["value"], words=f"d = 10^{x}: {number(row['value'])}")


def _one(rows: list[Measurement], **what: object) -> Measurement:
    return next(row for row in rows if what.items() <= row.items())
