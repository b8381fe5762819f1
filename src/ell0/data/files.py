"""Where the files of a set lie, and whether they are whole. Every error is one sentence that says what to do."""

import hashlib
import os
import shlex
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .dataset import Bytes, DataError, DataSet, File, Form
from .sets import SETS

Root = str | os.PathLike[str] | None


@dataclass(frozen=True)
class Location:
    """A folder that has every file of one form of a set. paths: of ``form.files``.  advice: about a broken file."""

    form: Form
    folder: Path
    paths: tuple[Path, ...]
    advice: str

    def read(self, files: Sequence[File]) -> list[bytes]:
        """The checked, uncompressed contents of some of the form's files."""
        where = dict(zip(self.form.files, self.paths, strict=True))
        return [read_file(where[file], file, self.advice) for file in files]

    def check(self) -> None:
        """Raises DataError if a file is not the published one."""
        for file in self.form.files:
            self.read([file])


def read_part(dataset: DataSet, test: bool, root: Root) -> tuple[Bytes, Bytes]:
    """Images and labels of the test or the training part."""
    location = find(dataset, root)
    form = location.form
    return form.read(location.read(form.test if test else form.train))


def places(root: Root) -> list[Path]:
    """The roots to look in: an explicit one alone, else ``$ELL0_DATA``, then the user cache."""
    if root is not None:
        return [Path(root).expanduser()]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ell0"
    named = os.environ.get("ELL0_DATA")
    return [Path(named).expanduser(), cache] if named else [cache]


def find(dataset: DataSet, root: Root) -> Location:
    """The first folder with all files of the set; FileNotFoundError names what is missing from the fullest one."""
    if root is not None:
        advice = f"run `ell0 data get {dataset.name} --root {shlex.quote(os.fspath(root))}`, or pass another root"
    else:
        advice = f"run `ell0 data get {dataset.name}`, or set ELL0_DATA to a folder that has the whole set"
    fullest: tuple[int, Path, list[str]] | None = None
    for folder in (folder for place in places(root) for folder in _folders(dataset, place)):
        for form in dataset.forms:
            paths = [_path(folder, file, form.gz) for file in form.files]
            whole = tuple(path for path in paths if path is not None)
            if len(whole) == len(paths):
                return Location(form, folder, whole, advice)
            if len(whole) > (fullest[0] if fullest else 0):
                lost = [file.name for file, path in zip(form.files, paths, strict=True) if path is None]
                fullest = len(whole), folder, lost
    if fullest:
        count, folder, lost = fullest
        raise FileNotFoundError(
            f"{folder} has {count} of {count + len(lost)} {dataset.name} {dataset.noun}, "
            f"{', '.join(lost)} {'is' if len(lost) == 1 else 'are'} missing: {advice}"
        )
    looked = " or ".join(str(place) if place.is_dir() else f"{place} (no such folder)" for place in places(root))
    first = dataset.forms[0].files[0].name
    raise FileNotFoundError(f"{first} and the other {dataset.name} {dataset.noun} are not in {looked}: {advice}")


def _folders(dataset: DataSet, place: Path) -> Iterator[Path]:
    # MNIST and Fashion-MNIST share file names, so a folder named for the set comes before the bare root.
    yield place / dataset.name
    yield from (place / dataset.name / folder for folder in dataset.folders)
    yield from (place / folder for folder in dataset.folders)
    yield place


def _path(folder: Path, file: File, gz: bool) -> Path | None:
    candidates = (folder / file.name, folder / f"{file.name}.gz")[: 1 + gz]
    return next((path for path in candidates if path.is_file()), None)


def read_file(path: Path, file: File, advice: str = "") -> bytes:
    """The checked, uncompressed content of a file."""
    try:
        return checked(path.name, path.read_bytes(), file)
    except DataError as error:
        raise DataError(f"{path.parent / str(error)}: {advice}") from None


def checked(name: str, raw: bytes, file: File) -> bytes:
    """The content, uncompressed if the name ends in ``.gz``; raises DataError unless it is the published one."""
    content = _gunzip(name, raw, file.size) if name.endswith(".gz") else raw
    if not content.startswith(file.magic[: len(content)]):
        got, want = content[: len(file.magic)].hex(" "), file.magic.hex(" ")
        raise DataError(f"{name} is not what its name says, it begins with {got} instead of {want}")
    if len(content) != file.size:
        word = "short" if len(content) < file.size else "too long"
        raise DataError(f"{name} is {word}, it has {len(content):,} bytes instead of {file.size:,}")
    algorithm, _, want = file.digest.partition(":")
    got = hashlib.new(algorithm, content, usedforsecurity=False).hexdigest()
    if got != want:
        known = {f.digest: f"{f.name} of {s.name}" for s in SETS.values() for form in s.forms for f in form.files}
        other = known.get(f"{algorithm}:{got}")
        is_other = f" (it is {other})" if other else ""
        raise DataError(f"{name} is altered, its {algorithm} begins with {got[:12]} instead of {want[:12]}{is_other}")
    return content


def _gunzip(name: str, raw: bytes, size: int) -> bytes:
    """The content of a gz file that should have ``size`` bytes; inflates at most one byte more."""
    stream = zlib.decompressobj(wbits=31)
    try:
        content = stream.decompress(raw, size + 1)
    except zlib.error as error:
        raise DataError(f"{name} is not a whole gzip file ({error})") from None
    if not stream.eof and len(content) <= size:
        raise DataError(f"{name} is short, its gzip stream stops after {len(content):,} of {size:,} bytes")
    return content
