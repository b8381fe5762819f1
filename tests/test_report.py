"""The report: what its page says of a run, and what it refuses to read."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from ell0 import report
from ell0.report import formatting
from ell0.results import Measurement, Results, Row
from report_runs import RECIPE, REPOSITORY, Outline, accuracy, results, rows

WORST, SEARCH = {"attack": "worst case"}, {"attack": "sparse_rs"}


def of_rows(folder: Path, found: list[Row], name: str = "some") -> str:
    return Outline(report.page([results(name, found).save(folder / f"{name}.json")])).text


def worst(share: float, classifier: str = "F", budget: int = 3, **more: Any) -> Row:
    return accuracy(share, 100, classifier=classifier, budget=budget, **WORST, **more)


def search(share: float, classifier: str = "F", budget: int = 3, n: int = 100, **more: Any) -> Row:
    return accuracy(share, n, classifier=classifier, budget=budget, **{**SEARCH, **more})


def test_the_worst_case_is_the_verdict(outline: Outline) -> None:
    text = outline.text
    verdict = "F(10) keeps 70.2 % (67.3-73.0) of 1,000 test images right when 5 pixels are set to any value within ±100"
    assert f"{verdict}; F(0) keeps 0.0 %." in text
    assert "The values of clean images lie within ±1." in text
    assert text.index("Worst case") < text.index(verdict) < text.index("Accuracy")
    protocol = "By the paper protocol (sparse_rs, 5,000 queries, values within ±100, n = 10,000)"
    assert f"{protocol} the same classifier keeps 83.9 % (83.2-84.6); the paper reports 81.8 %" in text
    assert "81.8 % (78.3-84.9 if it took n = 512)." in text


CLEAN = [row for row in rows() if row["what"] == "clean_accuracy"]
LADDER = [search(0.9 - 0.05 * k, f"F({k})", k, n=1000, k=k, queries=1000) for k in range(1, 16)]
RIVALS = [
    worst(share, name, 1, k=int(name[2]))
    for name, share in (("F(4)", 0.8), ("F(0) clamped", 0.6), ("F(0) trained", 0.3), ("F(0)", 0.0), ("F(2)", 0.7))
]
PROVEN = [
    {"what": "certified_accuracy", "classifier": name, "value": share, "budget": m, "n": 100}
    for name, m, share in (("F", 1, 0.9), ("G", 1, 0.8), ("F", 4, 0.5), ("G", 4, 0.6), ("F", 8, 0.4), ("G", 8, 0.1))
]


CASES: dict[str, tuple[list[Row], list[str], list[str]]] = {
    "without a worst case the verdict is an upper bound": (
        [row for row in rows() if row.get("attack") != "worst case"],
        ["F(10) keeps 54.9 % (54.0-55.9) of 10,000 test rows right when 8 inputs are set to any value within ±100",
         "This is sparse_rs alone (5,000 queries, values within ±100), so an upper bound"],
        ["worst case: the figure that counts"]),
    "it takes the largest budget with half left": (
        [worst(0.9, budget=1), worst(0.5, budget=2), worst(0.49)], ["when 2 inputs are set"], ["within ±"]),
    "or the smallest": ([worst(0.4, budget=1), worst(0.3)], ["when 1 input is set"], []),
    "it speaks of the widest values, whose points are among the wider ones'": (
        [worst(share, beta=beta) for share, beta in ((0.5, 1.0), (0.6, 100.0), (0.7, 10.0))],
        ["F keeps 50.0 % (40.4-59.6) of 100 test rows right when 3 inputs are set to any value within ±100"], []),
    "it names the strongest and the weakest plain rival": (
        RIVALS, ["set to any value; F(0) clamped keeps 60.0 % and F(0) keeps 0.0 %."], []),
    "without an attack it is clean accuracy": (
        CLEAN, ["F(10) gets 98.7 % (98.5-98.9) of 10,000 test rows right; no attack was run."], ["n = 512"]),
    "or what is proven": (
        [*CLEAN, *PROVEN],
        ["G is proven to keep 60.0 % of 100 test rows right when 4 inputs are set to any value.",
         "This is proven, so a lower bound; no attack was run. The verdict takes the largest number of inputs"], []),
    "not that of no change": (
        [{**PROVEN[0], "budget": 0}, {**PROVEN[1], "value": 0.4}],
        ["G is proven to keep 40.0 % of 100 test rows right when 1 input is set to any value."], []),
    "unless there is no other": (
        [{**PROVEN[0], "budget": 0}], ["F is proven to keep 90.0 % of 100 test rows right."], []),
    "or nothing": ([{"what": "step", "value": 2.5}], ["These results contain no accuracy"], []),
    "NaN is no accuracy": ([worst(0.5) | {"value": float("nan")}], ["These results contain no accuracy"], []),
    "of single attacks it takes the lowest, whatever each may spend": (
        [search(0.8, queries=5000, beta=100.0), search(0.2, attack="sparse_pgd", steps=10, beta=1.0)],
        ["F keeps 20.0 % (13.3-28.9) of 100 test rows", "when 3 inputs are set to any value within ±100.",
         "This is sparse_pgd alone (10 steps, values within ±1), the strongest of several, so an upper bound"], []),
    "who was attacked less does not win": (
        [search(0.9, "F(4)", queries=50, beta=1.0), search(0.6, "F(0)", queries=200, beta=100.0)],
        ["F(0) keeps 60.0 %"], ["F(4) keeps"]),
    "what was measured on another split stands apart": (
        [worst(0.5), worst(0.9, split="validation")], ["F keeps 50.0 %", "validation"], ["90.0 % of"]),
    "pixels stand apart from features": (
        [worst(0.5), worst(0.9) | {"unit": "pixel"}], ["F keeps 50.0 %", "Counted in pixels", "90.0 %"], ["90.0 % of"]),
    "attacks with other parameters have columns of their own": (
        [search(0.5, queries=9, values="corners"), search(0.25, queries=9, values="uniform")],
        ["50.0 %", "25.0 %", "sparse_rs, values = corners", "sparse_rs, values = uniform"], []),
    "what an attack of a cascade left is no figure of it": (
        [search(0.5, beside={"attacked": 60, "broken": 2})], ["These results contain no accuracy", "50.0 %"], []),
    "classifiers of a ladder are one line": (LADDER, ["F(k), k = budget", "F(8) keeps 50.0 %"], []),
    "of rows that say the same the lowest is shown": (
        [search(0.25, queries=100), search(0.5, queries=100)], ["25.0 %"], ["50.0 %"]),
    "the clean accuracy over most rows is shown": (
        [CLEAN[0] | {"classifier": "F", "value": v, "n": n} for v, n in ((0.9, 10), (0.8, 100))] + [search(0.5)],
        ["80.0 %"], ["90.0 %"]),
    "boxes of two kinds are two columns": (
        [worst(0.5, beta=100.0), worst(0.25, beta=100.0, box="normalised")],
        ["50.0 %", "25.0 %", "within ±100", "within 100 times the normalised range"], []),
    "a median says how often its attack ran": (
        [{"what": "median_distance", "attack": "pointwise", "beta": 1.0, "value": value, "repeats": repeats}
         for value, repeats in ((20, 1), (14, 10))],
        ["pointwise, one runwithin ±1inputs changed20", "the nearest of 10 runswithin ±1inputs changed14"], []),
    "the paper's n is told": ([CLEAN[0] | {"paper_n": 1000}], ["is that of n = 1000. A figure"], []),
    "or the paper's figure has no interval": ([CLEAN[0]], ["figures have no interval."], []),
    "an attack that beats the worst case on the same rows is a flag": (
        [worst(0.5, beta=1.0), search(0.49, queries=5, beta=1.0)],
        ["F: not the worst case: sparse_rs alone (5 queries, values within ±1) leaves", "1 flag"], []),
    "or by more than chance": ([worst(0.5, beta=1.0), search(0.2, n=200, beta=1.0)], ["1 flag"], []),
    "but not by chance, in a wider box or at another budget": (
        [worst(0.5, beta=1.0), search(0.49, n=200, beta=1.0), search(0.2, beta=10.0), search(0.1, budget=4)],
        [], ["not the worst case"]),
}  # fmt: skip


@pytest.mark.parametrize(("found", "there", "absent"), CASES.values(), ids=CASES)
def test_what_the_page_says(tmp_path: Path, found: list[Row], there: list[str], absent: list[str]) -> None:
    for some in (found, found[::-1]):
        text = of_rows(tmp_path, some)
        for words in there:
            assert words in text
        for words in absent:
            assert words not in text


def test_the_table_of_accuracies(outline: Outline, tmp_path: Path) -> None:
    """Numbers of rows in the heads, the widest values first, every figure, who decided the worst case."""
    table = outline.text.split("Share of test images")[1]
    assert table.index("within ±100n = 1,000") < table.index("within ±1n = 1,000") < table.index("300 queries")
    assert "5,000 queriesn = 10,000" in table
    (line,) = re.findall(r"3 (86\.1 % .*?without attack 14)", table)
    figures = re.findall(r"(?<!paper )\b\d+\.\d %", line)
    assert figures == ["86.1 %", "92.1 %", "96.0 %", "94.7 %", "93.0 %"]
    assert line.endswith("adaptive 94, sparse_rs_uniform 31, misclassified without attack 14")
    words = "the paper does not say how many images it attacked, but its robust accuracies are multiples of 1/512"
    assert f"interval is that of n = 512; {words}." in table
    assert "Columns are over different numbers of images" in table
    assert "Columns are over" not in of_rows(tmp_path, [row for row in rows() if row.get("attack") == "worst case"])
    for row in rows():
        if row["what"].endswith("accuracy"):
            assert formatting.percent(row["value"]).replace("\u00a0", " ") in outline.text, row
    for words in ("adaptive 544", "3 min 45 s", "0.0213", "ABS", "not run here"):
        assert words in outline.text


def test_flags_stand_before_the_figures(outline: Outline, tmp_path: Path) -> None:
    assert "1 flag: read it before the figures" in outline.text
    assert "F(10): search beats gradients by 3.1 points" in outline.text
    assert outline.text.index("1 flag") < outline.text.index("Share of test images")
    found = [row | {"flags": []} for row in rows() if row.get("attack") == "worst case"]
    found[0]["flags"] = ["one: of another", "two: of both; they stand"]
    found[-1]["flags"] = ["two: of both; they stand", "three: of the best"]
    both = "F(0), budget 3; F(10), budget 8: two: of both; they stand F(10), budget 8: three: of the best"
    other = "1 more, on other classifiers F(0), budget 3: one: of another"
    assert f"3 flags: read them before the figures. {both} {other}" in of_rows(tmp_path, found)


@pytest.mark.parametrize(
    ("low", "high", "n", "expected"),
    [
        (0.59, 0.61, None, "above"),
        (0.55, 0.58, None, "below"),
        (0.59, 0.61, 512, "meets"),
        (0.5879 + 1e-14, 0.6, None, "meets"),  # an end that rounding moved
        (0.5, 0.5879 - 1e-14, None, "meets"),
        (float("nan"), float("nan"), None, None),
    ],
)
def test_intervals_meet_the_papers(low: float, high: float, n: int | None, expected: str | None) -> None:
    row = Measurement.of("accuracy", (low + high) / 2, low=low, high=high, paper=0.5879, paper_n=n)
    assert formatting.Cell.share(row).against == expected


@pytest.mark.parametrize("path", sorted((REPOSITORY / "results").glob("*.json")), ids=lambda path: path.stem)
def test_committed_results_have_a_page(path: Path) -> None:
    assert Results.load(path).command in Outline(report.page([path])).text


def test_logs_of_used_recipes_are_found(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = shutil.copytree(run, tmp_path / "own")
    (used / "recipe.toml").write_text(RECIPE.replace("mnist-table1", "own"))
    user = shutil.copytree(run, tmp_path / "table", ignore=shutil.ignore_patterns("f*"))
    own = '[[measure]]\nwhat = "clean_accuracy"\nclassifiers = ["F(10)"]\n'
    (user / "recipe.toml").write_text(f'name = "table"\nsummary = "s"\nuse = ["own"]\ndata.name = "mnist"\n{own}')
    monkeypatch.chdir(user)
    for source in (user, Path()):
        text = Outline(report.page([source])).text
        assert "validation split" in text
        assert "nfinished" not in text
    used.rename(tmp_path / "elsewhere")
    alone = Outline(report.page([user]))
    assert "validation split" not in alone.text
    assert "it is not known whether it is finished" in alone.text
    assert len(alone.all("image")) == 6 * 3


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
    assert "nfinished" not in outline.text + report.verdict([run])
    copy = shutil.copytree(run, tmp_path / "run")
    asked = 2 * (1 + 1 + 9 + 6 + 2)  # a training, clean accuracy, one attack, the worst case, medians: twice
    for lost, left in (
        (2, [row for row in rows() if row["what"] != "training_seconds"]),
        # What was measured with other parameters is another figure.
        (18, [row | {"values": "uniform"} if row.get("attack") == "sparse_rs" else row for row in rows()]),
    ):
        results("mnist-table1", left).save(copy / "results.json")
        words = f"Unfinished: {asked - lost} of the {asked} figures of the recipe exist."
        text = Outline(report.page([copy])).text
        assert text.startswith("Unfinished: mnist-table1")
        assert text.index(words) < text.index("Worst case")
        assert report.verdict([copy]).startswith(words)


def test_the_verdict_as_text(run: Path, tmp_path: Path) -> None:
    words = "70.2 % (67.3\N{EN DASH}73.0) of 1,000 test images right when 5 pixels are set to any value within ±100"
    line = f"Worst case: F(10) keeps {words}; F(0) keeps 0.0 %. 1 flag: read it before the figures."
    assert report.verdict([run]) == line
    other = results("other", [search(0.5, "<b>&amp;")]).save(tmp_path / "other.json")
    first, second, together = report.verdict([run, other]).split("\n")
    assert first == f"mnist-table1: {line}"
    assert second.startswith("other: One attack, no worst case: <b>&amp; keeps 50.0 % (")
    assert second.endswith("when 3 inputs are set to any value.")
    assert together.startswith("comparison: Worst case: F(10) keeps 70.2 %")


def test_times_are_rounded_to_what_they_show() -> None:
    times = {2.5: "2.5 s", 59.9: "59.9 s", 119.6: "2 min 0 s", 3599.7: "1 h 0 min", 5000.0: "1 h 23 min"}
    assert {time: formatting.duration(time).replace(formatting.GAP, " ") for time in times} == times


def test_sources_and_out_must_be_what_they_are(run: Path, tmp_path: Path) -> None:
    nothing: list[Any] = [[], "results.json"]
    for sources in nothing:
        with pytest.raises(ValueError, match="sources must be a list of run folders or results files, at least one"):
            report.page(sources)
    for source in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ValueError, match=r"sources must be results files or run folders that hold results.json"):
            report.page([source])
    with pytest.raises(ValueError, match="out must be a file, got the folder"):
        report.write([run], tmp_path)


BROKEN = {
    "results.json": "is not a results file", "recipe.toml": "is not a recipe", "f0/log.jsonl": "is not a log",
    "gallery.safetensors": "is altered",
}  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), BROKEN.items())
def test_a_broken_file_is_named_and_nothing_written(run: Path, tmp_path: Path, name: str, kind: str) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    out = tmp_path / "page.html"
    out.write_text("as it was")
    (copy / name).write_bytes((copy / name).read_bytes()[:-150] + b"{ broken\n")
    with pytest.raises(ValueError, match=re.escape(f"{copy / name} {kind}")):
        report.write([copy], out)
    assert out.read_text() == "as it was"


def test_what_a_row_leaves_out_is_no_error(tmp_path: Path) -> None:
    for key in {key: None for row in rows() for key in row if key not in ("what", "value")}:
        found = rows()
        for row in found[::2]:
            row.pop(key, None)
        assert report.page([results("some", found).save(tmp_path / "some.json")])
