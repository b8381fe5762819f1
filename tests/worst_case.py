"""The true worst case of small networks, by branch and bound: an oracle for certificates."""

from __future__ import annotations

import math
from itertools import chain, combinations

import torch
from torch import Tensor, nn

from certify_cases import Case
from ell0.certify.propagate import intervals, margin_goals, over_intervals
from ell0.nn import TruncatedLinear

WIDTH = 256  # boxes split at a time


def add_up(layer: nn.Linear, terms: Tensor) -> Tensor:
    """The layer's sums of its terms ``(..., out, in)``, without bias."""
    k = layer.k if isinstance(layer, TruncatedLinear) else 0
    return terms.sort(-1).values[..., k : terms.shape[-1] - k].sum(-1)


def sets(units: int, budget: int) -> Tensor:
    """All sets of at most ``budget`` units: ``(sets, units)`` bool."""
    chosen = list(chain.from_iterable(combinations(range(units), size) for size in range(budget + 1)))
    masks = torch.zeros(len(chosen), units, dtype=torch.bool)
    for row, members in enumerate(chosen):
        masks[row, list(members)] = True
    return masks


def worst_margin(case: Case, row: int, tolerance: float = 0.02, regions: int = 3000) -> tuple[float, float]:
    """The least margin of a row in the ball: proven, and reached at a point, at most ``tolerance`` apart unless
    ``regions`` boxes were not enough.

    A box of changed inputs for each set of units is bounded by intervals and split in halves, that with the least bound
    first. Any value is a bounded box too: a term beyond all others of its sum is truncated however far it is.
    """
    reach, layer = case.reach, case.layer
    x, low, high = (numbers[row] for numbers in (reach.x, reach.low, reach.high))
    largest = (x * layer.weight).abs().amax(1, keepdim=True)
    far = torch.where(layer.weight != 0, largest / layer.weight.abs(), 0.0).amax(0)
    low = torch.where(low == -math.inf, torch.minimum(-far, high), low)
    high = torch.where(high == math.inf, torch.maximum(far, low), high)
    masks = sets(reach.number_of_units, case.ball.budget).repeat(1, reach.channels)
    low, high = torch.where(masks, low, x), torch.where(masks, high, x)
    least, seen = _margins(case, row, low, high)
    reached, proven, made = float(seen.min()), math.inf, len(low)
    while True:
        done = least > reached - tolerance
        proven = min([proven, *least[done].tolist()])
        low, high, least = low[~done], high[~done], least[~done]
        if not len(low) or made >= regions:
            return min([proven, reached, *least.tolist()]), reached
        order = least.argsort()
        split, rest = order[:WIDTH], order[WIDTH:]
        widest = ((high - low)[split] * layer.weight.abs().sum(0)).argmax(1, keepdim=True)
        middle = ((low + high) / 2)[split].gather(1, widest)
        lows = torch.cat((low[split], low[split].scatter(1, widest, middle)))
        highs = torch.cat((high[split].scatter(1, widest, middle), high[split]))
        fresh, seen = _margins(case, row, lows, highs)
        reached, made = min(reached, float(seen.min())), made + len(fresh)
        low, high, least = torch.cat((low[rest], lows)), torch.cat((high[rest], highs)), torch.cat((least[rest], fresh))


def _margins(case: Case, row: int, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """The proven least margin of each box, and the least one of its middle and two corners: two ``(boxes,)``."""
    layer, head = case.layer, case.network.head
    ends = low.unsqueeze(1) * layer.weight, high.unsqueeze(1) * layer.weight
    bias = 0.0 if layer.bias is None else layer.bias
    # The layer rises with each of its terms.
    outs = [add_up(layer, end(*ends)) + bias for end in (torch.minimum, torch.maximum)]
    with torch.no_grad():
        points = torch.cat((low, high, (low + high) / 2))
        logits = nn.Sequential(layer, *head)(points).unflatten(0, (3, -1))
        goals = margin_goals(case.y[row].expand(len(low)), logits.shape[-1])
        bound = over_intervals(head, intervals(head, (outs[0], outs[1])), goals).squeeze(1)
        seen = (goals @ logits.unsqueeze(-1)).squeeze(-1)
    own = ~goals.any(-1)
    return bound.masked_fill(own, math.inf).amin(1), seen.masked_fill(own, math.inf).amin((0, 2))
