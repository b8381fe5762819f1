"""What README.md and docs/ say is true: tables come from results files, links and commands exist."""

from __future__ import annotations

import re
from pathlib import Path

import figures
import pytest
import tables
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_tables_are_those_of_the_results_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert tables.main(["--check"]) == 0, capsys.readouterr().err


def test_figures_are_those_of_the_results_files() -> None:
    assert figures.main(["--check"]) == 0, "docs/figures is stale: run tools/figures.py"


@pytest.mark.parametrize("name", tables.TABLES)
def test_a_table_has_a_cell_for_each_column_and_names_its_source(name: str) -> None:
    *lines, blank, below = tables.table(name).split("\n")
    assert {line.count("|") for line in lines} == {lines[0].count("|")}
    assert blank == ""
    assert re.search(r"measured on .+ by `(ell0|python) [^`]+`", below)


def test_a_changed_or_missing_figure_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    (tmp_path / "results").mkdir()
    results = tmp_path / "results" / "bench-layer-cpu.json"
    results.write_text((ROOT / "results" / results.name).read_text())
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
