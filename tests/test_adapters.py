"""Adapters: our attacks find the same through another library, and its claims are checked as ours are.

On stand-ins; with ELL0_PEERS=1, by `make test-peers`, on the libraries themselves.
"""

from __future__ import annotations

import inspect
import os
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ell0 import ATTACKS, L0Ball, evaluate, truncate
from ell0.adapters import autoattack, judging
from ell0.evaluation import Entry, Evaluation
from peer_stand_ins import RECORD, standing_in
from test_snippets import ROOT, blocks

REAL = bool(os.environ.get("ELL0_PEERS"))
BUDGET = 8
NAMES = {"sparse_rs": {"queries": 40}, "sparse_pgd": {"steps": 6}, "adaptive": {"queries": 30}}
LIBRARIES = ("foolbox", "torchattacks", "art", "secml")


@pytest.fixture(autouse=True)
def libraries() -> Iterator[None]:
    if REAL:
        yield
    else:
        with standing_in():
            yield


def adapter(name: str) -> ModuleType:
    return import_module(f"ell0.adapters.{name}")


class Lines(nn.Module):
    """Three classes, each the sum of two lines of an image less half of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(36, 3, bias=False)
        with torch.no_grad():
            self.dense.weight.copy_((1.5 * torch.eye(3) - 0.5).repeat_interleave(12, 1))

    def forward(self, x: Tensor) -> Any:
        return self.dense(x.flatten(1))


@pytest.fixture
def rows() -> tuple[nn.Module, Tensor, Tensor]:
    draw, y = torch.Generator().manual_seed(0), torch.arange(12) % 3
    x = 0.6 * torch.rand(12, 1, 6, 6, generator=draw)
    for i, label in enumerate(y.tolist()):
        x[i, 0, 2 * label : 2 * label + 2] += 0.4
    return Lines().eval(), x, y


def box(budget: int = BUDGET) -> L0Ball:
    return L0Ball(budget, low=0.0, high=1.0)


def directly(name: str, model: Any, x: Tensor, y: Tensor, ball: L0Ball, **more: Any) -> Tensor:
    key = torch.Generator().manual_seed(3)
    return ATTACKS[name](model, x, y, ball, generator=key, **NAMES[name], **more).x_adv


def through(library: str, name: str, model: nn.Module, x: Tensor, y: Tensor, **more: Any) -> Tensor:
    """What one of our attacks finds when the library calls it."""
    its, given = adapter(library), {"unit": "feature", "seed": 3, **NAMES[name], **more}
    if library == "foolbox":
        fmodel = import_module("foolbox").PyTorchModel(model, bounds=(0, 1), device="cpu")
        raws, clippeds, success = its.OurFoolboxAttack(name, **given)(fmodel, x, y, epsilons=[1, BUDGET])
        assert torch.equal(raws[1], clippeds[1])
        assert success[1].tolist() == (model(raws[1]).argmax(1) != y).tolist()
        return Tensor(raws[1])
    if library == "torchattacks":
        return Tensor(its.OurTorchAttack(model, name, BUDGET, **given)(x, y))
    if library == "art":
        classifier = import_module("art.estimators.classification").PyTorchClassifier(
            model,
            loss=nn.CrossEntropyLoss(),
            input_shape=(1, 6, 6),
            nb_classes=3,
            clip_values=(0, 1),
            device_type="cpu",
        )
        attack = its.OurArtAttack(classifier, name, BUDGET, **given)
        labels = np.eye(3, dtype=np.float32)[y.numpy()]
        np.testing.assert_array_equal(attack.generate(x.numpy(), labels), attack.generate(x=x.numpy()))
        return torch.from_numpy(attack.generate(x.numpy(), y.numpy()))
    loader = DataLoader(TensorDataset(x, y), batch_size=len(x))
    return torch.cat([points for points, _ in its.OurSecmlAttack(name, BUDGET, **given)(model, loader)])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("library", LIBRARIES)
def test_the_same_rows_break_through_a_library_as_directly(
    library: str, name: str, rows: tuple[nn.Module, Tensor, Tensor]
) -> None:
    model, x, y = rows
    if name == "adaptive" and library != "foolbox":  # whose models hide their layers
        model = truncate(model, k=1)
    found = directly(name, model, x, y, box())
    assert (model(found).argmax(1) != y).any()
    torch.testing.assert_close(through(library, name, model, x, y), found, rtol=0, atol=0)


@pytest.mark.parametrize("library", ["foolbox", "torchattacks", "secml"])
def test_a_target_is_aimed_at(library: str, rows: tuple[nn.Module, Tensor, Tensor]) -> None:
    model, x, y = rows
    target = (y + 1) % 3 if library != "secml" else torch.full_like(y, 2)
    its, more = adapter(library), {"unit": "feature", "seed": 3, **NAMES["sparse_rs"]}
    if library == "foolbox":
        fmodel = import_module("foolbox").PyTorchModel(model, bounds=(0, 1), device="cpu")
        aim = import_module("foolbox.criteria").TargetedMisclassification(target)
        found = its.OurFoolboxAttack("sparse_rs", **more)(fmodel, x, aim, epsilons=float(BUDGET))[0]
    elif library == "torchattacks":
        attack = its.OurTorchAttack(model, "sparse_rs", BUDGET, **more)
        attack.set_mode_targeted_by_label(quiet=True)
        found = attack(x, target)
    else:
        loader = DataLoader(TensorDataset(x, y), batch_size=len(x))
        attack = its.OurSecmlAttack("sparse_rs", BUDGET, y_target=2, **more)
        found = torch.cat([points for points, _ in attack(model, loader)])
    hit = model(found).argmax(1) == target
    assert hit.sum() > (y == target).sum()
    others = torch.where(y == target, (y + 1) % 3, y)
    torch.testing.assert_close(found, directly("sparse_rs", model, x, others, box(), target=target), rtol=0, atol=0)


def test_preprocessing_of_a_library_is_attacked_through(rows: tuple[nn.Module, Tensor, Tensor]) -> None:
    model, x, y = rows
    whole = nn.Sequential(nn.Identity(), model)
    whole[0].forward = lambda x: (x - 0.5) / 0.25
    found = directly("sparse_pgd", whole, x, y, box())
    classifier = import_module("art.estimators.classification").PyTorchClassifier(
        model, loss=nn.CrossEntropyLoss(), input_shape=(1, 6, 6), nb_classes=3, clip_values=(0, 1), device_type="cpu",
        preprocessing=(0.5, 0.25),
    )  # fmt: skip
    attack = adapter("art").OurArtAttack(classifier, "sparse_pgd", BUDGET, unit="feature", seed=3, steps=6)
    torch.testing.assert_close(torch.from_numpy(attack.generate(x.numpy(), y.numpy())), found)
    classes = import_module("secmlt.models.pytorch.base_pytorch_nn")
    wrapped = classes.BasePyTorchClassifier(model, preprocessing=lambda x: (x - 0.5) / 0.25)
    attack = adapter("secml").OurSecmlAttack("sparse_pgd", BUDGET, seed=3, steps=6)
    loader = DataLoader(TensorDataset(x, y), batch_size=len(x))
    torch.testing.assert_close(torch.cat([points for points, _ in attack(wrapped, loader)]), found)


def points_for(x: Tensor, y: Tensor) -> Tensor:
    """By turns: a point that breaks the row, one with too many changes, one outside the box, none, one with noise."""
    points = x.clone().flatten(1)
    for i, (row, label) in enumerate(zip(points, y.tolist(), strict=True)):
        kind, own = i % 5, slice(12 * label, 12 * label + 12)
        other = slice(12 * ((label + 1) % 3), 12 * ((label + 1) % 3) + 12)
        half = 10 if kind == 1 else BUDGET // 2
        most = row[own].topk(half).indices + own.start
        least = row[other].topk(half, largest=False).indices + other.start
        if kind != 3:
            row[most], row[least] = (0.0, 1.0) if kind != 2 else (-1.0, 2.0)
        if kind == 4:
            row += 1e-7 * (row < 0.5)
    return points.view_as(x)


def their_entry(library: str, find: Callable[[Tensor, Tensor], Tensor]) -> Entry:
    """An attack of the library's own shape that gives those points."""
    if library == "foolbox":

        def attack(fmodel: Any, inputs: Tensor, labels: Tensor, *, epsilons: None) -> Any:
            assert (tuple(fmodel.bounds), epsilons) == ((0, 1), None)
            return find(inputs, labels), None, fmodel(inputs)

        return Entry(adapter(library).theirs(attack).attack, white_box=False)
    if library == "torchattacks":
        base = import_module("torchattacks.attack").Attack

        class TheirTorchAttack(base):  # type: ignore[misc, valid-type]
            def __init__(self, model: nn.Module, strength: int) -> None:
                super().__init__("theirs", model)
                assert strength == 2

            def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
                self.get_logits(inputs)
                return find(inputs, labels)

        return Entry(adapter(library).theirs(TheirTorchAttack, strength=2).attack, white_box=False)
    if library == "art":

        class TheirEvasion:
            def __init__(self, classifier: Any, strength: int) -> None:
                assert (strength, tuple(classifier.clip_values)) == (2, (0, 1))
                self.classifier = classifier

            def generate(self, x: Any, y: Any) -> Any:
                self.classifier.predict(x)
                return find(torch.from_numpy(x), torch.from_numpy(y)).numpy()

        return Entry(adapter(library).theirs(TheirEvasion, strength=2).attack, white_box=False)
    if library == "secml":
        base = import_module("secmlt.adv.evasion.base_evasion_attack").BaseEvasionAttack

        class TheirSecml(base):  # type: ignore[misc, valid-type]
            def _run(self, model: Any, samples: Tensor, labels: Tensor) -> Any:
                model.decision_function(samples)
                return find(samples, labels), None

        return Entry(adapter(library).theirs(TheirSecml()).attack, white_box=False)

    class Perturbing:
        def __init__(self, model: nn.Module, ball: L0Ball) -> None:
            assert ball.budget == BUDGET
            self.model = model

        def perturb(self, x: Tensor, y: Tensor) -> Any:
            return self.model(x), find(x, y)

    return autoattack.theirs(Perturbing)


