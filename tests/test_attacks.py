"""The contract that every attack keeps, and how near the known optimum of a linear model it comes."""

import inspect
import itertools
import math
import re
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor, nn

import ell0
from balls import within_one
from ell0 import L0Ball
from ell0.attacks import ATTACKS, AttackResult
from ell0.attacks.graphs import Graphs
from ell0.certify import Rule
from ell0.common import Step
from ell0.threat import Unit
from oracle import Sums, margins, network, optimum, random, vote
from watching import Watch

inf, nan = math.inf, math.nan
SHAPES: list[tuple[Unit, tuple[int, ...]]] = [("feature", (12,)), ("feature", (3, 2, 2)), ("pixel", (3, 3, 4))]

# 100 cases in `make test`, 500 in `make test-full`.
cases = settings(max_examples=min(500, settings().max_examples // 2))
every_attack = pytest.mark.parametrize("name", ATTACKS)
TENSORS = ("x_adv", "success", "distance", "queries", "x_best", "margin")
RULES: list[tuple[str, dict[str, Any]]] = [("pointwise", {"rule": rule}) for rule in ("foolbox", "foolbox-flat")]


@dataclass(frozen=True)
class Problem:
    """Rows to attack; ``labels`` are what the attack works against, or for."""

    model: Callable[[Tensor], Tensor]
    x: Tensor
    y: Tensor
    ball: L0Ball
    target: Tensor | None = None

    @property
    def labels(self) -> Tensor:
        return self.y if self.target is None else self.target

    def margin(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return margins(self.model(x), self.labels, targeted=self.target is not None)

    def broken(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            given = self.model(x).argmax(1)
        return given != self.y if self.target is None else given == self.target

    def attack(self, name: str, seed: int = 0, rows: Tensor | None = None, **changes: Any) -> AttackResult:
        given = {"target": self.target, "rows": rows, "generator": Generator().manual_seed(seed)}
        return ATTACKS[name](self.model, self.x, self.y, self.ball, **given, **{**ATTACKS[name].cheap, **changes})

    def part(self, which: Tensor) -> "Problem":
        """Some of the rows, the box and the mask with them."""
        target = None if self.target is None else self.target[which]
        return Problem(self.model, self.x[which], self.y[which], self.ball.part(self.x, which), target)


def problem(
    unit: Unit = "feature",
    shape: tuple[int, ...] = (12,),
    n: int = 7,
    *,
    budget: int = 2,
    targeted: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Problem:
    """Rows on a small network; in larger batches every fifth one is mislabelled."""
    model = network(math.prod(shape), seed=seed)
    x = random(n, *shape, seed=seed + 7).clamp(-0.9, 0.9).to(dtype)
    y = model(x).argmax(1)
    y[3::5] = (y[3::5] + 1) % 3
    return Problem(model, x, y, within_one(budget, unit), (y + 1) % 3 if targeted else None)


def check(p: Problem, result: AttackResult, most: float = inf) -> None:
    """Everything that a result says of itself, found out again."""
    n = len(p.x)
    assert result.x_adv.shape == result.x_best.shape == p.x.shape
    assert result.x_adv.dtype == result.x_best.dtype == p.x.dtype
    assert result.success.dtype == torch.bool
    assert result.distance.dtype == result.queries.dtype == torch.int64
    assert all(t.shape == (n,) for t in (result.success, result.distance, result.queries, result.margin))
    assert not any(getattr(result, name).requires_grad for name in TENSORS)

    for points in (result.x_adv, result.x_best):
        assert p.ball.contains(p.x, points).all()
    start, success = p.broken(p.x), result.success
    assert torch.equal(p.broken(result.x_adv), success | start)
    assert success[start].all()
    assert not result.distance[start].any()
    assert not result.queries[start].any()
    assert torch.equal(result.x_adv[~success | start], p.x[~success | start])
    assert torch.equal(result.distance, torch.where(success, p.ball.count(p.x, result.x_adv), -1))

    assert torch.equal(result.margin, p.margin(result.x_best))
    assert (result.margin <= p.margin(p.x)).all()
    assert (result.margin <= p.margin(result.x_adv)).all()
    assert (result.margin[~success] >= 0).all()  # a lower one would have been a success

    assert (result.queries <= most).all()
    mutable = torch.tensor(True) if p.ball.mutable is None else p.ball.mutable
    free = mutable.expand_as(p.x).flatten(1).any(1) & (p.ball.budget > 0)
    assert (result.queries[~success & free] > 0).all()
    assert not result.queries[~free].any() or p.ball.budget


def same(one: AttackResult, other: AttackResult) -> bool:
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in TENSORS)


def most_queries(name: str) -> float:
    """What a row may cost with cheap settings, for an attack that counts queries."""
    return float(ATTACKS[name].cheap.get("queries", inf))


@every_attack
def test_a_declaration_fits_its_attack(name: str) -> None:
    own = ATTACKS[name]
    assert own is getattr(ell0.attacks, name)
    assert own.white_box >= own.gradients_only
    for settings_ in (own.cheap, own.strong or {}, *own.variants.values()):
        assert set(settings_) <= set(own.settings)
    assert {"generator", "rows", "target", "progress"} <= set(inspect.signature(own).parameters) - set(own.settings)
    with pytest.raises(TypeError, match="missing 4 required positional arguments: 'white_box'"):
        ell0.attacks.attack(cheap={}, strong={})(own.function)


@every_attack
@pytest.mark.parametrize("targeted", [False, True])
@pytest.mark.parametrize("n", [7, 64])
@pytest.mark.parametrize(("unit", "shape"), SHAPES)
def test_a_result_is_what_it_says(name: str, unit: Unit, shape: tuple[int, ...], n: int, targeted: bool) -> None:
    p = problem(unit, shape, n, targeted=targeted)
    x, y = p.x.clone(), p.y.clone()
    result = p.attack(name)
    check(p, result, most_queries(name))
    assert torch.equal(p.y, y)
    assert torch.equal(p.x, x)
    if n == 64:
        tried = ~p.broken(p.x)
        assert result.success[tried].any()
        # A decision-based attack on a hopeless row may never see a point of the ball.
        assert (result.margin < p.margin(p.x))[tried].any()


@st.composite
def problems(draw: st.DrawFn) -> tuple[Problem, Tensor]:
    """Networks and votes of parts, boxes of every shape, frozen numbers, any budget; and row ids."""
    unit, shape = draw(st.sampled_from([*SHAPES, ("feature", (1,)), ("pixel", (2, 1, 3))]))
    n, dtype = draw(st.sampled_from([1, 2, 5])), draw(st.sampled_from([torch.float32, torch.float64]))
    budget, seed = draw(st.integers(0, math.prod(shape[-2:] if unit == "pixel" else shape))), draw(st.integers(0, 1000))
    p = problem(unit, shape, n, budget=budget, targeted=draw(st.booleans()), dtype=dtype, seed=seed)
    if rule := draw(st.sampled_from([None, *get_args(Rule)])):
        model = vote(shape, min(4, math.prod(shape[-2:])), seed=seed, rule=rule)
        y = (model(p.x).argmax(1) + (torch.arange(n) % 5 == 3)) % 3
        p = replace(p, model=model, y=y, target=None if p.target is None else (y + 1) % 3)
    generator = Generator().manual_seed(draw(st.integers(0, 1000)))

    def numbers(kind: str) -> Tensor:
        size = {"row": p.x.shape, "input": shape, "last": shape[-1:]}[kind]
        return torch.rand(size, generator=generator, dtype=torch.float64)

    kinds = st.sampled_from(["number", "row", "input", "last"])
    low, high = (draw(kinds) for _ in range(2))
    mutable = draw(st.sampled_from([None, "row", "input", "last"]))
    box = -1.0 if low == "number" else -numbers(low), 1.5 if high == "number" else numbers(high)
    mask = None if mutable is None else numbers(mutable) < draw(st.sampled_from([0.0, 0.5, 0.9]))
    return replace(p, ball=L0Ball(budget, unit, *box, mask)), torch.randperm(1000, generator=generator)[:n]


@every_attack
@cases
@given(problems())
def test_the_contract_holds_everywhere(name: str, case: tuple[Problem, Tensor]) -> None:
    p, rows = case
    whole = p.attack(name, rows=rows)
    check(p, whole, most_queries(name))
    last = torch.tensor([len(p.x) - 1])
    alone = p.part(last).attack(name, rows=rows[last])
    assert same(alone, AttackResult(*(getattr(whole, name)[last] for name in TENSORS)))


def rugged(x: Tensor) -> Tensor:
    """Always class 0, by a margin that no point tells of another."""
    wave = torch.sin(1000 * x.flatten(1).double() * torch.arange(1, x[0].numel() + 1)).sum(1)
    return torch.stack([100 + wave, torch.zeros_like(wave)], 1)


@every_attack
def test_the_key_decides_the_draws(name: str) -> None:
    p = problem(n=20, budget=12)
    p = replace(p, model=rugged, y=torch.zeros_like(p.y))
    state = torch.random.get_rng_state()
    first = p.attack(name, seed=3)
    assert same(first, p.attack(name, seed=3))
    if ATTACKS[name].random:
        assert not torch.equal(first.x_best, p.attack(name, seed=4).x_best)
        assert not torch.equal(first.x_best, p.attack(name, seed=3, rows=torch.arange(20) + 20).x_best)
    # No generator: a private seed 0.
    assert same(p.attack(name, seed=0), ATTACKS[name](rugged, p.x, p.y, p.ball, **ATTACKS[name].cheap))
    assert torch.equal(torch.random.get_rng_state(), state)


@every_attack
def test_progress_is_reported_and_changes_nothing(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    p, steps = problem(n=20), list[Step]()
    assert same(p.attack(name), p.attack(name, progress=steps.append))
    assert steps
    assert all(step.what.startswith(name) and 0 <= step.done < (step.total or 0) for step in steps)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("name", "rule"), [*((name, {}) for name in ATTACKS), *RULES])
@pytest.mark.parametrize(("unit", "shape"), [SHAPES[0], SHAPES[-1]])
def test_the_batch_split_changes_nothing(name: str, rule: dict[str, Any], unit: Unit, shape: tuple[int, ...]) -> None:
    p = problem(unit, shape, 64)
    whole = p.attack(name, **rule)
    order = torch.randperm(64, generator=Generator().manual_seed(1))
    parts = order.split([1, 20, 43])
    results = [p.part(part).attack(name, rows=part, **rule) for part in parts]
    for field in TENSORS:
        joined = torch.cat([getattr(result, field) for result in results])
        assert torch.equal(joined[order.argsort()], getattr(whole, field))


RESTARTS = [(name, word) for name in ATTACKS for word in ("restarts", "repeats") if word in ATTACKS[name].settings]


@pytest.mark.parametrize(("name", "argument"), RESTARTS)
def test_more_restarts_are_never_worse(name: str, argument: str) -> None:
    p = problem(n=64, budget=1)
    once, more = (p.attack(name, **dict[str, Any]({argument: count})) for count in (1, 3))
    assert (more.success >= once.success).all()
    assert (more.distance <= once.distance)[once.success].all()
    assert (more.margin <= once.margin)[~more.success].all()
    assert (more.success > once.success).any() or (more.distance < once.distance).any()


@every_attack
def test_frozen_numbers_stay_and_add_only_features_only_grow(name: str) -> None:
    p = problem(n=20)
    mutable = torch.arange(12) % 3 > 0
    # A frozen number needs no finite box.
    p = replace(p, ball=L0Ball(3, low=p.x, high=torch.where(mutable, 2.0, inf), mutable=mutable))
    result = p.attack(name)
    check(p, result, most_queries(name))
    assert torch.equal(result.x_best[:, ~mutable], p.x[:, ~mutable])
    assert (result.x_best >= p.x).all()
    assert (result.x_best > p.x).any()


def modes(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


@every_attack
@pytest.mark.parametrize("fails", [False, True])
def test_the_model_comes_back_as_it_was(name: str, fails: bool) -> None:
    p = problem(n=20)
    model = p.model
    assert isinstance(model, nn.Sequential)
    model.train()
    model[1].eval()
    first = model[0]
    assert isinstance(first, Sums)
    first.bias.requires_grad_(False)
    first.weight.grad = torch.full_like(first.weight, 3.0)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    asked = modes(model), [parameter.requires_grad for parameter in model.parameters()]
    seen = []

    def look(module: nn.Module, _: Any) -> None:
        seen.append(module.training)
        if fails and len(seen) == 3:
            raise KeyboardInterrupt

    for module in model:
        module.register_forward_pre_hook(look)
    with pytest.raises(KeyboardInterrupt) if fails else nullcontext():
        p.attack(name)
    assert not any(seen)
    assert (modes(model), [parameter.requires_grad for parameter in model.parameters()]) == asked
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(first.weight.grad, torch.full_like(first.weight, 3.0))
    assert all(parameter.grad is None for parameter in model[1].parameters())
    assert all(not module._forward_hooks for module in model.modules())


@every_attack
def test_a_caller_without_gradients_is_served_all_the_same(name: str) -> None:
    p = problem()
    expected = p.attack(name)
    with torch.no_grad():
        assert same(p.attack(name), expected)
    assert same(replace(p, x=p.x.clone().requires_grad_()).attack(name), expected)


@every_attack
def test_a_batch_that_does_not_fit_is_split(name: str) -> None:
    p = problem(n=17)
    sizes = []

    def small(x: Tensor) -> Tensor:
        sizes.append(len(x))
        if len(x) > 5:
            raise torch.OutOfMemoryError("out of memory")
        return p.model(x)

    assert same(replace(p, model=small).attack(name), p.attack(name))
    assert max(sizes) > 5
    with pytest.raises(torch.OutOfMemoryError):
        replace(p, model=lambda x: small(x.repeat(6, 1))).attack(name)


@every_attack
def test_what_a_model_takes_back_is_no_success(name: str) -> None:
    """This one errs on every point that it has not seen before, and never again."""
    p = problem(n=5)
    known = {row.numpy().tobytes() for row in p.x}
    y = torch.zeros_like(p.y)

    def liar(x: Tensor) -> Tensor:
        new = []
        for row in x.detach():
            new.append(row.numpy().tobytes() not in known)
            known.add(row.numpy().tobytes())
        lean = torch.where(torch.tensor(new), -1.0, 1.0) + 1e-3 * x.sum(1)
        return torch.stack([lean, -lean], 1)

    result = replace(p, model=liar, y=y).attack(name)
    assert (result.margin < 0).any()
    assert not result.success.any()
    assert (result.distance == -1).all()
    assert torch.equal(result.x_adv, p.x)


def rough(x: Tensor) -> Tensor:
    """Logits of three classes."""
    return torch.stack([x.flatten(1).sum(1), x.flatten(1)[:, 0], torch.zeros(len(x))], 1)


def only_clean(bad: float) -> Callable[[Tensor], Tensor]:
    """Right on numbers inside [-0.9, 0.9], else its first logit is bad."""

    def model(x: Tensor) -> Tensor:
        first = torch.where(x.flatten(1).abs().amax(1) > 0.95, bad, 5.0)
        return torch.stack([first + 1e-3 * x.flatten(1).sum(1), torch.zeros(len(x))], 1)

    return model


BAD_MODELS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "NaN": (lambda x: rough(x) * nan, "finite logits, got nan"),
    "infinity": (lambda x: rough(x) + inf, "finite logits, got inf"),
    "NaN later": (only_clean(nan), "finite logits, got nan"),
    "infinity later": (only_clean(inf), "finite logits, got inf"),
    "no class": (lambda x: rough(x)[:, :0], "2 classes or more, got .* shape \\(7, 0\\)"),
    "too few rows": (lambda x: rough(x)[:-1], "shape \\(7, classes\\)"),
    "a list": (lambda x: rough(x).tolist(), "got a list with 0, 1, 2, 3, 4, 5, ...: say which holds them"),
    "whole numbers": (lambda x: rough(x).long(), "floating-point"),
    "in place": (lambda x: rough(x.clamp_(-0.5, 0.5)), "leave its input"),
}


@every_attack
@pytest.mark.parametrize("bad", BAD_MODELS)
def test_a_bad_model_is_refused(name: str, bad: str) -> None:
    model, message = BAD_MODELS[bad]
    p = replace(problem(), model=model, y=torch.zeros(7, dtype=torch.int64))
    x = p.x.clone()
    with pytest.raises(ValueError, match=f"^model must.*{message}"):
        p.attack(name)
    assert torch.equal(p.x, x)


BAD_ARGUMENTS: dict[str, tuple[Callable[[Problem], Problem], str]] = {
    "empty": (lambda p: p.part(torch.arange(0)), "x must have at least one row"),
    "whole numbers": (lambda p: replace(p, x=p.x.long()), "x must be a floating-point"),
    "no rows": (lambda p: replace(p, x=p.x[0]), "x must be a floating-point"),
    "NaN": (lambda p: replace(p, x=p.x * nan), "x must be finite"),
    "budget": (lambda p: replace(p, ball=within_one(13)), "budget must be at most .* budget=13 with 12 units"),
    "pixel": (lambda p: replace(p, ball=within_one(1, "pixel")), re.escape('unit="pixel", got shape (7, 12)')),
    "not a ball": (lambda p: replace(p, ball=cast(Any, 3)), "ball must be an L0Ball, got 3"),
    "label": (lambda p: replace(p, y=p.y + 3), "y must lie in 0 .. 2, .* got [345]"),
    "label beside a target": (lambda p: replace(p, y=p.y + 90, target=p.y), "y must lie in 0 .. 2, .* got 9"),
    "float labels": (lambda p: replace(p, y=p.y.float()), "y must be an integer tensor of shape \\(7,\\)"),
    "too few labels": (lambda p: replace(p, y=p.y[1:]), "y must be an integer tensor"),
    "target": (lambda p: replace(p, target=torch.full((7,), 3)), "target must lie in 0 .. 2, .* got 3"),
    "no new target": (lambda p: replace(p, target=p.y), "target must differ from y in every row, row 0"),
    "float target": (lambda p: replace(p, target=p.y.float()), "target must be an integer tensor"),
}


@every_attack
def test_a_bad_argument_is_refused(name: str) -> None:
    for change, message in BAD_ARGUMENTS.values():
        with pytest.raises(ValueError, match=message):
            change(problem()).attack(name)
    with pytest.raises(ValueError, match="rows must be an integer tensor of shape \\(7,\\)"):
        problem().attack(name, rows=torch.arange(6))


@every_attack
@pytest.mark.parametrize(("low", "high"), [(-1.0, inf), (-inf, torch.ones(12)), (-3e38, 3e38)])
def test_an_infinite_box_is_honoured_or_refused(name: str, low: float, high: float | Tensor) -> None:
    p = replace(problem(), ball=L0Ball(2, low=low, high=high))
    try:
        check(p, p.attack(name))
    except ValueError as error:
        if not str(error).startswith("this attack needs a finite box, got low="):
            raise


COUNTS = {"queries", "steps", "restarts", "repeats", "candidates"}


@every_attack
def test_bad_counts_are_refused(name: str) -> None:
    for argument in COUNTS & set(ATTACKS[name].settings):
        for count in (0, 1.5, True):
            with pytest.raises(ValueError, match=f"{argument} must be an int >= 1, got {count}"):
                problem().attack(name, **dict[str, Any]({argument: count}))


@pytest.mark.parametrize(
    ("name", "argument", "value", "rule"),
    [
        ("sparse_rs", "alpha", 0.0, "lie in (0, 1]"),
        ("sparse_rs", "alpha", nan, "lie in (0, 1]"),
        ("sparse_rs", "values", "middle", "be one of 'corners', 'black-white', 'uniform'"),
    ],
)
def test_bad_settings_are_refused(name: str, argument: str, value: Any, rule: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{argument} must {rule}, got {value!r}")):
        problem().attack(name, **{argument: value})


def linear(shape: tuple[int, ...], n: int, seed: int) -> tuple[Sums, Tensor, Tensor]:
    """A linear model and rows that it classifies: noise, drawn towards the weights of a class by more and more."""
    model = Sums(math.prod(shape), 4, seed)
    pull = torch.linspace(0.2, 0.7, n, dtype=torch.float64).unsqueeze(1) * model.weight.shape[1] ** 0.5
    y = torch.arange(n) % 4
    noise = random(n, model.weight.shape[1], seed=seed + 5) / 2
    x = (noise + pull * model.weight[y].detach()).clamp(-0.8, 0.8).float().view(n, *shape)
    right = model(x).argmax(1) == y
    return model, x[right], y[right]


LINEAR: list[tuple[Unit, tuple[int, ...]]] = [("feature", (80,)), ("pixel", (1, 8, 10)), ("pixel", (3, 5, 8))]


@pytest.mark.parametrize(("unit", "shape"), [("feature", (8,)), ("pixel", (1, 2, 4)), ("pixel", (3, 2, 4))])
def test_the_oracle_is_exact(unit: Unit, shape: tuple[int, ...]) -> None:
    """It finds what trying every set of units does, each with the best corner for each class."""
    model, x, y = linear(shape, 24, 0)
    mutable = torch.arange(shape[-1]) > 0
    ball = L0Ball(1, unit, -0.9, torch.full(shape, 0.8), mutable)
    low, high, _ = (t.expand_as(x) for t in ball.box(x))
    fewest = torch.full_like(y, 8 + 1)
    for chosen in itertools.product([False, True], repeat=8):
        places = torch.tensor(chosen).view(shape[1:] if unit == "pixel" else shape) & mutable
        for wrong in range(4):
            slope = (model.weight[wrong] - model.weight[y]).detach().view(x.shape)
            x_adv = torch.where(places, torch.where(slope > 0, high, low), x)
            broken = model(x_adv).argmax(1) != y
            fewest = torch.where(broken, fewest.clamp(max=sum(chosen)), fewest)
    assert torch.equal(optimum(model, x, y, ball), fewest)
    assert len(fewest.unique()) > 1


@pytest.mark.parametrize("name", [name for name in ATTACKS if ATTACKS[name].strong])
@pytest.mark.parametrize(("unit", "shape"), LINEAR)
def test_rows_within_reach_break(name: str, unit: Unit, shape: tuple[int, ...]) -> None:
    model, x, y = linear(shape, 60, 1)
    best = optimum(model, x, y, within_one(0, unit))
    budget = math.ceil(1.25 * float(best.double().quantile(0.8)))
    reach = (best * 1.25 <= budget).nonzero().squeeze(1)
    assert len(reach) >= 40
    assert best[reach].double().mean() >= 3
    p = Problem(model, x, y, within_one(budget, unit)).part(reach)
    result = p.attack(name, **(ATTACKS[name].strong or {}))
    check(p, result)
    assert result.success.double().mean() >= 0.95
    assert (result.distance >= best[reach])[result.success].all()


def test_a_declaration_that_cannot_be() -> None:
    own: dict[str, Any] = {"random": False, "cascade": None, "cheap": {}, "strong": None, "white_box": False}
    with pytest.raises(ValueError, match="got a second 'sparse_rs'"):
        ell0.attacks.attack(**own, gradients_only=False)(ATTACKS["sparse_rs"].function)

    def steepest() -> AttackResult:
        raise AssertionError

    with pytest.raises(ValueError, match="white_box must be True for an attack by gradients alone"):
        ell0.attacks.attack(**own, gradients_only=True)(steepest)


class Replayed(Graphs):
    """Graphs as on a GPU: the second call of a key is logged, later ones repeat the log."""

    recording, replays = False, 0

    def run(self, key: Hashable, call: Callable[[], Any]) -> Any:
        found = cast(dict[Hashable, Any], self._found)
        if key not in found:
            found[key] = None
            return call()
        if found[key] is None:
            Replayed.recording = True
            with Watch() as watch:
                found[key] = watch, call()
            Replayed.recording = False
            assert not watch.seen
        else:
            Replayed.replays += 1
            with torch.no_grad():
                found[key][0].again()
        return found[key][1]


@every_attack
@pytest.mark.parametrize("targeted", [False, True])
@pytest.mark.parametrize(("unit", "shape", "budget"), [(*each, m) for each, m in zip(SHAPES, (2, 5, 1), strict=True)])
def test_replays_find_what_calls_find(
    name: str, unit: Unit, shape: tuple[int, ...], budget: int, targeted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = problem(unit, shape, 40, targeted=targeted, budget=budget)
    longer = {"queries": 100, "steps": 30, "restarts": 2}
    more: dict[str, Any] = {key: value for key, value in longer.items() if key in ATTACKS[name].settings}
    called = case.attack(name, **more)
    monkeypatch.setattr(Graphs, "of", lambda model, _: Replayed(model))
    monkeypatch.setattr("ell0.attacks.contract.recording", lambda: Replayed.recording)
    monkeypatch.setattr(Replayed, "replays", 0)
    replayed = case.attack(name, **more)
    assert called.success.any()
    assert Replayed.replays or name == "pointwise" or called.success.all()
    for field in TENSORS:
        assert torch.equal(getattr(called, field), getattr(replayed, field)), field


def test_only_known_modules_without_hooks_are_replayed_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ell0.models.mlp(2, in_features=12, hidden=(4,))
    assert Graphs.of(model, torch.empty(1, 12)) is None
    monkeypatch.setattr("ell0.attacks.graphs._at_hand", lambda _: True)
    x = torch.empty(1, 12)
    assert Graphs.of(model, x) is not None
    assert Graphs.of(model.forward, x) is None
    assert Graphs.of(network(12), x) is None
    assert Graphs.of(ell0.wrap(model.forward), x) is None
    assert Graphs.of(ell0.certify.RandomisedAblation(model, keep=2), x) is None
    for hook in (model[1].register_forward_hook, model[1].register_full_backward_hook):
        with hook(lambda *_: None):
            assert Graphs.of(model, x) is None
    model[1].forward = model[1].forward
    assert Graphs.of(model, x) is None
