"""Lower bounds of linear functions of a network's logits: intervals forwards, lines backwards, rounding beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .first_layer import rounding_share, slack
from .network import Affine, LaterLayer, Network
from .reachable import Reachable

Method = Literal["best", "ibp"]
Interval = tuple[Tensor, Tensor]  # the least and the largest value of each number
ROOM = {"cpu": 1 << 24, "cuda": 1 << 27}  # outputs of the first layer at once, for each budget or class looked at


class Bounder:
    """The bounds of a network in float64; beside each, what the model that predicts, in float32, may differ by.

    Two routes. Intervals (IBP): each output of the first layer, then each number of every layer, in an interval of its
    own. Lines (CROWN): one linear function of the first layer's outputs below the goal, then the better of what their
    intervals leave of it and of what the same changed inputs for all of them do (`Dense.drop`).
    """

    def __init__(self, network: Network) -> None:
        self.network, self.first = network, network.first

    def room(self, each: int) -> int:
        """How many rows fit in memory if ``each`` times the outputs of the first layer exist for a row."""
        return max(1, ROOM.get(self.first.weight.device.type, ROOM["cpu"]) // (each * len(self.first.weight)))

    def at(
        self,
        reach: Reachable,
        budgets: Tensor,
        goals: Tensor,
        method: Method,
        first: Interval | None = None,
        value: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Below ``goals @ logits``, and the slack for rounding: two ``(n, m, c)``.

        budgets: ``(n, m)``, m = 1 unless the method is "ibp".  goals: ``(n, c, classes)``.  first: the interval of the
        first layer, ``(n, m, h)`` each, and value: its outputs for x itself, ``(n, h)``, where they are known.
        """
        low, high = first or self.first.interval(reach, budgets)
        passed = intervals(self.network.head, (low.flatten(0, 1), high.flatten(0, 1)))
        bound = over_intervals(self.network.head, passed, goals)
        if method == "best":
            slopes, constants, _ = backward(self.network.head, passed, goals)
            value = self.first.value(reach.x.to(slopes.dtype)) if value is None else value
            falls_to = (slopes @ value.unsqueeze(-1)).squeeze(-1) - self.first.drop(reach, budgets[:, 0], slopes)
            lines = torch.maximum(_over_box(slopes, passed[0]).squeeze(1), falls_to) + constants
            bound = torch.maximum(bound, lines.unsqueeze(1))
        return bound, self._slack(reach, budgets, passed, goals)

    def _slack(self, reach: Reachable, budgets: Tensor, passed: Sequence[Interval], goals: Tensor) -> Tensor:
        """How far ``goals @ logits`` in float32 may lie below the exact value: ``(n, m, c)``.

        Behind the last ReLU, the goals meet the errors that come in as one linear function; what the layers there add
        to them of their own is added up.
        """
        head = self.network.head
        slopes, _, place = backward(head, passed, goals, relax=False)
        error = self.first.rounding(reach, budgets)
        error = error.expand(*budgets.shape, error.shape[-1]).flatten(0, 1)
        error = rounding(head[:place], passed, error)
        (low, high), tail = passed[place], head[place:]
        own = rounding(tail, intervals(tail, (low - error, high + error)), torch.zeros_like(error))
        coming, own = (part.unflatten(0, budgets.shape) for part in (error, own))
        return torch.matmul(coming, slopes.abs().mT) + torch.matmul(own, goals.abs().mT)


def over_intervals(head: Sequence[LaterLayer], passed: Sequence[Interval], goals: Tensor) -> Tensor:
    """Below ``goals @ logits`` by intervals: ``(n, m, c)``.

    passed: what `intervals` found, ``(n * m, h)`` each. The layers behind the last ReLU and the goals are one linear
    function, so nothing is lost there.
    """
    slopes, constants, place = backward(head, passed, goals, relax=False)
    return _over_box(slopes, passed[place]) + constants.unsqueeze(1)


def pairs_over_intervals(
    head: Sequence[LaterLayer], passed: Sequence[Interval], y: Tensor, dtype: torch.dtype
) -> Tensor:
    """Below ``logit_y - logit_c`` for each class c by intervals: ``(n, c)``; passed: ``(n, h)`` each.

    `over_intervals` makes slopes for each row. Here they are made once for each pair of classes, and one product
    applies them to all rows.
    """
    classes = passed[-1][0].shape[1]
    goals = margin_goals(torch.arange(classes, device=y.device), classes).to(dtype)
    slopes, constants, place = backward(head, passed, goals, relax=False)
    low, high = passed[place]
    pairs = F.linear(low, slopes.clamp(min=0).flatten(0, 1)) + F.linear(high, slopes.clamp(max=0).flatten(0, 1))
    found: Tensor = pairs.unflatten(1, (classes, classes)) + constants
    return found[torch.arange(len(found), device=y.device), y]


def _over_box(slopes: Tensor, box: Interval) -> Tensor:
    """The least ``slopes @ z`` for z in a box: ``(n, m, c)``; slopes ``(n, c, h)``, ends of the box ``(n * m, h)``."""
    low, high = (end.unflatten(0, (len(slopes), -1)) for end in box)
    return torch.matmul(low, slopes.clamp(min=0).mT) + torch.matmul(high, slopes.clamp(max=0).mT)


