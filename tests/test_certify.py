"""Certificates: never above brute force, exact where they say so, and never a number where there is none."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, product
from math import inf
from typing import Any, cast
from unittest import mock

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import ell0
from balls import within_one
from certify_cases import Case, add_up, attacks, bound, cases, data, few, layers, least_margins, numbers, sets, small
from ell0 import L0Ball, certify, models
from ell0.certify import propagate
from ell0.certify.certificates import climb
from ell0.certify.first_layer import slack
from ell0.certify.propagate import Bounder, Method, margin_goals, rounding
from ell0.certify.reachable import Reachable
from ell0.certify.truncated import Truncated
from ell0.common import Step
from ell0.nn import InputClamp, InputScale, InputTruncation, TruncatedLinear

FULL = os.environ.get("HYPOTHESIS_PROFILE") == "full"
networks = settings(max_examples=10_000 if FULL else 300)
METHODS: tuple[Method, ...] = ("ibp", "best")


@networks
@given(cases())
def test_no_point_of_the_ball_beats_a_bound(case: Case) -> None:
    points, rows = attacks(case)
    # The better of both routes is below what is reached if, and only if, each of them is.
    assert (bound(case, "best")[0] <= least_margins(case, points, rows) + 1e-9).all()
    lower, upper = certify.bounds(case.model, case.x, case.ball)
    logits = case.model(points)
    assert ((lower[rows] <= logits) & (logits <= upper[rows])).all()


# The first layer


def enumerated(case: Case) -> tuple[Tensor, Tensor]:
    """The least and the largest value of each output of the first layer over all sets of changed units: ``(n, h)``.

    The layer rises with each of its terms, so a changed one goes to its end; any value is a very large one.
    """
    reach, layer = case.reach, case.network.layer
    masks = sets(case).unsqueeze(1)
    low, high = reach.low.clamp(min=-1e9), reach.high.clamp(max=1e9)
    found = []
    for x, *ends in zip(reach.x, low, high, strict=True):
        least, most = torch.minimum(*(e * layer.weight for e in ends)), torch.maximum(*(e * layer.weight for e in ends))
        found.append([add_up(layer, torch.where(masks, end, x * layer.weight)) for end in (least, most)])
    bias = 0 if layer.bias is None else layer.bias
    return torch.stack([a.amin(0) for a, _ in found]) + bias, torch.stack([b.amax(0) for _, b in found]) + bias


@layers
@given(cases())
def test_intervals_of_the_first_layer(case: Case) -> None:
    reach, weight = case.reach, case.network.layer.weight
    low, high = (end.squeeze(1) for end in case.network.first.interval(reach, case.budgets(1)))
    least, most = enumerated(case)
    assert (low <= least + 1e-9).all()
    assert (most <= high + 1e-9).all()
    free = bool((weight != 0).all()) and bool(reach.moves.all()) and reach.channels == 1
    one = case.ball.budget * reach.channels <= 1 and not reach.any_value
    if not isinstance(case.network.layer, TruncatedLinear) or one or (reach.any_value and free):
        torch.testing.assert_close(low, least)
        torch.testing.assert_close(high, most)


@few
@given(cases())
def test_many_budgets_are_swept_as_one_by_one(case: Case) -> None:
    first, reach, most = case.network.first, case.reach, case.ball.budget
    assume(first.sweeps(reach))
    swept = first.interval(reach, torch.arange(most + 1).expand(len(case.x), -1))
    for budget in range(most + 1):
        alone = first.interval(reach, torch.full((len(case.x), 1), budget))
        for together, single in zip(swept, alone, strict=True):
            torch.testing.assert_close(together[:, budget], single.squeeze(1))


@layers
@given(cases())
def test_all_outputs_see_the_same_changes(case: Case) -> None:
    """A head on the first layer falls by no more than `drop`, whatever ends the changed numbers go to."""
    network, reach = case.network, case.reach
    head = numbers(case.generator, len(case.x), 2, len(network.layer.weight))
    drop = network.first.drop(reach, case.budgets(), head)
    masks = sets(case)
    corners = torch.rand(8, 1, masks.shape[1], generator=case.generator) < 0.5
    for row in range(len(case.x)):
        low, high = reach.low[row].clamp(min=-1e9), reach.high[row].clamp(max=1e9)
        points = torch.where(masks, torch.where(corners, low, high), reach.x[row]).flatten(0, 1)
        reached = (add_up(case.network.layer, points.unsqueeze(1) * network.layer.weight) @ head[row].T).amin(0)
        now = add_up(case.network.layer, reach.x[row] * network.layer.weight) @ head[row].T
        assert (now - drop[row] <= reached + 1e-6 * (1 + reached.abs())).all()


@layers
@given(cases(kinds=("dense",)))
def test_the_joint_bound_of_a_plain_layer_is_attained(case: Case) -> None:
    reach, weight = case.reach, case.network.layer.weight
    head = numbers(case.generator, len(case.x), 1, len(weight))
    drop = case.network.first.drop(reach, case.budgets(), head)
    slope = (head @ weight).squeeze(1)
    moved = torch.where(slope > 0, reach.low, reach.high)
    fall = reach.units(slope * (reach.x - moved))
    chosen = torch.zeros_like(fall).scatter(1, fall.topk(case.ball.budget).indices, 1.0).bool()
    x_adv = torch.where(chosen.repeat(1, reach.channels), moved, reach.x)
    torch.testing.assert_close((slope * (reach.x - x_adv)).sum(1), drop.squeeze(1).squeeze(-1))


# What predicts is float32


@layers
@given(cases(), st.sampled_from([1.0, 1e3]))
def test_rounding_stays_within_the_slack(case: Case, scale: float) -> None:
    last = case.model[-1]
    assert isinstance(last, nn.Linear)
    last.bias = nn.Parameter(last.weight.detach()[:, 0] * scale)
    case = case.single()
    points, rows = attacks(case)
    exact, rounded = least_margins(case, points.double(), rows), least_margins(case, points, rows).double()
    slack = bound(case, "ibp")[1]
    assert ((exact - rounded).abs() <= slack).all()
    assert (slack[case.y[:, None] != torch.arange(slack.shape[1])] > 0).all()


@layers
@given(cases(), st.sampled_from([0.01, 0.2]))
def test_errors_of_the_first_layer_stay_within_the_slack(case: Case, error: float) -> None:
    bounder = Bounder(case.network)
    goals = margin_goals(case.y, case.model(case.x).shape[1])
    with torch.no_grad():
        outputs, head = bounder.first.value(case.reach.x), nn.Sequential(*case.network.head)
        errors = torch.full_like(outputs[:1, None], error)
        with mock.patch.object(type(bounder.first), "rounding", return_value=errors):
            slack = bounder.at(case.reach, case.budgets(1), goals, "ibp")[1].squeeze(1)
        for signs in product((-error, error), repeat=outputs.shape[1]):
            moved = head(outputs + torch.tensor(signs, dtype=outputs.dtype)) - head(outputs)
            assert ((goals @ moved.unsqueeze(-1)).squeeze(-1).abs() <= slack + 1e-9).all()


def test_rounding_has_no_bound_beyond_float32_and_grows_with_long_sums() -> None:
    sums = torch.tensor([1.0, 1e30, 3.5e38], dtype=torch.float64)
    found = slack(1e-6, 10, sums)
    assert found[:2].tolist() == pytest.approx([1e-6, 1e24])
    assert found[2] == inf
    assert float(slack(0.0, 10, torch.zeros(1, dtype=torch.float64))) == 12 * torch.finfo(torch.float32).tiny
    norm, zeros = nn.BatchNorm1d(1).eval(), torch.zeros(1, 1)
    nn.init.constant_(norm.running_mean, 1e6)  # type: ignore[arg-type]
    assert rounding([norm], [(zeros, zeros)], zeros) > 1e6 * 2**-24  # it is rounded before it is subtracted
    for d, share in ((100_000, 1e-4), (1_000, 2e-5)):
        reach = Reachable.of(torch.ones(1, d), L0Ball(1, low=-inf, high=inf), ())
        got = Truncated(torch.ones(1, d, dtype=torch.float64), None, 2).rounding(reach, torch.ones(1, 1))
        assert float(got) == pytest.approx(share * d)


def test_a_pixel_rounds_as_its_channels_do() -> None:
    # Three changed numbers of size 100, more than k = 2: one of them stays in the sum.
    first, x = Truncated(torch.ones(1, 12, dtype=torch.float64), None, 2), torch.zeros(1, 3, 2, 2)
    for ball in (L0Ball(3, low=-100.0, high=100.0), L0Ball(1, "pixel", low=-100.0, high=100.0)):
        found = first.rounding(Reachable.of(x, ball, ()), torch.tensor([[ball.budget]]))
        assert float(found) == pytest.approx(2e-5 * 300)


@few
@given(st.integers(0, 2**31), st.sampled_from([1e-22, 1e-3, 1e3, 1e19]))
def test_a_certified_row_stands_in_float32_at_any_scale(seed: int, scale: float) -> None:
    """Sums that nearly vanish, overflow or are dwarfed by a batch norm's mean: what is proven holds for the model."""
    g = torch.Generator().manual_seed(seed)
    first, norm, last = TruncatedLinear(7, 6, 2), nn.BatchNorm1d(6), nn.Linear(6, 2)
    assert norm.running_mean is not None
    norm.running_mean.copy_(torch.randn(6, generator=g) * 1e3)
    model = nn.Sequential(first, norm, nn.ReLU(), last).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=g))
        first.weight.mul_(scale)
        norm.running_mean.mul_(scale)
        last.weight.mul_(min(1 / scale, 3e38) if seed % 2 else 1.0)
        x = torch.randn(12, 7, generator=g) * (scale if seed % 3 else 1.0)
        y = model(x).argmax(1)
        radii = certify.radius(model, x, y)
        for values in (torch.tensor([-1.0, 1.0]) * scale, torch.tensor([-3e38, 3e38]), torch.randn(2, generator=g)):
            for where in combinations(range(7), 2):
                moved = x.clone()
                moved[:, list(where)] = values
                assert (model(moved).argmax(1) == y)[radii >= 2].all()


