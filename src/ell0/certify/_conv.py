"""The truncated convolution as a first layer: each output is a truncated sum over its own receptive field.

So a field is a row of a dense truncated layer (`_truncated`), whose numbers are those it sees, with two things to mind.

**How many terms of a field change.** A unit of the ball changes one number of a position or all; a term is one product,
or those of a position in the channels of a group added up. A changed unit is one term, except where the layer counts
features and the ball pixels: there it is as many as a group has channels. So m changes are at most m' = min(m * those,
the terms of the field that can move) terms, and the interval of an output is that of m' changed terms; for any value,
m' <= k and weights other than 0 it is attained. Where the layer counts pixels, a ball of features is taken as the ball
of as many pixels, which holds it.

**All outputs see the same changes.** The bound of a head a @ T adds up, for each number of the image, what it does in
all fields that see it. The term of a pixel is another function of its channels in each output: one that lowers one
output as far as it can may do so to all, whatever their signs.

Padding is terms of 0 that cannot change. Against any value they are taken as if they could: a ball that holds the true
one, whose intervals need no look at which terms stand still.

In float32 the theorem is about the terms as they are rounded, those of pixels after a sum in float64: a changed one may
become anything, however the channels of a pixel cancel, and the others are the clean row's. Values must be finite:
infinite channels of opposite signs have no sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from ..nn import TruncatedConv2d
from ..ops import trimmed_conv2d, trimmed_conv2ds
from ..ops.conv import count_terms, output_size, pixel_terms
from ..ops.reference import products
from ._first import First
from ._reach import Reach, largest_sums
from ._truncated import Sums

UNFOLDED = 1 << 22
"""Numbers of fields that exist at once."""


class PixelSums(Sums):
    """Sums whose terms are pixels: ``u_p = sum over channels c of w_hcp x_cp``.  weight: ``(h, channels * places)``."""

    def __init__(self, weight: Tensor, bias: Tensor, k: int, channels: int) -> None:
        super().__init__(weight, bias, k)
        self.channels = channels

    def terms(self, x: Tensor, weight: Tensor) -> Tensor:
        x, weight = (numbers.unflatten(1, (self.channels, -1)) for numbers in (x, weight))
        return pixel_terms(x, weight, torch.matmul).permute(1, 2, 0)

    def ends(self, reach: Reach, weight: Tensor) -> tuple[Tensor, Tensor]:
        ends = products(reach.low.double(), weight.double()), products(reach.high.double(), weight.double())
        least, most = torch.minimum(*ends), torch.maximum(*ends)
        return self._pixels(least).sum(-2).to(weight.dtype), self._pixels(most).sum(-2).to(weight.dtype)

    def moving(self, reach: Reach) -> Tensor:
        return self._pixels(reach.moves).any(-2)

    def movable(self, reach: Reach, weight: Tensor) -> Tensor:
        return self._pixels(super().movable(reach, weight)).any(-2)

    def units(self, reach: Reach, amounts: Tensor) -> Tensor:  # noqa: ARG002
        return amounts

    def boxed(self, reach: Reach) -> bool:
        return not reach.any_value

    def shares(self, reach: Reach, budgets: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
        """Of each pixel, whichever way it moves: ``(n, c, places)``, twice."""
        found = head.new_zeros(len(head), head.shape[1], reach.x.shape[1] // self.channels)
        for b, o, fall, rise in self._falls(reach, budgets):
            gains, losses = head[b, :, o].clamp(min=0), -head[b, :, o].clamp(max=0)
            found[b] += gains @ fall.to(head) + losses @ rise.to(head)
        return found, found

    def _pixels(self, numbers: Tensor) -> Tensor:
        pixels: Tensor = numbers.unflatten(-1, (self.channels, -1))
        return pixels


class Convolved(First):
    """Bounds of a truncated convolution of images ``(n, c, height, width)``, the rows of a reach flattened.

    Outputs are flat too: ``h = out * positions``.
    """

    def __init__(self, layer: TruncatedConv2d, shape: Sequence[int]) -> None:
        super().__init__(layer.weight, layer.bias)
        self.k, self.unit, self.geometry, self.shape = layer.k, layer.unit, layer.geometry, tuple(shape)
        channels, *kernel = self.weight.shape[1:]
        self.channels, self.size = channels, output_size(shape[1:], kernel, self.geometry)
        self.terms, self.positions = count_terms(channels, kernel, self.unit), self.size[0] * self.size[1]
        self.sums: list[Sums] = []
        groups = self.geometry.groups
        for weight, bias in zip(self.weight.flatten(1).chunk(groups), self.bias.chunk(groups), strict=True):
            pixels = self.unit == "pixel"
            self.sums.append(PixelSums(weight, bias, self.k, channels) if pixels else Sums(weight, bias, self.k))

    @property
    def outputs(self) -> int:
        return len(self.weight) * self.positions

    def limit(self, reach: Reach) -> int:
        if reach.bounded or self._most(reach) <= self.k:
            return reach.number_of_units
        return self.k // self._widest(reach)

    def check(self, reach: Reach, budget: int) -> None:
        if budget * self._widest(reach) > self.k and budget > (limit := self.limit(reach)):
            unit = "features" if reach.channels == 1 else "pixels"
            raise ValueError(
                f"no certificate exists for budget={budget}: the first layer, with k={self.k} of the {self.terms} "
                f"terms of a field, bounds at most {limit} changed {unit} of any value"
            )

    def sweeps(self, reach: Reach) -> bool:
        return not self._boxed(reach)

    def value(self, x: Tensor) -> Tensor:
        options = {"top": self.k, "bottom": self.k, "unit": self.unit, **vars(self.geometry)}
        return trimmed_conv2d(x.unflatten(1, self.shape), self.weight, self.bias, **options).flatten(1)

    def interval(self, reach: Reach, budgets: Tensor) -> tuple[Tensor, Tensor]:
        low, high = self._over_fields(reach, budgets, lambda sums, *fields: sums.interval(*fields))
        return low, high

    def rounding(self, reach: Reach, budgets: Tensor) -> Tensor:
        return self._over_fields(reach, budgets, lambda sums, *fields: (sums.rounding(*fields),))[0]

    def drop(self, reach: Reach, budgets: Tensor, head: Tensor) -> Tensor:
        n, c = head.shape[:2]
        pixels, groups = self.unit == "pixel", self.geometry.groups
        seen = 1 if pixels else self.channels
        down, up = head.new_empty(2, n, c, groups, seen, *self.shape[1:])
        by_field = head.view(n, c, groups, -1, self.positions).permute(2, 0, 4, 1, 3)
        for b in self._rows(n):
            many = budgets[b].repeat_interleave(self.positions)
            for group, (sums, fields) in enumerate(zip(self.sums, self._fields(reach[b]), strict=True)):
                moving = sums.moving(fields).unsqueeze(1)
                found = sums.shares(fields, many, by_field[group, b].flatten(0, 1))
                for total, share in zip((down, up), found, strict=True):
                    total[b, :, group] = self._fold(share * moving, c)
        amounts = torch.maximum(down, up)
        # A pixel has one term in each group, or the numbers of all.
        amounts = amounts.sum((2, 3)).flatten(2) if pixels else reach.units(amounts.flatten(2))
        return largest_sums(amounts, budgets.unsqueeze(1)).squeeze(1)

    def trainable_interval(self, reach: Reach, budget: int) -> tuple[Tensor, Tensor]:
        """For m <= k that of any value, by the operator; a box only shrinks it."""
        k, numbers = self.k, budget * self._widest(reach)
        if numbers > k:
            return super().trainable_interval(reach, budget)
        counts = ((k + numbers, k - numbers), (k - numbers, k + numbers))
        options = {"counts": counts, "unit": self.unit, **vars(self.geometry)}
        low, high = trimmed_conv2ds(reach.x.unflatten(1, self.shape), self.weight, self.bias, **options).flatten(2)
        return low, high

    def _over_fields(
        self, reach: Reach, budgets: Tensor, bound: Callable[[Sums, Reach, Tensor], Sequence[Tensor]]
    ) -> list[Tensor]:
        """What ``bound`` says of each field, ``(fields, m, out)`` each, put together: ``(n, m, h)`` each."""
        found = []
        for b in self._rows(len(reach.x)):
            many = budgets[b].repeat_interleave(self.positions, 0)
            parts = [bound(sums, fields, many) for sums, fields in zip(self.sums, self._fields(reach[b]), strict=True)]
            whole = (torch.cat(part, -1).unflatten(0, (-1, self.positions)) for part in zip(*parts, strict=True))
            found.append([part.permute(0, 2, 3, 1).flatten(2) for part in whole])
        return [torch.cat(part) for part in zip(*found, strict=True)]

    def _rows(self, n: int) -> Iterator[slice]:
        """Some rows at a time."""
        count = max(1, UNFOLDED // (self.positions * self.weight[0].numel() * self.geometry.groups))
        return (slice(start, start + count) for start in range(0, n, count))

    def _fields(self, reach: Reach) -> Iterator[Reach]:
        """What the fields of each group see: rows ``(n * positions, channels * places)``."""
        # The ends of padding: 0, or where nothing stands still, anything.
        far = torch.inf if self._free(reach) else 0.0
        vertical, horizontal = self.geometry.padding
        groups = []
        for numbers, outside in ((reach.x, 0.0), (reach.low, -far), (reach.high, far)):
            images = numbers.unflatten(1, self.shape)
            images = F.pad(images, (horizontal, horizontal, vertical, vertical), value=outside)
            seen = F.unfold(images, self.weight.shape[2:], self.geometry.dilation, 0, self.geometry.stride)
            groups.append(seen.transpose(1, 2).flatten(0, 1).chunk(self.geometry.groups, 1))
        channels = self.channels if self.unit == "pixel" or reach.channels > 1 else 1
        for x, low, high in zip(*groups, strict=True):
            yield replace(reach, x=x, low=low, high=high, channels=channels, widest=self._widest(reach))

    def _fold(self, amounts: Tensor, c: int) -> Tensor:
        """Amounts of the numbers of each field ``(n * positions, c, ...)`` added up where they lie in the image."""
        amounts = amounts.unflatten(0, (-1, self.positions)).permute(0, 2, 3, 1).flatten(0, 1)
        where = (self.geometry.dilation, self.geometry.padding, self.geometry.stride)
        image: Tensor = F.fold(amounts, self.shape[1:], self.weight.shape[2:], *where).unflatten(0, (-1, c))
        return image

    def _widest(self, reach: Reach) -> int:
        """The most terms of a field that a unit of the ball changes."""
        return 1 if self.unit == "pixel" else min(reach.widest, self.channels)

    def _boxed(self, reach: Reach) -> bool:
        return not reach.any_value or self._widest(reach) > 1

    def _free(self, reach: Reach) -> bool:
        """Whether every number may become anything, and nothing else is known."""
        return not self._boxed(reach) and bool(reach.moves.all())

    def _most(self, reach: Reach) -> int:
        """The most terms of a field that can change."""
        if self._free(reach):
            return self.terms
        groups = self.geometry.groups
        moves = reach.moves.unflatten(1, self.shape).unflatten(1, (groups, -1))
        moves = (moves.any(2) if self.unit == "pixel" else moves.flatten(1, 2)).float()
        ones = moves.new_ones(groups, moves.shape[1] // groups, *self.weight.shape[2:])
        return int(F.conv2d(moves, ones, None, **vars(self.geometry)).amax())
