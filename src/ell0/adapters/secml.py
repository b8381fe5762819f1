"""secml-torch: our attacks as its attacks, and its attacks inside `ell0.evaluate`."""

from __future__ import annotations

from typing import Any

import torch
from secmlt.adv.evasion.base_evasion_attack import BaseEvasionAttack
from secmlt.models.pytorch.base_pytorch_nn import BasePyTorchClassifier
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ..evaluation import Entry
from ..threat import L0Ball, Unit
from .judging import Around, away_from, configured
from .judging import theirs as judged

__all__ = ["OurSecmlAttack", "theirs"]


class OurSecmlAttack(BaseEvasionAttack):  # type: ignore[misc]
    """One of our attacks for ``attack(model, loader)``, which gives a loader of attacked rows.

    name: of ``ATTACKS`` or of the default cascade.  budget: units that may change.  lb, ub: the box of a changed value,
    as secml-torch calls it.  y_target: a label that every row shall get.  settings: of the attack.
    """

    def __init__(
        self,
        name: str,
        budget: int,
        *,
        lb: float = 0.0,
        ub: float = 1.0,
        unit: Unit = "feature",
        y_target: int | None = None,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        self.ball, self.y_target, self.seed = L0Ball(budget, unit, low=lb, high=ub), y_target, seed
        self._configured = configured(name, **settings)

    def _run(self, model: Any, samples: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        more = {}
        if self.y_target is not None:
            target = torch.full_like(labels, self.y_target)
            with torch.no_grad():
                more, labels = {"target": target}, away_from(target, model.decision_function(samples))
        key = torch.Generator().manual_seed(self.seed)
        x_adv = self._configured(
            Around(model.model, model.decision_function), samples, labels, self.ball, generator=key, **more
        ).x_adv
        return x_adv, x_adv - samples

    @classmethod
    def _trackers_allowed(cls) -> Any:
        return False


def theirs(attack: Any, *, white_box: bool = True) -> Entry:
    """An attack of secml-torch for `ell0.evaluate`: ``theirs(FMN("l0", num_steps=100, step_size=0.5))``."""

    def find(model: nn.Module, x: Tensor, y: Tensor, _: L0Ball) -> Tensor:
        loader = DataLoader(TensorDataset(x, y), batch_size=len(x))
        return torch.cat([points for points, _ in attack(BasePyTorchClassifier(model), loader)])

    return judged(find, type(attack).__qualname__, white_box)
