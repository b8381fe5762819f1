"""A reader of 8-bit RGB PNG images without interlacing: all that the CIFAR-10 sheets need."""

import struct
import zlib

import numpy as np

from .dataset import Bytes

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_MOST_PIXELS = 1 << 26  # a forged header must not ask for all of memory


def read_png(data: bytes) -> Bytes:
    """The image ``(height, width, 3)``; anything but 8-bit plain RGB raises ValueError. Checksums are not looked at."""
    if not data.startswith(_SIGNATURE):
        raise ValueError(f"a PNG begins with {_SIGNATURE!r}, got {data[:8]!r}")
    chunks: dict[bytes, bytes] = {}
    at = len(_SIGNATURE)
    while at + 12 <= len(data):
        (length,) = struct.unpack_from(">I", data, at)
        kind = data[at + 4 : at + 8]
        chunks[kind] = chunks.get(kind, b"") + data[at + 8 : at + 8 + length]
        at += 12 + length
    if len(chunks.get(b"IHDR", b"")) != 13 or b"IDAT" not in chunks or b"IEND" not in chunks:
        raise ValueError("a PNG without its header, its pixels or its end")
    width, height, *rest = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    if rest != [8, 2, 0, 0, 0]:
        raise ValueError(f"a PNG must be 8-bit RGB without interlacing, got depth, colour, ... = {rest}")
    if not 0 < width * height <= _MOST_PIXELS:
        raise ValueError(f"a PNG must have 1 to {_MOST_PIXELS} pixels, got {width} x {height}")
    size = height * (1 + 3 * width)
    raw = zlib.decompressobj().decompress(chunks[b"IDAT"], size + 1)
    if len(raw) != size:
        raise ValueError(f"a PNG of {width} x {height} has {size} bytes of rows, got {len(raw)}")
    rows = np.frombuffer(raw, np.uint8).reshape(height, 1 + 3 * width)
    return _unfilter(rows[:, 0], rows[:, 1:]).reshape(height, width, 3)


def _unfilter(filters: Bytes, rows: Bytes) -> Bytes:
    """Undoes the filter of each row; the arithmetic is modulo 256, so uint8 wraps as the format wants."""
    out = np.empty_like(rows)
    above = np.zeros(rows.shape[1], np.uint8)
    for kind, row, line in zip(filters.tolist(), rows, out, strict=True):
        if kind == 0:
            line[:] = row
        elif kind == 1:
            np.cumsum(row.reshape(-1, 3), axis=0, dtype=np.uint8, out=line.reshape(-1, 3))
        elif kind == 2:
            np.add(row, above, out=line)
        elif kind in (3, 4):
            line[:] = _from_left(row, above, paeth=kind == 4)
        else:
            raise ValueError(f"a PNG filter is 0 to 4, got {kind}")
        above = line
    return out


def _from_left(row: Bytes, above: Bytes, paeth: bool) -> list[int]:
    """Filters Average and Paeth, which need the pixel to the left: plain integers are the fast way."""
    out = [0, 0, 0]
    ups = above.tolist()
    for value, b, c in zip(row.tolist(), ups, [0, 0, 0, *ups[:-3]], strict=True):
        a = out[-3]
        guess = (a + b) // 2
        if paeth:
            to_a, to_b, to_c = abs(b - c), abs(a - c), abs(a + b - 2 * c)
            guess = a if to_a <= to_b and to_a <= to_c else b if to_b <= to_c else c
        out.append((value + guess) & 255)
    return out[3:]
