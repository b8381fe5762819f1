"""Certificates: never above brute force, exact where they say so, and never a number where there is none."""

from __future__ import annotations

import copy
import inspect
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import combinations, product
from pathlib import Path
from typing import Any, cast, get_args
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ell0 import L0Ball, certify
from ell0.attacks import ATTACKS
from ell0.certify._bound import Bounder, Method, margin_goals
from ell0.certify._certify import _climb
from ell0.certify._first import slack
from ell0.certify._network import Network
from ell0.certify._reach import Reach
from ell0.certify._truncated import Truncated
from ell0.data import load
from ell0.models import mlp
from ell0.nn import ClippedLinear, InputClamp, InputScale, InputTruncation, TruncatedConv2d, TruncatedLinear
from ell0.train import Epoch, TrainConfig, fit

inf = math.inf
FULL = os.environ.get("HYPOTHESIS_PROFILE") == "full"
networks = settings(max_examples=10_000 if FULL else 500)
layers = settings(max_examples=settings().max_examples // 3)
few = settings(max_examples=settings().max_examples // 8)


@dataclass(frozen=True, eq=False)
class Case:
    """A small network, two rows of input and an attacker."""

    model: nn.Sequential
    x: Tensor
    y: Tensor
    ball: L0Ball
    generator: torch.Generator

    @cached_property
    def network(self) -> Network:
        return Network.read(self.model, self.x).double()

    @cached_property
    def layer(self) -> nn.Linear:
        assert isinstance(self.network.layer, nn.Linear)
        return self.network.layer

    @cached_property
    def reach(self) -> Reach:
        return Reach.of(self.x, self.ball, self.network.rising)


def numbers(generator: torch.Generator, *shape: int, ties: bool = False) -> Tensor:
    """Normal numbers, or few different ones with many zeros, in which terms tie and weights vanish."""
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (drawn * 1.5).round() / 2 if ties else drawn


@st.composite
def cases(draw: st.DrawFn, heads: str = "dense", kinds: tuple[str, ...] = ("truncated", "clipped", "dense")) -> Case:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**40)))
    kind, pixels = draw(st.sampled_from(kinds)), draw(st.booleans())
    channels, height = (2, draw(st.integers(2, 3))) if pixels else (1, draw(st.integers(3, 7)))
    d = channels * height
    ties = draw(st.booleans())
    values = "box" if kind == "dense" else draw(st.sampled_from(["box", "any", "upwards"]))
    k = draw(st.integers(1, (d - 1) // 2))
    unit = "pixel" if pixels and draw(st.booleans()) else "feature"
    width = channels if unit == "pixel" else 1
    most = k // width if kind == "truncated" and values != "box" else d // width
    budget = draw(st.integers(0, min(most, 3)))
    x = numbers(generator, 2, channels, height, 1, ties=ties)
    ends = numbers(generator, 2, *x.shape, ties=ties) * draw(st.sampled_from([1.0, 1.0, 5.0]))
    low, high = ends.amin(0), ends.amax(0)
    if values == "box" and draw(st.booleans()):  # add-only
        low, high = x, torch.maximum(x, high)
    elif values != "box":
        high = torch.full_like(x, inf)
        low = -high if values == "any" else low
    mutable = torch.rand(x.shape, generator=generator) < 0.7 if draw(st.booleans()) else None
    classes = draw(st.integers(2, 3))
    hidden = draw(st.integers(2, 5))
    sizes = {"truncated": (k,), "clipped": (draw(st.sampled_from([0.3, 1.0, 2.0])),), "dense": ()}[kind]
    layer = {"truncated": TruncatedLinear, "clipped": ClippedLinear, "dense": nn.Linear}[kind]
    rising: list[nn.Module] = [InputClamp(-0.8, 1.0)] if draw(st.integers(0, 5)) == 0 else []
    # By a power of two: float32 and float64 scale alike but for one rounding.
    rising += [InputScale(-0.75, 1.25)] if draw(st.integers(0, 5)) == 0 else []
    depth = draw(st.integers(1, 3))
    if heads == "conv":
        hidden = 8
        parts: list[nn.Module] = [
            layer(d, hidden, *sizes),
            nn.Sequential(nn.ReLU(), nn.Unflatten(1, (2, 2, 2))),
            nn.Conv2d(2, 3, 2, padding=1, stride=draw(st.integers(1, 2)), bias=draw(st.booleans())),
            nn.BatchNorm2d(3),
            nn.ReLU(),
            nn.MaxPool2d(2, stride=1, padding=draw(st.integers(0, 1))) if draw(st.booleans()) else nn.AvgPool2d(2, 1),
            nn.Dropout(0.5),
            nn.Flatten(),
        ]
        wide = nn.Sequential(*parts).double().eval()(torch.zeros(1, d, dtype=torch.float64)).shape[1]
        parts += [nn.BatchNorm1d(wide), nn.Linear(wide, classes)]
    elif depth == 1:
        parts = [layer(d, classes, *sizes, bias=draw(st.booleans()))]
    else:
        parts = [layer(d, hidden, *sizes, bias=draw(st.booleans())), nn.ReLU()]
        if depth == 3:
            parts += [nn.Linear(hidden, 3), nn.ReLU()]
        parts.append(nn.Linear(hidden if depth == 2 else 3, classes))
    model = nn.Sequential(*rising, nn.Flatten(), *parts).double().eval()
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                value.copy_(numbers(generator, *value.shape, ties=ties) if value.ndim else value)
                if "running_var" in name:
                    value.abs_().add_(0.1)
        y = model(x).argmax(1)
    return Case(model, x, y, L0Ball(budget, unit, low, high, mutable), generator)  # type: ignore[arg-type]


def far(case: Case) -> Tensor:
    """Values that make the terms of a number the largest of their sums, or clip them: ``(n, d, 2 h)``."""
    layer = case.layer
    x = case.reach.x
    weight = torch.where(layer.weight == 0, torch.inf, layer.weight)
    limit = (
        torch.full((len(x), len(weight)), layer.clip)
        if isinstance(layer, ClippedLinear)
        else ((x.unsqueeze(1) * layer.weight).abs().amax(-1))
    )
    kinks = (limit.unsqueeze(-1).double() / weight).transpose(1, 2)
    return torch.cat((kinks, -kinks, 1.5 * kinks), -1)


def attacks(case: Case, points: int = 100) -> tuple[Tensor, Tensor]:
    """Points of the ball around each row: ``(points * n, ...)``, and the row of each."""
    x, ball, generator = case.x, case.ball, case.generator
    n = len(x)
    units = x[0].numel() // (x.shape[1] if ball.unit == "pixel" else 1)
    rows = torch.arange(n).repeat_interleave(points)
    around = x[rows]
    chosen = torch.rand(len(rows), units, generator=generator).argsort(1) < min(ball.budget, units)
    mask = (
        chosen.view(len(rows), -1, *x.shape[2:]).expand_as(x[rows]) if ball.unit == "pixel" else chosen.view_as(around)
    )
    low, high, mutable = (bound.expand_as(x)[rows] for bound in ball.box(x))
    ball = replace(ball, low=low, high=high, mutable=mutable)
    kinks = far(case)
    pick = torch.randint(kinks.shape[-1], (len(rows), kinks.shape[1], 1), generator=generator)
    values = kinks[rows].gather(-1, pick).to(x.dtype).view_as(around)
    choice = torch.randint(5, around.shape, generator=generator)
    spread = torch.randn(around.shape, generator=generator, dtype=x.dtype) * 2
    for code, candidate in enumerate((low, high, spread, around + spread)):
        values = torch.where((choice == code) & candidate.isfinite(), candidate, values)
    moved = torch.where(mask, torch.maximum(torch.minimum(values, high), low), around)
    moved = ball.project(around, moved)
    assert ball.contains(around, moved).all()
    return moved, rows


def least_margins(case: Case, points: Tensor, rows: Tensor) -> Tensor:
    """The least ``logit_y - logit_c`` that the points of each row reach: ``(n, classes)``."""
    with torch.no_grad():
        model = case.model if points.dtype == case.x.dtype else copy.deepcopy(case.model).to(points.dtype)
        logits = model(points)
    margins = logits.gather(1, case.y[rows, None]) - logits
    return torch.stack([margins[rows == row].amin(0) for row in range(len(case.x))])


def bound(case: Case, method: Any) -> tuple[Tensor, Tensor]:
    """Below the margins, and the slack for rounding: two ``(n, classes)``."""
    goals = margin_goals(case.y, case.model(case.x).shape[1])
    budgets = torch.full((len(case.x),), case.ball.budget)
    with torch.no_grad():
        return Bounder(case.network).at(case.reach, budgets, goals, method)


@networks
@given(cases())
def test_no_point_of_the_ball_beats_a_bound(case: Case) -> None:
    # The best of both routes is below what is reached if, and only if, each of them is.
    assert (bound(case, "best")[0] <= least_margins(case, *attacks(case)) + 1e-9).all()


@settings(max_examples=networks.max_examples // 5)
@given(cases(heads="conv"))
def test_no_point_beats_a_bound_through_convolutions_norms_and_pools(case: Case) -> None:
    assert (bound(case, "best")[0] <= least_margins(case, *attacks(case, 60)) + 1e-9).all()


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
    case = Case(nn.Sequential(layer).eval(), x, torch.zeros(2).long(), ball, generator)
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


def single(case: Case) -> Case:
    """The same in float32."""
    ball, model = case.ball, copy.deepcopy(case.model).float()
    assert isinstance(ball.low, Tensor)
    assert isinstance(ball.high, Tensor)
    x = case.x.float()
    with torch.no_grad():
        y = model(x).argmax(1)
    return Case(model, x, y, replace(ball, low=ball.low.float(), high=ball.high.float()), case.generator)


@layers
@given(cases(), st.sampled_from([1.0, 1e3]))
def test_rounding_stays_within_the_slack(case: Case, scale: float) -> None:
    last = case.model[-1]
    assert isinstance(last, nn.Linear)
    last.bias = nn.Parameter(last.weight.detach()[:, 0] * scale)
    case = single(case)
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
    case = single(case)
    radius = certify.radius(case.model, case.x, case.y, case.ball)
    assert (radius >= 0).all()
    for budget in range(1, case.ball.budget + 1):
        points, rows = attacks(replace(case, ball=replace(case.ball, budget=budget)))
        with torch.no_grad():
            stays = case.model(points).argmax(1) == case.y[rows]
        assert stays[radius[rows] >= budget].all()


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
    found = _climb(lambda at, budgets: budgets <= truth[at], best, cap)
    assert torch.equal(found, truth)


def small(k: int = 3, classes: int = 3, **kwargs: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(TruncatedLinear(12, 8, k, **kwargs), nn.ReLU(), nn.Linear(8, classes)).eval()


def data(n: int = 40, d: int = 12) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    y = torch.arange(n) % 3
    return torch.randn(n, d) * 0.2 + nn.functional.one_hot(y, 3).repeat(1, d // 3), y


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
    radius, done = certify.radius(model, x, y), []
    shares = certify.accuracy(model, x, y, [2, 0, 1], batch=16, progress=lambda *at: done.append(at))
    assert list(shares) == [2, 0, 1]
    assert all(math.isclose(share, float((radius >= budget).double().mean())) for budget, share in shares.items())
    assert (shares[0], shares[0].n) == (1.0, 40)
    assert shares[0].low < 1
    assert done == [(16, 40), (32, 40), (40, 40)]


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


# The true worst case


@settings(max_examples=few.max_examples // 2)
@given(cases())
def test_the_true_worst_case_lies_between_certificate_and_attacks(case: Case) -> None:
    ball = replace(case.ball, budget=min(case.ball.budget, 2))
    case = replace(case, ball=ball)
    proven, reached = certify.exact(case.model, case.x, case.y, ball.budget, ball, tolerance=0.02, regions=3000)
    others = case.y[:, None] != torch.arange(case.model(case.x).shape[1])
    attacked = least_margins(case, *attacks(case)).masked_fill(~others, inf).amin(1)
    assert (proven <= reached).all()
    assert (proven <= attacked + 1e-9).all()
    assert (bound(case, "best")[0].masked_fill(~others, inf).amin(1) <= reached + 1e-9).all()


def test_the_worst_case_of_one_layer_is_closed_form() -> None:
    """Two classes with opposite weights: the margin is one truncated sum, whose interval is exact."""
    torch.manual_seed(0)
    layer = TruncatedLinear(7, 2, 2, bias=False)
    with torch.no_grad():
        layer.weight[1] = -layer.weight[0]
    model = nn.Sequential(layer).double().eval()
    x = torch.randn(4, 7, dtype=torch.float64)
    y = model(x).argmax(1)
    proven, reached = certify.exact(model, x, y, 2, tolerance=1e-4)
    goals = margin_goals(y, 2)
    found, _ = Bounder(Network.read(model, x)).at(
        Reach.of(x, L0Ball(2, low=-inf, high=inf), ()), torch.full((4,), 2), goals, "ibp"
    )
    least = found[torch.arange(4), 1 - y]
    assert (reached - proven <= 1e-4 + 1e-12).all()
    torch.testing.assert_close(least, reached, atol=1e-3, rtol=0)


# Training


@few
@given(cases())
def test_margins_for_training_are_the_interval_bound(case: Case) -> None:
    found = certify.margins(case.model, case.x, case.y, case.ball.budget, case.ball)
    sharp = bound(case, "ibp")[0]
    reach, weight = case.reach, case.layer.weight
    exact = reach.any_value and reach.channels == 1 and bool((weight != 0).all()) and bool(reach.moves.all())
    if exact or not isinstance(case.layer, TruncatedLinear):
        torch.testing.assert_close(found, sharp)
    else:
        assert (found <= sharp + 1e-9).all()


def test_a_weight_of_0_has_a_gradient_on_lines() -> None:
    (x, y), first = data(), ClippedLinear(12, 8, 0.3)
    with torch.no_grad():
        first.weight[2, 3] = 0.0
    model = nn.Sequential(first, nn.ReLU(), nn.Linear(8, 3))
    certify.margins(model, x, y, 2, method="best").sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


@few
@given(cases())
def test_margins_for_training_by_lines_are_those_of_the_certificate(case: Case) -> None:
    truncates = isinstance(case.layer, TruncatedLinear) and case.layer.k > 0
    for method in ("crown", "best"):
        bound_of = partial(certify.margins, case.model, case.x, case.y, case.ball.budget, case.ball, method=method)
        if truncates and case.ball.budget:
            with pytest.raises(ValueError, match='method must be "ibp" in training where the first layer truncates'):
                bound_of()
        elif not truncates:
            torch.testing.assert_close(bound_of(), bound(case, method)[0])


@layers
@given(cases(kinds=("dense",)), st.integers(0, 9))
def test_a_quick_interval_holds_the_exact_one(case: Case, budget: int) -> None:
    first, reach = case.network.first, case.reach
    low, high = first.quick_interval(reach, budget)
    least, most = first.trainable_interval(reach, min(budget, reach.number_of_units))
    assert (low <= least + 1e-9).all()
    assert (most <= high + 1e-9).all()
    assert all(torch.equal(end, first.value(reach.x)) for end in first.quick_interval(reach, 0))
    torch.testing.assert_close(first.quick_interval(reach, 20), first.quick_interval(reach, case.layer.in_features))


@layers
@given(cases(kinds=("dense",)))
def test_quick_margins_hold_below_the_exact_ones_and_can_be_learnt_from(case: Case) -> None:
    found = partial(certify.margins, case.model, case.x, case.y, case.ball.budget, case.ball)
    quick = found(quick=True)
    assert (quick <= found() + 1e-9).all()
    # Lines from wider intervals need not be lower than others, but they hold as well.
    reached = least_margins(case, *attacks(case, 40))
    assert all((found(method=method, quick=True) <= reached + 1e-9).all() for method in get_args(Method))
    quick.sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in case.model.parameters())


@few
@given(st.integers(0, 2**40))
def test_a_quick_interval_is_exact_where_weights_are_equally_large(seed: int) -> None:
    """And the rows at the ends of their boxes, as long as every output has as many numbers to move as may change."""
    g = torch.Generator().manual_seed(seed)
    layer = nn.Linear(16, 4, dtype=torch.float64)
    low, high = numbers(g, 2, 3, 1).sort(0).values
    x = torch.where(torch.rand(3, 16, generator=g) < 0.5, low, high)
    sizes, signs = torch.rand(4, 1, generator=g).double() + 0.5, (torch.rand(4, 16, generator=g) < 0.5) * 2 - 1
    with torch.no_grad():
        layer.weight.copy_(sizes * signs)
    first = Network.read(layer.eval(), x).double().first
    reach = Reach.of(x, L0Ball(0, low=low, high=high), ())
    falls = ((x == high).unsqueeze(1) == (signs > 0)).sum(-1)
    for budget in range(int(torch.minimum(falls, 16 - falls).min()) + 1):
        exact = first.trainable_interval(reach, budget)
        torch.testing.assert_close(first.quick_interval(reach, budget), exact)


def test_little_is_lost_by_a_quick_interval() -> None:
    """Of normal weights and rows at random ends of the box, 3% of how far an output moves: a good place for the cut."""
    g = torch.Generator().manual_seed(0)
    first = Network.read(nn.Sequential(nn.Linear(400, 30)).eval(), torch.zeros(1, 400)).first
    first.weight = torch.randn(30, 400, generator=g)
    x = (torch.rand(20, 400, generator=g) < 0.5).float()
    reach = Reach.of(x, L0Ball(0, low=0.0, high=1.0), ())
    for budget in (1, 5, 20, 60):
        (low, high), (least, most) = first.quick_interval(reach, budget), first.trainable_interval(reach, budget)
        assert (high - low).mean() < 1.03 * (most - least).mean()


@pytest.mark.parametrize(
    "first",
    [TruncatedLinear(12, 3, 3), ClippedLinear(12, 3, 0.3), TruncatedConv2d(3, 3, 2, 2)],
    ids=lambda layer: type(layer).__name__,
)
def test_nothing_but_a_plain_layer_is_quick(first: nn.Module) -> None:
    x, y = data()
    x = x.view(-1, 3, 2, 2) if isinstance(first, TruncatedConv2d) else x
    with pytest.raises(ValueError, match="quick must be False unless the first layer is a plain Linear"):
        certify.margins(nn.Sequential(first, nn.Flatten()), x, y, 1, quick=True)


@pytest.mark.parametrize("kind", ["truncated", "truncated in a box", "clipped", "dense", "clipped best", "dense crown"])
def test_margins_have_gradients(kind: str) -> None:
    torch.manual_seed(2)
    kind, _, method = kind.partition(" ") if kind[0] != "t" else (kind, "", "")
    first = {"clipped": ClippedLinear(5, 4, 0.4), "dense": nn.Linear(5, 4)}.get(kind, TruncatedLinear(5, 4, 1))
    model = nn.Sequential(first, nn.ReLU(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3)).double()
    x, y = torch.randn(3, 5, dtype=torch.float64), torch.tensor([0, 2, 1])
    ball = L0Ball(0, low=-1.1, high=1.2) if kind in ("dense", "truncated in a box") else None
    names = [name for name, _ in model.named_parameters()]

    def margins(*parameters: Tensor) -> Tensor:
        twin = copy.deepcopy(model)
        for name, value in zip(names, parameters, strict=True):
            owner, _, leaf = name.partition(".")
            part = twin[int(owner)]
            delattr(part, leaf)
            setattr(part, leaf, value)
        budget: int = 2 if kind == "truncated in a box" else 1
        return certify.margins(twin, x, y, budget, ball, method=cast(Method, method or "ibp"))

    assert torch.autograd.gradcheck(margins, tuple(p.detach().clone().requires_grad_() for p in model.parameters()))


def test_training_on_the_bound_certifies() -> None:
    (x, y), model = data(60), small()
    before = certify.accuracy(model, x, y, [1])[1]
    config = TrainConfig(epochs=60, batch=60, rates=(0.02,), optimizer="adam")
    training = fit(model, (x, y), config, objective=certify.Objective(1, mix=0.7, ramp=0.5))
    after = certify.accuracy(model.eval(), x, y, [1])[1]
    assert after > before + 0.3
    # What counts as right is what the bound proves: at the end nearly the certified accuracy, never the clean one.
    assert training.epochs[-1].train_accuracy == pytest.approx(after, abs=0.1)


@pytest.mark.parametrize("words", [{"method": "best"}, {"quick": True}], ids=str)
def test_training_behind_a_clamp_certifies(words: dict[str, Any]) -> None:
    (x, y), config = data(60), TrainConfig(epochs=60, batch=60, rates=(0.02,), optimizer="adam")
    torch.manual_seed(0)
    model = nn.Sequential(InputClamp(-1, 1), nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3))
    before = certify.accuracy(model.eval(), x, y, [1])[1]
    training = fit(model, (x, y), config, objective=certify.Objective(1, ramp=0.5, **words))
    after = certify.accuracy(model.eval(), x, y, [1])[1]
    assert after > before + 0.3
    assert training.epochs[-1].train_accuracy == pytest.approx(after, abs=0.05)


def test_an_objective_rises_by_whole_changes_and_mixes() -> None:
    objective = certify.Objective(5, mix=0.25, ramp=0.5)
    assert [objective.at(epoch, 8).budget for epoch in range(8)] == [0, 2, 3, 5, 5, 5, 5, 5]
    assert certify.Objective(5, ramp=0).at(0, 8).budget == 5
    assert [certify.Objective(5, ramp=1).at(epochs - 1, epochs).budget for epochs in (1, 2, 9)] == [5, 5, 5]
    assert objective.at(4, 8) == objective.at(7, 8) != objective.at(2, 8)
    rising = certify.Objective(5, ramp=0.5, mix_start=0.5)
    assert [rising.at(epoch, 8).mix for epoch in range(5)] == pytest.approx([0.5, 0.7, 0.8, 1.0, 1.0])
    assert certify.Objective(5, mix=0.9, mix_start=0.2).at(7, 8).mix == 0.9
    # The words by which a training knows its objective: those of one begun before there was a mix_start.
    assert repr(certify.Objective(5)) == "Objective(budget=5, mix=1.0, ramp=0.4)"
    assert repr(rising) == "Objective(budget=5, mix=1.0, ramp=0.5, mix_start=0.5)"
    pixels = certify.Objective(5, unit="pixel")
    assert repr(pixels) == "Objective(budget=5, mix=1.0, ramp=0.4, unit='pixel')"
    assert pixels.at(0, 8).unit == pixels.at(7, 8).unit == "pixel"
    lines = certify.Objective(5, method="best")
    assert repr(lines) == "Objective(budget=5, mix=1.0, ramp=0.4, method='best')"
    assert lines.at(0, 8).method == lines.at(7, 8).method == "best"
    quick = certify.Objective(5, quick=True)
    assert repr(quick) == "Objective(budget=5, mix=1.0, ramp=0.4, quick=True)"
    assert repr(certify.Objective(5, quick=False)) == repr(certify.Objective(5))
    assert quick.at(0, 8).quick
    assert quick.at(7, 8).quick
    (x, y), model = data(), small()
    bound = certify.Objective(2, ramp=0).at(0, 1)
    scores, worst = bound(model, x, y)
    assert torch.equal(scores, -certify.margins(model, x, y, 2))
    clean = nn.functional.cross_entropy(model(x), y)
    torch.testing.assert_close(worst, nn.functional.cross_entropy(scores, y))
    mixed = certify.Objective(2, mix=0.25, ramp=0).at(0, 1)(model, x, y)[1]
    torch.testing.assert_close(mixed, 0.75 * clean + 0.25 * worst)
    assert worst > clean
    plain = nn.Sequential(InputClamp(-1, 1), nn.Linear(12, 3))
    scores, _ = certify.Objective(2, ramp=0, quick=True).at(0, 1)(plain, x, y)
    assert torch.equal(scores, -certify.margins(plain, x, y, 2, quick=True))
    assert not torch.equal(scores, -certify.margins(plain, x, y, 2))


class Watch(TorchDispatchMode):
    """Notes what a GPU would have to wait for the host for, so that no graph could hold it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().partition(".")[0] in ("aten::lift_fresh", "aten::_local_scalar_dense", "aten::nonzero"):
            self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("method", ["ibp", "best"])
@pytest.mark.parametrize("unit", ["feature", "pixel"])
def test_a_step_on_the_bound_asks_the_host_for_nothing(method: Any, unit: Any) -> None:
    torch.manual_seed(0)
    x, y = torch.rand(4, 3, 4, 4), torch.arange(4)
    flat = nn.Sequential(InputClamp(0, 1), nn.Flatten(), nn.Linear(48, 8), nn.ReLU(), nn.Linear(8, 4))
    trimmed = nn.Sequential(nn.Flatten(), TruncatedLinear(48, 8, 9), nn.ReLU(), nn.Linear(8, 4))
    for model in (flat, trimmed) if method == "ibp" else (flat,):
        with Watch() as watch:
            certify.Objective(2, ramp=0, method=method, unit=unit).at(0, 1)(model, x, y)[1].backward()
        assert not watch.seen
    with Watch() as watch:
        certify.Objective(2, ramp=0, method=method, unit=unit, quick=True).at(0, 1)(flat, x, y)[1].backward()
    assert not watch.seen
    with Watch() as watch:
        bool(torch.tensor(1.0) > x[0, 0, 0, 0])
    assert watch.seen


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"budget": 0}, "budget must be an int >= 1, got 0"),
        ({"budget": 2, "mix": 0.0}, r"mix must lie in \(0, 1\], got 0.0"),
        ({"budget": 2, "mix": 1.5}, r"mix must lie in \(0, 1\], got 1.5"),
        ({"budget": 2, "ramp": -0.1}, r"ramp must lie in \[0, 1\], got -0.1"),
        ({"budget": 2, "mix_start": 1.1}, r"mix_start must lie in \[0, 1\], got 1.1"),
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
    with pytest.raises(ValueError, match='precision must not be "bf16" with an objective'):
        fit(model, (x, y), TrainConfig(epochs=5, precision="bf16"), objective=certify.Objective(1))


def test_training_on_the_bound_resumes_and_knows_its_objective(tmp_path: Path) -> None:
    (x, y), config = data(60), TrainConfig(epochs=6, batch=16, rates=(0.02,), optimizer="adam")
    objective, whole, killed = certify.Objective(2, ramp=0.5), small(), small()
    fit(whole, (x, y), config, objective=objective)

    def stop(stage: object) -> None:
        if isinstance(stage, Epoch) and stage.epoch == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(killed, (x, y), config, objective=objective, out=tmp_path, progress=stop)
    with pytest.raises(ValueError, match="differs in: objective"):
        fit(small(), (x, y), config, objective=certify.Objective(1), out=tmp_path)
    again = small()
    fit(again, (x, y), config, objective=objective, out=tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))


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
        reach = Reach.of(x[:, : layer.in_features], L0Ball(1, low=-inf, high=inf), ())
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


def test_pooling_by_a_negative_divisor_is_refused() -> None:
    head = [nn.Unflatten(1, (2, 2, 2)), nn.AvgPool2d(2, divisor_override=-3), nn.Flatten()]
    model = nn.Sequential(TruncatedLinear(12, 8, 3), *head).eval()
    with pytest.raises(ValueError, match="average pooling by a positive divisor"):
        certify.radius(model, data()[0], torch.zeros(40, dtype=torch.int64))


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
    reach = Reach.of(x, L0Ball(1, low=-inf, high=inf), network.rising)
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
        (lambda: nn.Sequential(nn.Linear(12, 12), *small()).eval(), r"first layer alone, got layer '1'"),
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
        (lambda m, x, y: certify.exact(m, x, y, 4), "no certificate exists"),
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
