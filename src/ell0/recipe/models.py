"""Models as recipes and cards of checkpoints write them: a name and its arguments."""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch import nn

from .. import certify, models
from ..common import did_you_mean
from ..data import DataSet
from ..nn import InputClamp, InputScale
from ..synthesis import AnalysisBySynthesis
from .toml import FLAG, NUMBER, TEXT, Kind, TomlTable, choice, many, named, whole

Make = Callable[..., nn.Module]
NETWORKS: dict[str, Make] = {name: getattr(models, name) for name in models.__all__}
VOTERS: dict[str, Make] = {"ablation": certify.RandomisedAblation, "partition": certify.PartitionEnsemble}
MODELS = {**NETWORKS, **VOTERS, "abs": AnalysisBySynthesis}
_FROM_DATA = ("in_features", "in_shape", "shape", "classes")


def _clamp(value: Any) -> bool | tuple[float, ...] | None:
    """Whether images are clipped to [-1, 1]; or the ends to which they are clipped, which then become 0 and 1."""
    if isinstance(value, bool):
        return value
    ends = many(NUMBER).read(value) or ()
    return ends if len(ends) == 2 and ends[0] < ends[1] else None


_CLAMP: Kind[Any] = Kind("true, false or two numbers [low, high], low below high", _clamp)


def read_models(table: TomlTable, known: Mapping[str, object] = MODELS) -> list[dict[str, Any]]:
    """The name and arguments of a model; of several, if k has several values."""
    if known is MODELS and (code := table.take("python", TEXT, None)):
        return _read_code(table, code)
    name = table.need("name", choice(*known))
    arguments: dict[str, Any] = {"name": name}
    if name in NETWORKS:
        arguments["clamp"] = table.take("clamp", _CLAMP, False)
    if known is MODELS and name in NETWORKS and table.take("normalise", FLAG, False):
        if isinstance(arguments["clamp"], tuple):
            raise ValueError(f"{table.where}: normalise must be false if clamp is two numbers, which scales already")
        arguments["normalise"] = True
    parameters, ks = _parameters(name), list[dict[str, Any]]()
    for key, kind in _kinds(name).items():
        default = parameters[key].default
        if key == "k":
            ks = [{"k": k} for k in table.take("k", many(whole(0)), (default,))]
        elif default is inspect.Parameter.empty:
            arguments[key] = table.need(key, kind)
        elif (value := table.take(key, kind, None)) is not None:
            arguments[key] = value
    if "base" in parameters:
        base = table.need_table("base")
        arguments["base"], *others = read_models(base, NETWORKS)
        if others:
            raise ValueError(f"{base.where}: k must have one value, got {base.content['k']!r}")
    table.close()
    return [arguments | k for k in ks or [{}]]


def _read_code(table: TomlTable, code: str) -> list[dict[str, Any]]:
    """The arguments of a model of the user's own. Its code is not run: that has to be allowed."""
    ks = table.take("k", many(whole(0)), ())
    given = table.rest([key for key in table.content if key not in ("python", "k")])
    with named(table.where):
        split_code(code)
        json.dumps(given)
    return [{"python": code, **given, **k} for k in ([{"k": k} for k in ks] or [{}])]


def split_code(words: str) -> tuple[str, str]:
    """The module and the name of ``package.module:name``."""
    module, _, name = words.partition(":")
    if not module or not name:
        raise ValueError(f"model must be package.module:name, got {words!r}")
    return module, name


def imported(words: str) -> Any:
    """What ``package.module:name`` names; the module may lie in the current folder."""
    module, name = split_code(words)
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(f"model must be importable, got {words!r} ({error})") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"model must name something in {module}, got {words!r}{did_you_mean(part, dir(found))}")
        found = getattr(found, part)
    return found


def check_allowed(code: Sequence[str], allow_code: bool) -> None:
    """Raises ValueError if there is code to run and it is not allowed."""
    if code and not allow_code:
        words = ", ".join(dict.fromkeys(code))
        raise ValueError(f"allow_code must be true to run the code {words}: read it, then add --allow-code")


def _parameters(name: str) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(MODELS[name]).parameters


