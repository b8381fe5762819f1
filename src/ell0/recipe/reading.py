"""A TOML file becomes a `Recipe`, checked as a whole, except against the data."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import fields, replace
from itertools import chain, product
from pathlib import Path
from typing import Any, cast, get_args

import torch
from torch import Tensor

from .. import certify, data
from ..attacks import ATTACKS
from ..common import did_you_mean
from ..files import read
from ..results import WORST_CASE, Row
from ..threat import Unit
from ..train import Trades, TrainConfig, TrainingObjective
from .models import MODELS, VOTERS, read_models
from .plan import COUNTS, Box, BoxedAttack, Classifier, Recipe, Task, ball_within, belongs, slug
from .splits import DataSource
from .toml import FLAG, NUMBER, POSITIVE, TEXT, Kind, TomlTable, choice, many, named, to_toml, whole

SHIPPED = Path(__file__).parent / "recipes"

_BUDGETS: Kind[Any] = Kind(
    f'"k" or {many(whole(0)).words}', lambda value: value if value == "k" else many(whole(0)).read(value)
)


def names() -> tuple[str, ...]:
    """The recipes that come with ell0."""
    return tuple(sorted(path.stem for path in SHIPPED.glob("*.toml")))


def load(path_or_name: Path | str) -> Recipe:
    """A recipe that comes with ell0, by its name, or a TOML file.

    A recipe that is ``like`` one of ell0 takes from it every top-level key and table that it does not have itself. The
    keys of a table ``[training]`` hold for all its classifiers.
    """
    path = _path(path_or_name)
    text, content = _read(path)
    entire = _completed(path.name, content)
    # The text has what comes from ``like``, too: if that changes, a run of before is one of another recipe.
    return _recipe(path, text if entire is content else to_toml(entire).encode(), entire)


def sweep(path_or_name: Path | str) -> tuple[Recipe, ...]:
    """The recipes that one with a table ``[sweep]`` stands for; none, if it has no such table.

    [sweep]              # one recipe for each k with each seed: NAME-k0-seed0, NAME-k0-seed1, ...
    k = [0, 10]          # of every model
    budget = [4, 8]      # of every attack that a classifier is trained against
    seed = [0, 1, 2]     # of the recipe
    """
    path = _path(path_or_name)
    content = _completed(path.name, _read(path)[1])
    top = TomlTable(path.name, content)
    table = top.table("sweep")
    if table is None:
        return ()
    lists = {key: table.take(key, many(whole(least)), ()) for key, least in (("k", 0), ("budget", 1), ("seed", 0))}
    table.close()
    chosen = {key: values for key, values in lists.items() if values}
    if not chosen:
        raise ValueError(f"{table.where}: must have k, budget or seed, each a list")
    name, recipes = top.need("name", TEXT), []
    for values in product(*chosen.values()):
        point = dict(zip(chosen, values, strict=True))
        member = _at(table.where, content, point)
        member["name"] = "-".join([name, *(f"{key}{value}" for key, value in point.items())])
        recipes.append(_recipe(path, to_toml(member).encode(), member))
    return tuple(recipes)


def source(path_or_name: Path | str) -> tuple[str, str]:
    """The name that a recipe or a sweep gives itself, and its file as it is."""
    path = _path(path_or_name)
    text, content = _read(path)
    return TomlTable(path.name, _completed(path.name, content)).need("name", TEXT), text.decode()


def _at(where: str, content: dict[str, Any], point: Mapping[str, int]) -> dict[str, Any]:
    """The content of a recipe at one point of its sweep."""
    member = deepcopy({key: value for key, value in content.items() if key not in ("sweep", "like")})
    classifiers = member.get("classifier", [])
    trainings = [member.get("training", {}), *(one.get("training", {}) for one in classifiers)]
    attacks = [training[key] for training in trainings for key in ("attack", "trades") if key in training]
    if "budget" in point and not attacks:
        raise ValueError(f"{where}: budget must be left out if no classifier is trained against an attack")
    for one in classifiers if "k" in point else ():
        one.setdefault("model", {})["k"] = point["k"]
    for attack in attacks if "budget" in point else ():
        attack["budget"] = point["budget"]
    return member | ({"seed": point["seed"]} if "seed" in point else {})


def _path(path_or_name: Path | str) -> Path:
    if isinstance(path_or_name, str) and path_or_name in names():
        return SHIPPED / f"{path_or_name}.toml"
    path = Path(path_or_name)
    if not path.is_file():
        hint = did_you_mean(path_or_name, names()) or "; `ell0 run --list` shows them"
        raise FileNotFoundError(f"recipe must be a TOML file that exists or a recipe of ell0, got {str(path)!r}{hint}")
    return path


def _read(path: Path) -> tuple[bytes, dict[str, Any]]:
    try:
        text = read(path.resolve())
        return text, tomllib.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} must be TOML: {error}") from error


def _completed(where: str, content: dict[str, Any]) -> dict[str, Any]:
    """The content of a recipe, with the keys and tables of the one that it is ``like`` where it has none."""
    like = content.get("like")
    if like is None:
        return content
    if like not in names():
        raise ValueError(f"{where}: like must name a recipe of ell0, got {like!r}{did_you_mean(like, names())}")
    return _completed(like, _read(SHIPPED / f"{like}.toml")[1]) | content


def _recipe(path: Path, text: bytes, content: dict[str, Any]) -> Recipe:
    top = TomlTable(path.name, content)
    if "sweep" in content:
        raise ValueError(f"{path.name}: is a sweep, which stands for several recipes")
    top.take("like", TEXT, None)
    name = top.need("name", TEXT)
    if slug(name) != name:
        raise ValueError(f"{path.name}: name must be lower-case letters, digits and hyphens, got {name!r}")
    summary, seed = top.need("summary", TEXT), top.take("seed", whole(0), 0)
    threads = top.take("threads", whole(1), None)
    used = tuple(_used(path, name, other) for other in top.take("use", many(TEXT), ()))
    source, over = _data(top, path.parent), top.table("training") if "classifier" in content else None
    for other in used:
        if not source.same(other.data):
            raise ValueError(f"{path.name}: data must be that of {other.name}, which it uses")
    trained = over.content if over else {}
    own = [_classifiers(table, seed, trained, source, path.parent) for table in top.tables("classifier")]
    classifiers = tuple(chain(*(some for _, some in own)))
    known = {one.name: one for one in chain(classifiers, *(other.classifiers for other in used))}
    groups = dict(own) | {name: [one] for name, one in known.items()}
    tasks = chain(*(_tasks(table, groups, [*known], source) for table in top.tables("measure")))
    ordered = sorted(tasks, key=_turn)
    figures = {key: top.tables(key) for key in ("paper", "quoted")}
    for table in chain(*figures.values()):
        table.need("value", NUMBER)
    paper, quoted = (tuple(table.content for table in some) for some in figures.values())
    if "like" in content:
        paper = tuple(figure for figure in paper if figure.get("classifier") in (None, *known))
    top.close()
    recipe = Recipe(name, summary, text, seed, threads, source, used, classifiers, tuple(ordered), paper, quoted)
    _check(path.name, recipe)
    return recipe


def _used(path: Path, name: str, other: str) -> Recipe:
    """A recipe by its name: a file beside this one, that of the run beside this run, or one that comes with ell0."""
    if other == name:
        raise ValueError(f"{path.name}: use must name other recipes, got {other!r}")
    places = (path.with_name(f"{other}.toml"), path.parent.parent / other / "recipe.toml")
    place = _path(next((place for place in places if place.is_file()), other))
    rule = f"{path.name}: use must name recipes that train classifiers themselves, got {other!r}"
    if "use" in _completed(place.name, _read(place)[1]):  # before it is loaded: it may use this one
        raise ValueError(rule)
    recipe = load(place)
    if not recipe.classifiers or recipe.name != other:
        raise ValueError(rule)
    return recipe


def _data(top: TomlTable, folder: Path) -> DataSource:
    table = top.need_table("data")
    name, file = table.take("name", choice(*data.SETS), None), table.take("file", TEXT, None)
    if (name is None) == (file is None):
        raise ValueError(f"{table.where}: must have name or file, and not both")
    rows, validation = table.take("train_rows", whole(1), None), table.take("validation", FLAG, False)
    low, high = (table.take(key, NUMBER, None) if file else None for key in ("low", "high"))
    table.close()
    if low is None and high is None:
        return DataSource(name, None if file is None else folder / file, rows, validation)
    if low is None or high is None or low >= high:
        raise ValueError(f"{table.where}: low and high must both be given, low below high, got {low} and {high}")
    return DataSource(None, folder / (file or ""), rows, validation, (low, high))


def _classifiers(
    table: TomlTable, seed: int, over: Mapping[str, Any], source: DataSource, folder: Path
) -> tuple[str, list[Classifier]]:
    """The name as it is written, and its classifiers: one for each value of ``{k}`` and ``{seed}`` in the name.

    over: keys that replace those of the classifier's own training.  folder: that of the recipe.
    """
    pattern = table.need("name", TEXT)
    weights = table.take("weights", TEXT, None)
    models = read_models(table.need_table("model"))
    own = table.table("training")
    if weights is not None and (own or over):
        raise ValueError(f"{table.where}: must have weights or training, and not both")
    ready = weights is not None or ("python" in models[0] and own is None and not over)
    training = TomlTable(f"{table.where}, training", {**(own.content if own else {}), **over})
    attack, budget = _training_attack(training.table("attack"), source)
    name = models[0].get("name", "")
    objective = _objective(training, source, votes=name == "votes")
    if name in VOTERS and not isinstance(objective, certify.VoteObjective | None):
        raise ValueError(f"{training.where}: must have neither certified nor trades for votes, which have no gradient")
    if (its := getattr(MODELS.get(name), "objective", None)) is not None:
        if objective is not None:
            raise ValueError(f"{training.where}: must have neither certified nor trades for a model with its own loss")
        objective = its
    seeds = training.take("seed", many(whole(0)), (seed,))
    for key, values in (("k", models), ("seed", seeds)):
        if len(values) > 1 and f"{{{key}}}" not in pattern:
            raise ValueError(f"{table.where}: name must have {{{key}}} if {key} has several values, got {pattern!r}")
    given = training.rest([each.name for each in fields(TrainConfig) if each.name != "seed"])
    training.close()
    table.close()
    given |= {"rates": tuple(given["rates"])} if isinstance(given.get("rates"), list) else {}
    with named(training.where):
        config = TrainConfig(**given)
    classifiers = []
    for model, each in product(models, seeds):
        name = pattern.replace("{k}", str(model.get("k"))).replace("{seed}", str(each))
        there = None if weights is None else folder / weights
        classifiers.append(Classifier(name, model, replace(config, seed=each), attack, budget, objective, ready, there))
    return pattern, classifiers


def _objective(training: TomlTable, source: DataSource, votes: bool) -> TrainingObjective | None:
    """votes: the model is a vote of parts, which has a certificate of its own."""
    certified, trades = training.table("certified"), training.table("trades")
    if certified is not None and trades is not None:
        raise ValueError(f"{training.where}: must have certified or trades, and not both")
    table = certified or trades
    if table is None:
        return None
    given: dict[str, Any] = {"budget": table.need("budget", whole(1))}
    if votes and trades is None:
        given |= table.rest([each.name for each in fields(certify.VoteObjective)])
        table.close()
        with named(table.where):
            return certify.VoteObjective(**given)
    given["unit"] = _unit(table)
    if trades is not None:
        ball = ball_within(table.take("beta", POSITIVE, 1.0), 1, "feature", source.box)
        given |= {"low": ball.low, "high": ball.high}
    given |= table.rest(["mix", "ramp", "quick", "power"] if trades is None else ["steps", "loss", "weight"])
    table.close()
    with named(table.where):
        return certify.Objective(**given) if trades is None else Trades(**given)


def _training_attack(table: TomlTable | None, source: DataSource) -> tuple[BoxedAttack | None, int]:
    if table is None:
        return None, 0
    name, budget = table.need("name", choice(*ATTACKS)), table.need("budget", whole(1))
    beta, unit, box_of = table.take("beta", POSITIVE, 1.0), _unit(table), _box_of(table, source)
    attack = BoxedAttack(name, beta, unit, table.rest([*ATTACKS[name].settings]), box_of)
    table.close()
    _rehearse(table.where, attack)
    return attack, budget


def _rehearse(where: str, attack: BoxedAttack) -> None:
    """Calls the attack on a row that is misclassified from the start: cheap, and wrong settings raise."""

    def model(x: Tensor) -> Tensor:
        return x.flatten(1)[:, :2] * 0 + torch.tensor([1.0, 0.0])

    channels = data.SETS[attack.box_of].shape[0] if isinstance(attack.box_of, str) else 3
    x, y = torch.zeros(1, channels, 2, 2), torch.ones(1, dtype=torch.int64)
    with named(where):
        attack.configured()(model, x, y, attack.ball(1))


def _unit(table: TomlTable) -> Unit:
    return cast(Unit, table.take("unit", choice(*get_args(Unit)), "feature"))


def _box_of(table: TomlTable, source: DataSource) -> Box:
    """That of the data or, if the table says so, the name of the data set whose normalised images span it."""
    if table.take("box", choice("normalised"), None) is None:
        return source.box
    if source.name is None:
        raise ValueError(f"{table.where}: box must be left out for data from a file, which has no mean and deviation")
    return source.name


def _tasks(
    table: TomlTable, groups: Mapping[str, list[Classifier]], everyone: list[str], source: DataSource
) -> list[Task]:
    """The tasks of one measure, on each of its classifiers."""
    whats = ("clean_accuracy", "certified_accuracy", "robust_accuracy", "worst_case", "median_distance")
    what = table.need("what", choice(*whats))
    chosen = table.take("classifiers", many(choice(*groups)), everyone)
    classifiers = [*{one.name: one for name in chosen for one in groups[name]}.values()]
    voters = [one.name for one in classifiers if one.votes]
    split = table.take("split", choice("test", "validation"), "test")
    if split == "validation" and not source.validation:
        raise ValueError(f"{table.where}: split must be 'test' unless data has validation = true")
    rows, first = table.take("rows", whole(1), None), table.take("first", whole(0), 0)
    protocol = table.take("protocol", TEXT, None)
    shared: Row = {"what": what} | ({"protocol": protocol} if protocol else {})
    shared |= ({} if split == "test" else {"split": split}) | ({"first": first} if first else {})
    betas: tuple[float, ...] = ()
    attacks = what in ("robust_accuracy", "worst_case", "median_distance")
    box_of = _box_of(table, source) if attacks else source.box if what == "certified_accuracy" else None
    if box_of is not None and (attacks or "beta" in table.content):
        shared["box"] = "normalised" if isinstance(box_of, str) else "[{:g}, {:g}]".format(*box_of)
    share = what in ("robust_accuracy", "worst_case")
    right = share and table.take("over", choice("right"), None) is not None
    skip = what == "worst_case" and table.take("skip_proven", FLAG, False)
    part = table.take("part", whole(1), None) if what == "robust_accuracy" else None
    if part is not None and (rows is None or part >= rows):
        raise ValueError(
            f"{table.where}: part must be less than rows, which must be given, got {part} with rows={rows}"
        )
    if what != "clean_accuracy":
        # A certificate is for any value, unless a box is asked for.
        betas = table.take("beta", many(POSITIVE), () if what == "certified_accuracy" else (1.0,))
        shared["unit"] = unit = _unit(table)
    written = table.need("budgets", _BUDGETS) if what not in ("clean_accuracy", "median_distance") else ()
    # What each task adds to the row, its boxes, and its attack.
    variants: list[tuple[Row, tuple[float, ...], BoxedAttack | None]] = []
    method, white_box, counts = None, what == "worst_case", tuple[str, ...]()
    if what == "worst_case":
        spent = {"queries": table.take("queries", whole(1), 1000), "steps": table.take("steps", whole(1), 100)}
        shared |= {"what": "robust_accuracy", "attack": WORST_CASE, **spent} | ({"skip_proven": True} if skip else {})
        variants = [({}, tuple(sorted(betas)), None)]
    elif what == "certified_accuracy":
        if voters and "beta" in table.content:
            raise ValueError(f"{table.where}: beta must be left out for {voters[0]}, whose votes are for any value")
        method = table.take("method", choice(*get_args(certify.Method), *get_args(certify.Rule)), "best")
        variants = [({"beta": beta}, (beta,), None) for beta in betas]
    elif what != "clean_accuracy":
        name = table.take("attack", choice(*ATTACKS), "pointwise" if what == "median_distance" else "sparse_rs")
        settings, white_box = ATTACKS[name].settings, ATTACKS[name].white_box
        if (what, name) == ("median_distance", "pointwise"):
            counts = table.take("count", many(choice(*COUNTS)), ())
        efforts: list[Row] = [{}]
        for key in ("queries", "steps"):
            values = table.take(key, many(whole(1)), ()) if key in settings else ()
            efforts = [{**effort, key: value} for effort in efforts for value in values] if values else efforts
        given = table.rest([key for key in settings if key not in ("queries", "steps")])
        shared |= {"attack": name, **given}
        for beta, effort in product(betas, efforts):
            boxed = BoxedAttack(name, beta, unit, given | effort, box_of)
            _rehearse(table.where, boxed)
            variants.append(({**effort, "beta": beta}, (beta,), boxed))
    table.close()
    if white_box and (flat := [one.name for one in classifiers if not one.has_gradient]):
        raise ValueError(f"{table.where}: classifiers must be without {flat[0]}, whose votes have no gradient")
    tasks: list[Task] = []
    for one in classifiers:
        if written == "k" and one.k is None:
            raise ValueError(f"{table.where}: budgets must be a list for {one.name}, which has no k, got 'k'")
        budgets: Any = (one.k,) if written == "k" else written
        how = {} if method is None or (one.votes and method == "best") else {"method": method}
        row = {**shared, **one.identity, **how}
        each: list[Row] = [{"budget": m} for m in budgets] if what == "robust_accuracy" else [{}]
        for (entries, boxes, attack), budget in product(variants or [({}, (), None)], each):
            full = {**row, **budget, **entries}
            tasks.append(Task(one, what, full, budgets, boxes, rows, attack, box_of, first, right, part, counts, skip))
    return tasks


def _check(where: str, recipe: Recipe) -> None:
    """Raises ValueError unless the recipe has classifiers, each name and measure once, and figures that it measures."""
    if not recipe.everyone():
        raise ValueError(f"{where}: must train a classifier ([[classifier]]) or use another recipe's (use = [...])")
    seen: dict[str, str] = {}
    for name in (one.name for one in recipe.everyone()):
        if not slug(name):
            raise ValueError(f"{where}: a classifier's name must have a letter or a digit, got {name!r}")
        if slug(name) in seen:
            raise ValueError(f"{where}: classifiers must have different names, got {seen[slug(name)]!r} and {name!r}")
        seen[slug(name)] = name
    for task in (task for task in recipe.tasks if task.skip_proven):
        if not any(_covers(other, task) for other in recipe.tasks):
            raise ValueError(f"{where}: skip_proven needs a certified_accuracy of the same rows and unit, for {task}")
    keys = [key for task in recipe.tasks for key in task.identities()]
    for i, key in enumerate(keys):
        if key in keys[:i]:
            raise ValueError(f"{where}: no two measures may be the same, got {key} twice")
    for i, figure in enumerate(recipe.paper, 1):
        if not any(belongs(figure, key) for key in (*keys, *recipe.times())):
            raise ValueError(f"{where}, paper {i}: must belong to something that is measured, got {figure}")


def _turn(task: Task) -> tuple[int, ...]:
    """Certificates come first: clean accuracy can be read off them, and rows that they prove need no attack.

    Worst cases come last, the hardest at the end: they count what all the others find.
    """
    if task.what == "worst_case":
        return 2, task.row["queries"], task.row["steps"]
    return (0 if task.what == "certified_accuracy" else 1,)


def _covers(certified: Task, task: Task) -> bool:
    """Whether a task certifies all rows of another, in its boxes."""
    enough = certified.rows is None or (task.rows is not None and task.rows <= certified.rows)
    wide = not certified.betas or certified.betas[0] >= max(task.betas)
    own = not certified.classifier.votes or "method" not in certified.row  # the rule of the model itself
    return certified.what == "certified_accuracy" and certified.shares_rows(task) and enough and wide and own
