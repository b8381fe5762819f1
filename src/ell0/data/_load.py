"""Data sets as tensors."""

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ._files import DataError, Root, advice, find
from ._sets import NAMES, SETS, SPLITS, Bytes, one_of

_DIGITS_TEST = 360
_DIGITS_SHA256 = "87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826"


def load(name: str, split: str, root: Root = None) -> tuple[Tensor, Tensor]:
    """Images and labels of one split, after their files have been checked by hash.

    x is float32 ``(n, channels, height, width)`` in [-1, 1], y is int64 ``(n,)``. "validation" is the last tenth of
    the published training part and "train" the rest, so a choice made on one never saw the other;
    "train+validation" is the whole part. Of the digits, the last 360 images are "test".

    Args:
        name: "digits", "mnist", "fashion-mnist" or "cifar10".  split: "train", "validation", "test" or
            "train+validation".
        root: the only folder to look in; None looks in ``$ELL0_DATA``, then in the user cache. The files may lie in
            the root, in a folder named for the set, or as torchvision lays them out.

    Raises:
        FileNotFoundError: a file is missing.  DataError: a file is short or altered.
    """
    one_of("name", name, NAMES)
    one_of("split", split, SPLITS)
    images, labels = _digits(split == "test") if name == "digits" else _from_files(name, split == "test", root)
    cut = len(labels) - len(labels) // 10
    rows = {"train": slice(cut), "validation": slice(cut, None)}.get(split, slice(None))
    x = images[rows].astype(np.float32)
    x /= 8.0 if name == "digits" else 127.5
    x -= 1.0
    return torch.from_numpy(x), torch.from_numpy(labels[rows].astype(np.int64))


def _from_files(name: str, test: bool, root: Root) -> tuple[Bytes, Bytes]:
    found = find(SETS[name], root)
    files = found.form.test if test else found.form.train
    return found.form.read(found.read(files, advice(SETS[name], root)))


def _digits(test: bool) -> tuple[Bytes, Bytes]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ModuleNotFoundError("digits are inside scikit-learn: run `pip install scikit-learn`") from error
    pixels, labels = load_digits(return_X_y=True)
    images, labels = pixels.astype(np.uint8).reshape(-1, 1, 8, 8), labels.astype(np.uint8)
    if hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest() != _DIGITS_SHA256:
        raise DataError("the digits inside scikit-learn are not the 1,797 known ones: reinstall scikit-learn")
    part = slice(-_DIGITS_TEST, None) if test else slice(-_DIGITS_TEST)
    return images[part], labels[part]


@dataclass(frozen=True)
class Status:
    """Where a set was found (None: nowhere), and what is wrong with it (None: ready to load)."""

    name: str
    where: str | None
    problem: str | None


def status(root: Root = None) -> list[Status]:
    """Every set, where ``load`` would read it, all its files checked."""
    return [_status(name, root) for name in NAMES]


def _status(name: str, root: Root) -> Status:
    where = None
    try:
        if name == "digits":
            _digits(test=False)
            return Status(name, "scikit-learn", None)
        found = find(SETS[name], root)
        where = str(found.folder)
        for file in found.form.files:
            found.read((file,), advice(SETS[name], root))
    except (OSError, DataError, ImportError) as error:
        return Status(name, where, str(error))
    return Status(name, where, None)
