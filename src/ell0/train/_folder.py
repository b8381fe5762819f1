"""The folder of a training: checkpoint, log and X', from which a killed one goes on."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..common import write_whole
from ..evaluation._state import fingerprint
from ..threat import L0Ball
from . import _append, _checkpoint
from ._append import Attack, Found
from ._checkpoint import Checkpoint, load_checkpoint
from ._config import TrainConfig
from ._record import Epoch

LOG = "log.jsonl"

_SHARE = 0.05  # of the time, at most, goes into checkpoints that no attack and no end asks for


class Folder:
    """What a training keeps on disk; without a path nothing.

    parts: what makes a training the same, by part.
    """

    def __init__(self, path: Path | str | None, parts: Mapping[str, str], card: Mapping[str, Any]) -> None:
        self._path = None if path is None else _checked(Path(path))
        self._parts, self._card = dict(parts), dict(card)
        self._due = 0.0  # when the next checkpoint may be written

    def load(self) -> Checkpoint | None:
        """The last checkpoint, if there is one; raises if it is of another training, and says in what."""
        if self._path is None:
            return None
        path = self._path / _checkpoint.NAME
        if not path.exists():
            # X' of a training whose weights are gone.
            (self._path / _append.NAME).unlink(missing_ok=True)
            self._sweep()
            return None
        checkpoint = load_checkpoint(path)
        saved = checkpoint.about.get("parts")
        if saved is None:
            raise ValueError(f"out must be a folder of fit or an empty one, but {path} was written by something else")
        # A training from before a field of the config existed was one with what is now its default.
        saved = {f"config.{field.name}": repr(field.default) for field in fields(TrainConfig)} | saved
        differs = [part for part in {**saved, **self._parts} if saved.get(part) != self._parts.get(part)]
        if differs:
            raise ValueError(f"out must be of this training, but {str(self._path)!r} differs in: {', '.join(differs)}")
        self._sweep()
        # A kill may have left a log that is ahead of the checkpoint, and a card that is behind it.
        log = "".join(json.dumps(line) + "\n" for line in checkpoint.about["log"])
        with _in_words(path):
            write_whole(self._path / LOG, log.encode())
            _checkpoint.write_card(path, checkpoint, path.read_bytes())
        return checkpoint

    def _sweep(self) -> None:
        """Removes what a kill left of files half written."""
        assert self._path is not None
        for name in (_checkpoint.NAME, "checkpoint.json", LOG, _append.NAME):
            for rest in self._path.glob(f".{name}.*"):
                rest.unlink()

    def due(self, now: bool) -> bool:
        """Whether a checkpoint is to be written: now, or if the last one was written long enough ago."""
        return self._path is not None and (now or time.perf_counter() >= self._due)

    def save(
        self, model: nn.Module, optimizer: dict[str, Tensor], config: TrainConfig, log: list[Epoch], seconds: float
    ) -> None:
        """Writes a checkpoint.

        optimizer: of a training that goes on.  log: the epochs that are done.  seconds: they took, with all around.
        """
        if self._path is None:
            return
        start = time.perf_counter()
        about = _checkpoint.about(model) | {
            "config": asdict(config),
            "epoch": len(log),
            "seconds": seconds,
            "parts": self._parts,
            "log": [asdict(epoch) for epoch in log],
        }
        _checkpoint.write(self._path / _checkpoint.NAME, Checkpoint(model.state_dict(), self._card, about, optimizer))
        end = time.perf_counter()
        self._due = end + (end - start) / _SHARE

    def log(self, epoch: Epoch) -> None:
        """Adds a line to the log."""
        if self._path is None:
            return
        with _in_words(self._path / LOG), (self._path / LOG).open("a" if epoch.epoch else "w") as file:
            file.write(json.dumps(asdict(epoch)) + "\n")

    def found(self, epoch: int) -> Found | None:
        """What the attack before an epoch has found, if it has begun."""
        if self._path is None or not (self._path / _append.NAME).exists():
            return None
        found = Found.load(self._path / _append.NAME)
        return found if found.epoch == epoch else None

    def keep(self, found: Found) -> None:
        """Writes what an attack has found so far."""
        if self._path is None:
            return
        with _in_words(self._path / _append.NAME):
            found.save(self._path / _append.NAME)


def parts(
    model: nn.Module,
    data: tuple[Tensor, Tensor],
    validation: tuple[Tensor, Tensor] | None,
    config: TrainConfig,
    attack: Attack | None,
) -> dict[str, str]:
    """What makes a training the same, by part. Of the model its words: its first weights are in the checkpoint's."""
    found = {f"config.{name}": repr(value) for name, value in asdict(config).items()} | {"model": repr(model)}
    for name, rows, attacks in (("data", data, attack), ("validation", validation, None)):
        if rows is not None:
            named = {} if attacks is None else {"attack": attacks}
            print_of = fingerprint(model, *rows, L0Ball(0), named, (), config.seed)
            found |= {f"{part} of {name}": print_of[part] for part in ("x", "y")}
            found |= {part: words for part, words in print_of.items() if part.startswith("parameters")}
    return found


def _checked(path: Path) -> Path:
    """The folder, made where it is not there; raises where it cannot be written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise OSError(f"out must be a folder that can be written to, got {str(path)!r}: {error.strerror}") from error
    return path


@contextmanager
def _in_words(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(f"{path} could not be written: {error.strerror}") from error