@pytest.mark.parametrize("library", [*LIBRARIES, "autoattack"])
def test_what_a_library_claims_is_checked(library: str, rows: tuple[nn.Module, Tensor, Tensor], tmp_path: Path) -> None:
    model, x, y = rows
    entry = their_entry(library, points_for)
    found = evaluate(model, x, y, box(), {"theirs": entry}, state_path=tmp_path / "state.npz")
    assert found.verdict.tolist() == [1 if i % 5 in (0, 4) else -1 for i in range(12)]
    assert {found.distance[i].item() for i in range(12) if i % 5 in (0, 4)} == {BUDGET}
    assert found.queries.flatten().tolist() == [2 if i % 5 in (0, 3, 4) else 1 for i in range(12)]


def test_rows_in_another_scale_are_found_in_the_scale_of_torchattacks(rows: tuple[nn.Module, Tensor, Tensor]) -> None:
    model, x, y = rows
    scaled = nn.Sequential(nn.Identity(), model)
    scaled[0].forward = lambda x: (x + 3) / 4
    entry = their_entry("torchattacks", points_for)
    found = evaluate(scaled, 4 * x - 3, y, L0Ball(BUDGET, low=-3.0, high=1.0), {"theirs": entry})
    assert found.verdict.tolist() == [1 if i % 5 in (0, 4) else -1 for i in range(12)]


