"""sigma-zero: near the optimum where it is known, the same in every box, exactly inside it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ell0 import L0Ball
from ell0.attacks.contract import Victim
from ell0.attacks.sigma_zero import Descent, sigma_zero, sparsity_slope
from ell0.nn import TruncatedLinear
from ell0.threat import Unit
from oracle import Sums, optimum, random
from test_attacks import LINEAR, Problem, linear, problems

cases = settings(max_examples=min(500, settings().max_examples // 2))
fewer_cases = settings(max_examples=cases.max_examples // 2)


@pytest.mark.parametrize(("unit", "shape"), LINEAR)
def test_the_median_comes_within_a_quarter_of_the_optimum(unit: Unit, shape: tuple[int, ...]) -> None:
    model, x, y = linear(shape, 60, 2)
    ball = L0Ball(40, unit)
    best = optimum(model, x, y, ball)
    result = sigma_zero(model, x, y, ball, minimise=True)
    assert result.success.all()
    assert (result.distance >= best).all()
    assert (result.distance / best).median() <= 1.25


@cases
@given(problems())
def test_both_modes_break_the_same_rows(case: tuple[Problem, Tensor]) -> None:
    """The first stops a row within the budget, the second goes on, never to a larger distance."""
    p, _ = case
    model, x, y, ball = p.model, p.x, p.y, p.ball
    first, nearest = (sigma_zero(model, x, y, ball, steps=12, minimise=minimise) for minimise in (False, True))
    for result in (first, nearest):
        assert ball.contains(x, result.x_adv).all()
        assert torch.equal(model(result.x_adv).argmax(1) != y, result.success)
    assert torch.equal(first.success, nearest.success)
    assert (nearest.distance <= first.distance).all()
    assert (first.queries <= nearest.queries).all()


@fewer_cases
@given(problems(), st.sampled_from([0.25, 2.0, 1024.0]))
def test_the_constants_mean_the_same_in_every_box(case: tuple[Problem, Tensor], scale: float) -> None:
    """Rows, box and model stretched by a power of two give the stretched points, to the bit."""
    p, _ = case
    model, x, y, ball = p.model, p.x, p.y, p.ball
    wide = L0Ball(ball.budget, ball.unit, ball.low * scale, ball.high * scale, ball.mutable)

    def stretched(points: Tensor) -> Tensor:
        return model(points / scale)

    one = sigma_zero(model, x, y, ball, steps=8)
    other = sigma_zero(stretched, x * scale, y, wide, steps=8)
    assert torch.equal(one.x_adv * scale, other.x_adv)
    assert torch.equal(one.queries, other.queries)


def test_a_unit_counts_once_with_all_its_channels() -> None:
    change = random(4, 3, 5, seed=0).requires_grad_()
    square = change.square().sum(1)
    (slope,) = torch.autograd.grad((square / (square + 0.1)).mean(1).sum(), change)
    torch.testing.assert_close(sparsity_slope(change.detach(), 0.1), slope)


def test_the_threshold_rises_while_the_model_errs_and_falls_while_it_does_not() -> None:
    model, x, y = linear((80,), 20, 2)
    seen = set()
    with Victim(model, x, y, L0Ball(80), minimal=True) as victim:
        descent = Descent(victim, 0, 1e-3, 0.3, None)
        for _ in range(8):
            before, errs = descent._threshold.flatten(), model(descent._points().flatten(1)).argmax(1) != y
            descent.step(1.0, 0.01)
            assert torch.equal(descent._threshold.flatten() > before, errs)
            seen |= set(errs.tolist())
    assert seen == {True, False}


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
