"""`ell0 theory`: its figures against the definitions, the malware case against enumeration, the command, its pages."""

from __future__ import annotations

import itertools
import json
import math
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import sparse
from sklearn.linear_model import LogisticRegression

import chromium
from ell0 import report, theory
from ell0.cli import main
from ell0.results import CHOSEN, CLIPPED, EQUAL, HARDENED, MONOTONE, OPTIMAL, OPTIMAL_CHOSEN, OURS, PLAIN, Results
from ell0.theory import Mixture, NotAttainableError, bounds, mixture_figures, robust_errors, weights
from ell0.theory.malware_figures import Detector, ProgramTable, _monotone


@pytest.fixture(scope="module")
def small() -> Results:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixture_figures, "_OPTIMAL_D", 100)
        patch.setattr(weights, "_MOST_ROWS", 256)
        return theory.figures((100, 784), precision=0.02, command="ell0 theory --precision 0.02")


def test_robust_errors_are_as_precise_as_asked_and_right(small: Results) -> None:
    errors = small.select(what="robust_error")
    assert {row["classifier"] for row in errors} == {EQUAL, OPTIMAL, CHOSEN, OPTIMAL_CHOSEN, CLIPPED}
    rng = np.random.default_rng(17)
    for row in errors:
        assert (row["high"] - row["low"]) / 2 <= 0.02
        here = {key: row[key] for key in ("d", "decay", "budget")}
        assert small.find(what="lower_bound", **here).value <= row["high"]
        if row["budget"] == 5 and row["classifier"] in (EQUAL, CHOSEN, CLIPPED):
            mixture, k, clip = Mixture.power_law(row["d"], row["decay"]), row.get("k", 5), row.get("clip", 1.0)
            again = robust_errors(mixture, [5], ks=[k], clips=[clip], rows=250, rng=rng)
            found = again.clipped[clip, 5] if row["classifier"] == CLIPPED else again.truncated[k, 5]
            # intervals of 95 % twice: disjoint by chance about once in two hundred
            assert found.low <= row["high"]
            assert row["low"] <= found.high
        if row["classifier"] == EQUAL:
            chosen = small.find(classifier=CHOSEN, **here)
            assert row["k"] == row["budget"] <= chosen["k"]
            assert chosen.value <= row.value + 0.04
        if row["classifier"] in (OPTIMAL, OPTIMAL_CHOSEN):
            bayes = small.find(classifier=EQUAL if row["classifier"] == OPTIMAL else CHOSEN, **here)
            assert row["k"] == bayes["k"]
            assert row.value == bayes.value if row["decay"] == 0 else row.value <= bayes.value + 0.01
    assert small.find(classifier=OPTIMAL, d=100, decay=0.5, budget=2).value < 0.54
    assert not small.select(classifier=OPTIMAL, d=784, decay=0.5)


def test_tolerated_budgets_are_in_order_and_fit_the_errors(small: Results) -> None:
    rows = small.select(what="k_trunc")
    assert {(row["d"], row["decay"]) for row in rows} == {(100, 0.0), (100, 0.5)}
    for row in rows:
        here = {key: row[key] for key in ("d", "decay", "eps")}
        names = ("k_trunc_bayes", "k_trunc", "k_chosen", "k_opt_bound")
        bayes, trunc, chosen, bound = (small.find(what=what, **here).value for what in names)
        assert bayes <= trunc <= chosen <= bound
        errors = small.select(classifier=OPTIMAL, d=row["d"], decay=row["decay"])
        assert all((one["budget"] <= trunc) == (one.value <= row["eps"]) for one in errors)


def test_five_of_784_inputs(small: Results) -> None:
    equal, chosen = (small.find(classifier=one, d=784, budget=5, decay=0.0).value for one in (EQUAL, CHOSEN))
    assert equal == pytest.approx(0.47, abs=0.01)
    assert chosen <= 0.33
    over_k = {row["k"]: row.value for row in small.select(what="robust_error_over_k", decay=0.0)}
    assert min(over_k.values()) < over_k[max(over_k)]


