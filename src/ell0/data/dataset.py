"""What a data set is made of."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..common import Progress

Bytes = npt.NDArray[np.uint8]
Items = Generator[tuple[str, bytes], None, None]


@dataclass(frozen=True)
class File:
    """One file. size, sha256: of its uncompressed content."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Source:
    """Where files can be fetched: ``fetch(address, files, work, progress)`` yields (name, content) of these files.

    A name ends in ``.gz`` if its content is gzipped. ``work`` is an empty folder that the source may use. The caller
    checks the contents.
    """

    address: str
    fetch: Callable[[str, Sequence[File], Path, Progress], Items]


@dataclass(frozen=True)
class DataSet:
    """All that ell0 knows about a data set; adding one to ``SETS`` is all that a new set needs.

    shape: of an image, (channels, height, width).  white: the stored value that becomes 1; 0 becomes -1.
    mean, deviation: of the training images in [0, 1], a number for each channel.
    classes: what each label means.  train, test: the files of each part, which may be gzipped.
    read: from the contents of a part, and whether it is the test part: images ``(n, channels, height, width)``, labels.
    folders: its usual places below a root.  sources: tried in order.  package: the one that has a set without files.
    """

    name: str
    shape: tuple[int, int, int]
    white: int
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    classes: tuple[str, ...]
    read: Callable[[Sequence[bytes], bool], tuple[Bytes, Bytes]]
    train: tuple[File, ...] = ()
    test: tuple[File, ...] = ()
    folders: tuple[str, ...] = ()
    sources: tuple[Source, ...] = ()
    package: str = ""

    @property
    def files(self) -> tuple[File, ...]:
        return self.train + self.test

    def box(self, beta: float) -> tuple[Tensor, Tensor]:
        """The attacker's box of the paper's supplement, in the scale of the data: low and high, ``(channels, 1, 1)``.

        The normalised images of the set span an interval over all channels together. beta stretches it about its
        middle; each channel takes it back to its own scale. With one channel it is [-beta, beta].
        """
        mean, deviation = (torch.tensor(numbers, dtype=torch.float64) for numbers in (self.mean, self.deviation))
        ends = torch.stack([(-mean / deviation).min(), ((1 - mean) / deviation).max()])
        ends = ends.mean() + beta * (ends - ends.mean())
        low, high = (2 * (end * deviation + mean) - 1 for end in ends)
        return low.float().view(-1, 1, 1), high.float().view(-1, 1, 1)
