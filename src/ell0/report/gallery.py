"""Images of a gallery: pixels as PNG inside the page, changed ones outlined."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .run_files import Floats, Gallery


@dataclass(frozen=True)
class Picture:
    """One image.  verdict: ``"clean"``, ``"held"`` or ``"fooled"``.  changed: column and row of each changed pixel."""

    title: str
    says: str
    verdict: str
    note: str
    uri: str
    width: int
    height: int
    changed: tuple[tuple[int, int], ...]

    @property
    def gap(self) -> float:
        """From a changed pixel to its outline, so that it is still to be seen where pixels are small."""
        return round(0.015 * self.width, 2)


@dataclass(frozen=True)
class Exhibit:
    """A clean image, and beside it what each classifier was shown."""

    label: str
    pictures: tuple[Picture, ...]


def exhibits(gallery: Gallery, classes: Sequence[str] = ()) -> Iterator[Exhibit]:
    """classes: what the labels mean; without it they stand as they are."""

    def word(label: int) -> str:
        return classes[label] if label < len(classes) else str(label)

    for i, (clean, label) in enumerate(zip(gallery.clean, gallery.labels.tolist(), strict=True)):
        pictures = [_picture("Clean", clean, clean, f"is {word(label)}", "clean")]
        for name, attacked in gallery.attacked.items():
            says, wrong = int(attacked.says[i]), int(attacked.said[i]) != label
            verdict = "held" if says == label else "fooled"
            note = "wrong when clean" if wrong else ""
            pictures.append(_picture(name, clean, attacked.adv[i], f"says {word(says)}", verdict, note))
        yield Exhibit(word(label), tuple(pictures))


def _picture(title: str, clean: Floats, image: Floats, says: str, verdict: str, note: str = "") -> Picture:
    rows, columns = (clean != image).any(axis=0).nonzero()
    changed = tuple(zip(columns.tolist(), rows.tolist(), strict=True))
    height, width = image.shape[1:]
    count = "" if verdict == "clean" else note or f"{len(changed)} changed"
    return Picture(title, says, verdict, count, _uri(image), width, height, changed)


def _uri(image: Floats) -> str:
    """``(channels, height, width)`` in [-1, 1]; what lies outside is drawn as black or white."""
    levels = np.rint((np.clip(image, -1.0, 1.0) + 1.0) * 127.5).astype(np.uint8)
    colours = np.broadcast_to(levels, (3, *levels.shape[1:])).transpose(1, 2, 0)
    return "data:image/png;base64," + base64.b64encode(png(colours)).decode()


def png(image: npt.NDArray[np.uint8]) -> bytes:
    """``(height, width, 3)`` as an 8-bit RGB file."""
    height, width, _ = image.shape
    rows = b"".join(b"\0" + row.tobytes() for row in image)  # each row begins with its filter: none
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )
