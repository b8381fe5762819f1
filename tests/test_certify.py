"""Certificates: never above brute force, exact where they say so, and never a number where there is none."""

from __future__ import annotations

import copy
import inspect
import math
import os
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, product
from math import inf
from typing import Any, cast, get_args
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from certify_cases import Case, attacks, bound, cases, data, far, few, layers, least_margins, numbers, small
from ell0 import L0Ball, certify
from ell0.attacks import ATTACKS
from ell0.certify.first_layer import slack
from ell0.certify.lower_bounds import Bounder, Method, margin_goals
from ell0.certify.network import Network
from ell0.certify.network_bounds import climb
from ell0.certify.reachable import Reachable
from ell0.certify.truncated import Truncated
from ell0.common import Step
from ell0.data import load
from ell0.models import mlp
from ell0.nn import ClippedLinear, InputClamp, InputScale, InputTruncation, TruncatedLinear
from ell0.train import TrainConfig, fit

FULL = os.environ.get("HYPOTHESIS_PROFILE") == "full"
networks = settings(max_examples=10_000 if FULL else 500)


@networks
@given(cases())
def test_no_point_of_the_ball_beats_a_bound(case: Case) -> None:
    # The best of both routes is below what is reached if, and only if, each of them is.
    assert (bound(case, "best")[0] <= least_margins(case, *attacks(case)) + 1e-9).all()


@few
@given(cases())
def test_the_bounds_of_logits_hold(case: Case) -> None:
    points, rows = attacks(case)
    lower, upper = certify.bounds(case.model, case.x, case.ball)
    with torch.no_grad():
        logits = case.model(points)
    assert ((lower[rows] <= logits) & (logits <= upper[rows])).all()


# The first layer


def sets(units: int, budget: int) -> Tensor:
    """All sets of at most ``budget`` units: ``(sets, units)``."""
    chosen = [c for size in range(budget + 1) for c in combinations(range(units), size)]
    return torch.stack(
        [torch.zeros(units, dtype=torch.bool).index_fill(0, torch.tensor(c).long(), True) for c in chosen]
    )


def add_up(layer: nn.Linear, terms: Tensor) -> Tensor:
    """The layer's sums of its terms ``(..., out, in)``, without bias."""
    if isinstance(layer, ClippedLinear):
        return terms.clamp(-layer.clip, layer.clip).sum(-1)
    k = layer.k if isinstance(layer, TruncatedLinear) else 0
    return terms.sort(-1).values[..., k : terms.shape[-1] - k].sum(-1)


def enumerated(case: Case) -> tuple[Tensor, Tensor]:
    """The least and the largest value of each output of the first layer over all sets of changed units: ``(n, h)``.

    The layer rises with each of its terms, so a changed one goes to its end; any value is a very large one.
    """
    reach, layer = case.reach, case.layer
    masks = sets(reach.number_of_units, case.ball.budget).repeat(1, reach.channels).unsqueeze(1)
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
    reach, truncated = case.reach, isinstance(case.layer, TruncatedLinear)
    budgets = torch.full((len(case.x), 1), case.ball.budget)
    low, high = (end.squeeze(1) for end in case.network.first.interval(reach, budgets))
    least, most = enumerated(case)
    assert (low <= least + 1e-9).all()
    assert (most <= high + 1e-9).all()
    one = case.ball.budget * reach.channels <= 1
    if not truncated or one or (reach.any_value and reach.channels == 1):
        torch.testing.assert_close(low, least)
        torch.testing.assert_close(high, most)


