"""What an evaluation found, and its figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..results import CLEAN, WORST_CASE, Figure, Measurement, Share, median
from ..threat import L0Ball

_BESIDE = ("white_box", "attacked", "broken", "queries")


@dataclass(frozen=True)
class AttackRecord:
    """What one attack of an evaluation did.

    attacked, broken: rows it was given, all still standing then, and rows it broke.
    robust_accuracy: share of all rows that neither this attack nor one before it broke.
    queries, seconds: spent on all its rows together.
    """

    white_box: bool
    attacked: int
    broken: int
    robust_accuracy: Share
    queries: int
    seconds: float


@dataclass(frozen=True)
class CurvePoint:
    """One point of a curve over budgets; decided: how many rows each attack, or ``"clean"``, has broken up to it."""

    budget: int
    robust_accuracy: Share
    decided: dict[str, int]


@dataclass(frozen=True, eq=False)
class Evaluation:
    """What `evaluate` found for n rows.

    attacks: name -> whether it is white-box, in the order they ran.  budgets: of the curve; the last is the ball's.
    verdict: ``(n,)`` int64; -1 the row stands, 0 misclassified from the start, i broken by the i-th attack.
    distance: ``(n,)`` int64, units changed; 0 if misclassified from the start, -1 if the row stands.
    x_adv: ``(n, ...)``, equal to x where the row stands; on the device of x, the others on the CPU.
    queries: ``(n, attacks)`` int64.  tried: ``(n, attacks)`` int64, the largest budget it ran with, 0 if it never did.
    seconds: of each attack.  units: of each row, d.  flags: why the figures may not be trusted, a sentence each.
    """

    ball: L0Ball
    attacks: dict[str, bool]
    budgets: tuple[int, ...]
    verdict: Tensor
    distance: Tensor
    x_adv: Tensor
    queries: Tensor
    tried: Tensor
    seconds: tuple[float, ...]
    units: int
    flags: tuple[str, ...]

    @property
    def n(self) -> int:
        return len(self.verdict)

    @property
    def clean_accuracy(self) -> Share:
        return self._share(self.verdict != 0)

    @property
    def robust_accuracy(self) -> Share:
        """Share of rows that no attack broke."""
        return self._share(self.verdict < 0)

    @property
    def decided(self) -> tuple[str | None, ...]:
        """For each row the attack that broke it; ``"clean"`` if it was misclassified from the start, None if none."""
        names = (CLEAN, *self.attacks)
        return tuple(names[i] if i >= 0 else None for i in self.verdict.tolist())

    @property
    def per_attack(self) -> dict[str, AttackRecord]:
        return {
            name: AttackRecord(
                white_box,
                int((self.tried[:, i] > 0).sum()),
                int((self.verdict == i + 1).sum()),
                self._share((self.verdict < 0) | (self.verdict > i + 1)),
                int(self.queries[:, i].sum()),
                self.seconds[i],
            )
            for i, (name, white_box) in enumerate(self.attacks.items())
        }

    @property
    def curve(self) -> tuple[CurvePoint, ...]:
        """Robust accuracy at each budget: a row falls at its distance, whatever budget the attack had."""
        return tuple(self._point(budget) for budget in self.budgets)

    def rho(self) -> Figure:
        """Median distance with its 95 % interval: misclassified counts 0, never broken counts the number of units.

        The paper's rho is that of a minimal-norm attack alone, with a budget of all units.
        """
        return median(torch.where(self.verdict < 0, self.units, self.distance))

    def rows(self, **identity: Any) -> list[Measurement]:
        """Measurements for `ell0.results.Results`; ``identity`` goes into every one."""
        identity = {**identity, "unit": self.ball.unit}
        worst = [
            Measurement.of(
                "robust_accuracy", point.robust_accuracy, attack=WORST_CASE, **identity, budget=point.budget,
                decided=point.decided, flags=self.flags,
            )
            for point in self.curve
        ]  # fmt: skip
        single = [
            Measurement.of(
                "robust_accuracy", record.robust_accuracy, attack=name, **identity, budget=self.ball.budget,
                seconds=record.seconds, beside={key: getattr(record, key) for key in _BESIDE},
            )
            for name, record in self.per_attack.items()
        ]  # fmt: skip
        return [Measurement.of("clean_accuracy", self.clean_accuracy, **identity), *worst, *single]

    def __str__(self) -> str:
        width = max(len(name) for name in ("attack", *self.attacks))
        lines = [f"clean accuracy {percent(self.clean_accuracy)}, n = {self.n}"]
        lines.append(f"{'attack':{width}}  attacked  broken  standing     queries  seconds")
        for name, record in self.per_attack.items():
            figures = f"{record.attacked:8}  {record.broken:6}  {100 * record.robust_accuracy:6.1f} %"
            lines.append(f"{name:{width}}  {figures}  {record.queries:10}  {record.seconds:7.1f}")
        for point in self.curve:
            lines.append(f"robust accuracy {percent(point.robust_accuracy)}, {point.budget} {self.ball.unit}s changed")
        return "\n".join(lines + [f"flag: {flag}" for flag in self.flags])

    def _share(self, rows: Tensor) -> Share:
        return Share(int(rows.sum()), self.n)

    def _point(self, budget: int) -> CurvePoint:
        broken = (self.verdict >= 0) & (self.distance <= budget)
        counts = torch.bincount(self.verdict[broken], minlength=len(self.attacks) + 1).tolist()
        return CurvePoint(budget, self._share(~broken), dict(zip((CLEAN, *self.attacks), counts, strict=True)))


def percent(share: Share) -> str:
    """A share in words, with its interval."""
    return f"{100 * share:.1f} % ({100 * share.low:.1f}-{100 * share.high:.1f})"
