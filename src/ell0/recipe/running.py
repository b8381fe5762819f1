"""Runs of recipes from data to results: everything is checked first, and a run that was killed goes on."""

from __future__ import annotations

import json
import math
import time
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import certify, files, train
from ..common import Progress, Step, device_of, digest, silent
from ..parallel import ALONE, Team
from ..precision import dense_products
from ..results import Measurement, Results, Row
from ..threat import L0Ball, channels_last
from ..train.checkpoint import CHECKPOINT
from . import verdicts
from .gallery import write_gallery
from .measuring import Subject, measure
from .models import build, check_allowed, fitted
from .plan import Classifier, Recipe, Task, slug
from .reading import load, names
from .splits import Splits, read_splits
from .toml import named
from .verdicts import Verdicts

_FORMAT = b"4"  # of what a run folder holds; another version cannot go on with it


class BusyError(ValueError):
    """Another process is at work in a run folder."""


def run(
    path_or_name: Path | str | Recipe = "digits",
    *,
    out: Path | str | None = None,
    device: str | None = None,
    resume: bool = True,
    root: Path | str | None = None,
    allow_code: bool = False,
    progress: Progress = silent,
    team: Team = ALONE,
) -> Path:
    """Trains the classifiers of a recipe, measures them, and returns the run folder.

        folder = ell0.recipe.run("mnist-quick")
        rows = Results.load(folder / "results.json").rows

    Called again after a kill, it goes on: the figures (times aside) are those of a run that was not killed. Classifiers
    of recipes that this one uses are trained in folders beside its own, if they are not there.

    Args:
        path_or_name: a recipe that comes with ell0 (`names`), a TOML file, or what `load` returned.
        out: the folder, new or with a run of the same recipe; resume=False refuses the latter. Default: ``runs/NAME``.
        device: such as "cpu". Default: a GPU if there is one.  root: where the data lies, see `ell0.data.load`.
        allow_code: run the code that the recipe names as a model (``python = "package.module:name"``).
        team: ranks that share the work. Rank 0 alone needs the folder, all need the data.
    """
    recipe = path_or_name if isinstance(path_or_name, Recipe) else load(path_or_name)
    check_allowed(recipe.code, allow_code)
    folder = Path("runs") / recipe.name if out is None else Path(out)
    place = device_of(device)
    data = read_splits(recipe.data, root)
    _check_data(recipe, data, team)
    team.once(partial(_check_homes, recipe, folder, data, resume))
    with ExitStack() as held:
        held.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(recipe.threads or torch.get_num_threads())
        team.once(partial(held.enter_context, _held(folder, recipe, resume)))
        _RecipeRun(recipe, folder, place, data, progress, team).go()
    return folder


def finished(folder: Path, recipe: Recipe) -> bool:
    """Whether a folder holds a run of the recipe with every figure that it asks for."""
    held, results = folder / "recipe.toml", folder / "results.json"
    if not (results.is_file() and held.is_file() and _says(held, recipe)):
        return False
    there = [row.key for row in Results.load(results).rows]
    return all(row in there for row in recipe.asked())


@dataclass(frozen=True)
class Swept:
    """What became of a sweep. finished: the folders of its finished runs.  busy: those of other processes."""

    finished: tuple[Path, ...]
    busy: tuple[Path, ...]


def run_sweep(
    recipes: tuple[Recipe, ...], out: Path | str, *, progress: Progress = silent, team: Team = ALONE, **options: Any
) -> Swept:
    """Runs those recipes of a `sweep` that are not finished, each in a folder ``out/NAME``; options are those of `run`.

    Runs that other processes are at work on are left to them, so the same command on several machines, or as an array
    of a cluster's jobs, shares out the runs. At the end it tries those once more, since a process may have died.
    """
    folders = {Path(out) / recipe.name: recipe for recipe in recipes}
    busy: dict[Path, Recipe] = {}
    for turn in (folders, busy):
        for number, (folder, recipe) in enumerate(dict(turn).items(), 1):
            busy.pop(folder, None)
            if options.get("resume", True) and team.once(partial(finished, folder, recipe)):
                continue
            progress(Step(recipe.name, number, len(turn)))
            try:
                run(recipe, out=folder, progress=progress, team=team, **options)
            except BusyError:
                busy[folder] = recipe
    return Swept(tuple(folder for folder in folders if folder not in busy), tuple(busy))


