"""Where the files of a set lie, and whether they are whole. Every error is one sentence that says what to do."""

import hashlib
import os
import shlex
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..files import FileError, read
from .dataset import DataSet, File
from .sets import SETS

Root = str | os.PathLike[str] | None


def places(root: Root) -> list[Path]:
    """The roots to look in: an explicit one alone, else ``$ELL0_DATA``, then the user cache."""
    if root is not None:
        return [Path(root).expanduser()]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ell0"
    named = os.environ.get("ELL0_DATA")
    return [Path(named).expanduser(), cache] if named else [cache]


def find(dataset: DataSet, root: Root) -> Path:
    """The first folder with all files of the set; FileNotFoundError names what is missing from the fullest one."""
    where, lost = " or ".join(map(str, places(root))), [file.name for file in dataset.files]
    # MNIST and Fashion-MNIST share file names, so a folder named for the set comes before the bare root.
    names = [dataset.name, *(f"{dataset.name}/{folder}" for folder in dataset.folders), *dataset.folders, ""]
    for folder in (place / name for place in places(root) for name in names):
        missing = [file.name for file in dataset.files if not _stored(folder, file).is_file()]
        if not missing:
            return folder
        if len(missing) < len(lost):
            where, lost = str(folder), missing
    count, verb = len(dataset.files), "is" if len(lost) == 1 else "are"
    raise FileNotFoundError(
        f"{where} has {count - len(lost)} of {count} {dataset.name} files, {', '.join(lost)} {verb} missing: "
        f"{_advice(dataset, root)}"
    )


def read_files(dataset: DataSet, files: Sequence[File], root: Root) -> Iterator[bytes]:
    """The uncompressed contents of some files of a set; raises FileError for one that is not the published one."""
    folder = find(dataset, root)
    for file in files:
        try:
            yield read_file(folder, file)
        except FileError as error:
            raise FileError(f"{folder / str(error)}: {_advice(dataset, root)}") from None


def read_file(folder: Path, file: File) -> bytes:
    path = _stored(folder, file)
    return checked(path.name, read(path.resolve()), file)


def checked(name: str, raw: bytes, file: File) -> bytes:
    """The content, uncompressed if the name ends in ``.gz``; raises FileError unless it is the published one."""
    try:
        # A broken or hostile file inflates to one byte too many at most.
        content = zlib.decompressobj(wbits=31).decompress(raw, file.size + 1) if name.endswith(".gz") else raw
    except zlib.error as error:
        raise FileError(f"{name} is not a whole gzip file ({error})") from None
    if len(content) != file.size:
        word = "short" if len(content) < file.size else "too long"
        raise FileError(f"{name} is {word}, it has {len(content):,} bytes instead of {file.size:,}")
    if (got := hashlib.sha256(content).hexdigest()) != file.sha256:
        known = {f.sha256: f" (it is {f.name} of {one.name})" for one in SETS.values() for f in one.files}
        want = f"{got[:12]} instead of {file.sha256[:12]}{known.get(got, '')}"
        raise FileError(f"{name} is altered, its SHA-256 begins with {want}")
    return content


def _stored(folder: Path, file: File) -> Path:
    plain, gz = folder / file.name, folder / f"{file.name}.gz"
    return gz if gz.is_file() and not plain.is_file() else plain


def _advice(dataset: DataSet, root: Root) -> str:
    if root is None:
        return f"run `ell0 data get {dataset.name}`, or set ELL0_DATA to a folder that has the whole set"
    return f"run `ell0 data get {dataset.name} --root {shlex.quote(os.fspath(root))}`, or pass another root"
