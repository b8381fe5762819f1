"""A recipe: what a TOML file says, checked, as values."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any, cast, get_args

import torch
from torch import Tensor

from .. import certify, data
from ..attacks import ATTACKS, AttackResult
from ..data import RANGES, Scale
from ..results import WORST_CASE, Measurement, Row
from ..threat import L0Ball, Unit, stretched
from ..train import Trades, TrainConfig, TrainingObjective
from ._data import Data
from ._model import VOTERS, read_model
from ._toml import ANYTHING, FLAG, NUMBER, POSITIVE, TEXT, Table, choice, many, whole, written

SHIPPED = Path(__file__).parent / "recipes"

_TRADES = ["steps", "loss", "weight"]
_SCALAR = (str, bool, int, float)


@dataclass(frozen=True)
class Attack:
    """An attack of ``ATTACKS`` with its parameters, as a recipe writes them, and the box that it may use."""

    name: str
    beta: float = 1.0
    unit: Unit = "feature"
    parameters: Mapping[str, Any] = field(default_factory=dict)
    scale: Scale = "symmetric"

    def ball(self, budget: int) -> L0Ball:
        return L0Ball(budget, self.unit, *stretched(RANGES[self.scale], self.beta))

    def configured(self, **more: Any) -> Callable[..., AttackResult]:
        given = {
            key: torch.tensor(value, dtype=torch.float32) if isinstance(value, list) else value
            for key, value in {**self.parameters, **more}.items()
        }
        return partial(ATTACKS[self.name], **given)


@dataclass(frozen=True)
class Classifier:
    """A network and its training.

    attack: what it is trained against, with ``budget``; None: clean training.  objective: the bound that it is trained
    on, or the attack inside its steps; None: on its logits.
    """

    name: str
    model: Mapping[str, Any]
    training: TrainConfig
    attack: Attack | None = None
    budget: int = 0
    objective: TrainingObjective | None = None

    @property
    def k(self) -> int | None:
        """What its network truncates; None, where that is no word of it."""
        return self.model.get("k")

    @property
    def votes(self) -> bool:
        """Whether it certifies by counting votes, and not by bounds."""
        return self.model["name"] in VOTERS

    @property
    def slug(self) -> str:
        """The name of its folder: ``F(10)`` has ``f10``."""
        return slug(self.name)

    @property
    def row(self) -> Row:
        """What every row of results on it says."""
        k = {} if self.k is None else {"k": self.k}
        adversarial = self.attack is not None or isinstance(self.objective, Trades)
        return {"classifier": self.name, **k, "adversarial": adversarial}

    @property
    def training_row(self) -> Row:
        """What every row of results on its training says: besides, where that was not all in float32."""
        precisions = {key: getattr(self.training, key) for key in ("precision", "attack_precision")}
        return self.row | {key: value for key, value in precisions.items() if value not in ("fp32", None)}


@dataclass(frozen=True)
class Measure:
    """What is measured on each of some classifiers.

    budgets: "k" stands for the k of each classifier.  queries, steps: what an attack may spend, a figure for each.
    beta: a figure for each.  rows: the first n of the split, None for all.  protocol: a label for the rows of results.
    """

    what: str
    classifiers: tuple[str, ...]
    attack: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    budgets: tuple[int, ...] | str = ()
    queries: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    beta: tuple[float, ...] = ()
    unit: Unit = "feature"
    scale: Scale = "symmetric"
    rows: int | None = None
    split: str = "test"
    protocol: str | None = None


@dataclass(frozen=True)
class Task:
    """One evaluation of one classifier. row: what the rows of results made by it have in common."""

    classifier: Classifier
    measure: Measure
    row: Row

    @property
    def effort(self) -> tuple[int, ...]:
        """What a worst case may spend; nothing, for any other task."""
        return (*self.measure.queries, *self.measure.steps) if self.measure.what == "worst_case" else ()

    @property
    def budgets(self) -> tuple[int, ...]:
        return (self.classifier.k or 0,) if isinstance(self.measure.budgets, str) else self.measure.budgets

    def rows(self) -> list[Row]:
        """What the rows of results say, without their figures; no two tasks of a recipe say the same."""
        if self.measure.what == "certified_accuracy":
            shares = [{**self.row, "budget": m} for m in self.budgets]
            return [*shares, {**self.row, "what": "certified_radius"}]
        if self.measure.what != "worst_case":
            return [self.row]
        return [{**self.row, "budget": m, "beta": beta} for beta in self.measure.beta for m in self.budgets]


@dataclass(frozen=True)
class Recipe:
    """The whole of a run. text: the file as it was.  used: recipes whose classifiers are measured here too.

    threads: of a run on the CPU; None: as many as torch takes. Small networks lose more by a second than they gain.
    paper: figures of the paper, by the rows they belong to.  quoted: figures of others, not run here.
    """

    name: str
    summary: str
    text: bytes
    seed: int
    threads: int | None
    data: Data
    used: tuple[Recipe, ...]
    classifiers: tuple[Classifier, ...]
    measures: tuple[Measure, ...]
    paper: tuple[Row, ...]
    quoted: tuple[Row, ...]

    def everyone(self) -> dict[str, Classifier]:
        """All classifiers that are measured, by name, the used ones first."""
        own = chain.from_iterable(recipe.classifiers for recipe in (*self.used, self))
        return {classifier.name: classifier for classifier in own}

    def folders(self, out: Path) -> dict[str, Path]:
        """Where each classifier of a run in ``out`` lies, by name; the used ones in the folders beside it."""
        homes = [(recipe, out.parent / recipe.name) for recipe in self.used] + [(self, out)]
        return {one.name: home / one.slug for recipe, home in homes for one in recipe.classifiers}

    def tasks(self) -> list[Task]:
        """Every evaluation of the run, in order; worst cases last, since they count what all the others find."""
        everyone = self.everyone()
        tasks = [
            task
            for measure in self.measures
            for name in measure.classifiers
            for task in _tasks(everyone[name], measure)
        ]
        return sorted(tasks, key=lambda task: task.effort)

    def asked(self) -> list[Row]:
        """What the rows of results of a whole run say at least, without their figures."""
        rows = [row for task in self.tasks() for row in task.rows()]
        return rows + [{**row, "unit": "seconds"} for row in self.times() if row["what"] == "training_seconds"]

    def times(self) -> list[Row]:
        """What the rows of results on training times say, without their figures."""
        whats = ("training_seconds", "epoch_seconds", "attack_seconds")
        return [{"what": what, **one.training_row} for one in self.everyone().values() for what in whats]

    def figure(self, found: Measurement) -> Measurement:
        """The measurement with the paper's figure, where there is one."""
        for figure in self.paper:
            if _belongs(figure, found.key):
                return replace(found, paper=figure["value"], paper_n=figure.get("n"))
        return found


