"""sigma-zero [Cina25]: gradient descent on the margin and on a smooth count of the changed units."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..common import Progress, check_count, silent
from ..threat import L0Ball
from .contract import AttackResult, Model, Victim
from .declare import attack
from .pointwise import reset_units

__all__ = ["sigma_zero"]

# The settings of [Cina25]; sigma and the thresholds in widths of the box.
_RATE = 1.0
_SIGMA = 1e-3
_THRESHOLD = 0.3
_THRESHOLD_STEP = 0.01


@attack(
    white_box=True, gradients_only=True, random=False, cascade=2,
    cheap={"steps": 8}, strong={"steps": 200, "minimise": True},
)  # fmt: skip
def sigma_zero(
    model: Model,
    x: Tensor,
    y: Tensor,
    ball: L0Ball,
    *,
    steps: int = 100,
    minimise: bool | None = None,
    generator: torch.Generator | None = None,
    rows: Tensor | None = None,
    target: Tensor | None = None,
    progress: Progress = silent,
) -> AttackResult:
    """sigma-zero [Cina25, algorithm 1]: a white-box attack for few changed units.

    Adam walks down max(margin, 0) + mean over units of s / (s + sigma), where s is the squared L2 change of a unit in
    widths of the box and sigma is 0.001. The gradient of a row is scaled to a largest entry of 1, straight through
    truncated layers; the learning rate falls from 1 to a tenth along a cosine. After each step changes below a
    threshold are undone (a pixel's change is its largest number's). The threshold starts at 0.3, rises by 0.01 times
    the learning rate while the model errs, and falls while it does not. In the end the changes of the nearest point
    move to the ends of the box, and units go back to their clean values while the model still errs.

    Args:
        model, x, y, ball, rows, target, progress: as in `sparse_rs`.  generator: not used, it draws nothing.
        steps: a forward and a backward each.
        minimise: go on for the smallest distance; otherwise a row is done as soon as it is broken within the budget.
            Default: only if the budget is all units, where every break would do.

    Differs from [Cina25]: pixels, targets, any box, a check of the last step, and the clean-up in the end.
    """
    check_count("steps", steps)
    with Victim(
        model, x, y, ball, generator=generator, rows=rows, target=target, progress=progress, minimal=True
    ) as victim:
        if ball.budget:
            whole = ball.budget == victim.units(victim.x).shape[2]
            descent = Descent(victim, goal=1 if (whole if minimise is None else minimise) else ball.budget)
            for step in victim.while_standing(range(steps), "sigma_zero", descent.goal):
                descent.step(*(_RATE * (0.55 + 0.45 * math.cos(math.pi * i / steps)) for i in (step, step + 1)))
            descent.clean_up()
        return victim.result()


def _positive(_logits: Tensor, margin: Tensor) -> Tensor:
    return margin.clamp(min=0)


def sparsity_slope(change: Tensor, sigma: float = _SIGMA) -> Tensor:
    """Gradient of the mean over units of s / (s + sigma), s the squared L2 change; change: ``(m, channels, units)``."""
    square = change.square().sum(1, keepdim=True)
    return 2 * sigma * change / (square + sigma).square() / change.shape[2]


class Descent:
    """The state of the descent: for each open row its change in widths of the box, Adam's moments and the threshold.

    A row is open until it is broken within ``goal`` units.
    """

    def __init__(self, victim: Victim, goal: int) -> None:
        self.victim, self.goal = victim, goal
        self.at = at = victim.above(goal)
        self.clean, self.low, self.high, mutable = (
            victim.units(t) for t in (victim.x, victim.low, victim.high, victim.mutable)
        )
        # Half precision is too coarse for Adam's sums of squares.
        fine = torch.promote_types(victim.x.dtype, torch.float32)
        # x may lie outside its box. A width that includes x is 0 only where nothing can change.
        low, high = torch.minimum(self.low, self.clean).to(fine), torch.maximum(self.high, self.clean).to(fine)
        self.width = torch.where(mutable, high - low, 0.0)
        self.least, self.most = ((end - self.clean) / (high - low) for end in (low, high))
        # The nearest points on which the model errs, also beyond the budget: the clean-up may bring them inside.
        self.nearest, self.fewest = self.clean.clone(), torch.full_like(victim.distance, self.clean.shape[2] + 1)
        self.change = self.first = self.second = torch.zeros_like(self.width[at])
        self.threshold = torch.full_like(self.change[:, :1, :1], _THRESHOLD)
        self.steps = 0

    def step(self, rate: float, next_rate: float) -> None:
        """One forward and one backward for every open row."""
        self._drop_done()
        at, points = self.at, self.points()
        margin, slope, _ = self.victim.slopes(self.victim.points(points), at, _positive, straight=True)
        self._keep(points, margin < 0)
        slope = (self.victim.units(slope) * self.width[at] + sparsity_slope(self.change)) * (self.width[at] > 0)
        slope = slope / slope.abs().amax((1, 2), keepdim=True).clamp(min=1e-12)
        self.steps += 1
        self.first = 0.9 * self.first + 0.1 * slope
        self.second = 0.999 * self.second + 0.001 * slope.square()
        first, second = self.first / (1 - 0.9**self.steps), self.second / (1 - 0.999**self.steps)
        change = self.change - rate * first / (second.sqrt() + 1e-8)
        change = torch.where(self.width[at] > 0, change.clamp(self.least[at], self.most[at]), 0.0)
        rise = _THRESHOLD_STEP * next_rate
        rises = torch.where(margin < 0, rise, -rise).to(slope).view(-1, 1, 1)
        self.threshold = (self.threshold + rises).clamp(0, 1)
        self.change = torch.where(change.abs().amax(1, keepdim=True) < self.threshold, 0.0, change)

    def points(self) -> Tensor:
        """The open rows with their changes: ``(m, channels, units)``."""
        at = self.at
        moved = (self.clean[at] + self.change * self.width[at]).to(self.clean)
        moved = moved.clamp(self.low[at], self.high[at])
        moves = (self.change != 0).any(1, keepdim=True) & (self.width[at] > 0)
        return torch.where(moves, moved, self.clean[at])

    def clean_up(self) -> None:
        """Queries the last step; then takes units of the nearest points back, those that matter least first."""
        self._drop_done()
        if not len(self.at):
            return
        victim, points = self.victim, self.points()
        self._keep(points, victim.errs(victim.points(points), self.at))
        at = victim.above(self.goal)
        at = at[self.fewest[at] <= self.clean.shape[2]]
        if not len(at):
            return
        # Changed units go to that end of the box which the slope asks for, where the model still errs there.
        points = self.nearest[at]
        slope = victim.units(victim.slopes(victim.points(points), at, straight=True)[1])
        moves = (points != self.clean[at]).any(1, keepdim=True) & (self.width[at] > 0) & (slope != 0)
        pushed = torch.where(moves, torch.where(slope > 0, self.low[at], self.high[at]), points)
        points = torch.where(victim.errs(victim.points(pushed), at).view(-1, 1, 1), pushed, points)
        gain = (slope * (self.clean[at] - points)).sum(1)
        reset_units(victim, at, points, gain.argsort(dim=1), "sigma_zero", self.goal)

    def _keep(self, points: Tensor, errs: Tensor) -> None:
        count = (points != self.clean[self.at]).any(1).sum(1)
        nearer = errs & (count < self.fewest[self.at])
        self.fewest[self.at[nearer]] = count[nearer]
        self.nearest[self.at[nearer]] = points[nearer]

    def _drop_done(self) -> None:
        stays = torch.isin(self.at, self.victim.above(self.goal))
        if not stays.all():
            self.at, self.change, self.threshold = self.at[stays], self.change[stays], self.threshold[stays]
            self.first, self.second = self.first[stays], self.second[stays]
