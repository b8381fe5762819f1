"""Pointwise: what it leaves changed is needed, unit by unit, and it asks little."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor

from balls import within_one
from ell0 import L0Ball
from ell0.attacks.contract import Victim
from ell0.attacks.draws import Draws
from ell0.attacks.pointwise import Rule, pointwise, pointwise_counts, reset_units
from ell0.threat import Unit
from oracle import Sums, network, optimum, random

cases = settings(max_examples=min(500, settings().max_examples // 2))
Errs = Callable[[Tensor], Tensor]


class Waves:
    """A model in which a change may help or harm, as others stand: few of its sets of changed units are nested."""

    def __init__(self, features: int) -> None:
        self._sums = Sums(features, 3).requires_grad_(False)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.sin(6 * self._sums(x))


@st.composite
def problems(draw: st.DrawFn) -> tuple[Any, Tensor, Tensor, L0Ball, Tensor | None]:
    """A model, rows, labels, a ball that lets every unit change, and perhaps targets."""
    unit: Unit = draw(st.sampled_from(["feature", "pixel"]))
    shape = draw(st.sampled_from([(1, 2, 4), (3, 2, 3)] + ([(9,)] if unit == "feature" else [])))
    features = math.prod(shape)
    models: list[Any] = [Sums(features, 3), network(features), Waves(features)]
    model = draw(st.sampled_from(models))
    seed = draw(st.integers(0, 1000))
    x = random(draw(st.integers(1, 4)), *shape, seed=seed).clamp(-1.2, 1.2)  # some outside the box
    y = model(x).argmax(1)
    mutable = random(*shape, seed=seed + 1) > -0.5 if draw(st.booleans()) else None
    low = random(*shape, seed=seed + 2).clamp(-1, 0) if draw(st.booleans()) else -1.0
    ball = L0Ball(features if unit == "feature" else features // shape[0], unit, low, 1.0, mutable)
    return model, x, y, ball, (y + 1) % 3 if draw(st.booleans()) else None


def criterion(model: Any, y: Tensor, target: Tensor | None) -> Errs:
    def errs(x: Tensor) -> Tensor:
        given: Tensor = model(x).argmax(1)
        return given != y if target is None else given == target

    return errs


def resets(x: Tensor, x_adv: Tensor, unit: Unit) -> list[tuple[Tensor, Tensor]]:
    """For each unit: the rows in which it is changed, and all rows with that unit as in x."""
    shape = x.shape[2 if unit == "pixel" else 1 :]
    masks = [(torch.arange(shape.numel()) == number).view(shape) for number in range(shape.numel())]
    return [(((x != x_adv) & mask).flatten(1).any(1), torch.where(mask, x, x_adv)) for mask in masks]


@cases
@given(problems(), st.integers(0, 4), st.sampled_from(get_args(Rule)))
def test_no_single_reset_keeps_a_result_adversarial_and_the_budget_only_judges(
    problem: tuple[Any, Tensor, Tensor, L0Ball, Tensor | None], budget: int, rule: Rule
) -> None:
    model, x, y, ball, target = problem
    result = pointwise(model, x, y, ball, repeats=3, rule=rule, target=target)
    errs = criterion(model, y, target)
    assert torch.equal(errs(result.x_adv), result.success)
    for changed, back in resets(x, result.x_adv, ball.unit):
        assert not (errs(back) & changed & result.success).any()
    low, high, _ = ball.box(x)
    moved = result.x_adv != x
    assert (moved <= ((result.x_adv == low) | (result.x_adv == high))).all()
    held = pointwise(model, x, y, replace(ball, budget=budget), repeats=3, rule=rule, target=target)
    within = result.success & (result.distance <= budget)
    assert torch.equal(held.success, within)
    assert torch.equal(held.x_adv[within], result.x_adv[within])


def test_no_single_reset_after_many_rounds() -> None:
    """Here a unit that had to stay may often go back once others have."""
    model = Waves(80)
    x = random(60, 80, seed=4).clamp(-1, 1)
    y = model(x).argmax(1)
    target = (y + 1) % 3
    with Victim(model, x, y, within_one(80), target=target, minimal=True) as victim:
        noisy = random(60, 1, 80, seed=5).sign()
        at = victim.errs(noisy[:, 0], torch.arange(60)).nonzero().squeeze(1)
        order = random(len(at), 80, seed=6).argsort(dim=1)
        left = reset_units(victim, at, noisy[at], order, "test")[:, 0]
    assert len(at) >= 10
    errs = criterion(model, y[at], target[at])
    assert errs(left).all()
    for changed, back in resets(x[at], left, "feature"):
        # A row that is broken with one unit is done, whatever else may go back.
        assert not (errs(back) & changed & (victim.distance[at] > 1)).any()


@pytest.mark.parametrize(("unit", "shape"), [("feature", (120,)), ("pixel", (3, 10, 12))])
def test_it_comes_near_the_optimum_of_a_linear_model(unit: Unit, shape: tuple[int, ...]) -> None:
    model = Sums(math.prod(shape), 4)
    x = random(40, *shape, seed=3).clamp(-0.9, 0.9)
    y = model(x).argmax(1)
    ball = within_one(120, unit)
    result = pointwise(model, x, y, ball)
    best = optimum(model, x, y, ball)
    assert result.success.all()
    assert (result.distance >= best).all()
    assert result.distance.double().mean() <= 1.6 * best.double().mean()


def test_a_run_asks_tens_of_queries() -> None:
    model = Sums(784, 10)
    x = random(20, 784, seed=5).clamp(-1, 1)
    result = pointwise(model, x, model(x).argmax(1), within_one(784), repeats=4)
    assert result.success.all()
    assert result.queries.double().mean() <= 4 * 100


def test_uneven_noise_is_tried() -> None:
    """Half salt and half pepper leave the mean where it is, and the model stands."""

    def model(x: Tensor) -> Tensor:
        return torch.stack([torch.full_like(x[:, 0], 0.5), x.mean(1)], 1)

    x = torch.zeros(16, 100)
    result = pointwise(model, x, torch.zeros(16, dtype=torch.int64), within_one(100))
    assert result.success.all()
    assert (result.distance == 51).all()


def test_units_go_back_in_the_order_given() -> None:
    """Any two changed units make this model err: the two that come last in the order are left."""

    def model(x: Tensor) -> Tensor:
        return torch.stack([torch.full_like(x[:, 0], 1.5), x.sum(1)], 1)

    x, y = torch.zeros(3, 500), torch.zeros(3, dtype=torch.int64)
    order = torch.stack([torch.randperm(500, generator=Generator().manual_seed(i)) for i in range(6)])
    at = torch.tensor([0, 1, 2, 0, 1, 2])
    with Victim(model, x, y, within_one(500), minimal=True) as victim:
        left = reset_units(victim, at, torch.ones(6, 1, 500), order, "test")
        assert torch.equal(victim.distance, torch.full((3,), 2))
        assert (victim.queries <= 2 * 40).all()  # blocks double, and are bisected
    for points, units in zip(left[:, 0], order, strict=True):
        assert points.nonzero().squeeze(1).tolist() == sorted(units[-2:].tolist())


def watched(model: Any, asked: list[Tensor]) -> Any:
    def ask(x: Tensor) -> Tensor:
        asked.append(x)
        answer: Tensor = model(x)
        return answer

    return ask


def test_foolbox_draws_noise_for_a_position_and_takes_back_single_numbers() -> None:
    """One channel is not looked at: its numbers go back, and those of the others stay."""

    def model(x: Tensor) -> Tensor:
        return torch.stack([torch.full_like(x[:, 0, 0, 0], 1.5), x[:, :2].abs().flatten(1).sum(1)], 1)

    x, y, asked = torch.zeros(5, 3, 4, 5), torch.zeros(5, dtype=torch.int64), list[Tensor]()
    result = pointwise(watched(model, asked), x, y, within_one(60), repeats=2, rule="foolbox")
    assert (result.distance == 2).all()
    assert (result.x_adv[:, 2] == 0).all()
    # The clean check comes first, then noise that begins with few positions.
    noises = [points for points in asked[1:] if (points == points[:, :1]).all()]
    assert 3 <= len(noises) < len(asked) - 4
    assert 0 < noises[0].abs().mean() < 0.4
    flat = pointwise(watched(model, asked := []), x, y, within_one(60), repeats=2, rule="foolbox-flat")
    assert (flat.distance == 2).all()
    assert asked[1].flatten(1).abs().min() == 1
    assert len(asked[1].flatten(1).unique(dim=0)) == 2  # white and black


def test_foolbox_raises_later_noise_to_1_2_times_the_level_that_broke_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The noise is even: a share q of 100 positions at level q, of which 30 break the row."""
    even = (torch.arange(100, dtype=torch.float64) + 0.25) / 100
    monkeypatch.setattr(Draws, "uniform", lambda _, at, *__: even.expand(len(at), -1))

    def model(x: Tensor) -> Tensor:
        return torch.stack([torch.full((len(x),), 29.5), x.abs().flatten(1).sum(1)], 1)

    x, y = torch.zeros(1, 1, 10, 10), torch.zeros(1, dtype=torch.int64)
    result = pointwise(model, x, y, within_one(100), repeats=1, rule="foolbox")
    # Levels 0.01 to 0.3; nine times 0.0072 to 0.2916, in steps of 0.0036; then each unit that cannot go back.
    assert result.queries.tolist() == [30 + 9 * 80 + 30]