def _kinds(name: str) -> dict[str, Kind[Any]]:
    """The kind of each argument that a recipe may set, from its type hint; the data gives the others."""
    make = MODELS[name]
    hints = get_type_hints(make.__init__ if inspect.isclass(make) else make)
    kinds: dict[str, Kind[Any]] = {}
    for key in (key for key in _parameters(name) if key not in _FROM_DATA):
        hint = hints.get(key)
        if get_origin(hint) is Literal:
            kinds[key] = choice(*get_args(hint))
        elif hint in (int, float):
            kinds[key] = whole(1) if hint is int else NUMBER
        elif get_args(hint)[:1] == (int,):
            kinds[key] = many(whole(1), repeated=True)
    return kinds


def fitted(
    arguments: Mapping[str, Any], shape: Sequence[int], classes: int, data: DataSet | None = None
) -> dict[str, Any]:
    """The arguments with the shape of a row and the classes of the data, and its mean and deviation to normalise by."""
    known = dict(zip(_FROM_DATA, (math.prod(shape), tuple(shape), tuple(shape), classes), strict=True))
    code = imported(arguments["python"]) if "python" in arguments else None
    if isinstance(code, nn.Module):
        return dict(arguments)
    asked = _parameters(arguments["name"]) if code is None else inspect.signature(code).parameters
    full = dict(arguments) | {key: value for key, value in known.items() if key in asked}
    if arguments.get("normalise"):
        if data is None:
            raise ValueError("normalise must be false for the rows of an npz file, whose mean is not known")
        full["normalise"] = data.mean, data.deviation
    # The base of an ablation sees twice the channels.
    seen = (2 * shape[0], *shape[1:])
    return full | ({"base": fitted(arguments["base"], seen, classes)} if "base" in arguments else {})


def build(arguments: Mapping[str, Any], seed: int | None = None) -> nn.Module:
    """The model with weights from the seed; without one it only has shapes. Leaves the global generator as it was."""
    shapes = seed is None and "python" not in arguments
    with torch.random.fork_rng(devices=[]), torch.device("meta" if shapes else "cpu"):
        if seed is not None:
            torch.manual_seed(seed)
        return _make(arguments)


def _make(arguments: Mapping[str, Any]) -> nn.Module:
    given: dict[str, Any] = {key: tuple(it) if isinstance(it, list) else it for key, it in arguments.items()}
    if "python" in given:
        return _own(given.pop("python"), given)
    make, clamp, normalise = MODELS[given.pop("name")], given.pop("clamp", False), given.pop("normalise", None)
    network = make(**given | ({"base": _make(given["base"])} if "base" in given else {}))
    first: list[nn.Module] = []
    if clamp:
        first += [InputClamp(*clamp), InputScale(*clamp)] if isinstance(clamp, tuple) else [InputClamp()]
    if normalise:
        first.append(InputScale.normalising(*normalise))
    return nn.Sequential(*first, *network.children()) if first else network


def _own(words: str, given: Mapping[str, Any]) -> nn.Module:
    """The module of that name, as a copy; or what a function of that name returns for these arguments."""
    found = imported(words)
    if isinstance(found, nn.Module) and given:
        raise ValueError(f"model must be a function to take {', '.join(given)}, got {words!r}, a network")
    made = copy.deepcopy(found) if isinstance(found, nn.Module) else found(**given)
    if not isinstance(made, nn.Module):
        raise ValueError(f"model must be an nn.Module or a function that returns one, got {words!r}: {made!r}")
    return made


def model(card: Mapping[str, Any], *, allow_code: bool = False) -> nn.Module:
    """The model that the card of a checkpoint names, its weights not yet those of the checkpoint.

    allow_code: also run code that the card names, which may do anything.

    checkpoint = ell0.train.load_checkpoint("runs/mnist-f10/f10")
    network = ell0.recipe.model(checkpoint.card)
    checkpoint.into(network)
    """
    check_allowed([card["model"]["python"]] if "python" in (card.get("model") or ()) else [], allow_code)
    try:
        return build(card["model"], seed=0)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"card must name a model that a recipe can build, got {card.get('model')!r} ({error!r})"
        ) from error
