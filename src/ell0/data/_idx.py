"""The IDX format of MNIST: two zero bytes, a type byte, the number of dimensions, big-endian sizes, then the values."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

IMAGES = b"\0\0\x08\x03"
LABELS = b"\0\0\x08\x01"


def read_idx(data: bytes) -> npt.NDArray[np.uint8]:
    """An array of unsigned bytes, with the shape that its header gives."""
    if data[:3] != b"\0\0\x08" or len(data) < 4:
        raise ValueError(f"an IDX file of bytes begins with 00 00 08, got {data[:3].hex(' ') or 'nothing'}")
    start = 4 + 4 * data[3]
    if len(data) < start:
        raise ValueError(f"an IDX header of {data[3]} dimensions has {start} bytes, got {len(data)}")
    shape = tuple(int.from_bytes(data[i : i + 4], "big") for i in range(4, start, 4))
    if math.prod(shape) != len(data) - start:
        raise ValueError(f"an IDX file of shape {shape} has {math.prod(shape)} values, got {len(data) - start}")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def read_pair(contents: Sequence[bytes]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Images ``(n, 1, height, width)`` and labels ``(n,)`` from an image file and a label file."""
    images, labels = map(read_idx, contents)
    return images[:, None], labels