def test_the_draws_of_others_are_seeded_and_given_back(rows: tuple[nn.Module, Tensor, Tensor]) -> None:
    def noisy(x: Tensor, _: Tensor) -> Tensor:
        seen.append((float(torch.rand(())), random.random(), float(np.random.rand())))  # noqa: NPY002
        return x

    model, x, y = rows
    seen: list[tuple[float, float, float]] = []
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]  # noqa: NPY002
    for seed in (0, 0, 1):
        evaluate(model, x, y, box(), {"theirs": their_entry("autoattack", noisy)}, seed=seed)
    assert seen[0] == seen[1] != seen[2]
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]  # noqa: NPY002
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


def test_what_another_library_cannot_know_is_refused_or_undone(rows: tuple[nn.Module, Tensor, Tensor]) -> None:
    model, x, y = rows
    entry = their_entry("autoattack", points_for)
    with pytest.raises(ValueError, match="low and high must be two numbers for an attack of another library"):
        evaluate(model, x, y, L0Ball(BUDGET, low=torch.zeros(36).view(1, 6, 6), high=1.0), {"theirs": entry})
    with pytest.raises(ValueError, match=r"x must lie in the box \[0, 0.9\] for an attack of another library"):
        evaluate(model, x, y, L0Ball(BUDGET, low=0.0, high=0.9), {"theirs": entry})
    frozen = L0Ball(BUDGET, low=0.0, high=1.0, mutable=torch.zeros(1, 6, 6, dtype=torch.bool))
    assert (evaluate(model, x, y, frozen, {"theirs": entry}).verdict < 0).all()
    with pytest.raises(ValueError, match="did you mean 'sparse_rs'"):
        judging.configured("sparse-rs")


