"""What a recipe says, as values: classifiers with their trainings, and the tasks that measure them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from ..attacks import ATTACKS, AttackResult
from ..data import SETS
from ..results import WORST_CASE, Measurement, Row
from ..threat import L0Ball, Unit
from ..train import Trades, TrainConfig, TrainingObjective
from .models import VOTERS
from .splits import DataSource

COUNTS = ("changed", "positions", "fallen")
"""What a median distance may count, of the same runs of Pointwise.

changed: units, the nearest run.  positions: pixels with a changed channel, the fewest of all runs.  fallen: as the
paper's supplement counts, pixels with a channel that fell, the fewest above 0; a row without any counts 10,000, and so
does a misclassified one.
"""
_COUNTED = {count: {"count": count, **({} if count == "changed" else {"unit": "pixel"})} for count in COUNTS}


Box = str | tuple[float, float] | None
"""Within what values lie: two numbers; None: [-1, 1]; the name of a data set: the range of its normalised images."""


def slug(classifier: str) -> str:
    """A name as that of a folder: lower case, letters, digits, hyphens and underscores. ``F(10)`` becomes ``f10``."""
    return "".join(c for c in classifier.lower() if c.isalnum() or c in "-_")


def ball_within(beta: float, budget: int, unit: Unit, box_of: Box = None, device: torch.device | str = "cpu") -> L0Ball:
    """A ball whose values lie in a `Box`, made beta times as wide about its middle."""
    if isinstance(box_of, str):
        return L0Ball(budget, unit, *(end.to(device) for end in SETS[box_of].box(beta)))
    low, high = box_of or (-1.0, 1.0)
    middle, half = (low + high) / 2, (high - low) / 2
    return L0Ball(budget, unit, middle - beta * half, middle + beta * half)


@dataclass(frozen=True)
class BoxedAttack:
    """An attack of ``ATTACKS`` with its settings; its values lie in the box, made beta times as wide."""

    name: str
    beta: float = 1.0
    unit: Unit = "feature"
    settings: Mapping[str, Any] = field(default_factory=dict)
    box_of: Box = None

    def ball(self, budget: int, device: torch.device | str = "cpu") -> L0Ball:
        return ball_within(self.beta, budget, self.unit, self.box_of, device)

    def configured(self) -> Callable[..., AttackResult]:
        return partial(ATTACKS[self.name], **self.settings)


@dataclass(frozen=True)
class Classifier:
    """A network and its training.

    attack: what it is trained against, with ``budget``; None: clean training.
    objective: a loss other than that of its logits, such as a certified bound.
    ready: it is not trained, but measured as the code of its model makes it.  weights: or with those of a checkpoint.
    """

    name: str
    model: Mapping[str, Any]
    training: TrainConfig
    attack: BoxedAttack | None = None
    budget: int = 0
    objective: TrainingObjective | None = None
    ready: bool = False
    weights: Path | None = None

    @property
    def k(self) -> int | None:
        return self.model.get("k")

    @property
    def votes(self) -> bool:
        """Whether it certifies by counting votes, and not by bounds."""
        return self.model.get("name") in VOTERS

    @property
    def has_gradient(self) -> bool:
        """Whether attacks have a gradient to follow: votes of parts have a surrogate, those of random copies none."""
        return self.model.get("name") != "ablation"

    @property
    def identity(self) -> Row:
        k = {} if self.k is None else {"k": self.k}
        adversarial = self.attack is not None or isinstance(self.objective, Trades)
        return {"classifier": self.name, **k, "adversarial": adversarial}

    @property
    def training_identity(self) -> Row:
        """What every measurement of its training says: also the precision, unless it is float32."""
        precisions = {key: getattr(self.training, key) for key in ("precision", "attack_precision")}
        return self.identity | {key: value for key, value in precisions.items() if value not in ("fp32", None)}


@dataclass(frozen=True)
class Task:
    """One evaluation of one classifier.

    what: the kind of measure.  row: what its measurements have in common.  budgets: all those of its measure.
    betas: its boxes; none: any value.  box_of: what they stretch, see `ball_within`.
    first, rows: n rows of the split from this one on, None for all.
    attack: the one attack of it; None: not an attack, or a worst case.
    right: whether it gives the share over the rows classified rightly, too.  part: that of the first n rows, too.
    skip_proven: of a worst case, whether a row is attacked only with budgets above its certified radius.
    counts: of a median distance, what is counted, see `COUNTS`; none: changed units.
    """

    classifier: Classifier
    what: str
    row: Row
    budgets: tuple[int, ...] = ()
    betas: tuple[float, ...] = ()
    rows: int | None = None
    attack: BoxedAttack | None = None
    box_of: Box = None
    first: int = 0
    right: bool = False
    part: int | None = None
    counts: tuple[str, ...] = ()
    skip_proven: bool = False

    @property
    def unit(self) -> Unit:
        return cast(Unit, self.row.get("unit", "feature"))

    @property
    def split(self) -> str:
        return str(self.row.get("split", "test"))

    @property
    def certified_ball(self) -> L0Ball:
        """What its certificate is about, without a budget: any value, or a box."""
        return ball_within(self.betas[0] if self.betas else math.inf, 0, self.unit, self.box_of)

    def identities(self) -> list[Row]:
        """The keys of its measurements; no two tasks of a recipe have the same."""
        if self.what == "certified_accuracy":
            return [*({**self.row, "budget": m} for m in self.budgets), {**self.row, "what": "certified_radius"}]
        rows = [{**self.row, **_COUNTED[count]} for count in self.counts] or [self.row]
        if self.what == "worst_case":
            rows = [{**self.row, "budget": m, "beta": beta} for beta in self.betas for m in self.budgets]
        rows += [{**row, "over": "right"} for row in rows] if self.right else []
        return rows + ([] if self.part is None else [{**self.row, "part": self.part}])

    def shares_rows(self, other: Task) -> bool:
        """Whether what one found counts for the other: on rows of both, and in boxes of one kind, if both have one.

        Clean accuracy has no unit: its rows count for measures of any.
        """
        clean = "clean_accuracy" in (self.what, other.what)
        mine, others = (
            (task.split, task.first, task.classifier.name, None if clean else task.unit) for task in (self, other)
        )
        return mine == others and len({task.box_of for task in (self, other) if task.betas}) < 2

    def __str__(self) -> str:
        words = [self.row["what"].replace("_", " "), *([self.row["attack"]] if "attack" in self.row else [])]
        budgets = [self.row["budget"]] if "budget" in self.row else self.budgets
        words += [f"budget {', '.join(map(str, budgets))}"] if budgets else []
        words += [f"{self.row[key]} {key}" for key in ("queries", "steps") if key in self.row]
        words += [f"values within {self.row['beta']:g}"] if "beta" in self.row else []
        return f"{self.classifier.name}: {', '.join(words)}"


@dataclass(frozen=True)
class Recipe:
    """The whole of a run. text: the file as it was.  used: recipes whose classifiers are measured here too.

    threads: of a run on the CPU; None: torch's default.
    tasks: every evaluation, in order; certificates first and worst cases last, which count what all the others find.
    paper: figures of the paper, by the measurements they belong to.  quoted: figures of others, not run here.
    """

    name: str
    summary: str
    text: bytes
    seed: int
    threads: int | None
    data: DataSource
    used: tuple[Recipe, ...]
    classifiers: tuple[Classifier, ...]
    tasks: tuple[Task, ...]
    paper: tuple[Row, ...]
    quoted: tuple[Row, ...]

    def everyone(self) -> list[Classifier]:
        return [one for recipe in (*self.used, self) for one in recipe.classifiers]

    @property
    def code(self) -> tuple[str, ...]:
        """The code that its models are made by, as ``package.module:name``."""
        return tuple(one.model["python"] for one in self.everyone() if "python" in one.model)

    def homes(self, out: Path) -> dict[Path, Recipe]:
        """The run folders of the recipes that are used, beside ``out``, and ``out`` itself."""
        used = {out.parent / one.name: one for one in self.used}
        for home in used:
            if home.resolve() == out.resolve():
                raise ValueError(
                    f"out must be another folder than that of {home.name}, which {self.name} uses, got {out}"
                )
        return {**used, out: self}

    def folders(self, out: Path) -> dict[str, Path]:
        """The folder of each classifier of a run in ``out``, by name."""
        return {one.name: home / slug(one.name) for home, its in self.homes(out).items() for one in its.classifiers}

    def asked(self) -> list[Row]:
        """The keys that the results of a whole run have at least."""
        keys = [key for task in self.tasks for key in task.identities()]
        return keys + [{**key, "unit": "seconds"} for key in self.times() if key["what"] == "training_seconds"]

    def times(self) -> list[Row]:
        whats = ("training_seconds", "epoch_seconds", "attack_seconds")
        return [{"what": what, **one.training_identity} for one in self.everyone() if not one.ready for what in whats]

    def with_paper(self, found: Measurement) -> Measurement:
        """The measurement with the paper's figure, if there is one."""
        for figure in self.paper:
            if belongs(figure, found.key):
                return replace(found, paper=figure["value"], paper_n=figure.get("n"))
        return found


def belongs(figure: Row, key: Row) -> bool:
    """Whether a figure of the paper is about the measurement with this key."""
    if key.get("attack") == WORST_CASE != figure.get("attack"):
        return False  # a figure of one attack, whose words fit both
    return all(key.get(name) == value for name, value in figure.items() if name not in ("value", "n"))
