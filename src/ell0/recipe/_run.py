"""One run from data to results: everything is checked first, and a run that was killed goes on."""

from __future__ import annotations

import errno
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import nn

from .. import certify, train
from ..common import Step, device_of, write_whole
from ..parallel import ALONE, Team
from ..precision import dense_products
from ..results import Measurement, Results, Row
from ._data import Splits, splits
from ._found import Found, weights_of
from ._found import load as load_found
from ._found import save as save_found
from ._gallery import write_gallery
from ._measure import Subject, certified_ball, measured
from ._model import base_shape, build, fitted
from ._recipe import Classifier, Recipe, Task, load, names


@dataclass(frozen=True)
class Stage:
    """Where a run is: at stage ``number`` of ``stages``. training: how far that is, while a classifier is trained."""

    number: int
    stages: int
    what: str
    training: Step | None = None


Progress = Callable[[Stage], None]

_FULL = (errno.ENOSPC, errno.EDQUOT)  # what a disk without room says


class BusyError(ValueError):
    """Another process is at work in a run folder."""


def run(
    path_or_name: Path | str | Recipe = "digits",
    *,
    out: Path | str | None = None,
    device: str | None = None,
    resume: bool = True,
    root: Path | str | None = None,
    progress: Progress = lambda _: None,
    team: Team = ALONE,
) -> Path:
    """Trains the classifiers of a recipe, measures them, and gives the folder where it all lies.

        folder = ell0.recipe.run("mnist-quick")
        rows = Results.load(folder / "results.json").rows

    Called again after a kill, it goes on: finished trainings and measures are not done twice, and the figures (times
    aside) are those of a run that was not killed. Classifiers of recipes that this one uses are trained in folders
    beside its own, if they are not there.

    Args:
        path_or_name: a recipe that comes with ell0 (`names`), a TOML file, or what `load` made of it.
        out: the folder; None is ``runs/NAME``. It must be new, or hold a run of the same recipe.
        device: None is a GPU where there is one.
        resume: False refuses a folder that holds a run.
        root: where the data lies, see `ell0.data.load`.
        progress: called at the start of each stage, and for each epoch of training.
        team: ranks that share the work (`ell0.parallel`). Rank 0 alone needs the folder, all need the data.
    """
    recipe = path_or_name if isinstance(path_or_name, Recipe) else load(path_or_name)
    folder = Path("runs") / recipe.name if out is None else Path(out)
    place = device_of(device)
    homes = {**{folder.parent / used.name: used for used in recipe.used}, folder: recipe}
    data = splits(recipe.data, root)
    _check_data(recipe, data, team)
    team.once(partial(_check_homes, homes, recipe, data, resume))
    with _disk(folder), _threads(recipe.threads), ExitStack() as held:
        team.once(partial(held.enter_context, _held(folder, recipe, resume)))
        _Run(recipe, folder, homes, place, data, progress, team).go()
    return folder


def finished(folder: Path, recipe: Recipe) -> bool:
    """Whether a folder holds a run of the recipe with every figure that it asks for."""
    held, results = folder / "recipe.toml", folder / "results.json"
    if not (held.is_file() and results.is_file() and held.read_bytes() == recipe.text):
        return False
    there = [row.key for row in Results.load(results).rows]
    return all(row in there for row in recipe.asked())


