"""The page of a report: charts, the gallery, its structure, and what a browser makes of it."""

from __future__ import annotations

import base64
import json
import re
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import chromium
from ell0 import report
from ell0.data.sources import read_png
from ell0.files import FileError
from ell0.recipe import slug
from ell0.report import charts, run_files, sections
from ell0.results import Measurement
from report_runs import RECIPE, REPOSITORY, Outline, accuracy, gallery, log, results, rows, run_folder, write_gallery

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"
WIDTHS = (360, 1440)
SCRIPTS: list[dict[str, str | None]] = [{"type": "application/json"}, {}]  # of the panel: its data, and what it runs


def test_charts_show_ours_theirs_and_intervals(outline: Outline) -> None:
    # Two classifiers: three budgets, then three numbers of queries at each of them; and one in the legend.
    assert len([one for one in outline.all("path", "mark") if "paper" in str(one["class"])]) == 2 * (3 + 3 * 3) + 1
    assert len(outline.all("polygon", "band")) == 2 * (2 + 3)
    assert "F(10) in the paper: 3 pixels changed 93.0 %, 5 pixels changed 81.8 %, 8 pixels changed" in outline.text
    assert len(outline.all("line", "refresh")) == 3 * 3  # before epochs 25, 50 and 75, on three charts


def test_a_chart_is_drawn_to_scale() -> None:
    points = [charts.ChartPoint(x, y, y / 2, y / 2 + 50, f"{x}") for x, y in ((1, 0.0), (10, 50.0), (100, 100.0))]
    axes = charts.Axis("queries", "log values"), charts.Axis("accuracy", ends=(0.0, 100.0))
    drawing = charts.Chart("title", "note", *axes, [charts.Series("a", 0, points)]).drawing()
    ((_, line),), ((_, band),) = drawing["lines"], drawing["bands"]
    (x1, y1), (x2, y2), (x3, y3) = (tuple(map(float, pair.split(","))) for pair in line.split())
    assert 0 < x2 - x1 == pytest.approx(x3 - x2, abs=0.11)
    assert 0 < y1 - y2 == pytest.approx(y2 - y3, abs=0.11)
    heights = [(y1 - float(pair.split(",")[1])) / (y1 - y3) for pair in band.split()]
    assert heights == pytest.approx([0.5, 0.75, 1.0, 0.5, 0.25, 0.0], abs=0.002)


def test_points_and_lines_stand_where_they_belong() -> None:
    found = Measurement.of("accuracy", 0.5, classifier="F", low=0.4, high=0.6, paper=0.7, budget=3)
    (series,) = sections._lines([found], "budget", {"F": 0}, "changed")
    (ours,), (paper,) = series.points, series.paper
    assert (ours.x, ours.y, ours.low, ours.high) == (3, 50.0, 40.0, 60.0)
    assert (paper.x, paper.y) == (3, 70.0)
    epochs = [json.loads(line) for line in log(60, 25, 0.1).splitlines()]
    loss, train, validation = sections._training({"F": epochs}, [], {"F": 0}).charts
    assert list(loss.lines) == [25, 50]
    for chart, key in ((loss, "loss"), (train, "train_accuracy"), (validation, "validation_accuracy")):
        scale = 1 if chart is loss else 100
        assert [(p.x, p.y) for p in chart.series[0].points] == [(row["epoch"], scale * row[key]) for row in epochs]


@pytest.mark.parametrize("values", [[5.0], [0.0, 0.0], [1e-6, 2e6], [3.0, 3.0001]])
@pytest.mark.parametrize("kind", ["linear", "values"])
def test_charts_of_few_or_far_values(values: list[float], kind: Any) -> None:
    lines = [charts.Series("a", 3, [charts.ChartPoint(value, value) for value in values])]
    drawing = charts.Chart("t", "n", charts.Axis("x", kind), charts.Axis("y"), lines).drawing()
    assert "nan" not in str(drawing)
    assert len(drawing["rows"]) + len(drawing["columns"]) >= 2


def test_styles_differ_in_more_than_colour() -> None:
    styles = range(charts.COLOURS)
    assert len({(style % len(charts._SHAPES), style % charts.DASHES) for style in styles}) == len(styles)


