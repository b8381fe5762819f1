"""TF32 is off where a certificate is made or put to the test, and torch's switches end as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ell0 import L0Ball, certify, recipe
from ell0.certify import _certify, _challenge
from ell0.precision import dense_products
from ell0.recipe import _run
from ell0.recipe._measure import measured
from ell0.recipe._recipe import Task
from tiny_recipe import write_recipe

CUDA = torch.device("cuda")


def convolutions_round() -> bool:
    return bool(torch.backends.cudnn.allow_tf32)


@pytest.fixture(autouse=True)
def _switches() -> Iterator[None]:
    """As torch comes, and so again for the next test."""
    assert (torch.get_float32_matmul_precision(), convolutions_round()) == ("highest", True)
    yield
    assert (torch.get_float32_matmul_precision(), convolutions_round()) == ("highest", True)


@pytest.mark.parametrize("tf32", [False, True])
def test_the_switches_are_set_and_put_back(tf32: bool) -> None:
    with dense_products(CUDA, tf32=tf32):
        assert torch.get_float32_matmul_precision() == ("high" if tf32 else "highest")
        assert convolutions_round() == tf32
    with dense_products(torch.device("cpu"), tf32=not tf32):
        assert (torch.get_float32_matmul_precision(), convolutions_round()) == ("highest", True)


def test_the_switches_are_put_back_after_an_error() -> None:
    with pytest.raises(ValueError, match="from within"):
        _fail()


@dense_products(CUDA, tf32=False)
def _fail() -> None:
    raise ValueError("from within")


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[ModuleType], None]:
    """Has a module set the switches here too."""

    def forced(_: torch.device, *, tf32: bool) -> AbstractContextManager[None]:
        return dense_products(CUDA, tf32=tf32)

    return lambda module: monkeypatch.setattr(module, "dense_products", forced)


def test_certificates_and_their_challenge_see_float32(
    as_on_a_gpu: Callable[[ModuleType], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    as_on_a_gpu(_certify)
    as_on_a_gpu(_challenge)
    forward, seen = nn.Linear.forward, list[bool]()

    def watched(self: nn.Linear, x: Tensor) -> Tensor:
        if len(x) > 1:  # a single row shows how many classes there are
            seen.append(convolutions_round())
        return forward(self, x)

    torch.manual_seed(0)
    model, x, ball = nn.Sequential(nn.Linear(4, 3)).eval(), torch.rand(5, 4), L0Ball(1, low=0.0, high=1.0)
    y = model(x).argmax(1)
    monkeypatch.setattr(nn.Linear, "forward", watched)
    certify.radius(model, x, y, ball)
    assert set(seen) == {False}
    seen.clear()
    certify.challenge(model, x, y, torch.ones_like(y), ball, ["sparse_rs"])
    assert set(seen) == {False}


def test_attacks_of_a_recipe_see_float32_where_certificates_are_measured(
    as_on_a_gpu: Callable[[ModuleType], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    as_on_a_gpu(_run)
    seen: dict[str, set[bool]] = {}

    def watched(task: Task, *rest: Any) -> Any:
        seen.setdefault(task.classifier.name, set()).add(convolutions_round())
        return measured(task, *rest)

    monkeypatch.setattr(_run, "measured", watched)
    certified = '[[measure]]\nwhat = "certified_accuracy"\nclassifiers = ["F(2)"]\nbudgets = [1]\n'
    path = write_recipe(tmp_path)
    path.write_text(path.read_text() + certified)
    recipe.run(path, out=tmp_path / "out")
    assert seen == {"F(0)": {True}, "F(2)": {False}}
