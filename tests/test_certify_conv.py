"""Certificates of networks that begin with a truncated convolution: never above brute force, exact where they are."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import cached_property, partial
from itertools import combinations
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from certify_cases import AnyCase, bound, numbers
from ell0 import L0Ball, certify
from ell0.attacks import sparse_rs
from ell0.certify import _certify, _conv
from ell0.models import small_cnn
from ell0.nn import InputClamp, TruncatedConv2d, TruncatedLinear
from ell0.ops import reference
from ell0.threat import Unit
from ell0.train import TrainConfig, fit

inf = math.inf
UNITS: tuple[Unit, ...] = get_args(Unit)
ANY = L0Ball(0, low=-inf, high=inf)
networks = settings(max_examples=settings().max_examples * 5 // 4)
few = settings(max_examples=settings().max_examples // 5)


class Case(AnyCase):
    """One whose network begins with a truncated convolution."""

    @cached_property
    def layer(self) -> TruncatedConv2d:
        layer = self.network.layer
        assert isinstance(layer, TruncatedConv2d)
        return layer


@st.composite
def cases(draw: st.DrawFn) -> Case:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**40)))
    unit, ball_unit = draw(st.sampled_from(UNITS)), draw(st.sampled_from(UNITS))
    groups, channels = draw(st.sampled_from([1, 1, 2])), draw(st.integers(1, 2))
    kernel = draw(st.sampled_from([(1, 3), (2, 2), (3, 2), (3, 3)]))
    padding, stride = (draw(st.integers(0, 1)), draw(st.integers(0, 1))), draw(st.integers(1, 2))
    dilation = draw(st.sampled_from([1, 1, 2]))
    size = [max(2, dilation * (kernel[i] - 1) + 1 - 2 * padding[i]) + draw(st.integers(0, 1)) for i in (0, 1)]
    terms = kernel[0] * kernel[1] * (channels if unit == "feature" else 1)
    values = draw(st.sampled_from(["any", "any", "box", "upwards"]))
    k = draw(st.integers(0 if values == "box" else 1, (terms - 1) // 2))
    each = channels if (unit, ball_unit) == ("feature", "pixel") else 1
    most = 2 if values == "box" else min(2, k // each)
    ties = draw(st.booleans())
    x = numbers(generator, 2, groups * channels, *size, ties=ties)
    ends = numbers(generator, 2, *x.shape, ties=ties) * draw(st.sampled_from([1.0, 5.0]))
    low, high = ends.amin(0), ends.amax(0)
    if values != "box":
        high = torch.full_like(x, inf)
        low = -high if values == "any" else low
    mutable = torch.rand(x.shape, generator=generator) < 0.7 if draw(st.integers(0, 2)) == 0 else None
    out = 2 * groups
    parts: list[nn.Module] = [
        TruncatedConv2d(
            groups * channels, out, kernel, k, stride, padding, dilation, groups, draw(st.booleans()), unit=unit
        )
    ]
    head = draw(st.sampled_from(["none", "dense", "conv"]))
    if head == "conv":
        parts += [nn.BatchNorm2d(out), nn.ReLU(), nn.Conv2d(out, 3, 2, padding=1), nn.ReLU()]
        parts += [nn.MaxPool2d(2, 1) if draw(st.booleans()) else nn.AvgPool2d(2, 1), nn.Dropout()]
    parts += [*([nn.ReLU()] if head == "dense" else []), nn.Flatten()]
    wide = nn.Sequential(*parts).double().eval()(x).shape[1]
    clamps = [InputClamp(-0.8, 1.0)] if draw(st.integers(0, 7)) == 0 else []
    model = nn.Sequential(*clamps, *parts, nn.Linear(wide, 2)).double().eval()
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if value.is_floating_point() and value.ndim:
                value.copy_(numbers(generator, *value.shape, ties=ties))
                if "running_var" in name:
                    value.abs_().add_(0.1)
    return Case(model, x, L0Ball(draw(st.integers(0, most)), ball_unit, low, high, mutable), generator)


def sets(units: int, budget: int) -> Tensor:
    """All sets of at most ``budget`` units: ``(sets, units)``."""
    chosen = [c for count in range(budget + 1) for c in combinations(range(units), count)]
    masks = torch.zeros(len(chosen), units, dtype=torch.bool)
    for row, members in enumerate(chosen):
        masks[row, list(members)] = True
    return masks


def masks(case: Case) -> Tensor:
    """The numbers of each set of units: ``(sets, channels, height, width)``."""
    channels, height, width = case.x.shape[1:]
    if case.ball.unit == "pixel":
        every = sets(height * width, case.ball.budget).view(-1, 1, height, width)
        return every.expand(-1, channels, -1, -1)
    return sets(channels * height * width, case.ball.budget).view(-1, channels, height, width)


def points(case: Case, row: int) -> Tensor:
    """Points of the ball around a row: every set of units, with ends, huge numbers, small ones and mixtures of them."""
    x, generator = case.x[row], case.generator
    low, high, mutable = (bound.expand_as(case.x)[row] for bound in case.ball.box(case.x))
    every = masks(case)
    changed = every.repeat(1 + 600 // len(every), 1, 1, 1) & mutable
    spread = torch.randn(changed.shape, generator=generator, dtype=torch.float64) * 2
    values = x + spread
    choice = torch.randint(7, changed.shape, generator=generator)
    for code, candidate in enumerate((low, high, -1e9, 1e9, 40 * spread, spread)):
        values = torch.where(choice == code, torch.as_tensor(candidate, dtype=torch.float64), values)
    values = torch.where(values.isfinite(), values, spread.sign() * 1e9)
    moved = torch.where(changed, torch.maximum(torch.minimum(values, high), low), x).to(case.x.dtype)
    # A pixel whose channel outside the box is not moved cannot change in another.
    within = case.ball.part(case.x, torch.tensor([row]))
    return moved[within.contains(x.expand_as(moved), moved)]


def margins_at(case: Case, row: int, moved: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = case.model(moved)
    return logits[:, case.y[row], None] - logits


@networks
@given(cases())
def test_no_point_of_the_ball_beats_a_bound(case: Case) -> None:
    # The best of both routes is below what is reached if, and only if, each of them is.
    found = bound(case, "best")[0]
    for row in range(2):
        least = margins_at(case, row, points(case, row)).amin(0)
        assert (found[row] <= least + 1e-7 * (1 + least.abs())).all()


def enumerated(case: Case) -> tuple[Tensor, Tensor]:
    """The least and the largest value of each output of the first layer over all sets of changed units: ``(n, h)``.

    It rises with each product, so a changed one goes to its end; any value is a very large one.
    """
    layer, reach, shape = case.layer, case.reach, case.x.shape[1:]
    weight = layer.weight.reshape(layer.groups, -1, layer.weight.shape[1], layer.weight[0, 0].numel(), 1)

    def seen(images: Tensor) -> Tensor:
        """``(n, groups, out, in, places, positions)``; the last of them are those of each output."""
        return reference.fields(images.view(-1, *shape).double(), layer.weight, layer.geometry).unsqueeze(2)

    def add_up(products: Tensor) -> Tensor:
        terms = products.sum(3) if layer.unit == "pixel" else products.flatten(3, 4)
        order = terms.sort(3).values[:, :, :, layer.k : terms.shape[3] - layer.k]
        sums = order.sum(3).flatten(1, 2)
        return (sums if layer.bias is None else sums + layer.bias.unsqueeze(-1)).flatten(1)

    changed, found = seen(masks(case)) > 0, []
    for row in range(len(case.x)):
        ends = [seen(end[row].clamp(-1e9, 1e9)) * weight for end in (reach.low, reach.high)]
        here = seen(reach.x[row]) * weight
        least, most = (torch.where(changed, end(*ends), here) for end in (torch.minimum, torch.maximum))
        found.append((add_up(least).amin(0), add_up(most).amax(0)))
    low, high = zip(*found, strict=True)
    return torch.stack(low), torch.stack(high)


@networks
@given(cases())
def test_intervals_hold_every_set_of_changes_and_are_exact_for_any_value(case: Case) -> None:
    first, layer, reach = case.network.first, case.layer, case.reach
    low, high = (end.squeeze(1) for end in first.interval(reach, case.budgets(1)))
    least, most = enumerated(case)
    assert (low <= least + 1e-6).all()
    assert (most <= high + 1e-6).all()
    one = layer.unit == "pixel" or case.ball.unit == "feature" or layer.weight.shape[1] == 1
    padded = any(layer.geometry.padding) and bool(reach.moves.all())
    if one and not padded and (reach.any_value or (case.ball.budget == 1 and layer.unit == case.ball.unit)):
        torch.testing.assert_close(low, least)
        torch.testing.assert_close(high, most)


@few
@given(cases())
def test_many_budgets_are_swept_as_one_by_one(case: Case) -> None:
    first, most = case.network.first, case.ball.budget
    swept = first.interval(case.reach, torch.arange(most + 1).expand(2, -1))
    for budget in range(most + 1):
        alone = first.interval(case.reach, torch.full((2, 1), budget))
        for together, single in zip(swept, alone, strict=True):
            torch.testing.assert_close(together[:, budget], single.squeeze(1))


@few
@given(cases())
def test_all_outputs_see_the_same_changes(case: Case) -> None:
    """A head on the first layer falls by no more than `drop`, which may be less than the box of its outputs says."""
    first = case.network.first
    head = numbers(case.generator, 2, 3, first.outputs)
    drop = first.drop(case.reach, case.budgets(), head)
    layer = nn.Sequential(*case.network.rising, case.layer, nn.Flatten())
    for row in range(2):
        reached = layer(points(case, row)) @ head[row].T
        now = layer(case.x[row : row + 1]) @ head[row].T
        assert (now - reached <= drop[row] + 1e-7 * (1 + now.abs())).all()


@few
@given(cases())
def test_margins_for_training_are_the_interval_bound(case: Case) -> None:
    found = certify.margins(case.model, case.x, case.y, case.ball.budget, case.ball)
    sharp, reach = bound(case, "ibp")[0], case.reach
    assert (found <= sharp + 1e-9).all()
    simple = case.layer.unit == "pixel" or case.ball.unit == "feature" or case.layer.weight.shape[1] == 1
    if simple and reach.any_value and bool(reach.moves.all()) and bool((case.layer.weight != 0).all()):
        torch.testing.assert_close(found, sharp)


# What predicts is float32


@few
@given(cases())
def test_rounding_stays_within_the_slack(case: Case) -> None:
    case = case.single()
    double, slack = copy.deepcopy(case.model).double(), bound(case, "ibp")[1]
    for row in range(2):
        moved = points(case, row)
        with torch.no_grad():
            apart = case.model(moved).double() - double(moved.double())
        apart = apart[:, case.y[row], None] - apart
        assert (apart.abs() <= slack[row]).all()


@few
@given(cases())
def test_the_first_layer_rounds_no_further_than_it_says(case: Case) -> None:
    case = case.single()
    first = case.network.first
    allowed = first.rounding(case.reach, case.budgets(1)).expand(2, 1, first.outputs).squeeze(1)
    rounded = nn.Sequential(*case.network.rising, copy.deepcopy(case.layer).float(), nn.Flatten())
    exact = nn.Sequential(*case.network.rising, case.layer, nn.Flatten())
    with torch.no_grad():
        for row in range(2):
            moved = points(case, row)
            assert ((rounded(moved).double() - exact(moved.double())).abs() <= allowed[row]).all()


@few
@given(cases())
def test_a_certified_row_never_falls(case: Case) -> None:
    case = case.single()
    radii = certify.radius(case.model, case.x, case.y, case.ball)
    assert (radii >= 0).all()
    for budget in range(1, case.ball.budget + 1):
        for row in range(2):
            moved = points(replace(case, ball=replace(case.ball, budget=budget)), row)
            with torch.no_grad():
                stays = case.model(moved).argmax(1) == case.y[row]
            assert radii[row] < budget or bool(stays.all())


def sure() -> tuple[nn.Sequential, Tensor, Tensor]:
    """A network that counts signs, images of one sign and their labels: it bears as many changes as its k."""
    torch.manual_seed(0)
    layer, last = TruncatedConv2d(2, 4, 3, k=3, unit="pixel"), nn.Linear(16, 2)
    with torch.no_grad():
        layer.weight.abs_()
        last.weight.copy_(torch.tensor([[1.0], [-1.0]]))
    y = torch.arange(30) % 2
    x = (1 - 2 * y).view(-1, 1, 1, 1) * (torch.rand(30, 2, 4, 4) + 0.5)
    return nn.Sequential(layer, nn.Flatten(), last).eval(), x, y


def test_cancelling_channels_of_the_largest_numbers_stand() -> None:
    """Changed pixels whose channels cancel, or add up to infinity, are terms like any other."""
    model, x, y = sure()
    layer = model[0]
    assert isinstance(layer, TruncatedConv2d)
    pixels = replace(ANY, unit="pixel")
    radii = certify.radius(model, x, y, pixels, max_budget=3)
    lower, upper = certify.bounds(model, x, replace(pixels, budget=3))
    assert (radii == 3).all()
    with torch.no_grad():
        for scale, sign in ((1e8, -1), (1e20, -1), (3e38, -1), (3e38, 1)):
            for place in range(14):
                moved, weight = x.clone(), layer.weight[0, :, place // 4 % 3, place % 3] / layer.weight.max()
                moved.flatten(2)[..., place : place + 3] = scale * torch.stack((weight[1], sign * weight[0]))[:, None]
                logits = model(moved)
                assert ((lower <= logits) & (logits <= upper)).all()
                assert torch.equal(logits.argmax(1), y)


# The radius


def net(unit: Any = "pixel", k: int = 3, **kwargs: Any) -> nn.Sequential:
    torch.manual_seed(0)
    layer = TruncatedConv2d(2, 6, 3, k, unit=unit, **kwargs)
    wide = layer(torch.zeros(1, 2, 5, 5)).numel()
    return nn.Sequential(layer, nn.ReLU(), nn.Flatten(), nn.Linear(wide, 3)).eval()


def images(n: int = 20) -> Tensor:
    return torch.randn(n, 2, 5, 5, generator=torch.Generator().manual_seed(1))


def test_misclassified_rows_have_no_radius_and_right_ones_have_one() -> None:
    model, x, y = sure()
    y[::3] = 1 - y[::3]
    radii = certify.radius(model, x, y, replace(ANY, unit="pixel"), max_budget=3)
    assert radii.tolist() == [-1, 3, 3] * 10
    assert certify.accuracy(model, x, y, [0, 3]) == {0: pytest.approx(2 / 3), 3: pytest.approx(2 / 3)}


@pytest.mark.parametrize("method", ["ibp", "crown", "best"])
def test_a_field_as_large_as_the_image_is_the_dense_layer(method: Any) -> None:
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Flatten(), TruncatedLinear(50, 30, 6), nn.ReLU(), nn.Linear(30, 3)).eval()
    layer = TruncatedConv2d(2, 30, 5, 6)
    layer.load_state_dict({name: v.view_as(layer.state_dict()[name]) for name, v in dense[1].state_dict().items()})
    whole = nn.Sequential(layer, nn.ReLU(), nn.Flatten(), dense[3]).eval()
    x = images()
    for ball in (replace(ANY, budget=2), replace(ANY, budget=2, unit="pixel"), L0Ball(4, low=-1, high=2)):
        found = (certify.bounds(model, x, ball, method=method) for model in (dense, whole))
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    y = dense(x).argmax(1)
    assert torch.equal(certify.radius(dense, x, y, method=method), certify.radius(whole, x, y, method=method))
    assert certify.limit(whole, x) == 6


def test_lines_prove_more_than_intervals() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(TruncatedConv2d(3, 60, 6, 8, unit="pixel"), nn.ReLU(), nn.Flatten(), nn.Linear(60, 2)).eval()
    x, ball = torch.randn(8, 3, 6, 6), replace(ANY, budget=2, unit="pixel")
    ibp, crown = (certify.bounds(model, x, ball, method=method) for method in ("ibp", "crown"))
    assert (crown[1] - crown[0]).mean() < 0.9 * (ibp[1] - ibp[0]).mean()


def test_what_a_layer_can_bound() -> None:
    x, pixels = images(), replace(ANY, unit="pixel")
    assert [certify.limit(net("pixel", 3), x, ball) for ball in (ANY, pixels)] == [3, 3]
    assert [certify.limit(net("feature", 7), x, ball) for ball in (ANY, pixels)] == [7, 3]
    assert certify.limit(net("pixel", 3), x, L0Ball(0, "pixel")) == 25
    few_may = torch.zeros(2, 5, 5, dtype=torch.bool)
    few_may[:, ::2, ::4] = True  # at most two pixels, four numbers, of a field
    assert certify.limit(net("pixel", 3), x, replace(pixels, mutable=few_may)) == 25
    assert certify.limit(net("feature", 4), x, replace(ANY, mutable=few_may)) == 50
    assert certify.limit(net("pixel", 3), x, replace(pixels, mutable=torch.tensor([True, False]).view(2, 1, 1))) == 3
    assert certify.limit(net("feature", 3), x, replace(pixels, mutable=few_may)) == 1
    assert certify.limit(net("feature", 4, groups=2), x, pixels) == 4
    model = net("pixel", 2)
    y = model(x).argmax(1)
    radii = certify.radius(model, x, y, replace(pixels, mutable=few_may), max_budget=25)
    assert set(radii.tolist()) <= {*range(6), 25}


def test_rows_do_not_depend_on_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    x, model, seen = images(), net(padding=1), []
    y = model(x).argmax(1)
    whole = certify.radius(model, x, y)
    monkeypatch.setitem(_certify.ROOM, "cpu", 7 * 3 * 150)
    monkeypatch.setattr(_conv, "UNFOLDED", 1000)
    assert torch.equal(certify.radius(model, x, y, progress=lambda done, _: seen.append(done)), whole)
    assert seen == [7, 14, 20]


def test_a_model_in_use() -> None:
    """`models.small_cnn` is certified, trained on its bound and attacked within what was proven."""
    torch.manual_seed(0)
    model = small_cnn(2, classes=2, in_shape=(2, 5, 5), width=4, truncation="pixel")
    x = torch.cat((torch.randn(20, 2, 5, 5) * 0.2 + 0.5, torch.randn(20, 2, 5, 5) * 0.2 - 0.5))
    y, ball = torch.arange(40) // 20, replace(ANY, unit="pixel")
    config = TrainConfig(epochs=12, batch=20, rates=(0.02,), optimizer="adam")
    fit(model, (x, y), config, objective=certify.Objective(2, unit="pixel", ramp=0.3))
    radii = certify.radius(model.eval(), x, y, ball, max_budget=2)
    assert (radii == 2).double().mean() > 0.8
    challenge = certify.challenge(model, x[:4], y[:4], radii[:4], ball, {"sparse_rs": partial(sparse_rs, queries=50)})
    assert (challenge.tried, len(challenge.fell)) == (int((radii[:4] > 0).sum()), 0)


@pytest.mark.parametrize("unit", ["feature", "pixel"])
@pytest.mark.parametrize("box", [False, True])
def test_margins_have_gradients(unit: Any, box: bool) -> None:
    model = net(unit, 2, padding=1).double().train()
    layer = model[0]
    assert isinstance(layer, TruncatedConv2d)
    x, y = images(3).double(), torch.tensor([0, 2, 1])
    ball, budget = (L0Ball(0, unit, -1.1, 1.2), 3) if box else (replace(ANY, unit=unit), 1)

    def margins(weight: Tensor, bias: Tensor) -> Tensor:
        twin = copy.deepcopy(model)
        first = twin[0]
        del first.weight, first.bias
        first.weight, first.bias = weight, bias
        return certify.margins(twin, x, y, budget, ball)

    leaves = tuple(p.detach().clone().requires_grad_() for p in (layer.weight, layer.bias) if p is not None)
    assert torch.autograd.gradcheck(margins, leaves, fast_mode=True)
    certify.margins(model, x, y, budget, ball).sum().backward()
    assert layer.weight.grad is not None
    assert float(layer.weight.grad.abs().min()) >= 0 < float(layer.weight.grad.abs().max())


# Never a number where there is none


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, x, y: certify.radius(m, x, y, max_budget=4), "budget=4.*k=3 of the 9 terms.*at most 3 changed feat"),
        (lambda m, x, y: certify.margins(m, x, y, 4), "no certificate exists for budget=4"),
        (lambda m, x, y: certify.radius(m, x, y, L0Ball(4, "pixel", high=inf)), "at most 3 changed pixels"),
        (lambda m, x, y: certify.radius(m, x, y, L0Ball(26, "pixel")), "budget=26 with 25 units"),
        (lambda m, x, y: certify.radius(m, x[:, :1], y), r"images \(n, 2, height, width\).*got \(20, 1, 5, 5\)"),
        (lambda m, x, y: certify.radius(m, x.flatten(1), y), r"images \(n, 2, height, width\)"),
        (lambda m, x, y: certify.radius(nn.Sequential(nn.Flatten(), *m).eval(), x, y), "no Flatten before layer '1'"),
        (lambda m, x, y: certify.radius(m, x.double(), y), "dtype and device of layer '0'"),
        (lambda _, x, y: certify.radius(net(k=0), x, y, max_budget=1), "k=0 of the 9 terms.*at most 0 changed"),
        (lambda m, x, y: certify.exact(m, x, y, 1), "linear layer, got TruncatedConv2d"),
        (lambda _, x, y: certify.radius(net("feature", 5), x, y, replace(ANY, unit="pixel"), max_budget=3), "most 2"),
    ],
)
def test_what_is_wrong_is_named(call: Any, message: str) -> None:
    x, model = images(), net()
    with pytest.raises(ValueError, match=message):
        call(model, x, model(x).argmax(1))


def test_a_second_truncated_convolution_is_refused() -> None:
    model = nn.Sequential(TruncatedConv2d(2, 3, 3, 2), nn.ReLU(), TruncatedConv2d(3, 3, 3, 2), nn.Flatten()).eval()
    with pytest.raises(ValueError, match=r"first layer alone, got layer '2' \(TruncatedConv2d\)"):
        certify.radius(model, images(), torch.zeros(20, dtype=torch.int64))
