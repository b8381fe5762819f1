"""The layer that the attacker reaches: what its outputs can become when some of its inputs change."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from ._reach import Reach, largest_sums

UNIT = 2.0**-24
"""The unit roundoff of float32. A model in float64 is held to it as well, so the certificate's arithmetic, in float64,
never counts: it is covered by a millionth more."""


def rounding_share(terms: int) -> float:
    """How far a float32 sum of so many products and an offset, in any order, lies from the exact one, as a share of the
    sum of their magnitudes: n u / (1 - n u) for n = terms + 2."""
    errors = (terms + 2) * UNIT
    return errors / (1 - errors) * (1 + 1e-6) if errors < 0.5 else math.inf


def slack(share: float, terms: int, magnitudes: Tensor) -> Tensor:
    """How far a float32 sum of so many terms lies from the exact one: a share of the sum of their magnitudes.

    Each may underflow besides; and where the magnitudes reach beyond float32, so may the sum, and nothing is sure.
    """
    numbers = torch.finfo(torch.float32)
    return (share * magnitudes + (terms + 2) * numbers.tiny).masked_fill(magnitudes > numbers.max, torch.inf)


def sum_of_magnitudes(weight: Tensor, bias: Tensor, reach: Reach, budgets: Tensor) -> Tensor:
    """The sum of |terms| plus |bias| is at most this, wherever in the ball: ``(n, m, h)`` for budgets ``(n, m)``.

    sum_j |w_hj x_j| + |b_h| + max_j |w_hj| * (sum of the reaches of the units that reach furthest)
    """
    reach, weight = reach.to(weight.dtype), weight.abs()
    here = reach.x.abs() @ weight.T + bias.abs()
    reaches = torch.maximum(reach.low.abs(), reach.high.abs()).masked_fill(~reach.moves, 0.0)
    furthest = largest_sums(reach.units(reaches).unsqueeze(1), budgets)
    return here.unsqueeze(1) + furthest * weight.amax(1)


class First(ABC):
    """Bounds of one layer ``(n, d) -> (n, h)`` whose inputs are attacked, in the dtype of its weight.

    The reach may be in float32 where the weight is a float32 one in float64. Budgets are in units of the reach.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = weight.new_zeros(len(weight)) if bias is None else bias

    @property
    def outputs(self) -> int:
        """h."""
        return len(self.weight)

    @abstractmethod
    def limit(self, reach: Reach) -> int:
        """The largest budget at which a certificate can exist; raises a ValueError if not even 1 is."""

    def check(self, reach: Reach, budget: int) -> None:  # noqa: ARG002
        """Raises a ValueError if no certificate exists at this budget."""
        self.limit(reach)

    def sweeps(self, reach: Reach) -> bool:  # noqa: ARG002
        """Whether the intervals of many budgets cost little more than those of one."""
        return True

    @abstractmethod
    def value(self, x: Tensor) -> Tensor:
        """``(n, h)`` for x ``(n, d)``."""

    @abstractmethod
    def interval(self, reach: Reach, budgets: Tensor) -> tuple[Tensor, Tensor]:
        """The least and the largest value of each output: two ``(n, m, h)`` for budgets ``(n, m)``."""

    @abstractmethod
    def drop(self, reach: Reach, budgets: Tensor, head: Tensor) -> Tensor:
        """How far ``head @ outputs`` falls at most if all outputs see the same changes: ``(n, c)``.

        budgets: ``(n,)``.  head: ``(n, c, h)``.
        """

    @abstractmethod
    def rounding(self, reach: Reach, budgets: Tensor) -> Tensor:
        """How far outputs in float32 lie from the exact ones, wherever in the ball: ``(n, m, h)`` or broadcastable."""

    def trainable_interval(self, reach: Reach, budget: int) -> tuple[Tensor, Tensor]:
        """The interval for one budget with gradients to weight and bias: two ``(n, h)``."""
        budgets = torch.full((len(reach.x), 1), budget, device=reach.x.device)
        low, high = self.interval(reach, budgets)
        return low.squeeze(1), high.squeeze(1)

    def quick_interval(self, reach: Reach, budget: int) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """One that holds the trainable interval, and costs little more than the layer: two ``(n, h)``."""
        raise ValueError("quick must be False unless the first layer is a plain Linear")

    def trainable_drop(self, reach: Reach, budget: int, head: Tensor) -> Tensor:  # noqa: ARG002
        """The drop for one budget with gradients to weight and head: ``(n, c)``."""
        raise ValueError('method must be "ibp" in training where the first layer truncates: its lines have no gradient')
