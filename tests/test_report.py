"""The report: what its page says of a run, and what it refuses to read."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ell0 import report
from ell0.report import _words
from ell0.results import Results, Row
from report_runs import RECIPE, REPOSITORY, Outline, accuracy, log, measurement, results, rows


def of_rows(folder: Path, found: list[Row], name: str = "some") -> Outline:
    return Outline(report.page([results(name, found).save(folder / f"{name}.json")]))


def test_the_worst_case_is_the_verdict(outline: Outline) -> None:
    text = outline.text
    verdict = "F(10) keeps 70.2 % (67.3-73.0) of 1,000 test images right when 5 pixels are set to any value within ±100"
    assert f"{verdict}; F(0) keeps 0.0 %." in text
    assert "The values of clean images lie within ±1." in text
    assert text.index("Worst case") < text.index(verdict) < text.index("Accuracy")
    protocol = "By the paper protocol (sparse_rs, 5,000 queries, values within ±100, n = 10,000)"
    assert f"{protocol} the same classifier keeps 83.9 % (83.2-84.6); the paper reports 81.8 %" in text
    assert "81.8 % (78.3-84.9 if it took n = 512)." in text


def test_without_a_worst_case_the_verdict_is_an_upper_bound(tmp_path: Path) -> None:
    found = [row for row in rows() if row.get("attack") != "worst case"]
    text = of_rows(tmp_path, found).text
    assert (
        "F(10) keeps 54.9 % (54.0-55.9) of 10,000 test rows right when 8 inputs are set to any value within ±100"
        in text
    )
    assert "This is sparse_rs alone (5,000 queries, values within ±100), so an upper bound" in text
    assert "worst case: the figure that counts" not in text


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ({1: 0.9, 2: 0.5, 3: 0.49}, "when 2 inputs are set"),
        ({1: 0.4, 2: 0.3}, "when 1 input is set"),
    ],
)
def test_the_verdict_takes_the_largest_budget_with_half_left(
    tmp_path: Path, shares: dict[int, float], words: str
) -> None:
    found = [accuracy(share, 100, classifier="F", attack="worst case", budget=b) for b, share in shares.items()]
    assert words in of_rows(tmp_path, found).text


def test_the_worst_case_speaks_of_the_widest_values(tmp_path: Path) -> None:
    """Also where narrower ones do as well, or better: their points are among the wider ones'."""
    found = [
        accuracy(share, 100, classifier="F", attack="worst case", budget=3, beta=beta)
        for share, beta in ((0.6, 1.0), (0.6, 100.0), (0.7, 10.0))
    ]
    assert (
        "F keeps 60.0 % (50.2-69.1) of 100 test rows right when 3 inputs are set to any value within ±100"
        in of_rows(tmp_path, found).text
    )
    found[0] |= {"value": 0.5}
    assert (
        "F keeps 50.0 % (50.2-69.1) of 100 test rows right when 3 inputs are set to any value within ±100"
        in of_rows(tmp_path, found).text
    )


def test_the_verdict_names_the_strongest_and_the_weakest_rival(tmp_path: Path) -> None:
    shares = {"F(4)": 0.8, "F(0) clamped": 0.6, "F(0) trained": 0.3, "F(0)": 0.0, "F(2)": 0.7}
    found = [
        accuracy(share, 100, classifier=name, k=int(name[2]), attack="worst case", budget=1)
        for name, share in shares.items()
    ]
    assert "within" not in (text := of_rows(tmp_path, found).text)
    assert "set to any value; F(0) clamped keeps 60.0 % and F(0) keeps 0.0 %." in text
    found[2] |= {"value": 0.0}
    assert "F(0) clamped keeps 60.0 % and F(0) trained keeps 0.0 %." in of_rows(tmp_path, found).text
    found[1] |= {"value": 0.9}
    assert "; F(4) keeps 80.0 % and F(2) keeps 70.0 %." in of_rows(tmp_path, found).text


def test_different_numbers_of_rows_are_said(outline: Outline, tmp_path: Path) -> None:
    assert "5,000 queriesn = 10,000" in outline.text
    assert "within ±100n = 1,000" in outline.text
    assert "Not all columns are over the same number of images" in outline.text
    worst = [row for row in rows() if row.get("attack") == "worst case"]
    assert "Not all columns" not in of_rows(tmp_path, worst).text