class _Run:
    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        homes: dict[Path, Recipe],
        place: torch.device,
        data: Splits,
        progress: Progress,
        team: Team,
    ) -> None:
        self._recipe, self._folder, self._homes = recipe, folder, homes
        self._place, self._data, self._progress, self._team = place, data, progress, team
        self._tasks = recipe.tasks()
        self._found: list[tuple[Task, list[Found]]] = []
        self._results = team.once(self._begun)
        self._before, self._start = self._results.seconds, time.perf_counter()
        self._stages, self._stage = len(recipe.everyone()) + len(self._tasks) + 1, 0

    def go(self) -> None:
        networks: dict[str, nn.Module] = {}
        for home, its in self._homes.items():
            # Another run may use the classifiers of a recipe beside this one, once they are trained.
            with ExitStack() as held:
                if its is not self._recipe:
                    self._team.once(partial(held.enter_context, _held(home, its)))
                networks |= {one.name: self._train(home, its, one) for one in its.classifiers}
        weights = {name: weights_of(network) for name, network in networks.items()}
        for number, task in enumerate(self._tasks):
            name = task.classifier.name
            self._measure(number, task, networks[name], weights[name])
        self._team.once(partial(self._end, networks))

    def _end(self, networks: dict[str, nn.Module]) -> None:
        gallery = self._folder / "gallery.npz"
        if not gallery.exists() and self._data.test[0].ndim == 4:
            self._say("a gallery of attacked images")
            write_gallery(gallery, self._recipe, networks, self._data.test)
        if not (self._folder / "results.json").exists():
            self._save()

    def _train(self, home: Path, its: Recipe, one: Classifier) -> nn.Module:
        words = _words(one, self._data)
        network = build(words, one.training.seed).to(self._place)
        attack = None if one.attack is None else partial(one.attack.configured(), ball=one.attack.ball(one.budget))
        say = self._say(f"training {one.name}")
        training = train.fit(
            network, self._data.train, one.training, attack, objective=one.objective, validation=self._data.validation,
            out=home / one.slug, card=_card(its, one, self._data), progress=say, team=self._team,
        )  # fmt: skip
        if not self._has({"what": "training_seconds", **one.training_row, "unit": "seconds"}):
            self._keep(training.rows(**one.training_row))
        return network.eval()

    def _measure(self, number: int, task: Task, network: nn.Module, weights: str) -> None:
        x, y = _rows(task, self._data)
        subject = Subject(
            network, x.to(self._place), y.to(self._place), self._recipe.seed, self._folder / f"evaluation{number}",
            self._team,
        )  # fmt: skip
        self._say(_title(task))
        path = self._folder / "verdicts" / f"{number}.npz"
        found = self._team.once(partial(load_found, path, weights))
        if found is None or not all(self._has(row) for row in task.rows()):
            known = [one for other, some in self._found if _share_rows(task, other) for one in some]
            with self._precision(task):
                rows, found = measured(task, subject, known)
            self._team.once(partial(save_found, path, weights, found))
            for one, other in product(found, known):
                one.check(other)
            self._keep(rows)
        self._found.append((task, found))
        self._team.once(subject.forget)

    def _precision(self, task: Task) -> AbstractContextManager[None]:
        """Attacks see float32 where a certificate, which is about it, is to be compared with them."""
        proven = {other.classifier.name for other in self._tasks if other.measure.what == "certified_accuracy"}
        return dense_products(tf32=False) if task.classifier.name in proven else nullcontext()

    def _say(self, what: str) -> Callable[[Step], None]:
        """Tells of a new stage, and gives what tells of the training in it."""
        self._stage += 1
        stage = Stage(self._stage, self._stages, what)
        self._progress(stage)
        return lambda training: self._progress(Stage(stage.number, stage.stages, what, training))

    def _has(self, what: Row) -> bool:
        return any(what == row.key for row in self._results.rows)

    def _keep(self, rows: list[Measurement]) -> None:
        new = [row.key for row in rows]
        before = [row for row in self._results.rows if row.key not in new]
        self._results.rows = before + [self._recipe.figure(row) for row in rows]
        self._results.seconds = round(self._before + time.perf_counter() - self._start, 1)
        self._team.once(self._save)

    def _save(self) -> None:
        self._results.save(self._folder / "results.json")

    def _begun(self) -> Results:
        seeds = sorted({self._recipe.seed, *(one.training.seed for one in self._recipe.everyone().values())})
        name = self._recipe.name
        shipped = name in names() and load(name).text == self._recipe.text
        command = f"ell0 run {name}{'' if shipped else '.toml'}"
        here = Results.here(name, command, seeds=seeds, device=self._place, ranks=self._team.size)
        here.recipe = name
        path = self._folder / "results.json"
        if path.exists():
            before = Results.load(path)
            here.rows, here.seconds = before.rows, before.seconds
            if before.device != here.device:
                here.device = f"{before.device}, then {here.device}"
        return here


def _words(one: Classifier, data: Splits) -> dict[str, Any]:
    return fitted(one.model, data.train[0].shape[1:], data.classes)


def _card(its: Recipe, one: Classifier, data: Splits) -> dict[str, Any]:
    """What must be known of a checkpoint: how its model is built, and on what it is measured."""
    source = its.data.name or "npz"
    card = {"recipe": its.name, "classifier": one.name, "model": _words(one, data)}
    card |= {"data": source, "measured_rows": data.digest}
    card |= {} if its.data.scale == "symmetric" else {"scale": its.data.scale}
    return dict(json.loads(json.dumps(card)))


def _rows(task: Task, data: Splits) -> tuple[torch.Tensor, torch.Tensor]:
    split = data.validation if task.measure.split == "validation" else data.test
    assert split is not None
    x, y = split
    return x[: task.measure.rows], y[: task.measure.rows]


def _share_rows(task: Task, other: Task) -> bool:
    """Whether what one found counts for the other: both on the first rows of one split, with one way to count units."""
    same = task.measure.split == other.measure.split and task.measure.unit == other.measure.unit
    return same and task.classifier.name == other.classifier.name


def _title(task: Task) -> str:
    row = task.row
    spent = [f"{row[key]} {key}" for key in ("queries", "steps") if key in row]
    box = [f"values within {row['beta']:g}"] if "beta" in row else []
    budget = [f"budget {', '.join(map(str, task.budgets))}"] if task.budgets and "budget" not in row else []
    budget += [f"budget {row['budget']}"] if "budget" in row else []
    words = [row["what"].replace("_", " "), *([row["attack"]] if "attack" in row else [])]
    return f"{task.classifier.name}: {', '.join(words + budget + spent + box)}"


