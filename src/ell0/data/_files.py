"""Where the files of a set lie, and whether they are whole. Every complaint is one sentence with a way out."""

import hashlib
import os
import shlex
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ._sets import SETS, DataSet, File, Form

Root = str | os.PathLike[str] | None
_COUNTS = ("none", "one", "two", "three", "four", "five", "six")


class DataError(ValueError):
    """A file of a data set is short, altered, or not what its name says."""


@dataclass(frozen=True)
class Found:
    """A folder that has every file of one form of a set; ``paths`` in the order of ``form.files``."""

    form: Form
    folder: Path
    paths: tuple[Path, ...]

    def read(self, files: tuple[File, ...], advice: str) -> list[bytes]:
        """The checked, uncompressed contents of some of the form's files."""
        where = dict(zip(self.form.files, self.paths, strict=True))
        return [read_file(where[file], file, advice) for file in files]


def places(root: Root) -> list[Path]:
    """The roots to look in: an explicit one alone, else ``$ELL0_DATA``, then the user cache."""
    if root is not None:
        return [Path(root).expanduser()]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ell0"
    named = os.environ.get("ELL0_DATA")
    return [Path(named).expanduser(), cache] if named else [cache]


def advice(dataset: DataSet, root: Root) -> str:
    """What to do about a missing or broken file."""
    if root is not None:
        return f"run `ell0 data get {dataset.name} --root {shlex.quote(os.fspath(root))}`, or pass another root"
    return f"run `ell0 data get {dataset.name}`, or set ELL0_DATA to a folder that has the whole set"


def find(dataset: DataSet, root: Root) -> Found:
    """The first folder with all files of the set; FileNotFoundError names what is missing from the fullest one."""
    fullest: tuple[int, Path, list[str]] | None = None
    for folder in (folder for place in places(root) for folder in _folders(dataset, place)):
        for form in dataset.forms:
            paths = [_path(folder, file, form.gz) for file in form.files]
            whole = tuple(path for path in paths if path is not None)
            if len(whole) == len(paths):
                return Found(form, folder, whole)
            if len(whole) > (fullest[0] if fullest else 0):
                lost = [file.name for file, path in zip(form.files, paths, strict=True) if path is None]
                fullest = len(whole), folder, lost
    if fullest:
        count, folder, lost = fullest
        raise FileNotFoundError(
            f"{folder} has {_COUNTS[count]} of {_COUNTS[count + len(lost)]} {dataset.name} {dataset.noun}, "
            f"{series(lost)} {'is' if len(lost) == 1 else 'are'} missing: {advice(dataset, root)}"
        )
    looked = " or ".join(str(place) if place.is_dir() else f"{place} (no such folder)" for place in places(root))
    first = dataset.forms[0].files[0].name
    raise FileNotFoundError(
        f"{first} and the other {dataset.name} {dataset.noun} are not in {looked}: {advice(dataset, root)}"
    )


def series(words: Sequence[str]) -> str:
    """One, "one and two", "one, two and three"."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _folders(dataset: DataSet, place: Path) -> Iterator[Path]:
    # MNIST and Fashion-MNIST share file names, so a folder named for the set comes before the bare root.
    yield place / dataset.name
    yield from (place / dataset.name / folder for folder in dataset.folders)
    yield from (place / folder for folder in dataset.folders)
    yield place


def _path(folder: Path, file: File, gz: bool) -> Path | None:
    candidates = (folder / file.name, folder / f"{file.name}.gz")[: 1 + gz]
    return next((path for path in candidates if path.is_file()), None)


def read_file(path: Path, file: File, advice: str) -> bytes:
    """The checked, uncompressed content of a file."""
    try:
        raw = path.read_bytes()
        content = gunzip(raw, file.size) if path.suffix == ".gz" else raw
        check(content, file)
    except DataError as error:
        raise DataError(f"{path} {error}: {advice}") from None
    return content


def gunzip(raw: bytes, size: int) -> bytes:
    """The content of a gz file, which must have ``size`` bytes; it is never inflated much beyond them."""
    stream = zlib.decompressobj(wbits=31)
    try:
        content = stream.decompress(raw, size + 1)
    except zlib.error as error:
        raise DataError(f"is not a whole gzip file ({error})") from None
    if not stream.eof and len(content) <= size:
        raise DataError(f"is short, its gzip stream stops after {len(content):,} of {size:,} bytes")
    return content


def check(content: bytes, file: File) -> None:
    """DataError, worded to follow the name of the file, unless the content is exactly the published one."""
    if not content.startswith(file.magic[: len(content)]):
        got, want = content[: len(file.magic)].hex(" "), file.magic.hex(" ")
        raise DataError(f"is not what its name says, it begins with {got} instead of {want}")
    if len(content) != file.size:
        word = "short" if len(content) < file.size else "too long"
        raise DataError(f"is {word}, it has {len(content):,} bytes instead of {file.size:,}")
    algorithm, _, want = file.digest.partition(":")
    got = hashlib.new(algorithm, content, usedforsecurity=False).hexdigest()
    if got != want:
        known = {f.digest: f"{f.name} of {s.name}" for s in SETS.values() for form in s.forms for f in form.files}
        other = known.get(f"{algorithm}:{got}")
        is_other = f" (it is {other})" if other else ""
        raise DataError(f"is altered, its {algorithm} begins with {got[:12]} instead of {want[:12]}{is_other}")
