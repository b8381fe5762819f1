"""A reader of 8-bit RGB PNG images without interlacing: all that the CIFAR-10 sheets need."""

import struct
import zlib

import numpy as np

from .dataset import Bytes


def read_png(data: bytes, height: int, width: int) -> Bytes:
    """The image ``(height, width, 3)``; raises ValueError or zlib.error for any other. Checksums are not looked at."""
    header, packed, at = b"", list[bytes](), 8
    while at < len(data):
        length, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        body = data[at + 8 : at + 8 + length]
        header = body if kind == b"IHDR" else header
        packed += [body] if kind == b"IDAT" else []
        at += 12 + length
    if header != struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0):
        raise ValueError(
            f"a sheet must be a PNG of {height} x {width} 8-bit RGB pixels, its header is {header.hex(' ')}"
        )
    size = height * (1 + 3 * width)
    raw = zlib.decompressobj().decompress(b"".join(packed), size + 1)
    if len(raw) != size:
        raise ValueError(f"a PNG of {height} x {width} pixels has {size} bytes of rows, got {len(raw)}")
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
        else:
            line[:] = _from_left(row, above, paeth=kind == 4)
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
