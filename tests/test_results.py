from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ell0.results import Results

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


@given(rows=st.lists(st.dictionaries(st.text(), scalars)), name=st.text(), seeds=st.lists(st.integers()))
def test_json_round_trip(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, object]], name: str, seeds: list[int]
) -> None:
    path = tmp_path_factory.mktemp("results") / "a.json"
    results = Results.here(name, "a command", seeds=seeds)
    results.rows = rows
    assert Results.load(results.save(path)) == results
    assert json.loads(path.read_text())["rows"] == rows


def test_here_names_machine_and_versions() -> None:
    results = Results.here("a", "b", seeds=[0])
    assert results.device
    assert {"ell0", "python", "torch", "numpy"} <= set(results.versions)


def test_find_wants_exactly_one_row() -> None:
    results = Results("a", "b")
    results.add(1.0, what="x", k=1)
    results.add(2.0, what="x", k=2)
    assert results.find(what="x", k=2)["value"] == 2.0
    for what in ({"what": "x"}, {"what": "y"}):
        with pytest.raises(LookupError, match="rows with"):
            results.find(**what)


def test_files_are_written_whole(tmp_path: Path) -> None:
    path = Results("a", "b").save(tmp_path / "new" / "a.json")
    before = path.read_text()
    broken = Results("a", "b", rows=[{"value": object()}])
    with pytest.raises(TypeError):
        broken.save(path)
    assert path.read_text() == before
    assert [p.name for p in path.parent.iterdir()] == ["a.json"]


def test_what_is_no_results_file_is_named(tmp_path: Path) -> None:
    for text in ("{", '{"nonsense": 1}', "[]"):
        (tmp_path / "a.json").write_text(text)
        with pytest.raises(ValueError, match=r"a\.json is not a results file"):
            Results.load(tmp_path / "a.json")
