"""The data of a recipe: the splits of a named set, or the arrays of a file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from .. import data
from ..common import digest
from ..data import LabelledRows


@dataclass(frozen=True)
class DataSource:
    """name: a set of `ell0.data`.  file: in its place an npz file with x_train, y_train, x_test and y_test.

    train_rows: train on the first n rows only.  validation: keep the last tenth of the training rows to choose on.
    box: of a file, between what the clean values lie; None: [-1, 1], as those of a set do.
    """

    name: str | None
    file: Path | None
    train_rows: int | None
    validation: bool
    box: tuple[float, float] | None = None

    def same(self, other: DataSource) -> bool:
        """Whether both mean the same data; a file counts by its name, since a recipe is copied into its run folder."""
        one, two = (replace(source, file=source.file and Path(source.file.name)) for source in (self, other))
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
    if source.file is None:
        train, test = (data.load(source.name or "", split, root) for split in ("train+validation", "test"))
    else:
        train, test = (data.read_npz(source.file, split) for split in ("train", "test"))
        if train[0].shape[1:] != test[0].shape[1:]:
            shapes = f"{tuple(train[0].shape)} and {tuple(test[0].shape)}"
            raise ValueError(f"{source.file} must have rows of one shape in x_train and x_test, got {shapes}")
        _check_box(source, float(min(train[0].min(), test[0].min())), float(max(train[0].max(), test[0].max())))
    x, y = train
    cut = len(x) - (len(x) // 10 if source.validation else 0)
    rows = cut if source.train_rows is None else source.train_rows
    if rows > cut:
        raise ValueError(f"data.train_rows must be at most the {cut} rows there are to train on, got {rows}")
    validation = (x[cut:], y[cut:]) if source.validation else None
    classes = 1 + max(int(y[:rows].max()), int(test[1].max()))
    description = data.SETS.get(source.name or "")
    return Splits((x[:rows], y[:rows]), validation, test, classes, digest(*test, *(validation or ())), description)


def _check_box(source: DataSource, least: float, most: float) -> None:
    """Raises ValueError if clean values lie outside of the box or, where none is given, on one side of 0 alone."""
    low, high = source.box or (-1.0, 1.0)
    write = f"write low = {least:.6g} and high = {most:.6g}, or a wider range, below [data]"
    if least < low or most > high:
        where = "low and high" if source.box else "[-1, 1], unless low and high are given"
        raise ValueError(f"{source.file} must have values within {where}, got {least:.6g} to {most:.6g}: {write}")
    if source.box is None and least < most and (least >= 0 or most <= 0):
        raise ValueError(
            f"low and high must be given for values of {least:.6g} to {most:.6g} in {source.file}: {write}"
        )
