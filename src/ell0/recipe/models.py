"""Models as recipes and cards of checkpoints write them: a name and its arguments."""

from __future__ import annotations

import copy
import importlib
import inspect
import itertools
import json
import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from .. import certify, models
from ..common import did_you_mean
from ..data import DataSet
from ..nn import InputClamp, InputScale
from ..part_networks import Members, PartCNN, PartMLP, PartTransformer
from ..synthesis import AnalysisBySynthesis
from ..train import Checkpoint
from .toml import FLAG, NUMBER, TEXT, Kind, TomlTable, choice, many, named, whole

Make = Callable[..., nn.Module]
NETWORKS: dict[str, Make] = {name: getattr(models, name) for name in models.__all__}
PART_NETWORKS: dict[str, Make] = {"mlp": PartMLP, "cnn": PartCNN, "transformer": PartTransformer}


def _votes(
    shape: Sequence[int],
    classes: int,
    network: Make,
    *,
    strides: Sequence[int] = (),
    parts: int = 0,
    rule: certify.Rule = "duel",
    tau: float = 0.5,
    mirrored: bool = False,
    members: int = 1,
) -> certify.PartVote:
    """A `PartVote` of sub-grids by strides, or of as many parts, to which pixels are dealt; each asks all members."""
    if bool(strides) == bool(parts):
        raise ValueError(f"votes must have strides or parts, and not both, got strides={strides} with parts={parts}")
    cut = certify.Partition.strides(shape, strides) if strides else certify.Partition.dealt(shape, parts)
    made = [network(cut.part_shape, cut.parts, classes=classes) for _ in range(members)]
    return certify.PartVote(Members(made) if members > 1 else made[0], cut, rule=rule, tau=tau, mirrored=mirrored)


VOTERS: dict[str, Make] = {
    "ablation": certify.RandomisedAblation,
    "partition": certify.PartitionEnsemble,
    "votes": _votes,
}
MODELS = {**NETWORKS, **VOTERS, "abs": AnalysisBySynthesis}
_MOST_MADE = 1 << 23
_FROM_DATA = ("in_features", "in_shape", "shape", "classes")
_NESTED = {"base": NETWORKS, "network": PART_NETWORKS}


def _clamp(value: Any) -> bool | tuple[float, ...] | None:
    """Whether images are clipped to [-1, 1]; or the ends to which they are clipped, which then become 0 and 1."""
    if isinstance(value, bool):
        return value
    ends = many(NUMBER).read(value) or ()
    return ends if len(ends) == 2 and ends[0] < ends[1] else None


_PLAIN: dict[Any, Kind[Any]] = {int: whole(1), float: NUMBER, bool: FLAG}
_CLAMP: Kind[Any] = Kind("true, false or two numbers [low, high], low below high", _clamp)


def read_models(table: TomlTable, known: Mapping[str, Make] = MODELS) -> list[dict[str, Any]]:
    """The name and arguments of a model; of several, if k has several values."""
    if known is MODELS and (code := table.take("python", TEXT, None)):
        return _read_code(table, code)
    name = table.need("name", choice(*known))
    make, arguments = known[name], dict[str, Any](name=name)
    if known is not PART_NETWORKS and name in NETWORKS:
        arguments["clamp"] = table.take("clamp", _CLAMP, False)
    if known is MODELS and name in NETWORKS and table.take("normalise", FLAG, False):
        if isinstance(arguments["clamp"], tuple):
            raise ValueError(f"{table.where}: normalise must be false if clamp is two numbers, which scales already")
        arguments["normalise"] = True
    parameters, ks = inspect.signature(make).parameters, list[dict[str, Any]]()
    for key, kind in _kinds(make).items():
        default = parameters[key].default
        if key == "k":
            ks = [{"k": k} for k in table.take("k", many(whole(0)), (default,))]
        elif default is inspect.Parameter.empty:
            arguments[key] = table.need(key, kind)
        elif (value := table.take(key, kind, None)) is not None:
            arguments[key] = value
    for key in parameters.keys() & _NESTED.keys():
        inner = table.need_table(key)
        arguments[key], *others = read_models(inner, _NESTED[key])
        if others:
            raise ValueError(f"{inner.where}: k must have one value, got {inner.content['k']!r}")
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


def _kinds(make: Make) -> dict[str, Kind[Any]]:
    """The kind of each argument that a recipe may set, from its type hint; the data gives the others."""
    hints = get_type_hints(make.__init__ if inspect.isclass(make) else make)
    kinds: dict[str, Kind[Any]] = {}
    for key in (key for key in inspect.signature(make).parameters if key not in (*_FROM_DATA, "places")):
        hint = hints.get(key)
        if get_origin(hint) is Literal:
            kinds[key] = choice(*get_args(hint))
        elif hint in _PLAIN:
            kinds[key] = _PLAIN[hint]
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
    asked = inspect.signature(MODELS[arguments["name"]] if code is None else code).parameters
    full = dict(arguments) | {key: value for key, value in known.items() if key in asked}
    if arguments.get("normalise"):
        if data is None:
            raise ValueError("normalise must be false for the rows of an npz file, whose mean is not known")
        full["normalise"] = data.mean, data.deviation
    # The base of an ablation sees twice the channels.
    seen = (2 * shape[0], *shape[1:]) if arguments.get("name") == "ablation" else shape
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
    # What a vote and an "abs" make beside their weights is no part of a checkpoint, to which it could be compared.
    for sizes in (given.get("shape", ()), (given.get("samples", 1), given.get("latents", 1))):
        if (made := math.prod(map(float, sizes))) > _MOST_MADE:
            raise ValueError(f"shape, or samples x latents, must be at most {_MOST_MADE:,} numbers, got {made:,.0f}")
    make, clamp, normalise = MODELS[given.pop("name")], given.pop("clamp", False), given.pop("normalise", None)
    if "base" in given:
        given["base"] = _make(given["base"])
    if "network" in given:
        its = dict(given["network"])
        given["network"] = partial(PART_NETWORKS[its.pop("name")], **its)
    network = make(**given)
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


def model(checkpoint: Checkpoint, *, allow_code: bool = False) -> nn.Module:
    """The model that the card of a checkpoint names, with its weights; no memory is taken before the shapes fit.

        network = ell0.recipe.model(ell0.train.load_checkpoint("runs/mnist-f10/f10"))

    allow_code: also run code that the card names, which may do anything.
    """
    words: Any = checkpoint.card.get("model")
    check_allowed([words["python"]] if "python" in (words or ()) else [], allow_code)
    try:
        with _at_most(100 + 4 * len(checkpoint.tensors)):
            shapes = build(words)
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"card must name a model that a recipe can build, got {words!r} ({error!r})") from error
    checkpoint.check(shapes)
    network = build(words, seed=0)
    checkpoint.into(network)
    return network


@contextmanager
def _at_most(parameters: int) -> Iterator[None]:
    """Raises ValueError where this thread registers more parameters: a card may ask for a billion layers."""
    count, thread = itertools.count(1), threading.get_ident()

    def registered(*_: object) -> None:
        if threading.get_ident() == thread and next(count) > parameters:
            raise ValueError("it has far more parameters than the checkpoint")

    handle = register_module_parameter_registration_hook(registered)
    try:
        yield
    finally:
        handle.remove()
