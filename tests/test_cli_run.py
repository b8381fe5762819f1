"""The commands on runs: what they print, what they leave, their exit codes, and how they complain."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ell0 import models, recipe, report
from ell0.cli import main
from ell0.cli.run import _show
from ell0.recipe import running
from ell0.recipe.measuring import measure
from ell0.results import Results
from ell0.train import save_checkpoint
from tiny_recipe import write_recipe

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def arrays(tmp_path: Path) -> Path:
    """The test rows of the recipe, as a user has them."""
    write_recipe(tmp_path)
    with np.load(tmp_path / "tiny.npz") as file:
        np.savez(tmp_path / "mine.npz", x=file["x_test"], y=file["y_test"])
    return tmp_path / "mine.npz"


def complaint(capsys: pytest.CaptureFixture[str]) -> str:
    """What was said on standard error: one sentence."""
    shown = capsys.readouterr()
    assert shown.err.startswith("ell0: ")
    assert shown.err.count("\n") == 1
    return shown.err


def test_run_prints_a_verdict_and_where_the_page_is(tiny: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(tiny), "--out", str(out), "--device", "cpu"]) == 0
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert lines[-1] == f"page: {out / 'report.html'}"
    assert (out / "report.html").read_text().lstrip().startswith("<!doctype html>")
    rows = Results.load(out / "results.json")
    for name in ("F(0)", "F(2)"):
        worst = [rows.find(classifier=name, attack="worst case", budget=m, beta=10.0)["value"] for m in (1, 2)]
        clean = rows.find(classifier=name, what="clean_accuracy")["value"]
        (line,) = [line.split() for line in lines if line.split()[:1] == [name] and "keeps" not in line]
        assert line[1:] == [f"{100 * value:.1f}" for value in (clean, *worst)]
    assert lines[-2] == report.verdict([out])
    assert " of 20 test images right when " in lines[-2]
    assert "1/17 training F(0)\n" in shown.err
    assert main(["run", str(tiny), "--out", str(out), "--device", "cpu", "--json", "--quiet"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    told = json.loads(shown.out)
    assert told["runs"][str(out)]["rows"] == rows.rows


def test_the_lowest_figure_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """Of several attacks, boxes and efforts: the figure is that of the strongest, not of the most favourable."""
    results = Results("any", "ell0 run any")
    what: dict[str, Any] = {"what": "robust_accuracy", "unit": "pixel", "budget": 2, "n": 9}
    for attack, beta, value in (("sparse_rs", 10.0, 0.9), ("sparse_rs", 1.0, 0.6), ("adaptive", 10.0, 0.7)):
        results.add(value, **what, classifier="A", attack=attack, beta=beta)
    what |= {"classifier": "B", "attack": "adaptive"}
    results.add(0.65, beta=10.0, **what)
    results.add(0.99, beta=10.0, split="validation", **what)
    for split, value in (("validation", 0.995), (None, 0.5)):
        results.add(value, what="clean_accuracy", classifier="B", split=split, n=20)
    _show(results)
    lines = capsys.readouterr().out.splitlines()
    said = "accuracy in %: sparse_rs, adaptive, pixels changed, values within ±10, n = 9; clean: n = 20"
    assert lines[0] == said
    assert [line.split() for line in lines[2:4]] == [["A", "60.0"], ["B", "50.0", "65.0"]]


def test_a_run_of_medians_alone_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    results = Results("some", "ell0 run some")
    results.add(3, what="median_distance", classifier="F(2)", n=9)
    _show(results)
    assert capsys.readouterr().out.split() == ["classifier", "F(2)"]


def test_list_names_every_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--list", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == set(recipe.names())
    assert main(["run", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split(" ")[0] for line in lines} >= {"mnist-table1", "mnist-fig1a", ""}
    assert any(line.startswith("  mnist-fig1a-1 ") for line in lines)


def test_an_interrupt_says_how_to_go_on(
    tiny: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def stopped_once(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return measure(*given)

    monkeypatch.setattr(running, "measure", stopped_once)
    stopped = tmp_path / "a run"
    assert main(["run", str(tiny), "--out", str(stopped), "--device", "cpu", "--fresh"]) == 130
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("interrupted: resume with `ell0 run ")
    words = shlex.split(last.partition("`")[2].rstrip("`"))
    assert words == ["ell0", "run", str(tiny), "--out", str(stopped), "--device", "cpu"]
    assert main(words[1:]) == 0
    ours, theirs = (Results.load(folder / "results.json") for folder in (stopped, whole))
    for row in theirs.rows:
        if not row["what"].endswith("_seconds"):
            same = {key: value for key, value in row.items() if key != "seconds"}
            assert any(same.items() <= one.items() for one in ours.rows)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "mnits-f10"], "did you mean 'mnist-f10'?"),
        (["run", "mnist-f10", "--root", "nowhere", "--out", "new"], "ell0 data get mnist --root nowhere"),
        (["run", "--device", "gpu", "--out", "new"], "device must be such as"),
        (["run", "--out", "/dev/null/new"], "out must be a folder that can be written, got '/dev/null/new'"),
        (["attack", "nowhere"], "model must be a checkpoint that exists, or package.module:name, got 'nowhere'"),
        (["attack", "no_such_module:build", "--data", "digits"], "No module named 'no_such_module'"),
        (["attack", "ell0.models:mpl", "--data", "digits"], "did you mean 'mlp'?"),
        (["attack", "ell0.models:VGG19_BLOCKS", "--data", "digits"], "model must name a model or a function"),
        (["attack", "ell0.models:mlp"], "data must be given for this model"),
        (["attack", "ell0.models:mlp", "--data", "digits"], "model must take rows of shape (1, 8, 8)"),
        (["attack", "ell0.models:mlp", "--data", "digitz"], "did you mean 'digits'?"),
        (["attack", "ell0.models:mlp", "--data", "none.npz"], "none.npz does not exist"),
        (["attack", "ell0.models:mlp", "--data", "digits", "--attack", "sparse-rs"], "did you mean 'sparse_rs'?"),
        (["attack", "ell0.models:mlp", "--data", "digits", "--fail-under", "60"], "fail_under must lie in [0, 1]"),
        (["attack", "ell0.models:mlp", "--data", "digits", "--queries", "0"], "queries must be an int >= 1, got 0"),
        (["attack", "torch.nn:Flatten", "--data", "digits", "--budget", "-1"], "budget must be an int >= 0, got -1"),
        (["attack", "torch.nn:Flatten", "--data", "digits", "--beta", "0"], "beta must be a number > 0, got 0"),
        (
            ["attack", "torch.nn:Flatten", "--data", "digits", "--low", "0"],
            "low and high must be given together, such as",
        ),
        (["attack", "torch.nn:Flatten", "--beta", "1", "--low", "0"], "beta must be left out beside low and high"),
        (["data", "get", "mnits"], "did you mean 'mnist'?"),
        (["report", "nowhere"], "runs must be one run folder that exists, or out must be given, got nowhere"),
        (["report"], "runs must be one run folder that exists, or out must be given, got none"),
    ],
)
def test_a_complaint_is_one_sentence(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 1
    assert said in complaint(capsys)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("what", ["f2", "f2/checkpoint.safetensors"])
def test_attack_takes_a_checkpoint(
    what: str, whole: Path, arrays: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "new" / "attacked.json"
    words = ["attack", str(whole / what), "--data", str(arrays), "--budget", "2", "--beta", "10", "--queries", "20"]
    words += ["--steps", "5", "--device", "cpu"]
    assert main([*words, "--out", str(file)]) == 0
    assert "robust accuracy" in capsys.readouterr().out
    results = Results.load(file)
    name = Path(what).name
    assert results.command == f"ell0 attack {name} --budget 2 --beta 10.0 --data mine.npz --queries 20 --steps 5"
    clean = Results.load(whole / "results.json").find(what="clean_accuracy", classifier="F(2)")["value"]
    assert results.find(what="clean_accuracy", classifier="F(2)")["value"] == clean
    robust = results.find(attack="worst case")["value"]
    assert (robust, results.find(attack="worst case")["beta"]) == (pytest.approx(robust), 10.0)
    assert robust < clean
    for share, code in ((robust, 0), (min(robust + 0.01, 1), 3)):
        assert main([*words, "--fail-under", str(share), "--json", "--quiet"]) == code
        shown = capsys.readouterr()
        assert json.loads(shown.out)["rows"]
        assert shown.err == ""


def test_attack_takes_a_model_of_ones_own(
    arrays: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert arrays.name == "mine.npz"
    (tmp_path / "my_networks.py").write_text(
        "import torch\n"
        "class Rows(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return x.mean((1, 3))[:, :3]\n"
        "ready = Rows()\n"
        "def build():\n"
        "    return lambda x: x.mean((1, 3))[:, :3]\n"
        "class Classifier:\n"
        "    def decision_function(self, x):\n"
        "        return x.reshape(len(x), 4, 4).mean(2)[:, :3]\n"
    )
    monkeypatch.chdir(tmp_path)
    figures = []
    for name in ("Rows", "ready", "build", "Classifier"):
        words = f"attack my_networks:{name} --attack sparse_rs --attack pointwise --budget 3 --data mine.npz"
        words += " --rows 9 --queries 10"
        assert main([*words.split(), "--device", "cpu", "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["command"] == f"ell0 {words}"
        figures.append([(row["attack"], row["value"], row["n"]) for row in told["rows"] if "attack" in row])
    x = np.load(arrays)["x"]
    assert told["rows"][0]["box"] == f"[{x.min():g}, {x.max():g}]"  # of all rows, not of those that are attacked
    assert main([*words.split(), "--device", "cpu", "--low", "-2", "--high", "3"]) == 0
    assert "3 features changed, values in [-2, 3]" in capsys.readouterr().out
    assert [attack for attack, _, _ in figures[0]] == ["worst case", "sparse_rs", "pointwise"]
    assert figures[0] == figures[1] == figures[2] == figures[3]
    assert all(n == 9 for _, _, n in figures[0])


def test_checkpoints_that_do_not_fit_are_one_sentence(
    out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = {"name": "mlp", "k": 2, "in_features": 16, "hidden": [9], "classes": 3, "clamp": False}
    network = models.mlp(2, in_features=16, hidden=(8,), classes=3)
    other = save_checkpoint(tmp_path / "other.safetensors", network, {"model": words, "data": "digits"})
    bare = save_checkpoint(tmp_path / "bare.safetensors", network)
    unit = save_checkpoint(tmp_path / "unit.safetensors", network, {"model": words | {"hidden": [8]}, "scale": "unit"})
    spoiled = out / "f0" / "checkpoint.safetensors"
    spoiled.write_bytes(spoiled.read_bytes()[:-9])
    for path, said in (
        (other, "1.bias has the shape (8,) in it and (9,) here"),
        (bare, f"does not name its model: give package.module:name as model, and --weights {bare}"),
        (unit, "model must take images in [-1, 1]"),
        (out / "f0", "checkpoint.safetensors"),
        (out, f"there are {out / 'f0'}, {out / 'f2'}"),
        (tmp_path / "none.safetensors", "none.safetensors"),
    ):
        assert main(["attack", str(path), "--data", "digits", "--device", "cpu"]) == 1
        assert said in complaint(capsys)


def test_report_writes_a_page(out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(out)]) == 0
    assert capsys.readouterr().out == f"{out / 'report.html'}\n"
    page = tmp_path / "new" / "page.html"
    assert main(["report", str(out), str(out / "results.json"), "--out", str(page)]) == 0
    assert page.read_text().lstrip().startswith("<!doctype html>")
    capsys.readouterr()
    assert main(["report", str(out / "results.json")]) == 1
    assert "out must be given" in complaint(capsys)
