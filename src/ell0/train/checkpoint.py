"""Weights with what must be known of them in one file; the folder from which a killed training resumes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import files

CHECKPOINT, LOG = "checkpoint.safetensors", "log.jsonl"  # in a folder of `fit`
PREVIOUS = "checkpoint.previous.safetensors"
_STATE = ("optimizer/", "appended/")  # prefixes of what is not the model's: no parameter of a module has such a name
_SHARE = 0.05  # of the time at most goes into checkpoints, the last one aside


@dataclass(frozen=True)
class Checkpoint:
    """What `load_checkpoint` read.

    tensors: the model's, by name.  card: what `save_checkpoint` or `fit` was given.
    about: the model in words, versions, and of a training its config, epoch and log.
    state: of an unfinished training, the tensors of its ``"optimizer"``, its average of the weights included, and of X'
        (``"appended"``).
    """

    tensors: dict[str, Tensor]
    card: dict[str, Any]
    about: dict[str, Any] = field(default_factory=dict)
    state: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def check(self, model: nn.Module) -> None:
        """Raises ValueError if the tensors do not have the names and shapes of this model's, which may be on meta."""
        own = model.state_dict()
        faults = [f"the model has no {name}" for name in self.tensors if name not in own]
        faults += [f"the checkpoint has no {name}" for name in own if name not in self.tensors]
        for name, tensor in self.tensors.items():
            if name in own and own[name].shape != tensor.shape:
                faults.append(f"{name} has the shape {tuple(tensor.shape)} in it and {tuple(own[name].shape)} here")
        if faults:
            more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
            raise ValueError(f"the checkpoint must be of this architecture, but {faults[0]}{more}")

    def into(self, model: nn.Module) -> None:
        """Copies the tensors into a model. Raises ValueError, and changes nothing, if the architecture differs."""
        self.check(model)
        own = model.state_dict()
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                own[name].copy_(tensor)


def save_checkpoint(path: Path | str, model: nn.Module, card: Mapping[str, Any] | None = None) -> Path:
    """Writes a model's weights and a card, any JSON object, to a safetensors file."""
    write(Path(path), Checkpoint(model.state_dict(), dict(card or {}), _about(model)))
    return Path(path)


def load_checkpoint(path: Path | str) -> Checkpoint:
    """Reads a file of `save_checkpoint`, or a folder of `fit`; the tensors are on the CPU.

    A safetensors file from elsewhere has an empty card. Raises `ell0.files.FileError` if the file was altered.
    """
    path = Path(path)
    path, todo = (path / CHECKPOINT, _todo(path)) if path.is_dir() else (path.resolve(), "give another file")
    return _read(path, todo)


def _todo(folder: Path) -> str:
    before = (folder / PREVIOUS).exists()
    return f"delete it to {f'go on from {PREVIOUS}, the checkpoint before' if before else 'train again'}"


def _read(path: Path, todo: str) -> Checkpoint:
    tensors, words = files.read_tensors(path, todo, most=sys.maxsize, own=("card", "about"))
    try:
        card, about = (dict(json.loads(words.get(key, "{}"))) for key in ("card", "about"))
    except (ValueError, TypeError, RecursionError) as error:
        raise files.FileError(f"{path} is damaged, its card is not a JSON object: {todo}") from error
    state: dict[str, dict[str, Tensor]] = {}
    for name in [name for name in tensors if name.startswith(_STATE)]:
        kind, _, own = name.partition("/")
        state.setdefault(kind, {})[own] = tensors.pop(name)
    return Checkpoint(tensors, card, about, state)


def write(path: Path, checkpoint: Checkpoint, previous: Path | None = None) -> None:
    """Writes one file, so that a kill cannot part weights from card; the one that was there becomes ``previous``."""
    words = {"card": json.dumps(checkpoint.card), "about": json.dumps(checkpoint.about)}
    state = {f"{kind}/{name}": its for kind, some in checkpoint.state.items() for name, its in some.items()}
    files.write(path, files.encode_tensors(checkpoint.tensors | state, {"format": "pt", **words}), previous)


class TrainingFolder:
    """What a training keeps on disk; nothing if path is None.  made_from: what makes two trainings the same."""

    def __init__(self, path: Path | str | None, made_from: Mapping[str, str], card: Mapping[str, Any]) -> None:
        self._path = None if path is None else Path(path)
        if self._path is not None:
            files.check_out(self._path / CHECKPOINT)
        self._made_from, self._card = dict(made_from), dict(card)
        try:
            json.dumps(self._card)
        except TypeError as error:
            raise ValueError(f"card must be made of JSON values, got {self._card!r} ({error})") from error
        self._next = 0.0  # when the next checkpoint may be written

    def load(self) -> Checkpoint | None:
        """The last checkpoint, if there is one; raises ValueError if it was altered or belongs to another training.

        If it was deleted, the one before it.
        """
        if self._path is None:
            return None
        path, previous = self._path / CHECKPOINT, self._path / PREVIOUS
        path, todo = (path, _todo(self._path)) if path.exists() else (previous, "delete it to train again")
        checkpoint = _read(path, todo) if path.exists() else None
        if checkpoint is not None:
            saved = checkpoint.about.get("made_from")
            if saved is None:
                raise ValueError(f"out must be an empty folder or one of this version's fit, but {path} is of another")
            differs = [key for key in {**saved, **self._made_from} if saved.get(key) != self._made_from.get(key)]
            if differs:
                home = repr(str(self._path))
                raise ValueError(f"out must be of this training, but {home} differs in: {', '.join(differs)}")
        files.sweep(self._path)
        if checkpoint is not None:
            self.log(checkpoint.about["log"])  # after a kill it may be ahead of the checkpoint
        return checkpoint

    def due(self) -> bool:
        """Whether the last checkpoint is old enough for another."""
        return self._path is not None and time.perf_counter() >= self._next

    def save(self, model: nn.Module, state: dict[str, dict[str, Tensor]], about: dict[str, Any]) -> None:
        """Writes a checkpoint; state, about: as in `Checkpoint`."""
        if self._path is None:
            return
        start = time.perf_counter()
        about = _about(model) | about | {"made_from": self._made_from}
        write(self._path / CHECKPOINT, Checkpoint(model.state_dict(), self._card, about, state), self._path / PREVIOUS)
        end = time.perf_counter()
        self._next = end + (end - start) / _SHARE

    def log(self, lines: list[dict[str, Any]]) -> None:
        """Writes the log, a line for each epoch."""
        if self._path is not None:
            files.write(self._path / LOG, "".join(json.dumps(line) + "\n" for line in lines).encode())


def _about(model: nn.Module) -> dict[str, Any]:
    from .. import __version__

    return {"model": repr(model), "versions": {"ell0": __version__, "torch": torch.__version__}}
