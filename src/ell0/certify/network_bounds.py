"""Certificates of plain networks, by bounds of their logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..attacks.draws import Draws
from ..common import check_count
from ..threat import L0Ball, describe
from .certifier import Certifier, Preparation
from .lower_bounds import Bounder, Method, check_method, margin_goals
from .network import Network
from .propagate import Interval
from .reachable import Reachable

BATCH = 256
"""Rows at a time by default."""

SWEEP = 32
"""Budgets looked at in one go."""


class NetworkBounds(Certifier):
    """Bounds of a network's logits, by one of the methods of `ell0.certify.radius`."""

    def __init__(self, model: nn.Module, method: Method = "best") -> None:
        check_method(method)
        self.model, self.method = model, method

    def limit(self, x: Tensor, ball: L0Ball) -> int:
        bounder, reach, _ = self.read(x, replace(ball, budget=0))
        return min(bounder.first.limit(reach), reach.number_of_units)

    def prepare(self, x: Tensor, ball: L0Ball, draws: Draws, batch: int | None) -> Preparation:  # noqa: ARG002
        bounder, reach, classes = self.read(x, ball)

        def radii(at: Tensor, y: Tensor) -> Tensor:
            found, right = torch.full_like(at, -1), self.model(x[at]).argmax(1) == y
            goals = margin_goals(y[right], classes)
            found[right] = _radius(bounder, reach[at[right]], goals, ball.budget, self.method)
            return found

        batch = check_count("batch", BATCH if batch is None else batch)
        return Preparation(classes, min(batch, bounder.room(max(classes, min(ball.budget, SWEEP)))), radii)

    def read(self, x: Tensor, ball: L0Ball) -> tuple[Bounder, Reachable, int]:
        """What makes bounds, what the attacker can reach, and the number of classes.

        Raises ValueError if the network has no certificate for these rows within this ball.
        """
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


def _radius(bounder: Bounder, reach: Reachable, goals: Tensor, cap: int, method: Method) -> Tensor:
    """The largest budget up to cap proven for each row, all right at 0: ``(n,)``."""

    def holds(rows: Tensor, budgets: Tensor, method: Method) -> Tensor:
        known, value, column = None, None, budgets.unsqueeze(1)
        if swept is not None:
            (low, high), value = swept, swept[0][rows, 0]
            if bool((budgets < low.shape[1]).all()):
                known = low[rows, budgets].unsqueeze(1), high[rows, budgets].unsqueeze(1)
        return proven(rows, *bounder.at(reach[rows], column, goals[rows], method, known, value)).squeeze(1)

    def proven(rows: Tensor, bound: Tensor, slack: Tensor) -> Tensor:
        return ((bound > slack) | own[rows].unsqueeze(1)).all(-1)

    own = ~goals.any(-1)  # the goal of a row's own class is 0
    swept: Interval | None = None  # of all rows at the budgets 0, 1, 2, ...
    best = torch.zeros(len(reach.x), dtype=torch.int64, device=reach.x.device)
    if bounder.first.sweeps(reach):
        rows = torch.arange(len(best), device=best.device)
        for start in range(0, cap + 1, SWEEP + 1):
            asked = torch.arange(start, min(start + SWEEP, cap) + 1, device=best.device)
            if len(rows):
                budgets = asked.expand(len(rows), -1)
                first = bounder.first.interval(reach[rows], budgets)
                swept = first if swept is None else swept
                sure = proven(rows, *bounder.at(reach[rows], budgets, goals[rows], "ibp", first))
                best[rows] = torch.maximum(best[rows], (asked * sure).amax(1))
                rows = rows[sure[:, -1]]
    else:
        best = climb(lambda rows, budgets: holds(rows, budgets, "ibp"), best, cap)
    return best if method == "ibp" else climb(lambda rows, budgets: holds(rows, budgets, method), best, cap)


def climb(holds: Callable[[Tensor, Tensor], Tensor], best: Tensor, cap: int) -> Tensor:
    """The largest budget that holds for each row, from ``best`` upwards: steps double until one fails, then halve.

    A budget that holds holds at every smaller one, so no budget is tried twice.
    """
    best, fails, step = best.clone(), torch.full_like(best, cap + 1), torch.ones_like(best)
    while len(rows := (best + 1 < fails).nonzero().squeeze(1)):
        onwards = torch.minimum(best[rows] + step[rows], fails[rows] - 1)
        tried = torch.where(fails[rows] > cap, onwards, (best[rows] + fails[rows]) // 2)
        sure = holds(rows, tried)
        best[rows] = torch.where(sure, tried, best[rows])
        fails[rows] = torch.where(sure, fails[rows], tried)
        step[rows] *= 2
    return best
