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
from . import safetensors_format

NAME = "checkpoint.safetensors"
"""The file in a folder that `fit` writes to."""

_STATE = ("optimizer/", "appended/")  # prefixes of what is not the model's: no parameter of a module has such a name


@dataclass(frozen=True)
class Checkpoint:
    """What `load_checkpoint` read.

    tensors: the model's, by name.  card: what `save_checkpoint` or `fit` was given.
    about: the model in words, versions, and of a training its config, epoch and log.
    state: of an unfinished training, the tensors of its optimizer and of X'.
    """

    tensors: dict[str, Tensor]
    card: dict[str, Any]
    about: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)

    def into(self, model: nn.Module) -> None:
        """Copies the tensors into a model. Raises ValueError, and changes nothing, if the architecture differs."""
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
    """Writes a model's weights and a card, any JSON object, to a safetensors file; the card also to a JSON file beside
    it."""
    write(Path(path), Checkpoint(model.state_dict(), dict(card or {}), about(model)))
    return Path(path)


def load_checkpoint(path: Path | str) -> Checkpoint:
    """Reads a file of `save_checkpoint`, or a folder of `fit`; the tensors are on the CPU.

    A safetensors file from elsewhere has an empty card. Raises ValueError if the file is damaged.
    """
    path = Path(path)
    path = path / NAME if path.is_dir() else path
    tensors, metadata = safetensors_format.read(path)
    try:
        card, about = (dict(json.loads(metadata.get(key, "{}"))) for key in ("card", "about"))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged: its card is not a JSON object") from error
    state = {name: tensors.pop(name) for name in list(tensors) if name.startswith(_STATE)}
    return Checkpoint(tensors, card, about, state)


def about(model: nn.Module) -> dict[str, Any]:
    """What every checkpoint says of its model."""
    from .. import __version__

    return {"model": repr(model), "versions": {"ell0": __version__, "torch": torch.__version__}}


def write(path: Path, checkpoint: Checkpoint) -> None:
    """Writes one file, so that a kill cannot part weights from card, and then the JSON file."""
    words = {"card": json.dumps(checkpoint.card), "about": json.dumps(checkpoint.about)}
    content = safetensors_format.encode(checkpoint.tensors | checkpoint.state, {"format": "pt", **words})
    try:
        write_whole(path, content)
        write_card(path, checkpoint, content)
    except OSError as error:
        raise OSError(f"{path} could not be written, what was there before is whole: {error.strerror}") from error


def write_card(path: Path, checkpoint: Checkpoint, content: bytes) -> None:
    """Writes the JSON file beside a checkpoint, for people; the log has its own file."""
    about = {key: value for key, value in checkpoint.about.items() if key not in ("log", "made_from")}
    card = {"card": checkpoint.card, **about, "sha256": hashlib.sha256(content).hexdigest()}
    write_whole(path.with_suffix(".json"), (json.dumps(card, indent=1) + "\n").encode())
