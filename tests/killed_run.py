"""Runs a recipe in processes that die at a file operation, then again to the end.

python killed_run.py RECIPE FOLDER KILLS     so many runs, in FOLDER/NUMBER of the operation; FOLDER/whole is not killed
"""

from __future__ import annotations

import io
import math
import os
import signal
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from ell0 import recipe
from ell0.attacks import sparse_rs
from ell0.train import checkpoint

OPERATIONS = ("open", "fsync", "replace", "unlink", "mkdir", "write")
_write = os.write


def dying(operation: Callable[..., Any], dies: Callable[[], bool]) -> Callable[..., Any]:
    """The operation, in the middle of which the process dies when it is time."""

    def call(*given: Any, **more: Any) -> Any:
        if dies():
            if operation is _write:
                _write(given[0], given[1][: len(given[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return operation(*given, **more)

    return call


class RawFile(io.RawIOBase):
    """A file whose writes are operations, as io's own are not seen."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        return os.write(self._handle, bytes(content))

    def close(self) -> None:
        if not self.closed:
            os.close(self._handle)
        super().close()


def run(path: str, out: Path, last: float = math.inf) -> int:
    """Forks a run that dies at its last operation; returns its exit status, or how many operations there were."""
    process = os.fork()
    if not process:
        numbers = count(1)
        for name in OPERATIONS:
            setattr(os, name, dying(getattr(os, name), lambda: next(numbers) > last))
        fdopen = os.fdopen
        os.fdopen = lambda handle, mode: RawFile(handle) if mode == "wb" else fdopen(handle, mode)  # type: ignore[assignment]
        recipe.run(path, out=out, device="cpu")
        (out.parent / "operations").write_text(str(next(numbers) - 1))
        os._exit(0)
    return os.waitpid(process, 0)[1]


def main(path: str, folder: str, kills: str) -> None:
    torch.set_num_threads(1)
    checkpoint._SHARE = math.inf
    few = mock.patch("ell0.recipe.gallery.sparse_rs", lambda *given, **more: sparse_rs(*given, **more | {"queries": 2}))
    few.start()
    recipe.run(path, out=Path(folder) / "first", device="cpu")  # imports once what all children need
    assert run(path, Path(folder) / "whole") == 0
    operations = int((Path(folder) / "operations").read_text())
    for last in sorted({i * operations // int(kills) for i in range(int(kills))}):
        out = Path(folder) / str(last)
        assert run(path, out, last) == signal.SIGKILL, last
        assert run(path, out) == 0, last
    print(operations)


if __name__ == "__main__":
    main(*sys.argv[1:])
