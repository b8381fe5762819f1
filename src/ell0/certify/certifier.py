"""One protocol for everything that certifies, and the functions that ask it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ..common import Progress, silent
from ..evaluation import Share
from ..threat import L0Ball
from .lower_bounds import Method
from .network_bounds import ANY_VALUE, NetworkBounds
from .radii import check_budgets, shares


@runtime_checkable
class Certifier(Protocol):
    """Proves how many changed units leave the answer of a model as it is. Recipes and the command line use only this.

    forwards: forward passes of a network for one certified answer; None for bounds, which are no forward passes.
    confidence: the probability with which the radius of a row holds; None if it always does.
    """

    @property
    def forwards(self) -> int | None: ...

    @property
    def confidence(self) -> float | None: ...

    def check(self, x: Tensor, ball: L0Ball) -> None:
        """Raises ValueError if no certificate exists for these rows within this ball, its budget included."""
        ...

    def limit(self, x: Tensor, ball: L0Ball) -> int:
        """The largest budget, in units of the ball, at which anything can be proven of a row of x."""
        ...

    def radius(
        self,
        x: Tensor,
        y: Tensor,
        ball: L0Ball | None = None,
        *,
        max_budget: int | None = None,
        rows: Tensor | None = None,
        generator: torch.Generator | None = None,
        batch: int | None = None,
        progress: Progress = silent,
    ) -> Tensor:
        """The certified radius of each row: ``(n,)`` int64, -1 where the answer to x itself is not y.

        Args:
            max_budget: the largest radius looked for.  batch: None is the certifier's own.
            rows: ``(n,)`` int64, ids by which rows draw, 0..n-1 by default.  generator: gives the key of all draws.
        """
        ...


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
            `InputScale` at most, is the one that the attacker reaches: `TruncatedLinear`, `ClippedLinear`, or
            ``Linear`` for bounded values. Then any of Linear, BatchNorm1d, ReLU, Flatten, Dropout. Or a `Certifier`.
        x: ``(n, ...)``.  y: ``(n,)``, the true labels.
        ball: what may change, and how far; None: features, any value.
        max_budget: the largest budget looked at. Default: the ball's; without a ball, all that the layer can bound.
        method: ``"ibp"``, intervals, cheap; ``"crown"``, linear bounds with all outputs of the first layer seeing the
            same changes; ``"best"``, whichever of them proves more.
        batch: most rows at a time, 256 by default.  progress: called with the number of rows done.

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
    check_budgets(budgets)
    most = max(budgets)
    return shares(radius(model, x, y, ball, max_budget=most, method=method, batch=batch, progress=progress), budgets)
