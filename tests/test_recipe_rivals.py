"""The rivals in recipes: their words, what is measured of them, and what is refused."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ell0 import L0Ball, certify, data, evaluate, models, recipe, report
from ell0.attacks import sparse_rs
from ell0.cli import main
from ell0.files import read_tensors
from ell0.parallel import ALONE, Team
from ell0.recipe import models as models_of_recipes
from ell0.recipe.measuring import Subject, measure
from ell0.recipe.plan import Classifier, Task
from ell0.results import Results, Row
from ell0.train import TrainConfig, load_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")

RIVALS = """
name = "rivals"
summary = "the rivals, small"
seed = 3
[data]
file = "colours.npz"
[training]
epochs = 10
batch = 16
rates = [0.01]
optimizer = "adam"
[[classifier]]
name = "parts"
[classifier.model]
name = "partition"
parts = 5
base = { name = "mlp", k = 0, hidden = [8] }
[[classifier]]
name = "copies"
training = { augment = "shift" }
[classifier.model]
name = "ablation"
keep = 4
selection = 10
samples = 60
confidence = 0.9
precision = "bf16"
base = { name = "cnn", widths = [6, 8], hidden = [9] }
[[classifier]]
name = "bound"
model = { name = "mlp", k = 8, hidden = [8] }
training = { certified = { budget = 2, unit = "pixel" } }
[[measure]]
what = "clean_accuracy"
[[measure]]
what = "certified_accuracy"
budgets = [1, 2]
unit = "pixel"
[[measure]]
what = "robust_accuracy"
attack = "sparse_rs"
budgets = [2]
queries = [6]
unit = "pixel"
"""


def write_rivals(folder: Path, text: str = RIVALS) -> Path:
    """The recipe, and two classes of 4 x 4 images in colour, one brighter than the other."""
    y = np.arange(64) % 2
    noise = np.random.default_rng(0).normal(0, 0.4, (64, 3, 4, 4))
    x = (noise + (y - 0.5).reshape(-1, 1, 1, 1)).clip(-1, 1).astype(np.float32)
    np.savez(folder / "colours.npz", x_train=x, y_train=y, x_test=x[:24], y_test=y[:24])
    path = folder / "rivals.toml"
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rivals")
    return recipe.run(write_rivals(folder), out=folder / "run", device="cpu")


def trained(run: Path, name: str) -> Any:
    network = recipe.model(load_checkpoint(run / name))
    return network.eval()


def test_the_rows_are_those_of_the_models_own_radii(ran: Path) -> None:
    results = Results.load(ran / "results.json")
    x, y = data.read_npz(ran.parent / "colours.npz")
    parts, copies = trained(ran, "parts"), trained(ran, "copies")
    assert (parts.parts, parts.partition.shape) == (5, (3, 4, 4))
    settings = (copies.keep, copies.selection, copies.samples, copies.confidence, copies.precision)
    assert settings == (4, 10, 60, 0.9, "bf16")
    generator = torch.Generator().manual_seed(3)
    ball = L0Ball(16, "pixel", -math.inf, math.inf)
    radii = {"parts": parts.radius(x, y, ball), "copies": copies.radius(x, y, ball, generator=generator)}
    more: dict[str, Row] = {
        "parts": {"forwards": 5, "rounding": parts.rounding},
        "copies": {"forwards": 70, "confidence": 0.9},
    }
    for name, network in (("parts", parts), ("copies", copies)):
        assert int(radii[name].max()) > 0
        for budget in (1, 2):
            row = results.find(what="certified_accuracy", classifier=name, budget=budget)
            assert (row["value"], row["n"]) == (float((radii[name] >= budget).double().mean()), 24)
            assert (row["unit"], row.beside) == ("pixel", more[name])
            assert not row.keys() & {"k", "method", "beta"}
        median = results.find(what="certified_radius", classifier=name)
        assert median["value"] == float(radii[name].double().quantile(0.5))
        assert median.beside == more[name]
        assert median["seconds"] >= 0
        clean = results.find(what="clean_accuracy", classifier=name)["value"]
        assert clean == float((network(x).argmax(1) == y).double().mean())
    radii["bound"] = certify.radius(trained(ran, "bound"), x, y, replace(ball, budget=2))
    row = results.find(what="certified_accuracy", classifier="bound", method="best", budget=2)
    assert row["value"] == float((radii["bound"] >= 2).double().mean()) > 0
    there = [row.key for row in results.rows]
    assert all(row in there for row in recipe.load(ran / "recipe.toml").asked())


def test_votes_are_attacked_and_the_passes_counted(ran: Path) -> None:
    results, x, y = Results.load(ran / "results.json"), *data.read_npz(ran.parent / "colours.npz")
    for name, passes in (("copies", 10), ("parts", 5), ("bound", 1)):
        row = results.find(what="robust_accuracy", classifier=name)
        attack = {"sparse_rs": partial(sparse_rs, queries=6)}
        found = evaluate(trained(ran, name), x, y, L0Ball(2, "pixel", -1.0, 1.0), attack, seed=3)
        assert row.value == float(found.robust_accuracy)
        assert row.beside == {"queries": int(found.queries.sum()), "passes": passes}


def test_the_draws_of_a_row_are_those_of_the_seed_whatever_the_ranks(tmp_path: Path) -> None:
    class Two(Team):
        def by_row(self, work: Callable[..., Tensor], *rows: Tensor) -> Tensor:
            both = [work(*(part[rank::2] for part in rows)) for rank in (0, 1)]
            return torch.stack(both, 1).flatten()

    torch.manual_seed(0)
    copies = certify.RandomisedAblation(models.mlp(0, in_features=32, hidden=(8,)), 6, selection=20, samples=40).eval()
    x = torch.rand(60, 1, 4, 4)
    y = copies(x).argmax(1)
    one = Classifier("copies", {"name": "ablation"}, TrainConfig(epochs=1))
    task = Task(one, "certified_accuracy", {"what": "certified_accuracy", "unit": "pixel"}, (0, 1))
    shares = [
        [row["value"] for row in measure(task, Subject(copies, x, y, 3, tmp_path, team))[0]] for team in (ALONE, Two())
    ]
    assert shares[0] == shares[1]
    for seed, same in ((3, True), (4, False)):
        radii = copies.radius(x, y, generator=torch.Generator().manual_seed(seed))
        assert ([float((radii >= m).double().mean()) for m in (0, 1)] == shares[0][:-1]) == same


def test_what_holds_with_some_confidence_is_no_proof(ran: Path) -> None:
    """An attack, or the answer to the clean row, may contradict it: neither stops a run, nor is it told as proven."""
    kinds = {}
    for number, task in enumerate(recipe.load(ran / "recipe.toml").tasks):
        words = read_tensors(ran / "verdicts" / f"{number}.safetensors", "")[1]
        kinds[task.classifier.name, task.what] = json.loads(words["names"])
    assert kinds["parts", "certified_accuracy"] == ["certificate"]
    assert kinds["copies", "certified_accuracy"] == []


def test_the_page_says_what_a_vote_is(ran: Path) -> None:
    text = " ".join(re.sub(r"<[^>]+>", " ", report.page([ran])).replace("\N{NO-BREAK SPACE}", " ").split())
    assert "Votes certify parts with 5 forward passes a row, copies with 70 forward passes a row; where" in text
    assert re.search(r"copies \d any value, with 90.0.% confidence", text)
    assert re.search(r"parts \d any value \d", text)
    assert text.count("trained on its bound") == 1  # FPA is not


def test_votes_are_certified_on_the_command_line(ran: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x, y = data.read_npz(ran.parent / "colours.npz")
    np.savez(ran.parent / "mine.npz", x=x, y=y)
    words = ["certify", str(ran / "parts"), "--data", str(ran.parent / "mine.npz"), "--device", "cpu", "--quiet"]
    assert main([*words, "--unit", "pixel", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["rows"]
    run = Results.load(ran / "results.json")
    for budget in (1, 2):
        row = next(row for row in shown if row.get("budget") == budget)
        assert row["value"] == run.find(what="certified_accuracy", classifier="parts", budget=budget)["value"]
        assert row["forwards"] == 5
        assert row["rounding"] > 0
    assert main([*words, "--unit", "pixel", "--challenge", "--queries", "20", "--steps", "5", "--json"]) == 0
    broken = next(row for row in json.loads(capsys.readouterr().out)["rows"] if row["what"] == "certificates_broken")
    assert broken["value"] == 0 < broken["n"]
    words[1] = str(ran / "copies")
    assert main([*words, "--unit", "pixel", "--challenge"]) == 1
    assert "certificates hold with a probability alone" in capsys.readouterr().err


BASE = 'base = { name = "cnn", widths = [6, 8], hidden = [9] }\n'
CERTIFIED = 'what = "certified_accuracy"\n'


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("parts = 5\n", "", "model: parts is missing"),
        ("parts = 5\n", "parts = 17\n", "parts must be at most the number of pixels, got parts=17 with 16 pixels"),
        ("parts = 5\n", "parts = 5\nclamp = true\n", "unknown key 'clamp'"),
        ("keep = 4\n", "keep = 17\n", "budget 1, 2: keep must be at most the number of pixels"),
        ('precision = "bf16"', 'precision = "fp16"', "precision must be one of 'fp32', 'bf16', got 'fp16'"),
        (BASE, "", "model: base is missing"),
        ('name = "cnn"', 'name = "partition"', "base: name must be one of"),
        ('unit = "pixel" } }', 'unit = "pixel", quick = true } }', "bound: quick must be False unless the first"),
        ("budgets = [1, 2]", "budgets = [3]", "bounds at most 2 changed pixels"),
        ('name = "cnn", widths = [6, 8]', 'name = "mlp", k = [0, 1]', "base: k must have one value, got [0, 1]"),
        (CERTIFIED, f"{CERTIFIED}beta = 1.0\n", "beta must be left out for parts, whose votes are for any value"),
        ('unit = "pixel"\n', "", 'budget 1, 2: unit must be "pixel", of which a copy sees all channels, got "feature"'),
        ("budgets = [1, 2]", 'budgets = "k"', "measure 2: budgets must be a list for parts, which has no k, got 'k'"),
        ("epochs = 10\n", "epochs = 10\ntrades = { budget = 2 }\n", "must have neither certified nor trades for votes"),
        (CERTIFIED, 'what = "worst_case"\n', "classifiers must be without copies, whose votes have no gradient"),
        (CERTIFIED, 'what = "robust_accuracy"\nattack = "sparse_pgd"\n', "copies, whose votes have no gradient"),
    ],
)  # fmt: skip
def test_wrong_words_are_refused_before_anything_is_trained(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in RIVALS
    path = write_rivals(tmp_path, RIVALS.replace(old, new))
    with pytest.raises(ValueError, match=re.escape(message)):
        recipe.run(path, out=tmp_path / "run", device="cpu")
    assert not list((tmp_path / "run").glob("*/checkpoint.safetensors"))


@pytest.mark.parametrize(
    ("name", "shape", "unit"), [("mnist-rivals", (1, 28, 28), "feature"), ("cifar-rivals", (3, 32, 32), "pixel")]
)
def test_shipped_rivals(name: str, shape: tuple[int, ...], unit: str) -> None:
    """1,000 + 10,000 copies, the rules of one training, and steps that a CUDA graph can hold: none asks for a value."""
    rivals = recipe.load(name)
    certified = [task for task in rivals.tasks if task.what == "certified_accuracy"]
    assert {*certified[0].budgets} >= {1, 2, 4, 8, 10, 16, 20}
    assert {task.row["unit"] for task in certified} == {unit}
    rules = {task.row.get("method") for task in certified if task.classifier.name.startswith("partition")}
    assert rules == ({None} if name == "mnist-rivals" else {None, "plurality"})
    quoted = {row["classifier"].split(",")[0] for row in rivals.quoted}
    assert quoted == {"randomised ablation", "feature partition (FPA)"}
    for one in rivals.classifiers:
        network: Any = models_of_recipes.build(models_of_recipes.fitted(one.model, shape, 10)).train()
        assert network.forwards == (11_000 if isinstance(network, certify.RandomisedAblation) else network.parts)
        assert network(torch.empty(4, *shape, device="meta")).shape[0] == 4
