"""Sweeps: one recipe stands for several runs, which processes share."""

from __future__ import annotations

import fcntl
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ell0 import recipe
from ell0.cli import main
from ell0.recipe.toml import to_toml
from ell0.results import Results

TEXT = st.text(st.characters(codec="utf-8"))
SCALAR = TEXT | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
KEYS = TEXT.filter(bool)


def tables(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(KEYS, SCALAR | st.lists(SCALAR) | inner | st.lists(inner), max_size=4)


@settings(max_examples=100)
@given(tables(tables(tables(st.just({})))))
def test_what_is_written_is_read_again(content: dict[str, Any]) -> None:
    assert tomllib.loads(to_toml(content)) == content


@pytest.fixture
def sweep(tiny: Path) -> Path:
    """Two seeds with two budgets of a part of the small recipe."""
    content = tomllib.loads(tiny.read_text())
    one = content["classifier"][1] | {"name": "F({k})"}
    kept = {**content, "classifier": [one], "measure": content["measure"][:1], "paper": []}
    tiny.write_text(to_toml(kept | {"sweep": {"seed": [0, 1], "budget": [1, 2]}}))
    return tiny


def test_a_sweep_stands_for_whole_recipes(sweep: Path, tmp_path: Path) -> None:
    members = recipe.sweep(sweep)
    assert [one.name for one in members] == [f"tiny-budget{m}-seed{s}" for m in (1, 2) for s in (0, 1)]
    assert [(one.classifiers[0].budget, one.classifiers[0].training.seed) for one in members] == [
        (1, 0), (1, 1), (2, 0), (2, 1),
    ]  # fmt: skip
    for one in members:
        alone = tmp_path / "alone.toml"
        alone.write_bytes(one.text)
        assert recipe.load(alone) == one
    sweep.write_text(sweep.read_text().replace("budget = [1, 2]", "k = [0, 3]"))
    assert [one.classifiers[0].name for one in recipe.sweep(sweep)] == ["F(0)", "F(0)", "F(3)", "F(3)"]
    assert recipe.sweep("digits") == ()


def test_runs_of_a_sweep_are_shared_and_shown_side_by_side(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "swept"
    command = ["run", str(sweep), "--out", str(out), "--device", "cpu"]
    names = [one.name for one in recipe.sweep(sweep)]
    (out / names[1]).mkdir(parents=True)
    with (out / names[1] / ".lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert main([*command, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert list(told["runs"]) == [str(out / name) for name in names if name != names[1]]
        assert told["busy"] == [str(out / names[1])]
        assert not (out / names[1] / "results.json").exists()
    before = (out / names[0] / "results.json").stat()
    assert main(command) == 0
    shown = capsys.readouterr()
    assert names[0] not in shown.err
    assert f"2/4 {names[1]}\n1/3 training F(2)" in shown.err
    assert (out / names[0] / "results.json").stat() == before
    page = (out / "report.html").read_text()
    for name in names:
        assert Results.load(out / name / "results.json").name == name
        assert name in page
        assert f"{name}:" in shown.out


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({}, "tiny.toml, sweep: must have k, budget or seed, each a list"),
        ({"sed": [1]}, "unknown key 'sed'; did you mean 'seed'?"),
        ({"budget": [0]}, "budget must be a list of different values, each an int >= 1"),
        ({"k": [30]}, "k must satisfy"),
    ],
)
def test_a_wrong_sweep_is_one_sentence(
    table: dict[str, Any], said: str, sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = tomllib.loads(sweep.read_text())
    sweep.write_text(to_toml(content | {"sweep": table}))
    assert main(["run", str(sweep), "--out", str(tmp_path / "new"), "--device", "cpu"]) == 1
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_a_budget_needs_an_attack(sweep: Path) -> None:
    content = tomllib.loads(sweep.read_text())
    del content["classifier"][0]["training"]["attack"]
    sweep.write_text(to_toml(content))
    with pytest.raises(ValueError, match="budget must be left out if no classifier is trained against an attack"):
        recipe.sweep(sweep)
    with pytest.raises(ValueError, match=r"tiny\.toml: is a sweep, which stands for several recipes"):
        recipe.load(sweep)