def test_the_widest_values_stand_first_in_the_table(outline: Outline) -> None:
    table = outline.text.split("Share of test images")[1]
    assert table.index("within ±100n = 1,000") < table.index("within ±1n = 1,000") < table.index("300 queries")
    (line,) = re.findall(r"3 (86\.1 % .*?from the start 14)", table)
    figures = re.findall(r"(?<!paper )\b\d+\.\d %", line)
    assert figures == ["86.1 %", "92.1 %", "96.0 %", "94.7 %", "93.0 %"]
    assert line.endswith("adaptive 94, sparse_rs_uniform 31, wrong from the start 14")


def test_the_clean_accuracy_over_most_rows_is_shown(tmp_path: Path) -> None:
    found = [{"what": "clean_accuracy", "classifier": "F", "value": v, "n": n} for v, n in ((0.9, 10), (0.8, 100))]
    for some in (found, found[::-1]):
        table = of_rows(tmp_path, [*some, accuracy(0.5, 10, classifier="F", attack="a")]).text.split("Share of")[1]
        assert "80.0 %" in table
        assert "90.0 %" not in table


def test_verdicts_without_an_attack(tmp_path: Path) -> None:
    clean = [row for row in rows() if row["what"] == "clean_accuracy"]
    text = of_rows(tmp_path, clean).text
    assert "F(10) gets 98.7 % (98.5-98.9) of 10,000 test rows right; no attack was run." in text
    proven = [
        {"what": "certified_accuracy", "classifier": name, "value": value, "budget": budget, "n": 100}
        for budget, values in ((1, (0.9, 0.8)), (4, (0.5, 0.6)), (8, (0.4, 0.1)))
        for name, value in zip(("F", "G"), values, strict=True)
    ]
    text = of_rows(tmp_path, [*clean, *proven]).text
    assert "G is proven to keep 60.0 % of 100 test rows right when 4 inputs are set to any value." in text
    assert "This is proven, so a lower bound; no attack was run. The verdict takes the largest number of inputs" in text
    nan = float("nan")
    for nothing in ({"what": "step", "value": 2.5}, {"what": "robust_accuracy", "attack": "worst case", "value": nan}):
        assert "These results hold no accuracy" in of_rows(tmp_path, [nothing]).text


def test_flags_stand_before_the_figures(outline: Outline, tmp_path: Path) -> None:
    assert "1 flag: read it before the figures" in outline.text
    assert "F(10): search beats gradients by 3.1 points" in outline.text
    assert outline.text.index("1 flag") < outline.text.index("Share of test images")
    found = [row | {"flags": []} for row in rows() if row.get("attack") == "worst case"]
    found[0]["flags"] = ["one: of another", "two: of both; they stand"]
    found[-1]["flags"] = ["two: of both; they stand", "three: of the best"]
    text = of_rows(tmp_path, found).text
    assert "3 flags: read them before the figures" in text
    both = "F(0), budget 3; F(10), budget 8: two: of both; they stand"
    best = "F(10), budget 8: three: of the best"
    assert f"{both} {best} 1 more, on other classifiers F(0), budget 3: one: of another" in text


def test_every_figure_is_on_the_page(outline: Outline) -> None:
    for row in rows():
        if row["what"].endswith("accuracy"):
            assert _words.percent(row["value"]).replace("\u00a0", " ") in outline.text, row
    for words in (
        "adaptive 544",
        "sparse_rs_uniform 31",
        "wrong from the start 14",
        "within ±1",
        "3 min 45 s",
        "0.0213",
    ):
        assert words in outline.text
    assert "ABS" in outline.text
    assert "not run here" in outline.text


def test_a_median_says_how_often_its_attack_ran(tmp_path: Path) -> None:
    row: Row = {"what": "median_distance", "classifier": "F(10)", "attack": "pointwise", "beta": 1.0, "value": 20}
    text = of_rows(tmp_path, [row | {"repeats": 1}, row | {"repeats": 10, "value": 14}]).text
    assert "pointwise, one runwithin ±120" in text
    assert "pointwise, the nearest of 10 runswithin ±114" in text


@pytest.mark.parametrize(
    ("low", "high", "n", "expected"),
    [
        (0.57, 0.60, None, "meets"),
        (0.59, 0.61, None, "above"),
        (0.55, 0.58, None, "below"),
        (0.59, 0.61, 512, "meets"),
        (0.70, 0.75, 512, "above"),
        (0.40, 0.50, 512, "below"),
    ],
)
def test_intervals_meet_the_papers(low: float, high: float, n: int | None, expected: str) -> None:
    row = measurement("accuracy", (low + high) / 2, low=low, high=high, paper=0.5879, paper_n=n)
    assert _words.Cell.share(row).against == expected


def test_rounding_of_an_end_puts_nothing_above_the_paper() -> None:
    for value, low, high in ((0.0, 2e-19, 0.004), (1.0, 0.996, 1 - 1e-16)):
        assert _words.Cell.share(measurement("a", value, low=low, high=high, paper=value)).against == "meets"


