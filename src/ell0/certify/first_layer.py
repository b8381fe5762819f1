"""The layer that the attacker reaches: what its outputs can become when some of its inputs change."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from .reachable import Reachable, largest_sums

UNIT = 2.0**-24
"""The unit roundoff of float32. A model in float64 is held to it as well. The certificate's own arithmetic is in
float64; a millionth more covers its error."""


def rounding_share(terms: int) -> float:
    """The error of a float32 sum of so many products and an offset, in any order, as a share of the sum of their
    magnitudes: at most n u / (1 - n u) for n = terms + 2."""
    errors = (terms + 2) * UNIT
    return errors / (1 - errors) * (1 + 1e-6) if errors < 0.5 else math.inf


def slack(share: float, terms: int, magnitudes: Tensor) -> Tensor:
    """The error of a float32 sum of so many terms: a share of the sum of their magnitudes.

    Each term may underflow besides. Where the magnitudes exceed float32, so may the sum: the error is infinite.
    """
    numbers = torch.finfo(torch.float32)
    return (share * magnitudes + (terms + 2) * numbers.tiny).masked_fill(magnitudes > numbers.max, torch.inf)


class FirstLayer(ABC):
    """Bounds of one layer ``(n, d) -> (n, h)`` whose inputs are attacked, in the dtype of its weight.

    The inputs may be in float32 while the weight is a float32 one in float64. Budgets are in units of the ball.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = weight.new_zeros(len(weight)) if bias is None else bias

    @abstractmethod
    def limit(self, reach: Reachable) -> int:
        """The largest budget at which a certificate can exist; raises ValueError if none exists even for 1."""

    def check(self, reach: Reachable, budget: int) -> None:  # noqa: ARG002
        """Raises ValueError if no certificate exists at this budget."""
        self.limit(reach)

    def sweeps(self, reach: Reachable) -> bool:  # noqa: ARG002
        """Whether the intervals of many budgets cost little more than those of one."""
        return True

    @abstractmethod
    def value(self, x: Tensor) -> Tensor:
        """The outputs ``(n, h)`` for x ``(n, d)``."""

    @abstractmethod
    def interval(self, reach: Reachable, budgets: Tensor) -> tuple[Tensor, Tensor]:
        """The least and the largest value of each output: two ``(n, m, h)`` for budgets ``(n, m)``."""

    @abstractmethod
    def drop(self, reach: Reachable, budgets: Tensor, head: Tensor) -> Tensor:
        """How far ``head @ outputs`` falls at most if all outputs see the same changes: ``(n, c)``.

        budgets: ``(n,)``.  head: ``(n, c, h)``.
        """

    @abstractmethod
    def rounding(self, reach: Reachable, budgets: Tensor) -> Tensor:
        """The error of outputs in float32, anywhere in the ball: ``(n, m, h)`` or broadcastable; budgets ``(n, m)``."""

    def clean_magnitudes(self, reach: Reachable) -> Tensor:
        """``sum_j |w_hj x_j| + |b_h|`` of the unchanged rows: ``(n, 1, h)``."""
        return (reach.x.to(self.weight.dtype).abs() @ self.weight.abs().T + self.bias.abs()).unsqueeze(1)

    def most_magnitudes(self, reach: Reachable, budgets: Tensor) -> Tensor:
        """The sum of |terms| and |bias| is at most this, anywhere in the ball: ``(n, m, h)`` for budgets ``(n, m)``.

        sum_j |w_hj x_j| + |b_h| + max_j |w_hj| * (sum of the reaches of the units that reach furthest)
        """
        reach = reach.to(self.weight.dtype)
        reaches = torch.maximum(reach.low.abs(), reach.high.abs()).masked_fill(~reach.moves, 0.0)
        furthest = largest_sums(reach.units(reaches).unsqueeze(1), budgets)
        return self.clean_magnitudes(reach) + furthest * self.weight.abs().amax(1)

    def trainable_interval(self, reach: Reachable, budget: int) -> tuple[Tensor, Tensor]:
        """The interval for one budget with gradients to weight and bias: two ``(n, h)``."""
        budgets = torch.full((len(reach.x), 1), budget, device=reach.x.device)
        low, high = self.interval(reach, budgets)
        return low.squeeze(1), high.squeeze(1)

    def quick_interval(self, reach: Reachable, budget: int) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """A wider interval than `trainable_interval` that costs little more than the layer: two ``(n, h)``."""
        raise ValueError("quick must be False unless the first layer is a plain Linear")
