"""Draws docs/figures/*.svg from results files: `python tools/figures.py`; ``--check`` says whether one is stale."""

from __future__ import annotations

import re
import statistics
import sys
from pathlib import Path
from typing import Any

from markupsafe import Markup

from ell0.report import charts
from ell0.report.charts import Axis, Chart, ChartPoint, Series
from ell0.results import WORST_CASE, Results

ROOT = Path(__file__).resolve().parent.parent
FILE = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 360 {{ 268 + 20 * chart.series | length }}" width="480">
<style>{{ style }}</style>
<rect width="100%" height="100%" fill="var(--paper)"/>
<svg width="360" height="260">{{ chart.svg("chart") }}</svg>
{% for one in chart.series %}
<svg x="52" y="{{ 257 + 20 * loop.index0 }}" width="30" height="14">{{ legend_mark(one.style) }}</svg>
<text x="92" y="{{ 268 + 20 * loop.index0 }}">{{ one.name }}</text>
{% endfor %}
</svg>
"""


def points(file: str, classifiers: list[str], budgets: tuple[int, ...], **which: Any) -> list[ChartPoint]:
    """The mean share over some classifiers at each budget, and at 0 the clean accuracy."""
    results = Results.load(ROOT / "results" / f"{file}.json")
    asked = {0: {"what": "clean_accuracy"}} | {m: {"budget": m, **which} for m in budgets}
    shares = {
        m: statistics.mean(results.find(classifier=name, **what).value for name in classifiers)
        for m, what in asked.items()
    }
    return [ChartPoint(m, 100 * share, words=f"{m} changed: {100 * share:.1f} %") for m, share in shares.items()]


def mnist() -> str:
    """Accuracy on MNIST over changed pixels, attacked and proven."""
    attacked = {"what": "robust_accuracy", "attack": WORST_CASE, "beta": 100.0}
    proven, ours = {"what": "certified_accuracy"}, [f"F(0) for 10, seed {seed}" for seed in range(3)]
    lines = {
        "plain network, attacked": points("mnist-baselines", ["F(0) plain"], (3, 5, 8), **attacked),
        "truncation and adversarial training, attacked": points("mnist-table1", ["F(10)"], (3, 5, 8), **attacked),
        "trained on the bound, proven": points("mnist-certified", ours, (1, 4, 8, 10, 16, 20), **proven),
        "feature partition (FPA), proven": points("mnist-rivals", ["partition(60)"], (1, 4, 8, 10, 16, 20), **proven),
        "randomised ablation, proven": points("mnist-rivals", ["ablation(45)"], (1, 4, 8, 10, 16, 20), **proven),
    }
    series = [Series(name, style, some) for style, (name, some) in enumerate(lines.items())]
    y = Axis("test images still right", ends=(0, 100), unit=" %")
    return alone(Chart("MNIST", "pixels set to any value", Axis("changed pixels"), y, series))


def alone(chart: Chart) -> str:
    """A chart as a file of its own: drawn and coloured as on the page of a report, with a background and a legend."""
    css = (ROOT / "src" / "ell0" / "report" / "page.css").read_text()
    colours = css[: css.index("\n}\n", css.index("@media")) + 3]
    rules = re.findall(r"^(?:svg text|\.(?:grid|axis|c0|line|line\.d1|band|mark)) \{.*$", css, re.MULTILINE)
    style = Markup("\n".join([colours, "svg { font-family: sans-serif; }", *rules]))
    return charts.TEMPLATES.from_string(FILE).render(chart=chart, style=style, legend_mark=charts.legend_mark)


def main(words: list[str]) -> int:
    path = ROOT / "docs" / "figures" / "mnist.svg"
    new = mnist()
    if words == ["--check"]:
        return int(not path.exists() or path.read_text() != new)
    path.parent.mkdir(exist_ok=True)
    path.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
