"""The data of a recipe: the splits of a named set, or the arrays of a file."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from .. import data
from ..threat import describe

Pair = tuple[Tensor, Tensor]
"""x ``(n, ...)`` float32 and y ``(n,)`` int64."""

Scale = Literal["symmetric", "unit"]
"""The range of images: [-1, 1], where a number that a truncation removes becomes mid-grey, or [0, 1], where black."""


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

    train: Pair
    validation: Pair | None
    test: Pair

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
            scaled(data.load(source.name, split, root), source.scale) for split in ("train+validation", "test")
        )
    else:
        assert source.npz is not None
        train, test = (arrays(source.npz, f"x_{split}", f"y_{split}") for split in ("train", "test"))
        if train[0].shape[1:] != test[0].shape[1:]:
            shapes = f"{tuple(train[0].shape)} and {tuple(test[0].shape)}"
            raise ValueError(f"{source.npz} must have rows of one shape in x_train and x_test, got {shapes}")
    x, y = train
    cut = len(x) - (len(x) // 10 if source.validation else 0)
    rows = cut if source.train_rows is None else source.train_rows
    if rows > cut:
        raise ValueError(f"data.train_rows must be at most the {cut} rows there are to train on, got {rows}")
    return Splits((x[:rows], y[:rows]), (x[cut:], y[cut:]) if source.validation else None, test)


def scaled(rows: Pair, scale: Scale) -> Pair:
    """Rows of a set of `ell0.data`, which lie in [-1, 1], brought to a scale."""
    x, y = rows
    return (x, y) if scale == "symmetric" else ((x + 1) / 2, y)


def box(scale: Scale, beta: float) -> tuple[float, float]:
    """What a changed number may become, from and to: the range of the data, stretched beta times about its middle.

        [-beta, beta] for [-1, 1]     ([Beliaev22] section 5)     [(1 - beta) / 2, (1 + beta) / 2] for [0, 1]

    The second is the first, scaled like the data, and what the authors' code has: an attacker can do the same to an
    image in either scale. Only what a truncation leaves of a number differs.
    """
    return (-beta, beta) if scale == "symmetric" else ((1 - beta) / 2, (1 + beta) / 2)


def arrays(path: Path | str, x_name: str = "x", y_name: str = "y") -> Pair:
    """Inputs and labels from a NumPy ``.npz`` file: x ``(n, ...)`` floating point, finite, and y ``(n,)`` ints >= 0."""
    try:
        with np.load(path, allow_pickle=False) as file:
            missing = [name for name in (x_name, y_name) if name not in file.files]
            if missing:
                had = ", ".join(file.files) or "none"
                raise KeyError(f"{path} must have the arrays {x_name} and {y_name}, got {had}")
            x, y = file[x_name], file[y_name]
    except KeyError as error:
        raise ValueError(error.args[0]) from None
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{path} is not there: give a .npz file with {x_name} and {y_name}") from error
    except (ValueError, EOFError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} must be a .npz file that NumPy wrote, without pickled objects ({error})") from error
    if x.ndim < 2 or not len(x) or not np.issubdtype(x.dtype, np.floating) or not np.isfinite(x).all():
        raise ValueError(
            f"{path}: {x_name} must be finite floating-point numbers of shape (n, ...), scaled for the model, "
            f"got {x.dtype} of shape {x.shape}"
        )
    if y.shape != (len(x),) or not np.issubdtype(y.dtype, np.integer) or y.min() < 0:
        raise ValueError(f"{path}: {y_name} must be {len(x)} ints >= 0, got {y.dtype} of shape {y.shape}")
    return torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y.astype(np.int64))
