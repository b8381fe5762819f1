"""Several runs on one page: seeds as means, a line for each classifier, figures over what a sweep varies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ell0 import report
from ell0.report import sections
from ell0.report.comparison import comparison
from ell0.report.run_files import Run
from ell0.results import Measurement, Results, Share
from report_runs import Outline


def run(name: str, shares: dict[int, float], *, k: int = 0, seed: int = 0, wrong: int = 5, **more: Any) -> Run:
    """A run of one classifier whose worst case leaves these shares of 100 rows at each budget."""
    who = {"classifier": f"F({k})", "k": k, "adversarial": False, **more}
    rows = [Measurement.of("clean_accuracy", Share(190, 200), **who)]
    for budget, share in shares.items():
        given = {**who, "attack": "worst case", "budget": budget, "beta": 1.0, "unit": "feature"}
        count = round(100 * share)
        decided = {"clean": wrong, "adaptive": 100 - count - wrong}
        rows.append(Measurement.of("robust_accuracy", Share(count, 100), **given, decided=decided))
    return Run(Results(name, f"ell0 run {name}.toml", seeds=[seed], rows=rows))


@pytest.fixture
def swept() -> list[Run]:
    found = []
    for k, shares in ((0, ({1: 0.2, 2: 0.0}, {1: 0.4, 2: 0.1})), (4, ({1: 0.8, 2: 0.6}, {1: 0.7, 2: 0.5}))):
        found += [run(f"s-k{k}-seed{seed}", shares[seed], k=k, seed=seed, wrong=5 + 2 * seed) for seed in (0, 1)]
    return found


def charts_of(view: sections.View, heading: str) -> list[Any]:
    return next(list(part.charts) for part in view.sections if part.heading.startswith(heading))


def points(chart: Any) -> dict[str, list[tuple[float, ...]]]:
    return {line.name: [tuple(round(v, 6) for v in (p.x, p.y)) for p in line.points] for line in chart.series}


def test_seeds_become_a_mean_with_their_spread(swept: list[Run]) -> None:
    view = comparison(swept)
    assert view is not None
    (row,) = [row for row in view.results.rows if (row.get("classifier"), row.get("budget")) == ("F(4)", 2)]
    assert (round(row.value, 9), row.low, row.high, row.n) == (0.55, 0.5, 0.6, 100)
    assert row.decided == {"clean": 6, "adaptive": 39}
    assert str(view.verdict).startswith("Worst case: F(4) keeps 55.0 % of 100 test rows right when 2 inputs are set to")
    assert ", on average over 2 seeds (from 50.0 % to 60.0 %)" in str(view.verdict)
    assert "A figure of several seeds is their mean" in view.verdict.notes[-1]
    assert "several seeds" in view.spread
    alone = comparison(swept[::2])
    assert alone is not None
    assert alone.spread == "95 % interval"
    assert "seeds" not in " ".join(alone.verdict.notes)


def test_curves_stand_side_by_side_from_no_change_on_and_over_k(swept: list[Run]) -> None:
    view = comparison(swept)
    assert view is not None
    (curve,) = charts_of(view, "Robust accuracy over")
    assert points(curve) == {"F(0)": [(0, 94), (1, 30), (2, 5)], "F(4)": [(0, 94), (1, 75), (2, 55)]}
    assert curve.series[0].points[0].low is None
    one, two = charts_of(view, "Over k")
    assert [points(one), points(two)] == [{"F(k)": [(0, 30), (4, 75)]}, {"F(k)": [(0, 5), (4, 55)]}]
    assert (one.title, one.note, one.x.label) == ("1 input changed", "worst case", "k")


def test_figures_stand_over_the_budget_of_training() -> None:
    runs = [run(f"s-k2-budget{m}", {1: 0.1 * m, 3: 0.05 * m}, k=2) for m in (2, 4, 8)]
    view = comparison(runs)
    assert view is not None
    one, three = charts_of(view, "Over the budget of the attack in training")
    assert points(one) == {"s-k2": [(2, 20), (4, 40), (8, 80)]}
    assert points(three) == {"s-k2": [(2, 10), (4, 20), (8, 40)]}


def test_published_medians_stand_once_beside_the_curves_of_all_runs() -> None:
    """Those that the recipes of the runs quote; not where the runs are of different data."""
    for names, medians in ((("cifar-votes-small", "cifar-votes-large"), 3), (("cifar-votes-small", "mnist-votes"), 0)):
        runs = [Run(certified(name)) for name in names]
        view = comparison(runs)
        assert view is not None
        (curve,) = charts_of(view, "Proven and broken")
        assert [one.points[0].y for one in curve.series if one.published] == [50.0] * medians


def certified(name: str) -> Results:
    """Results of a recipe of ell0, with a curve."""
    rows = [
        Measurement.of("certified_accuracy", 0.8 - 0.1 * m, classifier=name, unit="pixel", budget=m, n=100)
        for m in (1, 2)
    ]
    return Results(name, f"ell0 run {name}", recipe=name, rows=rows)


def test_lines_have_the_shortest_names_that_tell_them_apart() -> None:
    shares = {1: 0.5}
    for runs, names in (
        ([run("a", shares), run("b", shares, k=3)], {"F(0)", "F(3)"}),
        ([run("a", shares), run("b", shares)], {"a", "b"}),
        ([run("a", shares), run("b", shares), run("b", shares, seed=1, k=2)], {"a: F(0)", "b: F(0)", "b: F(2)"}),
        ([run("a", shares), run("a", {1: 0.6})], {"a", "a (2)"}),  # the same run twice is no second seed
        ([run("a", shares), run("a", {1: 0.6}, seed=1)], {"F(0)"}),
        ([run("a-seed0", shares, classifier="F, seed 0"), run("c", shares, classifier="F, seed 1")], {"a", "c"}),
    ):
        view = comparison(runs)
        assert view is not None
        assert {row["classifier"] for row in view.results.rows} == names


def test_the_page_shows_the_comparison_first_and_each_run_folded(swept: list[Run]) -> None:
    page = Outline(report.page(swept))
    assert page.text.index("Share of test rows classified right") < page.text.index("All figures of this run")
    assert page.text.count("All figures of this run") == 4
    assert page.text.count("How to reproduce") == 4
    assert "cleann = 200" in page.text
    assert "Columns are over different numbers of rows" in page.text
    assert "All figures" not in Outline(report.page(swept[:1])).text
    theory = Run(Results("theory", "ell0 theory", rows=[Measurement.of("other", 1.0)]))
    assert comparison([theory, theory]) is None
    assert "All figures" not in Outline(report.page([theory, theory])).text


def test_what_is_proven_stands_in_the_verdict() -> None:
    def with_proof(certified: float | None, **more: Any) -> str:
        source = run("a", {2: 0.7})
        rows = [row if row.what == "clean_accuracy" else Measurement.of(**{**row, "certified": certified or None})
                for row in source.results.rows]  # fmt: skip
        rows.append(Measurement.of("certified_accuracy", Share(120, 200), classifier="F(0)", budget=2, **more))
        return Outline(report.page([Run(Results("a", "ell0 run a", rows=rows))])).text

    assert "set to any value within ±1, and 65.0 % is proven." in with_proof(0.65)
    assert "Proven at this budget and any value: 60.0 % (53.1-66.5) of 200 test rows." in with_proof(None)
    assert "Proven at this budget and any value within ±1: 60.0 %" in with_proof(None, beta=1.0)
    assert "Proven at this budget" not in with_proof(None, beta=0.5)
    assert "certified, n = 200" in with_proof(None)


def test_a_network_trained_on_its_bound_is_introduced_as_such() -> None:
    results = Results.load(Path(__file__).parent.parent / "results" / "digits.json")
    page = Outline(report.page([Run(results)])).text
    assert "F(8) certifiedk = 8, trained on its bound" in page
    assert page.count("trained on its bound") == 1
    assert Outline(report.page([Run(results), run("other", {1: 0.5})])).text.count("trained on its bound") == 2
