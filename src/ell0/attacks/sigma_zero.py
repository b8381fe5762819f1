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
from .surrogate import Surrogate

__all__ = ["sigma_zero"]


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
    lr: float = 1.0,
    sigma: float = 1e-3,
    threshold: float = 0.3,
    threshold_step: float = 0.01,
    surrogate: Surrogate | None = "straight",
    minimise: bool = False,
    generator: torch.Generator | None = None,
    rows: Tensor | None = None,
    target: Tensor | None = None,
    progress: Progress = silent,
) -> AttackResult:
    """sigma-zero [Cina25, algorithm 1]: a white-box attack for few changed units.

    Adam walks down max(margin, 0) + mean over units of s / (s + sigma), where s is the squared L2 change of a unit in
    widths of the box, with the gradient of a row scaled to a largest entry of 1 and a learning rate that falls from
    ``lr`` to a tenth along a cosine. After each step changes below a threshold are undone; the threshold rises by
    ``threshold_step`` times the learning rate while the model errs, and falls while it does not. In the end the
    changes of the nearest point move to the ends of the box, and units go back to their clean values while the model
    still errs.

    Args:
        model: gives logits for x.  x: ``(n, ...)``.  y: ``(n,)``, the true labels.  ball: with a finite box.
        steps: a forward and a backward each.
        sigma, threshold, threshold_step: in widths of the box; a pixel's change is its largest number's.
        surrogate: the gradient through truncated layers, see `surrogate_gradients`.
        minimise: go on for the smallest distance; otherwise a row is done as soon as it is broken within the budget.
        generator, rows, target, progress: as in `sparse_rs`; it draws nothing.

    Differs from [Cina25]: pixels, targets, any box, a check of the last step, and the clean-up in the end.
    """
    check_count("steps", steps)
    for name, value in (("lr", lr), ("sigma", sigma)):
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be a number > 0, got {value!r}")
    for name, value in (("threshold", threshold), ("threshold_step", threshold_step)):
        if not 0 <= value <= 1:
            raise ValueError(f"{name} must lie in [0, 1], got {value!r}")
    with Victim(
        model, x, y, ball, generator=generator, rows=rows, target=target, progress=progress, minimal=True
    ) as victim:
        if ball.budget:
            goal = 1 if minimise else ball.budget
            descent = Descent(victim, goal, sigma, threshold, surrogate)
            for step in victim.while_standing(range(steps), "sigma_zero", goal):
                rate, after = (lr * (0.55 + 0.45 * math.cos(math.pi * i / steps)) for i in (step, step + 1))
                descent.step(rate, threshold_step * after)
            descent.clean_up()
        return victim.result()


def sparsity_slope(change: Tensor, sigma: float) -> Tensor:
    """Gradient of the mean over units of s / (s + sigma), s the squared L2 change; change: ``(m, channels, units)``."""
    square = change.square().sum(1, keepdim=True)
    return 2 * sigma * change / (square + sigma).square() / change.shape[2]


