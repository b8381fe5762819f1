"""The model and the rows that a command is about, by their words."""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from .. import data as sets
from .. import recipe
from ..parallel import Team
from ..train import load_checkpoint


def load_model(words: str) -> tuple[Callable[[Tensor], Tensor], dict[str, Any]]:
    """The model, and the card of its checkpoint; an empty one, if it has none."""
    path = Path(words)
    if path.exists() or path.suffix == ".safetensors":
        return _from_checkpoint(path)
    module, colon, name = words.partition(":")
    if not colon or not module or not name:
        raise ValueError(f"model must be a checkpoint that is there, or package.module:name, got {words!r}")
    return _imported(words, module, name), {}


def _from_checkpoint(path: Path) -> tuple[nn.Module, dict[str, Any]]:
    if path.is_dir() and not (path / "checkpoint.safetensors").exists():
        inside = ", ".join(str(found.parent) for found in sorted(path.glob("*/checkpoint.safetensors")))
        hint = f"; there are {inside}" if inside else ""
        raise FileNotFoundError(f"model must be a checkpoint, but {str(path)!r} has no checkpoint.safetensors{hint}")
    checkpoint = load_checkpoint(path)
    try:
        network = recipe.model(checkpoint.card)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; give a model of your own as package.module:name") from error
    checkpoint.into(network)
    return network, checkpoint.card


def _imported(words: str, module: str, name: str) -> Callable[[Tensor], Tensor]:
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does, so that a module in the current folder is found
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        if not hasattr(found, part):
            near = get_close_matches(part, dir(found), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"model must name something in {module}, got {words!r}{hint}")
        found = getattr(found, part)
    model: Any = found() if callable(found) and not isinstance(found, nn.Module) else found
    if not callable(model):
        raise ValueError(f"model must name a model, or a callable that makes one, got {words!r}, which gives {model!r}")
    return cast(Callable[[Tensor], Tensor], model)


def load_rows(words: str | None, root: Path | None, scale: sets.Scale, rows: int | None) -> tuple[Tensor, Tensor]:
    """Inputs and labels: the test split of a set, brought to the scale, or a file as it is; the first so many."""
    if words is None:
        raise ValueError("data must be given for this model: digits, mnist, fashion-mnist, cifar10 or a .npz file")
    if words in sets.SETS or not (words.endswith(".npz") or Path(words).exists()):
        x, y = sets.load(words, "test", root, scale=scale)
    else:
        x, y = sets.read_npz(words)
    if rows is not None and not 1 <= rows <= len(x):
        raise ValueError(f"rows must satisfy 1 <= rows <= {len(x)}, the rows of the data, got {rows}")
    return x[:rows], y[:rows]


def check_ranks(team: Team, model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> None:
    """Raises where there are fewer rows than ranks, or where a rank, which loads its own, has other weights or rows."""
    team.check_rows("data", len(x))
    if team.size == 1:
        return
    state = model.state_dict().values() if isinstance(model, nn.Module) else ()
    digest = hashlib.sha256()
    for tensor in (x, y, *state):
        if isinstance(tensor, Tensor):
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    first, *others = team.gather(digest.hexdigest)
    odd = [rank for rank, other in enumerate(others, 1) if other != first]
    if odd:
        raise ValueError(
            f"model and data must be the same on all ranks, got others on rank {odd[0]} than on rank 0: "
            "are the files the same there, and does a model that draws its weights have a seed?"
        )
