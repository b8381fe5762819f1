"""Fetch a set: try its sources in order, check every file, put only whole files in place."""

import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path

from ._files import DataError, Root, advice, check, find, gunzip, places, read_file, series
from ._sets import SETS, DataSet, File, one_of
from ._sources import FAILURES, SOURCES, Progress, Source

_STALE_SECONDS = 24 * 3600
_log = logging.getLogger("ell0.data")


def get(
    name: str, root: Root = None, *, progress: Progress | None = None, sources: Sequence[Source] | None = None
) -> Path:
    """Make sure that ``load(name, ..., root)`` finds the set, and return the folder it lies in.

    Does nothing if the set is whole already. Otherwise its missing files go to ``<root>/<name>``, the root being the
    one given, else ``$ELL0_DATA``, else the user cache. A source that fails is logged in one line, and the next tried.

    Args:
        name: "mnist", "fashion-mnist" or "cifar10".
        progress: called with (what, bytes done, bytes in all or None); None: a bar if stderr is a terminal.
        sources: instead of the usual ones, tried in order.

    Raises:
        OSError: no source gave the set; the message has each and why.
    """
    one_of("name", name, tuple(SETS), " (digits come with scikit-learn and need no get)")
    dataset = SETS[name]
    ready = _ready(dataset, root)
    if ready is not None:
        return ready
    folder = places(root)[0] / name
    folder.mkdir(parents=True, exist_ok=True)
    _sweep(folder)
    missing = [file for file in dataset.forms[0].files if not _whole(folder / file.name, file)]
    reasons: list[str] = []
    with _bar() if progress is None else nullcontext(progress) as report:
        for source in SOURCES[name] if sources is None else sources:
            # Work lies beside the files, so that a finished one is only renamed; load looks into no such folder.
            with tempfile.TemporaryDirectory(prefix=".get-", dir=folder, ignore_cleanup_errors=True) as work:
                why = _from(source, missing, folder, Path(work), report)
            if why is None:
                return folder
            _log.warning("%s: %s failed: %s", name, source.label, why)
            reasons.append(f"{source.label}: {why}")
    raise OSError(f"{name} could not be fetched ({'; '.join(reasons)}): try again, or put its files in {folder}")


def _from(source: Source, missing: list[File], folder: Path, work: Path, report: Progress) -> str | None:
    """Put what the source gives in place, taking it off ``missing``; why that was not everything, or None."""
    with closing(source.fetch(tuple(missing), work, report)) as stream:
        while missing:
            # Only the source is excused: a full disk or a forbidden folder here is the same for every source.
            try:
                name, content = next(stream)
                file, content = _checked(name, content, missing)
            except StopIteration:
                return f"it has no {series([file.name for file in missing])}"
            except FAILURES as error:
                return " ".join(str(error).split()) or type(error).__name__
            part = work / f"{file.name}.part"
            part.write_bytes(content)
            os.replace(part, folder / file.name)
            missing.remove(file)
    return None


def _checked(name: str, content: bytes, missing: list[File]) -> tuple[File, bytes]:
    """Which file a source has given, and its uncompressed content, found right."""
    file = next((file for file in missing if file.name == name.removesuffix(".gz")), None)
    if file is None:
        raise DataError(f"{name} was not asked for")
    try:
        content = gunzip(content, file.size) if name.endswith(".gz") else content
        check(content, file)
    except DataError as error:
        raise DataError(f"{name} {error}") from None
    return file, content


def _sweep(folder: Path) -> None:
    """Remove what killed fetches left, once it is too old to belong to one that still runs."""
    for left in folder.glob(".get-*"):
        if left.stat().st_mtime < time.time() - _STALE_SECONDS:
            shutil.rmtree(left, ignore_errors=True)


def _ready(dataset: DataSet, root: Root) -> Path | None:
    try:
        found = find(dataset, root)
        for file in found.form.files:
            found.read((file,), advice(dataset, root))
    except (OSError, DataError):
        return None
    return found.folder


def _whole(path: Path, file: File) -> bool:
    try:
        read_file(path, file, "")
    except (OSError, DataError):
        return False
    return True


def _silent(what: str, done: int, total: int | None) -> None:
    pass


@contextmanager
def _bar() -> Iterator[Progress]:
    """A rich progress bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield _silent
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
    except ImportError:
        yield _silent
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        tasks = {}

        def report(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        yield report
