"""Training on certified bounds: margins that hold and have gradients, objectives, and what they prove."""

from __future__ import annotations

from functools import partial
from itertools import combinations, product
from math import inf
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from certify_cases import Case, attacks, bound, cases, data, few, layers, least_margins, small
from ell0 import L0Ball, certify
from ell0.certify.network import Network
from ell0.certify.reachable import Reachable
from ell0.common import Step
from ell0.nn import InputClamp, TruncatedLinear
from ell0.threat import Unit
from ell0.train import TrainConfig, fit
from ell0.train.config import Precision
from watching import Watch


@few
@given(cases())
def test_margins_for_training_are_the_interval_bound(case: Case) -> None:
    found = certify.margins(case.model, case.x, case.y, case.ball.budget, case.ball)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ell0.certify.certificates.PAIRED", 0)  # as where there are many classes
        torch.testing.assert_close(certify.margins(case.model, case.x, case.y, case.ball.budget, case.ball), found)
    sharp = bound(case, "ibp")[0]
    reach, weight = case.reach, case.network.layer.weight
    exact = reach.any_value and reach.channels == 1 and bool((weight != 0).all()) and bool(reach.moves.all())
    if exact or not isinstance(case.network.layer, TruncatedLinear):
        torch.testing.assert_close(found, sharp)
    else:
        assert (found <= sharp + 1e-9).all()


@layers
@given(cases(kinds=("dense",)), st.integers(0, 9))
def test_quick_bounds_hold_the_exact_ones_and_can_be_learnt_from(case: Case, budget: int) -> None:
    first, reach = case.network.first, case.reach
    low, high = first.quick_interval(reach, budget)
    least, most = first.trainable_interval(reach, min(budget, reach.number_of_units))
    assert ((low <= least + 1e-9) & (most <= high + 1e-9)).all()
    assert all(torch.equal(end, first.value(reach.x)) for end in first.quick_interval(reach, 0))
    quick = certify.margins(case.model, case.x, case.y, case.ball.budget, case.ball, quick=True)
    assert (quick <= least_margins(case, *attacks(case)) + 1e-9).all()
    quick.sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in case.model.parameters())


def test_little_is_lost_by_a_quick_interval() -> None:
    """Of normal weights and rows at random ends of the box, 3% of how far an output moves: a good place for the cut."""
    g = torch.Generator().manual_seed(0)
    first = Network.read(nn.Sequential(nn.Linear(400, 30)).eval(), torch.zeros(1, 400)).first
    first.weight = torch.randn(30, 400, generator=g).requires_grad_()
    x = (torch.rand(20, 400, generator=g) < 0.5).float()
    reach = Reachable.of(x, L0Ball(0, low=0.0, high=1.0), ())
    for budget in (0, 1, 5, 20, 60):
        (low, high), (least, most) = first.quick_interval(reach, budget), first.trainable_interval(reach, budget)
        assert (high - low).mean() <= 1.03 * (most - least).mean()
        (grad,) = torch.autograd.grad((high - low).sum(), first.weight)  # the weights beyond the cut shrink
        assert (grad.ne(0).sum(1) == 2 * budget).all()  # and the one at the cut
        assert (grad * first.weight >= 0).all()


@pytest.mark.parametrize("kind", ["truncated", "truncated in a box", "dense", "dense, pixels"])
def test_margins_have_gradients(kind: str) -> None:
    torch.manual_seed(2)
    unit: Unit = "pixel" if "pixels" in kind else "feature"
    first = nn.Linear(6, 4) if "dense" in kind else TruncatedLinear(6, 4, 1)
    nn.init.uniform_(first.bias, 1.0, 2.0)  # so that the lower ends count, too
    model = nn.Sequential(nn.Flatten(), first, nn.ReLU(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3)).double()
    x, y = torch.randn(3, 2, 3, 1, dtype=torch.float64), torch.tensor([0, 2, 1])
    ball = None if kind == "truncated" else L0Ball(0, unit, low=-1.1, high=1.2)
    budget = 2 if kind == "truncated in a box" else 1
    found = partial(certify.margins, model, x, y, budget, ball)
    assert torch.autograd.gradcheck(lambda *_: found(), tuple(model.parameters()))