# The radius


@few
@given(cases(), st.sampled_from(METHODS))
def test_the_radius_is_the_largest_proven_budget_and_no_attack_beats_it(case: Case, method: Method) -> None:
    case = case.single()
    radius = certify.radius(case.model, case.x, case.y, case.ball, method=method, batch=1)
    largest = torch.zeros_like(radius)
    for budget in range(1, case.ball.budget + 1):
        here = replace(case, ball=replace(case.ball, budget=budget))
        found, slack = bound(here, method)
        largest[((found > slack) | (case.y[:, None] == torch.arange(found.shape[1]))).all(1)] = budget
        points, rows = attacks(here)
        assert (case.model(points).argmax(1) == case.y[rows])[radius[rows] >= budget].all()
    assert torch.equal(radius, largest)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=5), st.integers(0, 40))
def test_climbing_finds_the_last_budget_that_holds(rows: list[tuple[int, int]], cap: int) -> None:
    best, truth = (torch.tensor(column).clamp(max=cap) for column in zip(*rows, strict=True))
    truth = torch.maximum(best, truth)
    found = climb(lambda at, budgets: budgets <= truth[at], best, cap)
    assert torch.equal(found, truth)


def test_accuracy_is_the_share_of_rows_with_the_radius_and_wrong_rows_have_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (x, _), model, done = data(), small(), list[Step]()
    y = model(x).argmax(1)
    y[::4] = (y[::4] + 1) % 3
    radius = certify.radius(model, x, y)
    assert torch.equal(radius == -1, torch.arange(40) % 4 == 0)
    assert set(radius.tolist()) >= {-1, 0, 1}
    assert (radius.dtype, certify.certifier(model).limit(x, L0Ball(0, low=-inf, high=inf))) == (torch.int64, 3)
    assert torch.equal(radius, certify.radius(model, x, y, batch=7))
    assert torch.equal(radius, certify.radius(model, x.double().numpy(), y.numpy()))
    shares = certify.accuracy(model, x, y, [2, 0, 1], batch=16, progress=done.append)
    assert list(shares) == [2, 0, 1]
    assert all(math.isclose(share, float((radius >= budget).double().mean())) for budget, share in shares.items())
    assert (shares[0].n, shares[0] > shares[0].low) == (40, True)
    assert done == [Step("rows certified", rows, 40) for rows in (16, 32, 40)]
    monkeypatch.setitem(propagate.ROOM, "cpu", 7 * 3 * 8)
    done.clear()
    assert torch.equal(certify.radius(model, x, y, progress=done.append), radius)
    assert [step.done for step in done] == [7, 14, 21, 28, 35, 40]


