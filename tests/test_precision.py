"""TF32 is off where a certificate is made or put to the test, and torch's switches end as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ell0 import L0Ball, certify, recipe
from ell0.attacks import sparse_rs
from ell0.precision import _BACKENDS, _SWITCHES, dense_products
from ell0.recipe import running
from ell0.recipe.measuring import measure
from ell0.train import TrainConfig, fit
from tiny_recipe import write_recipe


def switches() -> tuple[str, ...]:
    return tuple(switch.fp32_precision for switch in _SWITCHES)


def older() -> tuple[str, bool]:
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32


def set_older(matmul: str, cudnn: bool) -> None:
    torch.set_float32_matmul_precision(matmul)
    torch.backends.cudnn.allow_tf32 = cudnn


@pytest.fixture(autouse=True)
def _switches() -> Iterator[None]:
    before = switches()
    set_older("highest", True)
    yield
    _BACKENDS.fp32_precision = "none"
    set_older("highest", True)
    for switch, precision in zip(_SWITCHES, before, strict=True):
        switch.fp32_precision = precision


STATES: list[tuple[Any, Any]] = [
    *(("highest", True), ("high", False), ("medium", True)),
    *((_SWITCHES[0], "tf32"), (_SWITCHES[1], "ieee"), (_SWITCHES[3], "bf16"), (_BACKENDS, "tf32")),
]


@pytest.mark.parametrize(("which", "state"), STATES, ids=map(str, range(len(STATES))))
@pytest.mark.parametrize("tf32", [False, True])
def test_the_switches_are_set_and_put_back(which: Any, state: Any, tf32: bool) -> None:
    if isinstance(which, str):
        set_older(which, state)
    else:
        which.fp32_precision = state
    before, names = switches(), older() if isinstance(which, str) else None
    with suppress(ValueError), dense_products(tf32=tf32):
        assert set(switches()) == {"tf32" if tf32 else "ieee"}
        assert older() == ("high" if tf32 else "highest", tf32)
        with dense_products(tf32=not tf32):
            assert set(switches()) == {"ieee" if tf32 else "tf32"}
        assert set(switches()) == {"tf32" if tf32 else "ieee"}
        raise ValueError("from within")
    assert switches() == before
    assert names is None or older() == names


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How convolutions would be made wherever a plain layer sees several rows, on a machine where all is rounded."""
    set_older("medium", True)
    forward, seen = nn.Linear.forward, list[str]()

    def watched(self: nn.Linear, x: Tensor) -> Tensor:
        if len(x) > 1:  # a single row shows how many classes there are
            seen.append(switches()[1])
        return forward(self, x)

    monkeypatch.setattr(nn.Linear, "forward", watched)
    return seen


def test_certificates_and_their_challenge_see_float32(seen: list[str]) -> None:
    torch.manual_seed(0)
    model, x, ball = nn.Sequential(nn.Linear(4, 3)).eval(), torch.rand(5, 4), L0Ball(1, low=0.0, high=1.0)
    y = model(x).argmax(1)
    assert seen == ["tf32"]
    seen.clear()
    certify.radius(model, x, y, ball)
    assert set(seen) == {"ieee"}
    seen.clear()
    certify.challenge(model, x, y, torch.ones_like(y), ball, ["sparse_rs"])
    assert set(seen) == {"ieee"}


def test_a_training_on_a_processor_sees_float32(seen: list[str]) -> None:
    attack = partial(sparse_rs, ball=L0Ball(1, low=0.0, high=1.0), queries=5)
    config = TrainConfig(epochs=2, batch=4, rates=(0.1,), refresh=1, precision="tf32")
    fit(nn.Sequential(nn.Linear(4, 3)), (torch.rand(8, 4), torch.arange(8) % 3), config, attack)
    assert set(seen) == {"ieee"}


def test_measures_of_a_recipe_are_taken_in_float32(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[str] = []

    def watched(*given: Any) -> Any:
        seen.append(switches()[1])
        return measure(*given)

    monkeypatch.setattr(running, "measure", watched)
    recipe.run(write_recipe(tmp_path), out=tmp_path / "out")
    assert set(seen) == {"ieee"}