@given(st.integers(0, 2**40), st.integers(1, 3), st.integers(0, 3), st.booleans())
def test_terms_that_cannot_move_stay_in_the_sum(seed: int, k: int, budget: int, frozen: bool) -> None:
    """Zero weights and frozen features, of any value: exact as well, where most terms are of one sign."""
    generator = torch.Generator().manual_seed(seed)
    d, budget = 2 * k + 1 + seed % 3, min(budget, k)
    layer = TruncatedLinear(d, 2, k, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(numbers(generator, 2, d, ties=True).abs() * (torch.rand(2, d, generator=generator) < 0.7))
    x = numbers(generator, 2, d, ties=True).abs() * (torch.tensor([1.0, -1.0]).unsqueeze(1))
    mutable = torch.rand(d, generator=generator) < 0.6 if frozen else None
    ball = L0Ball(budget, low=-inf, high=inf, mutable=mutable)
    case = Case(nn.Sequential(layer).eval(), x, ball, generator)
    found = case.network.first.interval(case.reach, torch.full((2, 1), budget))
    for end, truth in zip(found, enumerated(case), strict=True):
        torch.testing.assert_close(end.squeeze(1), truth)


@few
@given(cases(kinds=("truncated", "clipped")))
def test_many_budgets_are_swept_as_one_by_one(case: Case) -> None:
    first, reach, most = case.network.first, case.reach, case.ball.budget
    swept = first.interval(reach, torch.arange(most + 1).expand(len(case.x), -1))
    for budget in range(most + 1):
        alone = first.interval(reach, torch.full((len(case.x), 1), budget))
        for together, single in zip(swept, alone, strict=True):
            torch.testing.assert_close(together[:, budget], single.squeeze(1))


@layers
@given(cases())
def test_all_outputs_see_the_same_changes(case: Case) -> None:
    """A head on the first layer falls by no more than `drop`, whatever ends the changed numbers go to."""
    network, reach, budget = case.network, case.reach, case.ball.budget
    head = numbers(case.generator, len(case.x), 2, len(network.layer.weight))
    drop = network.first.drop(reach, torch.full((len(case.x),), budget), head)
    masks = sets(reach.number_of_units, budget).repeat(1, reach.channels)
    corners = torch.rand(8, 1, masks.shape[1], generator=case.generator) < 0.5
    for row in range(len(case.x)):
        low, high = reach.low[row].clamp(min=-1e9), reach.high[row].clamp(max=1e9)
        points = torch.where(masks, torch.where(corners, low, high), reach.x[row]).flatten(0, 1)
        reached = (add_up(case.layer, points.unsqueeze(1) * network.layer.weight) @ head[row].T).amin(0)
        now = add_up(case.layer, reach.x[row] * network.layer.weight) @ head[row].T
        assert (now - drop[row] <= reached + 1e-6 * (1 + reached.abs())).all()


@layers
@given(cases(kinds=("clipped", "dense")))
def test_the_joint_bound_of_a_separable_layer_is_attained(case: Case) -> None:
    network, reach, budget = case.network, case.reach, case.ball.budget
    layer, n = case.layer, len(case.x)
    head = numbers(case.generator, n, 1, len(layer.weight))
    drop = network.first.drop(reach, torch.full((n,), budget), head)
    kinks = far(case) if isinstance(layer, ClippedLinear) else reach.x.unsqueeze(-1)
    ends = torch.stack((reach.low.clamp(min=-1e9), reach.high.clamp(max=1e9), reach.x), -1)
    values = torch.cat((kinks.clamp(reach.low.unsqueeze(-1), reach.high.unsqueeze(-1)).clamp(-1e9, 1e9), ends), -1)
    shares = values.unsqueeze(1) * layer.weight.unsqueeze(-1)
    if isinstance(layer, ClippedLinear):
        shares = shares.clamp(-layer.clip, layer.clip)
    share = torch.einsum("nh,nhdv->ndv", head.squeeze(1), shares)
    fall = reach.units(share[..., -1] - share.amin(-1))
    chosen = torch.zeros_like(fall).scatter(1, fall.topk(budget).indices, 1.0).bool().repeat(1, reach.channels)
    x_adv = torch.where(chosen, values.gather(-1, share.argmin(-1, keepdim=True)).squeeze(-1), reach.x)
    before, after = (add_up(layer, (v.unsqueeze(1) * layer.weight)) for v in (reach.x, x_adv))
    torch.testing.assert_close(((before - after) * head.squeeze(1)).sum(1), drop.squeeze(1))


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
    goals, budgets = margin_goals(case.y, case.model(case.x).shape[1]), torch.full((len(case.x),), case.ball.budget)
    with torch.no_grad():
        outputs, head = bounder.first.value(case.reach.x), nn.Sequential(*case.network.head)
        errors = torch.full_like(outputs[:1, None], error)
        with mock.patch.object(type(bounder.first), "rounding", return_value=errors):
            slack = bounder.at(case.reach, budgets, goals, "ibp")[1]
        for signs in product((-error, error), repeat=outputs.shape[1]):
            moved = head(outputs + torch.tensor(signs, dtype=outputs.dtype)) - head(outputs)
            assert ((goals @ moved.unsqueeze(-1)).squeeze(-1).abs() <= slack + 1e-9).all()


@few
@given(cases())
def test_a_certified_row_never_falls(case: Case) -> None:
    case = case.single()
    radius = certify.radius(case.model, case.x, case.y, case.ball)
    assert (radius >= 0).all()
    for budget in range(1, case.ball.budget + 1):
        points, rows = attacks(replace(case, ball=replace(case.ball, budget=budget)))
        with torch.no_grad():
            stays = case.model(points).argmax(1) == case.y[rows]
        assert stays[radius[rows] >= budget].all()


def test_rounding_has_no_bound_beyond_float32_and_grows_with_long_sums() -> None:
    sums = torch.tensor([1.0, 1e30, 3.5e38], dtype=torch.float64)
    found = slack(1e-6, 10, sums)
    assert found[:2].tolist() == pytest.approx([1e-6, 1e24])
    assert found[2] == inf
    assert float(slack(0.0, 10, torch.zeros(1, dtype=torch.float64))) == 12 * torch.finfo(torch.float32).tiny
    x = torch.ones(1, 100_000)
    for layer, share in ((TruncatedLinear(100_000, 1, 2), 1e-4), (TruncatedLinear(1_000, 1, 2), 2e-5)):
        nn.init.constant_(layer.weight, 1.0)
        nn.init.zeros_(layer.bias)
        reach = Reachable.of(x[:, : layer.in_features], L0Ball(1, low=-inf, high=inf), ())
        layer = layer.double()
        got = Truncated(layer.weight, layer.bias, layer.k).rounding(reach, torch.ones(1, 1))
        assert float(got.detach()) == pytest.approx(share * layer.in_features)


@few
@given(st.integers(0, 2**31), st.sampled_from([1e-22, 1e-3, 1e3, 1e19]))
def test_a_certified_row_stands_in_float32_at_any_scale(seed: int, scale: float) -> None:
    """Sums that nearly vanish, overflow or are dwarfed by a batch norm's mean: what is proven holds for the model."""
    g = torch.Generator().manual_seed(seed)
    norm = nn.BatchNorm1d(6).eval()
    assert norm.running_mean is not None
    norm.running_mean.copy_(torch.randn(6, generator=g) * 1e3)
    model = nn.Sequential(TruncatedLinear(7, 6, 2), norm, nn.ReLU(), nn.Linear(6, 2)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=g))
        first, last = model[0], model[3]
        assert isinstance(first, nn.Linear)
        assert isinstance(last, nn.Linear)
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
                answers = model(moved).argmax(1)
                assert bool((answers == y)[radii >= 2].all())