def test_a_network_without_a_certificate_is_told_what_to_write() -> None:
    x, y = torch.rand(3, 1, 8, 8), torch.zeros(3, dtype=torch.int64)
    cnn = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 10)).eval()
    with pytest.raises(ValueError, match="before any of them; a vote of parts has") as raised:
        certify.accuracy(cnn, x, y, [1])
    names: dict[str, Any] = {"ell0": ell0, "x": x}
    exec(str(raised.value).split(" whatever its network is: ")[1], names)
    assert set(certify.accuracy(names["model"].eval(), x, y, [1])) == {1}


def test_lines_prove_more_than_intervals() -> None:
    x, ball = data()[0].double(), L0Ball(1, low=-inf, high=inf)
    for seed in range(3):
        torch.manual_seed(seed)
        model = nn.Sequential(TruncatedLinear(12, 30, 3), nn.ReLU(), nn.Linear(30, 2)).double().eval()
        ibp, best = (certify.bounds(model, x, ball, method=method) for method in METHODS)
        assert (best[1] - best[0]).mean() < 0.9 * (ibp[1] - ibp[0]).mean()
        assert (best[0] >= ibp[0]).all()
        assert (best[1] <= ibp[1]).all()


def test_clamps_and_boxes() -> None:
    """A clamp turns any value into a box, in which a truncated layer may bound more than k changes."""

    def template(layer: nn.Linear) -> nn.Sequential:
        layer.load_state_dict({"weight": torch.eye(3).repeat(1, 4), "bias": torch.zeros(3)})
        return nn.Sequential(layer).eval()

    (x, y), plain = data(), template(nn.Linear(12, 3))
    boxed = certify.radius(plain, x.clamp(-1.5, 1.5), y, L0Ball(12, low=-1.5, high=1.5))
    clamped = nn.Sequential(InputClamp(-1.5, 1.5), nn.Dropout(), plain).eval()
    assert torch.equal(certify.radius(clamped, x, y), boxed)
    assert boxed.max() == 1
    truncated = template(TruncatedLinear(12, 3, 1))
    assert certify.radius(truncated, x, y, L0Ball(12, low=0.0, high=1.0)).max() == 2
    assert certify.radius(truncated, x, y).max() == 1


