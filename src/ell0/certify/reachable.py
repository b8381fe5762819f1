"""The values that an attacker can give to the numbers that the first layer sees."""

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
class Reachable:
    """Rows, and how far a changed number of each can go.

    x, low, high: ``(n, d)``, ``low <= x <= high``: a changed number lies between them, and a frozen one has low = high.
    channels: numbers of a unit; unit p holds the numbers p, p + units, p + 2 units and so on.
    any_value: whether every number that can change may take any value.  bounded: whether none may take an infinite one.
    alike: whether low and high are known to be the same in every row.

    The interval holds x also where x lies outside the attacker's box: it may be too large, never too small.
    """

    x: Tensor
    low: Tensor
    high: Tensor
    channels: int
    any_value: bool
    bounded: bool
    alike: bool

    @classmethod
    def of(cls, x: Tensor, ball: L0Ball, rising: Sequence[InputClamp | InputScale]) -> Reachable:
        """x: ``(n, ...)``, as the model gets it.  rising: layers between x and the first layer."""
        ball.count(x, x)  # raises if the ball does not fit x
        low, high, mutable = (bound.expand_as(x) for bound in ball.box(x))
        low, high = (torch.where(mutable, end, x) for end in (torch.minimum(low, x), torch.maximum(high, x)))
        # These layers keep the order of numbers, rounding included, so an interval passes end by end.
        for layer in rising:
            x, low, high = (layer(numbers) for numbers in (x, low, high))
        channels = x.shape[1] if ball.unit == "pixel" else 1
        x, low, high = (numbers.flatten(1) for numbers in (x, low, high))
        if isinstance(ball.low, Tensor) or isinstance(ball.high, Tensor):
            any_value = bool(((low.isinf() & high.isinf()) | (low == high)).all())
            bounded, alike = bool((low.isfinite() & high.isfinite()).all()), False
        else:  # known without a look at the tensors, which would make the host wait for a GPU
            clamps = [(layer.low, layer.high) for layer in rising if isinstance(layer, InputClamp)]
            lows, highs = zip((ball.low, ball.high), *clamps, strict=True)
            endless = [all(map(math.isinf, ends)) for ends in (lows, highs)]
            any_value, bounded = all(endless), not any(endless)
            alike = ball.mutable is None and (ball.low, ball.high) == (-math.inf, math.inf)
        return cls(x, low, high, channels, any_value, bounded, alike)

    def __getitem__(self, rows: slice | Tensor) -> Reachable:
        return replace(self, x=self.x[rows], low=self.low[rows], high=self.high[rows])

    def to(self, dtype: torch.dtype) -> Reachable:
        return replace(self, x=self.x.to(dtype), low=self.low.to(dtype), high=self.high.to(dtype))

    @property
    def moves(self) -> Tensor:
        """False where a number is frozen: ``(n, d)``."""
        return self.low < self.high

    @property
    def number_of_units(self) -> int:
        return self.x.shape[1] // self.channels

    def units(self, amounts: Tensor) -> Tensor:
        """Sums over the numbers of each unit: ``(..., d) -> (..., units)``."""
        return amounts if self.channels == 1 else amounts.unflatten(-1, (self.channels, -1)).sum(-2)

    def numbers(self, budgets: Tensor) -> Tensor:
        """The most numbers of each row that can change with budgets ``(n, m)`` in units: ``(n, m)``."""
        return torch.minimum(budgets * self.channels, self.moves.sum(1, keepdim=True))


def largest_sums(amounts: Tensor, budgets: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Sums of the largest amounts of the last dimension, as many as each budget says: ``(n, m, h)``.

    amounts: ``(n, h, units)``, >= 0.  budgets: ``(n, m)``.
    """
    count = min(int(budgets.max()), amounts.shape[-1])
    sums = F.pad(amounts.topk(count, -1).values.cumsum(-1, dtype=dtype), (1, 0))
    index = budgets.clamp(max=count).unsqueeze(1).expand(-1, amounts.shape[1], -1)
    return sums.gather(-1, index).transpose(1, 2)


def blocks(reach: Reachable, outputs: int) -> Iterator[tuple[slice, slice]]:
    """Slices of the rows, each with all slices of the outputs in turn, whose terms fit in memory."""
    n, d = reach.x.shape
    terms = (1 << 25 if reach.x.device.type == "cuda" else 1 << 20) // max(1, d)
    width = max(1, min(outputs, terms))
    height = max(1, terms // width)
    for b in range(0, n, height):
        for o in range(0, outputs, width):
            yield slice(b, b + height), slice(o, o + width)


def in_blocks(
    block: Callable[[slice, slice], tuple[Tensor, Tensor]], reach: Reachable, outputs: int
) -> tuple[Tensor, Tensor]:
    """Joins what ``block`` gives for each of the `blocks`, two ``(rows, ..., outputs)``: two ``(n, ..., outputs)``."""
    # With gradients a block makes its terms anew in the backward pass. No graph holds the state of a generator.
    run = (
        partial(checkpoint, block, use_reentrant=False, preserve_rng_state=False) if torch.is_grad_enabled() else block
    )
    found: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for b, o in blocks(reach, outputs):
        found.setdefault(b.start, []).append(run(b, o))
    whole = [[torch.cat(part, -1) for part in zip(*parts, strict=True)] for parts in found.values()]
    first, second = (torch.cat(part) for part in zip(*whole, strict=True))
    return first, second
