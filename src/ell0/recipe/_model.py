"""Models by their words: how a recipe and the card of a checkpoint name them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import torch
from torch import nn

from .. import certify, models
from ..nn import InputClamp, InputScale
from ._toml import FLAG, NUMBER, Kind, Table, choice, many, sizes, whole

NETWORKS: dict[str, Callable[..., nn.Module]] = {name: getattr(models, name) for name in models.__all__}
VOTERS = {"ablation": certify.RandomisedAblation, "partition": certify.PartitionEnsemble}
"""Models that certify by counting votes, each with a radius of its own."""
MODELS: dict[str, Callable[..., nn.Module]] = {**NETWORKS, **VOTERS}

_KINDS: dict[str, Kind[Any]] = {
    "in_features": whole(1),
    "hidden": sizes(),
    "classes": whole(1),
    "in_shape": sizes(),
    "width": whole(1),
    "widths": sizes(),
    "depth": whole(1),
    "activation": choice(*get_args(models.Activation)),
    "truncation": choice(*get_args(models.Truncation)),
    "parts": whole(1),
    "split": choice(*get_args(certify.PixelSplit)),
    "rule": choice(*get_args(certify.VoteRule)),
    "keep": whole(1),
    "selection": whole(1),
    "samples": whole(1),
    "confidence": NUMBER,
    "precision": choice(*get_args(certify.VotePrecision)),
}


def _clamp(value: Any) -> bool | tuple[float, float] | None:
    """Whether images are clipped to their range; or the ends to which they are, and which then become 0 and 1."""
    if isinstance(value, list) and len(value) == 2:
        low, high = map(NUMBER.read, value)
        if low is None or high is None:
            return None
        try:
            InputScale(low, high)
        except ValueError:
            return None
        return low, high
    return FLAG.read(value)


_CLAMP: Kind[Any] = Kind("true, false or two numbers [low, high], low below high", _clamp)


def read_model(table: Table, known: Mapping[str, object] = MODELS) -> list[dict[str, Any]]:
    """The words of a model; of several, where k has several values."""
    name = table.need("name", choice(*known))
    parameters = inspect.signature(MODELS[name]).parameters
    words: dict[str, Any] = {"name": name} | ({"clamp": table.take("clamp", _CLAMP, False)} if name in NETWORKS else {})
    for key, kind in _KINDS.items():
        if key in parameters:
            must = parameters[key].default is inspect.Parameter.empty
            value = table.need(key, kind) if must else table.take(key, kind, None)
            words |= {} if value is None else {key: value}
    if "base" in parameters:
        words["base"] = _read_base(table)
    ks = table.take("k", many(whole(0)), (parameters["k"].default,)) if "k" in parameters else ()
    table.close()
    return [{**words, "k": k} for k in ks] or [words]


def _read_base(table: Table) -> dict[str, Any]:
    """The words of the network that sees the copies of an ablation."""
    base = table.table("base")
    if base is None:
        raise ValueError(f"{table.where}: the table [classifier.model.base] is missing")
    words, *others = read_model(base, NETWORKS)
    if others:
        raise ValueError(f"{base.where}: k must have one value, got {base.content['k']!r}")
    return words


def fitted(words: Mapping[str, Any], shape: Sequence[int], classes: int) -> dict[str, Any]:
    """The words with the shape of a row and the classes of the data, where they say nothing about them."""
    parameters = inspect.signature(MODELS[words["name"]]).parameters
    known = {"in_features": math.prod(shape), "in_shape": tuple(shape), "shape": tuple(shape), "classes": classes}
    full = {key: value for key, value in known.items() if key in parameters} | dict(words)
    return full | ({"base": fitted(words["base"], base_shape(shape), classes)} if "base" in words else {})


def base_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """That of a row as the base of an ablation sees it."""
    return (2 * shape[0], *shape[1:])


def build(words: Mapping[str, Any], seed: int | None = None) -> nn.Module:
    """The model of these words, with weights from the seed; without one, a model that only has shapes.

    The caller's generator is left alone.
    """
    with torch.random.fork_rng(devices=[]), torch.device("meta" if seed is None else "cpu"):
        if seed is not None:
            torch.manual_seed(seed)
        return _made(words)


def _made(words: Mapping[str, Any]) -> nn.Module:
    given: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in words.items()}
    make, clamp = MODELS[given.pop("name")], given.pop("clamp", False)
    clamps = [InputClamp(*clamp), InputScale(*clamp)] if isinstance(clamp, tuple) else [InputClamp()] if clamp else []
    network = make(**given | ({"base": _made(given["base"])} if "base" in given else {}))
    return nn.Sequential(*clamps, *network.children()) if clamps else network


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
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"card must name a model that a recipe can build, got {dict(words)!r} ({error})") from error
