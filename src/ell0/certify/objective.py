"""Training on the bound: the loss of each epoch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..common import check_count
from ..threat import Unit
from .certificates import margins
from .certifier import ANY_VALUE


@dataclass(frozen=True)
class Objective:
    """An objective of `ell0.train.fit`: the cross-entropy at the worst that ``budget`` changes, of any value, can do.

        fit(models.mlp(100, hidden=(512,)), data, config, objective=Objective(budget=8))

    A network that has learnt nothing yet has no bound worth learning: the budget rises from 0, by whole changes, over
    the first ``ramp`` of the epochs.

    Args:
        budget: changes that the bound allows in the end, at most what the k of the model's first layer bounds.
        mix: weight of the bound's loss in (0, 1]; the rest is that of the row itself.
        ramp: in [0, 1].
        unit: what counts as a change, as for `L0Ball`.
        quick: use the quick bound of `margins`. The network learns little less by it; the certificate afterwards is
            the exact one.
    """

    budget: int
    mix: float = 1.0
    ramp: float = 0.4
    unit: Unit = "feature"
    quick: bool = False

    def __post_init__(self) -> None:
        check_count("budget", self.budget)
        if not 0 < self.mix <= 1:
            raise ValueError(f"mix must lie in (0, 1], got {self.mix!r}")
        if not 0 <= self.ramp <= 1:
            raise ValueError(f"ramp must lie in [0, 1], got {self.ramp!r}")
        if self.unit not in get_args(Unit):
            raise ValueError(f'unit must be "feature" or "pixel", got {self.unit!r}')
        if not isinstance(self.quick, bool):
            raise ValueError(f"quick must be True or False, got {self.quick!r}")

    def at(self, epoch: int, epochs: int) -> ObjectiveAtEpoch:
        """What is learnt in an epoch."""
        rising = self.ramp * (epochs - 1)
        return ObjectiveAtEpoch(self, self.budget if epoch >= rising else math.ceil(self.budget * epoch / rising))

    def check(self, model: nn.Module, x: Tensor, y: Tensor) -> None:
        """Raises ValueError if the model has no bound for the budget, before anything is trained."""
        with torch.no_grad():
            self.at(1, 1)(model, x, y)


@dataclass(frozen=True)
class ObjectiveAtEpoch:
    """The loss of some epochs: an objective with the budget that it has then."""

    objective: Objective
    budget: int

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Scores ``(n, classes)``, whose largest is y where the bound holds, and the loss, a scalar.

        (1 - mix) * cross_entropy(model(x), y) + mix * cross_entropy(-margins(model, x, y, budget), y)
        """
        its = self.objective
        ball = replace(ANY_VALUE, unit=its.unit)
        scores = -margins(model, x, y, self.budget, ball, quick=its.quick)
        loss = F.cross_entropy(scores, y)
        if its.mix < 1:
            loss = its.mix * loss + (1 - its.mix) * F.cross_entropy(model(x), y)
        return scores, loss
