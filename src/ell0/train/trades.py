"""TRADES: every batch is attacked inside its step, with the current weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, Self, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..attacks.contract import by_unit
from ..attacks.sparse_pgd import STEP_SIZE, highest, lowered
from ..attacks.surrogate import surrogate_gradients
from ..common import check_count
from ..nn import folded
from ..threat import L0Ball, Unit, describe
from .stepper import float_logits, restored

TradesLoss = Literal["trades", "adversarial"]


@dataclass(frozen=True)
class Trades:
    """An objective of `fit`: the model's answer is to stay the same at the worst point that an attack finds.

        trades:       cross_entropy(model(x), y) + weight * KL(softmax(model(x)) || softmax(model(x_adv)))     [Zhang19]
        adversarial:  cross_entropy(model(x_adv), y)

    Sparse-PGD [Zhong24] makes x_adv against the model in eval mode before the step: of ``steps + 1`` points, the one
    with the highest cross-entropy. For each batch, with chance 1/2, a step moves all values, else those in x_adv.
    Draws come from torch's generator of the device, like those of dropout.
    Differs from [Zhong24]'s code: broken rows go on, and scores are not redrawn.

    Args:
        budget: units that the attack changes; [Zhong24] takes six times what the model is to withstand.
        unit: as for `L0Ball`.  low, high: the box of a changed unit, numbers.
        steps: of the attack, a forward and a backward pass each; 0: random values at random units.
        weight: of the divergence, for ``"trades"``.

    [Zhang19]: Theoretically principled trade-off between robustness and accuracy, ICML 2019.
    """

    budget: int
    unit: Unit = "feature"
    low: float = None  # type: ignore[assignment]  # L0Ball asks for them
    high: float = None  # type: ignore[assignment]
    steps: int = 10
    loss: TradesLoss = "trades"
    weight: float = 6.0

    bf16: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", check_count("budget", self.budget))
        object.__setattr__(self, "steps", check_count("steps", self.steps, least=0))
        L0Ball(self.budget, self.unit, self.low, self.high)  # raises ValueError if one of them is wrong
        if not (math.isfinite(self.low) and math.isfinite(self.high)):
            raise ValueError(f"low and high must be finite, got low={self.low!r} with high={self.high!r}")
        if self.loss not in get_args(TradesLoss):
            raise ValueError(f'loss must be "trades" or "adversarial", got {self.loss!r}')
        if not isinstance(self.weight, int | float) or not 0 < self.weight < math.inf:
            raise ValueError(f"weight must be a finite number > 0, got {self.weight!r}")

    def at(self, epoch: int, epochs: int) -> Self:  # noqa: ARG002
        """The same loss in every epoch."""
        return self

    def check(self, model: nn.Module, x: Tensor, y: Tensor) -> None:  # noqa: ARG002
        """Raises ValueError if rows like these cannot be attacked."""
        if self.unit == "pixel" and x.ndim != 4:
            raise ValueError(f'unit must be "feature" unless x is (n, channels, height, width), got {describe(x)}')
        if self.budget > (units := by_unit(x, self.unit).shape[2]):
            raise ValueError(f"budget must be at most the {units} units of x, got {self.budget}")

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The logits ``(n, classes)`` at x_adv, and the loss, a scalar."""
        x_adv = self.attacked(model, x, y)
        if self.loss == "adversarial":
            logits = float_logits(model, x_adv)
            return logits.detach(), F.cross_entropy(logits, y)
        # In one batch: batch norm then learns from the statistics of both, which it will also meet in use.
        clean, logits = float_logits(model, torch.cat((x, x_adv))).chunk(2)
        apart = F.kl_div(logits.log_softmax(1), clean.log_softmax(1), reduction="batchmean", log_target=True)
        return logits.detach(), F.cross_entropy(clean, y) + self.weight * apart

    def attacked(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """x_adv ``(n, ...)``; the model keeps its mode and statistics, its parameters get no gradient.

        Nothing waits for the device and no shape depends on values, so that a CUDA graph can hold it.
        """
        self.check(model, x, y)
        rows, width = by_unit(x.detach(), self.unit), self.high - self.low
        values = (rows + width * (2 * torch.rand_like(rows) - 1)).clamp(self.low, self.high)
        scores = torch.randn_like(rows[:, 0])
        every = torch.rand((), device=x.device) < 0.5  # a graph replays one path, so the coin is not for an if
        x_adv, least = rows, torch.full_like(rows[:, 0, 0], torch.inf)
        with restored(model):
            model.eval()
            with torch.no_grad():
                victim = folded(model)
            with surrogate_gradients(victim):
                for step in range(self.steps + 1):
                    shown = highest(scores, self.budget).unsqueeze(1)
                    points = torch.where(shown, values, rows)
                    leaf = points.reshape(x.shape).requires_grad_(step < self.steps)
                    with torch.set_grad_enabled(step < self.steps):
                        odds = _log_odds(float_logits(victim, leaf), y)
                    better = odds.detach() < least
                    x_adv = torch.where(better.view(-1, 1, 1), points.detach(), x_adv)
                    least = torch.where(better, odds.detach(), least)
                    if step == self.steps:
                        break
                    slope = by_unit(torch.autograd.grad(odds.sum(), leaf)[0], self.unit).nan_to_num(0.0, 0.0, 0.0)
                    scores = lowered(scores, slope, values - rows)
                    moved = torch.where(shown | every, slope, 0.0)
                    values = (values - STEP_SIZE * width * moved.sign()).clamp(self.low, self.high)
        return x_adv.reshape(x.shape)


def _log_odds(logits: Tensor, y: Tensor) -> Tensor:
    """Of the labels, ``(n,)``: cross-entropy falls as they rise, and their gradient does not vanish."""
    labels = y.unsqueeze(1)
    return logits.gather(1, labels).squeeze(1) - logits.scatter(1, labels, -torch.inf).logsumexp(1)