def test_autoattacks_shape(
    rows: tuple[nn.Module, Tensor, Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, x, y = rows
    given: dict[str, Any] = {"attacks_to_run": ["sparse_rs"], "unit": "feature", "seed": 4}
    adversary = autoattack.SparseAutoAttack(model, "L0", BUDGET, log_path=tmp_path / "log", **given)
    x_adv, labels = adversary.run_standard_evaluation(x, y, bs=12, return_labels=True)
    whole = evaluate(model, x, y, box(), ["sparse_rs"], seed=4)
    assert torch.equal(x_adv, whole.x_adv)
    assert torch.equal(labels, model(x_adv).argmax(1))
    assert "robust accuracy" in capsys.readouterr().out
    assert "robust accuracy" in (tmp_path / "log").read_text()
    inner = autoattack.theirs(lambda model, _: autoattack.SparseAutoAttack(model, eps=BUDGET, verbose=False, **given))
    assert torch.equal(evaluate(model, x, y, box(), {"aa": inner}).verdict > 0, whole.verdict > 0)
    for wrong, said in (({"norm": "Linf"}, "norm must be 'L0', got 'Linf'"), ({"version": "rand"}, "version must be")):
        with pytest.raises(ValueError, match=said):
            autoattack.SparseAutoAttack(model, **wrong)  # type: ignore[arg-type]


def test_the_preset_of_the_literature(rows: tuple[nn.Module, Tensor, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["ell0.evaluation.evaluate"]
    saa = module.PRESETS["saa"]
    assert [(name, *attack.keywords.items()) for name, attack in saa.items()] == [
        ("sparse_pgd_unprojected", ("steps", 10_000), ("gradient", "unprojected")),
        ("sparse_pgd_projected", ("steps", 10_000), ("gradient", "projected")),
        ("sparse_rs", ("queries", 10_000)),
    ]
    short = {
        name: partial(attack, **({"queries": 9} if name == "sparse_rs" else {"steps": 4}))
        for name, attack in saa.items()
    }
    monkeypatch.setitem(module.PRESETS, "saa", short)
    model, x, y = rows
    found = evaluate(model, x, y, box(), preset="saa")
    assert list(found.attacks.items()) == [(name, name != "sparse_rs") for name in saa]
    for wrong, words in (
        ({"preset": "sAA"}, "preset must be 'saa', got 'sAA'"),
        ({"preset": "saa", "attacks": ["sparse_rs"]}, "attacks must be left out beside preset"),
    ):
        with pytest.raises(ValueError, match=words):
            evaluate(model, x, y, box(), **wrong)
    adversary = autoattack.SparseAutoAttack(model, eps=BUDGET, unit="feature", version="saa", verbose=False)
    adversary.run_standard_evaluation(x, y)
    assert isinstance(adversary.evaluation, Evaluation)
    assert list(adversary.evaluation.attacks) == list(saa)


@pytest.mark.parametrize("place", RECORD)
def test_the_record_is_that_of_the_library(place: str) -> None:
    module, _, name = place.partition(":")
    found: Any = import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    assert " ".join(inspect.signature(found).parameters) == RECORD[place]


def test_the_examples_of_the_page_run(rows: tuple[nn.Module, Tensor, Tensor]) -> None:
    model, images, labels = rows
    names: dict[str, Any] = {"model": model, "images": images, "labels": labels, "torch": torch}
    first, *tools, last = blocks(ROOT / "docs" / "tools.md")
    exec(first, names)
    for block in tools:
        before = set(names)
        exec(block, names)
        (ours,) = {"clipped", "x_adv", "attacked"} & (set(names) - before) or {"x_adv"}
        points = names[ours][-1] if ours == "clipped" else names[ours]
        points = torch.cat([some for some, _ in points]) if ours == "attacked" else torch.as_tensor(points)
        assert names["ball"].contains(images, points).all()
        assert names["evaluation"].clean_accuracy == 1
        assert names["evaluation"].queries.min() > 0
    exec(last, names)
    assert (names["adversary"].evaluation.verdict > 0).any()


@pytest.mark.skipif(not REAL, reason="needs the libraries: make test-peers")
@pytest.mark.parametrize(
    "name", ["foolbox pointwise", "foolbox noise", "torchattacks", "art pixels", "art saliency", "secml"]
)
def test_real_attacks_run_inside_evaluate(name: str, rows: tuple[nn.Module, Tensor, Tensor]) -> None:
    model, x, y = rows
    if name.startswith("foolbox"):
        attacks = import_module("foolbox.attacks")
        noise = attacks.SaltAndPepperNoiseAttack(steps=60)
        theirs = noise if name.endswith("noise") else attacks.PointwiseAttack(noise, l2_binary_search=False)
        entry = adapter("foolbox").theirs(theirs)
    elif name == "torchattacks":
        entry = adapter(name).theirs(import_module(name).OnePixel, pixels=BUDGET, steps=3, popsize=4)
    elif name.startswith("art"):
        attacks = import_module("art.attacks.evasion")
        pixels = {"make": attacks.PixelAttack, "th": BUDGET, "max_iter": 4, "verbose": False}
        saliency = {"make": attacks.SaliencyMapMethod, "theta": 1.0, "gamma": 0.3, "verbose": False, "labels": False}
        entry = adapter("art").theirs(**(pixels if name.endswith("pixels") else saliency))
    else:
        fmn = import_module("secmlt.adv.evasion.fmn").FMN("l0", num_steps=60, step_size=0.5)
        entry = adapter("secml").theirs(fmn)
    ball = L0Ball(20, low=-1.0, high=1.0)
    first, again = (evaluate(model, x, y, ball, {name: entry}) for _ in range(2))
    broken = first.verdict > 0
    assert torch.equal(broken, again.verdict > 0)
    assert broken.any()
    assert (model(first.x_adv).argmax(1) != y).equal(broken)
    assert ball.contains(x, first.x_adv).all()
    assert first.queries.min() > 0