def test_rows_of_radii() -> None:
    radii = torch.tensor([-1, 0, 0, 2, 3])
    *shares, median = certify.rows(radii, [0, 1, 3], classifier="F")
    assert [(row["budget"], row["value"], row["n"]) for row in shares] == [(0, 0.8, 5), (1, 0.4, 5), (3, 0.2, 5)]
    assert {row["what"] for row in shares} == {"certified_accuracy"}
    assert (median["what"], median["value"], median["classifier"]) == ("certified_radius", 0, "F")


# Never a number where there is none


class Own(nn.Linear):
    """A subclass, which may compute something else, as the next one."""


class Backwards(InputScale): ...


def with_hook() -> nn.Module:
    model = small()
    model[1].register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: small().train(), "eval mode"),
        (lambda: nn.Sequential(nn.BatchNorm1d(12), *small()).eval(), r"layer '0' \(BatchNorm1d\) before any"),
        (lambda: nn.Sequential(InputTruncation(12, 2), nn.Linear(12, 3)).eval(), r"'0' \(InputTruncation\)"),
        (lambda: nn.Sequential(nn.Linear(12, 12), *small()).eval(), r"behind its first layer, got layer '1'"),
        (lambda: nn.Sequential(small()[0], nn.Sigmoid(), nn.Linear(8, 3)).eval(), r"layer '1' \(Sigmoid\)"),
        (lambda: nn.Sequential(small()[0], nn.ReLU(), nn.Sequential(Own(8, 3))).eval(), r"layer '2.0' \(Own\)"),
        (lambda: nn.Sequential(nn.Flatten()).eval(), "got none"),
        (lambda: nn.Sequential(nn.Linear(12, 3)).eval(), "no certificate exists: a plain Linear"),
        (lambda: nn.Sequential(TruncatedLinear(12, 3, 0)).eval(), "no certificate exists: a plain Linear"),
        (lambda: nn.Sequential(Backwards(), *small()).eval(), r"layer '0' \(Backwards\) before any"),
        (lambda: small(dtype=torch.float64), "dtype and device"),
        (lambda: nn.Sequential(TruncatedLinear(13, 3, 2)).eval(), "13 numbers a row"),
        (lambda: nn.Sequential(*small(), nn.Flatten(0)).eval(), "flatten whole rows"),
        (with_hook, "hooks"),
    ],
)
def test_models_without_a_certificate_are_refused(model: Callable[[], nn.Module], message: str) -> None:
    x, y = data()
    with pytest.raises(ValueError, match=message):
        certify.radius(model(), x, y)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, x, y: certify.radius(m, x, y, max_budget=4), "for budget=4.*k=3, bounds at most 3 changed features"),
        (lambda m, x, y: certify.radius(m, x, y, within_one(4, low=-inf)), "no certificate exists"),
        (lambda m, x, _: certify.bounds(m, x, within_one(4, high=inf)), "no certificate exists"),
        (lambda m, x, y: certify.margins(m, x, y, 4), "no certificate exists"),
        (lambda m, x, y: certify.radius(m, x, y, method=cast(Any, "worst")), 'method must be "best" or "ibp", got'),
        (lambda m, x, y: certify.radius(m, x * inf, y), "finite numbers"),
        (lambda m, x, y: certify.radius(m, x[:0], y[:0]), "n > 0"),
        (lambda m, x, y: certify.radius(m, x, y[1:]), r"y must be int64 of shape \(40,\)"),
        (lambda m, x, y: certify.radius(m, x, y + 1), r"y must lie in \[0, 3\), got 1 to 3"),
        (lambda m, x, y: certify.radius(m, x, y, batch=0), "batch must be an int >= 1, got 0"),
        (lambda m, x, y: certify.radius(m, x, y, max_budget=-1), "budget must be an int >= 0, got -1"),
        (lambda m, x, y: certify.radius(m, x, y, within_one(1, unit="pixel")), "height, width"),
        (lambda m, x, y: certify.accuracy(m, x, y, []), "budgets must be different ints"),
    ],
)
def test_bad_arguments(call: Callable[..., Any], message: str) -> None:
    x, y = data()
    with pytest.raises(ValueError, match=message):
        call(small(), x, y)


