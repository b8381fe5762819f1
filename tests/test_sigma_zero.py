"""sigma-zero: near the optimum where it is known, the same in every box, exactly inside it."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ell0 import L0Ball
from ell0.attacks.sigma_zero import sigma_zero, sparsity_slope
from ell0.nn import TruncatedLinear
from ell0.threat import Unit
from oracle import Sums, network, optimum, random

cases = settings(max_examples=min(500, settings().max_examples // 2))
fewer_cases = settings(max_examples=cases.max_examples // 2)


class Far(nn.Module):
    """A linear model with large margins: the optimum is several units."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.sums = Sums(features, classes)

    def rows(self, n: int, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Rows that lean towards the weights of a class, and their labels."""
        y = torch.arange(n) % len(self.sums.weight)
        lean = 0.3 * self.sums.weight[y].detach().sign().view(n, *shape)
        x = (lean + 0.3 * random(n, *shape, seed=11)).clamp(-1, 1)
        return x, self(x).argmax(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.sums(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("unit", "shape", "classes"),
    [("feature", (200,), 3), ("feature", (3, 8, 9), 10), ("pixel", (1, 14, 14), 5), ("pixel", (3, 10, 10), 4)],
)
@pytest.mark.parametrize("targeted", [False, True])
def test_the_median_comes_within_a_quarter_of_the_optimum(
    unit: Unit, shape: tuple[int, ...], classes: int, targeted: bool
) -> None:
    model = Far(math.prod(shape), classes)
    x, y = model.rows(40, shape)
    ball = L0Ball(math.prod(shape if unit == "feature" else shape[1:]), unit)
    if targeted:
        # Towards one class the optimum is that of the model which has only this one and the true one.
        target = (y + 1) % classes
        best = torch.cat([_pair_optimum(model.sums, *row, ball) for row in zip(x, y, target, strict=True)])
        result = sigma_zero(model, x, y, ball, target=target, minimise=True)
    else:
        best = optimum(model.sums, x, y, ball)
        result = sigma_zero(model, x, y, ball, minimise=True)
    assert best.median() >= 4
    assert result.success.all()
    assert result.distance.median() <= 1.25 * best.median()
    assert targeted or (result.distance >= best).all()


def _pair_optimum(model: Sums, x: Tensor, y: Tensor, target: Tensor, ball: L0Ball) -> Tensor:
    pair = Sums(1, 2).requires_grad_(False)
    classes = torch.stack([y, target])
    pair.weight.data, pair.bias.data = model.weight.detach()[classes], model.bias.detach()[classes]
    return optimum(pair, x[None], torch.zeros(1, dtype=torch.int64), ball)


@st.composite
def problems(draw: st.DrawFn) -> tuple[nn.Module, Tensor, Tensor, L0Ball]:
    """A small network, rows some of which leave the box, labels, and a ball with bounds and masks of every kind."""
    unit: Unit = draw(st.sampled_from(["feature", "pixel"]))
    shape = draw(st.sampled_from([(1, 2, 4), (3, 2, 3)] + ([(9,)] if unit == "feature" else [])))
    features, n = math.prod(shape), draw(st.integers(1, 4))
    seed = draw(st.integers(0, 1000))
    model = network(features, seed=seed)
    x = random(n, *shape, seed=seed).clamp(-1.2, 1.2)
    mutable = random(*shape, seed=seed + 1) > -0.5 if draw(st.booleans()) else None
    low = random(n, *shape, seed=seed + 2).clamp(-1, 1) if draw(st.booleans()) else -1.0
    budget = draw(st.integers(0, features if unit == "feature" else features // shape[0]))
    return model, x, model(x).argmax(1), L0Ball(budget, unit, low, 1.0, mutable)


@cases
@given(problems())
def test_both_modes_break_the_same_rows(problem: tuple[nn.Module, Tensor, Tensor, L0Ball]) -> None:
    """The first stops a row within the budget, the second goes on, never to a larger distance."""
    model, x, y, ball = problem
    first, nearest = (sigma_zero(model, x, y, ball, steps=12, minimise=minimise) for minimise in (False, True))
    for result in (first, nearest):
        assert ball.contains(x, result.x_adv).all()
        assert torch.equal(model(result.x_adv).argmax(1) != y, result.success)
    assert torch.equal(first.success, nearest.success)
    assert (nearest.distance <= first.distance).all()
    assert (first.queries <= nearest.queries).all()


@fewer_cases
@given(problems(), st.sampled_from([0.25, 2.0, 1024.0]))
def test_the_constants_mean_the_same_in_every_box(
    problem: tuple[nn.Module, Tensor, Tensor, L0Ball], scale: float
) -> None:
    """Rows, box and model stretched by a power of two give the stretched points, to the bit."""
    model, x, y, ball = problem
    wide = L0Ball(ball.budget, ball.unit, ball.low * scale, ball.high * scale, ball.mutable)

    def stretched(points: Tensor) -> Tensor:
        return model(points / scale)  # type: ignore[no-any-return]

    one = sigma_zero(model, x, y, ball, steps=8)
    other = sigma_zero(stretched, x * scale, y, wide, steps=8)
    assert torch.equal(one.x_adv * scale, other.x_adv)
    assert torch.equal(one.queries, other.queries)


def test_a_unit_counts_once_with_all_its_channels() -> None:
    change = random(4, 3, 5, seed=0).requires_grad_()
    square = change.square().sum(1)
    (slope,) = torch.autograd.grad((square / (square + 0.1)).mean(1).sum(), change)
    torch.testing.assert_close(sparsity_slope(change.detach(), 0.1), slope)


def test_a_box_may_be_one_point_away_from_x() -> None:
    """Features that can only be switched on: 0 becomes 1."""
    model = Sums(60, 2)
    x = torch.zeros(1, 60)
    y = model(x).argmax(1)
    ball = L0Ball(60, low=1.0, high=1.0)
    result = sigma_zero(model, x, y, ball, minimise=True)
    assert result.success.all()
    assert result.distance.item() == optimum(model, x.double(), y, ball).item()


def test_the_last_step_is_looked_at() -> None:
    """The first step breaks this row, and there is no second to find it out."""
    model = Sums(20, 2)
    x = random(1, 20, seed=1).clamp(-1, 1)
    result = sigma_zero(model, x, model(x).argmax(1), L0Ball(20), steps=1)
    assert result.success.all()
    assert result.queries.item() == 3


def test_removed_terms_get_a_gradient() -> None:
    """A truncated layer that removes all terms of the changed inputs has none of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(TruncatedLinear(12, 6, 5), nn.Linear(6, 3)).double()
    x = random(20, 12, seed=2).clamp(-1, 1)
    y = model(x).argmax(1)
    plain, straight = (sigma_zero(model, x, y, L0Ball(4), steps=30, surrogate=s) for s in (None, "straight"))
    assert straight.success.sum() > plain.success.sum()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "steps must be an int >= 1, got 0"),
        ({"lr": 0.0}, "lr must be a number > 0, got 0.0"),
        ({"sigma": math.nan}, "sigma must be a number > 0, got nan"),
        ({"threshold": 1.5}, r"threshold must lie in \[0, 1\], got 1.5"),
        ({"threshold_step": -1.0}, r"threshold_step must lie in \[0, 1\], got -1.0"),
        ({"surrogate": "hard"}, "surrogate must be .*, got 'hard'"),
    ],
)
def test_errors_name_the_argument(settings: dict[str, Any], message: str) -> None:
    model = Sums(3, 2)
    x = random(2, 3, seed=0)
    with pytest.raises(ValueError, match=message):
        sigma_zero(model, x, model(x).argmax(1), L0Ball(1), **settings)
