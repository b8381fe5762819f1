"""Lower bounds of linear functions of a network's logits, wherever in the ball the input lies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from .network import Network
from .propagate import Interval, LaterLayer, backward, intervals, rounding
from .reachable import Reachable

Method = Literal["best", "ibp", "crown"]


class Bounder:
    """The bounds of a network in float64; beside each, what the model that predicts, in float32, may differ by.

    Two routes. Intervals (IBP): each output of the first layer, then each number of every layer, in an interval of its
    own. Lines (CROWN): one linear function of the first layer's outputs below the goal, then the better of what their
    intervals leave of it and of what the same changed inputs for all of them do (`FirstLayer.drop`).
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        self.first = network.first

    def sweep(self, reach: Reachable, budgets: Tensor, goals: Tensor, first: Interval) -> tuple[Tensor, Tensor]:
        """Below ``goals @ logits`` at many budgets, by intervals, and the slack for rounding: two ``(n, m, c)``.

        budgets: ``(n, m)``.  goals: ``(n, c, classes)``.  first: the interval of the first layer, ``(n, m, h)`` each.
        """
        low, high = (end.flatten(0, 1) for end in first)
        passed = intervals(self.network.head, (low, high))
        bound = over_intervals(self.network.head, passed, goals, budgets.shape)
        return bound, self._slack(reach, budgets, passed, goals)

    def at(
        self,
        reach: Reachable,
        budgets: Tensor,
        goals: Tensor,
        method: Method,
        first: Interval | None = None,
        value: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Below ``goals @ logits`` at one budget a row, and the slack for rounding: two ``(n, c)``.

        budgets: ``(n,)``.  goals: ``(n, c, classes)``.  first: the interval of the first layer, and value: its outputs
        for x itself, where they are known, ``(n, h)`` each.
        """
        column = budgets.unsqueeze(1)
        low, high = first or (end.squeeze(1) for end in self.first.interval(reach, column))
        passed = intervals(self.network.head, (low, high))
        drop = partial(self.first.drop, reach, budgets)
        bound = below(self.network, reach, passed, drop, goals, method, value)
        return bound, self._slack(reach, column, passed, goals).squeeze(1)

    def _slack(self, reach: Reachable, budgets: Tensor, passed: Sequence[Interval], goals: Tensor) -> Tensor:
        """What ``goals @ logits`` in float32 may lie below the exact value: ``(n, m, c)``.

        Behind the last layer that bends, the goals meet the errors that come in as one linear function; what the layers
        there add to them of their own is added up.
        """
        head = self.network.head
        slopes, _, place = backward(head, passed, goals, relax=False)
        error = self.first.rounding(reach, budgets)
        error = error.expand(*budgets.shape, error.shape[-1]).flatten(0, 1)
        error = rounding(head[:place], passed, error)
        low, high = passed[place]
        tail = head[place:]
        own = rounding(tail, intervals(tail, (low - error, high + error)), torch.zeros_like(error))
        coming = error.unflatten(0, budgets.shape) @ slopes.abs().transpose(1, 2)
        slack: Tensor = coming + own.unflatten(0, budgets.shape) @ goals.abs().transpose(1, 2)
        return slack


def below(
    network: Network,
    reach: Reachable,
    passed: Sequence[Interval],
    drop: Callable[[Tensor], Tensor],
    goals: Tensor,
    method: Method,
    value: Tensor | None = None,
) -> Tensor:
    """Below ``goals @ logits``: ``(n, c)``.

    passed: what `intervals` found from the interval of the first layer.  drop: its `FirstLayer.drop`.
    value: its outputs for x, ``(n, h)``, where they are known.
    """
    head, found = network.head, []
    if method != "crown":
        found.append(over_intervals(head, passed, goals, (len(goals), 1)).squeeze(1))
    if method != "ibp":
        slopes, constants, _ = backward(head, passed, goals)
        apart = _over_box(slopes, *(end.unsqueeze(1) for end in passed[0])).squeeze(1)
        value = network.first.value(reach.x.to(slopes.dtype)) if value is None else value
        now = (slopes @ value.unsqueeze(-1)).squeeze(-1)
        found.append(torch.maximum(apart, now - drop(slopes)) + constants)
    return torch.stack(found).amax(0)


def over_intervals(
    head: Sequence[LaterLayer], passed: Sequence[Interval], goals: Tensor, shape: tuple[int, ...]
) -> Tensor:
    """Below ``goals @ logits`` by the intervals at the last layer that bends: ``(n, m, c)`` for m budgets of each row.

    shape: ``(n, m)``.

    What is affine behind it is one function with the goals, so that they lose nothing there.
    passed: what `intervals` found, ``(n * m, ...)`` each.
    """
    slopes, constants, place = backward(head, passed, goals, relax=False)
    low, high = (end.unflatten(0, shape) for end in passed[place])
    return _over_box(slopes, low, high) + constants.unsqueeze(1)


def _over_box(slopes: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """The least ``slopes @ z`` for z between low and high: ``(n, m, c)``; slopes ``(n, c, h)``, ends ``(n, m, h)``."""
    return low @ slopes.clamp(min=0).transpose(1, 2) + high @ slopes.clamp(max=0).transpose(1, 2)


def margin_goals(y: Tensor, classes: int) -> Tensor:
    """Goals whose values are ``logit_y - logit_c`` for each class c: ``(n, classes, classes)``, 0 at c = y."""
    identity = torch.eye(classes, dtype=torch.float64, device=y.device)
    return identity[y].unsqueeze(1) - identity
