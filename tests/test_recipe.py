"""Recipes: what they may say, and what of it is refused before any work."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ell0 import L0Ball, data, recipe
from ell0.nn import InputClamp, InputScale, TruncatedLinear
from ell0.recipe import models
from ell0.results import Measurement, Row
from ell0.train import PAPER_CIFAR10, PAPER_MNIST, Checkpoint
from tiny_recipe import edited

pytestmark = pytest.mark.usefixtures("one_thread")


def measurement(row: Row) -> Measurement:
    return Measurement(row["what"], 0.0, identity={key: value for key, value in row.items() if key != "what"})


def test_shipped_recipes() -> None:
    assert {"digits", "mnist-quick", "mnist-f0", "mnist-f10", "mnist-table1", "mnist-table2"} < set(recipe.names())
    for name in recipe.names():
        assert recipe.load(name).name == name
    for k in (0, 10):
        paper = recipe.load(f"mnist-f{k}")
        (one,) = paper.classifiers
        assert (one.name, one.k, one.training, one.budget) == (f"F({k})", k, PAPER_MNIST, 10)
        assert one.attack is not None
        assert repr(one.attack.ball(10)) == repr(L0Ball(10, low=-100.0, high=100.0))
        assert one.attack.settings == {"queries": 300, "values": "corners"}
    table = recipe.load("mnist-table1")
    rows = [table.with_paper(measurement(row)) for task in table.tasks for row in task.identities()]
    asked = {"classifier": "F(10)", "attack": "sparse_rs", "budget": 8, "queries": 5000}
    best, of_right, of_part = [row for row in rows if asked.items() <= row.items()]
    assert (best["paper"], best["paper_n"], best["protocol"]) == (0.5879, 512, "paper")
    assert of_right.identity == {**best.identity, "over": "right"}
    # Beside the worst case stands Sparse-RS on the same rows.
    assert of_part.identity == {**best.identity, "part": 1000}
    assert {task.part or task.rows for task in table.tasks if "attack" in task.row} == {1000}
    assert sum("paper" in row for row in rows) == 2 + 3 * 18


def test_figure_1a_attacks_each_classifier_with_its_own_k() -> None:
    figure = recipe.load("mnist-fig1a")
    assert [one.name for one in figure.everyone()] == [f"F({k})" for k in range(16)]
    # TF32 as on the paper's RTX-3080, whose torch had it on by default.
    as_printed = replace(PAPER_MNIST, precision="tf32")
    assert all((one.attack, one.training) == (None, as_printed) for one in figure.everyone())
    pairs = [(task.row["k"], task.row["budget"]) for task in figure.tasks if "budget" in task.row]
    assert sorted(pairs) == sorted([(0, m) for m in range(1, 16)] + [(k, k) for k in range(1, 16)])


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("epochs = 3", "epoch = 3", "classifier 1, training: unknown key 'epoch'; did you mean 'epochs'?"),
        ("epochs = 3", 'epochs = "3"', "tiny.toml, classifier 1, training: epochs must be an int >= 1, got '3'"),
        ("[data]", "[date]", "tiny.toml: data is missing; rename 'date'?"),
        ("k = 0", "k = -1", "classifier 1, model: k must be a list of different values, each an int >= 0, got -1"),
        ("k = 0", "k = [0, 1]", "name must have {k} if k has several values, got 'F(0)'"),
        ("epochs = 3", "epochs = 3\nseed = [0, 1]", "name must have {seed} if seed has several values, got"),
        ("k = 0\nhidden = [8]", "k = 0\nhidden = [0]", "hidden must be a list of values, each an int >= 1, got [0]"),
        ("k = 0\n", "k = 0\nclamp = [0, inf]\n", "model: clamp must be true, false or two numbers [low, high], low "),
        ("k = 0\n", "k = 0\nclamp = [0, 1]\nnormalise = true\n", "normalise must be false if clamp is two numbers, wh"),
        ("k = 0\n", "k = 0\nnormalise = [0.1]\n", "model: normalise must be true or false, got [0.1]"),
        ("k = 0\n", "k = 0\nclasses = 3\n", "unknown key 'classes'"),
        ("budgets = [1, 2]\nqueries", "budget = [1, 2]\nqueries", "budgets is missing; rename 'budget'?"),
        ("queries = [4, 8]", "queries = [4, 8]\nvalues = 'sum'", "measure 2: values must be"),
        ("queries = [4, 8]", "steps = [4, 8]", "measure 2: unknown key 'steps'"),
        ("beta = 10.0\n[[measure]]", "beta = 0\n[[measure]]", "attack: beta must be a number > 0, got 0"),
        ('what = "clean_accuracy"', 'what = "clean"', "did you mean 'clean_accuracy'?"),
        ('what = "clean_accuracy"', 'what = "clean_accuracy"\nclassifiers = ["F(3)"]', "classifiers must be a list"),
        ('name = "F(2)"', 'name = "f0"', "classifiers must have different names, got 'F(0)' and 'f0'"),
        ('name = "F(2)"', 'name = "()"', "a classifier's name must have a letter or a digit, got '()'"),
        ("beta = 10.0\n[[measure]]", "beta = 10.0\nbox = 'normalised'\n[[measure]]", "attack: box must be left out fo"),
        ("repeats = 2", "repeats = 2\ncount = ['fell']", "measure 4: count must be a list of different values, each o"),
        ("repeats = 2", "repeats = 2\nrule = 'foolboxes'", "measure 4: rule must be one of 'blocks', 'foolbox', 'fool"),
        ("beta = [10.0]\nprotocol", "beta = [10.0]\npart = 2\nprotocol", "part must be less than rows, which must be"),
        ("repeats = 2", "repeats = 2\nover = 'right'", "measure 4: unknown key 'over'"),
        ("validation = true", 'name = "mnist"', "tiny.toml, data: must have name or file, and not both"),
        ("queries = 8\nvalue", "queries = 9\nvalue", "paper 1: must belong to something that is measured"),
        ("value = 0.5", "value = 'half'", "paper 1: value must be a number, got 'half'"),
        ('name = "tiny"', 'name = "../tiny"', "name must be lower-case letters, digits and hyphens, got '../tiny'"),
        ('what = "median_distance"', 'what = "clean_accuracy"\n[[measure]]\nwhat = "median_distance"', "twice"),
        ('name = "tiny"', "name = tiny", "tiny.toml must be TOML"),
        ('summary = "a', 'use = ["tiny"]\nsummary = "a', "use must name other recipes, got 'tiny'"),
    ],
)
def test_a_wrong_word_in_a_recipe_is_named_with_its_place(tiny: Path, old: str, new: str, said: str) -> None:
    edited(tiny, old, new)
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        recipe.load(tiny)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_an_unknown_recipe_is_named() -> None:
    for name, said in (("mnist-tabel1", "; did you mean 'mnist-table1'?"), ("zzz", "; `ell0 run --list` shows them")):
        with pytest.raises(FileNotFoundError, match=re.escape(f"or a recipe of ell0, got {name!r}{said}")):
            recipe.load(name)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("rows = 20", "rows = 25", "rows must be at most the 24 of the test split, got 25"),
        ("rows = 20", "rows = 20\nfirst = 5", "must be at most the 24 of the test split less first=5, got 20"),
        ("rows = 20", "first = 24", "first must be < 24, the rows of the test split, got 24"),
        ("validation = true", "validation = true\ntrain_rows = 55", "train_rows must be at most the 54 rows"),
        ("k = 2", "k = 8", "k must satisfy 0 <= 2*k < in_features"),
        ('file = "tiny.npz"', 'file = "none.npz"', "none.npz does not exist"),
        ('file = "tiny.npz"', 'name = "mnist"', "ell0 data get mnist"),
        ('file = "tiny.npz"', 'file = "tiny.toml"', "tiny.toml must be a .npz file that NumPy wrote"),
    ],
)
def test_what_does_not_fit_the_data_is_said_before_any_work(
    tiny: Path, tmp_path: Path, old: str, new: str, said: str
) -> None:
    edited(tiny, old, new)
    with pytest.raises((ValueError, FileNotFoundError)) as raised:
        recipe.run(tiny, out=tmp_path / "run", root=tmp_path / "empty", device="cpu")
    assert said in str(raised.value)
    assert not (tmp_path / "run").exists()


def test_worst_cases_come_last_the_hardest_at_the_end(tiny: Path) -> None:
    worst = '[[measure]]\nwhat = "worst_case"\nbudgets = [1]\nqueries = {}\n'
    edited(tiny, '[[measure]]\nwhat = "clean_accuracy"', worst.format(99) + '[[measure]]\nwhat = "clean_accuracy"')
    asked = [task.what == "worst_case" and task.row["queries"] for task in recipe.load(tiny).tasks]
    assert asked == [False] * 12 + [8, 8, 99, 99]
    assert recipe.load(tiny).tasks[12].betas == (1.0, 10.0)  # a point of one box lies in the next


def test_a_classifier_has_several_seeds(tiny: Path) -> None:
    edited(tiny, 'name = "F(0)"', 'name = "F({k}), seed {seed}"')
    edited(tiny, "k = 0\n", "k = [0, 1]\n")
    edited(tiny, "epochs = 3\n", "epochs = 3\nseed = [0, 5]\n")
    edited(tiny, "rows = 20\n", 'rows = 20\nclassifiers = ["F({k}), seed {seed}"]\n')
    loaded = recipe.load(tiny)
    *several, last = loaded.classifiers
    assert [(one.name, one.k, one.training.seed) for one in several] == [
        (f"F({k}), seed {seed}", k, seed) for k in (0, 1) for seed in (0, 5)
    ]
    assert last.training.seed == loaded.seed
    assert [task.classifier for task in loaded.tasks if task.what == "worst_case"] == several
    assert len({replace(one.training, seed=0) for one in several}) == 1


def test_normalise_takes_mean_and_deviation_from_the_data_set(tiny: Path) -> None:
    edited(tiny, "k = 0\n", "k = 0\nnormalise = true\nclamp = true\n")
    words = recipe.load(tiny).classifiers[0].model
    with pytest.raises(
        ValueError, match="normalise must be false for the rows of an npz file, whose mean is not known"
    ):
        models.fitted(words, (3, 4, 4), 3)
    full = models.fitted(words, (3, 4, 4), 3, data.SETS["cifar10"])
    network = models.build(json.loads(json.dumps(full)), seed=0)
    clamp, scale, *rest = network.children()
    assert (type(clamp), type(scale)) == (InputClamp, InputScale)
    x = torch.rand(9, 3, 4, 4) * 4 - 2
    means, deviations = (
        torch.tensor(t).view(3, 1, 1) for t in (data.SETS["cifar10"].mean, data.SETS["cifar10"].deviation)
    )
    normal = ((x.clamp(-1, 1) + 1) / 2 - means) / deviations
    torch.testing.assert_close(network(x), torch.nn.Sequential(*rest)(normal))


def test_a_card_rebuilds_its_model(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edited(tiny, "k = 0\n", "k = 0\nclamp = [-1.0, -0.8]\n")
    words = {**recipe.load(tiny).classifiers[0].model, "in_features": 16, "classes": 3}
    network, state = models.build(words, seed=1), torch.get_rng_state()
    again = recipe.model(Checkpoint(network.state_dict(), json.loads(json.dumps({"model": words}))))
    assert torch.equal(torch.get_rng_state(), state)
    x = torch.rand(9, 1, 4, 4, generator=torch.Generator().manual_seed(0)) * 2 - 1
    assert torch.equal(again(x), network(x))
    # It is the plain network on what the ends become.
    plain = models.build({**words, "clamp": False}, seed=1)
    torch.testing.assert_close(network(x), plain((x.clamp(-1, -0.8) + 1) / 0.2))
    clamped = models.build({**words, "k": 2, "clamp": True})
    assert [type(layer) for layer in clamped.children()][:3] == [InputClamp, torch.nn.Flatten, TruncatedLinear]
    wide, deep = {**words, "hidden": [60000, 60000]}, {"name": "cnn", "in_shape": [1, 4, 4], "depth": 10**9}
    for wrong in (
        None, "mlp", {"name": "resnet"}, {**words, "k": 99}, {**words, "depth": 1}, {**words, "clamp": [1]}, deep,
        {**words, "hidden": [2**62, 2**62]}, {"name": "abs", "samples": 10**5, "latents": 10**5},
        {"name": "abs", "samples": "many", "latents": 10**10},
        {"name": "partition", "base": words, "shape": [1, 10**4, 10**4], "parts": 2},
        {"name": "votes", "network": {"name": "mlp"}, "shape": [1, 10**4, 10**4], "classes": 3, "strides": [2, 2]},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="card must name a model that a recipe can build"):
            recipe.model(Checkpoint(network.state_dict(), {"model": wrong}))
    with monkeypatch.context() as patched:
        patched.setattr(torch, "manual_seed", lambda _: pytest.fail("memory was taken"))
        with pytest.raises(ValueError, match="the checkpoint must be of this architecture"):
            recipe.model(Checkpoint(network.state_dict(), {"model": wide}))


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"x": np.zeros((2, 3), np.float32)}, "must have the arrays x_test and y_test, or x and y, got x"),
        ({"x": np.zeros((2, 3), np.uint8), "y": np.zeros(2, int)}, "x must be finite floating-point numbers"),
        ({"x": np.full((2, 3), np.nan), "y": np.zeros(2, int)}, "x must be finite floating-point numbers"),
        ({"x": np.zeros((2, 3)), "y": np.zeros(3, int)}, "y must be 2 ints >= 0, got int64 of shape (3,)"),
        ({"x": np.zeros((2, 3)), "y": np.full(2, -1)}, "y must be 2 ints >= 0"),
        ({"x": np.array([[None]], object), "y": np.zeros(1, int)}, "without pickled objects"),
    ],
)
def test_arrays_that_are_no_data_are_named(tmp_path: Path, arrays: dict[str, Any], said: str) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        data.read_npz(tmp_path / "a.npz")
    assert said in str(raised.value)
    assert "a.npz" in str(raised.value)


def test_cifar_recipes_are_those_of_the_paper() -> None:
    """As the supplement trains; precision and the batch of the attack are ours."""
    ours = replace(PAPER_CIFAR10, precision="tf32", attack_precision="bf16", attack_batch=25_000)
    for name, k, seed in (("vgg0", 0, 0), ("vgg10", 10, 0), ("vgg10-again", 10, 1)):
        (one,) = recipe.load(f"cifar-{name}").classifiers
        its = replace(ours, seed=seed, precision="bf16" if k else "tf32")
        assert (one.name, one.k, one.budget, one.training) == (f"VGG({k})", k, 10, its)
        assert (one.model["name"], one.model["normalise"]) == ("vgg19", True)
        assert one.attack is not None
        assert (one.attack.name, one.attack.settings) == ("sparse_rs", {"queries": 300, "values": "black-white"})
        low, high = data.SETS["cifar10"].box(100.0)
        assert repr(one.attack.ball(10)) == repr(L0Ball(10, "pixel", low, high))
        assert one.training_identity.items() >= {"precision": its.precision, "attack_precision": "bf16"}.items()
    (base,) = recipe.load("cifar-base").classifiers
    assert (base.attack, base.training) == (None, replace(ours, attack_precision=None, attack_batch=None))


def test_cifar_tables_count_pixels_in_the_box_of_the_supplement() -> None:
    rows, rho = (
        [its.with_paper(measurement(row)) for task in its.tasks for row in task.identities()]
        for its in map(recipe.load, ("cifar-table1", "cifar-table2"))
    )
    # Whose numbers they are: tests/test_paper.py. Neither the worst case nor another colour rule has one.
    assert {row.get("values") for row in rows if row.paper and "budget" in row} == {"black-white"}
    assert {(row["unit"], row["box"]) for row in rows if "budget" in row} == {("pixel", "normalised")}
    counts = {(row["beta"], row["first"], row["count"], row["unit"]) for row in rho}
    kinds = (("changed", "feature"), ("positions", "pixel"), ("fallen", "pixel"))
    assert counts == {(*where, *kind) for where in ((1.0, 64), (100.0, 1088)) for kind in kinds}
    assert {row["classifier"] for row in rho if row.paper} == {"VGG(0)", "VGG(10)", "VGG base"}


def test_the_parts_of_a_table_measure_one_classifier_as_the_whole_does() -> None:
    networks = ("vgg0", "vgg10")
    for table, parts in (
        ("cifar-table1", networks), ("cifar-worst", networks), ("cifar-table2", (*networks, "base"))
    ):  # fmt: skip
        whole = recipe.load(table)
        split = [recipe.load(f"{table}-{part}") for part in parts]
        assert [part.used for part in split] == [(used,) for used in whole.used]
        assert sorted(map(str, chain(*(part.tasks for part in split)))) == sorted(map(str, whole.tasks))
        assert all({figure["classifier"] for figure in part.paper} <= {part.tasks[0].classifier.name} for part in split)
        assert sum(len(part.paper) for part in split) == len(whole.paper)
    for again in map(recipe.load, ("cifar-table1-again", "cifar-worst-again")):
        assert [(one.name, one.training.seed) for one in again.everyone()] == [("VGG(10)", 1)]


def test_a_recipe_like_another_changes_what_it_says(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'name = "mine"\nsummary = "mine"\nlike = "cifar-vgg10"\nseed = 3\n'
        '[data]\nname = "cifar10"\nvalidation = true\n[training]\nepochs = 12\nrates = [0.1]\n'
    )
    mine, other = recipe.load(path), recipe.load("cifar-vgg10")
    (one,), (its,) = mine.classifiers, other.classifiers
    # A later [training] stands in place of an earlier one; its keys stand over those of each classifier.
    assert one.training == replace(its.training, epochs=12, rates=(0.1,), refresh=25, seed=3)
    assert (one.model, one.budget, len(mine.tasks)) == (its.model, its.budget, len(other.tasks))
    # What it is like belongs to the text of its run.
    (tmp_path / "again.toml").write_bytes(mine.text)
    assert recipe.load(tmp_path / "again.toml") == mine
    edited(path, "epochs = 12", "epoch = 12")
    with pytest.raises(ValueError, match="classifier 1, training: unknown key 'epoch'"):
        recipe.load(path)
    path.write_text('name = "mine"\nsummary = "none of its own"\nlike = "cifar-table1"\n[training]\nepochs = 5\n')
    with pytest.raises(ValueError, match=r"mine\.toml: unknown key 'training'"):
        recipe.load(path)
    edited(path, "cifar-table1", "cifar-vgg11")
    with pytest.raises(ValueError, match="like must name a recipe of ell0, got 'cifar-vgg11'; did you"):
        recipe.load(path)


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((3, 28, 28), "in_shape must have height and width of at least 32, for five poolings, got (3, 28, 28)"),
        ((3072,), "in_shape must be (channels, height, width), got (3072,)"),
    ],
)
def test_images_that_do_not_fit_the_model_are_one_sentence(tiny: Path, shape: tuple[int, ...], said: str) -> None:
    x, y = np.zeros((20, *shape), np.float32), np.arange(20) % 2
    np.savez(tiny.with_name("tiny.npz"), x_train=x, y_train=y, x_test=x, y_test=y)
    edited(tiny, 'name = "mlp"\nk = 2\nhidden = [8]', 'name = "vgg19"\nk = 2')
    with pytest.raises(ValueError, match=re.escape(f"F(2): {said}")):
        recipe.run(tiny, out=tiny.with_name("run"), device="cpu")
