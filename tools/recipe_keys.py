"""The reference of every key of a recipe, from the code that reads them: it is watched while it reads recipes."""

from __future__ import annotations

import inspect
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints
from unittest import mock

from ell0 import certify, recipe, train
from ell0.attacks import ATTACKS
from ell0.recipe import models
from ell0.recipe.toml import Kind, TomlTable

NEEDED = object()
Asked = dict[str, dict[str, tuple[Kind[Any] | None, Any]]]
"""Of each table the keys that the code asks for, what each may be, and its default."""

# What no shipped recipe has, so that its keys are asked for, too.
TOUR = """
name = "tour"
summary = "tables that no shipped recipe has"
[data]
file = "mine.npz"
low = 0.0
high = 1.0
[[classifier]]
name = "mine"
[classifier.model]
python = "package:build"
[[classifier]]
name = "other"
[classifier.model]
name = "mlp"
[classifier.training.trades]
budget = 1
[[classifier]]
name = "votes"
[classifier.model]
name = "ablation"
keep = 1
[classifier.model.base]
name = "mlp"
[[measure]]
classifiers = ["mine"]
what = "worst_case"
budgets = [1]
"""

MEANING = {
    "": {
        "like": "a shipped recipe, from which every missing key and table is taken",
        "name": "name of the run and of its folder: lower-case letters, digits, hyphens",
        "summary": "one sentence, shown by `ell0 run --list` and on the page",
        "seed": "seed of weights, training and attacks",
        "threads": "threads of torch on a CPU",
        "use": "other recipes whose classifiers are measured too; their runs lie beside this one",
        "data": "the data, below",
        "training": "keys for the training of all classifiers, below",
        "classifier": "the classifiers, below",
        "measure": "what is measured, below",
        "paper": "figures of the paper, shown beside ours: the keys of the measurement, `value` and `n`",
        "quoted": "figures of others: the keys of the measurement, `value` and `source`",
        "sweep": "one run for each combination, below",
    },
    "data": {
        "name": "a data set of ell0; or `file`",
        "file": "an npz file beside the recipe, with x_train, y_train, x_test, y_test",
        "low": "least clean value of a file",
        "high": "largest clean value of a file",
        "train_rows": "train on the first rows only",
        "validation": "take the last tenth of the training rows off, to choose on",
    },
    "sweep": {
        "k": "k of every model",
        "budget": "budget of every attack that a classifier is trained against",
        "seed": "seed of the recipe",
    },
    "classifier": {
        "name": "its name; `{k}` and `{seed}` stand for several values",
        "weights": "a folder of `fit(out=...)` or a safetensors file; then there is no training",
        "model": "the network, below",
        "training": "its training, below; left out with `python`, the network is measured as it is",
    },
    "classifier.model": {
        "python": "`package.module:name` of your own network, with its arguments as further keys; needs `--allow-code`",
        "name": "a network of ell0, or a voter",
        "clamp": "clip inputs to [-1, 1], or to two ends, which then become 0 and 1",
        "normalise": "scale by mean and deviation of the data set",
        "k": "terms truncated on each side; several values make several classifiers",
        "base": "network of an `ablation` or a `partition`, a table with the keys of this one",
        "network": "network of a part of `votes`, below",
    },
    "classifier.model.base": {"name": "a network of ell0", "clamp": "as above", "k": "as above, one value"},
    "classifier.model.network": {"name": "a network of `ell0.part_networks`"},
    "classifier.training": {
        "attack": "train against this attack, below",
        "certified": "train on a certificate, below",
        "trades": "attack inside each step, below",
        "seed": "seeds; several make several classifiers",
    },
    "classifier.training.attack": {
        "name": "the attack",
        "budget": "units that it may change",
        "beta": "its box is [-beta, beta], or that of the data made beta times as wide",
        "unit": "what counts as one change",
        "box": "the range that the set's normalised images span, as in the paper's supplement",
    },
    "classifier.training.certified": {"budget": "changes to train for", "unit": "what counts as one change"},
    "classifier.training.trades": {
        "budget": "units that the attack changes",
        "unit": "what counts as one change",
        "beta": "its box is [-beta, beta], or that of the data made beta times as wide",
    },
    "measure": {
        "what": "the measurement; `worst_case` is robust accuracy under all attacks together",
        "classifiers": "by name, as it is written above; default: all",
        "split": "rows to measure on",
        "rows": "number of rows; default: all",
        "first": "the first row",
        "protocol": "a word that tells this measurement from others like it",
        "box": "the range that the set's normalised images span, as in the paper's supplement",
        "over": "give the share of the rows that are classified rightly, too",
        "part": "give the figure on the first rows, too",
        "skip_proven": "attack a row with budgets above its certified radius alone",
        "beta": "boxes [-beta, beta], or that of the data made beta times as wide; several are measured one by one",
        "unit": "what counts as one change",
        "budgets": 'numbers of changed units; `"k"`: the k of the classifier',
        "queries": "queries of the attack; several values are measured one by one, except for `worst_case`",
        "steps": "steps of the attack; several values are measured one by one, except for `worst_case`",
        "method": "bound or rule of the certificate",
        "attack": "the attack",
        "count": "counts of `pointwise`, see Recipes",
    },
    "paper": {"value": "the figure"},
    "quoted": {"value": "the figure"},
}
TITLES = {"": "Top level", "paper": "`[[paper]]`", "quoted": "`[[quoted]]`", "measure": "`[[measure]]`"}
TITLES |= {"classifier": "`[[classifier]]`"}
# Defaults that depend on other keys.
DEFAULTS = {
    ("classifier.model", "k"): "that of the network",
    ("classifier.model.base", "k"): "that of the network",
    ("classifier.model", "base"): "must be given for these",
    ("classifier.model", "network"): "must be given for these",
    ("classifier.training", "seed"): "that of the recipe",
    ("measure", "steps"): "that of the attack; `worst_case`: `100`",
    ("measure", "queries"): "that of the attack; `worst_case`: `1000`",
    ("measure", "beta"): "`1.0`; a certificate is for any value",
    ("measure", "budgets"): "must be given for shares",
}
# Parameters for which a recipe has a key of its own: the box of the data.
HIDDEN = {("classifier.training.trades", "low"), ("classifier.training.trades", "high")}
# Whose parameters are keys of a table, too.
OWNERS: dict[str, Mapping[str, Any]] = {
    "classifier.model": models.MODELS,
    "classifier.model.base": models.NETWORKS,
    "classifier.model.network": models.PART_NETWORKS,
    "classifier.training": {"TrainConfig": train.TrainConfig},
    "classifier.training.attack": ATTACKS,
    "classifier.training.certified": {"Objective": certify.Objective, "VoteObjective": certify.VoteObjective},
    "classifier.training.trades": {"Trades": train.Trades},
    "measure": ATTACKS,
}


