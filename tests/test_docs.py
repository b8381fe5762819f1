"""What README.md and docs/ say is true: tables come from results files, links and commands exist."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import figures
import pytest
import tables
from hypothesis import settings

from ell0 import recipe
from ell0.results import Measurement, Results

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_tables_are_those_of_the_results_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert tables.main(["--check"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("commit", [None, "0123456789ab-dirty"])
def test_results_of_a_dirty_tree_are_refused(
    commit: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    for each in recipe.names():
        replace(made_up(each), commit=commit).save(tmp_path / "results" / f"{each}.json")
    assert tables.main(["mnist-abs"]) == 2
    assert f"must name a clean commit, got {commit}" in capsys.readouterr().err


def test_every_results_file_is_of_a_clean_commit_or_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (ROOT / "results").glob("*.json"):
        for row in tables.clean_results(path.stem).rows:
            if row.verdicts is not None:
                row.row_verdicts()  # raises if they do not fit its value
    listed = tables.UNCLEAN
    monkeypatch.setattr(tables, "UNCLEAN", ())
    for name in listed:
        with pytest.raises(ValueError, match="must name a clean commit"):
            tables.clean_results(name)


def test_figures_are_those_of_the_results_files() -> None:
    assert figures.main(["--check"]) == 0, "docs/figures is stale: run tools/figures.py"


@pytest.mark.parametrize("name", tables.TABLES)
def test_a_table_has_a_cell_for_each_column_and_names_its_source(name: str) -> None:
    *lines, blank, below = tables.table(name).split("\n")
    assert {line.count("|") for line in lines} == {lines[0].count("|")}
    assert blank == ""
    assert re.search(r"measured on .+ by `(ell0|python) [^`]+`|nothing measured yet", below)


FILLED = {name for name in tables.TABLES if name.startswith("paper-")} - {"paper-theorem2", "paper-differences"}
FILLED |= {"cifar-all-attacks", "cifar-training", "mnist-abs", "mnist-abs-binary", "mnist-ablation", "mnist-scale"}
FILLED |= {"cifar-front", "cifar-certified", "cifar-votes-sandwich", "fashion-votes", "mnist-certified"}


@pytest.mark.parametrize("name", sorted(FILLED))
def test_a_figure_says_that_it_is_not_measured_and_is_filled_once_it_is(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Filled from every row that the recipes ask for, so the table looks for what a run will give."""
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    empty = tables.table(name)
    assert empty.endswith("nothing measured yet.")
    *lines, _, _ = empty.split("\n")
    assert all(re.search(r"not measured|^\| paper|, published \|", line) for line in lines[2:])
    for each in recipe.names():
        made_up(each).save(tmp_path / "results" / f"{each}.json")
    own = "results/bench-train-h200.json"
    (tmp_path / own).write_text((ROOT / own).read_text())
    left = [line for line in tables.table(name).split("\n") if line.startswith("|") and "not measured" in line]
    assert not [line for line in left if "figure of another paper" not in line]


@pytest.mark.parametrize(
    ("value", "n", "words"),
    [
        *((0.45, None, "yes"), (0.61, None, "no, lower here"), (0.61, 512, "no, lower here")),
        *((0.0, 512, "no, higher here"), (0.53, 100, "yes"), (0.62, 30, "a"), ("5 days", None, "-")),
    ],
)
def test_numbers_agree_if_one_lies_in_the_interval_of_the_other(value: Any, n: int | None, words: str) -> None:
    wide = Measurement.of("share", 0.5, low=0.4, high=0.6, n=100)
    found = {"a": wide} if words != "a" else {"a": wide, "b": Measurement.of("share", 0.1, low=0.0, high=0.2, n=9)}
    assert tables.Printed("", value, (), {}, n).verdict(found) == words
    assert tables.Printed("", value, (), {}, n).verdict({}) == "-"


@cache
def made_up(name: str) -> Results:
    """A results file with all that a recipe asks for."""
    plan = recipe.load(name)
    keys = [*plan.asked(), *({**key, "unit": "seconds"} for key in plan.times())]
    rows = {json.dumps(key): Measurement.of(**key, value=0.5, n=100, low=0.4, high=0.6, certified=0.4) for key in keys}
    return Results(name, f"ell0 run {name}", commit="0123456789ab", device="a machine", rows=[*rows.values()])


