"""What an evaluation found, and its figures."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from ..results import Row
from ..threat import L0Ball

CLEAN = "clean"
"""What decided a row that is misclassified from the start."""


class Share(float):
    """A share of n rows, with its 95 % Wilson interval, ``low`` to ``high``."""

    n: int
    low: float
    high: float

    def __new__(cls, count: int, n: int) -> Self:
        self = super().__new__(cls, count / n)
        z = statistics.NormalDist().inv_cdf(0.975)
        centre = (self + z**2 / (2 * n)) / (1 + z**2 / n)
        half = z / (1 + z**2 / n) * math.sqrt(self * (1 - self) / n + z**2 / (4 * n**2))
        self.n = n
        # The ends are exactly 0 and 1 there, but for rounding.
        self.low, self.high = 0.0 if count == 0 else centre - half, 1.0 if count == n else centre + half
        return self

    def __getnewargs__(self) -> tuple[int, int]:  # type: ignore[override]  # what __new__ takes, for copies
        return round(self * self.n), self.n

    def record(self) -> Row:
        """As entries of a row of results."""
        return {"value": float(self), "n": self.n, "low": self.low, "high": self.high}


def median_record(counts: Tensor) -> Row:
    """The median of ``(n,)`` as entries of a row of results, with a 95 % interval from their order alone.

    The numbers of those below and above the median are binomial(n, 1/2), so it lies between the j-th least and the
    j-th largest, but for a chance of 2 P(B < j).
    """
    counts, n = counts.sort().values, len(counts)
    j, ways, chance = 0, 1, 1  # of the 2**n outcomes, those with B = j and those with B <= j
    while 40 * chance <= 2**n:
        j += 1
        ways = ways * (n - j + 1) // j
        chance += ways
    low, high = counts[max(j, 1) - 1], counts[n - max(j, 1)]  # with few rows no j does, and it is the whole range
    return {"value": float(statistics.median(counts.tolist())), "n": n, "low": float(low), "high": float(high)}


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
class Point:
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
    def curve(self) -> tuple[Point, ...]:
        """Robust accuracy at each budget: a row falls at its distance, whatever budget the attack had."""
        return tuple(self._point(budget) for budget in self.budgets)

    def rho(self) -> float:
        """Median distance: misclassified counts 0, never broken counts the number of units.

        The paper's rho is that of a minimal-norm attack alone, with a budget of all units.
        """
        return float(statistics.median(self._distances.tolist()))

    def median_record(self) -> Row:
        """Rho as entries of a row, with its 95 % interval."""
        return median_record(self._distances)

    @property
    def _distances(self) -> Tensor:
        return torch.where(self.verdict < 0, self.units, self.distance)

    def rows(self, **what: Any) -> list[Row]:
        """Flat records for `ell0.results.Results`, one figure each; ``what`` goes into every one."""
        what = {**what, "unit": self.ball.unit}
        flags = "; ".join(self.flags)
        worst = [
            {"what": "robust_accuracy", "attack": "worst case", **what, "budget": point.budget, "flags": flags}
            | {f"decided by {name}": count for name, count in point.decided.items()}
            | point.robust_accuracy.record()
            for point in self.curve
        ]
        single = [
            {"what": "robust_accuracy", "attack": name, **what, "budget": self.ball.budget}
            | {key: value for key, value in vars(record).items() if key != "robust_accuracy"}
            | record.robust_accuracy.record()
            for name, record in self.per_attack.items()
        ]
        return [{"what": "clean_accuracy", **what} | self.clean_accuracy.record(), *worst, *single]

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

    def _point(self, budget: int) -> Point:
        broken = (self.verdict >= 0) & (self.distance <= budget)
        counts = torch.bincount(self.verdict[broken], minlength=len(self.attacks) + 1).tolist()
        return Point(budget, self._share(~broken), dict(zip((CLEAN, *self.attacks), counts, strict=True)))


def percent(share: Share) -> str:
    """A share in words, with its interval."""
    return f"{100 * share:.1f} % ({100 * share.low:.1f}-{100 * share.high:.1f})"
