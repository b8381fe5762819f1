"""Lower bounds of linear functions of a network's logits, anywhere in the ball."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from .network import Network
from .propagate import Interval, LaterLayer, backward, intervals, rounding
from .reachable import Reachable

Method = Literal["best", "ibp"]

ROOM = {"cpu": 1 << 24, "cuda": 1 << 27}
"""Outputs of the first layer that exist at once, for each of the budgets or classes that are looked at."""


class Bounder:
    """The bounds of a network in float64; beside each, what the model that predicts, in float32, may differ by.

    Two routes. Intervals (IBP): each output of the first layer, then each number of every layer, in an interval of its
    own. Lines (CROWN): one linear function of the first layer's outputs below the goal, then the better of what their
    intervals leave of it and of what the same changed inputs for all of them do (`FirstLayer.drop`).
    """

    def __init__(self, network: Network) -> None:
        self.network, self.first = network, network.first

    def room(self, each: int) -> int:
        """How many rows fit in memory if ``each`` times the outputs of the first layer exist for a row."""
        weight = self.first.weight
        return max(1, ROOM.get(weight.device.type, ROOM["cpu"]) // (each * len(weight)))

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
        coming = error.unflatten(0, budgets.shape) @ slopes.abs().transpose(1, 2)
        slack: Tensor = coming + own.unflatten(0, budgets.shape) @ goals.abs().transpose(1, 2)
        return slack


def over_intervals(head: Sequence[LaterLayer], passed: Sequence[Interval], goals: Tensor) -> Tensor:
    """Below ``goals @ logits`` by intervals: ``(n, m, c)``.

    passed: what `intervals` found from the interval of the first layer, ``(n * m, h)`` each. The layers behind the last
    ReLU and the goals are one linear function, so nothing is lost there.
    """
    slopes, constants, place = backward(head, passed, goals, relax=False)
    return _over_box(slopes, passed[place]) + constants.unsqueeze(1)


def _over_box(slopes: Tensor, box: Interval) -> Tensor:
    """The least ``slopes @ z`` for z in a box: ``(n, m, c)``; slopes ``(n, c, h)``, ends of the box ``(n * m, h)``."""
    low, high = (end.unflatten(0, (len(slopes), -1)) for end in box)
    least: Tensor = low @ slopes.clamp(min=0).transpose(1, 2) + high @ slopes.clamp(max=0).transpose(1, 2)
    return least


def margin_goals(y: Tensor, classes: int) -> Tensor:
    """Goals whose values are ``logit_y - logit_c`` for each class c: ``(n, classes, classes)``, 0 at c = y."""
    identity = torch.eye(classes, dtype=torch.float64, device=y.device)
    return identity[y].unsqueeze(1) - identity


def check_method(method: Method) -> None:
    if method not in get_args(Method):
        raise ValueError(f'method must be "best" or "ibp", got {method!r}')