# The radius


@few
@given(cases(), st.sampled_from(["ibp", "crown", "best"]))
def test_the_radius_is_the_largest_proven_budget(case: Case, method: Any) -> None:
    radius = certify.radius(case.model, case.x, case.y, case.ball, method=method, batch=1)
    largest = torch.zeros_like(radius)
    for budget in range(1, case.ball.budget + 1):
        found, slack = bound(replace(case, ball=replace(case.ball, budget=budget)), method)
        others = case.y[:, None] != torch.arange(found.shape[1])
        largest[((found > slack) | ~others).all(1)] = budget
    assert torch.equal(radius, largest)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=5), st.integers(0, 40))
def test_climbing_finds_the_last_budget_that_holds(rows: list[tuple[int, int]], cap: int) -> None:
    best, truth = (torch.tensor(column).clamp(max=cap) for column in zip(*rows, strict=True))
    truth = torch.maximum(best, truth)
    found = climb(lambda at, budgets: budgets <= truth[at], best, cap)
    assert torch.equal(found, truth)


def test_misclassified_rows_have_no_radius_and_right_ones_have_one() -> None:
    (x, _), model = data(), small()
    y = model(x).argmax(1)
    y[::2] = (y[::2] + 1) % 3
    radius = certify.radius(model, x, y)
    assert torch.equal(radius == -1, torch.arange(40) % 2 == 0)
    assert radius.dtype == torch.int64
    assert radius.max() <= 3


