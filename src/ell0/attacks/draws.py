"""Counter-based randomness: everything a row draws is a hash of (key, row id, query, draw).

So a draw depends neither on the batch a row sits in nor on which rows have dropped out; bits and uniform numbers do not
depend on the device either (normal ones go through its logarithm and cosine).
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Draws"]


# The constants of SplitMix64 (Steele, Lea and Flood, 2014); products wrap around in int64 as they do in uint64.
_GOLDEN, _FIRST, _SECOND = (c - 2**64 for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _shift(bits: Tensor, by: int) -> Tensor:
    """A right shift that brings in zeros."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _mix(bits: Tensor) -> Tensor:
    """SplitMix64's finaliser: a bijection of 64 bits in which every bit of the input moves every bit of the output."""
    bits = (bits ^ _shift(bits, 30)) * _FIRST
    bits = (bits ^ _shift(bits, 27)) * _SECOND
    return bits ^ _shift(bits, 31)


class Draws:
    """What rows draw. ``query`` numbers the moments at which a row draws: one moment, one number."""

    def __init__(self, generator: torch.Generator | None, rows: Tensor) -> None:
        """rows: ``(n,)`` int64, global ids."""
        if generator is None:
            generator = torch.Generator().manual_seed(0)
        key = torch.randint(-(2**63), 2**63 - 1, (), generator=generator, device=generator.device).to(rows.device)
        self._streams = _mix(_mix(key + _GOLDEN) + rows * _GOLDEN)

    def bits(self, at: Tensor, query: int | Tensor, count: int) -> Tensor:
        """``(len(at), count)`` int64, all 64 bits random. at: positions of rows.

        query: int64 ``(len(at),)``, one moment for each; ``(q, 1)``, all of them for each: ``(q, len(at), count)``.
        """
        moment = (query + 1) * _GOLDEN
        if isinstance(moment, int):
            moment = (moment + 2**63) % 2**64 - 2**63  # the int64 with the same low 64 bits
        stream = _mix(self._streams[at] + moment)
        return _mix(stream.unsqueeze(-1) + torch.arange(1, count + 1, device=at.device) * _GOLDEN)

    def uniform(self, at: Tensor, query: int | Tensor, count: int) -> Tensor:
        """``(len(at), count)`` float64, in [0, 1)."""
        return _shift(self.bits(at, query, count), 11).double() * 2.0**-53

    def normal(self, at: Tensor, query: int, count: int) -> Tensor:
        """``(len(at), count)`` float64, standard normal."""
        radius, angle = self.uniform(at, query, 2 * count).chunk(2, 1)
        return (-2 * torch.log1p(-radius)).sqrt() * torch.cos(2 * torch.pi * angle)
