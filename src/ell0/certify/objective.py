"""Training on the bound: the loss of each epoch.

[Zhang18] Z. Zhang, M. Sabuncu, "Generalized Cross Entropy Loss for Training Deep Neural Networks with Noisy Labels",
2018.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

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

        (1 - mix) * cross_entropy(model(x), y) + mix * cross_entropy(-margins(model, x, y, budget), y)

    With p the share of y in the softmax of -margins, ``power`` > 0 replaces -log p by (1 - p^power) / power [Zhang18],
    which is at most 1 / power. A row far from its bound then has next to no gradient: it is given up, and its class may
    be with it. Where the bound fails for many rows, that can prove more of the others.

    A network that has learnt nothing yet has no bound worth learning: the budget rises from 0, by whole changes, over
    the first ``ramp`` of the epochs.

    Args:
        budget: changes that the bound allows in the end, at most what the k of the model's first layer bounds.
        mix: weight of the bound's loss in (0, 1].  ramp: in [0, 1].
        unit: what counts as a change, as for `L0Ball`.
        quick: use the quick bound of `margins`, which may be trained in bf16; the certificate afterwards is the exact
            one.
        power: 0, the cross-entropy, or from 0.001 to 1.
    """

    budget: int
    mix: float = 1.0
    ramp: float = 0.4
    unit: Unit = "feature"
    quick: bool = False
    power: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", check_count("budget", self.budget, least=0))
        if not 0 < self.mix <= 1:
            raise ValueError(f"mix must lie in (0, 1], got {self.mix!r}")
        if not 0 <= self.ramp <= 1:
            raise ValueError(f"ramp must lie in [0, 1], got {self.ramp!r}")
        if self.power and not 1e-3 <= self.power <= 1:
            raise ValueError(f"power must be 0 or lie in [0.001, 1], got {self.power!r}")
        if not isinstance(self.quick, bool):
            raise ValueError(f"quick must be True or False, got {self.quick!r}")
        replace(ANY_VALUE, unit=self.unit)  # raises if there is no such unit

    @property
    def bf16(self) -> bool:
        """Whether it may be trained in bf16. The exact bound takes differences of sums, of which bf16 leaves little."""
        return self.quick

    def at(self, epoch: int, epochs: int) -> Objective:
        """The loss of an epoch: the objective with the budget that it has then."""
        rising = self.ramp * (epochs - 1)
        budget = self.budget if epoch >= rising else math.ceil(self.budget * epoch / rising)
        return replace(self, budget=budget, ramp=0.0)

    def check(self, model: nn.Module, x: Tensor, y: Tensor) -> None:
        """Raises ValueError if the model has no bound for the budget, before anything is trained."""
        with torch.no_grad():
            self(model, x, y)

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Scores ``(n, classes)``, whose largest is y where the bound holds, and the loss, a scalar."""
        scores = -margins(model, x, y, self.budget, replace(ANY_VALUE, unit=self.unit), quick=self.quick)
        loss = self._bounded(scores, y) if self.power else F.cross_entropy(scores, y)
        if self.mix < 1:
            loss = self.mix * loss + (1 - self.mix) * F.cross_entropy(model(x), y)
        return scores, loss

    def _bounded(self, scores: Tensor, y: Tensor) -> Tensor:
        return -torch.expm1(-self.power * F.cross_entropy(scores, y, reduction="none")).mean() / self.power
