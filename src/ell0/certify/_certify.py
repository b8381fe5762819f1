"""Certificates: what no attacker of a ball can do, proven."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from typing import get_args

import torch
from torch import Tensor, nn

from ..evaluation import Share
from ..precision import dense_products
from ..threat import L0Ball, describe
from ._bound import Bounder, Method, below, margin_goals
from ._head import Interval, intervals
from ._network import Network
from ._reach import Reach
from ._record import check_budgets, shares

Progress = Callable[[int, int], None]
"""Told how many rows are done, and of how many."""

ANY_VALUE = L0Ball(0, low=-math.inf, high=math.inf)

SWEEP = 32
"""Budgets looked at in one go."""

ROOM = {"cpu": 1 << 24, "cuda": 1 << 27}
"""Outputs of the first layer that exist at once, for each of the budgets or classes that are looked at."""


def bounds(
    model: nn.Module,
    x: Tensor,
    ball: L0Ball,
    *,
    method: Method = "best",
    batch: int = 256,
    progress: Progress | None = None,
) -> tuple[Tensor, Tensor]:
    """Below and above each logit, wherever in the ball the input lies: two ``(n, classes)`` float64.

        lower, upper = bounds(model, x, L0Ball(5, low=-math.inf, high=math.inf))

    Args: ball: what may change.  The others as for `radius`.
    """
    network, classes = read(model, x, method)
    bounder, reach = _bounder(network, x, ball)
    identity = torch.eye(classes, dtype=torch.float64, device=x.device)
    lower: list[Tensor] = []
    upper: list[Tensor] = []
    for rows in _batches(len(x), batch, progress, _room(bounder, x, classes)):
        here = reach[rows]
        budgets = torch.full((len(here.x),), ball.budget, device=x.device)
        goals = identity.expand(len(budgets), -1, -1)
        with torch.no_grad():
            for found, sign in ((lower, 1), (upper, -1)):
                bound, slack = bounder.at(here, budgets, sign * goals, method)
                found.append(sign * (bound - slack))
    return torch.cat(lower), torch.cat(upper)


def radius(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    ball: L0Ball | None = None,
    *,
    max_budget: int | None = None,
    method: Method = "best",
    batch: int = 256,
    progress: Progress | None = None,
) -> Tensor:
    """The certified radius of each row: the most changes for which the model's answer is proven to stay y.

        radius(model, x, y)                                         # any value
        radius(model, x, y, L0Ball(20, "pixel", low=-1, high=1))    # values in a box, up to 20 pixels

    Result ``(n,)`` int64, -1 where the model gives another answer to x itself. The statement is about the model as it
    predicts, in float32: a margin counts as proven if the bound, made in float64, exceeds what rounding can do to the
    model's sums in any order, wherever in the ball. It does not hold for TF32, which torch uses for convolutions on a
    GPU if nobody says otherwise (here and in `challenge` it is switched off), under autocast, for convolutions made by
    transforms (Winograd, FFT), nor for infinite values in several channels of a pixel that a layer sums up, whose sum
    may be NaN.

    Args:
        model: an ``nn.Sequential``, nested or not, in eval mode. First, after Flatten, `InputClamp` and `InputScale` at
            most, comes the layer that the attacker reaches: `TruncatedLinear`, `ClippedLinear`, ``Linear`` for bounded
            values, or, on images that are not flattened, `TruncatedConv2d`, whose k is for the changes that one of its
            receptive fields sees. Then any of Linear, Conv2d, BatchNorm, ReLU, MaxPool2d, AvgPool2d, Flatten,
            Unflatten, Dropout.
        x: ``(n, ...)``.  y: ``(n,)``, the true labels.
        ball: what may change, and how far; None: features, to any value.
        max_budget: the largest budget looked at. By default the ball's; without a ball, all that the layer can bound.
        method: ``"ibp"``, intervals, cheap; ``"crown"``, linear bounds with all outputs of the first layer seeing the
            same changes; ``"best"``, whichever of them proves more.
        batch: rows at a time at most.  progress: called with the number of rows done and of all rows.

    Raises a ValueError where no certificate exists, and names a layer that bounds do not pass through.
    """
    network, classes = read(model, x, method)
    check_labels(x, y, classes)
    if ball is None:
        cap = limit(model, x) if max_budget is None else max_budget
        ball = replace(ANY_VALUE, budget=cap)
    elif max_budget is not None:
        ball = replace(ball, budget=max_budget)
    bounder, reach = _bounder(network, x, ball)
    result = torch.empty(len(x), dtype=torch.int64, device=x.device)
    for rows in _batches(len(x), batch, progress, _room(bounder, x, max(classes, min(ball.budget, SWEEP)))):
        with torch.no_grad(), dense_products(tf32=False):
            right = (model(x[rows]).argmax(1) == y[rows]).nonzero().squeeze(1)
            here = torch.arange(rows.start, rows.stop, device=x.device)[right]
            result[rows] = -1
            goals = margin_goals(y[here], classes)
            result[here] = _radius(bounder, reach[here], goals, ball.budget, method)
    return result


def limit(model: nn.Module, x: Tensor, ball: L0Ball | None = None) -> int:
    """The largest budget, in units of the ball, at which anything can be proven of a row of x.

    Args: ball: its unit, box and mutable count, not its budget; None: features, to any value.
    """
    network, _ = read(model, x, "ibp")
    bounder, reach = _bounder(network, x, replace(ball or ANY_VALUE, budget=0))
    return min(bounder.first.limit(reach), reach.number_of_units)


def accuracy(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    budgets: Collection[int],
    ball: L0Ball | None = None,
    *,
    method: Method = "best",
    batch: int = 256,
    progress: Progress | None = None,
) -> dict[int, Share]:
    """Certified accuracy: at each budget the share of rows whose answer is right and proven to stay so.

    Args:
        budgets: what is asked for, in units of the ball.  The others as for `radius`.
    """
    check_budgets(budgets)
    most = max(budgets)
    return shares(radius(model, x, y, ball, max_budget=most, method=method, batch=batch, progress=progress), budgets)


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
    any value where budget <= k, whatever the box. A model in training mode will do unless it has batch norm or dropout.
    No slack for rounding is taken off: `radius` does that.

    Args:
        ball: its unit, box and mutable count, not its budget; None: features, to any value.
        method: as for `radius`; behind a layer that truncates, intervals alone.
        quick: a somewhat lower bound at little more than the price of the layer, where that is a plain Linear.
    """
    check_method(method)
    network = Network.read(model, x, training=True)
    ball = replace(ball or ANY_VALUE, budget=budget)
    reach, first = Reach.of(x, ball, network.rising), network.first
    first.check(reach, budget)
    interval = first.quick_interval if quick else first.trainable_interval
    passed = intervals(network.head, interval(reach, budget))
    goals = margin_goals(y, passed[-1][0].shape[1]).to(x.dtype)
    drop = partial(first.trainable_drop, reach, budget)
    # Without changes there is nothing to win by lines.
    return below(network, reach, passed, drop, goals, method if budget else "ibp")


