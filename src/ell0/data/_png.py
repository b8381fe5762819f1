"""A reader of 8-bit RGB PNG images without interlacing: all that the CIFAR-10 sheets need."""

import struct
import zlib

import numpy as np
import numpy.typing as npt

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_MOST_PIXELS = 1 << 26  # a forged header must not ask for all of memory


def read_png(data: bytes) -> npt.NDArray[np.uint8]:
    """The image ``(height, width, 3)``. Chunk checksums are checked; anything but 8-bit plain RGB raises."""
    header, stream = _chunks(data)
    width, height, *rest = struct.unpack(">IIBBBBB", header)
    if rest != [8, 2, 0, 0, 0]:
        raise ValueError(f"a PNG must be 8-bit RGB without interlacing, got depth, colour, ... = {rest}")
    if not 0 < width * height <= _MOST_PIXELS:
        raise ValueError(f"a PNG must have 1 to {_MOST_PIXELS} pixels, got {width} x {height}")
    size = height * (1 + 3 * width)
    try:
        raw = zlib.decompressobj().decompress(stream, size + 1)
    except zlib.error as error:
        raise ValueError(f"a PNG with broken compression ({error})") from None
    if len(raw) != size:
        raise ValueError(f"a PNG of {width} x {height} has {size} bytes of rows, got {len(raw)}")
    rows = np.frombuffer(raw, np.uint8).reshape(height, 1 + 3 * width)
    return _unfilter(rows[:, 0], rows[:, 1:]).reshape(height, width, 3)


def _chunks(data: bytes) -> tuple[bytes, bytes]:
    if not data.startswith(_SIGNATURE):
        raise ValueError(f"a PNG begins with {_SIGNATURE!r}, got {data[:8]!r}")
    header, stream, at = b"", [], len(_SIGNATURE)
    while at + 12 <= len(data):
        (length,) = struct.unpack_from(">I", data, at)
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        if data[at + 8 + length : at + 12 + length] != struct.pack(">I", zlib.crc32(kind + body)):
            raise ValueError(f"a PNG whose {kind!r} chunk at byte {at} is short or altered")
        if kind == b"IHDR" and length == 13:
            header = body
        elif kind == b"IDAT":
            stream.append(body)
        elif kind == b"IEND" and header:
            return header, b"".join(stream)
        at += 12 + length
    raise ValueError("a PNG without its header or its end")


def _unfilter(filters: npt.NDArray[np.uint8], rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Undo the filter of each row; the arithmetic is modulo 256, so uint8 wraps as the format wants."""
    out = np.empty_like(rows)
    above = np.zeros(rows.shape[1], np.uint8)
    for kind, row, line in zip(filters.tolist(), rows, out, strict=True):
        if kind == 0:
            line[:] = row
        elif kind == 1:
            np.cumsum(row.reshape(-1, 3), axis=0, dtype=np.uint8, out=line.reshape(-1, 3))
        elif kind == 2:
            np.add(row, above, out=line)
        elif kind == 3:
            line[:] = _average(row, above)
        elif kind == 4:
            line[:] = _paeth(row, above)
        else:
            raise ValueError(f"a PNG filter is 0 to 4, got {kind}")
        above = line
    return out


# The next two depend on the pixel to the left, one by one; plain integers are the fast way, and such rows are few.
def _average(row: npt.NDArray[np.uint8], above: npt.NDArray[np.uint8]) -> list[int]:
    out = [0, 0, 0]
    for value, up in zip(row.tolist(), above.tolist(), strict=True):
        out.append((value + (out[-3] + up) // 2) & 255)
    return out[3:]


def _paeth(row: npt.NDArray[np.uint8], above: npt.NDArray[np.uint8]) -> list[int]:
    out = [0, 0, 0]
    ups = above.tolist()
    for value, b, c in zip(row.tolist(), ups, [0, 0, 0, *ups[:-3]], strict=True):
        a = out[-3]
        to_a, to_b, to_c = abs(b - c), abs(a - c), abs(a + b - 2 * c)
        best = a if to_a <= to_b and to_a <= to_c else b if to_b <= to_c else c
        out.append((value + best) & 255)
    return out[3:]
