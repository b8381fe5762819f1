"""The manual: it builds without a warning, loads nothing from elsewhere, and names everything that is public."""

from __future__ import annotations

import ast
import html
import inspect
import re
from dataclasses import astuple
from pathlib import Path
from types import ModuleType

import field_table
import manual
import pytest
import recipe_keys
import theory_curves

import chromium
import curves
import ell0
from ell0.recipe import models, reading
from ell0.results import CLIPPED, Results
from measure import Run

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it: strict, so a warning is an error."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder)))
    return folder


def test_every_public_name_has_an_entry(site: Path) -> None:
    pages = {path.stem: path.read_text() for path in (site / "reference").glob("*.html")}
    rooms = {"ell0": ell0} | {f"ell0.{n}": r for n in ell0.__all__ if isinstance(r := getattr(ell0, n), ModuleType)}
    for room, module in rooms.items():
        for name in module.__all__:
            assert f'id="{room}.{name.strip(chr(95))}"' in pages[room]
            thing = getattr(module, name)
            if callable(thing) and not hasattr(thing, "__origin__"):
                assert manual._doc(thing), f"{room}.{name} must have a docstring"
    assert not any(re.search(r"\bat 0x[0-9a-f]{6}", page) for page in pages.values())


def test_the_site_asks_for_nothing_from_elsewhere(site: Path) -> None:
    for path in site.rglob("*.html"):
        text = path.read_text()
        loaded = re.findall(r"<(?:script|img|iframe|source|video)\b[^>]*?\bsrc=[\"']?([^\"' >]+)", text)
        loaded += re.findall(r"<link\b[^>]*?\bhref=[\"']?([^\"' >]+)", text)
        assert loaded
        assert not [place for place in loaded if re.match(r"(https?:)?//", place)], path
    for path in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", path.read_text()), path


@chromium.needed
def test_every_page_fits_a_phone_and_is_silent(site: Path) -> None:
    paths = sorted(path for path in site.rglob("*.html") if path.name != "404.html")  # which only a server shows
    with chromium.opened(paths[0], width=360) as tab:
        for path in paths:
            tab.go(path)
            assert (tab.run("document.documentElement.scrollWidth"), tab.complaints()) == (360, []), path


