"""Stand-ins for the libraries of `ell0.adapters`: what they call and what calls them, as recorded of the real ones.

`make test-peers` runs the same tests on the libraries themselves and checks the record.
"""

from __future__ import annotations

import sys
from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import torch

RECORD = {
    "foolbox:PyTorchModel.__init__": "self model bounds device preprocessing",
    "foolbox.attacks.base:FixedEpsilonAttack.__call__": "self model inputs criterion epsilons kwargs",
    "foolbox.attacks.base:FixedEpsilonAttack.run": "self model inputs criterion epsilon kwargs",
    "foolbox.criteria:TargetedMisclassification.__init__": "self target_classes",
    "foolbox.distances:Distance.__call__": "self reference perturbed",
    "foolbox.distances:Distance.clip_perturbation": "self references perturbed epsilon",
    "eagerpy:astensor": "x",
    "eagerpy:astensor_": "x",
    "eagerpy:astensors_": "x xs",
    "torchattacks.attack:Attack.__init__": "self name model",
    "torchattacks.attack:Attack.__call__": "self inputs labels args kwargs",
    "torchattacks.attack:Attack.forward": "self inputs labels args kwargs",
    "torchattacks.attack:Attack.get_logits": "self inputs labels args kwargs",
    "torchattacks.attack:Attack.get_output_with_eval_nograd": "self inputs",
    "torchattacks.attack:Attack.get_target_label": "self inputs labels",
    "torchattacks.attack:Attack.set_mode_targeted_by_label": "self args kwargs",
    "art.attacks.attack:EvasionAttack.__init__": "self kwargs",
    "art.attacks.attack:EvasionAttack.generate": "self x y kwargs",
    "secmlt.adv.evasion.base_evasion_attack:BaseEvasionAttack.__call__": "self model data_loader stream",
    "secmlt.adv.evasion.base_evasion_attack:BaseEvasionAttack._run": "self model samples labels",
    "secmlt.models.pytorch.base_pytorch_nn:BasePyTorchClassifier.decision_function": "self x args kwargs",
}
"""The parameters of what is called, by module and name."""

Bounds = namedtuple("Bounds", "lower upper")


class EagerTensor:
    def __init__(self, raw: torch.Tensor) -> None:
        self.raw = raw


def astensor(x: Any) -> EagerTensor:
    return x if isinstance(x, EagerTensor) else EagerTensor(x)


def astensor_(x: Any) -> Any:
    return astensor(x), (lambda found: found) if isinstance(x, EagerTensor) else (lambda found: found.raw)


def astensors_(x: Any, *xs: Any) -> Any:
    return [astensor(each) for each in (x, *xs)], astensor_(x)[1]


class PyTorchModel:
    def __init__(self, model: Any, bounds: Any, device: Any = None, preprocessing: Any = None) -> None:  # noqa: ARG002
        self._model, self.bounds = model, Bounds(*bounds)

    def __call__(self, inputs: Any) -> Any:
        x, restore = astensor_(inputs)
        return restore(EagerTensor(self._model(x.raw)))


class Misclassification:
    def __init__(self, labels: Any) -> None:
        self.labels = astensor(labels)


class TargetedMisclassification:
    def __init__(self, target_classes: Any) -> None:
        self.target_classes = astensor(target_classes)


class Distance:
    def __call__(self, reference: Any, perturbed: Any) -> Any:
        raise NotImplementedError

    def clip_perturbation(self, references: Any, perturbed: Any, epsilon: float) -> Any:
        raise NotImplementedError


class FixedEpsilonAttack:
    distance: Distance

    def run(self, model: Any, inputs: Any, criterion: Any, *, epsilon: float, **kwargs: Any) -> Any:
        raise NotImplementedError

    def __call__(self, model: Any, inputs: Any, criterion: Any, *, epsilons: Any, **kwargs: Any) -> Any:
        x, restore = astensor_(inputs)
        aim = criterion if not isinstance(criterion, torch.Tensor) else Misclassification(criterion)
        raws, clippeds, success = list[Any](), list[Any](), list[Any]()
        for epsilon in epsilons if isinstance(epsilons, list) else [epsilons]:
            found = self.run(model, x, aim, epsilon=epsilon, **kwargs)
            clipped = self.distance.clip_perturbation(x, found, epsilon)
            said = model(clipped.raw).argmax(1)
            hit = said != aim.labels.raw if isinstance(aim, Misclassification) else said == aim.target_classes.raw
            raws, clippeds, success = [*raws, restore(found)], [*clippeds, restore(clipped)], [*success, hit]
        return (
            (raws, clippeds, torch.stack(success)) if isinstance(epsilons, list) else (raws[0], clippeds[0], success[0])
        )