class _RecipeRun:
    def __init__(
        self, recipe: Recipe, folder: Path, place: torch.device, data: Splits, progress: Progress, team: Team
    ) -> None:
        self._recipe, self._folder, self._place = recipe, folder, place
        self._data, self._progress, self._team = data, progress, team
        self._verdicts: list[tuple[Task, list[Verdicts]]] = []
        self._results = team.once(self._begin)
        self._before, self._start = self._results.seconds, time.perf_counter()
        self._stages, self._stage = len(recipe.everyone()) + len(recipe.tasks) + 1, 0

    def go(self) -> None:
        networks: dict[str, nn.Module] = {}
        for home, its in self._recipe.homes(self._folder).items():
            # Another run may use the classifiers of a recipe beside this one, once they are trained.
            with ExitStack() as held:
                if its is not self._recipe:
                    self._team.once(partial(held.enter_context, _held(home, its)))
                networks |= {one.name: self._train(home, its, one) for one in its.classifiers}
        weights = {name: digest(*chain(*network.state_dict().items())) for name, network in networks.items()}
        for number, task in enumerate(self._recipe.tasks):
            self._measure(number, task, networks[task.classifier.name], weights[task.classifier.name])
        self._team.once(partial(self._show, networks))

    def _show(self, networks: dict[str, nn.Module]) -> None:
        gallery = self._folder / "gallery.safetensors"
        if not gallery.exists() and self._data.test[0].ndim == 4:
            self._enter("a gallery of attacked images")
            write_gallery(gallery, self._recipe, networks, self._data.test)

    def _train(self, home: Path, its: Recipe, one: Classifier) -> nn.Module:
        network = _built(one, self._data, one.training.seed).to(self._place)
        if one.ready:
            (home / slug(one.name)).mkdir(exist_ok=True)
            card = _card(its, one, self._data)
            self._team.once(partial(train.save_checkpoint, home / slug(one.name) / CHECKPOINT, network, card))
            return network.eval()
        attack = None
        if one.attack is not None:
            attack = partial(one.attack.configured(), ball=one.attack.ball(one.budget, self._place))
        training = train.fit(
            network, self._data.train, one.training, attack, objective=one.objective, validation=self._data.validation,
            out=home / slug(one.name), card=_card(its, one, self._data), progress=self._enter(f"training {one.name}"),
            team=self._team,
        )  # fmt: skip
        if not self._has({"what": "training_seconds", **one.training_identity, "unit": "seconds"}):
            self._keep(training.rows(**one.training_identity))
        return network.eval()

    def _measure(self, number: int, task: Task, network: nn.Module, weights: str) -> None:
        x, y = (part[task.first :][: task.rows].to(self._place) for part in self._data[task.split])
        state, path = self._folder / f"evaluation{number}", self._folder / "verdicts" / f"{number}.safetensors"
        made_from = digest(weights, self._data.digest, json.dumps(task.identities()))
        subject = Subject(network, x, y, self._recipe.seed, state, self._team, self._enter(str(task)))
        found = self._team.once(partial(verdicts.load, path, made_from))
        if found is None or not all(self._has(row) for row in task.identities()):
            known = [one for other, some in self._verdicts if task.shares_rows(other) for one in some]
            # What is counted is counted in float32, as certificates are; attacks may query in TF32.
            with dense_products(tf32=False):
                rows, found = measure(task, subject, known)
            of_first = {n: digest(x[:n], y[:n]) for n in {row.n for row in rows if row.verdicts}}
            rows = [replace(row, rows_sha256=of_first[row.n]) if row.verdicts else row for row in rows]
            self._team.once(partial(verdicts.save, path, made_from, found))
            for one, other in product(found, known):
                one.check(other)
            self._keep(rows)
        self._verdicts.append((task, found))
        self._team.once(subject.forget)

    def _enter(self, what: str) -> Progress:
        """Reports a new stage, and returns the progress of the work inside it."""
        self._stage += 1
        stage = Step(what, self._stage, self._stages)
        self._progress(stage)
        return lambda step: self._progress(replace(step, stage=stage))

    def _has(self, key: Row) -> bool:
        return any(key == row.key for row in self._results.rows)

    def _keep(self, rows: list[Measurement]) -> None:
        new = [row.key for row in rows]
        before = [row for row in self._results.rows if row.key not in new]
        self._results.rows = before + [self._recipe.with_paper(row) for row in rows]
        self._results.seconds = round(self._before + time.perf_counter() - self._start, 1)
        self._team.once(partial(self._results.save, self._folder / "results.json"))

    def _begin(self) -> Results:
        seeds = sorted({self._recipe.seed, *(one.training.seed for one in self._recipe.everyone())})
        name = self._recipe.name
        shipped = name in names() and load(name).text == self._recipe.text
        command = f"ell0 run {name}{'' if shipped else '.toml'}{' --allow-code' if self._recipe.code else ''}"
        here = Results.here(name, command, seeds=seeds, device=self._place, ranks=self._team.size)
        here.recipe = name
        path = self._folder / "results.json"
        if path.exists():
            before = Results.load(path)
            here.rows, here.seconds = before.rows, before.seconds
            if before.device != here.device:
                here.device = f"{before.device}, then {here.device}"
        return here