def _check_data(recipe: Recipe, data: Splits, team: Team) -> None:
    """Raises where the data does not fit the recipe, or does not do for all ranks."""
    x, _ = data.train
    shape, classes = tuple(x.shape[1:]), data.classes
    for one in recipe.everyone().values():
        words = _words(one, data)
        sees, seen = (words["base"], base_shape(shape)) if "base" in words else (words, shape)
        given = sees.get("in_features", tuple(sees.get("in_shape", seen)))
        if given not in (seen, math.prod(seen)) or sees["classes"] < classes:
            raise ValueError(
                f"{one.name}: the model must take rows of shape {seen} to at least {classes} classes, got {sees}"
            )
        build(words)
        if isinstance(one.objective, certify.Objective):
            _check_objective(one, build(words, seed=0), *(part[:1] for part in data.train))
    for task in recipe.tasks():
        measure = task.measure
        split = data.validation if measure.split == "validation" else data.test
        there = 0 if split is None else len(split[0])
        team.check_rows(_title(task), there if measure.rows is None else measure.rows)
        if measure.rows is not None and measure.rows > there:
            raise ValueError(
                f"{_title(task)}: rows must be at most the {there} of the {measure.split} split, got {measure.rows}"
            )
        if measure.unit == "pixel" and x.ndim != 4:
            raise ValueError(f'{_title(task)}: unit must be "feature" for rows of shape {shape}, got "pixel"')
        if measure.what == "certified_accuracy":
            assert split is not None
            _check_certified(task, build(_words(task.classifier, data), seed=0), split[0][:1])


def _check_objective(one: Classifier, network: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    """Raises ValueError if the network has no bound to be trained on, before others are trained."""
    assert isinstance(one.objective, certify.Objective)
    try:
        one.objective.check(network, x, y)
    except ValueError as error:
        raise ValueError(f"{one.name}: {error}") from error


def _check_certified(task: Task, network: nn.Module, x: torch.Tensor) -> None:
    """Raises ValueError if no certificate exists, before anything is trained."""
    ball = replace(certified_ball(task), budget=max(task.budgets))
    try:
        certify.certifier(network.eval(), **task.measure.parameters).check(x, ball)
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"{_title(task)}: {error}") from error


def _check_homes(homes: dict[Path, Recipe], recipe: Recipe, data: Splits, resume: bool) -> None:
    """Raises where a run may not go on, or not begin, in its folders."""
    for home, its in homes.items():
        _check_home(home, its, resume or its is not recipe)
        for one in its.classifiers:
            _check_card(home / one.slug, _card(its, one, data))


def _check_home(home: Path, its: Recipe, resume: bool) -> None:
    """Raises where a folder is not free for a run of the recipe."""
    held = home / "recipe.toml"
    if home.exists() and not home.is_dir():
        raise ValueError(f"out must be a folder or a new name, got the file {str(home)!r}")
    if held.exists():
        if held.read_bytes() != its.text:
            raise ValueError(
                f"out must be new or hold a run of this very recipe, but {str(home)!r} holds that of another: "
                "nothing was changed there, give another out"
            )
        if not resume:
            raise ValueError(f"out must be new, but {str(home)!r} holds a run of this recipe already")
    elif home.exists() and any(not path.name.startswith(".") for path in home.iterdir()):
        raise ValueError(f"out must be new, empty or a run folder, but {str(home)!r} holds other files")


def _check_card(folder: Path, card: dict[str, Any]) -> None:
    """Raises where a checkpoint is of another model, or was made with other data."""
    if not (folder / "checkpoint.safetensors").exists():
        return
    held = train.load_checkpoint(folder).card
    differs = [key for key in {**held, **card} if held.get(key) != card.get(key)]
    if differs:
        what = ", ".join(differs)
        raise ValueError(f"out must hold a run of this recipe on this data, but {str(folder)!r} differs in: {what}")


@contextmanager
def _held(home: Path, its: Recipe, resume: bool = True) -> Iterator[None]:
    """Keeps other processes out of a run folder; one that dies, in whatever way, lets go of it."""
    try:
        home.mkdir(parents=True, exist_ok=True)
        opened = (home / ".lock").open("w")
    except OSError as error:
        if error.errno in _FULL:
            raise
        raise OSError(f"out must be a folder that can be written, got {str(home)!r} ({error})") from error
    with opened as file:
        _lock(file, home)
        _check_home(home, its, resume)  # again: now nobody can change it any more
        write_whole(home / "recipe.toml", its.text)
        yield


def _lock(file: TextIO, home: Path) -> None:
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BusyError(
            f"out must be free, but another process is at work in {str(home)!r}: wait for it, or give another out"
        ) from None
    except OSError:  # a file system without locks
        return


@contextmanager
def _threads(threads: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _disk(folder: Path) -> Iterator[None]:
    """Says in one sentence that a disk is full; files are written whole, so nothing is lost."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise OSError(
            f"the disk of {str(folder)!r} is full ({error}): what was done is kept, make room and run it again"
        ) from error