def test_what_the_page_of_the_paper_names_exists() -> None:
    page = (ROOT / "docs" / "paper.md").read_text()
    assert not re.findall(r"^\|.*\| *\|.*$", page, re.MULTILINE), "an empty cell"
    spans = set(re.findall(r"`([^`\n]+)`", page))
    assert len(spans) > 40
    for span in spans:
        if file := re.fullmatch(r"(?:tests|benchmarks)/\w+\.py(?:::(\w+))?", span):
            text = (ROOT / span.partition("::")[0]).read_text()
            assert file[1] is None or f"\ndef {file[1]}(" in text, span
        elif ran := re.fullmatch(r"(?:ell0 run )?((?:mnist|cifar)-[\w-]+)", span):
            assert ran[1] in recipe.names(), span
        elif re.fullmatch(r"[a-z]+(\.\w+)+", span) and not span.endswith((".md", ".py")):
            found: Any = import_module(f"ell0.{span.partition('.')[0]}")
            for part in span.split(".")[1:]:
                found = getattr(found, part)


def test_a_changed_or_missing_figure_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    (tmp_path / "results").mkdir()
    results = tmp_path / "results" / "bench-layer-cpu.json"
    # Without its digest, so that a figure can be changed.
    results.write_text(re.sub(r'"sha256": "\w+",', "", (ROOT / "results" / results.name).read_text()))
    page = tmp_path / "README.md"
    page.write_text("before\n<!-- table: layer-cpu -->\n<!-- end -->\nafter\n")
    assert tables.main(["--check"]) == 1
    assert "stale in README.md" in capsys.readouterr().err
    assert (tables.main([]), tables.main(["--check"])) == (0, 0)
    written = page.read_text()
    assert written.startswith("before\n<!-- table: layer-cpu -->\n| 256 samples")
    assert written.endswith("\n<!-- end -->\nafter\n")
    results.write_text(re.sub(r'"value": [0-9.]+', '"value": 12345.6', results.read_text()))
    assert tables.main(["--check"]) == 1
    results.write_text(results.read_text().replace('"mnist"', '"digits28"'))
    capsys.readouterr()
    assert tables.main([]) == 2
    said = capsys.readouterr().err
    assert said.startswith("a table cannot be made: bench-layer-cpu has 0 rows with")
    assert said.count("\n") == 1
    page.write_text(written.replace("layer-cpu", "layer-gpu"))
    assert tables.main([]) == 2
    assert "there is no table 'layer-gpu'" in capsys.readouterr().err


def anchors(page: Path) -> set[str]:
    """The names of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        name, _, anchor = link.partition("#")
        if "://" in name:
            continue
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def make_targets(text: str) -> set[str]:
    """The targets of every ``make ...`` in the text's code blocks and code spans."""
    blocks = re.findall(r"^```.*?\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    spans = re.findall(r"`([^`\n]+)`", text)
    calls = re.findall(r"^make ([^#\n]+)", "\n".join(blocks + spans), re.MULTILINE)
    return {word for call in calls for word in call.split() if "=" not in word}


def test_make_targets_exist() -> None:
    assert make_targets("`make one A=b two` and\n```\nmake three  # make four\n```\n") == {"one", "two", "three"}
    makefile = (ROOT / "Makefile").read_text()
    targets = {target for page in PAGES for target in make_targets(page.read_text())}
    assert {"run", "test"} <= targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_make_test_full_draws_more_cases() -> None:
    makefile = (ROOT / "Makefile").read_text()
    (profile,) = re.findall(r"^test-full:.*\n\tHYPOTHESIS_PROFILE=(\w+) .*pytest", makefile, re.MULTILINE)
    full, default = (settings.get_profile(name) for name in (profile, "default"))
    assert full.max_examples == 10 * default.max_examples
    assert not full.derandomize


def test_certified_rows_are_told_apart_by_rule_and_seed() -> None:
    """A vote has rows of several rules; a line of seeds is their mean; a line without rows is not measured."""
    found = Results("some", "ell0 run some", device="none", commit="000000000000")
    for seed, shares in enumerate(((0.9, 0.5), (0.7, 0.3))):
        who: dict[str, Any] = {"classifier": f"F, seed {seed}", "n": 100}
        found.add(shares[0], what="clean_accuracy", **who)
        for method, less in ((None, 0.0), ("plurality", 0.1)):
            rule = {} if method is None else {"method": method}
            found.add(shares[1] - less, what="certified_accuracy", budget=4, **rule, **who)
            found.add(seed, what="certified_radius", **rule, **who)
    both, first = (tables.of(classifiers=[f"F, seed {seed}" for seed in some]) for some in ((0, 1), (0,)))
    lines = {"both": ("some", both), "one": ("some", first | {"method": "plurality"}), "none": ("absent", both)}
    made = tables.certified("X", lines, (4, 5), "cifar-rivals")(tables.Files(some=found))
    assert [list(line) for line in made.lines[:3]] == [
        ["both, mean of 2 seeds", "80.0 %", "40.0 %", "-", "0.5", "1"],
        ["one", "90.0 %", "40.0 %", "-", "0", "1"],
        ["none", "not measured", *["-"] * 4],
    ]
    assert str(made.lines[3][0]).endswith("published")
