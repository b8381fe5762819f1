"""sigma-zero: near the optimum where it is known, the same in every box, exactly inside it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from balls import within_one
from ell0 import L0Ball
from ell0.attacks.contract import Victim
from ell0.attacks.sigma_zero import Descent, sigma_zero, sparsity_slope
from ell0.certify import PartVote
from ell0.threat import Unit
from oracle import Sums, optimum, random
from test_attacks import LINEAR, Problem, linear, problems

cases = settings(max_examples=min(500, settings().max_examples // 2))


@pytest.mark.parametrize(("unit", "shape"), LINEAR)
def test_the_median_comes_within_a_quarter_of_the_optimum(unit: Unit, shape: tuple[int, ...]) -> None:
    model, x, y = linear(shape, 60, 2)
    ball = within_one(40, unit)
    best = optimum(model, x, y, ball)
    result = sigma_zero(model, x, y, ball, minimise=True)
    assert result.success.all()
    assert (result.distance >= best).all()
    assert (result.distance / best).median() <= 1.25


@cases
@given(problems(), st.sampled_from([0.25, 2.0, 1024.0]))
def test_modes_and_boxes(case: tuple[Problem, Tensor], scale: float) -> None:
    p, _ = case
    model, x, y, ball = p.model, p.x, p.y, p.ball
    first, nearest = (sigma_zero(model, x, y, ball, steps=12, minimise=minimise) for minimise in (False, True))
    whole = ball.budget == x.shape[1 if ball.unit == "feature" else 2 :].numel()
    usual = sigma_zero(model, x, y, ball, steps=12)
    assert torch.equal(usual.x_adv, (nearest if whole else first).x_adv)
    # The first stops a row within the budget, the second goes on, never to a larger distance.
    assert torch.equal(first.success, nearest.success)
    assert (nearest.distance <= first.distance).all()
    assert (first.queries <= nearest.queries).all()

    if isinstance(model, PartVote):
        return  # behind a function its surrogate gradient is out of sight

    def stretched(points: Tensor) -> Tensor:
        return model(points / scale)

    # Rows, box and model stretched by a power of two give the stretched points, to the bit.
    wide = L0Ball(ball.budget, ball.unit, ball.low * scale, ball.high * scale, ball.mutable)
    other = sigma_zero(stretched, x * scale, y, wide, steps=12, minimise=False)
    assert torch.equal(first.x_adv * scale, other.x_adv)
    assert torch.equal(first.queries, other.queries)


def test_a_unit_counts_once_with_all_its_channels() -> None:
    change = random(4, 3, 5, seed=0).requires_grad_()
    square = change.square().sum(1)
    (slope,) = torch.autograd.grad((square / (square + 0.1)).mean(1).sum(), change)
    torch.testing.assert_close(sparsity_slope(change.detach(), 0.1), slope)


def test_a_small_change_stays_beside_a_large_one_of_its_pixel() -> None:
    model, x = Sums(60, 4, 0), torch.tensor([0.9, -0.9, 0.0]).view(1, 3, 1, 1).expand(4, 3, 4, 5).contiguous()
    with Victim(model, x, model(x).argmax(1), within_one(5, "pixel"), minimal=True) as victim:
        (descent := Descent(victim, 1)).step(1.0, 1.0)
    assert ((descent.change != 0) == (descent.change != 0).any(1, keepdim=True)).all()
    assert (descent.change.abs() < descent.threshold).any()


def test_the_threshold_rises_while_the_model_errs_and_falls_while_it_does_not() -> None:
    model, x, y = linear((80,), 20, 2)
    seen = set()
    with Victim(model, x, y, within_one(80), minimal=True) as victim:
        descent = Descent(victim, 0)
        for _ in range(8):
            before, errs = descent.threshold.flatten(), model(descent.points().flatten(1)).argmax(1) != y
            descent.step(1.0, 1.0)
            torch.testing.assert_close(descent.threshold.flatten(), before + torch.where(errs, 0.01, -0.01))
            seen |= set(errs.tolist())
    assert seen == {True, False}


def test_a_box_may_be_one_point_away_from_x() -> None:
    """Features that can only be switched on: 0 becomes 1."""
    model, x, ball = Sums(60, 2), torch.zeros(1, 60), L0Ball(60, low=1.0, high=1.0)
    y = model(x).argmax(1)
    result = sigma_zero(model, x, y, ball, minimise=True)
    assert result.success.all()
    assert result.distance.item() == optimum(model, x.double(), y, ball).item()


def test_the_last_step_is_looked_at() -> None:
    """The first step breaks this row, and there is no second to find it out."""
    model, x = Sums(20, 2), random(1, 20, seed=1).clamp(-1, 1)
    result = sigma_zero(model, x, model(x).argmax(1), within_one(20), steps=1, minimise=False)
    assert result.success.all()
    assert result.queries.item() == 3