def names() -> tuple[str, ...]:
    """The recipes that come with ell0."""
    return tuple(sorted(path.stem for path in SHIPPED.glob("*.toml")))


def slug(classifier: str) -> str:
    """A name as that of a folder: lower case, letters, digits, hyphens and underscores."""
    return "".join(c for c in classifier.lower() if c.isalnum() or c in "-_")


def load(path_or_name: Path | str) -> Recipe:
    """A recipe that comes with ell0, by its name, or a TOML file; checked as a whole, except against the data.

    One that is ``like`` a recipe of ell0 has that one's keys and tables wherever it has none of its own. The keys of a
    table ``[training]`` hold for all its classifiers.
    """
    path = _path(path_or_name)
    text, content = _read(path)
    entire = _completed(path.name, content)
    # What it is like belongs to it: where that changes, a run of before is one of another recipe.
    return _loaded(path, text if entire is content else written(entire).encode(), entire)


def sweep(path_or_name: Path | str) -> tuple[Recipe, ...]:
    """The recipes that one with a table ``[sweep]`` stands for; none, if it has no such table.

        [sweep]              # one recipe for each k with each seed: NAME-k0-seed0, NAME-k0-seed1, ...
        k = [0, 10]          # of every model
        budget = [4, 8]      # of every attack that a classifier is trained against
        seed = [0, 1, 2]     # of the recipe

    Each is a whole recipe, with a text of its own, and can be run without the others.
    """
    path = _path(path_or_name)
    content = _completed(path.name, _read(path)[1])
    top = Table(path.name, content)
    table = top.table("sweep")
    if table is None:
        return ()
    lists = {key: table.take(key, many(whole(least)), ()) for key, least in (("k", 0), ("budget", 1), ("seed", 0))}
    table.close()
    name = top.need("name", TEXT)
    chosen = {key: values for key, values in lists.items() if values}
    if not chosen:
        raise ValueError(f"{table.where}: must have k, budget or seed, each a list")
    recipes = []
    for values in product(*chosen.values()):
        point = dict(zip(chosen, values, strict=True))
        member = _at(table.where, content, point)
        member["name"] = "-".join([name, *(f"{key}{value}" for key, value in point.items())])
        recipes.append(_loaded(path, written(member).encode(), member))
    return tuple(recipes)