def test_theorem_holds_where_it_applies(small: Results) -> None:
    trunc = small.select(what="alpha_trunc_bound")
    assert {row["decay"] for row in trunc} == {0.0, 0.5}
    for row in trunc:
        d = 10 ** row["log10_d"]
        assert bounds.theorem_range(d)[0] < row["eps"] < 0.5
        assert row.value == bounds.log_k_trunc_bound(bounds.PowerLaw(d, row["decay"]), row["eps"]) / math.log(d)
        assert row.value <= small.find(what="alpha_opt_bound", log10_d=row["log10_d"], decay=row["decay"]).value


bits = st.lists(st.tuples(st.lists(st.booleans(), min_size=3, max_size=3), st.booleans()), min_size=1, max_size=20)


@given(bits)
def test_distinct_rows_have_one_label_and_stand_once(rows: list[tuple[list[bool], bool]]) -> None:
    labels: dict[tuple[bool, ...], set[bool]] = {}
    for features, label in rows:
        labels.setdefault(tuple(features), set()).add(label)
    table = ProgramTable(
        np.array([features for features, _ in rows]), np.array([label for _, label in rows])
    ).distinct()
    expected = {features: label for features, seen in labels.items() if len(seen) == 1 for label in seen}
    assert dict(zip(map(tuple, table.x.tolist()), table.malware.tolist(), strict=True)) == expected
    assert len(table.x) == len(expected)
    assert len(table.x) + table.repeated + table.conflicting == len(rows)


def test_withstood_equals_enumeration() -> None:
    rng = np.random.default_rng(0)
    for _ in range(10):
        detector = Detector(rng.normal(size=7) + 0.3, 0.2)
        x = rng.random((6, 7)) < 0.5
        rows = np.array(list(itertools.product([False, True], repeat=7)))
        evades = rows @ detector.weight + detector.intercept <= 0
        for row, found in zip(x, detector.withstood(x), strict=True):
            added = (rows & ~row).sum(1)[evades & (rows >= row).all(1)]
            assert found == added.min(initial=8) - 1


@given(
    # few different scores, so that they tie, and not whole, so that sums with an intercept are rounded
    st.lists(st.integers(-3, 3), min_size=1, max_size=40),
    st.floats(0.1, 10),
    st.floats(-5, 5),
    st.floats(0.01, 0.99),
)
@example(list(range(100)), 1.0, 0.5, 0.29)  # of which 29 rows are 0.29, and 0.29 * 100 < 29
def test_rate_is_kept_and_used_up(scores: list[int], scale: float, intercept: float, rate: float) -> None:
    weight = np.array(scores) * scale
    x = np.eye(len(scores), dtype=bool)
    answers = Detector(weight, intercept).at_rate(x, rate).score(x) > 0
    assert answers.mean() <= rate
    # the next lower threshold lets in all rows with the highest score that is not flagged yet: too many
    assert np.mean(weight >= weight[~answers].max()) > rate


def programs(n: int, seed: int = 0) -> ProgramTable:
    """Two features that tell malware from other rows nearly alone, and forty that each tell a little."""
    rng = np.random.default_rng(seed)
    bad = rng.random(n) < 0.5
    often = np.where(np.arange(42) < 2, 0.95, 0.5)
    own = (np.arange(42) % 2 == 1) == bad[:, None]
    return ProgramTable(rng.random((n, 42)) < np.where(own, often, 0.1), bad)


SETTINGS: dict[str, Any] = {"name": "malware-mine", "rate": 0.05, "budgets": (2, 5)}


@pytest.fixture(scope="module")
def mine() -> Results:
    return theory.malware(programs(1_500), command="ell0 theory malware --data mine.npz", **SETTINGS)


def curve(results: Results, classifier: str) -> list[float]:
    return [row["value"] for row in results.select(what="evasion", classifier=classifier)]


def test_ours_is_evaded_less(mine: Results) -> None:
    plain, hardened, ours = (curve(mine, name) for name in (PLAIN, HARDENED, OURS))
    assert len(ours) == 16
    assert all(one == sorted(one) for one in (plain, hardened, ours))
    assert sum(ours[1:11]) < sum(hardened[1:11]) <= sum(plain[1:11]) + 0.5
    assert all(a <= b for a, b in zip(ours[1:11], plain[1:11], strict=True))
    radius, ours_radius = (mine.find(what="median_radius", classifier=name)["value"] for name in (PLAIN, OURS))
    assert plain[int(radius)] <= 0.5 <= plain[int(radius) + 1]
    assert ours_radius > radius
    for name in (PLAIN, OURS):
        assert mine.find(what="false_positive_rate", classifier=name)["low"] <= 0.05


