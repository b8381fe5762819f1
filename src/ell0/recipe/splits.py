"""The data of a recipe: the splits of a named set, or the arrays of a file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from .. import data
from ..common import digest
from ..data import LabelledRows


@dataclass(frozen=True)
class DataSource:
    """name: a set of `ell0.data`.  npz: in its place a file with x_train, y_train, x_test and y_test, taken as it is.

    train_rows: train on the first n rows only.  validation: keep the last tenth of the training rows to choose on.
    """

    name: str | None
    npz: Path | None
    train_rows: int | None
    validation: bool

    def same(self, other: DataSource) -> bool:
        """Whether both mean the same data; a file counts by its name, since a recipe is copied into its run folder."""
        one, two = (replace(source, npz=source.npz and Path(source.npz.name)) for source in (self, other))
        return one == two


@dataclass(frozen=True)
class Splits:
    """The data of a run; validation is None if the recipe keeps none apart."""

    train: LabelledRows
    validation: LabelledRows | None
    test: LabelledRows
    classes: int
    digest: str  # of the rows that are measured
    description: data.DataSet | None = None  # of a named set

    def __getitem__(self, name: str) -> LabelledRows:
        rows = self.validation if name == "validation" else self.test
        assert rows is not None
        return rows


def read_splits(source: DataSource, root: Path | str | None) -> Splits:
    """Reads the data of a recipe; raises if it is not here, or not whole."""
    if source.npz is None:
        train, test = (data.load(source.name or "", split, root) for split in ("train+validation", "test"))
    else:
        train, test = (data.read_npz(source.npz, f"x_{split}", f"y_{split}") for split in ("train", "test"))
        if train[0].shape[1:] != test[0].shape[1:]:
            shapes = f"{tuple(train[0].shape)} and {tuple(test[0].shape)}"
            raise ValueError(f"{source.npz} must have rows of one shape in x_train and x_test, got {shapes}")
    x, y = train
    cut = len(x) - (len(x) // 10 if source.validation else 0)
    rows = cut if source.train_rows is None else source.train_rows
    if rows > cut:
        raise ValueError(f"data.train_rows must be at most the {cut} rows there are to train on, got {rows}")
    validation = (x[cut:], y[cut:]) if source.validation else None
    classes = 1 + max(int(y[:rows].max()), int(test[1].max()))
    description = data.SETS.get(source.name or "")
    return Splits((x[:rows], y[:rows]), validation, test, classes, digest(*test, *(validation or ())), description)
