from __future__ import annotations

import copy
import hashlib
import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ell0 import results as module
from ell0.results import Measurement, Results, Share

scalars = st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
maybe = st.none() | st.floats(allow_nan=False)
others = st.text().filter(lambda word: word not in ("what", *module._FIELDS, *module._TYPES))
measurements = st.builds(
    Measurement.of,
    st.text(),
    st.floats(allow_nan=False) | st.integers(),
    n=st.none() | st.integers(),
    low=maybe,
    high=maybe,
    decided=st.dictionaries(st.text(), st.integers()),
    flags=st.lists(st.text()),
    paper=maybe,
    seconds=maybe,
    certified=maybe,
    beside=st.dictionaries(st.text(), scalars),
    budget=st.none() | st.integers(),
    attack=st.none() | st.text(),
)


@given(rows=st.lists(measurements), more=st.dictionaries(others, scalars), name=st.text())
def test_json_round_trip(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Measurement], more: dict[str, Any], name: str
) -> None:
    path = tmp_path_factory.mktemp("results") / "a.json"
    results = Results(name, "a command", seeds=[3], rows=[*rows, Measurement("x", 1.0, identity=more)])
    assert Results.load(results.save(path)) == results
    content = json.loads(path.read_text())
    digest = content.pop("sha256")
    assert content == results.plain()
    assert hashlib.sha256(path.read_bytes().replace(digest.encode(), b"", 1)).hexdigest() == digest


def test_a_measurement_is_its_row() -> None:
    share = Share(3, 4)
    more = {"decided": {"clean": 1}, "flags": ["a flag"], "beside": {"forwards": 3}}
    made = Measurement.of("robust_accuracy", share, budget=2, beta=None, **more)
    row = {"what": "robust_accuracy", "budget": 2, "value": 0.75, "n": 4, "low": share.low, "high": share.high, **more}
    assert dict(made) == row
    assert list(made) == list(row)
    assert made.key == {"what": "robust_accuracy", "budget": 2}
    assert (made["budget"], made.get("beta"), type(made.value)) == (2, None, float)
    again = copy.deepcopy(share)
    assert (again, again.n, again.low, again.high) == (share, 4, share.low, share.high)


@given(rows=st.lists(st.booleans(), min_size=1))
def test_a_share_keeps_which_rows_it_counts(rows: list[bool]) -> None:
    made = Measurement.of("robust_accuracy", Share.of(torch.tensor(rows)), budget=2)
    assert (made.value, made.n) == (sum(rows) / len(rows), len(rows))
    again = Measurement.of(**json.loads(json.dumps(dict(made))))
    assert again.row_verdicts().tolist() == rows
    for wrong in ({"value": made.value + 1 / len(rows)}, {"n": len(rows) + 8}, {"verdicts": None}, {"verdicts": "!"}):
        with pytest.raises(ValueError, match=r"verdicts must be|base64"):
            replace(made, **wrong).row_verdicts()


def test_verdicts_of_a_thousand_rows_are_short() -> None:
    assert len(str(Share.of(torch.ones(1000, dtype=torch.bool)).verdicts)) < 170


def test_here_names_the_device_of_the_work_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: f"accelerator {device}")
    results = Results.here("a", "b", seeds=[0], device="cpu")
    assert "accelerator" not in results.device
    assert results.device.endswith(f", {torch.get_num_threads()} threads")
    assert list(results.versions) == ["ell0", "python", "torch", "numpy"]
    assert Results.here("a", "b", seeds=[0], device="cuda:1", ranks=2).device == "2 ranks, each accelerator cuda:1"


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
    assert results.find(what="x", k=2).value == 2.0
    for what in ({"what": "x"}, {"what": "y"}):
        with pytest.raises(LookupError, match="rows with"):
            results.find(**what)


def test_files_are_written_whole(tmp_path: Path) -> None:
    path = Results("a", "b").save(tmp_path / "new" / "a.json")
    before = path.read_text()
    with pytest.raises(TypeError):
        Results("a", "b", rows=[Measurement("a", object())]).save(path)  # type: ignore[arg-type]
    assert path.read_text() == before
    assert [p.name for p in path.parent.iterdir()] == ["a.json"]


ROW = '{"schema": 2, "name": "a", "command": "b", "rows": [{"what": "x", "value": 1.0, %s}]}'
OLD = "was written by another version of ell0 .schema 1, this one reads 2.: measure again .* by `ell0 run a`"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "is not a results file"),
        ("[]", "is not a results file"),
        ('{"nonsense": 1}', "is not a results file: 'rows' is missing"),
        ('{"name": "a", "command": "ell0 run a", "rows": [{"what": "x", "value": 1}]}', OLD),
        (ROW % '"k": "four"', "is not a results file: k of row 1 must be a number, got 'four'"),
        (ROW % '"value": null', "is not a results file: value of row 1 must be a number, got None"),
        (ROW % '"attack": 3', "is not a results file: attack of row 1 must be a text, got 3"),
        (ROW % '"flags": "a; b"', "is not a results file: flags of row 1 must be a list, got 'a; b'"),
        (ROW % '"decided": 1', "is not a results file: decided of row 1 must be an object, got 1"),
    ],
)
def test_what_is_no_results_file_is_named(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=rf"a\.json {reason}"):
        Results.load(tmp_path / "a.json")
