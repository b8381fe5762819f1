"""What an evaluation found, and its figures."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..results import CLEAN, WORST_CASE, Figure, Measurement, Share, median
from ..threat import L0Ball


@dataclass(frozen=True, eq=False, repr=False)
class Evaluation:
    """What `evaluate` found for n rows.

    attacks: name -> whether it is white-box, in the order they ran.  budgets: of the curve; the last is the ball's.
    verdict: ``(n,)`` int64; -1 the row stands, 0 misclassified from the start, i broken by the i-th attack.
    distance: ``(n,)`` int64, units changed; 0 if misclassified from the start, -1 if the row stands.
    x_adv: ``(n, ...)``, equal to x where the row stands; on the device of x, the others on the CPU.
    late: ``(n,)`` bool; the row fell in the last tenth of the queries of its attack.
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
    late: Tensor
    seconds: tuple[float, ...]
    units: int
    flags: tuple[str, ...]

    @property
    def clean_accuracy(self) -> Share:
        return Share.of(self.verdict != 0)

    @property
    def robust_accuracy(self) -> Share:
        """Share of rows that no attack broke."""
        return Share.of(self.verdict < 0)

    @property
    def decided(self) -> tuple[str | None, ...]:
        """For each row the attack that broke it; ``"clean"`` if it was misclassified from the start, None if none."""
        names = (CLEAN, *self.attacks)
        return tuple(names[i] if i >= 0 else None for i in self.verdict.tolist())

    @property
    def curve(self) -> list[Measurement]:
        """Robust accuracy at each budget: a row falls at its distance, whatever budget the attack had."""
        return self.rows()[1 : 1 + len(self.budgets)]

    @property
    def per_attack(self) -> dict[str, Measurement]:
        """For each attack the share of all rows that neither it nor one before it broke.

        beside: white_box; attacked, broken: rows it was given, all standing then, and rows it broke; queries in all;
        late: rows that it broke in the last tenth of its queries.
        """
        return dict(zip(self.attacks, self.rows()[1 + len(self.budgets) :], strict=True))

    def rho(self) -> Figure:
        """Median distance with its 95 % interval: misclassified counts 0, never broken counts the number of units.

        The paper's rho is that of a minimal-norm attack alone, with a budget of all units.
        """
        return median(torch.where(self.verdict < 0, self.units, self.distance))

    def rows(self, **identity: Any) -> list[Measurement]:
        """Clean accuracy, `curve` and `per_attack`, for `ell0.results.Results`.

        Each has ``identity``, the unit and the box (`L0Ball.entries`).
        """
        identity = {**identity, "unit": self.ball.unit, **self.ball.entries}
        rows = [Measurement.of("clean_accuracy", self.clean_accuracy, **identity)]
        for budget in self.budgets:
            broken = (self.verdict >= 0) & (self.distance <= budget)
            counts = torch.bincount(self.verdict[broken], minlength=len(self.attacks) + 1).tolist()
            decided = dict(zip((CLEAN, *self.attacks), counts, strict=True))
            given = {"attack": WORST_CASE, **identity, "budget": budget, "decided": decided, "flags": self.flags}
            rows.append(Measurement.of("robust_accuracy", Share.of(~broken), **given))
        for i, (name, white_box) in enumerate(self.attacks.items()):
            own = self.verdict == i + 1
            counts = [(self.tried[:, i] > 0).sum(), own.sum(), self.queries[:, i].sum(), (own & self.late).sum()]
            beside = dict(zip(("attacked", "broken", "queries", "late"), map(int, counts), strict=True))
            given = {"attack": name, **identity, "budget": self.ball.budget, "seconds": self.seconds[i]}
            share = Share.of((self.verdict < 0) | (self.verdict > i + 1))
            rows.append(Measurement.of("robust_accuracy", share, **given, beside={"white_box": white_box, **beside}))
        return rows

    def __str__(self) -> str:
        width = max(len(name) for name in ("attack", *self.attacks))
        lines = [f"clean accuracy {percent(self.clean_accuracy)}, n = {len(self.verdict)}"]
        lines.append(f"{'attack':{width}}  attacked  broken  standing     queries  seconds")
        for name, row in self.per_attack.items():
            figures = f"{row.beside['attacked']:8}  {row.beside['broken']:6}  {100 * row.value:6.1f} %"
            lines.append(f"{name:{width}}  {figures}  {row.beside['queries']:10}  {row.seconds:7.1f}")
        for row in self.curve:
            share = percent(Share(round(row.value * len(self.verdict)), len(self.verdict)))
            lines.append(f"robust accuracy {share}, {replace(self.ball, budget=row['budget'])}")
        return "\n".join(lines + [f"flag: {flag}" for flag in self.flags])

    __repr__ = __str__


def percent(share: Share) -> str:
    """A share in words, with its interval."""
    return f"{100 * share:.1f} % ({100 * share.low:.1f}-{100 * share.high:.1f})"
