"""Sparse-PGD: near the optimum where it is known, and what its two halves and its patience do."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from balls import within_one
from ell0.attacks import AttackResult, sparse_pgd
from ell0.threat import L0Ball
from oracle import optimum

LOW = torch.where(torch.arange(60) % 4 > 0, -1.0, -math.inf)


class Linear:
    """z = W x + b, for x of any shape; no row depends on the rest of its batch."""

    def __init__(self, *shape: int, classes: int = 5) -> None:
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.randn(classes, math.prod(shape), generator=generator)
        self.bias = torch.randn(classes, generator=generator)
        self.x = torch.rand(60, *shape, generator=generator) * 2 - 1
        # Clean margins between nothing and more than the budget can move.
        push = 0.5 * torch.rand(60, 1, generator=generator) * self.weight[self(self.x).argmax(1)].sign()
        self.x = (self.x + push.view_as(self.x)).clamp(-1, 1)
        self.y = self(self.x).argmax(1)

    def __call__(self, x: Tensor) -> Tensor:
        return (x.flatten(1).unsqueeze(1) * self.weight).sum(2) + self.bias


def check_near_the_optimum(model: Linear, ball: L0Ball, result: AttackResult) -> None:
    """Breaks 95 % of the rows that 4/5 of the budget could break, and none that it cannot."""
    fewest = optimum(model, model.x, model.y, ball)
    assert not (result.success & (fewest > ball.budget)).any()
    breakable = 1.25 * fewest <= ball.budget
    assert breakable.sum() >= 10
    assert result.success[breakable].float().mean() >= 0.95


BALLS: dict[str, tuple[tuple[int, ...], L0Ball]] = {
    "small": ((60,), within_one(6)),
    "far": ((300,), L0Ball(2, low=-100.0, high=100.0)),
    "pixel": ((3, 8, 8), within_one(7, unit="pixel")),
    "uneven box": ((2, 8, 8), L0Ball(10, low=torch.linspace(-1, 0, 8), high=0.5)),
    "frozen channel": ((3, 8, 8), within_one(9, unit="pixel", mutable=torch.tensor([True, False, True]).view(3, 1, 1))),
    "frozen without a box": ((60,), within_one(6, low=LOW, mutable=LOW.isfinite())),
}


@pytest.mark.parametrize("case", BALLS)
def test_breaks_linear_models_near_the_optimum(case: str) -> None:
    shape, ball = BALLS[case]
    model = Linear(*shape)
    check_near_the_optimum(model, ball, sparse_pgd(model, model.x, model.y, ball))


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e3])
def test_the_scale_of_the_logits_does_not_matter(scale: float) -> None:
    model, ball = Linear(300), within_one(12)
    model.weight, model.bias = scale * model.weight, scale * model.bias
    check_near_the_optimum(model, ball, sparse_pgd(model, model.x, model.y, ball))


def test_of_two_classes_the_target_is_the_other() -> None:
    model, ball = Linear(300, classes=2), within_one(12)
    check_near_the_optimum(model, ball, sparse_pgd(model, model.x, model.y, ball, target=1 - model.y))


@pytest.mark.parametrize("spoil", [torch.abs, torch.relu])
def test_a_gradient_that_is_no_number_spoils_only_its_unit(spoil: Callable[[Tensor], Tensor]) -> None:
    linear, ball = Linear(60), within_one(6, mutable=torch.arange(60) > 0)
    linear.x[:, 0] = 0.0
    linear.y = linear(linear.x).argmax(1)

    def model(x: Tensor) -> Tensor:
        return linear(x) + spoil(x[:, :1]).sqrt() * torch.arange(5)

    check_near_the_optimum(linear, ball, sparse_pgd(model, linear.x, linear.y, ball))


def test_the_halves_differ_in_whose_values_move() -> None:
    seen: list[Tensor] = []
    slope = torch.linspace(1, 2, 20)

    def model(x: Tensor) -> Tensor:
        seen.append(x.detach())
        return torch.stack([1e5 + x @ slope, torch.zeros(len(x))], 1)

    x, y = torch.zeros(1, 20), torch.zeros(1, dtype=torch.int64)
    sparse_pgd(model, x, y, L0Ball(4, low=-100.0, high=100.0), steps=60)
    # Eight steps of a quarter of the box bring any value to the corner, if it moves. The first query is the clean one.
    unprojected, projected = torch.cat(seen[11:31]), torch.cat(seen[41:61])
    assert (unprojected[unprojected != 0] == -100).all()
    assert (projected[projected != 0] > -100).any()
    for gradient, corners in (("unprojected", True), ("projected", False)):
        seen.clear()
        sparse_pgd(model, x, y, L0Ball(4, low=-100.0, high=100.0), steps=60, gradient=gradient)  # type: ignore[arg-type]
        for part in (torch.cat(seen[11:31]), torch.cat(seen[31:61])):
            assert bool((part[part != 0] == -100).all()) == corners
    with pytest.raises(ValueError, match="gradient must be one of 'both', 'unprojected', 'projected', got 'none'"):
        sparse_pgd(model, x, y, within_one(1), gradient="none")  # type: ignore[arg-type]


def test_a_step_costs_a_forward_and_a_backward() -> None:
    model = Linear(300)
    result = sparse_pgd(model, model.x, model.y, within_one(1), steps=7, restarts=2)
    assert (result.queries[~result.success] == 2 * 7 * 2).all()
    assert (~result.success).any()


def test_a_row_without_slope_draws_new_units_after_its_patience() -> None:
    seen: list[Tensor] = []

    def model(x: Tensor) -> Tensor:
        seen.append(x.detach() != 0)
        return torch.tensor([1.0, 0.0]) + 0 * x.sum(1, keepdim=True)

    x, y = torch.zeros(4, 50), torch.zeros(4, dtype=torch.int64)
    sparse_pgd(model, x, y, within_one(3, mutable=torch.arange(50) % 2 > 0), steps=24)
    queried = torch.stack(seen[1:13])  # the first half
    assert (queried.sum(2) == 3).all()
    for row in range(4):
        assert len({tuple(units) for units in queried[:, row].tolist()}) == 3
