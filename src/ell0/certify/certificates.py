"""Certified radius and accuracy, bounds of logits, and bounds with gradients for training."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any, cast, get_args

import torch
from torch import Tensor, nn

from ..attacks.draws import Draws
from ..common import Progress, check_count, silent
from ..results import Measurement, Share, median
from ..threat import L0Ball, describe
from ..wrapping import as_rows
from .certifier import ANY_VALUE, Certifier, Preparation
from .network import Network
from .propagate import Bounder, Interval, Method, intervals, margin_goals, over_intervals, pairs_over_intervals
from .reachable import Reachable
from .rules import Rule
from .votes import PartVote

BATCH = 256  # rows at a time by default
SWEEP = 32  # budgets looked at in one go
PAIRED = 32  # the most classes of which training takes all pairs at once


def certifier(model: nn.Module, method: Method | Rule = "best") -> Certifier:
    """The model itself if it is a `Certifier`, else the bounds of the network; ``method`` as for `radius`."""
    if isinstance(model, PartVote) and method != "best":
        return model.under(cast(Rule, method))
    if isinstance(model, Certifier):
        if method != "best":
            raise ValueError(f'method must be "best" for {type(model).__name__}, got {method!r}')
        return model
    return NetworkBounds(model, cast(Method, method))


def radius(
    model: nn.Module,
    x: Any,
    y: Any,
    ball: L0Ball | None = None,
    *,
    max_budget: int | None = None,
    method: Method | Rule = "best",
    batch: int | None = None,
    progress: Progress = silent,
) -> Tensor:
    """The certified radius of each row: the most changes for which the model's answer is proven to stay y.

        radius(model, x, y)                                         # any value
        radius(model, x, y, L0Ball(20, "pixel", low=-1, high=1))    # values in a box, up to 20 pixels

    Result ``(n,)`` int64, -1 where the model gives another answer to x itself. The statement is about the model as it
    predicts, in float32: a margin counts as proven if the bound, made in float64, exceeds what rounding can do to the
    model's sums in any order, anywhere in the ball. It does not hold under autocast, nor for TF32, which is switched
    off here and in `challenge`.

    Args:
        model: a `Certifier`, or an ``nn.Sequential``, nested or not, in eval mode. Its first layer, after Flatten,
            `InputClamp` and `InputScale` at most, is the one that the attacker reaches: `TruncatedLinear`, or
            ``Linear`` for bounded values. Then any of Linear, BatchNorm1d, ReLU, Flatten, Dropout.
        x: ``(n, ...)``.  y: ``(n,)``, the true labels; arrays will do.
        method: ``"ibp"``, intervals, cheap; ``"best"``, these or linear bounds with all outputs of the first layer
            seeing the same changes (CROWN), whichever proves more. Of a `PartVote`: another rule than its own.
        ball, max_budget, progress: as for `Certifier.radius`.  batch: most rows at a time, 256 by default.

    Raises ValueError if the model has no certificate, and names a layer that bounds do not pass through.
    """
    x, y = as_rows(model, x, y)
    return certifier(model, method).radius(x, y, ball, max_budget=max_budget, batch=batch, progress=progress)


def accuracy(
    model: nn.Module,
    x: Any,
    y: Any,
    budgets: Collection[int],
    ball: L0Ball | None = None,
    *,
    method: Method | Rule = "best",
    batch: int | None = None,
    progress: Progress = silent,
) -> dict[int, Share]:
    """Certified accuracy: at each budget the share of rows whose answer is right and proven to stay so.

    budgets: in units of the ball.  The others as for `radius`.
    """
    budgets = [check_count("budgets", budget, least=0) for budget in budgets]
    if not budgets or len(set(budgets)) < len(budgets):
        raise ValueError(f"budgets must be different ints >= 0, got {budgets!r}")
    radii = radius(model, x, y, ball, max_budget=max(budgets), method=method, batch=batch, progress=progress)
    return {budget: Share.of(radii >= budget) for budget in budgets}


def rows(radii: Tensor, budgets: Collection[int], **identity: Any) -> list[Measurement]:
    """Measurements for `ell0.results.Results`: certified accuracy at each budget, and the median radius.

    radii: what `radius` gave; a misclassified row counts as -1.  identity: goes into every one.
    """
    shares = [(budget, Share.of(radii >= budget)) for budget in budgets]
    found = [Measurement.of("certified_accuracy", share, **identity, budget=budget) for budget, share in shares]
    return [*found, Measurement.of("certified_radius", median(radii), **identity)]


def bounds(model: nn.Module, x: Tensor, ball: L0Ball, *, method: Method | Rule = "best") -> tuple[Tensor, Tensor]:
    """Below and above each logit, anywhere in the ball: two ``(n, classes)`` float64. The rest as for `radius`."""
    return certifier(model, method).bounds(x, ball)


def margins(
    model: nn.Module, x: Tensor, y: Tensor, budget: int, ball: L0Ball | None = None, *, quick: bool = False
) -> Tensor:
    """Below ``logit_y - logit_c`` for each class c with ``budget`` changes, by intervals: ``(n, classes)``, 0 at c = y.

    In the dtype of x, with gradients to the model's parameters: for training. The bound of a truncated layer is that of
    any value where budget <= k, whatever the box. The model may be in training mode unless it has batch norm or
    dropout. No slack for rounding is subtracted: `radius` does that.

    Args:
        ball: its unit, box and mutable count, not its budget; None: features, any value.
        quick: a somewhat lower bound at little more than the price of the layer, if that is a plain Linear.
    """
    if y.shape != x.shape[:1]:
        raise ValueError(f"y must be ({len(x)},), a label for each row of x, got {describe(y)}")
    network = Network.read(model, x, training=True)
    reach, first = Reachable.of(x, replace(ball or ANY_VALUE, budget=budget), network.rising), network.first
    first.check(reach, budget)
    passed = intervals(network.head, (first.quick_interval if quick else first.trainable_interval)(reach, budget))
    classes = passed[-1][0].shape[1]
    if classes <= PAIRED:
        return pairs_over_intervals(network.head, passed, y, x.dtype)
    return over_intervals(network.head, passed, margin_goals(y, classes).to(x.dtype)).squeeze(1)


class NetworkBounds(Certifier):
    """Bounds of a network's logits, by one of the methods of `radius`."""

    def __init__(self, model: nn.Module, method: Method = "best") -> None:
        if method not in get_args(Method):
            raise ValueError(f'method must be "best" or "ibp", got {method!r}')
        self.model, self.method = model, method

    def limit(self, x: Tensor, ball: L0Ball) -> int:
        bounder, reach, _ = self.read(x, replace(ball, budget=0))
        return bounder.first.limit(reach)

    def prepare(self, x: Tensor, ball: L0Ball, draws: Draws, batch: int | None) -> Preparation:  # noqa: ARG002
        bounder, reach, classes = self.read(x, ball)

        def radii(at: Tensor, y: Tensor) -> Tensor:
            found, right = torch.full_like(at, -1), self.model(x[at]).argmax(1) == y
            goals = margin_goals(y[right], classes)
            found[right] = _radius(bounder, reach[at[right]], goals, ball.budget, self.method)
            return found

        batch = check_count("batch", BATCH if batch is None else batch)
        return Preparation(classes, min(batch, bounder.room(max(classes, min(ball.budget, SWEEP)))), radii)

    @torch.inference_mode(False)
    def bounds(self, x: Tensor, ball: L0Ball) -> tuple[Tensor, Tensor]:
        bounder, reach, classes = self.read(x, ball)
        goals = torch.eye(classes, dtype=torch.float64, device=x.device)
        found = []
        for at in torch.arange(len(x), device=x.device).split(min(BATCH, bounder.room(classes))):
            budgets, each = torch.full_like(at, ball.budget).unsqueeze(1), goals.expand(len(at), -1, -1)
            with torch.no_grad():
                both = (bounder.at(reach[at], budgets, sign * each, self.method) for sign in (1, -1))
                found.append([(bound - slack).squeeze(1) for bound, slack in both])
        lower, negative = (torch.cat(part) for part in zip(*found, strict=True))
        return lower, -negative

    def read(self, x: Tensor, ball: L0Ball) -> tuple[Bounder, Reachable, int]:
        """What makes bounds, what the attacker can reach, and the number of classes; raises as `prepare`."""
        if not isinstance(x, Tensor) or x.ndim < 2 or not len(x) or not bool(x.isfinite().all()):
            raise ValueError(f"x must be a tensor (n, ...) of finite numbers with n > 0, got {describe(x)}")
        network = Network.read(self.model, x)
        reach, bounder = Reachable.of(x, ball, network.rising), Bounder(network.double())
        bounder.first.check(reach, ball.budget)
        with torch.no_grad():
            return bounder, reach, self.model(x[:1]).shape[1]


