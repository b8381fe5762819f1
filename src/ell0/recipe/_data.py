"""The data of a recipe: the splits of a named set, or the arrays of a file."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from .. import data
from ..data import Rows, Scale
from ..threat import describe


@dataclass(frozen=True)
class Data:
    """Where the data comes from: ``name``, a set of `ell0.data`, or ``npz``, a file with arrays x_train, y_train,
    x_test and y_test.

    scale: what a set is brought to; a file is taken as it is.
    train_rows: the first n of the training rows only.  validation: whether the last tenth is taken off them, to choose
    on; it is measured in training and may be measured after it.
    """

    name: str | None
    npz: Path | None
    scale: Scale
    train_rows: int | None
    validation: bool

    def is_like(self, other: Data) -> bool:
        """Whether both say the same; a file counts by its name, since a recipe is copied into its run folder."""
        mine, its = (replace(data, npz=data.npz and Path(data.npz.name)) for data in (self, other))
        return mine == its


@dataclass(frozen=True)
class Splits:
    """The data of a run; validation is None where the recipe takes none off."""

    train: Rows
    validation: Rows | None
    test: Rows

    @property
    def classes(self) -> int:
        return 1 + max(int(y.max()) for _, y in (self.train, self.test))

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the rows that are measured."""
        digest = hashlib.sha256()
        for tensor in (*self.test, *(self.validation or ())):
            digest.update(describe(tensor).encode() + tensor.numpy().tobytes())
        return digest.hexdigest()


def splits(source: Data, root: Path | str | None) -> Splits:
    """Reads the data of a recipe; raises where it is not here, or not whole."""
    if source.name is not None:
        train, test = (
            data.load(source.name, split, root, scale=source.scale) for split in ("train+validation", "test")
        )
    else:
        assert source.npz is not None
        train, test = (data.read_npz(source.npz, f"x_{split}", f"y_{split}") for split in ("train", "test"))
        if train[0].shape[1:] != test[0].shape[1:]:
            shapes = f"{tuple(train[0].shape)} and {tuple(test[0].shape)}"
            raise ValueError(f"{source.npz} must have rows of one shape in x_train and x_test, got {shapes}")
    x, y = train
    cut = len(x) - (len(x) // 10 if source.validation else 0)
    rows = cut if source.train_rows is None else source.train_rows
    if rows > cut:
        raise ValueError(f"data.train_rows must be at most the {cut} rows there are to train on, got {rows}")
    return Splits((x[:rows], y[:rows]), (x[cut:], y[cut:]) if source.validation else None, test)
