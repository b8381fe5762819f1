"""Draws docs/figures/*.svg from results files.

python tools/figures.py            # draw every figure anew
python tools/figures.py --check    # exit code 1 if one is stale
python tools/figures.py NAME ...   # draw some: a NAME is a key of ``FIGURES``
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from markupsafe import Markup
from tables import clean_results

from ell0 import recipe
from ell0.report import charts
from ell0.report.charts import Axis, Chart, ChartPoint, Series
from ell0.results import WORST_CASE

ROOT = Path(__file__).resolve().parent.parent
FILE = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 360 {{ 268 + 20 * chart.series | length }}" width="480">
<style>{{ style }}</style>
<rect width="100%" height="100%" fill="var(--paper)"/>
<svg width="360" height="260">{{ chart.svg("chart") }}</svg>
{% for one in chart.series %}
<svg x="52" y="{{ 257 + 20 * loop.index0 }}" width="30" height="14">{{ legend_mark(one.style, one.published) }}</svg>
<text x="92" y="{{ 268 + 20 * loop.index0 }}">{{ one.name }}</text>
{% endfor %}
</svg>
"""


def points(file: str, classifiers: list[str], budgets: tuple[int, ...], **which: Any) -> list[ChartPoint]:
    """The mean share over some classifiers at each budget, and at 0 the clean accuracy."""
    results = clean_results(file)
    asked = {0: {"what": "clean_accuracy"}} | {m: {"budget": m, **which} for m in budgets}
    shares = {
        m: statistics.mean(results.find(classifier=name, **what).value for name in classifiers)
        for m, what in asked.items()
    }
    return [ChartPoint(m, 100 * share, words=f"{m} changed: {100 * share:.1f} %") for m, share in shares.items()]


def mnist() -> str:
    """Accuracy on MNIST over changed pixels, attacked and proven."""
    attacked = {"what": "robust_accuracy", "attack": WORST_CASE, "beta": 100.0}
    proven, far = {"what": "certified_accuracy"}, [f"F(0) for 22, seed {seed}" for seed in range(3)]
    wide, budgets = ["wide F(0) for 6, seed 0"], (1, 4, 8, 10, 16, 20)
    lines = {
        "plain network, attacked": points("mnist-baselines", ["F(0) plain"], (3, 5, 8), **attacked),
        "F(10), adversarially trained, attacked": points("mnist-table1", ["F(10)"], (3, 5, 8), **attacked),
        "trained on the bound for 6, proven": points("mnist-certified-wide-6", wide, budgets, **proven),
        "bounded loss, for 22, proven": points("mnist-certified-22", far, (*budgets, 24, 26, 28), **proven),
        "feature partition (FPA), proven": points("mnist-rivals", ["partition(60)"], budgets, **proven),
        "randomised ablation, proven": points("mnist-rivals", ["ablation(45)"], budgets, **proven),
    }
    series = [Series(name, style, some) for style, (name, some) in enumerate(lines.items())]
    return alone("MNIST", "pixels set to any value", series)


def cifar() -> str:
    """What is proven on CIFAR-10 over changed pixels, ours and the rivals'; published medians are marks at one half."""
    votes, proven = (1, 2, 4, 6, 8, 10, 13, 16, 20, 24), {"what": "certified_accuracy"}
    lines = {}
    for size, parts, m in (("small", 16, 4), ("middle", 64, 12), ("large", 128, 20)):
        names, budgets = [f"votes for {m}, seed {seed}" for seed in range(3)], tuple(b for b in votes if 2 * b < parts)
        lines[f"vote of {parts} parts"] = points(f"cifar-votes-{size}", names, budgets, **proven)
    for words, name in (("feature partition (FPA)", "partition(115)"), ("randomised ablation", "ablation(75)")):
        lines[words] = points("cifar-rivals", [name], (1, 2, 4, 8, 10, 16, 20), **proven, method=None)
    series = [Series(name, style, some) for style, (name, some) in enumerate(lines.items())]
    for row in recipe.load("cifar-rivals").quoted:
        words = f"{row['classifier']}, published median {row['value']}"
        series.append(Series(words, len(series), [ChartPoint(row["value"], 50.0, words=words)], published=True))
    return alone("CIFAR-10, proven", "pixels set to any value", series)