def test_no_addition_evades_weights_of_at_least_0(mine: Results) -> None:
    monotone, plain = curve(mine, MONOTONE), curve(mine, PLAIN)
    assert len(set(monotone)) == 1
    assert plain[0] <= monotone[0] < plain[15]
    assert mine.find(what="median_radius", classifier=MONOTONE).value == 42


def test_weights_of_at_least_0_are_those_of_least_loss() -> None:
    """The conditions of an optimum, which is unique, with the gradient by differences; it has weights at the bound."""
    table, penalty = programs(300), 0.5
    x, sign = table.x.astype(float), np.where(table.malware, 1.0, -1.0)
    weight, intercept = _monotone(sparse.csr_matrix(x), table.malware, penalty)

    def loss(params: npt.NDArray[np.float64]) -> float:
        losses = np.logaddexp(0, -sign * (x @ params[:-1] + params[-1]))
        return float(penalty * losses.sum() + (params[:-1] ** 2).sum() / 2)

    params = np.append(weight, intercept)
    steps = 1e-5 * np.eye(len(params))
    slope = np.array([(loss(params + step) - loss(params - step)) / 2e-5 for step in steps])
    assert (weight >= 0).all()
    assert 10 < (weight > 0).sum() < 32
    np.testing.assert_allclose(slope[params > 0], 0, atol=0.02)
    assert (slope[:-1][weight == 0] > -0.02).all()
    assert abs(slope[-1]) < 0.02


