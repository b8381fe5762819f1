"""Images moved and mirrored at random, on the device they lie on."""

from __future__ import annotations

import torch
from torch import Tensor

PAD = 4
_SHIFTS = 2 * PAD + 1


def draw(rows: int, generator: torch.Generator) -> Tensor:
    """For each row one of the ways to crop and flip it: ``(rows,)`` int64 on the CPU, so the same for every device."""
    return torch.randint(2 * _SHIFTS**2, (rows,), generator=generator, device="cpu")


def crop_flip(points: Tensor, rows: Tensor, ways: Tensor) -> Tensor:
    """Some images, each padded by 4 zeros on every side, cropped to its size again and mirrored or not.

    Zero is what a truncation leaves of a number. On images in [-1, 1] that is mid-grey, never among the extremes; black
    would be the very numbers that a truncation removes, and spend it on the margin.

    Args:
        points: ``(n, channels, height, width)``.  rows, ways: ``(m,)``, which of them, and what `draw` gave for each.
    """
    channels, height, width = points.shape[1:]
    y = _places(height, ways // 2 // _SHIFTS)
    x = _places(width, ways // 2 % _SHIFTS)
    x = torch.where((ways % 2 == 1).unsqueeze(1), x.flip(1), x)
    y, x = y.view(-1, 1, height, 1), x.view(-1, 1, 1, width)
    inside = (y >= 0) & (y < height) & (x >= 0) & (x < width)
    channel = torch.arange(channels, device=points.device).view(1, -1, 1, 1)
    # One gather from the rows as they lie: no padded copy of them is ever made.
    moved = points[rows.view(-1, 1, 1, 1), channel, y.clamp(0, height - 1), x.clamp(0, width - 1)]
    return torch.where(inside, moved, 0.0)


def _places(size: int, shift: Tensor) -> Tensor:
    """``(m, size)``: from where each line of the result comes; outside of 0 .. size - 1 from the padding."""
    return torch.arange(size, device=shift.device) + (shift - PAD).unsqueeze(1)
