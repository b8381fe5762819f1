"""First layers whose terms do not compete: the dense and the clipped one. Their bounds are exact, for any budget."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor
from torch.nn import functional as F

from ..ops import clipped_linear, trimmed_conv2d, trimmed_linear
from .first_layer import FirstLayer, rounding_share, slack
from .reachable import Reachable, in_blocks, largest_sums


class Separable(FirstLayer):
    """``out_h = sum_j phi(w_hj x_j) + b_h`` with a rising phi: a changed term leaves the others alone.

    So the worst m units are those that move an output furthest, one by one:

        least out = out - top_m over units of sum_j (phi(u_j) - phi(least u_j)), mirrored for the largest

    and ``a @ out`` falls by top_m over units of ``sum_j max over x_j of sum_h a_h (phi(u_hj) - phi(w_hj x_j))``.
    """

    @abstractmethod
    def terms(self, numbers: Tensor, weight: Tensor) -> Tensor:
        """phi(w_hj x_j): ``(n, h, d)`` for numbers ``(n, d)`` and a weight ``(h, d)``."""

    @abstractmethod
    def falls(self, reach: Reachable, head: Tensor) -> Tensor:
        """How far a change of each number alone lowers ``head @ outputs``: ``(n, c, d)`` for a head ``(n, c, h)``."""

    def interval(self, reach: Reachable, budgets: Tensor) -> tuple[Tensor, Tensor]:
        reach = reach.to(self.weight.dtype)

        def block(b: slice, o: slice) -> tuple[Tensor, Tensor]:
            here, weight = reach[b], self.weight[o]
            terms, *ends = (self.terms(numbers, weight) for numbers in (here.x, here.low, here.high))
            fall, rise = terms - torch.minimum(*ends), torch.maximum(*ends) - terms
            return largest_sums(here.units(fall), budgets[b]), largest_sums(here.units(rise), budgets[b])

        fall, rise = in_blocks(block, reach, len(self.weight))
        value = self.value(reach.x).unsqueeze(1)
        return value - fall, value + rise

    def drop(self, reach: Reachable, budgets: Tensor, head: Tensor) -> Tensor:
        falls = self.falls(reach.to(self.weight.dtype), head)
        return largest_sums(reach.units(falls), budgets.unsqueeze(1)).squeeze(1)


class Dense(Separable):
    """phi is the identity."""

    def limit(self, reach: Reachable) -> int:
        if not reach.bounded:
            raise ValueError(
                "no certificate exists: a plain Linear layer follows one changed number of any value anywhere; "
                "give a ball with finite low and high, or put InputClamp before it"
            )
        return reach.number_of_units

    def value(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def terms(self, numbers: Tensor, weight: Tensor) -> Tensor:
        return numbers.unsqueeze(1) * weight

    def trainable_interval(self, reach: Reachable, budget: int) -> tuple[Tensor, Tensor]:
        """By the operators: what a change adds to an output is a product of numbers >= 0, of which the largest count.

        rise_j = max(w, 0) (high - x) + max(-w, 0) (x - low), one of them 0, and fall_j with x - low and high - x
        """
        below, above = reach.x - reach.low, reach.high - reach.x
        steps = torch.cat([torch.cat([below, above], 1), torch.cat([above, below], 1)])
        weight = torch.cat([self.weight.clamp(min=0), -self.weight.clamp(max=0)], 1)
        moved = F.linear(steps, weight)
        if reach.channels == 1:
            moved = moved - trimmed_linear(steps, weight, top=budget, bottom=0)
        elif budget < reach.number_of_units:  # a unit is a place of a window with twice its channels
            windows, kernels = (t.unflatten(1, (-1, 1, reach.number_of_units)) for t in (steps, weight))
            moved = moved - trimmed_conv2d(windows, kernels, top=budget, bottom=0, unit="pixel").flatten(1)
        fall, rise = moved.chunk(2)
        value = self.value(reach.x)
        return value - fall, value + rise

    def quick_interval(self, reach: Reachable, budget: int) -> tuple[Tensor, Tensor]:
        """By matrix products: the largest m of numbers w_j s_j, all >= 0, are for any cut >= 0

            top_m(w s) = min over t of m t + sum_j (w_j s_j - t)_+  <=  m far cut + sum_j s_j (w_j - cut)_+

        by t = far * cut, where far is the longest step of the row. With past = w beyond its cut, 0 within, the sums are
        (range @ |past| +- (above - below) @ past) / 2, for rise and fall. The weight of an output that comes 2m-th by
        size is a good cut: about half of the larger ones have a step to go. What is learnt makes many weights equally
        large, and then little is lost; with pixels, whose numbers are bounded one by one, more.
        """
        numbers = min(budget * reach.widest, reach.x.shape[1])
        rank = max(1, min(2 * numbers, reach.x.shape[1]))
        cut = self.weight.detach().abs().topk(rank, 1).values[:, -1:]
        past = self.weight - torch.minimum(torch.maximum(self.weight, -cut), cut)
        below, above = reach.x - reach.low, reach.high - reach.x
        ranges = (reach.high - reach.low)[: 1 if reach.alike else None]
        most = numbers * torch.maximum(below, above).amax(1, keepdim=True) * cut.T
        both, tilt = F.linear(ranges, past.abs()), F.linear(above - below, past)
        fall, rise = (most + ((both + sign * tilt) / 2).clamp(min=0) for sign in (-1, 1))
        value = self.value(reach.x)
        return value - fall, value + rise

    def falls(self, reach: Reachable, head: Tensor) -> Tensor:
        slope = head @ self.weight
        x, low, high = (numbers.unsqueeze(1) for numbers in (reach.x, reach.low, reach.high))
        return torch.maximum(slope * (x - low), slope * (x - high))

    def rounding(self, reach: Reachable, budgets: Tensor) -> Tensor:
        terms = reach.x.shape[1]
        return slack(rounding_share(terms), terms, self.most_magnitudes(reach, budgets))


class Clipped(Separable):
    """phi clips to [-clip, clip]."""

    def __init__(self, weight: Tensor, bias: Tensor | None, clip: float) -> None:
        super().__init__(weight, bias)
        self.clip = clip

    def limit(self, reach: Reachable) -> int:
        return reach.number_of_units

    def value(self, x: Tensor) -> Tensor:
        return clipped_linear(x, self.weight, self.bias, clip=self.clip)

    def terms(self, numbers: Tensor, weight: Tensor) -> Tensor:
        # Infinite numbers go a way of their own: their products have no gradient, not even 0.
        infinite, numbers = numbers.isinf().unsqueeze(1), numbers.unsqueeze(1)
        finite = (numbers.masked_fill(infinite, 0.0) * weight).clamp(-self.clip, self.clip)
        return torch.where(infinite, self.clip * weight.sign() * numbers.sign(), finite)

    def falls(self, reach: Reachable, head: Tensor) -> Tensor:
        """The head's share of number j at the value v, f_j(v) = sum_h a_h phi(w_hj v), is odd and piecewise linear.

        Its least value in [low, high] is at an end or at a kink, +-clip / |w_hj|. At the kink of the r-th weight of a
        column, in rising order of magnitude, that term and those of larger weights are clipped, the others linear:

            f_j(t_r) = clip * sum_{h from r on} a_h sign(w_hj) + t_r * sum_{h before r} a_h w_hj
        """
        now, *ends = (head @ self.terms(v, self.weight) for v in (reach.x, reach.low, reach.high))
        least = torch.minimum(*ends)
        low, high = reach.low.unsqueeze(1), reach.high.unsqueeze(1)
        order = self.weight.abs().argsort(0)
        weight = self.weight.gather(0, order)
        clipped, linear = head @ (self.clip * self.weight.sign()), torch.zeros_like(now)
        for r, place in enumerate(order):
            # The term of a weight of 0 has no kink.
            bends = weight[r].abs() > self.clip / torch.finfo(weight.dtype).max
            share, kink = head[..., place], self.clip / weight[r].abs().masked_fill(~bends, 1.0)
            there = clipped + kink * linear
            for at, value in ((kink, there), (-kink, -there)):
                inside = (low <= at) & (at <= high) & bends
                least = torch.where(inside, torch.minimum(least, value), least)
            clipped = clipped - share * (self.clip * weight[r].sign())
            linear = linear + share * weight[r]
        return now - least

    def rounding(self, reach: Reachable, budgets: Tensor) -> Tensor:
        here, terms = self.clean_magnitudes(reach), reach.x.shape[1]
        changed = self.clip * reach.numbers(budgets).to(here.dtype).unsqueeze(-1)
        return slack(rounding_share(terms), terms, here + changed)
