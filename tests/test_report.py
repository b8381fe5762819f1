from __future__ import annotations

import base64
import json
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import chromium
from ell0 import report
from ell0.data._png import read_png
from ell0.recipe import slug
from ell0.report import _charts, _gallery, _read, _view, _words
from ell0.results import Results, Row
from report_runs import RECIPE, accuracy, log, results, rows, run_folder

REPOSITORY = Path(__file__).parent.parent
HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"
WIDTHS = (360, 1440)


class Outline(HTMLParser):
    """What a page is made of: elements with their attributes, and its text, with plain spaces and hyphens."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self._text: list[str] = []
        self._style = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._style = tag == "style"

    def handle_endtag(self, _: str) -> None:
        self._style = False

    def handle_data(self, data: str) -> None:
        if not self._style:
            self._text.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self._text).replace("\N{EN DASH}", "-").split())

    def all(self, tag: str, word: str | None = None) -> list[dict[str, str | None]]:
        """Elements of a tag, with a class where one is given."""
        found = [attributes for name, attributes in self.elements if name == tag]
        return found if word is None else [one for one in found if word in (one.get("class") or "").split()]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_folder(tmp_path_factory.mktemp("runs") / "mnist-table1")


@pytest.fixture(scope="module")
def outline(run: Path) -> Outline:
    return Outline(report.page([run]))


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
    for nothing in ({"what": "step", "value": 2.5}, {"what": "robust_accuracy", "attack": "worst case", "value": None}):
        assert "These results hold no accuracy" in of_rows(tmp_path, [nothing]).text


def test_flags_stand_before_the_figures(outline: Outline, tmp_path: Path) -> None:
    assert "1 flag: read it before the figures" in outline.text
    assert "F(10): search beats gradients by 3.1 points" in outline.text
    assert outline.text.index("1 flag") < outline.text.index("Share of test images")
    found = [row | {"flags": ""} for row in rows() if row.get("attack") == "worst case"]
    found[0]["flags"] = ["one: of another", "two: of both; they stand"]
    found[-1]["flags"] = "two: of both; they stand; three: of the best"
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
    row = {"value": (low + high) / 2, "low": low, "high": high, "paper": 0.5879, "paper_n": n}
    assert _words.Cell.share(row).against == expected


def test_rounding_of_an_end_puts_nothing_above_the_paper() -> None:
    for value, low, high in ((0.0, 2e-19, 0.004), (1.0, 0.996, 1 - 1e-16)):
        assert _words.Cell.share({"value": value, "low": low, "high": high, "paper": value}).against == "meets"


def test_a_figure_that_is_no_number_is_a_dash() -> None:
    for value in (None, float("nan"), float("inf")):
        cell = _words.Cell.share({"value": value, "paper": 0.5})
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
    found = [accuracy(0.5, 100, classifier="F", attack="sparse_rs", budget=3, attacked=60, broken=2)]
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


def test_charts_show_ours_theirs_and_intervals(outline: Outline) -> None:
    marks = [one for tag in ("circle", "polygon") for one in outline.all(tag, "mark")]
    hollow = [one for one in marks if "paper" in str(one["class"]).split()]
    # Two classifiers: three budgets, then three numbers of queries at each of them; and one in the legend.
    assert len(hollow) == 2 * (3 + 3 * 3) + 1
    assert len(outline.all("polygon", "band")) == 2 * (2 + 3)
    assert len(outline.all("line", "refresh")) == 3 * 3  # before epochs 25, 50 and 75, on three charts


def test_a_chart_is_drawn_to_scale() -> None:
    points = [_charts.Point(x, y, y / 2, y / 2 + 50, f"{x}") for x, y in ((1, 0.0), (10, 50.0), (100, 100.0))]
    axes = _charts.Axis("queries", "log values"), _charts.Axis("accuracy", ends=(0.0, 100.0))
    svg = str(_charts.Chart("title", "note", *axes, [_charts.Series("a", 0, points)]).svg("id"))
    (line,) = re.findall(r'<polyline class="line [^"]*" points="([^"]*)"', svg)
    (x1, y1), (x2, y2), (x3, y3) = (tuple(map(float, pair.split(","))) for pair in line.split())
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.11)
    assert y1 - y2 == pytest.approx(y2 - y3, abs=0.11)
    assert x1 < x3
    assert y3 < y1
    (band,) = re.findall(r'<polygon class="band [^"]*" points="([^"]*)"', svg)
    height = y1 - y3
    heights = [(y1 - float(pair.split(",")[1])) / height for pair in band.split()]
    assert heights == pytest.approx([0.5, 0.75, 1.0, 0.5, 0.25, 0.0], abs=0.002)


def test_points_and_lines_stand_where_they_belong() -> None:
    what: Row = {"classifier": "F", "value": 0.5, "low": 0.4, "high": 0.6, "paper": 0.7}
    (series,) = _view._lines([what | {"budget": 3}], "budget", {"F": 0}, "changed")
    (ours,), (paper,) = series.points, series.paper
    assert (ours.x, ours.y, ours.low, ours.high) == (3, 50.0, 40.0, 60.0)
    assert (paper.x, paper.y) == (3, 70.0)
    epochs = [json.loads(line) for line in log(60, 25, 0.1).splitlines()]
    loss, train, validation = _view._training({"F": epochs}, {"F": 0})
    assert list(loss.lines) == [25, 50]
    for chart, key, scale in (
        (loss, "loss", 1),
        (train, "train_accuracy", 100),
        (validation, "validation_accuracy", 100),
    ):
        assert [(p.x, p.y) for p in chart.series[0].points] == [(row["epoch"], scale * row[key]) for row in epochs]


@pytest.mark.parametrize("values", [[5.0], [0.0, 0.0], [1e-6, 2e6], [3.0, 3.0001]])
@pytest.mark.parametrize("kind", ["linear", "values"])
def test_charts_of_few_or_far_values(values: list[float], kind: Any) -> None:
    points = [_charts.Point(value, value) for value in values]
    svg = str(
        _charts.Chart("t", "n", _charts.Axis("x", kind), _charts.Axis("y"), [_charts.Series("a", 3, points)]).svg("i")
    )
    assert "nan" not in svg
    assert svg.count('class="tick"') >= 2


def test_styles_differ_in_more_than_colour() -> None:
    styles = range(_charts.COLOURS)
    assert len({(style % len(_charts._SHAPES), style % _charts.DASHES) for style in styles}) == len(styles)


def test_pixels_of_the_gallery_are_those_of_the_images() -> None:
    image = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    assert (read_png(_gallery.png(image)) == image).all()


def test_the_gallery_marks_what_changed(run: Path, outline: Outline) -> None:
    with np.load(run / "gallery.npz") as file:
        arrays = dict(file)
    assert len(outline.all("rect", "changed")) == 6 * (1 + 5)
    row, column = np.argwhere(arrays["f0/adv"][0, 0] != arrays["clean"][0, 0])[0]
    first = outline.all("rect", "changed")[0]
    place = [float(str(first[key])) + float(str(first[side])) / 2 for key, side in (("x", "width"), ("y", "height"))]
    assert place == pytest.approx([column + 0.5, row + 0.5])
    assert (len(outline.all("span", "fooled")), len(outline.all("span", "held"))) == (6 + 2, 4)
    uris = [str(one["href"]) for one in outline.all("image")]
    assert len(uris) == 6 * 3
    shown = read_png(base64.b64decode(uris[1].removeprefix("data:image/png;base64,")))
    assert shown[row, column].tolist() in ([0, 0, 0], [255, 255, 255])
    expected = np.rint((arrays["clean"][0, 0] + 1) * 127.5)
    assert (np.delete(shown[..., 0].ravel(), row * 8 + column) == np.delete(expected.ravel(), row * 8 + column)).all()
    labels = [str(one["aria-label"]) for one in outline.all("svg") if "aria-label" in one]
    label = int(arrays["labels"][0])
    assert labels[:2] == [
        f"Clean image, {label}",
        f"Attacked image, {label}: F(0) says {arrays['f0/says'][0]}, 1 changed",
    ]


def test_labels_are_said_in_words_where_there_are_some(run: Path) -> None:
    gallery = _read.read(run).gallery
    assert gallery is not None
    names = [f"class {label}" for label in range(10)]
    for plain, named in zip(_gallery.exhibits(gallery), _gallery.exhibits(gallery, names), strict=True):
        assert named.label == f"class {plain.label}"
        for one, other in zip(plain.pictures, named.pictures, strict=True):
            verb, label = one.says.split()
            assert other.says == f"{verb} class {label}"


def test_an_image_that_was_wrong_when_clean_says_so(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    with np.load(run / "gallery.npz") as file:
        arrays = dict(file)
    arrays["f0/said"] = (arrays["labels"] + 1) % 10
    np.savez(copy / "gallery.npz", **arrays)
    assert Outline(report.page([copy])).text.count("wrong when clean") == 6


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
    fair = [row | {"decided by clean": i} for i, row in enumerate([*found, found[2] | {"classifier": "F(4)"}])]
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


def test_a_page_of_several_runs(run: Path, tmp_path: Path) -> None:
    bench = REPOSITORY / "results" / "bench-train-h200.json"
    out = report.write([run, bench], tmp_path / "deep" / "page.html")
    outline = Outline(out.read_text())
    assert "Report of 2 runs" in outline.text
    assert {one.get("href") for one in outline.all("a")} >= {"#run1", "#run2"}
    _check_structure(outline)


def test_structure(outline: Outline, run: Path) -> None:
    assert report.page([run]).startswith("<!doctype html>\n")
    _check_structure(outline)
    assert [one.get("href") for one in outline.all("a")] == ["#main"]


def _check_structure(outline: Outline) -> None:
    """Landmarks, headings that skip no level, names that lead somewhere, tables that can be read aloud."""
    levels = [int(tag[1]) for tag, _ in outline.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b - a <= 1 for a, b in pairwise(levels))
    ids = [attributes["id"] for _, attributes in outline.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in outline.elements:
        for name in (attributes.get("aria-labelledby") or "").split():
            assert name in ids
    for tag in ("header", "main", "footer"):
        assert len(outline.all(tag)) == 1
    assert all("scope" in one for one in outline.all("th"))
    assert len(outline.all("caption")) == len(outline.all("table")) == len(outline.all("div", "scroll"))
    assert all(one.get("tabindex") == "0" and one.get("aria-label") for one in outline.all("div", "scroll"))
    assert all(one.get("tabindex") == "0" and one.get("aria-label") for one in outline.all("pre"))
    for one in outline.all("svg"):
        named = one.get("aria-hidden") == "true" or one.get("role") == "img"
        assert named
        assert one.get("aria-hidden") or one.get("aria-label") or one.get("aria-labelledby")
    assert not outline.all("script")


def test_everything_is_escaped(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", epochs=30, images=2)
    hostile = [
        {
            key: HOSTILE if isinstance(value, str) and key not in ("what", "attack") else value
            for key, value in row.items()
        }
        for row in rows()
    ]
    hostile += [row | {"attack": HOSTILE} for row in hostile if row.get("attack") == "sparse_rs"]
    hostile += [{"what": HOSTILE, HOSTILE: HOSTILE, "value": HOSTILE, "paper": 1.0}]
    found = results(HOSTILE, hostile)
    found.command = found.device = found.commit = HOSTILE
    found.versions = {HOSTILE: HOSTILE}
    found.save(run / "results.json")
    name = json.dumps(HOSTILE)
    (run / "recipe.toml").write_text(RECIPE.replace('"F(0)"', name).replace('"ABS"', name) + f"# {HOSTILE}\n")
    page = report.page([run])
    outline = Outline(page)
    assert "<script" not in page
    assert not [one for _, one in outline.elements if any(key.startswith("on") for key in one)]
    assert not outline.all("img")
    assert outline.text.count("<script>alert(1)</script>") > 20


def test_contrast() -> None:
    """Text on its paper, 4.5 to 1; lines and marks 3 to 1; light and dark."""
    css = (Path(report.__file__).parent / "page.css").read_text()
    light, dark, *_ = (dict(re.findall(r"--([\w-]+): (#\w{6})", block)) for block in css.split(":root {")[1:])
    for theme in (light, dark):
        for paper in ("paper", "raised"):
            for ink in ("ink", "soft", "accent", "link", "good", "bad"):
                assert _contrast(theme[ink], theme[paper]) >= 4.5, (ink, paper)
            for line in (f"c{i}" for i in range(_charts.COLOURS)):
                assert _contrast(theme[line], theme[paper]) >= 3, (line, paper)
        assert _contrast(theme["warn"], theme["warn-paper"]) >= 4.5


def _contrast(a: str, b: str) -> float:
    high, low = sorted((_luminance(a), _luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


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
    [("budget", "three", "a number"), ("decided by clean", [1], "a number"), ("classifier", 4, "a text")],
)
def test_a_row_must_have_figures_where_they_belong(tmp_path: Path, key: str, value: Any, words: str) -> None:
    found = [accuracy(0.5, 100, classifier="F", attack="worst case", budget=3)]
    with pytest.raises(ValueError, match=re.escape(f"{key} of row 2 must be {words}, got {value!r}")):
        of_rows(tmp_path, [*found, *(row | {key: value} for row in found)])


def test_what_a_row_leaves_out_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    for key in {key: None for row in rows() for key in row}:
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


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Chromium]:
    if chromium.FOUND is None:
        pytest.skip("no Chromium on this machine")
    with chromium.Chromium(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def _wide(folder: Path) -> Path:
    """Sixteen classifiers, with names longer than any screen is wide, on every kind of chart."""
    names = [f"F({k}) " + "with-a-very-long-name-" * (k % 5) for k in range(16)]
    found = [
        accuracy(
            1 / (1 + k + budget), 1000, classifier=name, k=k, attack=attack, budget=budget, queries=queries, beta=100.0
        )
        for k, name in enumerate(names)
        for budget in (1, 2, 3, 5, 8, 13, 100)
        for attack, queries in (("worst case", 1000), ("sparse_rs", 300), ("sparse_rs", 301), ("sparse_rs", 5000))
    ]
    for k, name in enumerate(names):
        (folder / slug(name)).mkdir(parents=True)
        (folder / slug(name) / "log.jsonl").write_text(log(40, 7, 0.01 * (k + 1)))
        found.append({"what": "training_seconds", "classifier": name, "value": 1e6})
    head = 'name = "wide"\nsummary = "many"\ndata.name = "mnist"\n'
    classifiers = [f'[[classifier]]\nname = {json.dumps(name)}\nmodel = {{ name = "mlp", k = 1 }}\n' for name in names]
    (folder / "recipe.toml").write_text(head + "".join(classifiers))
    made = results("wide-" * 30, found)
    made.command = "ell0 run " + "x" * 300
    made.save(folder / "results.json")
    return folder


@pytest.fixture(scope="module", params=["table", "wide", "both"])
def opened(
    request: pytest.FixtureRequest, run: Path, browser: chromium.Chromium, tmp_path_factory: pytest.TempPathFactory
) -> tuple[chromium.Chromium, Path]:
    folder = tmp_path_factory.mktemp("pages")
    sources = {"table": [run], "wide": [folder / "wide"], "both": [run, folder / "wide"]}[request.param]
    if folder / "wide" in sources:
        _wide(folder / "wide")
    return browser, report.write(sources, folder / "page.html")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_a_browser_has_nothing_to_complain_of(opened: tuple[chromium.Chromium, Path], width: int, dark: bool) -> None:
    browser, page = opened
    browser.open(page, width=width, dark=dark)
    assert browser.complaints == []
    assert [url for url in browser.requests if not url.startswith("data:")] == [page.resolve().as_uri()]
    background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background))) < 3 * 128) == dark


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_clipped_or_overlaps(opened: tuple[chromium.Chromium, Path], width: int) -> None:
    browser, page = opened
    browser.open(page, width=width)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate(_OUTSIDE) == []
    assert browser.evaluate(_OVERLAPPING) == []
    assert browser.evaluate("Math.min(...[...document.querySelectorAll('.chart text')].map(e => "
                            "e.getBoundingClientRect().height))") >= 12  # fmt: skip


# Elements that stick out of the page sideways, unless they lie in something that scrolls.
_OUTSIDE = """[...document.querySelectorAll('main *, header *, footer *')]
.filter(e => !e.closest('.scroll, pre, .unseen') && e.getBoundingClientRect().width)
.filter(e => e.getBoundingClientRect().right > innerWidth + 0.5 || e.getBoundingClientRect().left < -0.5)
.map(e => e.outerHTML.slice(0, 80))"""

# Labels of a chart that touch, or leave its figure.
_OVERLAPPING = """[...document.querySelectorAll('.chart svg')].flatMap(svg => {
  const boxes = [...svg.querySelectorAll('text')].map(e => [e.textContent, e.getBoundingClientRect()]);
  const frame = svg.closest('figure').getBoundingClientRect();
  const hits = boxes.flatMap(([a, p], i) => boxes.slice(i + 1)
    .filter(([b, q]) => p.left < q.right && q.left < p.right && p.top + 2 < q.bottom && q.top + 2 < p.bottom)
    .map(([b]) => a + ' on ' + b));
  const out = boxes.filter(([a, p]) => p.left < frame.left - 0.5 || p.right > frame.right + 0.5).map(([a]) => a);
  return hits.concat(out);
})"""


def test_paper_has_room_for_the_table(run: Path, browser: chromium.Chromium, tmp_path: Path) -> None:
    browser.open(report.write([run], tmp_path / "page.html"), width=700, media="print")  # A4 between its margins
    assert browser.evaluate("document.documentElement.scrollWidth") <= 700


def test_the_browser_sees_what_must_not_be(browser: chromium.Chromium, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(
        "<!doctype html><main><figure class=chart style='margin:0'><svg width=100 height=50>"
        "<text x=5 y=20>one</text><text x=9 y=20>two</text></svg></figure><p style='width:500px'>wide</p></main>"
        "<img src='http://127.0.0.1:9/x.png'>"
    )
    browser.open(page, width=360)
    assert any("127.0.0.1:9" in url for url in browser.requests)
    assert browser.complaints
    assert browser.evaluate("document.documentElement.scrollWidth") > 360
    assert browser.evaluate(_OUTSIDE)
    assert browser.evaluate(_OVERLAPPING) == ["one on two"]


def test_the_keyboard_reaches_what_scrolls(opened: tuple[chromium.Chromium, Path]) -> None:
    browser, page = opened
    browser.open(page, width=360)
    browser.ask("Input.dispatchKeyEvent", type="keyDown", key="Tab", windowsVirtualKeyCode=9)
    assert browser.evaluate("document.activeElement.className") == "skip"
    assert browser.evaluate("document.activeElement.getBoundingClientRect().top") >= 0
    assert browser.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    browser.evaluate("document.querySelectorAll('details').forEach(e => { e.open = true; })")
    scrolling = "[...document.querySelectorAll('.scroll, pre')].filter(e => e.scrollWidth > e.clientWidth)"
    assert browser.evaluate(f"{scrolling}.length") > 1
    assert browser.evaluate(f"{scrolling}.every(e => (e.focus(), document.activeElement === e))")
