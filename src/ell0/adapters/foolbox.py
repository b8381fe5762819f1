"""foolbox: our attacks as its attacks, and its attacks inside `ell0.evaluate`."""

from __future__ import annotations

from typing import Any

import eagerpy as ep
import foolbox
import torch
from foolbox.attacks.base import FixedEpsilonAttack
from foolbox.criteria import TargetedMisclassification
from foolbox.distances import Distance
from torch import Tensor, nn

from ..evaluation import Entry
from ..threat import L0Ball, Unit
from .judging import away_from, configured, ends
from .judging import theirs as judged

__all__ = ["OurFoolboxAttack", "theirs"]


def theirs(attack: Any, *, white_box: bool = False) -> Entry:
    """An attack of foolbox for `ell0.evaluate`: one with a fixed epsilon gets the budget, any other its own minimum."""

    def find(model: nn.Module, x: Tensor, y: Tensor, ball: L0Ball) -> Tensor:
        epsilon = float(ball.budget) if isinstance(attack, FixedEpsilonAttack) else None
        fmodel = foolbox.PyTorchModel(model, bounds=ends(ball), device=x.device)
        points: Tensor = attack(fmodel, x, y, epsilons=epsilon)[0]
        return points

    return judged(find, attack, white_box)


class OurFoolboxAttack(FixedEpsilonAttack):  # type: ignore[misc]
    """One of our attacks for ``attack(fmodel, images, labels, epsilons=[1, 5])``; an epsilon is a budget.

    The box is that of the model's bounds. Models of foolbox hide their layers: `adaptive` goes by the gradient alone.
    name: of ``ATTACKS`` or of the default cascade.  settings: of the attack.
    """

    def __init__(self, name: str, *, unit: Unit = "feature", seed: int = 0, **settings: Any) -> None:
        self.name, self.unit, self.seed, self.settings = name, unit, seed, settings
        self._attack = configured(name, **settings)

    @property
    def distance(self) -> UnitCount:
        return UnitCount(self.unit)

    def run(self, model: Any, inputs: Any, criterion: Any, *, epsilon: float, **_: Any) -> Any:
        x, restore = ep.astensor_(inputs)
        targeted = isinstance(criterion, TargetedMisclassification)
        labels = (criterion.target_classes if targeted else criterion.labels).raw
        with torch.no_grad():
            y = away_from(labels, model(x.raw)) if targeted else labels
        ball = L0Ball(int(epsilon), self.unit, low=model.bounds.lower, high=model.bounds.upper)
        key = torch.Generator().manual_seed(self.seed)
        result = self._attack(model, x.raw, y, ball, generator=key, **({"target": labels} if targeted else {}))
        return restore(ep.astensor(result.x_adv))


class UnitCount(Distance):  # type: ignore[misc]
    """The number of changed units."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit

    def __call__(self, reference: Any, perturbed: Any) -> Any:
        (x, x_adv), restore = ep.astensors_(reference, perturbed)
        return restore(ep.astensor(self._ball(0).count(x.raw, x_adv.raw)))

    def clip_perturbation(self, references: Any, perturbed: Any, epsilon: float) -> Any:
        (x, x_adv), restore = ep.astensors_(references, perturbed)
        return restore(ep.astensor(self._ball(int(epsilon)).project(x.raw, x_adv.raw)))

    def _ball(self, budget: int) -> L0Ball:
        return L0Ball(budget, self.unit, low=-torch.inf, high=torch.inf)
