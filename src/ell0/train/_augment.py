"""Images moved and mirrored at random, on the device they lie on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ._config import Augment


@dataclass(frozen=True)
class Moves:
    """By up to ``reach`` pixels in both directions; ``mirrored`` every other time, or never.

    nearest: where nothing comes in stands the nearest pixel of the image; else 0, which is what a truncation leaves of
        a number. On images in [-1, 1] that is mid-grey, never among the extremes; black would be the very numbers that
        a truncation removes, and spend it on the margin.
    """

    reach: int
    mirrored: bool
    nearest: bool

    @property
    def ways(self) -> int:
        """How many there are."""
        return (2 * self.reach + 1) ** 2 * (2 if self.mirrored else 1)

    def draw(self, rows: int, generator: torch.Generator) -> Tensor:
        """For each row one of the ways: ``(rows,)`` int64 on the CPU, so the same for every device."""
        return torch.randint(self.ways, (rows,), generator=generator, device="cpu")

    def moved(self, points: Tensor, rows: Tensor, ways: Tensor) -> Tensor:
        """Some images, each in the way that was drawn for it.

        points: ``(n, channels, height, width)``.  rows, ways: ``(m,)``, which of them, and what `draw` gave for each.
        """
        channels, height, width = points.shape[1:]
        shift, side = ways // 2 if self.mirrored else ways, 2 * self.reach + 1
        y, x = self._places(height, shift // side), self._places(width, shift % side)
        if self.mirrored:
            x = torch.where((ways % 2 == 1).unsqueeze(1), x.flip(1), x)
        y, x = y.view(-1, 1, height, 1), x.view(-1, 1, 1, width)
        channel = torch.arange(channels, device=points.device).view(1, -1, 1, 1)
        # One gather from the rows as they lie: no padded copy of them is ever made.
        moved = points[rows.view(-1, 1, 1, 1), channel, y.clamp(0, height - 1), x.clamp(0, width - 1)]
        if self.nearest:
            return moved
        inside = (y >= 0) & (y < height) & (x >= 0) & (x < width)
        return torch.where(inside, moved, 0.0)

    def _places(self, size: int, shift: Tensor) -> Tensor:
        """``(m, size)``: from where each line of the result comes; outside of 0 .. size - 1 there is none."""
        return torch.arange(size, device=shift.device) + (shift - self.reach).unsqueeze(1)


AUGMENTS: dict[Augment, Moves] = {
    "crop-flip": Moves(reach=4, mirrored=True, nearest=False),
    "shift": Moves(reach=1, mirrored=False, nearest=True),
}