def test_the_gallery_marks_what_changed(outline: Outline) -> None:
    arrays = gallery(6)
    assert len(outline.all("rect", "changed")) == 6 * (1 + 5)
    row, column = np.argwhere(arrays["f0/adv"][0, 0] != arrays["clean"][0, 0])[0]
    first = outline.all("rect", "changed")[0]
    place = [float(str(first[key])) + float(str(first[side])) / 2 for key, side in (("x", "width"), ("y", "height"))]
    assert place == pytest.approx([column + 0.5, row + 0.5])
    assert (len(outline.all("span", "fooled")), len(outline.all("span", "held"))) == (6 + 2, 4)
    uris = [str(one["href"]) for one in outline.all("image")]
    assert len(uris) == 6 * 3
    shown = read_png(base64.b64decode(uris[1].removeprefix("data:image/png;base64,")), 8, 8)
    assert shown[row, column].tolist() in ([0, 0, 0], [255, 255, 255])
    expected = np.rint((arrays["clean"][0, 0] + 1) * 127.5)
    assert (np.delete(shown[..., 0].ravel(), row * 8 + column) == np.delete(expected.ravel(), row * 8 + column)).all()
    clean, attacked, *_ = (str(one["aria-label"]) for one in outline.all("svg") if "aria-label" in one)
    label = int(arrays["labels"][0])
    assert clean == f"Clean image, {label}"
    assert attacked == f"Attacked image, {label}: F(0) says {arrays['f0/says'][0]}, 1 changed"


def test_what_a_picture_says(tmp_path: Path) -> None:
    """Labels in words where there are some, and that an image was wrong when clean."""
    arrays = gallery(6)
    path = write_gallery(tmp_path, {**arrays, "f0/said": (arrays["labels"] + 1) % 10})
    found = run_files.gallery(path, ["F(0)", "F(10)"], [f"class {label}" for label in range(10)])
    for (word, (clean, first, _)), label, says in zip(found, arrays["labels"], arrays["f0/says"], strict=True):
        assert (word, clean["says"], first["says"]) == (f"class {label}", f"is class {label}", f"says class {says}")
        assert first["note"] == "wrong when clean"
    write_gallery(tmp_path, {**arrays, "f0/adv": arrays["f0/adv"][:, :, :4]})
    with pytest.raises(FileError, match=r"is not a gallery \(F\(0\) has images of shape"):
        run_files.gallery(path, ["F(0)", "F(10)"])


def test_structure_of_one_run_and_of_several(outline: Outline, run: Path, tmp_path: Path) -> None:
    assert report.page([run]).startswith("<!doctype html>\n")
    _check_structure(outline)
    assert [one.get("href") for one in outline.all("a")] == ["#main", "#attack=0"]
    assert outline.all("script") == SCRIPTS
    bench = REPOSITORY / "results" / "bench-train-h200.json"
    several = Outline(report.write([run, bench], tmp_path / "deep" / "page.html").read_text())
    assert "Report of 2 runs" in several.text
    assert {one.get("href") for one in several.all("a")} >= {"#run1", "#run2"}
    _check_structure(several)
    assert not several.all("script")


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
        assert one.get("aria-hidden") == "true" or one.get("role") == "img"
        assert one.get("aria-hidden") or one.get("aria-label") or one.get("aria-labelledby")


