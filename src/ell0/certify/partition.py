"""Disjoint parts of the input, as a value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from ..common import check_count
from ..nn.layers import check_shape
from ..threat import describe


@dataclass(frozen=True, eq=False)
class Partition:
    """Which pixels each of T parts of a row holds; every pixel lies in one part, with all its channels.

        Partition.strides((3, 32, 32), (4, 8))        # part (i, j) holds the pixels (i + 4 p, j + 8 q): T = 32
        Partition.groups((5,), [[0, 3], [1, 2, 4]])   # any disjoint groups, of features or of pixels
        Partition.dealt((784,), 60)                   # pixel i lies in part i % 60

    Args:
        shape: of one row, ``(channels, height, width)``, or ``(d,)``, of which each number is a pixel.
        index: the pixels, counted row by row, on the CPU: ``(T, h, w)`` int64 for parts that are pictures, or
            ``(T, size)``. -1 where a part has no pixel: 0 is seen there.
    """

    shape: tuple[int, ...]
    index: Tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", check_shape("shape", self.shape))
        if len(self.shape) not in (1, 3):
            raise ValueError(f"shape must be (channels, height, width) or (d,), got {self.shape!r}")
        index, sizes = self.index, (2,) if len(self.shape) == 1 else (2, 3)
        if not isinstance(index, Tensor) or index.dtype != torch.int64 or index.ndim not in sizes or index.is_meta:
            form = " or ".join(("(parts, size)", "(parts, height, width)")[: len(sizes)])
            raise ValueError(f"index must be int64 of shape {form}, got {describe(index)}")
        if index.numel() and not (int(index.min()) >= -1 and int(index.max()) < self.pixels):
            got = f"{int(index.min())} to {int(index.max())}"
            raise ValueError(f"index must lie in [-1, {self.pixels}), of which -1 is no pixel, got {got}")
        times = torch.bincount(index[index >= 0], minlength=self.pixels)
        for wrong, said in ((times > 1, "several places"), (times == 0, "no part")):
            if bool(wrong.any()):
                raise ValueError(f"parts must hold every pixel once, but pixel {int(wrong.nonzero()[0])} is in {said}")
        if len(empty := (index < 0).flatten(1).all(1).nonzero()):
            raise ValueError(f"parts must have a pixel each, but part {int(empty[0])} has none")

    @classmethod
    def strides(cls, shape: Sequence[int], strides: Sequence[int]) -> Self:
        """Sub-grids of an image, part ``i * strides[1] + j`` those pixels whose remainders are i and j: pictures."""
        _, height, width = (*shape, 0, 0, 0)[:3]
        if len(shape) != 3 or len(strides) != 2 or not (0 < strides[0] <= height and 0 < strides[1] <= width):
            got = f"strides={tuple(strides)} with shape={tuple(shape)}"
            raise ValueError(f"strides must be two ints from 1 to height and width of an image's shape, got {got}")
        a, b = strides
        with torch.device("cpu"):
            grid = torch.arange(height * width).view(height, width)
            grid = F.pad(grid, (0, -width % b, 0, -height % a), value=-1)
            index = grid.unflatten(1, (-1, b)).unflatten(0, (-1, a)).permute(1, 3, 0, 2).flatten(0, 1)
        return cls(tuple(shape), index)

    @classmethod
    def groups(cls, shape: Sequence[int], groups: Sequence[Sequence[int]]) -> Self:
        """Any groups of pixels or features, of any sizes."""
        size = max(map(len, groups), default=0)
        filled = [[*map(int, group), *[-1] * (size - len(group))] for group in groups]
        return cls(tuple(shape), torch.tensor(filled, dtype=torch.int64, device="cpu").view(len(groups), size))

    @classmethod
    def dealt(cls, shape: Sequence[int], parts: int) -> Self:
        """Pixel i in part ``i % parts``     ([Hammoudeh24])."""
        pixels = check_shape("shape", shape)[-2:]
        units = pixels[0] * pixels[-1] if len(shape) > 1 else pixels[0]
        if check_count("parts", parts) > units:
            raise ValueError(f"parts must be at most the number of pixels, got parts={parts} with {units} pixels")
        index = F.pad(torch.arange(units, device="cpu"), (0, -units % parts), value=-1).view(-1, parts).T
        return cls(tuple(shape), index.contiguous())

    @property
    def parts(self) -> int:
        """T."""
        return len(self.index)

    @property
    def pixels(self) -> int:
        """Of a row."""
        return self.shape[0] if len(self.shape) == 1 else self.shape[1] * self.shape[2]

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Of a part, as a network sees it: ``(channels, h, w)``, or ``(numbers,)`` of all channels."""
        channels, part = self.shape[0] if len(self.shape) == 3 else 1, self.index.shape[1:]
        return (channels, *part) if len(part) == 2 else (channels * part[0],)

    @property
    def owner(self) -> Tensor:
        """The part of each pixel: ``(pixels,)``."""
        flat, found = self.index.flatten(1), torch.empty(self.pixels, dtype=torch.int64, device="cpu")
        part = torch.arange(self.parts, device="cpu").unsqueeze(1).expand_as(flat)
        found[flat[flat >= 0]] = part[flat >= 0]
        return found

    def mirror(self) -> Tensor:
        """For each part of an image the part of the mirrored image with the same pixels: ``(parts,)``.

        Raises ValueError if there is none. Of strides (a, b) it is (i, (width - 1 - j) mod b) for (i, j).
        """
        if len(self.shape) == 3:
            owner = self.owner
            opposite = owner.view(self.shape[1:]).flip(1).flatten()
            match = torch.zeros(self.parts, dtype=torch.int64, device="cpu").scatter(0, owner, opposite)
            if torch.equal(match[owner], opposite):
                return match
        raise ValueError("mirrored must be False for a partition of which a part, mirrored, is no part")