def _at(where: str, content: dict[str, Any], point: Mapping[str, int]) -> dict[str, Any]:
    """What a recipe says at one point of its sweep."""
    member = deepcopy({key: value for key, value in content.items() if key not in ("sweep", "like")})
    trainings = [member.get("training", {}), *(one.get("training", {}) for one in member.get("classifier", []))]
    attacks = [training[key] for training in trainings for key in ("attack", "trades") if key in training]
    if "budget" in point and not attacks:
        raise ValueError(f"{where}: budget must be left out where no classifier is trained against an attack")
    if "k" in point:
        for one in member.get("classifier", []):
            one.setdefault("model", {})["k"] = point["k"]
    if "budget" in point:
        for attack in attacks:
            attack["budget"] = point["budget"]
    return member | ({"seed": point["seed"]} if "seed" in point else {})


def _loaded(path: Path, text: bytes, content: dict[str, Any]) -> Recipe:
    top = Table(path.name, content)
    if "sweep" in content:
        raise ValueError(f"{path.name}: is a sweep, which stands for several recipes")
    top.take("like", TEXT, None)
    name = top.need("name", TEXT)
    if slug(name) != name:
        raise ValueError(f"{path.name}: name must be lower-case letters, digits and hyphens, got {name!r}")
    summary, seed = top.need("summary", TEXT), top.take("seed", whole(0), 0)
    threads = top.take("threads", whole(1), None)
    used = tuple(_used(path, name, other) for other in top.take("use", many(TEXT), ()))
    source, over = _data(top, path.parent), top.table("training")
    if over is not None and "classifier" not in content:
        raise ValueError(f"{path.name}: training must be left out of a recipe that trains no classifier of its own")
    for other in used:
        if not source.is_like(other.data):
            raise ValueError(f"{path.name}: data must be that of {other.name}, which it uses")
    written = [_classifier(table, seed, over.content if over else {}, source) for table in top.tables("classifier")]
    classifiers = tuple(chain.from_iterable(some for _, some in written))
    known = {one.name: one for one in chain(classifiers, *(other.classifiers for other in used))}
    groups = {pattern: tuple(one.name for one in some) for pattern, some in written}
    groups |= {name: (name,) for name in known}
    _check_names(path.name, [one for other in used for one in other.classifiers] + list(classifiers))
    measures = tuple(_measure(table, groups, known, source) for table in top.tables("measure"))
    paper, quoted = (tuple(_figure(table) for table in top.tables(key)) for key in ("paper", "quoted"))
    top.close()
    recipe = Recipe(name, summary, text, seed, threads, source, used, classifiers, measures, paper, quoted)
    _check_rows(path.name, recipe)
    return recipe


def _read(path: Path) -> tuple[bytes, dict[str, Any]]:
    """A file as it is, and what it says."""
    try:
        text = path.read_bytes()
        return text, tomllib.loads(text.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} must be TOML: {error}") from error


