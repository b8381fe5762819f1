"""Weights and what must be known of them, in one file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..common import write_whole
from . import _tensors

NAME = "checkpoint.safetensors"
"""The file in a folder that `fit` writes to."""

_OPTIMIZER = "optimizer/"  # before the names of its tensors: no name of a module's parameter begins so


@dataclass(frozen=True)
class Checkpoint:
    """What `load_checkpoint` read.

    tensors: the model's, by their names.  card: what was given to `save_checkpoint`, or to `fit`.
    about: what was noted beside it: the model in words, versions, and of a training its config, epoch and log.
    optimizer: the state of the optimizer, of a training that is not done.
    """

    tensors: dict[str, Tensor]
    card: dict[str, Any]
    about: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Tensor] = field(default_factory=dict)

    def into(self, model: nn.Module) -> None:
        """Copies the tensors into a model; raises ValueError, and changes nothing, if it is another architecture."""
        own = model.state_dict()
        faults = [f"the model has no {name}" for name in self.tensors if name not in own]
        faults += [f"the checkpoint has no {name}" for name in own if name not in self.tensors]
        for name, tensor in self.tensors.items():
            if name in own and own[name].shape != tensor.shape:
                faults.append(f"{name} has the shape {tuple(tensor.shape)} in it and {tuple(own[name].shape)} here")
        if faults:
            more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
            raise ValueError(f"the checkpoint must be of this architecture, but {faults[0]}{more}")
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                own[name].copy_(tensor)


def save_checkpoint(path: Path | str, model: nn.Module, card: Mapping[str, Any] | None = None) -> Path:
    """Writes a model's weights and a card to a safetensors file, and the card in a JSON file beside it.

    card: anything that JSON can say.
    """
    path = Path(path)
    write(path, Checkpoint(model.state_dict(), dict(card or {}), about(model)))
    return path


def load_checkpoint(path: Path | str) -> Checkpoint:
    """Reads what `save_checkpoint` or `fit` wrote: a file, or a folder that `fit` wrote to. Tensors on the CPU.

    Of a safetensors file from elsewhere the card is empty. A file that is not whole raises ValueError.
    """
    path = Path(path)
    path = path / NAME if path.is_dir() else path
    tensors, metadata = _tensors.read(path)
    try:
        card, about = (dict(json.loads(metadata.get(key, "{}"))) for key in ("card", "about"))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged: its card is not a JSON object") from error
    optimizer = {name: tensors.pop(name) for name in list(tensors) if name.startswith(_OPTIMIZER)}
    return Checkpoint(tensors, card, about, {name.removeprefix(_OPTIMIZER): t for name, t in optimizer.items()})


def about(model: nn.Module) -> dict[str, Any]:
    """What is noted of every model."""
    from .. import __version__

    return {"model": repr(model), "versions": {"ell0": __version__, "torch": torch.__version__}}


def write(path: Path, checkpoint: Checkpoint) -> None:
    """Writes a checkpoint whole: one file holds all of it, so no kill can part weights from card. The JSON file beside
    it is for people, and may be older after a kill."""
    optimizer = {_OPTIMIZER + name: tensor for name, tensor in checkpoint.optimizer.items()}
    words = {"card": json.dumps(checkpoint.card), "about": json.dumps(checkpoint.about)}
    content = _tensors.encode(checkpoint.tensors | optimizer, {"format": "pt", **words})
    try:
        write_whole(path, content)
        write_card(path, checkpoint, content)
    except OSError as error:
        raise OSError(f"{path} could not be written, what was there before is whole: {error.strerror}") from error


def write_card(path: Path, checkpoint: Checkpoint, content: bytes) -> None:
    """Writes the JSON file beside a checkpoint; the log has a file of its own."""
    about = {key: value for key, value in checkpoint.about.items() if key not in ("log", "parts")}
    what = {"card": checkpoint.card, **about, "sha256": hashlib.sha256(content).hexdigest()}
    write_whole(path.with_suffix(".json"), (json.dumps(what, indent=1) + "\n").encode())
