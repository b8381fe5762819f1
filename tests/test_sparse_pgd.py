"""Sparse-PGD: near the optimum where it is known, and what its masks, patience and surrogate do."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ell0.attacks.contract import AttackResult
from ell0.attacks.sparse_pgd import Mask, sparse_pgd
from ell0.nn import TruncatedLinear
from ell0.threat import L0Ball
from oracle import optimum

LOW = torch.where(torch.arange(60) % 4 > 0, -1.0, -math.inf)


class Linear:
    """z = W x + b, for x of any shape; no row depends on the rest of its batch."""

    def __init__(self, *shape: int, classes: int = 5, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.weight = torch.randn(classes, math.prod(shape), generator=generator)
        self.bias = torch.randn(classes, generator=generator)
        self.x = torch.rand(60, *shape, generator=generator) * 2 - 1
        # Clean margins between nothing and more than the budget can move.
        self.y = self(self.x).argmax(1)
        push = 0.5 * torch.rand(60, 1, generator=generator) * self.weight[self.y].sign()
        self.x = (self.x + push.view_as(self.x)).clamp(-1, 1)
        self.y = self(self.x).argmax(1)

    def __call__(self, x: Tensor) -> Tensor:
        return (x.flatten(1).unsqueeze(1) * self.weight).sum(2) + self.bias


def share_of_breakable(model: Linear, ball: L0Ball, result: AttackResult) -> float:
    fewest = optimum(model, model.x, model.y, ball)
    assert not (result.success & (fewest > ball.budget)).any()
    breakable = 1.25 * fewest <= ball.budget
    assert breakable.sum() >= 10
    return float(result.success[breakable].float().mean())


BALLS: list[tuple[str, tuple[int, ...], L0Ball]] = [
    ("small", (60,), L0Ball(6)),
    ("wide", (300,), L0Ball(12)),
    ("far", (300,), L0Ball(2, low=-100.0, high=100.0)),
    ("pixel", (3, 8, 8), L0Ball(7, unit="pixel")),
    ("uneven box", (2, 8, 8), L0Ball(10, low=torch.linspace(-1, 0, 8), high=0.5)),
    ("frozen", (300,), L0Ball(16, mutable=torch.arange(300) % 3 > 0)),
    ("frozen channel", (3, 8, 8), L0Ball(9, unit="pixel", mutable=torch.tensor([True, False, True]).view(3, 1, 1))),
    ("frozen without a box", (60,), L0Ball(6, low=LOW, mutable=LOW.isfinite())),
]


@pytest.mark.parametrize(("shape", "ball"), [case[1:] for case in BALLS], ids=[case[0] for case in BALLS])
def test_breaks_linear_models_near_the_optimum(shape: tuple[int, ...], ball: L0Ball) -> None:
    model = Linear(*shape)
    result = sparse_pgd(model, model.x, model.y, ball)
    assert share_of_breakable(model, ball, result) >= 0.95
    assert ball.contains(model.x, result.x_adv).all()
    assert ball.contains(model.x, result.x_best).all()


def test_the_masks_differ_in_whose_values_move() -> None:
    seen: list[Tensor] = []
    slope = torch.linspace(1, 2, 20)

    def model(x: Tensor) -> Tensor:
        seen.append(x.detach())
        return torch.stack([1e5 + x @ slope, torch.zeros(len(x))], 1)

    x, y = torch.zeros(1, 20), torch.zeros(1, dtype=torch.int64)
    shown = {}
    for mask in ("unprojected", "projected"):
        seen.clear()
        sparse_pgd(model, x, y, L0Ball(4, low=-100.0, high=100.0), steps=30, mask=mask)
        # Eight steps of a quarter of the box bring any value to the corner, if it moves.
        late = torch.cat(seen[10:])
        shown[mask] = late[late != 0]
    assert (shown["unprojected"] == -100).all()
    assert (shown["projected"] > -100).any()


@pytest.mark.parametrize("scale", [1e-6, 1e3])
def test_the_scale_of_the_logits_does_not_matter(scale: float) -> None:
    model, ball = Linear(300), L0Ball(12)
    model.weight, model.bias = scale * model.weight, scale * model.bias
    assert share_of_breakable(model, ball, sparse_pgd(model, model.x, model.y, ball)) >= 0.95


def test_of_two_classes_the_target_is_the_other() -> None:
    model, ball = Linear(300, classes=2), L0Ball(12)
    result = sparse_pgd(model, model.x, model.y, ball, target=1 - model.y)
    assert share_of_breakable(model, ball, result) >= 0.95


@pytest.mark.parametrize("mask", ["unprojected", "projected", "both"])
def test_a_step_costs_a_forward_and_a_backward(mask: Mask) -> None:
    model = Linear(300)
    result = sparse_pgd(model, model.x, model.y, L0Ball(1), steps=7, restarts=2, mask=mask)
    assert (result.queries[~result.success] == 2 * 7 * 2).all()
    assert (~result.success).any()


@pytest.mark.parametrize(("patience", "sets"), [(1, 6), (3, 3), (20, 1)])
def test_a_row_without_slope_draws_new_units_after_its_patience(patience: int, sets: int) -> None:
    seen: list[Tensor] = []
    constant = torch.tensor([1.0, 0.0])

    def model(x: Tensor) -> Tensor:
        seen.append(x.detach() != 0)
        return constant + 0 * x.sum(1, keepdim=True)

    x, y = torch.zeros(4, 50), torch.zeros(4, dtype=torch.int64)
    ball = L0Ball(3, mutable=torch.arange(50) % 2 > 0)
    sparse_pgd(model, x, y, ball, steps=12, mask="unprojected", patience=patience)
    queried = torch.stack(seen[1:])
    assert (queried.sum(2) == 3).all()
    for row in range(4):
        assert len({tuple(units) for units in queried[:, row].tolist()}) == sets


@pytest.mark.parametrize("spoil", [torch.abs, torch.relu])
def test_a_gradient_that_is_no_number_spoils_only_its_unit(spoil: Callable[[Tensor], Tensor]) -> None:
    linear, ball = Linear(60), L0Ball(6, mutable=torch.arange(60) > 0)
    linear.x[:, 0] = 0.0
    linear.y = linear(linear.x).argmax(1)

    def model(x: Tensor) -> Tensor:
        return linear(x) + spoil(x[:, :1]).sqrt() * torch.arange(5)

    result = sparse_pgd(model, linear.x, linear.y, ball)
    assert share_of_breakable(linear, ball, result) >= 0.95


def test_the_surrogate_reaches_the_truncated_layer() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(TruncatedLinear(30, 20, 10), nn.ReLU(), nn.Linear(20, 3))
    x = torch.rand(40, 30) * 2 - 1
    y = model(x).argmax(1)
    straight, plain = (
        sparse_pgd(model, x, y, L0Ball(3, low=-9.0, high=9.0), steps=10, surrogate=kind).x_best
        for kind in ("straight", None)
    )
    assert not torch.equal(straight, plain)
