"""Fetch a set: try its sources in order, check every file, put only whole files in place."""

import logging
import tempfile
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path

from ..common import Progress, did_you_mean, silent
from ..files import FileError, sweep, write
from .dataset import File, Items, Source
from .files import Root, checked, find, places, read_file, read_files
from .sets import SETS
from .sources import FAILURES

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
    names = [name for name, dataset in SETS.items() if dataset.files]
    if name not in names:
        known = f"{', '.join(map(repr, names))} (digits come with scikit-learn and need no get)"
        raise ValueError(f"name must be one of {known}, got {name!r}{did_you_mean(name.lower(), names)}")
    dataset = SETS[name]
    with suppress(OSError, FileError):
        for _ in read_files(dataset, dataset.files, root):
            pass
        return find(dataset, root)
    folder = places(root)[0] / name
    folder.mkdir(parents=True, exist_ok=True)
    sweep(folder)
    missing = [file for file in dataset.files if not _is_whole(folder, file)]
    reasons: list[str] = []
    for source in dataset.sources if sources is None else sources:
        with (
            tempfile.TemporaryDirectory(prefix="ell0-", ignore_cleanup_errors=True) as work,
            closing(source.fetch(source.address, tuple(missing), Path(work), progress)) as items,
        ):
            why = _take(items, missing, folder)
        if why is None:
            return folder
        _log.warning("%s: %s failed: %s", name, source.address, why)
        reasons.append(f"{source.address}: {why}")
    raise OSError(f"{name} could not be fetched ({'; '.join(reasons)}): try again, or put its files in {folder}")


def _take(items: Items, missing: list[File], folder: Path) -> str | None:
    """Puts what a source gives in place and takes it off ``missing``; says why that was not everything, or None."""
    while missing:
        # Only an error of the source is caught: a full disk here would be the same for every source.
        try:
            name, content = next(items)
            file = next((file for file in missing if file.name == name.removesuffix(".gz")), None)
            if file is None:
                continue
            content = checked(name, content, file)
        except StopIteration:
            return f"it has no {', '.join(file.name for file in missing)}"
        except FAILURES as error:
            said = "".join(c if c.isprintable() else " " for c in str(error))  # it may quote a server
            return " ".join(said.split()) or type(error).__name__
        write(folder / file.name, content)
        missing.remove(file)
    return None


def _is_whole(folder: Path, file: File) -> bool:
    try:
        read_file(folder, file)
    except (OSError, FileError):
        return False
    return True