def asked() -> Asked:
    """What is asked for while every shipped recipe and the tour are read."""
    found: Asked = {}
    with _watched(found), tempfile.TemporaryDirectory() as folder:
        for name in recipe.names():
            recipe.load(name)
        tour = Path(folder) / "tour.toml"
        tour.write_text(TOUR)
        recipe.load(tour)
        tour.write_text(TOUR.replace("[data]", "[sweep]\nseed = [0]\n[data]"))
        recipe.sweep(tour)
    return found


@contextmanager
def _watched(found: Asked) -> Iterator[None]:
    take, need, rest = TomlTable.take, TomlTable.need, TomlTable.rest

    def place(table: TomlTable) -> dict[str, tuple[Kind[Any] | None, Any]]:
        words = [re.sub(r" \d+$", "", word) for word in table.where.split(", ")[1:]]
        return found.setdefault(".".join(words), {})

    def take_(self: TomlTable, key: str, kind: Any, default: Any) -> Any:
        place(self).setdefault(key, (kind, default))
        return take(self, key, kind, default)

    def need_(self: TomlTable, key: str, kind: Any) -> Any:
        place(self).setdefault(key, (kind, NEEDED))
        return need(self, key, kind)

    def rest_(self: TomlTable, allowed: list[str]) -> Any:
        for key in allowed:
            place(self).setdefault(key, (None, None))
        return rest(self, allowed)

    with mock.patch.multiple(TomlTable, take=take_, need=need_, rest=rest_):
        yield


def tables() -> str:
    """The keys of each table of a recipe; raises ValueError if one has no words here, or words have no key."""
    found, lines = asked(), list[str]()
    if unknown := sorted(found.keys() - MEANING.keys()):
        raise ValueError(f"MEANING must have every table of a recipe, got none of {', '.join(unknown)}")
    for place, words in MEANING.items():
        keys, owned = found.get(place, {}), list(_owned(place, words))
        if wrong := sorted((words.keys() ^ keys.keys()) - {key for key, *_ in owned}):
            raise ValueError(f"MEANING must have the keys that recipes have, got other {', '.join(wrong)} in {place!r}")
        cells = [
            (key, text, _kind(key, keys[key][0]), DEFAULTS.get((place, key)) or _default(keys[key][1]))
            for key, text in words.items()
        ]
        title = TITLES.get(place, f"`[{place}]`")
        head = ["", f"## {title}", "", "| key | meaning | may be | default |", "|---|---|---|---|"]
        lines += [*head, *(f"| `{key}` | {' | '.join(rest)} |" for key, *rest in (*cells, *owned))]
    return "\n".join(lines) + "\n"


def _owned(place: str, words: Mapping[str, str]) -> Iterator[tuple[str, str, str, str]]:
    """Keys that are parameters: of a network, an objective, an attack."""
    for name, owner in OWNERS.get(place, {}).items():
        signature = inspect.signature(owner).parameters
        if place.startswith("classifier.model"):
            kinds: Mapping[str, Any] = models._kinds(owner)
        else:
            kinds = dict.fromkeys(owner.settings if name in ATTACKS else signature)
        for key, kind in kinds.items():
            if key in words or (place, key) in HIDDEN:
                continue
            default = signature[key].default
            text = _kind(key, kind) if kind else _hint(owner, key)
            yield key, f"of `{name}`", text, _default(NEEDED if default is inspect.Parameter.empty else default)


def _kind(key: str, kind: Kind[Any] | None) -> str:
    """What a value may be. The classifiers of a recipe are its own."""
    assert kind is not None
    return "names of classifiers" if key == "classifiers" else kind.words


def _hint(owner: Any, key: str) -> str:
    """A type hint in words; that of a class is written in its body."""
    hint = get_type_hints(inspect.unwrap(owner))[key]
    parts = get_args(hint) if isinstance(hint, UnionType) or get_origin(hint) is Union else (hint,)
    words = [", ".join(map(repr, get_args(part))) if get_origin(part) is Literal else None for part in parts]
    named = [word or getattr(part, "__name__", str(part)) for word, part in zip(words, parts, strict=True)]
    return "one of " + named[0] if words[0] else f"`{hint if get_args(hint) and len(parts) == 1 else named[0]}`"


def _default(value: Any) -> str:
    if value is NEEDED:
        return "must be given"
    return "" if value in (None, (), []) or isinstance(value, list) else f"`{value}`"
