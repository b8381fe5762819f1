"""The true worst case of small networks, by branch and bound: how tight a certificate is."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import chain, combinations

import torch
from torch import Tensor, nn

from ..nn import ClippedLinear, TruncatedLinear
from ..ops.reference import products
from ..threat import L0Ball
from ._bound import margin_goals, over_intervals
from ._certify import check_labels, read
from ._head import intervals
from ._network import Network
from ._reach import Reach

WIDTH = 256
"""Regions split at a time."""


def exact(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    budget: int,
    ball: L0Ball | None = None,
    *,
    tolerance: float = 1e-3,
    regions: int = 20_000,
) -> tuple[Tensor, Tensor]:
    """The least margin, ``min over c of logit_y - logit_c``, that ``budget`` changes can reach, enclosed: two ``(n,)``.

    The second is reached at a point of the ball, the first is proven, and they are at most ``tolerance`` apart unless
    ``regions`` boxes were not enough. Every set of units is gone through: this is for tens of inputs and few changes.

    A box of changed inputs is bounded by intervals and split in halves, that with the least bound first. Any value is a
    bounded box too: a term beyond all others of its sum is truncated however far it is, and a clipped one stops at the
    clip.

    Args:
        model, x, y: as for `radius`, but no convolution first.
        ball: its unit, box and mutable count, not its budget; None: any value.
    """
    network, classes = read(model, x, "ibp")
    check_labels(x, y, classes)
    if not isinstance(network.layer, nn.Linear):
        raise ValueError(f"model must begin with a linear layer, got {type(network.layer).__name__}")
    ball = replace(L0Ball(0, low=-math.inf, high=math.inf) if ball is None else ball, budget=budget)
    reach = Reach.of(x, ball, network.rising)
    game = _Game(network.double(), classes)
    network.first.check(reach, budget)
    found = []
    with torch.no_grad():
        ends = [bound.expand_as(x) for bound in ball.box(x)]
        for i in range(len(x)):
            low, high, mutable = (bound[i : i + 1] for bound in ends)
            row = x[i : i + 1]
            low, high = (torch.where(mutable, bound, row) for bound in (low, high))
            for layer in network.rising:
                row, low, high = (layer(numbers) for numbers in (row, low, high))
            row, low, high = (numbers.flatten().double() for numbers in (row, low, high))
            far = game.far(row)
            low = torch.where(low == -torch.inf, torch.minimum(-far, high), low)
            high = torch.where(high == torch.inf, torch.maximum(far, low), high)
            sets = _sets(reach.number_of_units, budget, reach.channels, x.device)
            starts = torch.where(sets, low, row), torch.where(sets, high, row)
            found.append(game.solve(*starts, y[i : i + 1], tolerance, regions))
    lower, upper = zip(*found, strict=True)
    return x.new_tensor(lower, dtype=torch.float64), x.new_tensor(upper, dtype=torch.float64)


def _sets(units: int, budget: int, channels: int, device: torch.device) -> Tensor:
    """All sets of at most ``budget`` units as masks of their numbers: ``(sets, d)``."""
    every = list(chain.from_iterable(combinations(range(units), size) for size in range(budget + 1)))
    masks = torch.zeros(len(every), units, dtype=torch.bool, device=device)
    for row, chosen in enumerate(every):
        masks[row, list(chosen)] = True
    return masks.repeat(1, channels)


@dataclass(frozen=True, eq=False)
class _Game:
    network: Network
    classes: int

    def solve(self, low: Tensor, high: Tensor, y: Tensor, tolerance: float, regions: int) -> tuple[float, float]:
        """A proven and a reached least margin over the boxes from low to high, ``(boxes, d)`` each."""
        least, seen = self._bounds(low, high, y)
        reached, proven, made = float(seen.min()), math.inf, len(low)
        while True:
            done = least > reached - tolerance
            proven = min(proven, float(least[done].min()) if done.any() else math.inf)
            low, high, least = low[~done], high[~done], least[~done]
            if not len(low) or made >= regions:
                return min(proven, float(least.min()) if len(low) else math.inf, reached), reached
            first = least.argsort()
            split, rest = first[:WIDTH], first[WIDTH:]
            low_half, high_half = _halves(low[split], high[split], self.network.layer.weight)
            fresh, seen = self._bounds(low_half, high_half, y)
            reached, made = min(reached, float(seen.min())), made + len(fresh)
            low, high = torch.cat((low[rest], low_half)), torch.cat((high[rest], high_half))
            least = torch.cat((least[rest], fresh))

    def _bounds(self, low: Tensor, high: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The proven least margin of each box, and the least one of its middle and two corners: two ``(boxes,)``."""
        head = self.network.head
        weight, bias = self.network.layer.weight, self.network.layer.bias
        ends = products(low, weight), products(high, weight)
        # The layer rises with each of its terms.
        outs = tuple(self._add_up(terms) for terms in (torch.minimum(*ends), torch.maximum(*ends)))
        outs = outs if bias is None else tuple(out + bias for out in outs)
        goals = margin_goals(y.expand(len(low)), self.classes)
        own = ~goals.any(-1)
        passed = intervals(head, (outs[0], outs[1]))
        bound = over_intervals(head, passed, goals, (len(low), 1)).squeeze(1)
        points = torch.cat((low, high, (low + high) / 2))
        logits = nn.Sequential(self.network.layer, *head)(points).unflatten(0, (3, -1))
        seen = (goals @ logits.unsqueeze(-1)).squeeze(-1).masked_fill(own, torch.inf)
        return bound.masked_fill(own, torch.inf).amin(1), seen.amin((0, 2))

    def _add_up(self, terms: Tensor) -> Tensor:
        layer = self.network.layer
        if isinstance(layer, ClippedLinear):
            return terms.clamp(-layer.clip, layer.clip).sum(-1)
        k = layer.k if isinstance(layer, TruncatedLinear) else 0
        return terms.sort(-1).values[..., k : terms.shape[-1] - k].sum(-1)

    def far(self, x: Tensor) -> Tensor:
        """Values beyond which a changed number does no more: ``(d,)``."""
        layer = self.network.layer
        largest = (x * layer.weight).abs().amax(1, keepdim=True)
        if isinstance(layer, ClippedLinear):
            largest = torch.full_like(largest, layer.clip)
        return torch.where(layer.weight != 0, largest / layer.weight.abs(), 0.0).amax(0)


def _halves(low: Tensor, high: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Each box cut in two where its terms are widest."""
    widest = ((high - low) * weight.abs().sum(0)).argmax(1, keepdim=True)
    middle = ((low + high) / 2).gather(1, widest)
    return torch.cat((low, low.scatter(1, widest, middle))), torch.cat((high.scatter(1, widest, middle), high))