@pytest.mark.parametrize(
    ("clamped", "words", "precision"),
    [
        (False, {"mix": 0.7, "power": 0.5}, "fp32"),
        (True, {}, "fp32"),
        *((True, {"quick": True}, of) for of in ("fp32", "bf16")),
    ],
    ids=str,
)
def test_training_on_the_bound_certifies(clamped: bool, words: dict[str, Any], precision: Precision) -> None:
    (x, y), model = data(60), small()
    if clamped:
        model = nn.Sequential(InputClamp(-1, 1), nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3))
    before = certify.accuracy(model.eval(), x, y, [1])[1]
    config = TrainConfig(epochs=60, batch=60, rates=(0.02,), optimizer="adam", precision=precision)
    training = fit(model, (x, y), config, objective=certify.Objective(1, ramp=0.5, **words))
    after = certify.accuracy(model.eval(), x, y, [1])[1]
    assert after > before + 0.3
    # What counts as right is what the bound proves: at the end nearly the certified accuracy, never the clean one.
    assert training.epochs[-1].train_accuracy == pytest.approx(after, abs=0.1)


@pytest.mark.parametrize("budget", [0, 1])
def test_margins_stay_in_the_type_of_x_under_autocast(budget: int) -> None:
    (x, y), model = data(), nn.Sequential(InputClamp(-1, 1), nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3))
    with torch.autocast("cpu", torch.bfloat16):
        assert certify.margins(model, x, y, budget, quick=True).dtype == torch.float32


def test_an_objective_rises_by_whole_changes_and_mixes() -> None:
    objective = certify.Objective(5, mix=0.25, ramp=0.5)
    assert [objective.at(epoch, 8).budget for epoch in range(8)] == [0, 2, 3, 5, 5, 5, 5, 5]
    assert certify.Objective(5, ramp=0).at(0, 8).budget == 5
    assert [certify.Objective(5, ramp=1).at(epochs - 1, epochs).budget for epochs in (1, 2, 9)] == [5, 5, 5]
    assert objective.at(4, 8) == objective.at(7, 8) != objective.at(2, 8)
    assert certify.Objective(5, ramp=0.5, power=0.3).at(2, 8) == certify.Objective(3, ramp=0.0, power=0.3)
    (x, y), model, cross_entropy = data(), small(), nn.functional.cross_entropy
    scores, worst = certify.Objective(2, ramp=0).at(0, 1)(model, x, y)
    assert torch.equal(scores, -certify.margins(model, x, y, 2))
    torch.testing.assert_close(worst, cross_entropy(scores, y))
    mixed = certify.Objective(2, mix=0.25, ramp=0).at(0, 1)(model, x, y)[1]
    torch.testing.assert_close(mixed, 0.75 * cross_entropy(model(x), y) + 0.25 * worst)
    for power in (0.3, 1.0):
        bounded = certify.Objective(2, mix=0.25, ramp=0, power=power).at(0, 1)(model, x, y)[1]
        share = scores.softmax(1)[torch.arange(len(y)), y]
        worst = (1 - share**power).mean() / power
        torch.testing.assert_close(bounded, 0.75 * cross_entropy(model(x), y) + 0.25 * worst)
    plain, images = nn.Sequential(InputClamp(-1, 1), nn.Flatten(), nn.Linear(12, 3)), x.view(-1, 3, 2, 2)
    found = {}
    for unit, quick in product(get_args(Unit), (False, True)):
        found[unit, quick], _ = certify.Objective(2, ramp=0, unit=unit, quick=quick).at(0, 1)(plain, images, y)
        margins = certify.margins(plain, images, y, 2, L0Ball(0, unit, -inf, inf), quick=quick)
        assert torch.equal(found[unit, quick], -margins)
    assert all(not torch.equal(a, b) for a, b in combinations(found.values(), 2))


