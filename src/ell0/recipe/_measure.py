"""The figures of one classifier."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import certify
from ..attacks import AttackResult
from ..data import RANGES
from ..evaluation import Entry, Evaluation, cascade, evaluate
from ..nn import folded
from ..parallel import ALONE, Team
from ..results import CLEAN, Measurement, Row, Share
from ..threat import L0Ball, stretched
from ._found import Found, Nearest
from ._recipe import Attack, Task

_BATCH = {"cpu": 512, "cuda": 16384}  # rows in one call of an attack


@dataclass(frozen=True)
class Subject:
    """A network and the rows it is measured on, all on one device.

    state: the beginning of the names of files, from which a killed evaluation goes on.  team: shares the rows.
    """

    network: nn.Module
    x: Tensor
    y: Tensor
    seed: int
    state: Path
    team: Team = ALONE

    def evaluate(
        self,
        ball: L0Ball,
        attacks: Mapping[str, Callable[..., AttackResult] | Entry],
        budgets: tuple[int, ...] | None = None,
    ) -> Evaluation:
        # On a GPU alone, where it halves the time: elsewhere a figure is that of the very network.
        network = folded(self.network) if self.x.is_cuda else self.network
        return evaluate(
            network, self.x, self.y, ball, attacks, budgets=budgets, seed=self.seed,
            batch=_BATCH.get(self.x.device.type, 512), state_path=f"{self.state}-beta{ball.high:g}.npz",
            team=self.team,
        )  # fmt: skip

    def forget(self) -> None:
        """Removes those files, once the figures are written elsewhere."""
        for path in self.state.parent.glob(f"{self.state.name}-beta*.npz"):
            path.unlink()


def measured(task: Task, subject: Subject, known: Sequence[Found] = ()) -> tuple[list[Measurement], list[Found]]:
    """The measurements of a task, in the order of ``task.rows()``, and what was found row by row.

    known: what other attacks found on this classifier and rows of this split; it counts for a worst case.
    """
    if task.measure.what == "clean_accuracy":
        return _clean(task, subject)
    if task.measure.what == "certified_accuracy":
        return _certified(task, subject)
    if task.measure.what == "worst_case":
        return _worst(task, subject, known)
    evaluation = _alone(task, subject)
    median = task.measure.what == "median_distance"
    figure = evaluation.rho() if median else evaluation.robust_accuracy
    found = Found(task.row["beta"], (CLEAN, f"{task.row['attack']} alone"), evaluation.verdict, evaluation.distance)
    return [_measurement(task.row, figure, seconds=round(sum(evaluation.seconds), 3))], [found]


def _measurement(row: Row, figure: float, **more: Any) -> Measurement:
    return Measurement.of(row["what"], figure, **{key: value for key, value in row.items() if key != "what"}, **more)


def _clean(task: Task, subject: Subject) -> tuple[list[Measurement], list[Found]]:
    right = subject.team.by_row(partial(_right, subject.network), subject.x, subject.y)
    verdict = torch.where(right, -1, 0)
    # The clean point lies in every box.
    return [_measurement(task.row, Share(int(right.sum()), len(right)))], [Found(0.0, (CLEAN,), verdict, verdict)]


def _right(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Which rows are classified right: ``(n,)`` bool."""
    batch = _BATCH.get(x.device.type, 512)
    with torch.no_grad():
        parts = zip(x.split(batch), y.split(batch), strict=True)
        return torch.cat([network(some).argmax(1) == labels for some, labels in parts])


def _certified(task: Task, subject: Subject) -> tuple[list[Measurement], list[Found]]:
    start = time.perf_counter()
    certifier = certify.certifier(subject.network, **task.measure.parameters)
    radii = certified_radii(certifier, subject, certified_ball(task))
    identity = {key: value for key, value in task.row.items() if key != "what"}
    cost = {"forwards": certifier.forwards, "confidence": certifier.confidence}
    about = {key: value for key, value in cost.items() if value is not None}
    *shares, median = certify.rows(radii, task.budgets, **identity, beside=about)
    # What holds with some confidence is no proof, and an attack may break it.
    sure = certifier.confidence is None
    found = Found.certificate(task.row.get("beta", math.inf), radii) if sure else Found.nothing(len(radii))
    return [*shares, replace(median, seconds=round(time.perf_counter() - start, 3))], [found]


def certified_radii(certifier: certify.Certifier, subject: Subject, ball: L0Ball) -> Tensor:
    """The radii of all rows: ``(n,)``. Each row draws by its place among them, whatever the ranks."""
    # To the most that can be proven, not to the budgets asked for: the median is over all radii.
    most = certifier.limit(subject.x, ball)

    def radius(x: Tensor, y: Tensor, rows: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(subject.seed)
        return certifier.radius(x, y, ball, max_budget=most, rows=rows, generator=generator)

    rows = torch.arange(len(subject.x), device=subject.x.device)
    return subject.team.by_row(radius, subject.x, subject.y, rows)


def certified_ball(task: Task) -> L0Ball:
    """What a certificate of a recipe is about, without a budget."""
    measure, beta = task.measure, task.row.get("beta")
    low, high = (-math.inf, math.inf) if beta is None else stretched(RANGES[measure.scale], beta)
    return L0Ball(0, measure.unit, low, high)


def _alone(task: Task, subject: Subject) -> Evaluation:
    """One attack on all rows."""
    measure = task.measure
    assert measure.attack is not None
    attack = Attack(measure.attack, task.row["beta"], measure.unit, measure.parameters, measure.scale)
    spent = {key: task.row[key] for key in ("queries", "steps") if getattr(measure, key)}
    # The paper's rho is that of an attack which may change every unit.
    units = subject.x.shape[1 if measure.unit == "feature" else 2 :].numel()
    return subject.evaluate(attack.ball(task.row.get("budget", units)), {attack.name: attack.configured(**spent)})


def _worst(task: Task, subject: Subject, known: Sequence[Found]) -> tuple[list[Measurement], list[Found]]:
    """Every attack within the least box, then within the next, and so on: a point of one lies in all that follow.

    So the figure of a box is that of all points found in it and before it, by this evaluation or another.
    """
    measure = task.measure
    attacks = cascade(queries=measure.queries[0], steps=measure.steps[0])
    nearest, flags = Nearest(len(subject.x)), list[str]()
    rows: list[Measurement] = []
    boxes: list[Found] = []
    for beta in measure.beta:
        ball = L0Ball(max(task.budgets), measure.unit, *stretched(RANGES[measure.scale], beta))
        evaluation = subject.evaluate(ball, attacks, task.budgets)
        boxes.append(Found(beta, (CLEAN, *attacks), evaluation.verdict, evaluation.distance))
        for found in (boxes[-1], *(found for found in known if found.beta <= beta or found.proves)):
            nearest.learn(found)
        flags += [f"values within {beta:g}: {flag}" for flag in evaluation.flags]
        for budget in task.budgets:
            decided, proven = nearest.decided(budget), nearest.proven(budget, beta)
            rows.append(
                _measurement(
                    {**task.row, "budget": budget, "beta": beta},
                    Share(evaluation.n - sum(decided.values()), evaluation.n),
                    decided=decided,
                    flags=flags,
                    certified=None if proven is None else proven / evaluation.n,
                    # One evaluation gave the figures of all budgets: its time stands once.
                    seconds=round(sum(evaluation.seconds), 3) if budget == max(task.budgets) else None,
                )
            )
    return rows, boxes
