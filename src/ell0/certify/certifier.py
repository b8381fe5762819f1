"""What certifies: one base class for bounds and votes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..attacks.draws import Draws
from ..common import Progress, Step, silent
from ..precision import dense_products
from ..threat import L0Ball, describe

ANY_VALUE = L0Ball(0, low=-math.inf, high=math.inf)


@dataclass(frozen=True, eq=False)
class Preparation:
    """Rows that can be certified.

    classes: of the model.  batch: rows at a time.
    radii: gives the radii ``(m,)`` of the rows at places ``(m,)`` with labels ``(m,)``, -1 where the answer is wrong.
    """

    classes: int
    batch: int
    radii: Callable[[Tensor, Tensor], Tensor]


class Certifier(ABC):
    """Proves how many changed units leave the answer of a model as it is.

    forwards: forward passes of a network for one certified answer; None for bounds, which are no forward passes.
    confidence: the probability with which the radius of a row holds; None if it always does.
    """

    forwards: int | None = None
    confidence: float | None = None
    _rounding: float | None = None

    @property
    def rounding(self) -> float | None:
        """How far off a logit may be, as was allowed when rows were last certified; None where it is not measured."""
        return self._rounding

    @abstractmethod
    def limit(self, x: Tensor, ball: L0Ball) -> int:
        """The largest budget, in units of the ball, at which anything can be proven of a row of x."""

    @abstractmethod
    def prepare(self, x: Tensor, ball: L0Ball, draws: Draws, batch: int | None) -> Preparation:
        """Raises as `check`.  draws: of the rows.  batch: as for `radius`."""

    def bounds(self, x: Tensor, ball: L0Ball) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Below and above each score, anywhere in the ball: two ``(n, classes)`` float64."""
        raise ValueError(f"model must be one whose scores have bounds, got {type(self).__name__}")

    def check(self, x: Tensor, ball: L0Ball) -> None:
        """Raises ValueError if no certificate exists for these rows within this ball, its budget included."""
        self.prepare(x, ball, Draws(None, torch.arange(len(x), device=x.device)), None)

    @torch.inference_mode(False)  # bounds are made by backward passes
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
            ball: what may change, and how far; None: features, any value.
            max_budget: the largest radius looked for. Default: the ball's budget; without a ball, the `limit`.
            rows: ``(n,)`` int64, ids by which rows draw, 0..n-1 by default: the radius of a row does not depend on the
                rows beside it.  generator: gives the key of all draws. Only randomised certifiers use them.
            batch: rows at a time, or what else the certifier counts.  progress: called with the number of rows done.
        """
        if not isinstance(x, Tensor) or not x.ndim:
            raise ValueError(f"x must be a tensor (n, ...), got {describe(x)}")
        places = torch.arange(len(x), device=x.device)
        rows = places if rows is None else rows
        if max_budget is None:
            max_budget = self.limit(x, ANY_VALUE) if ball is None else ball.budget
        form = places.shape, places.dtype, places.device
        for name, ids in (("rows", rows), ("y", y)):
            if not isinstance(ids, Tensor) or (ids.shape, ids.dtype, ids.device) != form:
                raise ValueError(f"{name} must be int64 of shape ({len(x)},) on {x.device}, got {describe(ids)}")
        ready = self.prepare(x, replace(ball or ANY_VALUE, budget=max_budget), Draws(generator, rows), batch)
        if not bool(((y >= 0) & (y < ready.classes)).all()):
            raise ValueError(f"y must lie in [0, {ready.classes}), got {int(y.min())} to {int(y.max())}")
        result = torch.empty_like(places)
        for at in places.split(ready.batch):
            with torch.no_grad(), dense_products(tf32=False):
                result[at] = ready.radii(at, y[at]).clamp(max=max_budget)
            progress(Step("rows certified", int(at[-1]) + 1, len(x)))
        return result
