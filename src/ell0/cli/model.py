"""The model and the rows that a command works on."""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from .. import data as sets
from .. import recipe
from ..common import device_of, digest
from ..files import check_out, write
from ..parallel import Team
from ..results import Results
from ..threat import channels_last
from ..train import load_checkpoint
from ..wrapping import wrap
from .options import RowOptions, WorkOptions, command_words, say_written


@dataclass(frozen=True)
class Loaded:
    """A model and its rows, on the device.

    name, classifier: the model as a command and as results name it.  source: a data set, or the file of the rows.
    range: of all values of the data.
    """

    name: str
    classifier: str
    subject: RowOptions
    network: Callable[[Tensor], Tensor]
    x: Tensor
    y: Tensor
    source: str
    range: tuple[float, float]

    def results(self, command: Callable[..., int], seeds: list[int], team: Team, **given: object) -> Results:
        """Empty results of a command.  given: its options beyond those of the rows."""
        data = self.subject.data
        given |= asdict(self.subject) | {"data": data if data in sets.SETS else data and Path(data)}
        given |= {"out": None, "page": None}
        words = command_words(f"ell0 {command.__name__} {self.name}", command, given)
        return Results.here(command.__name__, words, seeds=seeds, device=self.x.device, ranks=team.size)

    def write_page(self, results: Results, quiet: bool, x_adv: Tensor | None = None) -> None:
        """Writes the page, if one was asked for. x_adv: ``(n, ...)``, attacked rows, of which some are shown."""
        if self.subject.page is None:
            return
        from .. import report

        data, shown, network = sets.SETS.get(self.source), list[report.Exhibit](), wrap(self.network)
        if x_adv is not None and self.x.ndim == 4 and self.x.shape[1] in (1, 3):
            with torch.no_grad():
                right = torch.cat([network(some).argmax(1) for some in self.x.split(self.subject.batch)]) == self.y
            among = right.nonzero().squeeze(1) if right.any() else torch.arange(len(self.y), device=self.y.device)
            rows = among[recipe.first_of_each(self.y[among])]
            arrays = recipe.pictures(self.classifier, network, self.x[rows], self.y[rows], x_adv[rows], self.range)
            shown = report.exhibits(arrays, [self.classifier], data.classes if data else ())
        report.write([report.Run(results, data=data, exhibits=shown)], self.subject.page)
        say_written(self.subject.page, quiet)


def save_arrays(path: Path, quiet: bool, **arrays: Any) -> None:
    """Writes an npz file whole."""
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    write(path, file.getvalue())
    say_written(path, quiet)


def load(model: str, subject: RowOptions, work: WorkOptions, team: Team) -> Loaded:
    """Raises if a file cannot be written, or if a rank, which loads its own, has other weights or rows."""
    for option, path in (("out", subject.out), ("page", subject.page)):
        if path is not None:
            team.once(partial(check_out, path, option))
    place = device_of(work.device)
    network, card = _load_model(model, subject)
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
        why = channels_last(x.shape) or reason
        raise ValueError(f"model must take rows of shape {shape}, as the data has them ({why})") from error
    name = Path(model).name if card else model
    return Loaded(name, card.get("classifier", name), subject, network, x, y, source, ends)


def _load_model(words: str, subject: RowOptions) -> tuple[Callable[[Tensor], Tensor], dict[str, Any]]:
    """The model, and the card of its checkpoint; an empty one if it has none."""
    path = Path(words)
    if not path.exists() and path.suffix != ".safetensors":
        own = _own(words)
        if subject.weights is not None:
            if not isinstance(own, nn.Module):
                raise ValueError(f"model must be an nn.Module for weights to be loaded into it, got {words!r}")
            load_checkpoint(subject.weights).into(own)
        return own, {}
    if subject.weights is not None:
        raise ValueError(f"weights must be left out for a model that is a checkpoint itself, got {words!r}")
    if path.is_dir() and not (path / "checkpoint.safetensors").exists():
        inside = ", ".join(str(found.parent) for found in sorted(path.glob("*/checkpoint.safetensors")))
        hint = f"; there are {inside}" if inside else ""
        raise FileNotFoundError(f"model must be a checkpoint, but {str(path)!r} has no checkpoint.safetensors{hint}")
    checkpoint = load_checkpoint(path)
    if "model" not in checkpoint.card:
        raise ValueError(f"{path} does not name its model: give package.module:name as model, and --weights {words}")
    try:
        return recipe.model(checkpoint, allow_code=subject.allow_code), checkpoint.card
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _own(words: str) -> Callable[[Tensor], Tensor]:
    if ":" not in words:
        raise ValueError(f"model must be a checkpoint that exists, or package.module:name, got {words!r}")
    found = recipe.imported(words)
    model = _made(words, found) if callable(found) and not isinstance(found, nn.Module) else found
    if callable(model):
        return cast(Callable[[Tensor], Tensor], model)
    try:
        return wrap(model)
    except ValueError as error:
        rule = "model must name a model or a function that returns one"
        raise ValueError(f"{rule}, got {words!r}: {model!r}") from error


def _made(words: str, make: Callable[[], Any]) -> Any:
    """What a function returns that needs no arguments."""
    try:
        inspect.signature(make).bind()
    except TypeError as error:
        module, name = words.split(":", 1)
        rule = "model must name a function that needs no arguments and returns the model"
        raise ValueError(
            f"{rule}: give {module}:mine with def mine(): return {name}(...), got {words!r} ({error})"
        ) from error
    except ValueError:  # a function of another language, whose arguments are not known
        pass
    return make()


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
