"""Fetch a set: try its sources in order, check every file, put only whole files in place."""

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from ..common import Progress, did_you_mean, silent
from .dataset import DataError, DataSet, File, Source
from .files import Root, checked, find, places, read_file
from .sets import SETS
from .sources import FAILURES

_STALE_SECONDS = 24 * 3600
_log = logging.getLogger("ell0.data")


def get(name: str, root: Root = None, *, progress: Progress = silent, sources: Sequence[Source] | None = None) -> Path:
    """Make sure that ``load(name, ..., root)`` finds the set, and return the folder it lies in.

    Does nothing if the set is whole already. Otherwise its missing files go to ``<root>/<name>``, the root being the
    one given, else ``$ELL0_DATA``, else the user cache. A source that fails is logged in one line, and the next tried.

    Args:
        name: one of ``SETS`` that is not part of a Python package.
        progress: called with the kB that have arrived of a file.
        sources: tried in order; None: those of the set.

    Raises:
        OSError: no source gave the set; the message has each source and why it failed.
    """
    names = tuple(name for name, dataset in SETS.items() if dataset.forms)
    if name not in names:
        known = f"{', '.join(map(repr, names))} (digits come with scikit-learn and need no get)"
        raise ValueError(f"name must be one of {known}, got {name!r}{did_you_mean(name.lower(), names)}")
    dataset = SETS[name]
    ready = _ready(dataset, root)
    if ready is not None:
        return ready
    folder = places(root)[0] / name
    folder.mkdir(parents=True, exist_ok=True)
    _remove_stale(folder)
    missing = [file for file in dataset.forms[0].files if not _whole(folder / file.name, file)]
    reasons: list[str] = []
    for source in dataset.sources if sources is None else sources:
        # The work folder lies beside the files, so that a finished one is only renamed; load does not look into it.
        with tempfile.TemporaryDirectory(prefix=".get-", dir=folder, ignore_cleanup_errors=True) as work:
            why = _take(source, missing, folder, Path(work), progress)
        if why is None:
            return folder
        _log.warning("%s: %s failed: %s", name, source.label, why)
        reasons.append(f"{source.label}: {why}")
    raise OSError(f"{name} could not be fetched ({'; '.join(reasons)}): try again, or put its files in {folder}")


def _take(source: Source, missing: list[File], folder: Path, work: Path, progress: Progress) -> str | None:
    """Puts what the source gives in place and takes it off ``missing``; says why that was not everything, or None."""
    with closing(source.fetch(tuple(missing), work, progress)) as stream:
        while missing:
            # Only an error of the source is caught: a full disk here would be the same for every source.
            try:
                name, content = next(stream)
                file = next((file for file in missing if file.name == name.removesuffix(".gz")), None)
                if file is None:
                    raise DataError(f"{name} was not asked for")
                content = checked(name, content, file)
            except StopIteration:
                return f"it has no {', '.join(file.name for file in missing)}"
            except FAILURES as error:
                return " ".join(str(error).split()) or type(error).__name__
            part = work / f"{file.name}.part"
            part.write_bytes(content)
            os.replace(part, folder / file.name)
            missing.remove(file)
    return None


def _remove_stale(folder: Path) -> None:
    """Removes what killed fetches left, once it is too old to belong to one that still runs."""
    for left in folder.glob(".get-*"):
        if left.stat().st_mtime < time.time() - _STALE_SECONDS:
            shutil.rmtree(left, ignore_errors=True)


def _ready(dataset: DataSet, root: Root) -> Path | None:
    try:
        location = find(dataset, root)
        location.check()
    except (OSError, DataError):
        return None
    return location.folder


def _whole(path: Path, file: File) -> bool:
    try:
        read_file(path, file)
    except (OSError, DataError):
        return False
    return True
