"""The model and the rows that a command works on."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from .. import data as sets
from .. import recipe
from ..common import check_out, device_of, did_you_mean, digest
from ..parallel import Team
from ..results import Results
from ..train import load_checkpoint
from .options import RowOptions, WorkOptions, command_words


@dataclass(frozen=True)
class Loaded:
    """A model and its rows, on the device.

    name, classifier: the model as a command and as results name it.  range: of all values of the data.
    """

    name: str
    classifier: str
    subject: RowOptions
    network: Callable[[Tensor], Tensor]
    x: Tensor
    y: Tensor
    range: tuple[float, float]

    def results(self, command: Callable[..., int], seeds: list[int], team: Team, **given: object) -> Results:
        """Empty results of a command.  given: its options beyond those of the rows."""
        data = self.subject.data
        given |= asdict(self.subject) | {"data": data if data in sets.SETS else data and Path(data), "out": None}
        words = command_words(f"ell0 {command.__name__} {self.name}", command, given)
        return Results.here(command.__name__, words, seeds=seeds, device=self.x.device, ranks=team.size)


def load(model: str, subject: RowOptions, work: WorkOptions, team: Team) -> Loaded:
    """Raises if ``--out`` cannot be written, or if a rank, which loads its own, has other weights or rows."""
    if subject.out is not None:
        team.once(partial(check_out, subject.out))
    place = device_of(work.device)
    network, card = _load_model(model)
    if "scale" in card:
        raise ValueError(f"model must take images in [-1, 1], but {model} was trained by an earlier ell0 on [0, 1]")
    known = card.get("data")
    source = subject.data or (None if known == "npz" else known)
    if source is None:
        raise ValueError(f"data must be given for this model: {', '.join(sets.SETS)} or a .npz file")
    is_file = source not in sets.SETS and (source.endswith(".npz") or Path(source).exists())
    x, y = sets.read_npz(source) if is_file else sets.load(source, "test", work.root)
    if subject.rows is not None and not 1 <= subject.rows <= len(x):
        raise ValueError(f"rows must satisfy 1 <= rows <= {len(x)}, the rows of the data, got {subject.rows}")
    ends = (float(x.min()), float(x.max())) if is_file else (-1.0, 1.0)
    x, y = (part[: subject.rows].to(place) for part in (x, y))
    if isinstance(network, nn.Module):
        network = network.to(place).eval()
    check_ranks(team, network, x, y)
    try:
        with torch.no_grad():
            network(x[:1])
    except (RuntimeError, ValueError) as error:
        shape, reason = tuple(x.shape[1:]), str(error).splitlines()[0]
        raise ValueError(f"model must take rows of shape {shape}, as the data has them ({reason})") from error
    name = Path(model).name if card else model
    return Loaded(name, card.get("classifier", name), subject, network, x, y, ends)


def _load_model(words: str) -> tuple[Callable[[Tensor], Tensor], dict[str, Any]]:
    """The model, and the card of its checkpoint; an empty one if it has none."""
    path = Path(words)
    if not path.exists() and path.suffix != ".safetensors":
        return _imported(words), {}
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


def _imported(words: str) -> Callable[[Tensor], Tensor]:
    module, _, name = words.partition(":")
    if not module or not name:
        raise ValueError(f"model must be a checkpoint that exists, or package.module:name, got {words!r}")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does, so that a module in the current folder is found
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(f"model must be importable, got {words!r} ({error})") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"model must name something in {module}, got {words!r}{did_you_mean(part, dir(found))}")
        found = getattr(found, part)
    model = found() if callable(found) and not isinstance(found, nn.Module) else found
    if not callable(model):
        raise ValueError(f"model must name a model or a function that returns one, got {words!r}: {model!r}")
    return cast(Callable[[Tensor], Tensor], model)


def check_ranks(team: Team, model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> None:
    """Raises ValueError if there are fewer rows than ranks, or if a rank has other weights or rows than rank 0."""
    team.check_rows("data", len(x))
    if team.size == 1:
        return
    state = model.state_dict().values() if isinstance(model, nn.Module) else ()
    first, *others = team.gather(lambda: digest(x, y, *(each for each in state if isinstance(each, Tensor))))
    for rank, other in enumerate(others, 1):
        if other != first:
            raise ValueError(
                f"model and data must be the same on all ranks, got others on rank {rank} than on rank 0: "
                "are the files the same there, and does a model that draws its weights have a seed?"
            )