def test_accuracy_is_the_share_of_rows_with_the_radius() -> None:
    (x, _), model = data(), small()
    y = model(x).argmax(1)
    radius, done = certify.radius(model, x, y), list[Step]()
    shares = certify.accuracy(model, x, y, [2, 0, 1], batch=16, progress=done.append)
    assert list(shares) == [2, 0, 1]
    assert all(math.isclose(share, float((radius >= budget).double().mean())) for budget, share in shares.items())
    assert (shares[0], shares[0].n) == (1.0, 40)
    assert shares[0].low < 1
    assert done == [Step("rows certified", rows, 40) for rows in (16, 32, 40)]


def test_rows_do_not_depend_on_the_batch() -> None:
    (x, _), model = data(), small()
    y = model(x).argmax(1)
    whole = certify.radius(model, x, y)
    assert torch.equal(whole, certify.radius(model, x, y, batch=7))
    assert len(whole.unique()) > 1


def test_lines_prove_more_than_intervals() -> None:
    x, _ = data()
    for seed in range(3):
        torch.manual_seed(seed)
        model = nn.Sequential(TruncatedLinear(12, 30, 3), nn.ReLU(), nn.Linear(30, 2)).double().eval()
        ball = L0Ball(1, low=-inf, high=inf)
        found = [certify.bounds(model, x.double(), ball, method=method) for method in get_args(Method)]
        best, ibp, crown = (upper - lower for lower, upper in found)
        assert crown.mean() < 0.9 * ibp.mean()
        assert (best <= torch.minimum(ibp, crown)).all()


def template(layer: nn.Linear) -> nn.Sequential:
    """A layer that knows the classes of `data`."""
    with torch.no_grad():
        layer.weight.copy_(torch.eye(3).repeat(1, 4))
        layer.bias.zero_()
    return nn.Sequential(layer).eval()


def test_a_clamp_turns_any_value_into_a_box() -> None:
    x, y = data()
    plain = template(nn.Linear(12, 3))
    clamped = nn.Sequential(InputClamp(-1.5, 1.5), nn.Dropout(), plain).eval()
    boxed = certify.radius(plain, x.clamp(-1.5, 1.5), y, L0Ball(12, low=-1.5, high=1.5))
    assert torch.equal(certify.radius(clamped, x * 1.0, y), boxed)
    assert boxed.max() == 1


@pytest.mark.parametrize("ends", [(-1.0, -0.8), (0.0, 0.3)], ids=str)
def test_a_scale_is_a_layer_with_other_weights(ends: tuple[float, float]) -> None:
    """The radius is that of the scale folded into the layer behind it, and no values at the ends of a clamp beat it."""
    (low, high), (x, _) = ends, data()
    x = low + (high - low) * x
    torch.manual_seed(8)
    network = mlp(0, in_features=12, hidden=(8,), classes=3)
    folded = copy.deepcopy(network)
    model = nn.Sequential(InputClamp(low, high), InputScale(low, high), *network).eval()
    y = model(x).argmax(1)
    radius = certify.radius(model, x, y)
    assert set(radius.tolist()) >= {0, 1, 2}
    first = folded[1]
    assert isinstance(first, nn.Linear)
    with torch.no_grad():
        first.weight.div_(high - low)
        first.bias.sub_(low * first.weight.sum(1))
        assert torch.equal(radius, certify.radius(nn.Sequential(InputClamp(low, high), *folded).eval(), x, y))
        for size in (1, 2):
            for where, values in product(combinations(range(12), size), product((-inf, inf), repeat=size)):
                moved = x.clone()
                moved[:, list(where)] = torch.tensor(values)
                assert torch.equal(model(moved).argmax(1)[radius >= size], y[radius >= size])