class Descent:
    """The state of the descent: for each open row its change in widths of the box, Adam's moments and the threshold."""

    def __init__(self, victim: Victim, goal: int, sigma: float, threshold: float, surrogate: Surrogate | None) -> None:
        self._victim, self._goal, self._sigma, self._surrogate = victim, goal, sigma, surrogate
        self._at = at = victim.above(goal)
        self._clean, self._low, self._high, mutable = (
            victim.units(t) for t in (victim.x, victim.low, victim.high, victim.mutable)
        )
        # Half precision is too coarse for Adam's sums of squares.
        fine = torch.promote_types(victim.x.dtype, torch.float32)
        # x may lie outside its box. A width that includes x is 0 only where nothing can change.
        low, high = torch.minimum(self._low, self._clean).to(fine), torch.maximum(self._high, self._clean).to(fine)
        self._width = torch.where(mutable, high - low, 0.0)
        self._least, self._most = ((end - self._clean) / (high - low) for end in (low, high))
        self._nearest, self._fewest = self._clean.clone(), torch.full_like(victim.distance, self._clean.shape[2] + 1)
        self._change = torch.zeros_like(self._width[at])
        self._first, self._second = torch.zeros_like(self._change), torch.zeros_like(self._change)
        self._threshold = torch.full_like(self._change[:, :1, :1], threshold)
        self._steps = 0

    def step(self, rate: float, threshold_step: float) -> None:
        """One forward and one backward for every open row."""
        self._drop_done()
        points = self._points()
        margin, slope = self._victim.slopes(
            self._victim.points(points), self._at, lambda _, margin: margin.clamp(min=0), self._surrogate
        )
        self._keep(points, margin < 0)
        slope = self._victim.units(slope) * self._width[self._at]
        self._descend(slope + sparsity_slope(self._change, self._sigma), rate)
        rises = torch.where(margin < 0, threshold_step, -threshold_step).to(slope).view(-1, 1, 1)
        self._threshold = (self._threshold + rises).clamp(0, 1)
        small = self._change.abs().amax(1, keepdim=True) < self._threshold
        self._change = torch.where(small, 0.0, self._change)

    def _descend(self, slope: Tensor, rate: float) -> None:
        """A step of Adam, with the scaled gradient; the change stays in the box."""
        at = self._at
        slope = slope * (self._width[at] > 0)
        slope = slope / slope.abs().amax((1, 2), keepdim=True).clamp(min=1e-12)
        self._steps += 1
        self._first = 0.9 * self._first + 0.1 * slope
        self._second = 0.999 * self._second + 0.001 * slope.square()
        first, second = self._first / (1 - 0.9**self._steps), self._second / (1 - 0.999**self._steps)
        change = self._change - rate * first / (second.sqrt() + 1e-8)
        self._change = torch.where(self._width[at] > 0, change.clamp(self._least[at], self._most[at]), 0.0)

    def _points(self) -> Tensor:
        at = self._at
        moved = (self._clean[at] + self._change * self._width[at]).to(self._clean)
        moved = moved.clamp(self._low[at], self._high[at])
        moves = (self._change != 0).any(1, keepdim=True) & (self._width[at] > 0)
        return torch.where(moves, moved, self._clean[at])

    def _keep(self, points: Tensor, errs: Tensor) -> None:
        """Keeps the nearest point of each row, also beyond the budget: the clean-up may bring it inside."""
        count = (points != self._clean[self._at]).any(1).sum(1)
        nearer = errs & (count < self._fewest[self._at])
        self._fewest[self._at[nearer]] = count[nearer]
        self._nearest[self._at[nearer]] = points[nearer]

    def clean_up(self) -> None:
        """Queries the last step; then takes units of the nearest points back, those that matter least first."""
        self._drop_done()
        if not len(self._at):
            return
        victim, points = self._victim, self._points()
        self._keep(points, victim.errs(victim.points(points), self._at))
        at = victim.above(self._goal)
        at = at[self._fewest[at] <= self._clean.shape[2]]
        if len(at):
            points, slope = self._push(at)
            gain = (slope * (self._clean[at] - points)).sum(1)
            reset_units(victim, at, points, gain.argsort(dim=1), "sigma_zero", self._goal)

    def _push(self, at: Tensor) -> tuple[Tensor, Tensor]:
        """The nearest points with the changed units at that end of the box that the slope asks for, and the slope.

        Where the model does not err there, the nearest points as they are.
        """
        victim, points = self._victim, self._nearest[at]
        slope = victim.units(victim.slopes(victim.points(points), at, surrogate=self._surrogate)[1])
        moves = (points != self._clean[at]).any(1, keepdim=True) & (self._width[at] > 0) & (slope != 0)
        pushed = torch.where(moves, torch.where(slope > 0, self._low[at], self._high[at]), points)
        errs = victim.errs(victim.points(pushed), at)
        return torch.where(errs.view(-1, 1, 1), pushed, points), slope

    def _drop_done(self) -> None:
        distance = self._victim.distance[self._at]
        stays = (distance < 0) | (distance > self._goal)
        if stays.all():
            return
        self._at, self._change, self._threshold = self._at[stays], self._change[stays], self._threshold[stays]
        self._first, self._second = self._first[stays], self._second[stays]
