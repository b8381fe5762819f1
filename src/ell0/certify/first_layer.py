"""The layer that the attacker reaches: what its outputs can become when some of its inputs change."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from ..ops import trimmed_linear
from .reachable import Reachable, in_blocks, largest_sums


def rounding_share(terms: int) -> float:
    """The error of a float32 sum of so many products and an offset, in any order, as a share of the sum of their
    magnitudes: at most n u / (1 - n u) for n = terms + 2 and the unit roundoff u = 2^-24. A millionth more covers the
    certificate's own arithmetic, in float64."""
    errors = (terms + 2) * 2.0**-24
    return errors / (1 - errors) * (1 + 1e-6) if errors < 0.5 else math.inf


def slack(share: float, terms: int, magnitudes: Tensor) -> Tensor:
    """The error of a float32 sum of so many terms: a share of the sum of their magnitudes, and underflow of each term.

    Where the magnitudes exceed float32, so may the sum: the error is infinite.
    """
    numbers = torch.finfo(torch.float32)
    return (share * magnitudes + (terms + 2) * numbers.tiny).masked_fill(magnitudes > numbers.max, torch.inf)


class Dense:
    """Bounds of a plain layer ``(n, d) -> (n, h)`` whose inputs are attacked, in the dtype of its weight.

    ``out_h = sum_j u_hj + b_h`` with u_hj = w_hj x_j: a changed term leaves the others alone, so the worst m units are
    those that move an output furthest, one by one, and all bounds but the quick one are exact:

        least out = out - top_m over units of sum_j (u_j - least u_j), mirrored for the largest

    and ``a @ out`` falls by top_m over units of ``sum_j max over x_j of sum_h a_h (u_hj - w_hj x_j)``.

    The inputs may be in float32 while the weight is a float32 one in float64. Budgets are in units of the ball.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, k: int = 0) -> None:
        self.weight, self.k = weight, k
        self.bias = weight.new_zeros(len(weight)) if bias is None else bias

    def limit(self, reach: Reachable) -> int:
        """The largest budget at which a certificate can exist; raises ValueError if none exists even for 1."""
        if not reach.bounded:
            raise ValueError(
                "no certificate exists: a plain Linear layer has no bound if an input may take any value; "
                "give a ball with finite low and high, or put InputClamp before it"
            )
        return reach.number_of_units

    def check(self, reach: Reachable, budget: int) -> None:
        """Raises ValueError if no certificate exists at this budget."""
        if budget > (limit := self.limit(reach)):
            most = f"with k={self.k}, bounds at most {limit} changed {'features' if reach.channels == 1 else 'pixels'}"
            raise ValueError(f"no certificate exists for budget={budget}: the first layer, {most}")

    def sweeps(self, reach: Reachable) -> bool:  # noqa: ARG002
        """Whether `interval` takes many budgets at once."""
        return True

    def value(self, x: Tensor) -> Tensor:
        """The outputs ``(n, h)`` for x ``(n, d)``."""
        return F.linear(x, self.weight, self.bias)

    def interval(self, reach: Reachable, budgets: Tensor) -> tuple[Tensor, Tensor]:
        """The least and largest value of each output: two ``(n, m, h)``; budgets ``(n, m)``, m = 1 unless `sweeps`."""
        reach = reach.to(self.weight.dtype)

        def block(b: slice, o: slice) -> tuple[Tensor, Tensor]:
            fall, rise = self._reaches(reach[b], o)
            return largest_sums(fall, budgets[b]), largest_sums(rise, budgets[b])

        fall, rise = in_blocks(block, reach, len(self.weight))
        value = self.value(reach.x).unsqueeze(1)
        return value - fall, value + rise

    def _reaches(self, reach: Reachable, outputs: slice) -> tuple[Tensor, Tensor]:
        """How far each unit lowers and raises these outputs at most: two ``(n, outputs, units)``."""
        terms, *ends = (numbers.unsqueeze(1) * self.weight[outputs] for numbers in (reach.x, reach.low, reach.high))
        return reach.units(terms - torch.minimum(*ends)), reach.units(torch.maximum(*ends) - terms)

    def drop(self, reach: Reachable, budgets: Tensor, head: Tensor) -> Tensor:
        """How far ``head @ outputs`` falls at most if all outputs see the same changes: ``(n, c)``.

        budgets: ``(n,)``.  head: ``(n, c, h)``.
        """
        slope, numbers = head @ self.weight, reach.to(self.weight.dtype)
        x, low, high = (part.unsqueeze(1) for part in (numbers.x, numbers.low, numbers.high))
        falls = torch.maximum(slope * (x - low), slope * (x - high))
        return largest_sums(reach.units(falls), budgets.unsqueeze(1)).squeeze(1)

    def rounding(self, reach: Reachable, budgets: Tensor) -> Tensor:
        """The error of outputs in float32, anywhere in the ball: ``(n, m, h)`` or broadcastable; budgets ``(n, m)``."""
        terms = reach.x.shape[1]
        return slack(rounding_share(terms), terms, self.most_magnitudes(reach, budgets))

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
        """The interval for one budget with gradients to weight and bias: two ``(n, h)``.

        Features by the operator, rise_j = max(w, 0) (high - x) + max(-w, 0) (x - low), one of them 0; fall_j likewise.
        """

        def block(b: slice, o: slice) -> tuple[Tensor, Tensor]:
            # No `largest_sums`, which asks the host for the largest budget: no CUDA graph could hold that.
            fall, rise = (amounts.topk(budget, -1).values.sum(-1) for amounts in self._reaches(reach[b], o))
            return fall, rise

        if reach.channels > 1:
            fall, rise = in_blocks(block, reach, len(self.weight))
        else:
            below, above = reach.x - reach.low, reach.high - reach.x
            steps = torch.cat([torch.cat([below, above], 1), torch.cat([above, below], 1)])
            weight = torch.cat([self.weight.clamp(min=0), -self.weight.clamp(max=0)], 1)
            fall, rise = (F.linear(steps, weight) - trimmed_linear(steps, weight, top=budget, bottom=0)).chunk(2)
        value = self.value(reach.x)
        return value - fall, value + rise

    def quick_interval(self, reach: Reachable, budget: int) -> tuple[Tensor, Tensor]:
        """A wider interval that costs little more than the layer: two ``(n, h)``.

        The largest m of numbers w_j s_j, all >= 0, are for any cut >= 0

            top_m(w s) = min over t of m t + sum_j (w_j s_j - t)_+  <=  m far cut + sum_j s_j (w_j - cut)_+

        by t = far * cut, where far is the longest step of the row. With up = (w - cut)_+ and down = (-w - cut)_+, the
        sums are range @ up - below @ (up - down) for the rise and range @ down + below @ (up - down) for the fall. The
        weight of an output that comes 2m-th by size is a good cut: about half of the larger ones have a step to go. It
        has the gradient of the larger ones (clamp's, at a tie), so that 2m weights shrink in a step.
        """
        value, numbers = self.value(reach.x), min(budget * reach.channels, reach.x.shape[1])
        if not numbers:
            return value, value
        rank = min(2 * numbers, reach.x.shape[1])
        cut = self.weight.detach().abs().topk(rank, 1).values[:, -1:]
        up, down = (self.weight - cut).clamp(min=0), (-self.weight - cut).clamp(min=0)
        below, above = reach.x - reach.low, reach.high - reach.x
        ranges = (reach.high - reach.low)[: 1 if reach.alike else None]
        most, tilt = numbers * torch.maximum(below, above).amax(1, keepdim=True) * cut.T, F.linear(below, up - down)
        rise, fall = most + F.linear(ranges, up) - tilt, most + F.linear(ranges, down) + tilt
        return value - fall, value + rise
