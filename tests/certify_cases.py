"""Small networks with rows and an attacker, and points of its ball, for the tests of certificates."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, pairwise, product
from math import inf
from typing import Any, cast

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ell0 import L0Ball
from ell0.certify.network import Network
from ell0.certify.propagate import Bounder, margin_goals
from ell0.certify.reachable import Reachable
from ell0.nn import InputClamp, InputScale, TruncatedLinear

layers = settings(max_examples=settings().max_examples // 3)
few = settings(max_examples=settings().max_examples // 8)


@dataclass(frozen=True, eq=False)
class Case:
    """A small network, two rows of input and an attacker."""

    model: nn.Sequential
    x: Tensor
    ball: L0Ball
    generator: torch.Generator

    @cached_property
    def y(self) -> Tensor:
        return cast(Tensor, self.model(self.x)).argmax(1)

    @cached_property
    def network(self) -> Network:
        return Network.read(self.model, self.x).double()

    @cached_property
    def reach(self) -> Reachable:
        return Reachable.of(self.x, self.ball, self.network.rising)

    def budgets(self, *shape: int) -> Tensor:
        return torch.full((len(self.x), *shape), self.ball.budget)

    def single(self) -> Case:
        """The same in float32."""
        low, high = (bound.float() for bound in self.ball.box(self.x)[:2])
        ball = replace(self.ball, low=low, high=high)
        return replace(self, model=copy.deepcopy(self.model).float(), x=self.x.float(), ball=ball)


def numbers(generator: torch.Generator, *shape: int, ties: bool = False) -> Tensor:
    """Normal numbers, or few different ones with many zeros, in which terms tie and weights vanish."""
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (drawn * 1.5).round() / 2 if ties else drawn


@st.composite
def cases(draw: st.DrawFn, kinds: tuple[str, ...] = ("truncated", "dense")) -> Case:
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
    classes, hidden = draw(st.integers(2, 3)), draw(st.integers(2, 5))
    rising: list[nn.Module] = [InputClamp(-0.8, 1.0)] if draw(st.integers(0, 5)) == 0 else []
    # By a power of two: float32 and float64 scale alike but for one rounding.
    by_channel = pixels and draw(st.booleans())
    scale = InputScale((-0.75, 0.25), (1.25, 0.75)) if by_channel else InputScale(-0.75, 1.25)
    rising += [scale] if draw(st.integers(0, 5)) == 0 else []
    depth, bias = draw(st.integers(1, 3)), draw(st.booleans())
    widths = (d, *(hidden, 3)[: depth - 1], classes)
    first = TruncatedLinear(d, widths[1], k, bias) if kind == "truncated" else nn.Linear(d, widths[1], bias)
    parts: list[nn.Module] = [first]
    for before, after in pairwise(widths[1:]):
        norm = [nn.BatchNorm1d(before)] if draw(st.integers(0, 3)) == 0 else []
        parts += [*norm, nn.ReLU(), nn.Linear(before, after)]
    model = nn.Sequential(*rising, nn.Flatten(), *parts).double().eval()
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                value.copy_(numbers(generator, *value.shape, ties=ties) if value.ndim else value)
                if "running_var" in name:
                    value.abs_().add_(0.1)
    return Case(model, x, L0Ball(budget, unit, low, high, mutable), generator)  # type: ignore[arg-type]


def add_up(layer: nn.Linear, terms: Tensor) -> Tensor:
    """The layer's sums of its terms ``(..., out, in)``, without bias."""
    k = layer.k if isinstance(layer, TruncatedLinear) else 0
    return terms.sort(-1).values[..., k : terms.shape[-1] - k].sum(-1)


def sets(case: Case) -> Tensor:
    """All sets of at most ``budget`` units, as numbers that change: ``(sets, d)`` bool."""
    units = range(case.reach.number_of_units)
    chosen = [members for size in range(case.ball.budget + 1) for members in combinations(units, size)]
    return torch.tensor([[unit in members for unit in units] for members in chosen]).repeat(1, case.reach.channels)


def attacks(case: Case) -> tuple[Tensor, Tensor]:
    """Brute force: every set of changed units, and each changed number at all of three values of its own.

    Points of the ball ``(points, ...)`` and the row of each. Values are ends of the box, such that make a term the
    largest of a sum, and any others.
    """
    x, g, weight, shape = case.x, case.generator, case.network.layer.weight, (3, *case.x.shape)
    low, high, mutable = (bound.expand_as(x) for bound in case.ball.box(x))
    largest = (case.reach.x.unsqueeze(1) * weight).abs().amax(-1, keepdim=True)
    kinks = (largest / torch.where(weight == 0, inf, weight)).transpose(1, 2)
    kinks = torch.cat((kinks, -kinks, 1.5 * kinks), -1)
    pick = torch.randint(kinks.shape[-1], (*kinks.shape[:2], 3), generator=g)
    values = kinks.gather(-1, pick).movedim(-1, 0).to(x.dtype).reshape(shape)
    choice, spread = torch.randint(5, shape, generator=g), torch.randn(shape, generator=g, dtype=x.dtype) * 2
    for code, candidate in enumerate((low, high, spread, x + spread)):
        values = torch.where((choice == code) & candidate.isfinite(), candidate, values)
    values = torch.where(mutable, torch.maximum(torch.minimum(values, high), low), x)
    codes = []
    for mask in sets(case):
        each = torch.tensor(list(product((1, 2, 3), repeat=int(mask.sum()))), dtype=torch.int64)
        codes.append(torch.zeros(len(each), len(mask), dtype=torch.int64).masked_scatter(mask, each))
    index = torch.cat(codes).unsqueeze(1).expand(-1, len(x), -1)
    points = torch.cat((x.unsqueeze(0), values)).flatten(2).gather(0, index).view(-1, *x.shape[1:])
    rows = torch.arange(len(x)).repeat(len(index))
    ball = replace(case.ball, low=low[rows], high=high[rows], mutable=mutable[rows])
    assert ball.contains(x[rows], points).all()
    return points, rows


def least_margins(case: Case, points: Tensor, rows: Tensor) -> Tensor:
    """The least ``logit_y - logit_c`` that the points of each row reach: ``(n, classes)``."""
    with torch.no_grad():
        model = case.model if points.dtype == case.x.dtype else copy.deepcopy(case.model).to(points.dtype)
        logits = model(points)
    margins = logits.gather(1, case.y[rows, None]) - logits
    return torch.stack([margins[rows == row].amin(0) for row in range(len(case.x))])


@torch.no_grad()
def bound(case: Case, method: Any) -> tuple[Tensor, Tensor]:
    """Below the margins, and the slack for rounding: two ``(n, classes)``."""
    goals = margin_goals(case.y, case.model(case.x).shape[1])
    found, slack = Bounder(case.network).at(case.reach, case.budgets(1), goals, method)
    return found.squeeze(1), slack.squeeze(1)


def small(k: int = 3, classes: int = 3, **kwargs: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(TruncatedLinear(12, 8, k, **kwargs), nn.ReLU(), nn.Linear(8, classes)).eval()


def data(n: int = 40, d: int = 12) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    y = torch.arange(n) % 3
    return torch.randn(n, d) * 0.2 + nn.functional.one_hot(y, 3).repeat(1, d // 3), y
