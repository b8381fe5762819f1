"""Readers of file formats, for contents that were checked by hash: IDX, and the batches of CIFAR-10."""

import io
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

from .dataset import Bytes

IDX_IMAGES = b"\0\0\x08\x03"
IDX_LABELS = b"\0\0\x08\x01"
_PIXELS = 3 * 32 * 32


def read_idx(data: bytes) -> Bytes:
    """An array of bytes. Format: two zero bytes, type 8, the number of dimensions, big-endian sizes, the values."""
    start = 4 + 4 * data[3]
    shape = tuple(int.from_bytes(data[i : i + 4], "big") for i in range(4, start, 4))
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def read_idx_pair(contents: Sequence[bytes]) -> tuple[Bytes, Bytes]:
    """Images ``(n, 1, height, width)`` and labels ``(n,)`` from an image file and a label file."""
    images, labels = map(read_idx, contents)
    return images[:, None], labels


def read_cifar_binary(contents: Sequence[bytes]) -> tuple[Bytes, Bytes]:
    """Images ``(n, 3, 32, 32)`` and labels ``(n,)``; a row is a label byte, then 1024 R, 1024 G, 1024 B."""
    rows = np.concatenate([np.frombuffer(data, np.uint8).reshape(-1, 1 + _PIXELS) for data in contents])
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0]


def read_cifar_python(contents: Sequence[bytes]) -> tuple[Bytes, Bytes]:
    """Images ``(n, 3, 32, 32)`` and labels ``(n,)`` from pickled dictionaries with ``data`` and ``labels``."""
    batches = [_python_batch(data) for data in contents]
    return np.concatenate([x for x, _ in batches]).reshape(-1, 3, 32, 32), np.concatenate([y for _, y in batches])


def _python_batch(data: bytes) -> tuple[Bytes, Bytes]:
    try:
        tree: Any = _InertUnpickler(io.BytesIO(data), encoding="bytes").load()
    except Exception as error:  # a damaged pickle may raise anything
        raise ValueError(f"not the pickle of a CIFAR-10 batch ({error})") from None
    match tree:
        case {
            b"labels": list(labels),
            b"data": _Inert(state=(1, (int(n), int(width)), _Inert(args=(b"u1", *_)), False, bytes(pixels))),
        } if len(labels) == n and width == _PIXELS and len(pixels) == n * width:
            return np.frombuffer(pixels, np.uint8).reshape(n, width), np.array(labels, np.uint8)
    raise ValueError(f"a CIFAR-10 batch is a dictionary with n labels and an (n, {_PIXELS}) array of bytes")


class _Inert:
    """Stands for an object that a pickle asks for: keeps its arguments and state, and does nothing."""

    def __init__(self, *args: object) -> None:
        self.args = args
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _InertUnpickler(pickle.Unpickler):
    """Reads plain data and numpy arrays, the latter as `_Inert`. Imports nothing and refuses every other name."""

    def find_class(self, module: str, name: str) -> type[_Inert]:
        if f"{module} {name}" in ("numpy.core.multiarray _reconstruct", "numpy ndarray", "numpy dtype"):
            return _Inert
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which ell0 never imports")