def _built(one: Classifier, data: Splits, seed: int) -> nn.Module:
    network = build(_fitted(one, data), seed)
    if one.weights is not None:
        train.load_checkpoint(one.weights).into(network)
    return network


def _fitted(one: Classifier, data: Splits) -> dict[str, Any]:
    return fitted(one.model, data.train[0].shape[1:], data.classes, data.description)


def _card(its: Recipe, one: Classifier, data: Splits) -> dict[str, Any]:
    """What a checkpoint says of itself: how its model is built, and on what it is measured."""
    card = {"recipe": its.name, "classifier": one.name, "model": _fitted(one, data)}
    card |= {"data": its.data.name or "npz", "measured_rows": data.digest}
    return dict(json.loads(json.dumps(card)))


def _check_data(recipe: Recipe, data: Splits, team: Team) -> None:
    """Raises ValueError if the data does not fit the recipe, or has too few rows for all ranks."""
    made: dict[str, nn.Module] = {}  # one for all classifiers that differ in their training alone

    def example(one: Classifier) -> nn.Module:
        arguments = _fitted(one, data)
        if (key := repr(arguments)) not in made:
            made[key] = build(arguments, seed=0)
        return made[key]

    for one in recipe.everyone():
        with named(one.name):
            try:
                network = build(_fitted(one, data)) if one.objective is None else example(one)
                if one.weights is not None or "python" in one.model:
                    _check_answer(_built(one, data, 0).eval(), data)
            except RuntimeError as error:
                why = channels_last(data.test[0][:1].shape) or str(error).splitlines()[0]
                raise ValueError(f"model must take rows as the data has them, {why}") from error
            if one.objective is not None:
                one.objective.check(network, *(part[:1] for part in data.train))
    for task in recipe.tasks:
        rows, _ = data[task.split]
        left = len(rows) - task.first
        wanted = left if task.rows is None else task.rows
        if left < 1:
            raise ValueError(
                f"{task}: first must be < {len(rows)}, the rows of the {task.split} split, got {task.first}"
            )
        if wanted > left:
            there = f"the {len(rows)} of the {task.split} split" + (f" less first={task.first}" if task.first else "")
            raise ValueError(f"{task}: rows must be at most {there}, got {wanted}")
        team.check_rows(str(task), wanted)
        if any(row.get("unit") == "pixel" for row in task.identities()):
            if rows.ndim != 4:
                shape = tuple(rows.shape[1:])
                raise ValueError(f'{task}: unit must be "feature" for rows of shape {shape}, got "pixel"')
            with named(task):
                L0Ball(0, "pixel", -math.inf, math.inf).count(rows[:1], rows[:1])  # raises if channels come last
        if task.what == "certified_accuracy":
            with named(task):
                ball = replace(task.certified_ball, budget=max(task.budgets))
                certify.certifier(example(task.classifier).eval(), task.row.get("method", "best")).check(rows[:1], ball)


