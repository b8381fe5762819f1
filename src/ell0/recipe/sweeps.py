"""The runs of a sweep, which several processes may share: each takes those that no other is at work on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ..common import Progress, Step, silent
from ..parallel import ALONE, Team
from .plan import Recipe
from .running import BusyError, finished, run


@dataclass(frozen=True)
class Swept:
    """What became of a sweep. finished: the folders of its finished runs.  busy: those of other processes."""

    finished: tuple[Path, ...]
    busy: tuple[Path, ...]


def run_sweep(
    recipes: tuple[Recipe, ...],
    out: Path | str,
    *,
    device: str | None = None,
    resume: bool = True,
    root: Path | str | None = None,
    progress: Progress = silent,
    team: Team = ALONE,
) -> Swept:
    """Runs the recipes of a `sweep`, each in a folder ``out/NAME``, if it is not finished.

    Runs that other processes are at work on are left to them, so the same command on several machines, or as an array
    of a cluster's jobs, shares out the runs. At the end it tries those once more, since a process may have died. The
    arguments are those of `run`; ``resume=False`` refuses a folder that holds a run.
    """
    folders = {Path(out) / recipe.name: recipe for recipe in recipes}
    busy: dict[Path, Recipe] = {}
    for turn in (folders, busy):
        for folder, recipe in dict(turn).items():
            busy.pop(folder, None)
            if resume and team.once(partial(finished, folder, recipe)):
                continue
            say = partial(_say, progress, recipe.name)
            try:
                run(recipe, out=folder, device=device, resume=resume, root=root, progress=say, team=team)
            except BusyError:
                busy[folder] = recipe
    return Swept(tuple(folder for folder in folders if folder not in busy), tuple(busy))


def _say(progress: Progress, name: str, step: Step) -> None:
    if step.stage is None:
        progress(replace(step, what=f"{name}, {step.what}"))
    else:
        progress(replace(step, stage=replace(step.stage, what=f"{name}, {step.stage.what}")))