def test_everything_is_escaped(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", epochs=30, images=2)
    kept = ("what", "attack")
    hostile = [
        {key: HOSTILE if isinstance(value, str) and key not in kept else value for key, value in row.items()}
        for row in rows()
    ]
    hostile += [row | {"attack": HOSTILE} for row in hostile if row.get("attack") == "sparse_rs"]
    hostile += [{"what": HOSTILE, HOSTILE: HOSTILE, "value": 1.0, "flags": [HOSTILE], "decided": {HOSTILE: 1}}]
    found = results(HOSTILE, hostile)
    found.command = found.device = found.commit = HOSTILE
    found.versions = {HOSTILE: HOSTILE}
    found.save(run / "results.json")
    name = json.dumps(HOSTILE)
    (run / "recipe.toml").write_text(RECIPE.replace('"F(0)"', name).replace('"ABS"', name) + f"# {HOSTILE}\n")
    page = report.page([run])
    outline = Outline(page)
    assert outline.all("script") == SCRIPTS
    assert page.count("<script") == len(SCRIPTS)
    assert not [one for _, one in outline.elements if any(key.startswith("on") for key in one)]
    assert not outline.all("img")
    assert outline.text.count("<script>alert(1)</script>") > 20


def test_every_classifier_of_a_verdict_is_escaped(tmp_path: Path) -> None:
    named = [row | {"classifier": HOSTILE + row["classifier"]} for row in rows() if "classifier" in row]
    source = results("several", named).save(tmp_path / "several.json")
    assert "<script" not in report.page([source])
    assert report.verdict([source]).count(HOSTILE) == 2


def test_contrast() -> None:
    """Text on its paper, 4.5 to 1; lines and marks 3 to 1; light and dark."""
    css = (Path(report.__file__).parent / "page.css").read_text()
    light, dark, *_ = (dict(re.findall(r"--([\w-]+): (#\w{6})", block)) for block in css.split(":root {")[1:])
    for theme in (light, dark):
        for paper in ("paper", "raised"):
            for ink in ("ink", "soft", "accent", "link", "good", "bad"):
                assert _contrast(theme[ink], theme[paper]) >= 4.5, (ink, paper)
            for line in (f"c{i}" for i in range(charts.COLOURS)):
                assert _contrast(theme[line], theme[paper]) >= 3, (line, paper)
        assert _contrast(theme["warn"], theme["warn-paper"]) >= 4.5


def _contrast(*colours: str) -> float:
    luminances = []
    for colour in colours:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        luminances.append(0.05 + 0.2126 * red + 0.7152 * green + 0.0722 * blue)
    return max(luminances) / min(luminances)


def _wide(folder: Path) -> Path:
    """Sixteen classifiers, with names longer than any screen is wide, on every kind of chart."""
    names = [f"F({k}) " + "with-a-very-long-name-" * (k % 5) for k in range(16)]
    found = []
    for k, name in enumerate(names):
        for m, queries in product((1, 2, 3, 5, 8, 13, 100), (300, 301, 1000, 5000)):
            how = {"k": k, "attack": "worst case" if queries == 1000 else "sparse_rs", "budget": m, "queries": queries}
            found.append(accuracy(1 / (1 + k + m), 1000, classifier=name, beta=100.0, **how))
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

_WIDTH = "document.documentElement.scrollWidth"

# The least height of a chart's labels; the link to the verdict where it has the focus; what scrolls, without a focus.
_REST = """Math.min(...[...document.querySelectorAll('.chart text')].map(e => e.getBoundingClientRect().height)),
(skip => (skip.focus(), [skip.getBoundingClientRect().top >= 0, getComputedStyle(skip).outlineStyle]))
  (document.querySelector('a, button, input, [tabindex]')),
(document.querySelectorAll('details').forEach(e => { e.open = true; }),
  [...document.querySelectorAll('.scroll, pre')].filter(e => e.scrollWidth > e.clientWidth)
  .filter(e => (e.focus(), document.activeElement !== e)).length)"""


@pytest.fixture(scope="module", params=["one run", "two runs"])
def page(request: pytest.FixtureRequest, run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    return report.write([run, _wide(folder / "wide")][request.param == "one run" :], folder / "page.html")


@chromium.needed
@pytest.mark.parametrize("width", WIDTHS)
def test_a_browser_shows_all_of_the_page(page: Path, width: int) -> None:
    """It fits, nothing is clipped or overlaps, the keyboard reaches what scrolls, and the console stays empty."""
    script = f"[{_WIDTH}, {_OUTSIDE}, {_OVERLAPPING}, {_REST}]"
    (wide, outside, overlapping, least, skip, unreached), complaints = chromium.look(page, script, width=width)
    assert complaints == []
    assert (wide, outside, overlapping, skip, unreached) == (width, [], [], [True, "solid"], 0)
    assert least >= 12


@chromium.needed
def test_dark_and_printed_pages(run: Path, tmp_path: Path) -> None:
    page = report.write([run], tmp_path / "page.html")
    for dark in (False, True):
        colour, _ = chromium.look(page, "getComputedStyle(document.body).backgroundColor", width=360, dark=dark)
        assert (sum(map(int, re.findall(r"\d+", colour))) < 3 * 128) == dark
    assert chromium.look(page, _WIDTH, width=700, paper=True)[0] <= 700  # A4 between its margins
