"""Attacks on models as people write them: layers that write in place, casts, detours, modes."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import Generator, Tensor, nn

from balls import within_one
from ell0 import L0Ball
from ell0.attacks import ATTACKS, AttackResult, adaptive
from ell0.nn import InputTruncation, TruncatedLinear

GRADIENTS = [name for name in ATTACKS if ATTACKS[name].white_box]


def run(name: str, model: nn.Module, x: Tensor, **options: object) -> AttackResult:
    with torch.no_grad():
        y = model(x).argmax(1)
    return ATTACKS[name](model, x, y, L0Ball(2, low=-3.0, high=3.0), **{**ATTACKS[name].cheap, **options})


def rows(*shape: int) -> Tensor:
    return torch.rand(shape, generator=Generator().manual_seed(0)) * 2 - 1


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("first", [TruncatedLinear(12, 8, 2), nn.Sequential(InputTruncation(12, 2), nn.Linear(12, 8))])
def test_a_layer_that_writes_in_place(name: str, first: nn.Module) -> None:
    result = run(name, nn.Sequential(first, nn.ReLU(inplace=True), nn.Linear(8, 3)), rows(9, 12))
    assert result.queries.sum() > 0


class Detour(nn.Module):
    """A truncated layer on the last dimension only, or one that gets its input by name, or in another dtype."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layer = TruncatedLinear(4 if kind == "last" else 12, 5, 1, dtype=torch.float64 if kind == "cast" else None)
        self.head = nn.Linear(15 if kind == "last" else 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "last":
            out = self.layer(x.view(-1, 3, 4)).flatten(1)
        elif self.kind == "name":
            out = self.layer(x=x.flatten(1))
        else:
            out = self.layer(x.flatten(1).double()).float()
        return torch.as_tensor(self.head(out))


@pytest.mark.parametrize("kind", ["last", "name", "cast"])
def test_a_truncation_that_does_not_see_the_input_as_it_is(kind: str) -> None:
    assert run("adaptive", Detour(kind), rows(9, 3, 4)).queries.sum() > 0


def test_what_a_truncation_sees_does_not_depend_on_the_rows() -> None:
    model = nn.Sequential(nn.ReLU(), TruncatedLinear(12, 8, 2), nn.Tanh(), nn.Linear(8, 3)).double()
    x = rows(9, 12).double()
    x[0].abs_()  # the ReLU leaves this row as it is
    with torch.no_grad():
        y = model(x).argmax(1)
    ball = L0Ball(2, low=-3.0, high=3.0)
    whole = adaptive(model, x, y, ball, queries=60)
    rest = adaptive(model, x[1:], y[1:], ball, queries=60, rows=torch.arange(1, 9))
    torch.testing.assert_close(whole.margin[1:], rest.margin)
    assert torch.equal(whole.queries[1:], rest.queries)


@pytest.mark.parametrize("name", GRADIENTS)
def test_an_input_that_is_cut_off_from_the_gradient(name: str) -> None:
    net = nn.Linear(12, 3)

    def model(x: Tensor) -> Tensor:
        return torch.as_tensor(net((x.detach() * 8).round() / 8))

    x = rows(5, 12)
    with pytest.raises(ValueError, match="model must have a gradient for this attack"):
        ATTACKS[name](model, x, model(x).argmax(1), within_one(2))


@pytest.mark.parametrize("name", ATTACKS)
def test_inference_mode_is_fine_or_refused(name: str) -> None:
    model, x = nn.Linear(12, 3), rows(5, 12)
    with torch.inference_mode():
        if name in GRADIENTS:
            with pytest.raises(ValueError, match=r"outside of torch\.inference_mode\(\)"):
                run(name, model, x)
        else:
            assert run(name, model, x).queries.sum() > 0


class Rowwise(nn.Module):
    """A linear model that no other row of the batch touches, nor the dtype of x."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.double().unsqueeze(1) * rows(3, 12).double()).sum(2)


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    model, x, ball = Rowwise(), rows(30, 12).to(dtype), within_one(4)
    result = ATTACKS[name](model, x, model(x).argmax(1), ball)
    assert result.x_adv.dtype == dtype
    assert ball.contains(x, result.x_adv).all()
    assert result.success.float().mean() > 0.5


def test_pointwise_in_groups_of_rows_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Rowwise(), rows(20, 12)
    whole = run("pointwise", model, x, repeats=3)
    monkeypatch.setattr(importlib.import_module("ell0.attacks.pointwise"), "_TOGETHER", 3 * 12 * 4)
    parts = run("pointwise", model, x, repeats=3)
    assert torch.equal(whole.x_adv, parts.x_adv)
    assert torch.equal(whole.queries, parts.queries)
