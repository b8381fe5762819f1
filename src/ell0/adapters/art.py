"""ART, the Adversarial Robustness Toolbox: our attacks as its attacks, and its attacks inside `ell0.evaluate`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from art.attacks.attack import EvasionAttack
from art.estimators.classification import PyTorchClassifier
from art.estimators.classification.classifier import ClassifierMixin
from torch import Tensor, nn

from ..evaluation import Entry
from ..threat import L0Ball, Unit
from .judging import Around, Counted, configured, ends
from .judging import theirs as judged

__all__ = ["OurArtAttack", "theirs"]


class OurArtAttack(EvasionAttack):  # type: ignore[misc]
    """One of our attacks for ``attack.generate(x, y)``, within the ``clip_values`` of the classifier.

    A `PyTorchClassifier` gives gradients, unless its preprocessing is a NumPy function; any other is asked by
    ``predict`` alone.
    name: of ``ATTACKS`` or of the default cascade.  budget: units that may change.  settings: of the attack.
    """

    _estimator_requirements = (ClassifierMixin,)

    def __init__(
        self, classifier: Any, name: str, budget: int, *, unit: Unit = "pixel", seed: int = 0, **settings: Any
    ) -> None:
        super().__init__(estimator=classifier)
        if classifier.clip_values is None:
            raise ValueError("classifier must have clip_values, which are the box of the attack, got None")
        self.budget, self.unit, self.seed = budget, unit, seed
        self._configured = configured(name, **settings)

    def generate(self, x: Any, y: Any = None, **_: Any) -> Any:
        model = self._model()
        rows = torch.from_numpy(np.asarray(x, np.float32)).to(getattr(self.estimator, "device", "cpu"))
        labels = self.estimator.predict(x) if y is None else np.asarray(y)
        labels = labels.argmax(1) if labels.ndim == 2 else labels
        low, high = (torch.as_tensor(end).to(rows) for end in self.estimator.clip_values)
        ball = L0Ball(
            self.budget, self.unit, low=low if low.ndim else low.item(), high=high if high.ndim else high.item()
        )
        key = torch.Generator().manual_seed(self.seed)
        result = self._configured(model, rows, torch.from_numpy(labels).long().to(rows.device), ball, generator=key)
        return result.x_adv.cpu().numpy()

    def _model(self) -> Callable[[Tensor], Tensor]:
        estimator = self.estimator
        steps = [step for step in estimator.preprocessing_operations if step.apply_predict]
        network = getattr(estimator, "model", None)
        if not isinstance(network, nn.Module) or not all(_differentiable(step) for step in steps):
            return lambda x: torch.from_numpy(estimator.predict(x.detach().cpu().numpy())).to(x)

        def through(x: Tensor) -> Any:
            for step in steps:
                x = step.forward(x)[0] if isinstance(step, nn.Module) else _standardised(step, x)
            return network(x)

        return Around(network, through)


def _differentiable(step: Any) -> bool:
    return isinstance(step, nn.Module) or (hasattr(step, "mean") and hasattr(step, "std"))


def _standardised(step: Any, x: Tensor) -> Tensor:
    """What ART makes of ``preprocessing=(mean, std)``, numbers or one for each channel."""
    mean, std = (torch.as_tensor(part).to(x) for part in (step.mean, step.std))
    shape = (-1, *[1] * (x.ndim - 2))
    return (x - mean.view(shape)) / std.view(shape)


def theirs(make: Callable[..., Any], *, white_box: bool = False, labels: bool = True, **settings: Any) -> Entry:
    """An attack of ART for `ell0.evaluate`: ``theirs(PixelAttack, th=5)``.

    make: called with a classifier and the settings.
    labels: whether it is told the true ones; False for `SaliencyMapMethod`, which takes what it is told for its target.
    """

    def find(model: Counted, x: Tensor, y: Tensor, ball: L0Ball) -> Tensor:
        with torch.no_grad():
            classes = model.model(x[:1]).shape[1]
        shape, kind = tuple(x.shape[1:]), "cpu" if x.device.type == "cpu" else "gpu"
        classifier = PyTorchClassifier(
            model, loss=nn.CrossEntropyLoss(), input_shape=shape, nb_classes=classes, clip_values=ends(ball),
            device_type=kind,
        )  # fmt: skip
        points = make(classifier, **settings).generate(x=x.cpu().numpy(), y=y.cpu().numpy() if labels else None)
        return torch.from_numpy(np.asarray(points))

    return judged(find, (make.__qualname__, settings), white_box)