def test_pixels_count_their_channels() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), TruncatedLinear(12, 3, 5)).eval()
    x, any_value = torch.randn(5, 2, 3, 2), L0Ball(2, "pixel", -inf, inf)
    y = model(x).argmax(1)
    assert certify.radius(model, x, y, any_value).max() <= 2
    features, box = replace(any_value, unit="feature"), replace(any_value, low=-1.0, high=1.0)
    assert [certify.certifier(model).limit(x, ball) for ball in (any_value, features, box)] == [2, 5, 6]
    with pytest.raises(ValueError, match="k=5, bounds at most 2 changed pixels"):
        certify.radius(model, x, y, any_value, max_budget=3)


def test_layers_that_stand_twice_or_work_in_place_are_bounded_as_others() -> None:
    (x, _), relu, ball = data(), nn.ReLU(inplace=True), L0Ball(1, low=-inf, high=inf)
    torch.manual_seed(0)
    shared = nn.Sequential(TruncatedLinear(12, 8, 3), relu, nn.Dropout(inplace=True), nn.Linear(8, 8), relu).eval()
    apart = nn.Sequential(*(nn.ReLU() if layer is relu else copy.deepcopy(layer) for layer in shared)).eval()
    for method in METHODS:
        found = (certify.bounds(model, x, ball, method=method) for model in (shared, apart))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_training_mode_is_refused_where_it_matters() -> None:
    (x, y), model = data(), small()
    certify.margins(nn.Sequential(nn.Identity(), model).train(), x, y, 1)
    with pytest.raises(ValueError, match="layer '1' is in training mode"):
        certify.margins(nn.Sequential(model[0], nn.Dropout(), model[2]).train(), x, y, 1)


def test_the_model_is_left_as_it_was() -> None:
    (x, _), model = data(), small()
    y = model(x).argmax(1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    certify.radius(model, x, y)
    assert all(p.requires_grad and p.grad is None and p.dtype == torch.float32 for p in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_radius_is_the_same_in_inference_mode() -> None:
    torch.manual_seed(0)
    model = models.mlp(3, in_features=16, hidden=(8,), classes=3).eval()
    x = torch.randn(9, 16)
    y, ball = model(x).argmax(1), L0Ball(2, low=-4.0, high=4.0)
    expected = certify.radius(model, x, y), *certify.bounds(model, x, ball)
    with torch.inference_mode():
        found = certify.radius(model, x, y), *certify.bounds(model, x + 0, ball)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
