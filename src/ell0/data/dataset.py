"""What a data set is made of."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..common import Progress

Bytes = npt.NDArray[np.uint8]
Items = Generator[tuple[str, bytes], None, None]


class DataError(ValueError):
    """A file of a data set is short, altered, or not what its name says."""


@dataclass(frozen=True)
class File:
    """One file. size, digest (``"algorithm:hex"``): of its uncompressed content."""

    name: str
    size: int
    digest: str


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
    classes: what each label means.  train, test: the files of each part, which may be gzipped.
    read: from the contents of a part, and whether it is the test part: images ``(n, channels, height, width)``, labels.
    folders: its usual places below a root.  sources: tried in order.  package: the one that has a set without files.
    """

    name: str
    shape: tuple[int, int, int]
    white: int
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
