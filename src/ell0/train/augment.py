"""Images moved and mirrored at random, on their device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .config import Augment


@dataclass(frozen=True)
class Moves:
    """Shifts by up to ``reach`` pixels in both directions, each with its mirror image if ``mirrored``.

    nearest: fill with the nearest pixel; otherwise with 0, which is what truncation leaves of a number. On images in
        [-1, 1] that is mid-grey, never an extreme; truncation would spend its k on a black margin.
    """

    reach: int
    mirrored: bool
    nearest: bool

    @property
    def ways(self) -> int:
        return (2 * self.reach + 1) ** 2 * (2 if self.mirrored else 1)

    def draw(self, rows: int, generator: torch.Generator) -> Tensor:
        """One of the ways for each row: ``(rows,)`` int64, on the CPU so that every device gets the same."""
        return torch.randint(self.ways, (rows,), generator=generator, device="cpu")

    def moved(self, points: Tensor, rows: Tensor, ways: Tensor) -> Tensor:
        """The images ``rows`` (m,) of points ``(n, channels, height, width)``, moved in the ways ``(m,)`` drawn."""
        channels, height, width = points.shape[1:]
        shift, side = ways // 2 if self.mirrored else ways, 2 * self.reach + 1
        y, x = self._sources(height, shift // side), self._sources(width, shift % side)
        if self.mirrored:
            x = torch.where((ways % 2 == 1).unsqueeze(1), x.flip(1), x)
        y, x = y.view(-1, 1, height, 1), x.view(-1, 1, 1, width)
        channel = torch.arange(channels, device=points.device).view(1, -1, 1, 1)
        # One gather: no padded copy is made.
        moved = points[rows.view(-1, 1, 1, 1), channel, y.clamp(0, height - 1), x.clamp(0, width - 1)]
        if self.nearest:
            return moved
        inside = (y >= 0) & (y < height) & (x >= 0) & (x < width)
        return torch.where(inside, moved, 0.0)

    def _sources(self, size: int, shift: Tensor) -> Tensor:
        """``(m, size)``: the line that each line of the result comes from; it may lie outside of the image."""
        return torch.arange(size, device=shift.device) + (shift - self.reach).unsqueeze(1)


AUGMENTS: dict[Augment, Moves] = {
    "crop-flip": Moves(reach=4, mirrored=True, nearest=False),
    "shift": Moves(reach=1, mirrored=False, nearest=True),
}