class Attack:  # of torchattacks
    def __init__(self, name: str, model: Any) -> None:
        self.attack, self.model, self.device = name, model, next(model.parameters()).device
        self.supported_mode, self.targeted = ["default"], False

    def forward(self, inputs: Any, labels: Any = None, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def get_logits(self, inputs: Any, labels: Any = None, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002
        return self.model(inputs)

    @torch.no_grad()
    def get_output_with_eval_nograd(self, inputs: Any) -> Any:
        return self.get_logits(inputs)

    def get_target_label(self, inputs: Any, labels: Any = None) -> Any:  # noqa: ARG002
        return labels

    def set_mode_targeted_by_label(self, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        assert "targeted" in self.supported_mode
        self.targeted = True

    def __call__(self, inputs: Any, labels: Any = None, *args: Any, **kwargs: Any) -> Any:
        return self.forward(inputs, labels, *args, **kwargs)


class ClassifierMixin:
    pass


class StandardisationMeanStd:
    apply_predict = True

    def __init__(self, mean: Any, std: Any) -> None:
        self.mean, self.std = np.asarray(mean, np.float32), np.asarray(std, np.float32)

    def __call__(self, x: Any) -> Any:
        return (x - self.mean) / self.std


class PyTorchClassifier(ClassifierMixin):
    def __init__(
        self, model: Any, loss: Any, input_shape: Any, nb_classes: int, clip_values: Any = None,
        preprocessing: Any = (0.0, 1.0), device_type: str = "gpu",
    ) -> None:  # fmt: skip
        assert callable(loss) and isinstance(input_shape, tuple) and nb_classes > 1 and device_type in ("cpu", "gpu")  # noqa: PT018
        self.model, self.clip_values, self.device = model, clip_values, torch.device("cpu")
        self.preprocessing_operations = [StandardisationMeanStd(*preprocessing)]

    def predict(self, x: Any) -> Any:
        with torch.no_grad():
            return self.model(torch.from_numpy(self.preprocessing_operations[0](x))).numpy()


class EvasionAttack:
    def __init__(self, **kwargs: Any) -> None:
        self.estimator = kwargs["estimator"]
        for kind in self._estimator_requirements:  # type: ignore[attr-defined]
            assert isinstance(self.estimator, kind)

    def generate(self, x: Any, y: Any = None, **kwargs: Any) -> Any:
        raise NotImplementedError


class BasePyTorchClassifier:
    def __init__(self, model: Any, preprocessing: Any = None) -> None:
        self.model, self._preprocessing = model, preprocessing or (lambda x: x)

    def decision_function(self, x: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002
        return self.model(self._preprocessing(x))


class BaseEvasionAttack:
    def _run(self, model: Any, samples: Any, labels: Any) -> Any:
        raise NotImplementedError

    def __call__(self, model: Any, data_loader: Any, stream: bool = False) -> Any:  # noqa: ARG002
        wrapped = model if isinstance(model, BasePyTorchClassifier) else BasePyTorchClassifier(model)
        return [(self._run(wrapped, samples, labels)[0], labels) for samples, labels in data_loader]


class PointwiseAttack:
    """Of each kind of attack one that the page of the tools names; here it finds nothing."""

    def __init__(self, l2_binary_search: bool) -> None:
        assert not l2_binary_search

    def __call__(self, model: Any, inputs: Any, criterion: Any, *, epsilons: None) -> Any:
        return inputs, inputs, model(inputs).argmax(1) != criterion if epsilons is None else None


class OnePixel(Attack):
    def __init__(self, model: Any, pixels: int, steps: int, popsize: int) -> None:  # noqa: ARG002
        super().__init__("OnePixel", model)

    def forward(self, inputs: Any, labels: Any = None, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002
        return inputs + 0 * self.get_logits(inputs).sum()


class PixelAttack:
    def __init__(self, classifier: Any, th: int, max_iter: int, verbose: bool) -> None:  # noqa: ARG002
        self.classifier = classifier

    def generate(self, x: Any, y: Any) -> Any:
        return x if len(self.classifier.predict(x)) == len(y) else None


class FMN(BaseEvasionAttack):
    def __init__(self, perturbation_model: str, num_steps: int, step_size: float) -> None:  # noqa: ARG002
        assert perturbation_model == "l0"

    def _run(self, model: Any, samples: Any, labels: Any) -> Any:  # noqa: ARG002
        return samples + 0 * model.decision_function(samples).sum(), None


_MODULES: dict[str, list[Any]] = {
    "eagerpy": [astensor, astensor_, astensors_],
    "foolbox": [PyTorchModel],
    "foolbox.attacks": [PointwiseAttack],
    "foolbox.attacks.base": [FixedEpsilonAttack],
    "foolbox.criteria": [Misclassification, TargetedMisclassification],
    "foolbox.distances": [Distance],
    "torchattacks": [OnePixel],
    "torchattacks.attack": [Attack],
    "art": [],
    "art.attacks": [],
    "art.attacks.attack": [EvasionAttack],
    "art.attacks.evasion": [PixelAttack],
    "art.estimators": [],
    "art.estimators.classification": [PyTorchClassifier],
    "art.estimators.classification.classifier": [ClassifierMixin],
    "secmlt": [],
    "secmlt.adv": [],
    "secmlt.adv.evasion": [],
    "secmlt.adv.evasion.base_evasion_attack": [BaseEvasionAttack],
    "secmlt.adv.evasion.fmn": [FMN],
    "secmlt.models": [],
    "secmlt.models.pytorch": [],
    "secmlt.models.pytorch.base_pytorch_nn": [BasePyTorchClassifier],
}


@contextmanager
def standing_in() -> Iterator[None]:
    """The libraries are these, and adapters that were imported with them are forgotten afterwards."""
    before = dict(sys.modules)
    for name, contents in _MODULES.items():
        module = ModuleType(name)
        module.__dict__.update({each.__name__: each for each in contents})
        sys.modules[name] = module
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, module)
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name in _MODULES or name.startswith("ell0.adapters.")]:
            del sys.modules[name]
        sys.modules.update({name: module for name, module in before.items() if name in _MODULES})