def test_more_than_k_changes_in_a_box() -> None:
    x, y = data()
    radius = certify.radius(template(TruncatedLinear(12, 3, 1)), x, y, L0Ball(12, low=0.0, high=1.0))
    assert radius.max() == 2
    assert certify.radius(template(TruncatedLinear(12, 3, 1)), x, y).max() == 1


def test_rows_of_radii() -> None:
    radii = torch.tensor([-1, 0, 0, 2, 3])
    *shares, median = certify.rows(radii, [0, 1, 3], classifier="F")
    assert [(row["what"], row["budget"], row["value"], row["n"]) for row in shares] == [
        ("certified_accuracy", 0, 0.8, 5),
        ("certified_accuracy", 1, 0.4, 5),
        ("certified_accuracy", 3, 0.2, 5),
    ]
    assert (median["what"], median["value"], median["classifier"]) == ("certified_radius", 0, "F")
    with pytest.raises(ValueError, match="budgets must be different ints"):
        certify.rows(radii, [1, 1])


def test_no_attack_beats_a_certificate() -> None:
    """Every attack there is, with the certified radius of each row as its budget, within +-1 and +-100."""
    x, y = load("digits", "train")
    torch.manual_seed(0)
    model = mlp(8, in_features=64, hidden=(32,))
    fit(model, (x[:600], y[:600]), TrainConfig(epochs=12, batch=64, rates=(0.02,), optimizer="adam"),
        objective=certify.Objective(2))  # fmt: skip
    x, y = (part[:60] for part in load("digits", "test"))
    radii = certify.radius(model.eval(), x, y)
    assert int((radii >= 1).sum()) > 25
    for budget in radii[radii >= 1].unique().tolist():
        mine = radii == budget
        for beta, (name, attack) in product((1.0, 100.0), ATTACKS.items()):
            spent = {"steps": 6} if "steps" in inspect.signature(attack).parameters else {"queries": 40}
            spent = {"repeats": 1} if name == "pointwise" else spent
            result = attack(model, x[mine], y[mine], L0Ball(budget, low=-beta, high=beta), **spent)
            assert not bool(result.success.any()), (name, beta, budget)


# Never a number where there is none


