"""The folder of a training, from which a killed one resumes: checkpoint and log."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..common import write_whole
from ..evaluation.identity import of_attack, of_model, of_value
from . import checkpoint as checkpoints
from .appended import BoundAttack
from .checkpoint import Checkpoint, load_checkpoint
from .config import TrainConfig
from .log import Epoch
from .stepper import TrainingObjective

LOG = "log.jsonl"

_SHARE = 0.05  # of the time at most goes into checkpoints, the last one aside


class TrainingFolder:
    """What a training keeps on disk; nothing if path is None.

    made_from: what makes two trainings the same, see `made_from`.  card: for the checkpoint.
    """

    def __init__(self, path: Path | str | None, made_from: Mapping[str, str], card: Mapping[str, Any]) -> None:
        self._path = None if path is None else _writable(Path(path))
        self._made_from, self._card = dict(made_from), dict(card)
        self._next = 0.0  # when the next checkpoint may be written

    def load(self) -> Checkpoint | None:
        """The last checkpoint, if there is one; raises ValueError if it belongs to another training."""
        if self._path is None:
            return None
        path = self._path / checkpoints.NAME
        if not path.exists():
            self._remove_temporary()
            return None
        checkpoint = load_checkpoint(path)
        if "parts" in checkpoint.about:
            raise ValueError(
                f"out must be a new folder, but an older ell0 began a training in {str(self._path)!r}, which this "
                "version cannot resume"
            )
        saved = checkpoint.about.get("made_from")
        if saved is None:
            raise ValueError(f"out must be a folder of fit or an empty one, but {path} was written by something else")
        differs = [key for key in {**saved, **self._made_from} if saved.get(key) != self._made_from.get(key)]
        if differs:
            raise ValueError(f"out must be of this training, but {str(self._path)!r} differs in: {', '.join(differs)}")
        self._remove_temporary()
        # After a kill the log may be ahead of the checkpoint, and the card behind it.
        log = "".join(json.dumps(line) + "\n" for line in checkpoint.about["log"])
        with _named(path):
            write_whole(self._path / LOG, log.encode())
            checkpoints.write_card(path, checkpoint, path.read_bytes())
        return checkpoint

    def _remove_temporary(self) -> None:
        """Removes files that a kill left half written."""
        assert self._path is not None
        for name in (checkpoints.NAME, "checkpoint.json", LOG):
            for temporary in self._path.glob(f".{name}.*"):
                temporary.unlink()

    def due(self) -> bool:
        """Whether the last checkpoint is old enough for another."""
        return self._path is not None and time.perf_counter() >= self._next

    def save(self, model: nn.Module, state: dict[str, Tensor], log: list[Epoch], **about: Any) -> None:
        """Writes a checkpoint after the epochs of the log.

        state: see `Checkpoint`.  about: config, seconds and rows attacked, as JSON has them.
        """
        if self._path is None:
            return
        start = time.perf_counter()
        words = {"epoch": len(log), "log": [asdict(epoch) for epoch in log], "made_from": self._made_from}
        about = checkpoints.about(model) | about | words
        checkpoints.write(self._path / checkpoints.NAME, Checkpoint(model.state_dict(), self._card, about, state))
        end = time.perf_counter()
        self._next = end + (end - start) / _SHARE

    def log(self, epoch: Epoch) -> None:
        """Adds a line to the log."""
        if self._path is not None:
            with _named(self._path / LOG), (self._path / LOG).open("a" if epoch.epoch else "w") as file:
                file.write(json.dumps(asdict(epoch)) + "\n")


def made_from(
    model: nn.Module,
    data: tuple[Tensor, Tensor],
    validation: tuple[Tensor, Tensor] | None,
    config: TrainConfig,
    attack: BoundAttack | None,
    objective: TrainingObjective | None,
) -> dict[str, str]:
    """What makes two trainings the same, by name. Of the model its architecture: the checkpoint holds its weights."""
    found = {f"config.{name}": of_value(name, value) for name, value in asdict(config).items()}
    found["model"] = of_model(model, weights=False)
    for name, rows in (("data", data), ("validation", validation)):
        if rows is not None:
            found |= {f"{part} of {name}": of_value(part, value) for part, value in zip("xy", rows, strict=True)}
    if attack is not None:
        found["parameters of attack"] = of_attack("attack", attack)
    if objective is not None:
        found["objective"] = f"{type(objective).__qualname__} {of_value('objective', objective)}"
    return found


def _writable(path: Path) -> Path:
    """Makes the folder; raises OSError if it cannot be written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise OSError(f"out must be a folder that can be written to, got {str(path)!r}: {error.strerror}") from error
    return path


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Errors of the disk name the file."""
    try:
        yield
    except OSError as error:
        raise OSError(f"{path} could not be written: {error.strerror}") from error