def _completed(where: str, content: dict[str, Any]) -> dict[str, Any]:
    """What a recipe says, and for the keys and tables that it does not have, the one that it is ``like``."""
    like = content.get("like")
    if like is None:
        return content
    if like not in names():
        near = get_close_matches(str(like), names(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{where}: like must name a recipe that comes with ell0, got {like!r}{hint}")
    _, other = _read(SHIPPED / f"{like}.toml")
    return _completed(like, other) | content


def _path(path_or_name: Path | str) -> Path:
    shipped = SHIPPED / f"{path_or_name}.toml"
    if isinstance(path_or_name, str) and path_or_name in names():
        return shipped
    path = Path(path_or_name)
    if path.is_file():
        return path
    near = get_close_matches(str(path_or_name), names(), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise FileNotFoundError(
        f"recipe must be a TOML file or one of {', '.join(names())}, got {str(path_or_name)!r}{hint}"
    )


def _used(path: Path, name: str, other: str) -> Recipe:
    """A recipe by its name: a file beside this one, that of the run beside this run, or one that comes with ell0."""
    if other == name:
        raise ValueError(f"{path.name}: use must name other recipes, got {other!r}")
    places = (path.with_name(f"{other}.toml"), path.parent.parent / other / "recipe.toml")
    found = next((place for place in places if place.is_file()), None)
    recipe = load(other if found is None else found)
    if recipe.used or not recipe.classifiers or recipe.name != other:
        raise ValueError(f"{path.name}: use must name recipes that train classifiers themselves, got {other!r}")
    return recipe


def _data(top: Table, folder: Path) -> Data:
    table = top.table("data")
    if table is None:
        raise ValueError(f"{top.where}: the table [data] is missing")
    name, npz = table.take("name", choice(*data.SETS), None), table.take("npz", TEXT, None)
    if (name is None) == (npz is None):
        raise ValueError(f"{table.where}: must have name or npz, and not both")
    if npz is not None and "scale" in table.content:
        raise ValueError(f"{table.where}: scale must be left out with npz, which is taken as it is")
    scale = cast(Scale, table.take("scale", choice(*get_args(Scale)), "symmetric"))
    rows, validation = table.take("train_rows", whole(1), None), table.take("validation", FLAG, False)
    table.close()
    return Data(name, None if npz is None else folder / npz, scale, rows, validation)


def _classifier(table: Table, seed: int, over: Mapping[str, Any], source: Data) -> tuple[str, list[Classifier]]:
    """The name as it is written, and the classifier; several, if ``{k}`` or ``{seed}`` in it stands for several values.

    over: what holds for the training of every classifier of the recipe, in place of what it says itself.
    """
    pattern = table.need("name", TEXT)
    words = table.table("model")
    if words is None:
        raise ValueError(f"{table.where}: the table [classifier.model] is missing")
    models = read_model(words)
    if len(models) > 1 and "{k}" not in pattern:
        raise ValueError(f"{table.where}: name must have {{k}} in it where k has several values, got {pattern!r}")
    own = table.table("training")
    training = Table(f"{table.where}, training", {**(own.content if own else {}), **over})
    attack, budget = _training_attack(training.table("attack"), source)
    objective = _objective(training, source)
    if objective is not None and models[0]["name"] in VOTERS:
        raise ValueError(f"{training.where}: must have neither certified nor trades for votes, which have no gradient")
    seeds = training.take("seed", many(whole(0)), (seed,))
    if len(seeds) > 1 and "{seed}" not in pattern:
        raise ValueError(f"{table.where}: name must have {{seed}} in it where seed has several values, got {pattern!r}")
    given = training.rest([each.name for each in fields(TrainConfig) if each.name != "seed"])
    training.close()
    table.close()
    given |= {"rates": tuple(given["rates"])} if isinstance(given.get("rates"), list) else {}
    try:
        config = TrainConfig(**given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{training.where}: {error}") from error
    one = Classifier("", {}, config, attack, budget, objective)
    return pattern, [
        replace(
            one,
            name=pattern.replace("{k}", str(model.get("k"))).replace("{seed}", str(each)),
            model=model,
            training=replace(config, seed=each),
        )
        for model, each in product(models, seeds)
    ]


def _objective(training: Table, source: Data) -> TrainingObjective | None:
    certified, trades = training.table("certified"), training.table("trades")
    if certified is not None and trades is not None:
        raise ValueError(f"{training.where}: must have certified or trades, and not both")
    table = certified or trades
    if table is None:
        return None
    given: dict[str, Any] = {"budget": table.need("budget", whole(1)), "unit": _unit(table)}
    if trades is not None:
        given["low"], given["high"] = stretched(RANGES[source.scale], table.take("beta", POSITIVE, 1.0))
    given |= table.rest(["mix", "ramp", "method", "quick"] if trades is None else _TRADES)
    table.close()
    try:
        return certify.Objective(**given) if trades is None else Trades(**given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{table.where}: {error}") from error


def _training_attack(table: Table | None, source: Data) -> tuple[Attack | None, int]:
    if table is None:
        return None, 0
    name, budget = table.need("name", choice(*ATTACKS)), table.need("budget", whole(1))
    beta, unit, parameters = table.take("beta", POSITIVE, 1.0), _unit(table), table.rest(_parameters(name))
    attack = Attack(name, beta, unit, parameters, source.scale)
    table.close()
    _rehearse(table.where, attack)
    return attack, budget


def _parameters(attack: str) -> list[str]:
    """The parameters of an attack that a recipe may set."""
    return list(ATTACKS[attack].settings)


def _rehearse(where: str, attack: Attack, **more: Any) -> None:
    """Calls the attack on a row that is wrong from the start: it costs nothing, and wrong parameters raise."""

    def model(x: Tensor) -> Tensor:
        return x.flatten(1)[:, :2] * 0 + torch.tensor([1.0, 0.0])

    x, y = torch.zeros(1, 3, 2, 2), torch.ones(1, dtype=torch.int64)
    try:
        attack.configured(**more)(model, x, y, attack.ball(1))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{where}: {error}") from error


def _unit(table: Table) -> Unit:
    return cast(Unit, table.take("unit", choice(*get_args(Unit)), "feature"))


_WHATS = ("clean_accuracy", "certified_accuracy", "robust_accuracy", "worst_case", "median_distance")


def _measure(
    table: Table, groups: Mapping[str, tuple[str, ...]], known: Mapping[str, Classifier], source: Data
) -> Measure:
    what = table.need("what", choice(*_WHATS))
    everyone = tuple(dict.fromkeys(chain.from_iterable(groups.values())))
    chosen = table.take("classifiers", many(choice(*groups)), everyone)
    base = Measure(
        what,
        tuple(dict.fromkeys(chain.from_iterable(groups.get(name, (name,)) for name in chosen))),
        scale=source.scale,
        rows=table.take("rows", whole(1), None),
        split=table.take("split", choice("test", "validation"), "test"),
        protocol=table.take("protocol", TEXT, None),
    )
    if base.split == "validation" and not source.validation:
        raise ValueError(f"{table.where}: split must be 'test' where data has not validation = true")
    if what != "clean_accuracy":
        # A certificate is for any value, unless a box is asked for.
        values = () if what == "certified_accuracy" else (1.0,)
        base = replace(base, beta=table.take("beta", many(POSITIVE), values), unit=_unit(table))
    if what in ("certified_accuracy", "robust_accuracy", "worst_case"):
        written = table.need("budgets", ANYTHING)
        base = replace(base, budgets="k" if written == "k" else table.need("budgets", many(whole(0))))
        for name in base.classifiers if written == "k" else ():
            if known[name].k is None:
                raise ValueError(f"{table.where}: budgets must be a list for {name}, which has no k, got 'k'")
    if what == "worst_case":
        _check_gradients(table.where, base, known)
        queries, steps = table.take("queries", whole(1), 1000), table.take("steps", whole(1), 100)
        base = replace(base, queries=(queries,), steps=(steps,), beta=tuple(sorted(base.beta)))
    elif what == "certified_accuracy":
        method = table.take("method", choice(*get_args(certify.Method)), "best")
        base = replace(base, parameters={"method": method})
        for name, key in product(base.classifiers, ("beta", "method")):
            if known[name].votes and key in table.content:
                raise ValueError(f"{table.where}: {key} must be left out for {name}, whose votes are for any value")
    elif what != "clean_accuracy":
        base = _with_attack(table, base, "pointwise" if what == "median_distance" else "sparse_rs")
        if base.attack is not None and ATTACKS[base.attack].white_box:
            _check_gradients(table.where, base, known)
    table.close()
    if base.attack is not None:
        for more in _efforts(base):
            for beta in base.beta:
                attack = Attack(base.attack, beta, base.unit, base.parameters, base.scale)
                _rehearse(table.where, attack, **more)
    return base


def _check_gradients(where: str, measure: Measure, known: Mapping[str, Classifier]) -> None:
    for name in measure.classifiers:
        if known[name].votes:
            raise ValueError(f"{where}: classifiers must be without {name}, whose votes have no gradient")


def _with_attack(table: Table, base: Measure, default: str) -> Measure:
    attack = table.take("attack", choice(*ATTACKS), default)
    known = _parameters(attack)
    lists = {key: table.take(key, many(whole(1)), ()) for key in ("queries", "steps") if key in known}
    parameters = table.rest([key for key in known if key not in lists])
    queries, steps = (lists.get(key, ()) for key in ("queries", "steps"))
    return replace(base, attack=attack, parameters=parameters, queries=queries, steps=steps)


def _efforts(measure: Measure) -> list[dict[str, int]]:
    """What an attack may spend, a figure for each."""
    lists = [[{key: value} for value in getattr(measure, key)] or [{}] for key in ("queries", "steps")]
    return [one | other for one, other in product(*lists)]


def _tasks(one: Classifier, measure: Measure) -> Iterator[Task]:
    row: Row = {
        "what": measure.what,
        **one.row,
        **({} if measure.protocol is None else {"protocol": measure.protocol}),
        **({} if measure.split == "test" else {"split": measure.split}),
        **({} if measure.scale == "symmetric" else {"scale": measure.scale}),
    }
    if measure.what == "clean_accuracy":
        yield Task(one, measure, row)
        return
    row["unit"] = measure.unit
    if measure.what == "worst_case":
        spent = {"queries": measure.queries[0], "steps": measure.steps[0]}
        yield Task(one, measure, {**row, "what": "robust_accuracy", "attack": WORST_CASE, **spent})
        return
    if measure.what == "certified_accuracy":
        for limit in [{"beta": beta} for beta in measure.beta] or [{}]:
            yield Task(one, measure, {**row, **({} if one.votes else measure.parameters), **limit})
        return
    row |= {"attack": measure.attack, **measure.parameters}
    budgets = [{"budget": m} for m in Task(one, measure, row).budgets] or [{}]
    for beta, effort, budget in product(measure.beta, _efforts(measure), budgets):
        yield Task(one, measure, {**row, **budget, **effort, "beta": beta})


def _figure(table: Table) -> Row:
    table.need("value", NUMBER)
    for key, value in table.content.items():
        if not isinstance(value, _SCALAR):
            raise ValueError(f"{table.where}: {key} must be a text, a number, true or false, got {value!r}")
    return dict(table.content)


def _belongs(figure: Row, row: Row) -> bool:
    if row.get("attack") == WORST_CASE != figure.get("attack"):
        return False  # a figure of one attack, in words that fit both
    return all(row.get(key) == value for key, value in figure.items() if key not in ("value", "n"))


def _check_names(where: str, classifiers: list[Classifier]) -> None:
    if not classifiers:
        raise ValueError(f"{where}: must train a classifier ([[classifier]]) or use another recipe's (use = [...])")
    seen: dict[str, str] = {}
    for one in classifiers:
        if not one.slug:
            raise ValueError(f"{where}: a classifier's name must have a letter or a digit, got {one.name!r}")
        if one.slug in seen:
            raise ValueError(f"{where}: classifiers must have different names, got {seen[one.slug]!r} and {one.name!r}")
        seen[one.slug] = one.name


def _check_rows(where: str, recipe: Recipe) -> None:
    rows = [row for task in recipe.tasks() for row in task.rows()]
    for i, row in enumerate(rows):
        if row in rows[:i]:
            raise ValueError(f"{where}: no two measures may be the same, got {_words(row)} twice")
    for i, figure in enumerate(recipe.paper, 1):
        if not any(_belongs(figure, row) for row in (*rows, *recipe.times())):
            raise ValueError(f"{where}, paper {i}: must belong to something that is measured, got {_words(figure)}")


def _words(row: Row) -> str:
    return ", ".join(f"{key} = {value}" for key, value in row.items())
