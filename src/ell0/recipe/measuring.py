"""The measurements of one classifier."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import certify
from ..attacks.pointwise import pointwise_counts
from ..common import Progress, seeded, silent
from ..evaluation import Evaluation, cascade, evaluate
from ..nn import folded
from ..parallel import ALONE, Team
from ..precision import dense_products
from ..results import CLEAN, Measurement, Row, Share, median
from ..threat import L0Ball, Unit
from .plan import Task, ball_within
from .verdicts import Verdicts, certified_radii, decided

# The measurements of a task, in the order of its identities, and its verdicts, box by box.
Measured = tuple[list[Measurement], list[Verdicts]]


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
    progress: Progress = silent

    @property
    def batch(self) -> int:
        """Rows in one call of an attack; fewer of a vote, which makes many of each."""
        rows, passes = (16384, 2**16) if self.x.is_cuda else (512, 2**14)
        return max(1, min(rows, passes // self.passes))

    @property
    def passes(self) -> int:
        """Forward passes of the network for one answer."""
        return getattr(self.network, "passes", 1)

    @property
    def fast_network(self) -> nn.Module:
        """Folded, which halves the time on a GPU; on a CPU the network is measured as it is."""
        return folded(self.network) if self.x.is_cuda else self.network

    def evaluate(
        self,
        ball: L0Ball,
        beta: float,
        attacks: Mapping[str, Any],
        budgets: tuple[int, ...] | None = None,
        radii: Tensor | None = None,
    ) -> Evaluation:
        """beta: of the ball, to name the state by."""
        return evaluate(
            self.fast_network, self.x, self.y, ball, attacks, budgets=budgets, radii=radii, seed=self.seed,
            batch=self.batch, tf32=self.x.is_cuda, state_path=f"{self.state}-beta{beta:g}.safetensors",
            progress=self.progress, team=self.team,
        )  # fmt: skip

    def forget(self) -> None:
        """Removes the state files, once the measurements are written elsewhere."""
        for path in self.state.parent.glob(f"{self.state.name}-beta*.safetensors"):
            path.unlink()


def measure(task: Task, subject: Subject, known: Sequence[Verdicts] = ()) -> Measured:
    """known: verdicts of other measures of this classifier and rows of this split; they count for a worst case."""
    if task.what in ("worst_case", "clean_accuracy"):
        return (_worst if task.what == "worst_case" else _clean)(task, subject, known)
    return (_certified if task.what == "certified_accuracy" else _alone)(task, subject)


def _measurement(row: Row, figure: float, **more: Any) -> Measurement:
    return Measurement.of(row["what"], figure, **{key: value for key, value in row.items() if key != "what"}, **more)


def _clean(task: Task, subject: Subject, known: Sequence[Verdicts]) -> Measured:
    """Reads answers off certified radii (-1: misclassified) if there are some: an answer of a vote is many passes."""

    def right(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            parts = zip(x.split(subject.batch), y.split(subject.batch), strict=True)
            return torch.cat([subject.network(some).argmax(1) == labels for some, labels in parts])

    radii = certified_radii(known, len(subject.x), 0.0)
    rows = subject.team.by_row(right, subject.x, subject.y) if radii is None else radii >= 0
    verdict = torch.where(rows, -1, 0)
    # The clean point lies in every box.
    return [_measurement(task.row, Share.of(rows))], [Verdicts(0.0, (CLEAN,), verdict, verdict)]


def _certified(task: Task, subject: Subject) -> Measured:
    start, ball = time.perf_counter(), task.certified_ball
    certifier = certify.certifier(subject.network, task.row.get("method", "best"))
    # Up to the most that can be proven, not to the budgets asked for: the median is over all radii.
    most = certifier.limit(subject.x, ball)

    def radius(x: Tensor, y: Tensor, rows: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(subject.seed)
        return certifier.radius(x, y, ball, max_budget=most, rows=rows, generator=generator, progress=subject.progress)

    # A row draws by its place among all, whatever the number of ranks.
    rows = torch.arange(len(subject.x), device=subject.x.device)
    radii = subject.team.by_row(radius, subject.x, subject.y, rows)
    identity = {key: value for key, value in task.row.items() if key != "what"}
    cost = {key: getattr(certifier, key) for key in ("forwards", "confidence", "rounding")}
    beside = {key: value for key, value in cost.items() if value is not None}
    *shares, median = certify.rows(radii, task.budgets, **identity, beside=beside)
    verdicts = Verdicts.certificate(task.row.get("beta", math.inf), radii)
    if certifier.confidence is not None or getattr(certifier, "rule", None) != getattr(subject.network, "rule", None):
        # What holds with some confidence is no proof, and an attack may break it; another rule is another classifier.
        verdicts = replace(verdicts, names=(), distance=verdicts.verdict)
    return [*shares, replace(median, seconds=round(time.perf_counter() - start, 3))], [verdicts]


def _positions(x: Tensor, x_adv: Tensor) -> Tensor:
    return (x != x_adv).any(1).flatten(1).sum(1)


def _fallen(x: Tensor, x_adv: Tensor) -> Tensor:
    # The supplement compares in the normalised scale; falls of 8-bit images are far above 1e-4 in either.
    return (x - x_adv > 1e-4).any(1).flatten(1).sum(1)


def _counted(task: Task, subject: Subject) -> Measured:
    """Several counts of the same runs of Pointwise. On a GPU it queries in TF32; what it broke must err in float32."""
    start, attack = time.perf_counter(), task.attack
    assert attack is not None

    def counts(x: Tensor, y: Tensor, rows: Tensor) -> Tensor:
        with dense_products(tf32=x.is_cuda):
            result, others = pointwise_counts(
                subject.fast_network, x, y, attack.ball(_units(x, attack.unit), x.device), (_positions, _fallen),
                **attack.settings, generator=seeded(subject.seed, attack.name), rows=rows, progress=subject.progress,
            )  # fmt: skip
        with torch.no_grad():
            errs = subject.network(result.x_adv).argmax(1) != y
        return torch.cat([result.distance.unsqueeze(1), others, errs.unsqueeze(1)], 1)

    rows = torch.arange(len(subject.x), device=subject.x.device)
    distance, positions, fallen, errs = subject.team.by_row(counts, subject.x, subject.y, rows).unbind(1)
    wrong, stands = distance == 0, distance < 0
    found = {
        "changed": distance.where(~stands, _units(subject.x, attack.unit)),
        "positions": positions.where(~stands, _units(subject.x, "pixel")).where(~wrong, 0),
        "fallen": fallen.where(fallen > 0, 10_000),
    }
    seconds = [round(time.perf_counter() - start, 3), *[None] * len(task.counts)]
    pairs = zip(task.identities(), task.counts, seconds, strict=False)
    verdict = torch.where(stands | (errs == 0), -1, torch.where(wrong, 0, 1))
    verdicts = Verdicts(attack.beta, (CLEAN, f"{attack.name} alone"), verdict, distance)
    return [_measurement(row, median(found[count]), seconds=took) for row, count, took in pairs], [verdicts]


def _units(x: Tensor, unit: Unit) -> int:
    return x.shape[1 if unit == "feature" else 2 :].numel()


def _alone(task: Task, subject: Subject) -> Measured:
    """One attack on all rows."""
    if task.counts:
        return _counted(task, subject)
    row, attack = task.row, task.attack
    assert attack is not None
    # The paper's median distance is that of an attack which may change every unit.
    ball = attack.ball(row.get("budget", _units(subject.x, attack.unit)), subject.x.device)
    evaluation = subject.evaluate(ball, attack.beta, {attack.name: attack.configured()})
    figure = evaluation.rho() if task.what == "median_distance" else evaluation.robust_accuracy
    verdicts = Verdicts(row["beta"], (CLEAN, f"{attack.name} alone"), evaluation.verdict, evaluation.distance)
    # In all rows together, and the forward passes of each: a vote takes many.
    beside = {"queries": int(evaluation.queries.sum()), "passes": subject.passes}
    found = [_measurement(row, figure, seconds=round(sum(evaluation.seconds), 3), beside=beside)]
    if task.right:
        found.append(_over_right(row, int((evaluation.verdict < 0).sum()), int((evaluation.verdict != 0).sum())))
    if task.part is not None:
        found.append(_measurement({**row, "part": task.part}, Share.of(evaluation.verdict[: task.part] < 0)))
    return found, [verdicts]


def _over_right(row: Row, standing: int, right: int) -> Measurement:
    """The share that stands of the rows classified rightly; 0 if there are none."""
    return _measurement(
        {**row, "over": "right"}, Share(standing, right) if right else 0.0, **({} if right else {"n": 0})
    )


def _worst(task: Task, subject: Subject, known: Sequence[Verdicts]) -> Measured:
    """Every attack within the least box, then within the next, and so on: a point of one lies in all that follow.

    So the figure of a box counts all points found in it and before it, by this evaluation or another.
    """
    attacks = cascade(queries=task.row["queries"], steps=task.row["steps"])
    n, flags, most = len(subject.x), list[str](), max(task.budgets)
    found, over_right = list[Measurement](), list[Measurement]()
    boxes: list[Verdicts] = []
    evidence: list[Verdicts] = []
    for beta in task.betas:
        ball = ball_within(beta, most, task.unit, task.box_of, subject.x.device)
        certified = certified_radii(known, n, beta)
        evaluation = subject.evaluate(ball, beta, attacks, task.budgets, certified if task.skip_proven else None)
        boxes.append(Verdicts(beta, (CLEAN, *attacks), evaluation.verdict, evaluation.distance))
        evidence += [boxes[-1], *(one for one in known if one.beta <= beta or one.proves)]
        flags += [f"values within {beta:g}: {flag}" for flag in evaluation.flags]
        for budget in task.budgets:
            row = {**task.row, "budget": budget, "beta": beta}
            counts, stands = decided(evidence, n, budget)
            share_proven = None if certified is None else int((certified >= budget).sum()) / n
            # One evaluation gave the figures of all budgets: its time stands once.
            seconds = round(sum(evaluation.seconds), 3) if budget == most else None
            more = {"decided": counts, "flags": flags, "certified": share_proven, "seconds": seconds}
            found.append(_measurement(row, Share.of(stands), **more))
            over_right.append(_over_right(row, int(stands.sum()), n - counts[CLEAN]))
    return found + (over_right if task.right else []), boxes
