"""Certificates of networks by bounds: what no attacker of a ball can do, proven."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import get_args

import torch
from torch import Tensor, nn

from ..common import Progress, Step, check_count, silent
from ..precision import dense_products
from ..threat import L0Ball, describe
from .lower_bounds import Bounder, Method, below, margin_goals
from .network import Network
from .propagate import Interval, intervals
from .reachable import Reachable

ANY_VALUE = L0Ball(0, low=-math.inf, high=math.inf)

BATCH = 256
"""Rows at a time."""

SWEEP = 32
"""Budgets looked at in one go."""

ROOM = {"cpu": 1 << 24, "cuda": 1 << 27}
"""Outputs of the first layer that exist at once, for each of the budgets or classes that are looked at."""


@dataclass(frozen=True, eq=False)
class NetworkBounds:
    """The `Certifier` of a plain network: bounds of its logits, by one of the methods of `radius`."""

    model: nn.Module
    method: Method = "best"
    forwards: None = None
    confidence: None = None

    def check(self, x: Tensor, ball: L0Ball) -> None:
        """Raises ValueError if no certificate exists for these rows within this ball."""
        self._read(x, ball)

    def limit(self, x: Tensor, ball: L0Ball | None = None) -> int:
        """The largest budget, in units of the ball, at which anything can be proven of a row of x."""
        bounder, reach, _ = self._read(x, replace(ball or ANY_VALUE, budget=0))
        return min(bounder.first.limit(reach), reach.number_of_units)

    def radius(
        self,
        x: Tensor,
        y: Tensor,
        ball: L0Ball | None = None,
        *,
        max_budget: int | None = None,
        rows: Tensor | None = None,  # noqa: ARG002
        generator: torch.Generator | None = None,  # noqa: ARG002
        batch: int | None = None,
        progress: Progress = silent,
    ) -> Tensor:
        """The certified radius of each row, see `radius`; nothing is drawn, so rows and generator are not used."""
        if ball is None and max_budget is None:
            max_budget = self.limit(x)
        ball = ANY_VALUE if ball is None else ball
        ball = ball if max_budget is None else replace(ball, budget=max_budget)
        bounder, reach, classes = self._read(x, ball)
        check_labels(x, y, classes)
        result = torch.full((len(x),), -1, dtype=torch.int64, device=x.device)
        for at in _batches(bounder, x, batch, max(classes, min(ball.budget, SWEEP)), progress):
            with torch.no_grad(), dense_products(tf32=False):
                right = at[self.model(x[at]).argmax(1) == y[at]]
                goals = margin_goals(y[right], classes)
                result[right] = _radius(bounder, reach[right], goals, ball.budget, self.method)
        return result

    def bounds(
        self, x: Tensor, ball: L0Ball, *, batch: int | None = None, progress: Progress = silent
    ) -> tuple[Tensor, Tensor]:
        """Below and above each logit, see `bounds`."""
        bounder, reach, classes = self._read(x, ball)
        goals = torch.eye(classes, dtype=torch.float64, device=x.device)
        lower, upper = torch.empty(2, len(x), classes, dtype=torch.float64, device=x.device)
        for at in _batches(bounder, x, batch, classes, progress):
            budgets = torch.full_like(at, ball.budget)
            with torch.no_grad():
                for found, sign in ((lower, 1), (upper, -1)):
                    bound, slack = bounder.at(reach[at], budgets, sign * goals.expand(len(at), -1, -1), self.method)
                    found[at] = sign * (bound - slack)
        return lower, upper

    def _read(self, x: Tensor, ball: L0Ball) -> tuple[Bounder, Reachable, int]:
        """What makes bounds, what it makes them of, and the number of classes; raises if there are none."""
        check_method(self.method)
        if not isinstance(x, Tensor) or x.ndim < 2 or not len(x) or not bool(x.isfinite().all()):
            raise ValueError(f"x must be a tensor (n, ...) of finite numbers with n > 0, got {describe(x)}")
        network = Network.read(self.model, x)
        with torch.no_grad():
            logits = self.model(x[:1])
        if logits.ndim != 2:
            raise ValueError(f"model must give logits (n, classes), got shape {tuple(logits.shape)}")
        reach, bounder = Reachable.of(x, ball, network.rising), Bounder(network.double())
        bounder.first.check(reach, ball.budget)
        return bounder, reach, logits.shape[1]


def bounds(
    model: nn.Module,
    x: Tensor,
    ball: L0Ball,
    *,
    method: Method = "best",
    batch: int | None = None,
    progress: Progress = silent,
) -> tuple[Tensor, Tensor]:
    """Below and above each logit, anywhere in the ball: two ``(n, classes)`` float64.

        lower, upper = bounds(model, x, L0Ball(5, low=-math.inf, high=math.inf))

    Args: ball: what may change.  The others as for `radius`.
    """
    return NetworkBounds(model, method).bounds(x, ball, batch=batch, progress=progress)


def margins(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    budget: int,
    ball: L0Ball | None = None,
    *,
    method: Method = "ibp",
    quick: bool = False,
) -> Tensor:
    """Below ``logit_y - logit_c`` for each class c with ``budget`` changes: ``(n, classes)``, 0 at c = y.

    In the dtype of x, with gradients to the model's parameters: for training. The bound of a truncated layer is that of
    any value where budget <= k, whatever the box. The model may be in training mode unless it has batch norm or
    dropout. No slack for rounding is subtracted: `radius` does that.

    Args:
        ball: its unit, box and mutable count, not its budget; None: features, any value.
        method: as for `radius`; behind a layer that truncates, ``"ibp"`` alone.
        quick: a somewhat lower bound at little more than the price of the layer, if that is a plain Linear.
    """
    check_method(method)
    network = Network.read(model, x, training=True)
    reach, first = Reachable.of(x, replace(ball or ANY_VALUE, budget=budget), network.rising), network.first
    first.check(reach, budget)
    interval = first.quick_interval if quick else first.trainable_interval
    passed = intervals(network.head, interval(reach, budget))
    goals = margin_goals(y, passed[-1][0].shape[1]).to(x.dtype)
    drop = partial(first.trainable_drop, reach, budget)
    # Without changes lines gain nothing.
    return below(network, reach, passed, drop, goals, method if budget else "ibp")


def check_method(method: Method) -> None:
    if method not in get_args(Method):
        raise ValueError(f'method must be "best", "ibp" or "crown", got {method!r}')


def check_labels(x: Tensor, y: Tensor, classes: int) -> None:
    if not isinstance(y, Tensor) or y.shape != x.shape[:1] or y.dtype != torch.int64 or y.device != x.device:
        raise ValueError(f"y must be an int64 tensor of shape ({len(x)},) on {x.device}, got {describe(y)}")
    if not bool(((y >= 0) & (y < classes)).all()):
        raise ValueError(f"y must lie in [0, {classes}), got {int(y.min())} to {int(y.max())}")


def _batches(bounder: Bounder, x: Tensor, batch: int | None, each: int, progress: Progress) -> Iterator[Tensor]:
    """Places of some rows at a time, for which ``each`` times the outputs of the first layer fit in memory."""
    room = ROOM.get(x.device.type, ROOM["cpu"]) // (each * len(bounder.first.weight))
    batch = min(check_count("batch", BATCH if batch is None else batch), max(1, room))
    for at in torch.arange(len(x), device=x.device).split(batch):
        yield at
        progress(Step("rows certified", int(at[-1]) + 1, len(x)))


def _radius(bounder: Bounder, reach: Reachable, goals: Tensor, cap: int, method: Method) -> Tensor:
    """The largest budget up to cap proven for each row, all right at 0: ``(n,)``."""

    def holds(rows: Tensor, budgets: Tensor, method: Method) -> Tensor:
        known, value = None, None
        if swept is not None:
            low, high = swept
            known = (low[rows, budgets], high[rows, budgets]) if bool((budgets < low.shape[1]).all()) else None
            value = low[rows, 0]
        bound, slack = bounder.at(reach[rows], budgets, goals[rows], method, known, value)
        return ((bound > slack) | own[rows]).all(-1)

    own = ~goals.any(-1)  # the goal of a row's own class is 0
    swept: Interval | None = None  # of all rows at the budgets 0, 1, 2, ...

    best = torch.zeros(len(reach.x), dtype=torch.int64, device=reach.x.device)
    if method != "crown" and bounder.first.sweeps(reach):
        rows = torch.arange(len(best), device=best.device)
        for start in range(0, cap + 1, SWEEP + 1):
            asked = torch.arange(start, min(start + SWEEP, cap) + 1, device=best.device)
            if len(rows):
                budgets = asked.expand(len(rows), -1)
                first = bounder.first.interval(reach[rows], budgets)
                swept = first if swept is None else swept
                bound, slack = bounder.sweep(reach[rows], budgets, goals[rows], first)
                sure = ((bound > slack) | own[rows].unsqueeze(1)).all(-1)
                best[rows] = torch.maximum(best[rows], (asked * sure).amax(1))
                rows = rows[sure[:, -1]]
    elif method != "crown":
        best = climb(lambda rows, budgets: holds(rows, budgets, "ibp"), best, cap)
    return best if method == "ibp" else climb(lambda rows, budgets: holds(rows, budgets, method), best, cap)


def climb(holds: Callable[[Tensor, Tensor], Tensor], best: Tensor, cap: int) -> Tensor:
    """The largest budget that holds for each row, from ``best`` upwards: steps double until one fails, then halve.

    A budget that holds holds at every smaller one, so no budget is tried twice.
    """
    best, fails, step = best.clone(), torch.full_like(best, cap + 1), torch.ones_like(best)
    while len(rows := (best + 1 < fails).nonzero().squeeze(1)):
        onwards = torch.minimum(best[rows] + step[rows], fails[rows] - 1)
        halfway = (best[rows] + fails[rows]) // 2
        tried = torch.where(fails[rows] > cap, onwards, halfway)
        sure = holds(rows, tried)
        best[rows] = torch.where(sure, tried, best[rows])
        fails[rows] = torch.where(sure, fails[rows], tried)
        step[rows] *= 2
    return best