def test_foolbox_takes_back_one_unit_a_query() -> None:
    model = Sums(200, 4)
    x = random(6, 200, seed=5).clamp(-1, 1)
    asked = list[Tensor]()
    pointwise(watched(model, asked), x, model(x).argmax(1), within_one(200), repeats=1, rule="foolbox-flat")
    counts = torch.stack([(points != x).sum(1) for points in asked[1:-1] if len(points) == 6])[10:]  # noise is first
    assert len(counts) > 150
    assert (counts[1:] - counts[:-1]).abs().max() == 1


def test_other_counts_are_the_least_above_zero_of_all_runs() -> None:
    """Any number that rises or falls breaks this model, so every run ends with one; half of them fall."""

    def model(x: Tensor) -> Tensor:
        return torch.stack([torch.full_like(x[:, 0], 0.5), x.abs().sum(1)], 1)

    def fallen(x: Tensor, x_adv: Tensor) -> Tensor:
        return (x_adv < x).sum(1)

    def place(x: Tensor, x_adv: Tensor) -> Tensor:
        return (x_adv != x).float().argmax(1)

    x = torch.cat([torch.zeros(40, 30), torch.ones(1, 30)])
    y = torch.zeros(41, dtype=torch.int64)
    shares = []
    for repeats in (1, 6):
        result, counts = pointwise_counts(model, x, y, within_one(30), (fallen, place), repeats=repeats, rule="foolbox")
        assert (result.distance[:40] == 1).all()
        assert set(counts[:40, 0].tolist()) <= {1, -1}
        assert counts[40].tolist() == [-1, -1]  # misclassified from the start: no run
        shares.append((counts[:40, 0] == 1).double().mean())
    assert 0.25 < shares[0] < 0.75
    assert shares[1] > 0.9
    # The least of six places of 30, not that of one run.
    assert counts[:40, 1].double().mean() < 8


def test_distances_are_those_of_foolbox() -> None:
    foolbox = pytest.importorskip("foolbox", reason="foolbox is not installed: pip install foolbox==3.3.4")
    net = network(300)
    x = random(100, 3, 10, 10, seed=1).clamp(-1, 1)
    y = net(x).argmax(1)
    with torch.no_grad():
        attacked = foolbox.PyTorchModel(net, bounds=(-1, 1), device="cpu")
        criterion = foolbox.criteria.Misclassification(y)
        theirs = foolbox.attacks.PointwiseAttack(l2_binary_search=False).run(attacked, x, criterion)
    counted = (theirs != x).flatten(1).sum(1).double()
    ours = pointwise(net, x, y, within_one(300), repeats=1, rule="foolbox").distance.double()
    assert float(ours.mean()) == pytest.approx(float(counted.mean()), rel=0.2)