def _radius(bounder: Bounder, reach: Reach, goals: Tensor, cap: int, method: Method) -> Tensor:
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
        best = _climb(lambda rows, budgets: holds(rows, budgets, "ibp"), best, cap)
    return best if method == "ibp" else _climb(lambda rows, budgets: holds(rows, budgets, method), best, cap)


def _climb(holds: Callable[[Tensor, Tensor], Tensor], best: Tensor, cap: int) -> Tensor:
    """The largest budget that holds for each row, from ``best`` upwards: steps double until one fails, then halve.

    What holds at a budget is true at every smaller one, so no budget has to be looked at twice.
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


def read(model: nn.Module, x: Tensor, method: Method) -> tuple[Network, int]:
    """The network, and how many classes it tells apart."""
    check_method(method)
    if not isinstance(x, Tensor) or x.ndim < 2 or not len(x) or not bool(x.isfinite().all()):
        raise ValueError(f"x must be a tensor (n, ...) of finite numbers with n > 0, got {describe(x)}")
    network = Network.read(model, x)
    with torch.no_grad():
        logits = model(x[:1])
    if logits.ndim != 2:
        raise ValueError(f"model must give logits (n, classes), got shape {tuple(logits.shape)}")
    return network, logits.shape[1]


def check_method(method: Method) -> None:
    if method not in get_args(Method):
        raise ValueError(f'method must be "best", "ibp" or "crown", got {method!r}')


def _bounder(network: Network, x: Tensor, ball: L0Ball) -> tuple[Bounder, Reach]:
    reach = Reach.of(x, ball, network.rising)
    bounder = Bounder(network.double())
    bounder.first.check(reach, ball.budget)
    return bounder, reach


def check_labels(x: Tensor, y: Tensor, classes: int) -> None:
    if not isinstance(y, Tensor) or y.shape != x.shape[:1] or y.dtype != torch.int64 or y.device != x.device:
        raise ValueError(f"y must be an int64 tensor of shape ({len(x)},) on {x.device}, got {describe(y)}")
    if not bool(((y >= 0) & (y < classes)).all()):
        raise ValueError(f"y must lie in [0, {classes}), got {int(y.min())} to {int(y.max())}")


def _room(bounder: Bounder, x: Tensor, each: int) -> int:
    """How many rows have room at once, with ``each`` so many outputs of the first layer."""
    return max(1, ROOM.get(x.device.type, ROOM["cpu"]) // (each * bounder.first.outputs))


def _batches(n: int, batch: int, progress: Progress | None, room: int) -> Iterator[slice]:
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise ValueError(f"batch must be an int >= 1, got {batch!r}")
    batch = min(batch, room)
    for start in range(0, n, batch):
        stop = min(start + batch, n)
        yield slice(start, stop)
        if progress is not None:
            progress(stop, n)