@chromium.needed
def test_a_browser_tells_of_errors_and_of_requests(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("<!doctype html><img src='http://127.0.0.1:9/a.png'><script>console.warn(1); missing()</script>")
    complaints = " ".join(chromium.look(page, "0", width=360)[1])
    for words in ("asks for http://127.0.0.1:9/a.png", "warning", "missing is not defined"):
        assert words in complaints


@chromium.needed
@pytest.mark.parametrize(("name", "wanted"), [("theory", "#curves input"), ("results", "#field-filter, #field button")])
def test_tab_reaches_what_one_can_turn(site: Path, name: str, wanted: str) -> None:
    with chromium.opened(site / f"{name}.html", width=1440) as tab:
        assert tab.run("document.documentElement.scrollWidth") == 1440
        count, reached = tab.run(f"document.querySelectorAll('{wanted}').length"), set[int]()
        tab.run("document.querySelector('h1').scrollIntoView()")
        for _ in range(200):
            tab.press("Tab")
            reached.add(tab.run(f"[...document.querySelectorAll('{wanted}')].indexOf(document.activeElement)"))
            if len(reached) > count:
                break
        assert reached == {-1, *range(count)}
        assert tab.complaints() == []


def test_generated_parts_are_in_their_pages(site: Path) -> None:
    assert "must be given" in (site / "recipe-keys.html").read_text()
    assert (site / "results.html").read_text().count("<tr>") == 1 + len(field_table.lines())
    assert not [path for path in site.rglob("*.html") if "<!-- site:" in path.read_text()]


def test_every_key_that_the_code_reads_is_in_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    text = recipe_keys.tables()
    keys = set[str]()
    for module in (reading, models):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                first = node.args[0]
                asks = node.func.attr in ("take", "need", "table", "tables", "need_table")
                keys |= (
                    {first.value}
                    if asks and isinstance(first, ast.Constant) and isinstance(first.value, str)
                    else set()
                )
    assert len(keys) > 30
    assert {key for key in keys if f"| `{key}` |" not in text} == set()
    monkeypatch.setitem(recipe_keys.MEANING, "data", {**recipe_keys.MEANING["data"], "path": "no such key"})
    with pytest.raises(ValueError, match="got other path in 'data'"):
        recipe_keys.tables()


def entry() -> Results:
    results = Results("theirs", "python theirs.py", commit="0123456789ab", device="a GPU")
    results.add(0.9, what="clean_accuracy", classifier="net", data="mnist", n=100)
    results.add(12.0, what="training_seconds", classifier="net")
    given = {"classifier": "net", "data": "mnist", "unit": "pixel"}
    results.add(
        0.5, what="robust_accuracy", attack="worst case", budget=1, beta=10.0, **given, low=0.4, high=0.6, n=100
    )
    results.add(0.6, what="robust_accuracy", attack="sparse_rs", budget=2, beta=1.0, **given, paper=0.7, paper_n=512)
    results.add(0.3, what="certified_accuracy", budget=3, **given, source="a paper", n=100)
    results.add(0.3, what="certified_accuracy", budget=3, **given, split="validation")
    return results


def test_an_entry_is_one_results_file(tmp_path: Path) -> None:
    lines = list(field_table.of_results(Results.load(entry().save(tmp_path / "theirs.json"))))
    assert [astuple(line) for line in lines] == [
        ("mnist", "net", "measured here", "1 pixel, within 10 times the range", "90.0%", "50.0% (40.0% to 60.0%)",
         "all attacks", "", "100", "12 s on a GPU", "`python theirs.py`"),
        ("mnist", "net", "measured here", "2 pixels, within the range", "90.0%", "60.0%", "sparse_rs", "", "",
         "12 s on a GPU", "`python theirs.py`"),
        ("mnist", "net", "the paper", "2 pixels, within the range", "", "70.0%", "sparse_rs", "", "512", "",
         "Beliaev et al. 2022"),
        ("mnist", "net", "quoted", "3 pixels, values: see the source", "", "", "", "30.0%", "100", "", "a paper"),
    ]  # fmt: skip


def test_every_kind_of_figure_is_in_the_table() -> None:
    lines = field_table.lines()
    assert {line.whose_figure for line in lines} == {"measured here", "rival, measured here", "the paper", "quoted"}
    assert {line.data for line in lines} >= {"digits", "mnist", "cifar10", "drebin215"}
    assert len(set(lines)) == len(lines)
    assert all(line.command_or_source and (line.attacked or line.proven) for line in lines)


@chromium.needed
def test_the_table_sorts_and_filters(tmp_path: Path) -> None:
    rows = [["b", "90.0%", "1,000"], ["a", "9.5% (9.0% to 10.0%)", "200"], ["c", "", "30"]]
    cells = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in [*row, *[""] * 5]) + "</tr>" for row in rows)
    heads = "".join(f"<th><button>{h}</button></th>" for h in ["data", "clean", "n", *["by"] * 5])
    script = (ROOT / "docs" / "site" / "sort.js").read_text()
    page = tmp_path / "page.html"
    table = f'<table id="field"><thead><tr>{heads}</tr></thead><tbody>{cells}</tbody></table>'
    box = '<!doctype html><input id="field-filter"><output id="field-count"></output>'
    page.write_text(f"{box}{table}<script>{script}</script>")
    find = """(() => {
      const heads = document.querySelectorAll("th button"), filter = document.getElementById("field-filter");
      const lines = () => [...document.querySelectorAll("tbody tr")].filter((row) => !row.hidden);
      const order = () => lines().map((row) => row.cells[0].textContent).join("");
      const found = [order()];
      for (const i of [0, 1, 1, 2]) { heads[i].click(); found.push(order()); }
      filter.value = "A 9.5"; filter.dispatchEvent(new document.defaultView.Event("input"));
      return [...found, order(), document.getElementById("field-count").textContent];
    })()"""
    found, complaints = chromium.look(page, find, width=800)
    assert complaints == []
    assert found == ["bac", "abc", "abc", "bac", "cab", "a", "1 of 3 lines"]


@chromium.needed
def test_the_sliders_of_the_theory_page_show_the_measured_errors(tmp_path: Path) -> None:
    results = curves.benchmark(Run(), most=100, rows=40)
    data = theory_curves.curves(results)
    page = tmp_path / "page.html"
    script = (ROOT / "docs" / "site" / "curves.js").read_text()
    page.write_text(f"<!doctype html>{theory_curves.figure(results)}<script>{script}</script>")
    turn = """(() => {
      const set = (name, value) => {
        const input = document.querySelector(`#curves [name=${name}]`);
        input.value = value;
        input.dispatchEvent(new document.defaultView.Event("input"));
      };
      set("d", 0); set("decay", 4); set("k", 3); set("m", 1);
      const lines = [...document.querySelectorAll("#curves tbody tr")];
      return [lines.map((row) => row.cells[1].textContent), document.querySelectorAll("#curves polyline").length];
    })()"""
    (errors, lines), complaints = chromium.look(page, turn, width=700)
    m, k, where = 2, data["curves"]["100 1"]["k"][3], {"d": 100, "decay": 1.0}
    truncated = {row["k"]: row.value for row in results.select(classifier="truncated", budget=m, **where)}
    clipped, bound = (
        results.find(**which, budget=m, **where).value for which in ({"classifier": CLIPPED}, {"what": "lower_bound"})
    )
    bayes = results.find(what="bayes_error", **where).value
    expected = [truncated[k], min(truncated.values()), clipped, 1.0, bound, bayes]
    assert errors == [f"{100 * value:.1f} %" for value in (round(one, 4) for one in expected)]
    assert bayes <= bound < min(clipped, *truncated.values())
    assert (lines, complaints) == (5, [])