def test_nothing_is_chosen_on_the_test_split(mine: Results) -> None:
    table = programs(1_500).distinct()
    test = np.random.default_rng(0).permutation(len(table.x))[len(table.x) * 4 // 5 :]
    flipped = ProgramTable(table.x, table.malware ^ np.isin(np.arange(len(table.x)), test))
    again = theory.malware(flipped, **SETTINGS)
    assert curve(again, OURS) != curve(mine, OURS)
    for name in (PLAIN, HARDENED, OURS):
        before, after = (results.find(what="clean_accuracy", classifier=name) for results in (mine, again))
        for key in ("C", "k", "trained_for"):
            assert before.get(key) == after.get(key)
            assert after.value == pytest.approx(1 - before.value)


def costly() -> ProgramTable:
    """Four features that tell harmless rows, which malware can add, and eighteen that tell malware, but less."""
    rng = np.random.default_rng(0)
    bad = rng.random(1_500) < 0.5
    telling = np.arange(22) < 4
    harmless, malware = (np.where(telling, *shares) for shares in ((0.9, 0.2), (0.1, 0.5)))
    return ProgramTable(rng.random((1_500, 22)) < np.where(bad[:, None], malware, harmless), bad)


def test_thresholds_are_set_on_the_validation_split() -> None:
    results = theory.malware(costly(), **SETTINGS)
    table = costly().distinct()
    order = np.random.default_rng(0).permutation(len(table.x))
    train, validation, test = np.split(order, [len(order) * 3 // 5, len(order) * 4 // 5])
    found = results.find(what="clean_accuracy", classifier=PLAIN)
    fitted = LogisticRegression(C=found["C"], max_iter=2_000).fit(table.x[train].astype(float), table.malware[train])
    detector = Detector(fitted.coef_[0], float(fitted.intercept_[0]))
    harmless = table.x[validation][~table.malware[validation]]
    answers = detector.at_rate(harmless, 0.05).score(table.x[test]) > 0
    assert found["value"] == (answers == table.malware[test]).mean()
    assert curve(results, MONOTONE)[15] > curve(results, PLAIN)[0]  # it may not use what tells harmless rows


def test_accuracy_is_given_up_only_as_far_as_the_cost() -> None:
    # of 285 rows of the validation split 2 loses none, 3 loses 4 and 5 loses 32, and each is evaded less than the last
    for cost, trained_for in ((0.0, 2), (0.01, 2), (4 / 285, 3), (0.2, 5)):
        results = theory.malware(costly(), **SETTINGS | {"budgets": (5, 3, 2), "cost": cost})
        for row in results.select(classifier=OURS):
            assert row["trained_for"] == trained_for
            assert "over_cost" not in row


def test_a_cost_that_no_candidate_keeps_is_said(tmp_path: Path) -> None:
    data, out = write_table(tmp_path / "mine.npz", costly()), tmp_path / "run"
    words = ["theory", "malware", "--data", str(data), "--rate", "0.05", "--budgets", "5", "8", "--out", str(out)]
    assert main([*words, "--quiet"]) == 0
    for row in Results.load(out / "results.json").select(classifier=OURS):
        assert row["over_cost"] == pytest.approx(0.112 - 0.02, abs=1e-3)
    page = (out / "report.html").read_text().replace("\N{NO-BREAK SPACE}", " ")
    assert re.search(r"this one, the nearest, loses\s9\.2\s%\smore", page)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dimensions": ()}, r"dimensions must be at least one number and no number twice, got \[\]"),
        ({"dimensions": (9,)}, "dimensions must be an int >= 10, got 9"),
        ({"decays": (0.0, 0)}, r"decays must be .* no number twice, got \[0.0, 0\]"),
        ({"decays": (math.nan,)}, "decays must lie between 0 and 10, got nan"),
        ({"seed": -1}, "seed must be an int >= 0, got -1"),
        ({"precision": 0.0}, "precision must lie between 0.001 and 0.5, got 0.0"),
        ({"rate": 0.0}, "rate must lie between 0 and 1, got 0.0"),
        ({"cost": -0.1}, "cost must lie between 0 and 1, got -0.1"),
        ({"budgets": (2, 2)}, r"budgets must be .* no number twice, got \[2, 2\]"),
        ({"budgets": (-2,)}, "budgets must be an int >= 0, got -2"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    malware = partial(theory.malware, programs(200), **SETTINGS)
    call = malware if settings.keys() & {"rate", "cost", "budgets"} else theory.figures
    with pytest.raises(ValueError, match=message):
        call(**settings)


def test_rows_on_which_nothing_can_be_trained() -> None:
    rng = np.random.default_rng(1)
    bad = rng.random(400) < 0.5
    # malware only lacks features, and can add them all
    x = rng.random((400, 12)) < np.where(bad, 0.2, 0.8)[:, None]
    with pytest.raises(NotAttainableError, match=r"one that is attainable, got \[12\]"):
        theory.malware(ProgramTable(x, bad), **SETTINGS | {"budgets": (12,)})
    with pytest.raises(ValueError, match="both labels in the train split"):
        theory.malware(ProgramTable(x, np.ones(400, bool)), **SETTINGS)


def write_table(path: Path, table: ProgramTable, **instead: Any) -> Path:
    arrays = {"X": np.packbits(table.x, axis=1), "d": table.x.shape[1], "y": table.malware.astype(np.uint8)}
    np.savez(path, **arrays | instead)
    return path


@pytest.mark.parametrize(
    ("instead", "message"),
    [
        ({"d": 99}, "X must be packed bits of d=99 features, got uint8 of shape"),
        ({"X": np.zeros((30, 6))}, "X must be packed bits of d=42 features, got float64"),
        ({"y": np.arange(30)}, "y must be 30 labels, 0 or 1"),
        ({"y": np.zeros(4)}, r"y must be 30 labels, 0 or 1, got shape \(4,\)"),
        ({"y": np.array([object()])}, "data must be an npz file with X, d and y"),
    ],
)
def test_tables_are_read_as_written_and_bad_ones_refused(tmp_path: Path, instead: dict[str, Any], message: str) -> None:
    table = programs(30)
    read = theory.read_programs(write_table(tmp_path / "a.npz", table))
    np.testing.assert_array_equal(read.x, table.x)
    np.testing.assert_array_equal(read.malware, table.malware)
    path = write_table(tmp_path / "a.npz", table, **instead)
    with pytest.raises(ValueError, match=message):
        theory.read_programs(path)


def test_bad_files_are_said_before_any_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "taken.npz").write_text("no")
    taken, missing = str(tmp_path / "taken.npz"), str(tmp_path / "missing.npz")
    for words, message in (
        (["malware", "--out", str(tmp_path), "--data", taken], "data must be an npz file with X, d and y"),
        (["malware", "--out", str(tmp_path), "--data", missing], "which is not there"),
        (["--out", taken], "out must be"),
    ):
        assert main(["theory", *words]) == 1
        shown = capsys.readouterr().err
        assert message in shown
        assert "d = 100" not in shown


def test_theory_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_MOST_ROWS", 256)
    out = tmp_path / "run"
    words = "theory --dimensions 20 30 --decays 0 10 --precision 0.1 --out"
    assert main([*words.split(), str(out)]) == 0
    shown = capsys.readouterr()
    assert "0/6 figures, robust error over budget, d = 20" in shown.err
    assert re.search(rf"the truncated classifier errs on .*\npage: {out / 'report.html'}\n$", shown.out, re.DOTALL)
    results = Results.load(out / "results.json")
    assert results.command == "ell0 theory --dimensions 20 30 --decays 0.0 10.0 --precision 0.1"
    errors = results.select(what="robust_error")
    assert {(row["d"], row["decay"]) for row in errors} == {(20, 0.0), (30, 0.0), (20, 10.0), (30, 10.0)}
    assert all(0 <= row["low"] <= row.value + 1e-12 and row.value - 1e-12 <= row["high"] <= 1 for row in errors)
    assert results.command in (out / "report.html").read_text()


def test_malware_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = write_table(tmp_path / "mine.npz", programs(400)), tmp_path / "run"
    words = ["theory", "malware", "--data", str(data), "--budgets", "2", "--rate", "0.05", "--out", str(out)]
    assert main([*words, "--json", "--quiet"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    results = Results.load(out / "results.json")
    assert json.loads(shown.out)["runs"][str(out)]["rows"] == results.rows
    assert results.name == "malware-mine"
    assert results.command == "ell0 theory malware --data mine.npz --rate 0.05 --budgets 2"
    assert main(words) == 0
    shown = capsys.readouterr()
    assert "4/5 detectors, TruncatedLinearClassifier, budget = 2" in shown.err
    assert "added features hide" in shown.out


@pytest.fixture(scope="module")
def pages(small: Results, mine: Results, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    return {
        results.name: report.write([results.save(folder / f"{results.name}.json")], folder / f"{results.name}.html")
        for results in (small, mine)
    }


def test_pages_show_every_figure_with_its_interval(small: Results, mine: Results, pages: dict[str, Path]) -> None:
    text = pages["theory"].read_text()
    assert "The first has the best weights" in text
    assert "Tolerated budgets" in text
    for row in small.select(what="robust_error"):
        assert f"{100 * row['value']:.1f}" in text
        assert f"{100 * row['low']:.1f}\N{EN DASH}{100 * row['high']:.1f}" in text
    assert text.count("<svg") >= 2 * 2 + 2 + 2
    assert "6.8 · 10⁹" in text
    text = pages["malware-mine"].read_text()
    for row in mine.select(what="evasion"):
        assert f"{100 * row['value']:.1f}" in text
    assert all(
        words in text
        for words in (PLAIN, HARDENED, MONOTONE.replace(">", "&gt;"), OURS, "k is 0: nothing is truncated")
    )
    assert not re.search(r"<script|https?://(?!www\.w3\.org)", text)


def test_pages_need_neither_scipy_nor_scikit_learn(tmp_path: Path) -> None:
    """The results of any run become a page from what they hold: nothing is computed for it."""
    program = (
        "import sys; sys.modules.update(dict.fromkeys(('scipy', 'sklearn')))\n"
        "from ell0 import report\n"
        "for i, source in enumerate(sys.argv[2:]): report.write([source], f'{sys.argv[1]}/{i}.html')"
    )
    names = ("digits", "mnist-certified", "theory", "malware-drebin215")
    sources = [str(Path(__file__).parents[1] / "results" / f"{name}.json") for name in names]
    subprocess.run([sys.executable, "-c", program, str(tmp_path), *sources], check=True)
    assert len(list(tmp_path.glob("*.html"))) == len(names)


@chromium.needed
@pytest.mark.parametrize("width", [360, 1440])
def test_pages_fit_a_browser(pages: dict[str, Path], width: int) -> None:
    # Words of a chart that lie outside of it.
    outside = (
        "[...document.querySelectorAll('.chart svg')].flatMap(s => [...s.querySelectorAll('text')].filter(t => {"
        "const a = s.getBoundingClientRect(), b = t.getBoundingClientRect();"
        "return b.left < a.left - 1 || b.right > a.right + 8 || b.bottom > a.bottom + 1})).map(t => t.textContent)"
    )
    for page in pages.values():
        seen = chromium.look(page, f"[document.documentElement.scrollWidth, {outside}]", width=width, dark=width == 360)
        assert seen == ([width, []], [])
