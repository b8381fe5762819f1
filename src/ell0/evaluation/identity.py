"""What makes two runs the same: explicit values and digests, which a resumed run compares part by part.

A value is explicit if it is None, a bool, a number, a string, a path, a tensor (by its digest), or a sequence, mapping
or dataclass of these.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..common import digest

__all__ = ["of_attack", "of_model", "of_value"]

_PER_CALL = ("generator", "rows", "progress")  # an evaluation gives its own


def of_value(name: str, value: object) -> str:
    """An explicit value as text; raises a ValueError for any other. Equal numbers give equal text: 1 is 1.0."""
    if isinstance(value, Tensor):
        return digest(value)
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if value is None or isinstance(value, bool | int | float | str | Path | torch.dtype | torch.device):
        return repr(value) if isinstance(value, str) else str(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(of_value(name, item) for item in value)}]"
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {of_value(name, item)}' for key, item in value.items())}}}"
    rule = f"{name} must be made of numbers, strings, tensors, sequences, mappings or dataclasses"
    raise ValueError(f"{rule} for a run that can be resumed, got {value!r}")


def of_model(model: object, *, weights: bool = True) -> str:
    """The digest of a model: the types of its modules, their explicit public attributes, parameters and buffers.

    A model that is no ``nn.Module`` is known only by the name of its function or type.

    Args:
        weights: leave out parameters and buffers if False, for a model in training.
    """
    if not isinstance(model, nn.Module):
        return _name(model)
    parts: list[Tensor | str] = []
    for name, module in model.named_modules():
        parts.append(f"{name}: {_name(module)}")
        for key, value in vars(module).items():
            if not key.startswith("_") and key != "training":
                with suppress(ValueError):  # an attribute that is not explicit
                    parts.append(f"{key}: {of_value(key, value)}")
    for key, value in model.state_dict().items() if weights else ():
        parts += [key, value if isinstance(value, Tensor) else of_value(key, value)]
    return digest(*parts)


def of_attack(name: str, attack: Callable[..., Any]) -> str:
    """The function under partials by module and name, and its arguments: bound ones and defaults."""
    args: list[object] = []
    bound: dict[str, object] = {}
    while isinstance(attack, partial):
        args, bound, attack = [*attack.args, *args], {**attack.keywords, **bound}, attack.func
    if "<lambda>" in _name(attack):
        raise ValueError(f"{name} must be a named function for a run that can be resumed, got a lambda: use partial")
    parameters = inspect.signature(attack).parameters.values()
    given = {p.name: p.default for p in parameters if p.default is not p.empty} | bound
    # The settings of an object that is called are its public attributes, those of a closure what it holds.
    held: Mapping[str, Any] = {} if hasattr(attack, "__qualname__") else vars(attack)
    held = inspect.getclosurevars(attack).nonlocals if inspect.isfunction(attack) else held
    plain = (bool, int, float, str, Tensor)
    given |= {k: value for k, value in held.items() if isinstance(value, plain) and not k.startswith("_")}
    texts = [of_value(f"an argument of {name}", value) for value in args]
    texts += [f"{k}={of_value(f'{k} of {name}', value)}" for k, value in given.items() if k not in _PER_CALL]
    return f"{_name(attack)}({', '.join(texts)})"


def _name(thing: object) -> str:
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{named.__module__}.{getattr(named, '__qualname__', '')}"