@pytest.mark.parametrize("power", [0.7, 1.0])
def test_a_bounded_loss_is_bounded_and_has_a_gradient_however_far_the_bound_is(power: float) -> None:
    """p^power itself has none that is finite once p is 0."""
    for scale in (1.0, 1e3, 1e6):
        (x, y), last = data(), nn.Linear(16, 3)
        model = nn.Sequential(InputClamp(-1, 1), nn.Linear(12, 16), nn.ReLU(), last)
        with torch.no_grad():
            last.weight.mul_(scale)
        loss = certify.Objective(4, ramp=0, quick=True, power=power)(model, x, y)[1]
        loss.backward()
        assert 0 < loss <= 1 / power
        assert all(each.grad is not None and each.grad.isfinite().all() for each in model.parameters())


@pytest.mark.parametrize("unit", ["feature", "pixel"])
def test_a_step_on_the_bound_asks_the_host_for_nothing(unit: Any) -> None:
    torch.manual_seed(0)
    x, y = torch.rand(4, 3, 4, 4), torch.arange(4)
    flat = nn.Sequential(InputClamp(0, 1), nn.Flatten(), nn.Linear(48, 8), nn.ReLU(), nn.Linear(8, 4))
    trimmed = nn.Sequential(nn.Flatten(), TruncatedLinear(48, 8, 9), nn.ReLU(), nn.Linear(8, 4))
    for model, quick in ((flat, False), (flat, True), (trimmed, False)):
        with Watch() as watch:
            certify.Objective(2, ramp=0, unit=unit, quick=quick, power=0.5).at(0, 1)(model, x, y)[1].backward()
        assert not watch.seen
    with Watch() as watch:
        bool(torch.tensor(1.0) > x[0, 0, 0, 0])
    assert watch.seen


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"budget": -1}, "budget must be an int >= 0, got -1"),
        ({"budget": 2, "mix": 0.0}, r"mix must lie in \(0, 1\], got 0.0"),
        ({"budget": 2, "ramp": -0.1}, r"ramp must lie in \[0, 1\], got -0.1"),
        *(({"budget": 2, "power": p}, rf"power must be 0 or lie in \[0.001, 1\], got {p}") for p in (-0.1, 1e-9, 1.1)),
        ({"budget": 2, "unit": "row"}, 'unit must be "feature" or "pixel", got \'row\''),
        ({"budget": 2, "quick": 1}, "quick must be True or False, got 1"),
    ],
)
def test_an_objective_complains(words: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        certify.Objective(**words)


def test_a_model_without_the_bound_is_refused_before_an_epoch_is_spent() -> None:
    (x, y), model = data(), small()
    with pytest.raises(ValueError, match="no certificate exists"):
        fit(model, (x, y), TrainConfig(epochs=5), objective=certify.Objective(4))
    with pytest.raises(ValueError, match="quick must be False unless the first layer is a plain Linear"):
        fit(model, (x, y), TrainConfig(epochs=5), objective=certify.Objective(1, quick=True))
    with pytest.raises(ValueError, match=r"y must be \(40,\), a label for each row of x, got"):
        certify.margins(model, x, y[:5], 1)
    with pytest.raises(ValueError, match='precision must not be "bf16" with an objective'):
        fit(model, (x, y), TrainConfig(epochs=5, precision="bf16"), objective=certify.Objective(1))


def test_training_on_the_bound_resumes(tmp_path: Path) -> None:
    (x, y), config = data(60), TrainConfig(epochs=6, batch=16, rates=(0.02,), optimizer="adam")
    objective, whole, again = certify.Objective(2, ramp=0.5), small(), small()
    fit(whole, (x, y), config, objective=objective)

    def stop(step: Step) -> None:
        if step.what == "epoch" and step.done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(small(), (x, y), config, objective=objective, out=tmp_path, progress=stop)
    fit(again, (x, y), config, objective=objective, out=tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))
