"""Models and rows of any kind as attacks take them: a function from rows ``(n, ...)`` to logits ``(n, classes)``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

from .nn import InputScale
from .threat import describe

__all__ = ["Model", "Wrapped", "as_rows", "joined", "wrap"]

Model = Callable[[Tensor], Tensor]
"""Any callable that gives logits ``(n, classes)`` for inputs ``(n, ...)``."""


def wrap(
    model: Any,
    *,
    output: str | int | None = None,
    probabilities: bool | None = None,
    mean: float | Sequence[float] | None = None,
    deviation: float | Sequence[float] | None = None,
    channels_last: bool = False,
    numpy: bool = False,
) -> nn.Module:
    """Any classifier as a module that gives logits ``(n, classes)``.

        wrap(resnet, mean=(0.485, 0.456, 0.406), deviation=(0.229, 0.224, 0.225))   # takes images in [0, 1]
        wrap(transformer, output="logits")
        wrap(forest)                                                                # scikit-learn

    Attacks and `ell0.evaluate` do it by themselves for a scikit-learn classifier and for a model that returns a dict
    with ``"logits"`` (or with one entry of the shape of logits), a tuple that begins with them, an object with
    ``.logits``, one logit a row, or a NumPy array.

    Args:
        model: a module, a function, or a scikit-learn classifier: its ``decision_function``, else ``predict_proba``.
        output: key, attribute or place of the logits in what the model returns.
        probabilities: the model returns probabilities: their logarithms are the logits. One number a row is the logit,
            or the probability, of class 1; if it lies in [0, 1], this must be given.
        mean, deviation: the model takes ``(x - mean) / deviation``, a number each or one for every channel.
        channels_last: the model takes ``(n, height, width, channels)``; the wrapped model channels first, as all else.
        numpy: the function takes NumPy arrays.
    """
    method = next((name for name in ("decision_function", "predict_proba") if hasattr(model, name)), None)
    if not callable(model) and method is None:
        rule = "model must be a module, a function, or a classifier with decision_function or predict_proba"
        raise ValueError(f"{rule}, got {model!r}")
    if (mean is None) != (deviation is None):
        raise ValueError(f"mean and deviation must be given together, got mean={mean!r} and deviation={deviation!r}")
    scale = None if mean is None or deviation is None else _scale(mean, deviation)
    if scale is not None and isinstance(model, nn.Module) and output is probabilities is None and not channels_last:
        whole = nn.Sequential(scale, model)  # certificates and `truncate` look into it
        whole.training = scale.training = model.training
        return whole
    method = None if callable(model) else method
    if method == "predict_proba":
        probabilities = True
    return Wrapped(model, output, probabilities, scale, channels_last, numpy, method)


def _scale(mean: float | Sequence[float], deviation: float | Sequence[float]) -> InputScale:
    means, deviations = (np.atleast_1d(np.asarray(each, dtype=float)).tolist() for each in (mean, deviation))
    if len(means) != len(deviations) or min(deviations) <= 0:
        raise ValueError(f"mean and deviation must be as many, deviations > 0, got {mean!r} and {deviation!r}")
    return InputScale(means, [low + step for low, step in zip(means, deviations, strict=True)])


class Wrapped(nn.Module):
    """What `wrap` returns. Inside, the model keeps its mode and its parameters."""

    def __init__(
        self,
        model: Any,
        output: str | int | None,
        probabilities: bool | None,
        scale: InputScale | None,
        channels_last: bool,
        numpy: bool,
        method: str | None,
    ) -> None:
        super().__init__()
        self.model, self.output, self.probabilities, self.scale = model, output, probabilities, scale
        self.channels_last, self.numpy, self.method = channels_last, numpy, method
        self.classes_ = getattr(model, "classes_", None)
        self.training = isinstance(model, nn.Module) and model.training
        if scale is not None:
            scale.training = self.training

    def forward(self, x: Tensor) -> Tensor:
        """x: ``(n, ...)``; result: ``(n, classes)``."""
        rows = x if self.scale is None else self.scale(x)
        rows = rows.permute(0, 2, 3, 1) if self.channels_last else rows
        if self.method is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # an array has no feature names
                answer = getattr(self.model, self.method)(rows.detach().cpu().numpy().reshape(len(x), -1))
        else:
            answer = self.model(rows.detach().cpu().numpy() if self.numpy else rows)
        found = self._found(answer, x)
        if not isinstance(found, Tensor) or not found.is_floating_point() or found.ndim not in (1, 2):
            raise ValueError(f"model must return logits or probabilities, {_wanted(len(x))}, got {describe(found)}")
        found = found.unsqueeze(1) if found.ndim == 1 else found
        if self.classes_ is not None and found.shape[1] not in (1, len(self.classes_)):
            raise ValueError(
                f"model must return a number for each of {len(self.classes_)} classes, got {describe(found)}"
            )
        return self._pair(found) if found.shape[1] == 1 else self._logarithms(found) if self.probabilities else found

    def _found(self, answer: Any, x: Tensor) -> Any:
        """The part of the answer that holds logits."""
        if self.output is not None:
            try:
                named = not isinstance(answer, Mapping) and hasattr(answer, str(self.output))
                part = getattr(answer, str(self.output)) if named else answer[self.output]
            except (KeyError, IndexError, TypeError) as error:
                raise ValueError(f"output must name a part of what the model returns, got {self.output!r}") from error
        elif not isinstance(answer, Mapping | tuple | list):
            part = getattr(answer, "logits", answer)
        else:
            parts = answer if isinstance(answer, Mapping) else dict(enumerate(answer))
            fits = [key for key, value in parts.items() if _fits(value, x)]
            key = next((key for key in ("logits", 0) if key in fits), fits[0] if len(fits) == 1 else None)
            if key is None:
                some = ", ".join([*map(repr, parts)][:6] + ["..."] * (len(parts) > 6))
                got = f"a {type(answer).__name__} with {some}: say which holds them, ell0.wrap(model, output=...)"
                raise ValueError(f"model must return logits, got {got}")
            part = parts[key]
        return torch.as_tensor(part, device=x.device) if isinstance(part, np.ndarray) else part

    def _pair(self, one: Tensor) -> Tensor:
        """Logits of class 0 and class 1 from one number a row."""
        if self.probabilities is None:
            if bool(((one >= 0) & (one <= 1)).all()):
                ways = "ell0.wrap(model, probabilities=True) if it is a probability, =False if it is a logit"
                raise ValueError(f"model returns one number a row, within [0, 1]: {ways}")
            self.probabilities = False  # said once, so that a batch within [0, 1] changes nothing
        if self.probabilities:
            return self._logarithms(torch.cat([1 - one, one], 1))
        return torch.cat([torch.zeros_like(one), one], 1)

    def _logarithms(self, shares: Tensor) -> Tensor:
        if not bool(((shares >= 0) & (shares <= 1)).all()):
            raise ValueError("model must return probabilities within [0, 1]: ell0.wrap(model, probabilities=False)")
        return shares.clamp(min=torch.finfo(shares.dtype).tiny).log()


def _fits(value: object, x: Tensor) -> bool:
    """Whether a part of an answer for x may be logits. By shapes: `torch.export` takes a len() for a constant."""
    array = isinstance(value, Tensor | np.ndarray) and value.ndim == 2 and value.shape[0] == x.shape[0]
    return array and "float" in str(cast(Tensor, value).dtype)


def _wanted(n: int) -> str:
    return f"floating-point numbers of shape ({n}, classes), or one a row"


def as_rows(model: object, x: Any, y: Any) -> tuple[Tensor, Tensor]:
    """Arrays as tensors.

    x: what NumPy takes for an array becomes floating-point numbers in the dtype and on the device of the model's
    parameters; floating-point tensors become float32 for a model of float32. y: an array of labels, of a
    classifier with ``classes_``, becomes their numbers there.
    """
    own = next(iter(model.parameters()), None) if isinstance(model, nn.Module) else None
    if not isinstance(x, Tensor) and hasattr(x, "__array__"):
        array = np.asarray(x)
        if array.dtype.kind not in "biuf":
            raise ValueError(f"x must be numbers, got a NumPy {array.dtype} array of shape {array.shape}")
        kind = array.dtype if array.dtype in (np.float32, np.float64) else np.float32
        # A copy: torch warns about arrays that it may not write to.
        x = torch.from_numpy(np.array(array, dtype=kind)).to(own if own is not None else "cpu")
    if own is not None and own.dtype == torch.float32 and isinstance(x, Tensor) and x.is_floating_point():
        x = x.float()
    if isinstance(y, list | tuple) or (not isinstance(y, Tensor) and hasattr(y, "__array__")):
        y = np.asarray(y)
    classes = getattr(model, "classes_", None)
    if classes is not None and isinstance(y, np.ndarray):
        place = np.searchsorted(classes, y).clip(max=len(classes) - 1)
        strange = y[np.asarray(classes)[place] != y]
        if len(strange):
            raise ValueError(f"y must be among the model's classes_, got {strange[0]!r}")
        y = place
    if isinstance(y, np.ndarray) and isinstance(x, Tensor):
        if y.dtype.kind not in "iu":
            way = "; use y.astype(int)" if y.dtype.kind in "bf" else ""
            raise ValueError(f"y must be integers, the classes of the model, got a NumPy {y.dtype} array{way}")
        y = torch.from_numpy(y.astype(np.int64)).to(x.device)
    return x, y


def joined(model: object, data: Any, size: int, again: bool) -> tuple[Tensor, Tensor]:
    """All rows of a DataLoader, a Dataset (read ``size`` rows at a time) or any iterable of pairs (x, y), as tensors.

    They move to the device of the model's parameters.  again: the same rows must come in the same order next time.
    """
    if isinstance(data, Tensor | np.ndarray) or not isinstance(data, Iterable | Dataset):
        raise ValueError(f"y must be given, or x be a DataLoader, a Dataset or batches (x, y), got {describe(data)}")
    if again and isinstance(getattr(data, "sampler", None), RandomSampler):
        raise ValueError("x must give its rows in the same order each time for state_path: DataLoader(shuffle=False)")
    own = next(iter(model.parameters()), None) if isinstance(model, nn.Module) else None
    found: list[tuple[Tensor, Tensor]] = []
    for batch in DataLoader(data, batch_size=size) if isinstance(data, Dataset) else data:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            kind = f"a dict with {', '.join(map(repr, batch))}" if isinstance(batch, Mapping) else type(batch).__name__
            arrays = isinstance(batch, Tensor | np.ndarray)
            way = "such as [(x, y)]" if arrays else 'such as ((batch["image"], batch["label"]) for batch in loader)'
            raise ValueError(f"x must give pairs (x, y), {way}, got {kind}")
        x, y = as_rows(model, *batch)
        if not isinstance(x, Tensor) or not isinstance(y, Tensor):
            raise ValueError(f"x must give pairs of tensors or arrays, got {describe(x)} and {describe(y)}")
        if not x.ndim or not y.ndim or len(x) != len(y):
            raise ValueError(f"x must give batches with one label a row, got {describe(x)} and {describe(y)}")
        x, y = (part if own is None else part.to(own.device) for part in (x, y))
        found.append((x if x.is_floating_point() else x.float(), y))
        if x.shape[1:] != found[0][0].shape[1:]:
            shapes = f"{tuple(found[0][0].shape[1:])} and {tuple(x.shape[1:])}"
            raise ValueError(f"x must give rows of one shape, got {shapes}")
    if not found:
        raise ValueError("x must have at least one row, got no batch")
    first, second = (torch.cat(parts) for parts in zip(*found, strict=True))
    return first, second
