"""The truncated first layer: sums without their k largest and k smallest terms.

Notation: u_j = w_hj x_j, s_1 >= ... >= s_d their order, T_k(u) = s_{k+1} + ... + s_{d-k}, m numbers change.

**Any value** (`_shifted`). For m <= k the largest T_k is ``s_{k+1-m} + ... + s_{d-k-m}``, the sum without its top k - m
and bottom k + m terms: at least i of the new terms are >= s'_i, all but m of them unchanged, so s'_i <= s_{i-m}; and
sending the m smallest terms to the top attains it, if they can move (no frozen number, no weight of 0). Mirrored for
the least.

**One number at a time** (`_amounts`). With the other terms held, T_k is a constant plus u_j clipped between the k-th
smallest and the k-th largest of the others. While m numbers move down, the k-th largest of the others matters only up
to s_{k+1}, and the k-th smallest stays above s_{d-k+m}; so number j lowers T_k by at most

    fall_j = max(0, min(u_j, s_{k+1}) - max(least u_j, s_{d-k+m}))        (s_{d-k+m} = -inf for m > k)

whatever moves beside it. Numbers moved the other way only raise T_k. Hence the bound ``T_k - top_m(fall)`` of an
output, which knows the attacker's box; and, since all outputs see the same x_j move up or down, that of a head a @ T:

    a @ T falls by at most top_m over j of max(down_j, up_j),
    down_j = sum over a_h > 0, w_hj > 0 of a_h fall_hj + sum over a_h < 0, w_hj < 0 of |a_h| rise_hj,  up_j likewise.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..ops import trimmed_linears, truncated_linear
from ..ops.blocked import ascending
from ..ops.reference import products
from .first_layer import Dense, slack
from .reachable import Reachable, blocks, in_blocks, largest_sums


class Truncated(Dense):
    """``out_h = T_k(w_h1 x_1, ..., w_hd x_d) + b_h``, with k > 0."""

    def limit(self, reach: Reachable) -> int:
        return reach.number_of_units if reach.bounded else self.k // reach.channels

    def sweeps(self, reach: Reachable) -> bool:
        """False where `interval` also bounds the numbers one at a time."""
        return reach.any_value and reach.channels == 1

    def value(self, x: Tensor) -> Tensor:
        return truncated_linear(x, self.weight, self.bias, k=self.k)

    def interval(self, reach: Reachable, budgets: Tensor) -> tuple[Tensor, Tensor]:
        """Exact for any value if all terms can move, m <= k and a unit is one number; exact for m = 1 in a box."""
        # Terms are rounded as the layer rounds them, and added up in the dtype of the bounds.
        dtype, weights = self.weight.dtype, self.weight.to(reach.x.dtype)

        def block(b: slice, o: slice) -> tuple[Tensor, Tensor]:
            here, weight = reach[b], weights[o]
            terms, numbers = here.x.unsqueeze(1) * weight, here.numbers(budgets[b])
            order = ascending(terms)
            low, high = _shifted(order, self.k, numbers, dtype)
            if self.sweeps(reach):
                return low, high
            middle = order[..., self.k : order.shape[-1] - self.k].sum(-1, dtype=dtype).unsqueeze(1)
            both = (part * here.moves.unsqueeze(1) for part in self._amounts(terms, order, here, weight, numbers))
            fall, rise = (largest_sums(here.units(amounts), budgets[b], dtype) for amounts in both)
            return torch.maximum(low, middle - fall), torch.minimum(high, middle + rise)

        low, high = in_blocks(block, reach, len(self.weight))
        return low + self.bias, high + self.bias

    def drop(self, reach: Reachable, budgets: Tensor, head: Tensor) -> Tensor:
        down, up = head.new_zeros(2, len(head), head.shape[1], reach.x.shape[1])
        numbers, weights = reach.numbers(budgets.unsqueeze(1)), self.weight.to(reach.x.dtype)
        with_x, against_x = (weights > 0).to(weights), (weights < 0).to(weights)
        for b, o in blocks(reach, len(weights)):
            here, weight = reach[b], weights[o]
            terms = here.x.unsqueeze(1) * weight
            fall, rise = self._amounts(terms, ascending(terms), here, weight, numbers[b])
            gains, losses = head[b, :, o].clamp(min=0), -head[b, :, o].clamp(max=0)
            down[b] += gains @ (fall * with_x[o]).to(head) + losses @ (rise * against_x[o]).to(head)
            up[b] += gains @ (fall * against_x[o]).to(head) + losses @ (rise * with_x[o]).to(head)
        amounts = torch.maximum(down, up) * reach.moves.unsqueeze(1)
        return largest_sums(reach.units(amounts), budgets.unsqueeze(1)).squeeze(1)

    def rounding(self, reach: Reachable, budgets: Tensor) -> Tensor:
        """For m <= k the kept terms lie between s_{i+m} and s_{i-m}: their magnitudes add up to sum_j |u_j| at most.

        The share is twice what the operator's tests allow; beyond 20,000 terms it grows in proportion.
        """
        magnitudes, terms = self.clean_magnitudes(reach), reach.x.shape[1]
        if not reach.any_value:
            within = (reach.numbers(budgets) <= self.k).unsqueeze(-1)
            magnitudes = torch.where(within, magnitudes, self.most_magnitudes(reach, budgets))
        return slack(2e-5 * max(1.0, terms / 20_000), terms, magnitudes)

    def trainable_interval(self, reach: Reachable, budget: int) -> tuple[Tensor, Tensor]:
        """For m <= k the interval of any value, by the operator; a box only shrinks it."""
        k, numbers = self.k, budget * reach.channels
        if numbers > k:
            both = self.interval(reach, torch.full((len(reach.x), 1), budget, device=reach.x.device))
            return both[0].squeeze(1), both[1].squeeze(1)
        counts = ((k + numbers, k - numbers), (k - numbers, k + numbers))
        low, high = trimmed_linears(reach.x, self.weight, self.bias, counts=counts)
        return low, high

    def quick_interval(self, reach: Reachable, budget: int) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        raise ValueError("quick must be False unless the first layer is a plain Linear")

    def _amounts(
        self, terms: Tensor, order: Tensor, reach: Reachable, weight: Tensor, numbers: Tensor
    ) -> tuple[Tensor, Tensor]:
        """How far each of ``terms`` (n, h, d) lowers and raises T_k at most while ``numbers`` (n, 1) move.

        order: the terms, ascending. For any value, frozen numbers get an amount too: the caller masks them.
        """
        k, d = self.k, order.shape[-1]
        m = numbers.view(-1, 1, 1).expand(-1, order.shape[1], 1)
        floor = order.gather(-1, (k - m).clamp(min=0)).masked_fill(m > k, -torch.inf)
        ceiling = order.gather(-1, (d - k - 1 + m).clamp(max=d - 1)).masked_fill(m > k, torch.inf)
        if not reach.any_value:
            ends = products(reach.low, weight), products(reach.high, weight)
            floor, ceiling = torch.maximum(torch.minimum(*ends), floor), torch.minimum(torch.maximum(*ends), ceiling)
        fall = (terms.minimum(order[..., d - k - 1, None]) - floor).clamp_(min=0)
        rise = (ceiling - terms.maximum(order[..., k, None])).clamp_(min=0)
        return fall, rise


def _shifted(order: Tensor, k: int, numbers: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The least and the largest T_k after ``numbers`` (n, m) changes to any value: two ``(n, m, h)``; m > k: infinite.

    order: ``(n, h, d)``, ascending. A further change moves the window of kept terms on by one.
    """
    d, most = order.shape[-1], min(k, int(numbers.max()))
    middle = order[..., k : d - k].sum(-1, keepdim=True, dtype=dtype)
    falls = (order[..., d - k - most : d - k].to(dtype) - order[..., k - most : k]).flip(-1).cumsum(-1)
    rises = (order[..., d - k : d - k + most].to(dtype) - order[..., k : k + most]).cumsum(-1)
    index = numbers.clamp(max=most).unsqueeze(1).expand(-1, order.shape[1], -1)
    fall, rise = (F.pad(steps, (1, 0)).gather(-1, index) for steps in (falls, rises))
    beyond = (numbers > k).unsqueeze(1)
    low, high = (middle - fall).masked_fill(beyond, -torch.inf), (middle + rise).masked_fill(beyond, torch.inf)
    return low.transpose(1, 2), high.transpose(1, 2)