def test_a_figure_that_is_no_number_is_a_dash() -> None:
    for value in (float("nan"), float("inf")):
        cell = _words.Cell.share(measurement("a", value, paper=0.5))
        assert (cell.value, cell.interval, cell.against) == (_words.NONE, None, None)
        assert _words.duration(value) == _words.NONE


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.2712, "0.271 s"), (59.94, "59.9 s"), (215.3, "3 min 35 s"), (432000, "120 h 0 min")]
)
def test_durations(seconds: float, words: str) -> None:
    assert _words.duration(seconds).replace("\u00a0", " ") == words


def test_choices_made_on_another_split_stand_apart(tmp_path: Path) -> None:
    what: Row = {"classifier": "F", "attack": "worst case", "budget": 3}
    found = [accuracy(0.5, 100, **what), accuracy(0.9, 100, **what, split="validation")]
    outline = of_rows(tmp_path, found)
    assert "F keeps 50.0 %" in outline.text
    others = outline.text.index("Every other row")
    assert outline.text.index("90.0 %") > others
    assert outline.text.index("validation") > others


def test_attacks_with_other_parameters_have_columns_of_their_own(tmp_path: Path) -> None:
    what: Row = {"classifier": "F", "attack": "sparse_rs", "budget": 3, "queries": 100}
    found = [accuracy(0.5, 100, **what, values="corners"), accuracy(0.25, 100, **what, values="uniform")]
    text = of_rows(tmp_path, found).text
    for words in ("50.0 %", "25.0 %", "sparse_rs, values = corners", "sparse_rs, values = uniform"):
        assert words in text


def test_what_a_cascade_left_is_no_figure_of_one_attack(tmp_path: Path) -> None:
    found = [accuracy(0.5, 100, classifier="F", attack="sparse_rs", budget=3, beside={"attacked": 60, "broken": 2})]
    text = of_rows(tmp_path, found).text
    assert "These results hold no accuracy" in text
    assert "50.0 %" in text


@pytest.mark.parametrize("path", sorted((REPOSITORY / "results").glob("*.json")), ids=lambda path: path.stem)
def test_committed_results_have_a_page(path: Path) -> None:
    text = Outline(report.page([path])).text
    assert Results.load(path).command in text


def test_classifiers_of_a_ladder_are_one_line(tmp_path: Path) -> None:
    found = [
        accuracy(0.9 - 0.05 * k, 1000, classifier=f"F({k})", k=k, attack="sparse_rs", budget=k, queries=1000)
        for k in range(1, 16)
    ]
    outline = of_rows(tmp_path, found)
    assert len(outline.all("polyline", "line")) == 2  # with its piece in the legend
    assert "F(k), k = budget" in outline.text
    assert "F(8) keeps 50.0 %" in outline.text


