"""What the attacker can make of the numbers that the first layer sees."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..nn import InputClamp, InputScale
from ..threat import L0Ball


@dataclass(frozen=True, eq=False)
class Reach:
    """Rows, and how far a changed number of each can go.

    x, low, high: ``(n, d)``, ``low <= x <= high``: a changed number lies between them, and a frozen one has low = high.
    channels: numbers of a unit; unit p holds the numbers p, p + units, p + 2 units and so on.
    widest: the most of them that can move.  any_value: whether every number that moves may take any value.
    bounded: whether none may take an infinite one.  alike: whether low and high are known to be those of every row.

    The interval holds x also where x lies outside the attacker's box: larger than what he can reach, never smaller.
    """

    x: Tensor
    low: Tensor
    high: Tensor
    channels: int
    widest: int
    any_value: bool
    bounded: bool
    alike: bool

    @classmethod
    def of(cls, x: Tensor, ball: L0Ball, rising: Sequence[InputClamp | InputScale]) -> Reach:
        """x: ``(n, ...)``, before what the first layer stands behind."""
        ball.count(x, x)  # raises where the ball does not fit x
        low, high, mutable = (bound.expand_as(x) for bound in ball.box(x))
        low = torch.where(mutable, torch.minimum(low, x), x)
        high = torch.where(mutable, torch.maximum(high, x), x)
        # What keeps the order of numbers, rounding included, an interval goes through end by end.
        for layer in rising:
            x, low, high = (layer(numbers) for numbers in (x, low, high))
        channels = x.shape[1] if ball.unit == "pixel" else 1
        x, low, high = (numbers.flatten(1) for numbers in (x, low, high))
        widest = channels
        if channels > 1 and ball.mutable is not None:
            widest = max(1, int((low < high).unflatten(1, (channels, -1)).sum(1).max()))
        if isinstance(ball.low, Tensor) or isinstance(ball.high, Tensor):
            any_value = bool(((low.isinf() & high.isinf()) | (low == high)).all())
            bounded = bool((low.isfinite() & high.isfinite()).all())
            alike = False
        else:  # known without a look at the tensors, for which a GPU would have to be waited for
            ends = [
                (ball.low, ball.high),
                *((layer.low, layer.high) for layer in rising if isinstance(layer, InputClamp)),
            ]
            open_below, open_above = (all(math.isinf(end) for end in side) for side in zip(*ends, strict=True))
            any_value, bounded = open_below and open_above, not (open_below or open_above)
            alike = ball.mutable is None and (ball.low, ball.high) == (-math.inf, math.inf)
        return cls(x, low, high, channels, widest, any_value, bounded, alike)

    def __getitem__(self, rows: slice | Tensor) -> Reach:
        return replace(self, x=self.x[rows], low=self.low[rows], high=self.high[rows])

    def to(self, dtype: torch.dtype) -> Reach:
        return replace(self, x=self.x.to(dtype), low=self.low.to(dtype), high=self.high.to(dtype))

    @property
    def moves(self) -> Tensor:
        """False where a number is frozen: ``(n, d)``."""
        return self.low < self.high

    @property
    def number_of_units(self) -> int:
        return self.x.shape[1] // self.channels

    def units(self, amounts: Tensor) -> Tensor:
        """Sums over the numbers of each unit: ``(..., units)`` for amounts ``(..., d)``."""
        return amounts if self.channels == 1 else amounts.unflatten(-1, (self.channels, -1)).sum(-2)

    def numbers(self, budgets: Tensor) -> Tensor:
        """The most numbers of each row that change with budgets ``(n, m)``, in units: ``(n, m)``."""
        return torch.minimum(budgets * self.widest, self.moves.sum(1, keepdim=True))


def largest_sums(amounts: Tensor, budgets: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Sums of the largest of the last dimension, as many as the budgets say: ``(n, m, h)``.

    amounts: ``(n, h, units)``, >= 0.  budgets: ``(n, m)``.
    """
    count = min(int(budgets.max()), amounts.shape[-1])
    sums = F.pad(amounts.topk(count, -1).values.cumsum(-1, dtype=dtype), (1, 0))
    index = budgets.clamp(max=count).unsqueeze(1).expand(-1, amounts.shape[1], -1)
    return sums.gather(-1, index).transpose(1, 2)


def blocks(n: int, rows: int, d: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """Slices of n samples, each with all slices of the outputs in turn, whose terms, d each, may exist at once."""
    terms = (1 << 25 if device.type == "cuda" else 1 << 20) // max(1, d)
    outputs = max(1, min(rows, terms))
    samples = max(1, terms // outputs)
    for b in range(0, n, samples):
        for o in range(0, rows, outputs):
            yield slice(b, b + samples), slice(o, o + outputs)


def in_blocks(block: Callable[[slice, slice], tuple[Tensor, Tensor]], reach: Reach, rows: int) -> tuple[Tensor, Tensor]:
    """Puts together what ``block`` gives for each of the `blocks`, ``(samples, ..., outputs)``: ``(n, ..., rows)``."""
    n, d = reach.x.shape
    # With gradients a block makes its terms anew in the backward pass.
    run = partial(checkpoint, block, use_reentrant=False) if torch.is_grad_enabled() else block
    found: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for b, o in blocks(n, rows, d, reach.x.device):
        found.setdefault(b.start, []).append(run(b, o))
    rows_of_each = [[torch.cat(part, -1) for part in zip(*parts, strict=True)] for parts in found.values()]
    first, second = (torch.cat(part) for part in zip(*rows_of_each, strict=True))
    return first, second
