"""An attack inside the step: every batch is attacked with the weights of the moment."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..attacks.contract import by_unit, check_count
from ..attacks.sparse_pgd import highest, lowered
from ..attacks.surrogate import surrogate_gradients
from ..nn import folded
from ..threat import Unit, describe

Loss = Literal["trades", "adversarial"]


@dataclass(frozen=True)
class Trades:
    """An objective of `fit`: what the model says of a row is to stay the same at the worst that an attack finds.

        trades:       cross_entropy(model(x), y) + weight * KL(softmax(model(x)) || softmax(model(x_adv)))     [Zhang19]
        adversarial:  cross_entropy(model(x_adv), y)

        fit(model, data, config, objective=Trades(120, unit="pixel"))

    x_adv is made by Sparse-PGD [Zhong24] against the model in eval mode as it is before the step: of ``steps + 1``
    points, the one with the highest cross-entropy. A coin for each batch decides whether all values move or those that
    x_adv shows. It draws from torch's own generator of the device, as dropout does.

    Differs from [Zhong24]'s code: rows that are broken go on, and no scores are drawn anew.

    Args:
        budget: units that the attack changes; [Zhong24] takes six times what the model is to withstand.
        unit: what counts as a change, as for `L0Ball`.  low, high: the box of a changed unit, numbers.
        steps: of the attack, a forward and a backward each; 0: random values at random units.
        weight: of the divergence, for ``"trades"``.
        ramp: share of the epochs, in [0, 1], over which the budget rises, by whole units.
        step_size, mask_step: as for `sparse_pgd`.

    [Zhang19]: Theoretically principled trade-off between robustness and accuracy, ICML 2019.
    """

    budget: int
    unit: Unit = "feature"
    low: float = -1.0
    high: float = 1.0
    steps: int = 10
    loss: Loss = "trades"
    weight: float = 6.0
    ramp: float = 0.0
    step_size: float = 0.25
    mask_step: float = 0.25

    rounds: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_count("budget", self.budget)
        check_count("steps", self.steps, least=0)
        if self.unit not in get_args(Unit):
            raise ValueError(f'unit must be "feature" or "pixel", got {self.unit!r}')
        if self.loss not in get_args(Loss):
            raise ValueError(f'loss must be "trades" or "adversarial", got {self.loss!r}')
        for name in ("low", "high", "weight", "ramp", "step_size", "mask_step"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
                raise ValueError(f"{name} must be a finite number, got {value!r}")
        for name in ("weight", "step_size", "mask_step"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be a finite number > 0, got {getattr(self, name)!r}")
        if self.low >= self.high:
            raise ValueError(f"low must be < high, got low={self.low!r} with high={self.high!r}")
        if not 0 <= self.ramp <= 1:
            raise ValueError(f"ramp must lie in [0, 1], got {self.ramp!r}")

    def at(self, epoch: int, epochs: int) -> Self:
        """What is learnt in an epoch: the same without a ramp, by which stages would differ that do the same."""
        share = min(1.0, (epoch + 1) / (self.ramp * epochs)) if self.ramp else 1.0
        return replace(self, budget=math.ceil(self.budget * share), ramp=0.0)

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The logits ``(n, classes)`` at x_adv, and the loss, a scalar."""
        x_adv = self.attacked(model, x, y)
        if self.loss == "adversarial":
            logits = _logits(model, x_adv)
            return logits.detach(), F.cross_entropy(logits, y)
        # In one batch: batch norm then learns with the statistics of both, which are also what it will be used with.
        clean, logits = _logits(model, torch.cat((x, x_adv))).chunk(2)
        apart = F.kl_div(logits.log_softmax(1), clean.log_softmax(1), reduction="batchmean", log_target=True)
        return logits.detach(), F.cross_entropy(clean, y) + self.weight * apart

    def attacked(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """x_adv ``(n, ...)``; the model keeps its mode and statistics, its parameters get no gradient.

        Nothing here waits for the device or depends on values in its shape, so that a CUDA graph can hold it.
        """
        self._check(x)
        rows, width = by_unit(x.detach(), self.unit), self.high - self.low
        values = (rows + width * (2 * torch.rand_like(rows) - 1)).clamp(self.low, self.high)
        scores = torch.randn_like(rows[:, 0])
        every = torch.rand((), device=x.device) < 0.5  # a graph replays one path, so the coin is not for an if
        x_adv, least = rows, torch.full_like(rows[:, 0, 0], torch.inf)
        with _still(model) as victim:
            for step in range(self.steps + 1):
                shown = highest(scores, self.budget).unsqueeze(1)
                points = torch.where(shown, values, rows)
                leaf = points.reshape(x.shape).requires_grad_(step < self.steps)
                with torch.set_grad_enabled(step < self.steps):
                    odds = _odds(_logits(victim, leaf), y)
                better = odds.detach() < least
                x_adv = torch.where(better.view(-1, 1, 1), points.detach(), x_adv)
                least = torch.where(better, odds.detach(), least)
                if step == self.steps:
                    break
                slope = by_unit(torch.autograd.grad(odds.sum(), leaf)[0], self.unit).nan_to_num(0.0, 0.0, 0.0)
                scores = lowered(scores, slope, values - rows, self.mask_step)
                moved = torch.where(shown | every, slope, 0.0)
                values = (values - self.step_size * width * moved.sign()).clamp(self.low, self.high)
        return x_adv.reshape(x.shape)

    def _check(self, x: Tensor) -> None:
        if self.unit == "pixel" and x.ndim != 4:
            raise ValueError(f'unit must be "feature" unless x is (n, channels, height, width), got {describe(x)}')
        units = by_unit(x, self.unit).shape[2]
        if self.budget > units:
            raise ValueError(
                f"budget must be at most the number of units of x, got budget={self.budget} with {units} units"
            )


@contextmanager
def _still(model: nn.Module) -> Iterator[nn.Module]:
    """The model as an attack sees it: in eval mode, in as few passes as it can, truncation with a gradient."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            short = folded(model)
        with surrogate_gradients(short, "straight"):
            yield short
    finally:
        for module, training in modes:
            module.training = training


def _logits(model: nn.Module, x: Tensor) -> Tensor:
    logits: Tensor = model(x)
    return logits.float() if logits.dtype == torch.bfloat16 else logits


def _odds(logits: Tensor, y: Tensor) -> Tensor:
    """The log-odds of the labels ``(n,)``: the cross-entropy falls with them, and their slope does not vanish."""
    labels = y.unsqueeze(1)
    others = logits.scatter(1, labels, -torch.inf).logsumexp(1)
    return logits.gather(1, labels).squeeze(1) - others
