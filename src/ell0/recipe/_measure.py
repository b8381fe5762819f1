"""The figures of one classifier."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from ..attacks import ATTACKS, AttackResult
from ..attacks.contract import check_count
from ..evaluation import WHITE_BOX, Entry, Evaluation, Share, default_attacks, evaluate
from ..results import Row
from ..threat import L0Ball
from ._found import CLEAN, Found, Nearest
from ._recipe import Attack, Task

_BATCH = {"cpu": 512, "cuda": 16384}  # rows in one call of an attack


@dataclass(frozen=True)
class Subject:
    """A network and the rows it is measured on, all on one device.

    state: the beginning of the names of files, from which a killed evaluation goes on.
    """

    network: nn.Module
    x: Tensor
    y: Tensor
    seed: int
    state: Path

    def evaluate(
        self,
        ball: L0Ball,
        attacks: Mapping[str, Callable[..., AttackResult] | Entry],
        budgets: tuple[int, ...] | None = None,
    ) -> Evaluation:
        return evaluate(
            self.network, self.x, self.y, ball, attacks, budgets=budgets, batch=_BATCH.get(self.x.device.type, 512),
            seed=self.seed, state_path=f"{self.state}-beta{ball.high:g}.npz", progress=False,
        )  # fmt: skip

    def forget(self) -> None:
        """Removes those files, once the figures are written elsewhere."""
        for path in self.state.parent.glob(f"{self.state.name}-beta*.npz"):
            path.unlink()


def measured(task: Task, subject: Subject, known: Sequence[Found] = ()) -> tuple[list[Row], list[Found]]:
    """The rows of results of a task, one figure each, in the order of ``task.rows()``, and what was found row by row.

    known: what other attacks found on this classifier and rows of this split; it counts for a worst case.
    """
    if task.measure.what == "clean_accuracy":
        return _clean(task, subject)
    if task.measure.what == "worst_case":
        return _worst(task, subject, known)
    evaluation = _alone(task, subject)
    median = task.measure.what == "median_distance"
    figure = median_record(evaluation) if median else evaluation.robust_accuracy.record()
    found = Found(task.row["beta"], (CLEAN, f"{task.row['attack']} alone"), evaluation.verdict, evaluation.distance)
    return [{**task.row, **figure, "seconds": round(sum(evaluation.seconds), 3)}], [found]


def _clean(task: Task, subject: Subject) -> tuple[list[Row], list[Found]]:
    batch = _BATCH.get(subject.x.device.type, 512)
    with torch.no_grad():
        parts = zip(subject.x.split(batch), subject.y.split(batch), strict=True)
        right = torch.cat([subject.network(x).argmax(1) == y for x, y in parts]).cpu()
    verdict = torch.where(right, -1, 0)
    # The clean point lies in every box.
    return [task.row | Share(int(right.sum()), len(right)).record()], [Found(0.0, (CLEAN,), verdict, verdict)]


def _alone(task: Task, subject: Subject) -> Evaluation:
    """One attack on all rows."""
    measure = task.measure
    assert measure.attack is not None
    attack = Attack(measure.attack, task.row["beta"], measure.unit, measure.parameters)
    spent = {key: task.row[key] for key in ("queries", "steps") if getattr(measure, key)}
    # The paper's rho is that of an attack which may change every unit.
    units = subject.x.shape[1 if measure.unit == "feature" else 2 :].numel()
    return subject.evaluate(attack.ball(task.row.get("budget", units)), {attack.name: attack.configured(**spent)})


def _worst(task: Task, subject: Subject, known: Sequence[Found]) -> tuple[list[Row], list[Found]]:
    """Every attack within the least box, then within the next, and so on: a point of one lies in all that follow.

    So the figure of a box is that of all points found in it and before it, by this evaluation or another.
    """
    measure = task.measure
    attacks = cascade(queries=measure.queries[0], steps=measure.steps[0])
    nearest, flags = Nearest(len(subject.x)), list[str]()
    rows: list[Row] = []
    boxes: list[Found] = []
    for beta in measure.beta:
        evaluation = subject.evaluate(L0Ball(max(task.budgets), measure.unit, -beta, beta), attacks, task.budgets)
        boxes.append(Found(beta, (CLEAN, *attacks), evaluation.verdict, evaluation.distance))
        for found in (boxes[-1], *(found for found in known if found.beta <= beta)):
            nearest.learn(found)
        flags += [f"values within {beta:g}: {flag}" for flag in evaluation.flags]
        for budget in task.budgets:
            decided = nearest.decided(budget)
            row = {**task.row, "budget": budget, "beta": beta, "flags": "; ".join(flags)}
            row |= {f"decided by {name}": count for name, count in decided.items()}
            row |= Share(evaluation.n - sum(decided.values()), evaluation.n).record()
            # One evaluation gave the figures of all budgets: its time stands once.
            seconds = {"seconds": round(sum(evaluation.seconds), 3)} if budget == max(task.budgets) else {}
            rows.append(row | seconds)
    return rows, boxes


def cascade(names: Sequence[str] | None = None, *, queries: int, steps: int) -> dict[str, Entry]:
    """Attacks for `ell0.evaluate`: those named, of ``ATTACKS`` or of the default ones, which None stands for.

    queries, steps: what each may spend on a row, whichever of them it counts.
    """
    check_count("queries", queries)
    check_count("steps", steps)
    known = {name: Entry(attack, name in WHITE_BOX) for name, attack in ATTACKS.items()} | default_attacks()
    chosen = {}
    for name in default_attacks() if names is None else names:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"attack must be one of {', '.join(known)}, got {name!r}{hint}")
        parameters = inspect.signature(known[name].attack).parameters
        spent = {key: value for key, value in (("queries", queries), ("steps", steps)) if key in parameters}
        chosen[name] = Entry(partial(known[name].attack, **spent), known[name].white_box)
    return chosen


def median_record(evaluation: Evaluation) -> Row:
    """The median distance as entries of a row, with a 95 % interval from the order of the distances alone.

    The numbers of distances below and above the median are binomial(n, 1/2), so it lies between the j-th least and the
    j-th largest distance, but for a chance of 2 P(B < j).
    """
    counted = torch.where(evaluation.verdict < 0, evaluation.units, evaluation.distance).sort().values
    n = evaluation.n
    j, ways, chance = 0, 1, 1  # of the 2**n outcomes, those with B = j and those with B <= j
    while 40 * chance <= 2**n:
        j += 1
        ways = ways * (n - j + 1) // j
        chance += ways
    low, high = counted[max(j, 1) - 1], counted[n - max(j, 1)]  # with few rows no j does, and it is the whole range
    return {"value": evaluation.rho(), "n": n, "low": float(low), "high": float(high)}