def _check_answer(network: nn.Module, data: Splits) -> None:
    """Raises ValueError unless a model of the user's own takes a row and gives logits for the classes of the data."""
    with torch.no_grad():
        answer = network(data.test[0][:1])
    rule = f"model must give logits of shape (1, {data.classes}) for a row {tuple(data.test[0].shape[1:])}"
    if not isinstance(answer, torch.Tensor) or answer.ndim != 2 or answer.shape[1] < data.classes:
        shape = f"a tensor {tuple(answer.shape)}" if isinstance(answer, torch.Tensor) else type(answer).__name__
        raise ValueError(f"{rule}, got {shape}; return ell0.wrap(network) if the logits are part of its answer")


def _check_homes(recipe: Recipe, folder: Path, data: Splits, resume: bool) -> None:
    """Raises ValueError if the run may not go on, or not begin, in its folders."""
    for home, its in recipe.homes(folder).items():
        _check_home(home, its, resume or its is not recipe)
        for one in its.classifiers:
            own = home / slug(one.name)
            if (own / CHECKPOINT).exists():
                held, card = train.load_checkpoint(own).card, _card(its, one, data)
                if what := ", ".join(key for key in {**held, **card} if held.get(key) != card.get(key)):
                    raise ValueError(
                        f"out must hold a run of this recipe on this data, {str(own)!r} differs in: {what}"
                    )


def _check_home(home: Path, its: Recipe, resume: bool) -> None:
    """Raises ValueError if a folder is not free for a run of the recipe."""
    held, version = home / "recipe.toml", home / ".format"
    if not held.exists():
        if home.is_dir() and any(not path.name.startswith(".") for path in home.iterdir()):
            raise ValueError(f"out must be new, empty or a run folder, but {str(home)!r} holds other files")
        return
    if not version.exists() or files.read(version) != _FORMAT:
        raise ValueError(f"out must be new, but {str(home)!r} holds a run of another version of ell0: give another out")
    if not _says(held, its):
        raise ValueError(f"out must be new or hold a run of this recipe, but {str(home)!r} holds one of another recipe")
    if not resume:
        raise ValueError(f"out must be new, but {str(home)!r} holds a run of this recipe already")


def _says(held: Path, its: Recipe) -> bool:
    """Whether the recipe of a run folder says what this one says, in whatever layout."""
    text = files.read(held)
    try:
        return text == its.text or tomllib.loads(text.decode()) == tomllib.loads(its.text.decode())
    except (ValueError, RecursionError):
        return False


@contextmanager
def _held(home: Path, its: Recipe, resume: bool = True) -> Iterator[None]:
    """Keeps other processes out of a run folder; the lock of a process that dies is released."""
    with ExitStack() as opened:
        try:
            home.mkdir(parents=True, exist_ok=True)
            free = opened.enter_context(files.locked(home / ".lock"))
        except OSError as error:
            raise OSError(f"out must be a folder that can be written, got {str(home)!r} ({error})") from error
        if not free:
            raise BusyError(f"out must be free, but another process is at work in {str(home)!r}")
        _check_home(home, its, resume)  # again: from now on nobody else changes it
        files.sweep(home)
        for folder in (home / "verdicts", *(home / slug(one.name) for one in its.classifiers)):
            if folder.is_symlink():
                raise files.FileError(
                    f"{folder} is a link, which leads out of the run folder: put a folder in its place"
                )
            files.sweep(folder)
        files.write(home / ".format", _FORMAT)
        files.write(home / "recipe.toml", its.text)
        yield