def swept(file: str, lines: dict[str, list[str]]) -> str:
    """Sparse-RS over budgets, with the paper's points.  lines: words -> the classifiers at the budgets 0, 1, 2, ..."""
    results, series = clean_results(file), []
    for style, (words, names) in enumerate(lines.items()):
        rows = results.select(what="clean_accuracy", classifier=names[0])
        attacked = {"what": "robust_accuracy", "attack": "sparse_rs"}
        rows += [results.find(**attacked, classifier=name, budget=m) for m, name in enumerate(names) if m]
        found, paper = [], []
        for row in rows:
            m, (value, low, high) = row.get("budget", 0), (100 * row[key] for key in ("value", "low", "high"))
            found.append(ChartPoint(m, value, low, high, f"{m} changed: {value:.1f} %"))
            if row.paper is not None and row.get("budget"):
                paper.append(ChartPoint(m, 100 * row.paper, words=f"{m} changed: {100 * row.paper:.1f} %"))
        series.append(Series(words, style, found, paper))
    return alone(file, f"Sparse-RS, {rows[-1]['queries']:,} queries, values within 100, n = {rows[-1].n:,}", series)


def mnist_fig1a() -> str:
    """Figure 1a of the paper: F(k) against budget k, and F(0), trained without an attack."""
    lines = {"F(k), k = changed pixels": [f"F({k})" for k in range(16)], "F(0)": ["F(0)"] * 16}
    return swept("mnist-fig1a", lines)


def mnist_fig1b() -> str:
    """Figure 1b of the paper: F(10) and F(0), trained adversarially."""
    return swept("mnist-fig1b", {f"{name}, adversarial training": [name] * 16 for name in ("F(10)", "F(0)")})


def price() -> str:
    """What truncation costs over k, on both machines; where a line is a point, no other k was measured."""
    series: list[Series] = []

    def add(name: str, prices: dict[int, float]) -> None:
        found = [ChartPoint(k, value, words=f"k = {k}: {value:.3g}") for k, value in sorted(prices.items())]
        series.append(Series(name, len(series), found))

    for machine in ("cpu", "h200"):
        results = clean_results(f"bench-layer-{machine}")
        where = "two CPU cores" if machine == "cpu" else "H200"
        asked = {"to": "dense", "weights": "initial"}
        forward = {r["k"]: r for r in results.select(what="forward", prepared=True, data="mnist", **asked)}
        add(f"forward, MNIST, {where}", {k: row.value for k, row in forward.items()})
        others: dict[str, dict[str, Any]] = {
            "forward, Gaussian": {"what": "forward", "prepared": True, "data": "gaussian"},
            "training step, MNIST": {"what": "step", "data": "mnist"},
            "gradient to the input, MNIST": {"what": "backward", "gradient": "input", "data": "mnist"},
        }
        for name, which in others.items():
            if rows := results.select(**which, **asked):
                add(f"{name}, {where}", {row["k"]: row.value for row in rows})
        faster = results.select(what="forward", to="topk", data="mnist", weights="initial")
        add(f"forward with topk, MNIST, {where}", {row["k"]: row.value * forward[row["k"]].value for row in faster})
        if floors := {k: row.value / row["over_floor"] for k, row in forward.items() if row.get("over_floor")}:
            add(f"least a forward can take, {where}", floors)
    x, y = Axis("k", kind="log values"), Axis("times the dense layer", kind="log")
    return drawn(Chart("price over k", "784 inputs, 1,568 outputs, initial weights, medians", x, y, series))


def alone(title: str, note: str, series: list[Series]) -> str:
    """Accuracy over changed pixels."""
    y = Axis("test images still right", ends=(0, 100), unit=" %")
    return drawn(Chart(title, note, Axis("changed pixels"), y, series))


def drawn(chart: Chart) -> str:
    """The chart as on the page of a report, with a background and a legend."""
    css = (ROOT / "src" / "ell0" / "report" / "page.css").read_text()
    colours = css[: css.index("\n}\n", css.index("@media")) + 3]
    rules = re.findall(r"^(?:svg text|\.(?:grid|axis|c0|line|line\.d1|band|mark|mark\.paper)) \{.*$", css, re.MULTILINE)
    style = Markup("\n".join([colours, "svg { font-family: sans-serif; }", *rules]))
    return charts.TEMPLATES.from_string(FILE).render(chart=chart, style=style, legend_mark=charts.legend_mark)


FIGURES: dict[str, Callable[[], str]] = {
    "cifar": cifar,
    "mnist": mnist,
    "mnist-fig1a": mnist_fig1a,
    "mnist-fig1b": mnist_fig1b,
    "price": price,
}


def main(words: list[str]) -> int:
    check, folder = words == ["--check"], ROOT / "docs" / "figures"
    folder.mkdir(exist_ok=True)
    names = list(FIGURES) if check or not words else words
    if unknown := [name for name in names if name not in FIGURES]:
        raise SystemExit(f"NAME must be one of {', '.join(FIGURES)}, got {unknown[0]}")
    figures = {folder / f"{name}.svg": FIGURES[name]() for name in names}
    stale = {path: new for path, new in figures.items() if not path.exists() or path.read_text() != new}
    for path, new in stale.items() if not check else ():
        path.write_text(new)
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
