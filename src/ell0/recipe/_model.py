"""Models by their words: how a recipe and the card of a checkpoint name them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import torch
from torch import nn

from .. import models
from ..nn import InputClamp
from ._toml import FLAG, Kind, Table, choice, many, sizes, whole

MODELS: dict[str, Callable[..., nn.Sequential]] = {name: getattr(models, name) for name in models.__all__}

_KINDS: dict[str, Kind[Any]] = {
    "in_features": whole(1),
    "hidden": sizes(),
    "classes": whole(1),
    "in_shape": sizes(),
    "width": whole(1),
    "activation": choice(*get_args(models.Activation)),
    "truncation": choice(*get_args(models.Truncation)),
}


def read_model(table: Table) -> tuple[dict[str, Any], tuple[int, ...]]:
    """The words of a model without its k, and the values of k; several stand for a classifier each."""
    name = table.need("name", choice(*MODELS))
    parameters = inspect.signature(MODELS[name]).parameters
    ks = table.take("k", many(whole(0)), (parameters["k"].default,))
    words: dict[str, Any] = {"name": name, "clamp": table.take("clamp", FLAG, False)}
    for key, kind in _KINDS.items():
        if key in parameters and (value := table.take(key, kind, None)) is not None:
            words[key] = value
    table.close()
    return words, ks


def fitted(words: Mapping[str, Any], shape: Sequence[int], classes: int) -> dict[str, Any]:
    """The words with the shape of a row and the classes of the data, where they say nothing about them."""
    parameters = inspect.signature(MODELS[words["name"]]).parameters
    known = {"in_features": math.prod(shape), "in_shape": tuple(shape), "classes": classes}
    return {key: value for key, value in known.items() if key in parameters} | dict(words)


def build(words: Mapping[str, Any], seed: int | None = None) -> nn.Module:
    """The model of these words, with weights from the seed; without one, a model that only has shapes.

    The caller's generator is left alone.
    """
    given: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in words.items()}
    make, clamp = MODELS[given.pop("name")], given.pop("clamp", False)
    with torch.random.fork_rng(devices=[]), torch.device("meta" if seed is None else "cpu"):
        if seed is not None:
            torch.manual_seed(seed)
        network = make(**given)
    return nn.Sequential(InputClamp(), *network) if clamp else network


def model(card: Mapping[str, Any]) -> nn.Module:
    """The model that the card of a checkpoint names, its weights not yet those of the checkpoint.

    checkpoint = ell0.train.load_checkpoint("runs/mnist-f10/f10")
    network = ell0.recipe.model(checkpoint.card)
    checkpoint.into(network)
    """
    words = card.get("model")
    if not isinstance(words, Mapping) or words.get("name") not in MODELS:
        raise ValueError(f"card must name a model that a recipe can build ({', '.join(MODELS)}), got {words!r}")
    try:
        return build(words, seed=0)
    except (TypeError, ValueError) as error:
        raise ValueError(f"card must name a model that a recipe can build, got {dict(words)!r} ({error})") from error
