from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ell0 import results as module
from ell0.results import Results

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


@given(rows=st.lists(st.dictionaries(st.text(), scalars)), name=st.text(), seeds=st.lists(st.integers()))
def test_json_round_trip(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, object]], name: str, seeds: list[int]
) -> None:
    path = tmp_path_factory.mktemp("results") / "a.json"
    results = Results(name, "a command", seeds=seeds, rows=rows)
    assert Results.load(results.save(path)) == results
    assert json.loads(path.read_text())["rows"] == rows


def test_here_names_machine_and_versions(tmp_path: Path) -> None:
    results = Results.here("a", "b", seeds=[0], device="cpu")
    assert results.device.endswith(f", {torch.get_num_threads()} threads")
    assert {"ell0", "python", "torch", "numpy"} <= set(results.versions)
    assert Results.load(results.save(tmp_path / "a.json")) == results


def test_the_device_is_that_of_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: f"accelerator {device}")
    assert "accelerator" not in Results.here("a", "b", seeds=[0], device="cpu").device
    assert Results.here("a", "b", seeds=[0], device="cuda:1").device == "accelerator cuda:1"


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_a_changed_tree_is_not_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tmp_path, check=True)

    file = tmp_path / "results.py"
    monkeypatch.setattr(module, "__file__", str(file))
    assert module._commit() is None
    file.write_text("1")
    git("init", "--quiet")
    (tmp_path / "other").touch()
    git("add", "other")
    git("commit", "--quiet", "--message=one")
    assert module._commit() is None, "the file is not of this repository"
    git("add", "results.py")
    git("commit", "--quiet", "--message=two")
    git("tag", "--annotate", "--message=v1", "v1")
    commit = module._commit()
    assert commit is not None
    assert len(commit) == 12
    file.write_text("2")
    assert module._commit() == f"{commit}-dirty"


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