def test_logs_of_used_recipes_are_found(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = shutil.copytree(run, tmp_path / "own")
    (used / "recipe.toml").write_text(RECIPE.replace("mnist-table1", "own"))
    user = tmp_path / "table"
    user.mkdir()
    own = '[[measure]]\nwhat = "clean_accuracy"\nclassifiers = ["F(10)"]\n'
    (user / "recipe.toml").write_text(f'name = "table"\nsummary = "s"\nuse = ["own"]\ndata.name = "mnist"\n{own}')
    shutil.copy(run / "gallery.npz", user)
    results("table", rows()).save(user / "results.json")
    monkeypatch.chdir(user)
    for source in (user, Path()):
        text = Outline(report.page([source])).text
        assert "validation split" in text
        assert "nfinished" not in text
    used.rename(tmp_path / "elsewhere")
    alone = Outline(report.page([user]))
    assert "validation split" not in alone.text
    assert "whether it is finished is not known" in alone.text
    assert len(alone.all("image")) == 6 * 3


def test_logs_of_a_name_with_k_are_found(tmp_path: Path) -> None:
    head = 'name = "ladder"\nsummary = "s"\ndata.name = "mnist"\n'
    model = 'model = { name = "mlp", k = [1, 2, 3] }'
    (tmp_path / "recipe.toml").write_text(f'{head}[[classifier]]\nname = "F({{k}})"\n{model}\n')
    for k in (1, 2):
        (tmp_path / f"f{k}").mkdir()
        (tmp_path / f"f{k}" / "log.jsonl").write_text(log(5, 10, 0.1 * k))
    training: Row = {"what": "training_seconds", "k": 1, "adversarial": False, "unit": "seconds", "value": 1.0}
    results("ladder", [{**training, "classifier": "F(1)"}]).save(tmp_path / "results.json")
    outline = Outline(report.page([tmp_path]))
    assert len(outline.all("polyline", "line")) == 2 * (3 + 1)  # on three charts and in the legend
    assert "Unfinished: 1 of the 3 figures that the recipe asks for are there." in outline.text


def test_a_line_that_a_killed_training_left_is_no_epoch(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    path = copy / "f0" / "log.jsonl"
    whole, part = path.read_text(), json.dumps({"epoch": 100, "loss": 1.0})
    for end in (part, part[:-5]):
        path.write_text(whole + end)
        assert report.page([copy]) == report.page([run])
    path.write_text(whole + part + "\n")
    assert report.page([copy]) != report.page([run])


def test_an_unfinished_run_says_so_first(run: Path, outline: Outline, tmp_path: Path) -> None:
    assert "nfinished" not in outline.text
    assert "nfinished" not in report.verdict([run])
    copy = shutil.copytree(run, tmp_path / "run")
    found = rows()
    asked = 2 * (1 + 1 + 9 + 6 + 2)  # a training, clean accuracy, one attack, the worst case, medians: twice
    for what in ("training_seconds", "median_distance"):
        left = [row for row in found if row["what"] != what]
        results("mnist-table1", left).save(copy / "results.json")
        there = asked - (2 if what == "training_seconds" else 4)
        words = f"Unfinished: {there} of the {asked} figures that the recipe asks for are there."
        text = Outline(report.page([copy])).text
        assert text.startswith("Unfinished: mnist-table1")
        assert text.index(words) < text.index("Worst case")
        assert report.verdict([copy]).startswith(words)
    # What was measured with other parameters is another figure.
    other = [row | {"values": "uniform"} if row.get("attack") == "sparse_rs" else row for row in found]
    results("mnist-table1", other).save(copy / "results.json")
    assert f"Unfinished: {asked - 18} of the {asked}" in report.verdict([copy])


def test_the_verdict_as_text(run: Path, tmp_path: Path) -> None:
    worst = "70.2 % (67.3\N{EN DASH}73.0) of 1,000 test images right when 5 pixels are set to any value within ±100"
    line = f"Worst case: F(10) keeps {worst}; F(0) keeps 0.0 %. 1 flag: read it before the figures."
    assert report.verdict([run]) == line
    hostile = [accuracy(0.5, 100, classifier="<b>&amp;", attack="sparse_rs", budget=3)]
    other = results("other", hostile).save(tmp_path / "other.json")
    first, second = report.verdict([run, other]).split("\n")
    assert first == f"mnist-table1: {line}"
    assert second.startswith("other: One attack, no worst case: <b>&amp; keeps 50.0 % (")
    assert second.endswith("when 3 inputs are set to any value.")


def test_of_single_attacks_the_verdict_takes_the_lowest(tmp_path: Path) -> None:
    """Whatever each of them may spend: steps are not fewer than queries, nor narrow values weaker than wide ones."""
    what: Row = {"classifier": "F", "budget": 3}
    found = [
        accuracy(0.8, 100, **what, attack="sparse_rs", queries=5000, beta=100.0),
        accuracy(0.2, 100, **what, attack="sparse_pgd", steps=10, beta=1.0),
    ]
    for some in (found, found[::-1]):
        text = of_rows(tmp_path, some).text
        assert "F keeps 20.0 % (13.3-28.9) of 100 test rows" in text
        assert "when 3 inputs are set to any value within ±100." in text
        assert (
            "This is sparse_pgd alone (10 steps, values within ±1), the strongest of several, so an upper bound" in text
        )


@pytest.mark.parametrize("attack", ["sparse_rs", "worst case"])
def test_who_was_attacked_less_does_not_win(tmp_path: Path, attack: str) -> None:
    """As in a run that was killed, where the figures of more queries, or of wider values, are there for one only."""
    what: Row = {"attack": attack, "budget": 3}
    found = [
        accuracy(0.9, 100, **what, classifier="F(4)", queries=50, beta=1.0),
        accuracy(0.8, 100, **what, classifier="F(0)", queries=50, beta=1.0),
        accuracy(0.6, 100, **what, classifier="F(0)", queries=200, beta=100.0),
    ]
    text = of_rows(tmp_path, found).text
    assert "F(0) keeps 60.0 %" in text
    assert "F(4) keeps" not in text
    text = of_rows(tmp_path, [found[0], found[2]]).text
    assert "F(0) keeps 60.0 %" in text
    assert "F(4) keeps" not in text
    fair = [row | {"decided": {"clean": i}} for i, row in enumerate([*found, found[2] | {"classifier": "F(4)"}])]
    text = of_rows(tmp_path, fair).text
    assert "F(4) keeps 60.0 %" in text
    assert "F(0) keeps 60.0 %" in text


@pytest.mark.parametrize(
    ("share", "n", "beta", "flagged"),
    [(0.49, 100, 1.0, True), (0.49, 200, 1.0, False), (0.2, 200, 1.0, True), (0.2, 100, 10.0, False)],
)
def test_an_attack_that_beats_the_worst_case_is_a_flag(
    tmp_path: Path, share: float, n: int, beta: float, flagged: bool
) -> None:
    what: Row = {"classifier": "F", "budget": 3}
    found = [
        accuracy(0.5, 100, **what, attack="worst case", beta=1.0),
        accuracy(share, n, **what, attack="sparse_rs", queries=5000, beta=beta),
        accuracy(0.1, n, **(what | {"budget": 4}), attack="sparse_rs", queries=5000, beta=1.0),
    ]
    text = of_rows(tmp_path, found).text
    assert ("F: not the worst case: sparse_rs alone (5,000 queries, values within ±1) leaves" in text) == flagged
    assert ("1 flag" in text) == flagged


def test_of_rows_that_say_the_same_the_lowest_is_shown(tmp_path: Path) -> None:
    what: Row = {"classifier": "F", "attack": "sparse_rs", "budget": 3, "queries": 100}
    found = [accuracy(0.25, 100, **what), accuracy(0.5, 100, **what)]
    table = of_rows(tmp_path, found).text.split("Share of test rows")[1]
    assert "25.0 %" in table
    assert "50.0 %" not in table


def test_where_the_papers_interval_comes_from_is_said(outline: Outline, tmp_path: Path) -> None:
    words = "the paper does not say how many images it attacked, but its robust accuracies are multiples of 1/512"
    assert f"interval is that of n = 512; {words}." in outline.text
    (one,) = [row for row in rows() if row["what"] == "clean_accuracy"][:1]
    text = of_rows(tmp_path, [one]).text
    assert "figure is taken as it stands, without an interval." in text
    assert "512" not in text
    assert "n = 1000. A figure" in of_rows(tmp_path, [one | {"paper_n": 1000}]).text


@pytest.mark.parametrize("sources", [[], "results.json"])
def test_sources_must_be_a_list(sources: Any) -> None:
    with pytest.raises(ValueError, match="sources must be a list of run folders or results files, at least one, got"):
        report.page(sources)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    for source in (tmp_path, tmp_path / "missing"):
        with pytest.raises(
            ValueError, match=r"sources must be results files or run folders that hold results.json, got"
        ):
            report.page([source])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("results.json", "is not a results file"),
        ("recipe.toml", "is not a recipe"),
        ("f0/log.jsonl", "is not a log of training"),
        ("gallery.npz", "is not a gallery"),
    ],
)
def test_a_broken_file_is_named_and_nothing_written(run: Path, tmp_path: Path, name: str, words: str) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    out = tmp_path / "page.html"
    out.write_text("as it was")
    (copy / name).write_bytes((copy / name).read_bytes()[:-150] + b"{ broken\n")
    with pytest.raises(ValueError, match=words) as error:
        report.write([copy], out)
    assert str(copy / name) in str(error.value)
    assert out.read_text() == "as it was"


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [("budget", "three", "a number"), ("classifier", 4, "a text")],
)
def test_a_row_must_have_figures_where_they_belong(tmp_path: Path, key: str, value: Any, words: str) -> None:
    found = [accuracy(0.5, 100, classifier="F", attack="worst case", budget=3)]
    with pytest.raises(ValueError, match=re.escape(f"{key} of row 2 must be {words}, got {value!r}")):
        of_rows(tmp_path, [*found, *(row | {key: value} for row in found)])


def test_what_a_row_leaves_out_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    for key in {key: None for row in rows() for key in row if key not in ("what", "value")}:
        found = rows()
        for row in found[::2]:
            row.pop(key, None)
        assert report.page([results("some", found).save(path)])


def test_a_gallery_must_fit_together(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    with np.load(run / "gallery.npz") as file:
        arrays = dict(file)
    arrays["f0/adv"] = arrays["f0/adv"][:, :, :4]
    np.savez(copy / "gallery.npz", **arrays)
    with pytest.raises(ValueError, match="is not a gallery: F\\(0\\) has images of shape"):
        report.page([copy])


def test_out_must_be_a_file(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="out must be a file, got the folder"):
        report.write([run], tmp_path)