def _radius(bounder: Bounder, reach: Reachable, goals: Tensor, cap: int, method: Method) -> Tensor:
    """The largest budget up to cap proven for each row, all right at 0: ``(n,)``."""

    def holds(method: Method, rows: Tensor, budgets: Tensor) -> Tensor:
        known, value, column = None, None, budgets.unsqueeze(1)
        if swept is not None:
            (low, high), value = swept, swept[0][rows, 0]
            if bool((budgets < low.shape[1]).all()):
                known = low[rows, budgets].unsqueeze(1), high[rows, budgets].unsqueeze(1)
        return proven(*bounder.at(reach[rows], column, goals[rows], method, known, value)).squeeze(1)

    def proven(bound: Tensor, slack: Tensor) -> Tensor:
        return (bound > slack).sum(-1) == bound.shape[-1] - 1  # not for the row's own class, whose goal is 0

    swept: Interval | None = None  # of all rows at the budgets 0, 1, 2, ...
    best = torch.zeros(len(reach.x), dtype=torch.int64, device=reach.x.device)
    if bounder.first.sweeps(reach):
        rows, start = torch.arange(len(best), device=best.device), 0
        while len(rows) and start <= cap:
            asked = torch.arange(start, min(start + SWEEP, cap) + 1, device=best.device)
            budgets = asked.expand(len(rows), -1)
            first = bounder.first.interval(reach[rows], budgets)
            swept = first if swept is None else swept
            sure = proven(*bounder.at(reach[rows], budgets, goals[rows], "ibp", first))
            best[rows] = torch.maximum(best[rows], (asked * sure).amax(1))
            rows, start = rows[sure[:, -1]], start + SWEEP + 1
    else:
        best = climb(partial(holds, "ibp"), best, cap)
    return best if method == "ibp" else climb(partial(holds, method), best, cap)


def climb(holds: Callable[[Tensor, Tensor], Tensor], best: Tensor, cap: int) -> Tensor:
    """The largest budget that holds for each row, from ``best`` upwards: steps double until one fails, then halve.

    A budget that holds holds at every smaller one.
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
