"""torchattacks: our attacks as its attacks, and its attacks inside `ell0.evaluate`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torchattacks.attack import Attack as TorchAttack

from ..evaluation import Entry
from ..threat import L0Ball, Unit
from .judging import Around, away_from, configured, ends
from .judging import theirs as judged

__all__ = ["OurTorchAttack", "theirs"]


class OurTorchAttack(TorchAttack):  # type: ignore[misc]
    """One of our attacks for ``attack(images, labels)``, images in [0, 1]; targeted modes work as in torchattacks.

    name: of ``ATTACKS`` or of the default cascade.  budget: units that may change.  settings: of the attack.
    """

    def __init__(
        self, model: nn.Module, name: str, budget: int, *, unit: Unit = "pixel", seed: int = 0, **settings: Any
    ) -> None:
        super().__init__(name, model)
        self.supported_mode = ["default", "targeted"]
        self.ball, self.seed = L0Ball(budget, unit, low=0.0, high=1.0), seed
        self._configured = configured(name, **settings)

    def forward(self, inputs: Tensor, labels: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
        inputs = inputs.clone().detach().to(self.device)
        labels = self.get_output_with_eval_nograd(inputs).argmax(1) if labels is None else labels.to(self.device)
        model = Around(self.model, self.get_logits)
        key, more = torch.Generator().manual_seed(self.seed), {}
        if self.targeted:
            target = self.get_target_label(inputs, labels)
            more, labels = {"target": target}, away_from(target, self.get_output_with_eval_nograd(inputs))
        return self._configured(model, inputs, labels, self.ball, generator=key, **more).x_adv


def theirs(make: Callable[..., Any], *, white_box: bool = False, **settings: Any) -> Entry:
    """An attack of torchattacks for `ell0.evaluate`: ``theirs(torchattacks.OnePixel, pixels=5)``.

    make: called with a model and the settings.  The attack sees images in [0, 1], whatever the box is.
    """

    def find(model: nn.Module, x: Tensor, y: Tensor, ball: L0Ball) -> Tensor:
        low, high = ends(ball)
        attack = make(Around(model, lambda u: model(low + u * (high - low))), **settings)
        points: Tensor = attack((x - low) / (high - low), y)
        return low + points * (high - low)

    return judged(find, (make.__qualname__, settings), white_box)