class Own(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Falling(InputClamp):
    """No clamp that keeps the order of numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return -super().forward(x)


class Backwards(InputScale):
    def forward(self, x: Tensor) -> Tensor:
        return 1 - super().forward(x)


def test_a_scale_bounds_nobody() -> None:
    x, _ = data()
    network = Network.read(nn.Sequential(InputScale(), *small()).eval(), x)
    reach = Reachable.of(x, L0Ball(1, low=-inf, high=inf), network.rising)
    assert reach.any_value
    assert not reach.bounded


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
        (lambda: nn.Sequential(nn.Linear(12, 12), *small()).eval(), r"behind its first one.*got layer '1'"),
        (lambda: nn.Sequential(small()[0], nn.Sigmoid(), nn.Linear(8, 3)).eval(), r"layer '1' \(Sigmoid\)"),
        (lambda: nn.Sequential(small()[0], nn.ReLU(), nn.Sequential(Own(8, 3))).eval(), r"layer '2.0' \(Own\)"),
        (lambda: nn.Sequential(nn.ReLU(), nn.Flatten()).eval(), "before any"),
        (lambda: nn.Sequential(nn.Flatten()).eval(), "got none"),
        (lambda: nn.Sequential(nn.Linear(12, 3)).eval(), "no certificate exists: a plain Linear"),
        (lambda: nn.Sequential(InputScale(), nn.Linear(12, 3)).eval(), "no certificate exists: a plain Linear"),
        (lambda: nn.Sequential(Falling(), *small()).eval(), r"layer '0' \(Falling\) before any"),
        (lambda: nn.Sequential(Backwards(), *small()).eval(), r"layer '0' \(Backwards\) before any"),
        (lambda: small(dtype=torch.float64), "dtype and device"),
        (lambda: nn.Sequential(TruncatedLinear(13, 3, 2)).eval(), "13 numbers a row"),
        (lambda: nn.Sequential(*small(), nn.Flatten(0)).eval(), "flatten whole rows"),
        (lambda: nn.Sequential(nn.Flatten(0, 1), *small()).eval(), "flatten whole rows"),
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
        (lambda m, x, y: certify.radius(m, x, y, max_budget=4), "no certificate exists for budget=4.*k=3.*at most 3"),
        (lambda m, x, y: certify.radius(m, x, y, L0Ball(4, low=-inf)), "no certificate exists"),
        (lambda m, x, y: certify.accuracy(m, x, y, [1, 4]), "no certificate exists"),
        (lambda m, x, _: certify.bounds(m, x, L0Ball(4, high=inf)), "no certificate exists"),
        (lambda m, x, y: certify.margins(m, x, y, 4), "no certificate exists"),
        (
            lambda m, x, y: certify.radius(m, x, y, method=cast(Any, "worst")),
            'method must be "best", "ibp" or "crown", got',
        ),
        (lambda m, x, y: certify.radius(m, x * inf, y), "finite numbers"),
        (lambda m, x, y: certify.radius(m, x[:0], y[:0]), "n > 0"),
        (lambda m, x, y: certify.radius(m, x, y[1:]), r"y must be an int64 tensor of shape \(40,\)"),
        (lambda m, x, y: certify.radius(m, x, y + 1), r"y must lie in \[0, 3\), got 1 to 3"),
        (lambda m, x, y: certify.radius(m, x, y, batch=0), "batch must be an int >= 1, got 0"),
        (lambda m, x, y: certify.radius(m, x, y, max_budget=-1), "budget must be an int >= 0, got -1"),
        (lambda m, x, y: certify.radius(m, x, y, L0Ball(1, unit="pixel")), "height, width"),
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
    with pytest.raises(ValueError, match="k=5, bounds at most 2 changed pixels of any value"):
        certify.radius(model, x, y, any_value, max_budget=3)
    mutable = torch.tensor([True, False]).view(2, 1, 1)
    assert certify.radius(model, x, y, replace(any_value, mutable=mutable), max_budget=5).max() >= 0


def test_few_movable_features_are_bounded_at_every_budget() -> None:
    (x, _), model = data(), small()
    y = model(x).argmax(1)
    mutable = torch.arange(12) < 3
    found = certify.radius(model, x, y, L0Ball(12, low=-inf, high=inf, mutable=mutable))
    assert set(found.tolist()) <= {0, 1, 2, 12}


def test_a_layer_that_stands_twice_in_a_model_is_seen_twice() -> None:
    (x, _), relu = data(), nn.ReLU()
    torch.manual_seed(0)
    shared = nn.Sequential(TruncatedLinear(12, 8, 3), relu, nn.Linear(8, 8), relu, nn.Linear(8, 3)).eval()
    apart = nn.Sequential(*(copy.deepcopy(layer) for layer in shared)).eval()
    assert_same_bounds(shared, apart, x)


def test_layers_that_work_in_place() -> None:
    x, _ = data()
    torch.manual_seed(0)
    plain = nn.Sequential(TruncatedLinear(12, 8, 3), nn.ReLU(), nn.Linear(8, 3)).eval()
    assert_same_bounds(
        nn.Sequential(plain[0], nn.ReLU(inplace=True), nn.Dropout(inplace=True), plain[2]).eval(), plain, x
    )


def assert_same_bounds(one: nn.Module, other: nn.Module, x: Tensor) -> None:
    methods: tuple[Method, ...] = ("ibp", "crown")
    for method in methods:
        both = (certify.bounds(model, x, L0Ball(1, low=-inf, high=inf), method=method) for model in (one, other))
        assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))


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
