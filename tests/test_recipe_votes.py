"""Votes of parts in recipes: trained, attacked, certified, resumed and reported as any other classifier."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from ell0 import L0Ball, certify, data, recipe, report
from ell0.certify import Partition, PartVote, VoteObjective
from ell0.cli import main
from ell0.part_networks import Members, PartCNN, PartMLP
from ell0.recipe import models as models_of_recipes
from ell0.recipe.measuring import Subject
from ell0.results import Results
from ell0.train import load_checkpoint
from small_training import Killed
from tiny_recipe import write_recipe

pytestmark = pytest.mark.usefixtures("one_thread")

VOTES = """
name = "tiny-votes"
summary = "two votes, small"
[data]
file = "tiny.npz"
[training]
epochs = 12
batch = 16
rates = [0.03]
optimizer = "adamw"
weight_decay = 0.05
ema = 0.9
precision = "bf16"
[[classifier]]
name = "grids"
[classifier.model]
name = "votes"
strides = [2, 4]
tau = 0.25
mirrored = true
network = { name = "cnn", widths = [6], blocks = 1, pool = "learned" }
[classifier.training.certified]
budget = 3
mix = 0.5
votes = "tanh"
tau = 2.0
smoothing = 0.2
[[classifier]]
name = "dealt"
[classifier.model]
name = "votes"
parts = 5
members = 2
rule = "plurality"
network = { name = "mlp", width = 8, depth = 1, dropout = 0.0 }
[[measure]]
what = "clean_accuracy"
[[measure]]
what = "certified_accuracy"
budgets = [1, 2, 3, 8]
unit = "pixel"
[[measure]]
what = "certified_accuracy"
method = "run-off"
budgets = [1]
unit = "pixel"
[[measure]]
what = "robust_accuracy"
attack = "sparse_rs"
budgets = [1]
queries = [6]
unit = "pixel"
[[measure]]
what = "worst_case"
budgets = [1]
queries = 20
steps = 2
unit = "pixel"
skip_proven = true
"""


def write_votes(folder: Path, text: str = VOTES) -> Path:
    write_recipe(folder)
    path = folder / "tiny-votes.toml"
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("votes")
    return recipe.run(write_votes(folder), out=folder / "run", device="cpu")


def trained(run: Path, name: str) -> PartVote:
    network = recipe.model(load_checkpoint(run / name))
    assert isinstance(network, PartVote)
    return network.eval()


def figures(run: Path) -> list[object]:
    return [(row.key, row.value) for row in Results.load(run / "results.json").rows if row.get("unit") != "seconds"]


def test_the_keys_of_a_recipe_are_those_of_the_classes(ran: Path) -> None:
    grids, dealt = trained(ran, "grids"), trained(ran, "dealt")
    assert torch.equal(grids.partition.index, Partition.strides((1, 4, 4), (2, 4)).index)
    assert (grids.rule, grids.tau, grids.mirrored, type(grids.network)) == ("duel", 0.25, True, PartCNN)
    assert torch.equal(dealt.partition.index, Partition.dealt((1, 4, 4), 5).index)
    assert (dealt.rule, dealt.tau, dealt.mirrored, type(dealt.network)) == ("plurality", 0.5, False, Members)
    assert isinstance(dealt.network, Members)
    one, other = dealt.network.networks
    assert type(one) is type(other) is PartMLP
    assert not torch.equal(one.get_parameter("first.weight"), other.get_parameter("first.weight"))
    assert (grids.passes, dealt.passes) == (2 * 8, 2 * 5)
    first, second = recipe.load(ran / "recipe.toml").classifiers
    assert first.objective == VoteObjective(3, 0.5, "tanh", 2.0, smoothing=0.2)
    assert second.objective is None  # the parts learn by themselves
    assert (first.training.optimizer, first.training.ema) == ("adamw", 0.9)


def test_clean_certified_and_attacked_figures_are_those_of_the_model(ran: Path) -> None:
    results, (x, y) = Results.load(ran / "results.json"), data.read_npz(ran.parent / "tiny.npz")
    ball = L0Ball(8, "pixel", -math.inf, math.inf)
    for name in ("grids", "dealt"):
        model = trained(ran, name)
        radii = model.radius(x, y, ball)
        certified = results.select(what="certified_accuracy", classifier=name, method=None)
        for row, budget in zip(certified, (1, 2, 3, 8), strict=True):
            assert row.value == float((radii >= budget).double().mean())
            assert row.beside == {"forwards": model.forwards, "rounding": model.rounding}
        median = results.find(what="certified_radius", classifier=name, method=None).value
        assert median == float(radii.double().quantile(0.5))
        clean = results.find(what="clean_accuracy", classifier=name).value
        assert clean == float((model(x).argmax(1) == y).double().mean()) > 0.5
        attacked = results.find(what="robust_accuracy", classifier=name, attack="sparse_rs").value
        assert certified[0].value <= attacked <= clean
        worst = results.find(attack="worst case", classifier=name, skip_proven=True)
        assert 0.2 < worst["certified"] <= worst.value
        assert not any("votes of parts" in flag for flag in worst["flags"])
    assert "grids" in report.page([ran])


def test_a_call_holds_fewer_rows_of_a_vote(ran: Path, tmp_path: Path) -> None:
    """Of 128 parts, both ways round, a call makes 256 pictures of each row."""
    gpu, cpu = Mock(is_cuda=True), Mock(is_cuda=False)
    batches = ((Mock(spec=[]), 16384, 512), (Mock(passes=256), 256, 64), (trained(ran, "grids"), 4096, 512))
    for model, *sizes in batches:
        assert [Subject(model, rows, rows, 0, tmp_path).batch for rows in (gpu, cpu)] == sizes


def test_a_killed_run_ends_with_the_same_figures(ran: Path, tmp_path: Path) -> None:
    path, whole = write_votes(tmp_path), figures(ran)
    for stop in (4, 18):
        steps = iter(range(10**6))

        def progress(_: object, stop: int = stop, steps: object = steps) -> None:
            if next(steps) == stop:  # type: ignore[call-overload]
                raise Killed

        with pytest.raises(Killed):
            recipe.run(path, out=tmp_path / "run", device="cpu", progress=progress)
    assert figures(recipe.run(path, out=tmp_path / "run", device="cpu")) == whole


def test_a_checkpoint_is_certified_on_the_command_line(ran: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x, y = data.read_npz(ran.parent / "tiny.npz")
    np.savez(ran.parent / "mine.npz", x=x, y=y)
    words = ["certify", str(ran / "grids"), "--data", str(ran.parent / "mine.npz"), "--device", "cpu", "--quiet"]
    assert main([*words, "--unit", "pixel", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["rows"]
    run = Results.load(ran / "results.json")
    for budget in (1, 2):
        value = next(row["value"] for row in shown if row.get("budget") == budget)
        assert value == run.find(what="certified_accuracy", classifier="grids", budget=budget, method=None).value


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("strides = [2, 4]\n", "", "grids: votes must have strides or parts, and not both, got strides=() with"),
        ("strides = [2, 4]\n", "strides = [2, 4]\nparts = 4\n", "votes must have strides or parts, and not both"),
        ("strides = [2, 4]", "strides = [2, 5]", "strides must be two ints from 1 to height and width of an image"),
        ("tau = 0.25", "tau = 0.0", "grids: tau must be a number from 1e-6 to 20,000, got 0.0"),
        ("mirrored = true", "mirrored = 1", "mirrored must be true or false, got 1"),
        ("parts = 5\n", "parts = 5\nmirrored = true\n", "dealt: mirrored must be False for a partition of which"),
        ("parts = 5\n", "parts = 17\n", "dealt: parts must be at most the number of pixels, got parts=17"),
        ('rule = "plurality"', 'rule = "plurallity"', "did you mean 'plurality'"),
        ('name = "cnn"', 'name = "cnnn"', "network: name must be one of 'mlp', 'cnn', 'transformer', got 'cnnn'"),
        ("widths = [6]", "width = 6", "model, network: unknown key 'width'; did you mean 'widths'?"),
        ("widths = [6]", "widths = [6], clamp = true", "model, network: unknown key 'clamp'"),
        ("budget = 3\n", "budget = 4\n", "grids: budget must be below half of the parts, got budget=4 with 8 parts"),
        ("mix = 0.5", "mix = 1.5", "certified: mix must lie in [0, 1], got 1.5"),
        (
            "budgets = [1, 2, 3, 8]",
            "budgets = [1]\nrows = 5",
            "skip_proven needs a certified_accuracy of the same",
        ),
        ("mix = 0.5", "quick = true", "certified: unknown key 'quick'"),
        ("budgets = [1, 2, 3, 8]", "budgets = [1]\nbeta = [1.0]", "beta must be left out for grids, whose votes"),
        ("[classifier.training.certified]\nbudget = 3\nmix", "[classifier.training.trades]\nbudget = 3\n#", "trades"),
    ],
)
def test_wrong_words_are_refused_before_anything_is_trained(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert VOTES.count(old) == 1
    with pytest.raises(ValueError, match=re.escape(message)):
        recipe.run(write_votes(tmp_path, VOTES.replace(old, new)), out=tmp_path / "run", device="cpu")
    assert not list((tmp_path / "run").glob("*/checkpoint.safetensors"))


def test_the_sandwich_attacks_what_is_proven_at_every_budget() -> None:
    votes, sandwich = recipe.load("cifar-votes"), recipe.load("cifar-votes-sandwich")
    assert [one.model for one in sandwich.everyone()] == [one.model for one in votes.everyone()]
    certified = [t for t in votes.tasks if t.what == "certified_accuracy" and t.classifier.training.seed == 0]
    proven = {(t.classifier.name, t.budgets, t.unit) for t in certified}
    for what in ("certified_accuracy", "worst_case"):
        tasks = [task for task in sandwich.tasks if task.what == what]
        assert {(task.classifier.name, task.budgets, task.unit) for task in tasks} == proven
        assert {(task.rows, task.skip_proven) for task in tasks} == {(1000, what == "worst_case")}


SHIPPED = {
    "cifar-votes": ((3, 32, 32), "pixel"), "mnist-votes": ((1, 28, 28), "feature"),
    "fashion-votes": ((1, 28, 28), "feature"),
}  # fmt: skip


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_recipes_are_trained_on_their_certificate(name: str) -> None:
    """Their networks are built, and their budgets can be borne; clean accuracy stands beside what is certified."""
    (shape, unit), votes = SHIPPED[name], recipe.load(name)
    certified = [task for task in votes.tasks if task.what == "certified_accuracy"]
    assert {task.budgets for task in certified} == {(1, 2, 4, 6, 8, 10, 13, 16, 20, 24)}
    assert {(task.row["unit"], task.rows) for task in certified} == {(unit, None)}
    clean = [task.classifier for task in votes.tasks if task.what == "clean_accuracy"]
    assert clean == [task.classifier for task in certified] == votes.everyone()
    for one in votes.everyone():
        network = models_of_recipes.build(models_of_recipes.fitted(one.model, shape, 10))
        assert isinstance(network, certify.PartVote)
        assert isinstance(one.objective, VoteObjective)
        assert 2 * one.objective.budget < network.parts
        assert (one.training.precision == "bf16") == (name == "cifar-votes")  # a CPU is as fast without