def margin_goals(y: Tensor, classes: int) -> Tensor:
    """Goals whose values are ``logit_y - logit_c`` for each class c: ``(n, classes, classes)``, 0 at c = y."""
    identity = torch.eye(classes, dtype=torch.float64, device=y.device)
    return identity[y].unsqueeze(1) - identity


def intervals(layers: Sequence[LaterLayer], start: Interval) -> list[Interval]:
    """The input of each layer, and the output of the last: interval bound propagation."""
    found = [start]
    for layer in layers:
        low, high = found[-1]
        if isinstance(layer, nn.ReLU):
            found.append((F.relu(low), F.relu(high)))  # the layer itself may work in place
        else:
            centre, radius = layer((low + high) / 2), _spread(layer, (high - low) / 2)
            found.append((centre - radius, centre + radius))
    return found


def rounding(layers: Sequence[LaterLayer], passed: Sequence[Interval], error: Tensor) -> Tensor:
    """The error of the last layer's outputs in float32, given that of the first one's inputs.

    passed: what `intervals` found. A sum of p products in any order errs by p unit roundoffs of the sum of their
    magnitudes, on top of what the errors of its input add up to. ReLU errs by no more than its input, and not at all
    where neither the exact nor the rounded number can be positive.
    """
    for layer, (low, high) in zip(layers, passed, strict=False):
        if isinstance(layer, nn.ReLU):
            error = error.masked_fill(high + error <= 0, 0.0)
            continue
        size = torch.maximum(low.abs(), high.abs()) + error
        # Square roots of a batch norm err by more than a sum.
        terms = layer.in_features if isinstance(layer, nn.Linear) else 18
        error = _spread(layer, error) + slack(rounding_share(terms), terms, _spread(layer, size) + _offset(layer))
    return error


def backward(
    layers: Sequence[LaterLayer], passed: Sequence[Interval], goals: Tensor, relax: bool = True
) -> tuple[Tensor, Tensor, int]:
    """A linear function of an earlier layer's input that lies below ``goals @ output`` wherever the intervals hold.

    goals: ``(n, c, classes)``.  passed: what `intervals` found. Result: slopes ``(n, c, h)``, constants ``(n, c)``, and
    the number of layers in front of them: 0 with ``relax``, else as far back as layers are affine and nothing is lost.

    CROWN's rule: ReLU lies above z * (1 if high > -low else 0) and below high (z - low) / (high - low) where its input
    changes sign.
    """
    n, c = goals.shape[:2]
    slopes, constants = goals.flatten(0, 1), goals.new_zeros(n * c)
    place = len(layers)
    for layer, (low, high) in zip(reversed(layers), reversed(passed[:-1]), strict=True):
        if not isinstance(layer, nn.ReLU):
            slopes, more = _transposed(layer, slopes, low.shape[1])
        elif relax:
            slopes, more = _through_relu(slopes, *(end.repeat_interleave(c, 0) for end in (low, high)))
        else:
            break
        constants = constants + more
        place -= 1
    return slopes.unflatten(0, (n, c)), constants.view(n, c), place


def _through_relu(slopes: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    crosses = (low < 0) & (high > 0)
    active = (low >= 0).to(slopes)
    steepness = torch.where(crosses, high / (high - low), active)
    lower = torch.where(crosses, (high > -low).to(slopes), active)
    gains, losses = slopes.clamp(min=0), slopes.clamp(max=0)
    constants = (losses * torch.where(crosses, -steepness * low, 0.0)).sum(1)
    return gains * lower + losses * steepness, constants


def _transposed(layer: Affine, slopes: Tensor, features: int) -> tuple[Tensor, Tensor]:
    """``slopes @ layer(z)`` as slopes of z and a constant: the backward pass of an affine layer is its transpose."""
    with torch.enable_grad():
        zeros = slopes.new_zeros(len(slopes), features).requires_grad_()
        out = layer(zeros)
    (back,) = torch.autograd.grad(out, zeros, slopes, create_graph=torch.is_grad_enabled())
    return back, (slopes * (out if torch.is_grad_enabled() else out.detach())).sum(1)


def _spread(layer: Affine, sizes: Tensor) -> Tensor:
    return F.linear(sizes, layer.weight.abs()) if isinstance(layer, nn.Linear) else sizes * _factor(layer).abs()


def _offset(layer: Affine) -> Tensor | float:
    """The magnitude of what an affine layer adds: ``(h,)``."""
    offset = 0.0 if layer.bias is None else layer.bias.abs()
    if isinstance(layer, nn.Linear):
        return offset
    assert layer.running_mean is not None
    return (_factor(layer) * layer.running_mean).abs() + offset


def _factor(layer: nn.BatchNorm1d) -> Tensor:
    assert layer.running_var is not None
    factor = (layer.running_var + layer.eps).rsqrt()
    return factor if layer.weight is None else layer.weight * factor
