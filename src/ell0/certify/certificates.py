"""Certified radius and accuracy, bounds of logits, and bounds with gradients for training."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..common import Progress, check_count, silent
from ..results import Measurement, Share, median
from ..threat import L0Ball
from .certifier import ANY_VALUE, Certifier
from .lower_bounds import Method, margin_goals, over_intervals
from .network import Network
from .network_bounds import BATCH, NetworkBounds
from .propagate import intervals
from .reachable import Reachable


def certifier(model: nn.Module, method: Method = "best") -> Certifier:
    """The model itself if it is a `Certifier`, else the bounds of the network; ``method`` as for `radius`."""
    return model if isinstance(model, Certifier) else NetworkBounds(model, method)


def radius(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    ball: L0Ball | None = None,
    *,
    max_budget: int | None = None,
    method: Method = "best",
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
        model: an ``nn.Sequential``, nested or not, in eval mode. Its first layer, after Flatten, `InputClamp` and
            `InputScale` at most, is the one that the attacker reaches: `TruncatedLinear`, or ``Linear``
            for bounded values. Then any of Linear, BatchNorm1d, ReLU, Flatten, Dropout. Or a `Certifier`.
        x: ``(n, ...)``.  y: ``(n,)``, the true labels.
        method: ``"ibp"``, intervals, cheap; ``"best"``, these or linear bounds with all outputs of the first layer
            seeing the same changes (CROWN), whichever proves more.
        ball, max_budget, progress: as for `Certifier.radius`.  batch: most rows at a time, 256 by default.

    Raises ValueError if the model has no certificate, and names a layer that bounds do not pass through.
    """
    return certifier(model, method).radius(x, y, ball, max_budget=max_budget, batch=batch, progress=progress)


def limit(model: nn.Module, x: Tensor, ball: L0Ball | None = None) -> int:
    """The largest budget, in units of the ball, at which anything can be proven of a row of x.

    Args: ball: its unit, box and mutable count, not its budget; None: features, any value.
    """
    return certifier(model).limit(x, ball or ANY_VALUE)


def accuracy(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    budgets: Collection[int],
    ball: L0Ball | None = None,
    *,
    method: Method = "best",
    batch: int | None = None,
    progress: Progress = silent,
) -> dict[int, Share]:
    """Certified accuracy: at each budget the share of rows whose answer is right and proven to stay so.

    Args: budgets: in units of the ball.  The others as for `radius`.
    """
    _check_budgets(budgets)
    most = max(budgets)
    return _shares(radius(model, x, y, ball, max_budget=most, method=method, batch=batch, progress=progress), budgets)


def rows(radii: Tensor, budgets: Collection[int], **identity: Any) -> list[Measurement]:
    """Measurements for `ell0.results.Results`: certified accuracy at each budget, and the median radius.

    radii: what `radius` gave; a misclassified row counts as -1.  identity: goes into every one.
    """
    _check_budgets(budgets)
    accuracy = [
        Measurement.of("certified_accuracy", share, **identity, budget=budget)
        for budget, share in _shares(radii, budgets).items()
    ]
    return [*accuracy, Measurement.of("certified_radius", median(radii), **identity)]


def _check_budgets(budgets: Collection[int]) -> None:
    for budget in budgets:
        check_count("budgets", budget, least=0)
    if not budgets or len(set(budgets)) < len(budgets):
        raise ValueError(f"budgets must be different ints >= 0, got {budgets!r}")


def _shares(radii: Tensor, budgets: Collection[int]) -> dict[int, Share]:
    return {budget: Share(int((radii >= budget).sum()), len(radii)) for budget in budgets}


def bounds(model: nn.Module, x: Tensor, ball: L0Ball, *, method: Method = "best") -> tuple[Tensor, Tensor]:
    """Below and above each logit, anywhere in the ball: two ``(n, classes)`` float64; model and method as for `radius`.

    lower, upper = bounds(model, x, L0Ball(5, low=-math.inf, high=math.inf))
    """
    bounder, reach, classes = NetworkBounds(model, method).read(x, ball)
    goals = torch.eye(classes, dtype=torch.float64, device=x.device)
    found = []
    for at in torch.arange(len(x), device=x.device).split(min(BATCH, bounder.room(classes))):
        budgets, each = torch.full_like(at, ball.budget).unsqueeze(1), goals.expand(len(at), -1, -1)
        with torch.no_grad():
            both = (bounder.at(reach[at], budgets, sign * each, method) for sign in (1, -1))
            found.append([(bound - slack).squeeze(1) for bound, slack in both])
    lower, negative = (torch.cat(part) for part in zip(*found, strict=True))
    return lower, -negative


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
    network = Network.read(model, x, training=True)
    reach, first = Reachable.of(x, replace(ball or ANY_VALUE, budget=budget), network.rising), network.first
    first.check(reach, budget)
    passed = intervals(network.head, (first.quick_interval if quick else first.trainable_interval)(reach, budget))
    return over_intervals(network.head, passed, margin_goals(y, passed[-1][0].shape[1]).to(x.dtype)).squeeze(1)
