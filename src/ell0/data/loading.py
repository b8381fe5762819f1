"""Data sets and NumPy files as tensors."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..common import did_you_mean
from ..files import FileError
from ..files import read_npz as read_arrays
from .files import Root, find, read_files
from .sets import SETS

LabelledRows = tuple[Tensor, Tensor]
"""x ``(n, ...)`` float32 and y ``(n,)`` int64."""

SPLITS: tuple[str, ...] = ("train", "validation", "test", "train+validation")


def load(name: str, split: str, root: Root = None) -> LabelledRows:
    """Images and labels of one split, after their files have been checked by hash.

    x is float32 ``(n, channels, height, width)`` in [-1, 1], y is int64 ``(n,)``. "validation" is the last tenth of the
    published training part and "train" the rest; "train+validation" is the whole part. The last 360 digits are "test".

    Args:
        name: one of `SETS`.  split: one of `SPLITS`.
        root: the only folder to look in; None looks in ``$ELL0_DATA``, then in the user cache. The files may lie in
            the root, in a folder named for the set, or as torchvision lays them out.

    Raises:
        FileNotFoundError: a file is missing.  FileError: a file is short or altered.
    """
    for argument, value, allowed in (("name", name, tuple(SETS)), ("split", split, SPLITS)):
        if value not in allowed:
            hint = did_you_mean(value.lower(), allowed)
            raise ValueError(f"{argument} must be one of {', '.join(map(repr, allowed))}, got {value!r}{hint}")
    dataset, test = SETS[name], split == "test"
    images, labels = dataset.read([*read_files(dataset, dataset.test if test else dataset.train, root)], test)
    cut = len(labels) - len(labels) // 10
    rows = {"train": slice(cut), "validation": slice(cut, None)}.get(split, slice(None))
    x = images[rows].astype(np.float32)
    x /= dataset.white / 2
    x -= 1.0
    return torch.from_numpy(x), torch.from_numpy(labels[rows].astype(np.int64))


def read_npz(path: Path | str, split: str = "test") -> LabelledRows:
    """Inputs and labels from a NumPy ``.npz`` file: x ``(n, ...)`` floating point, finite, and y ``(n,)`` ints >= 0.

    Their names are ``x_test`` and ``y_test``, or those of another split; for "test" also ``x`` and ``y``.
    """
    pairs = [(f"x_{split}", f"y_{split}"), *([("x", "y")] if split == "test" else [])]
    words = ", or ".join(" and ".join(pair) for pair in pairs)
    try:
        arrays, names = read_arrays(Path(path), [name for pair in pairs for name in pair])
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{path} does not exist: give a .npz file with {words}") from error
    x_name, y_name = next((pair for pair in pairs if arrays.keys() >= set(pair)), ("", ""))
    if not x_name:
        raise ValueError(f"{path} must have the arrays {words}, got {', '.join(names) or 'none'}")
    x, y = arrays[x_name], arrays[y_name]
    if x.ndim < 2 or not len(x) or not np.issubdtype(x.dtype, np.floating) or not np.isfinite(x).all():
        raise ValueError(
            f"{path}: {x_name} must be finite floating-point numbers of shape (n, ...), scaled for the model, "
            f"got {x.dtype} of shape {x.shape}"
        )
    if y.shape != (len(x),) or not np.issubdtype(y.dtype, np.integer) or y.min() < 0:
        raise ValueError(f"{path}: {y_name} must be {len(x)} ints >= 0, got {y.dtype} of shape {y.shape}")
    return torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y.astype(np.int64))


@dataclass(frozen=True)
class Status:
    """Where a set was found (None: nowhere), and what is wrong with it (None: ready to load)."""

    name: str
    where: str | None
    problem: str | None


def status(root: Root = None) -> list[Status]:
    """Every set, where `load` would read it, with all its files checked."""
    found = []
    for dataset in SETS.values():
        where = problem = None
        try:
            if dataset.package:
                dataset.read([], False)
            where = dataset.package or str(find(dataset, root))
            for _ in read_files(dataset, dataset.files, root):
                pass
        except (OSError, FileError, ImportError) as error:
            problem = str(error)
        found.append(Status(dataset.name, where, problem))
    return found
