"""Votes of parts under attack: a gradient where the clip has none, a search in all parts, flags, proofs beside."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import cache, partial
from itertools import combinations, product
from typing import Any, get_args

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ell0 import L0Ball, certify, data, evaluate, train
from ell0.attacks import ATTACKS, adaptive, sigma_zero, sparse_pgd, sparse_rs
from ell0.attacks.adaptive import _vote
from ell0.attacks.contract import Victim
from ell0.attacks.parts import PartSearch
from ell0.attacks.surrogate import is_vote, surrogate_gradients
from ell0.certify import Partition, PartVote, Rule
from ell0.evaluation import Entry
from ell0.nn import InputClamp, InputScale
from ell0.part_networks import PartMLP
from ell0.threat import Unit
from oracle import random, vote

few = settings(max_examples=settings().max_examples // 8)
RULES = get_args(Rule)
seeds = st.integers(0, 2**40)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@cache
def trained(strides: tuple[int, int] = (3, 3)) -> tuple[PartVote, Tensor, Tensor]:
    """A vote that has learnt digits, and 100 others."""
    partition = Partition.strides((1, 8, 8), strides)
    torch.manual_seed(0)
    network = PartMLP((1, *partition.index.shape[1:]), partition.parts, width=48, depth=1, dropout=0.0)
    model = PartVote(network, partition)
    config = train.TrainConfig(epochs=5, batch=128, rates=(0.005,), optimizer="adam")
    train.fit(model, data.load("digits", "train+validation"), config)
    x, y = data.load("digits", "test")
    return model.eval(), x[:100], y[:100]


# The surrogate


@pytest.mark.parametrize("rule", RULES)
def test_a_vote_keeps_its_values_and_has_a_gradient_to_every_part(rule: Rule) -> None:
    model, x = vote((12,), 4, rule=rule), random(9, 12, seed=1)
    model.tau = 1e-9
    expected, leaf = model(x), x.clone().requires_grad_()
    with surrogate_gradients(model):
        found = model(leaf)
        slope = torch.autograd.grad(found.gather(1, expected.argmax(1, keepdim=True)).sum(), leaf)[0]
    assert torch.equal(found, expected)
    assert (slope != 0).all()
    assert "forward" not in model.__dict__
    if rule == "duel":
        assert not torch.autograd.grad(model(leaf).sum(), leaf)[0].any()
    with surrogate_gradients(model.train()):
        assert model(x).shape == (9, 4)  # what it is trained on


def test_the_surrogate_is_the_gradient_of_the_duel_that_decides_as_if_nothing_were_clipped() -> None:
    model, x = vote((10,), 5), random(60, 10, seed=1)
    y = model(x).argmax(1)
    with surrogate_gradients(model):
        leaf = x.clone().requires_grad_()
        slope = torch.autograd.grad(model(leaf).gather(1, y.unsqueeze(1)).sum(), leaf)[0]
    leaf = x.clone().requires_grad_()
    logits = model.part_logits(leaf)
    gap = logits.gather(2, y.view(-1, 1, 1).expand(-1, 5, 1)) - logits
    duels = (gap / 0.5).clamp(-1, 1).sum(1).scatter(1, y.unsqueeze(1), math.inf)
    nearest = duels.topk(2, 1, largest=False)
    clear = (nearest.values.diff(dim=1) > 1e-6).squeeze(1)
    assert ((gap / 0.5).abs() > 1)[clear].any(1).all(0).any()
    assert clear.sum() > 20
    straight = (gap.sum(1) / 0.5).gather(1, nearest.indices[:, :1])
    torch.testing.assert_close(slope[clear], torch.autograd.grad(straight.sum(), leaf)[0][clear])


def test_attacks_by_gradients_find_more_through_the_surrogate(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = trained()
    ball = L0Ball(3, "pixel", -1.0, 1.0)
    attacks = partial(sparse_pgd, steps=30), partial(sigma_zero, steps=40)
    straight = [int(attack(model, x, y, ball).success.sum()) for attack in attacks]
    plain = PartVote.scores
    monkeypatch.setattr(PartVote, "scores", lambda self, logits, **_: plain(self, logits))
    for attack, broken in zip(attacks, straight, strict=True):
        assert broken > attack(model, x, y, ball).success.sum() + 8


# The search


class TwoValues(nn.Module):
    """A network of parts to which a number is positive or not, and nothing else."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, parts: Tensor, place: Tensor) -> Tensor:
        logits: Tensor = self.network(torch.where(parts > 0, 1.0, -1.0) + 0 * parts, place)
        return logits


def enumerated(model: PartVote, x: Tensor, y: Tensor, budget: int, apart: bool) -> Tensor:
    """Whether some change of at most ``budget`` numbers, no two in a part if ``apart``, breaks a row: ``(n,)`` bool."""
    points = [x]
    for count in range(1, budget + 1):
        for places in map(list, combinations(range(x.shape[1]), count)):
            if not apart or len(set(model.owner[places].tolist())) == count:
                points.append(x.clone())
                points[-1][:, places] *= -1
    answers: Tensor = model(torch.cat(points)).argmax(1).view(-1, len(x))
    return (answers != y).any(0)


@few
@given(seeds, st.sampled_from(RULES), st.integers(2, 5), st.integers(1, 3), st.integers(1, 2))
@example(10, "plurality", 5, 1, 2)  # a tie that the rival loses, and one that another wins
def test_what_can_be_enumerated_is_found(seed: int, rule: Rule, classes: int, budget: int, size: int) -> None:
    """Six parts of one or two numbers, of which each has two values."""
    model, x = vote((6 * size,), 6, classes, seed, rule), random(40, 6 * size, seed=seed)
    model.network = TwoValues(model.network)
    y, ball = model(x).argmax(1), L0Ball(budget, low=-3.0, high=3.0)
    found = adaptive(model, x, y, ball, queries=30).success
    assert not (found & ~enumerated(model, x, y, budget, apart=False)).any()
    missed = int((enumerated(model, x, y, budget, apart=True) & ~found).sum())
    # Two classes, and counted votes, are decided by one sum over parts. A third class may spoil a duel that is won.
    assert missed <= (0 if classes == 2 or rule == "plurality" else 3)


@pytest.mark.parametrize("unit", get_args(Unit))
def test_each_query_changes_one_unit_in_every_part_and_all_corners_are_tried(unit: Unit) -> None:
    model, x = vote((3, 2, 3), 2), random(4, 3, 2, 3, seed=1).clamp(-0.9, 0.9)
    model.network.register_forward_hook(lambda _, __, logits: logits + torch.tensor([100.0, 0.0, 0.0]))  # no row falls
    numbers = [3 * list(range(6)), list(range(18))][unit == "feature"]  # the unit of each number
    parts = model.owner.repeat(3)
    with Victim(model, x, torch.zeros(4).long(), L0Ball(1, unit, -1.0, 1.0)) as victim:
        asked, ask = list[Tensor](), victim.ask

        def spy(function: Any, points: Tensor, at: Tensor) -> Tensor:
            asked.append(points[at == 3])
            return ask(function, points, at)

        victim.ask = spy  # type: ignore[method-assign]
        found = _vote(victim)
        assert found is not None
        PartSearch(victim, *found).run(60)
    tried = set[tuple[int, tuple[float, ...]]]()
    corners = 8 * 6 if unit == "pixel" else 2 * 18
    for points in asked[1 : 1 + corners // 2]:
        changed = {n for n in range(18) if points[0].flatten()[n] != x[3].flatten()[n]}
        units = {numbers[n] for n in changed}
        assert sorted(int(parts[u]) for u in units) == [0, 1]
        tried |= {(u, tuple(points[0].flatten()[[n for n in range(18) if numbers[n] == u]].tolist())) for u in units}
    assert len(tried) == corners


def test_a_part_that_cannot_change_is_left_alone() -> None:
    """Numbers lie in [0.5, 1.5], and one part is frozen; the budget would do for all."""
    model, x = vote((8,), 4), random(20, 8, seed=1).clamp(-1, 1) / 2 + 1
    mutable = model.owner != 1
    ball = L0Ball(4, low=0.5, high=1.5, mutable=mutable)
    result = adaptive(model, x, model(x).argmax(1), ball, queries=30)
    assert torch.equal(result.x_best[:, ~mutable], x[:, ~mutable])
    assert (result.x_best[:, mutable] != x[:, mutable]).any()


@pytest.mark.parametrize("strides", [(3, 3), (2, 4)])
def test_more_rows_fall_than_to_a_random_search(strides: tuple[int, int]) -> None:
    model, x, y = trained(strides)
    mine = theirs = 0
    for budget in (2, 3, 4):
        ball = L0Ball(budget, "pixel", -1.0, 1.0)
        mine += int(adaptive(model, x, y, ball, queries=100).success.sum())
        theirs += int(sparse_rs(model, x, y, ball, queries=100).success.sum())
    assert mine >= theirs + 8


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("unit", get_args(Unit))
def test_no_certified_row_falls_and_every_claim_is_confirmed(rule: Rule, unit: Unit) -> None:
    model, n = vote((2, 4, 4), 7, seed=5, rule=rule), 60
    x = random(n, 2, 4, 4, seed=6).clamp(-4, 4)
    y = model(x).argmax(1)
    mutable = torch.rand(n, 2, 4, 4, generator=seeded(0)) < 0.6
    mutable[:, :, 0] &= torch.arange(n).view(-1, 1, 1) % 2 > 0
    for beta, frozen in product((4.0, 50.0), (None, mutable)):
        ball = L0Ball(3, unit, -beta, beta, frozen)
        anything = L0Ball(3, unit, -math.inf, math.inf, frozen)
        radii = certify.radius(model, x, y, anything)
        result = evaluate(model, x, y, ball, {"adaptive": partial(adaptive, queries=60)}, budgets=[1, 2, 3])
        proven = [float((radii >= budget).double().mean()) for budget in (1, 2, 3)]
        # Raises if a claim is false.
        assert all(point.value >= least for point, least in zip(result.curve[-3:], proven, strict=True))
        broken = result.verdict > 0
        assert (result.distance > radii)[broken].all()
        assert broken.sum() > 20


def test_proofs_beside_attacks() -> None:
    """On digits they nearly meet: at each budget few rows are neither proven nor broken."""
    model, x, y = trained()
    ball = L0Ball(4, "pixel", -1.0, 1.0)
    radii = certify.radius(model, x, y, L0Ball(4, "pixel", -math.inf, math.inf))
    result = evaluate(model, x, y, ball, {"adaptive": partial(adaptive, queries=100)}, budgets=[1, 2, 4])
    for budget, point in zip((1, 2, 4), result.curve[-3:], strict=True):
        proven = float((radii >= budget).double().mean())
        assert proven <= point.value <= proven + 0.05
    challenged = certify.challenge(model, x, y, radii, ball, {"adaptive": partial(adaptive, queries=40)})
    assert not len(challenged.fell)
    assert not any("votes of parts" in flag for flag in challenged.flags)
    wrong = certify.challenge(model, x, y, radii.clamp(0, 3) + 1, ball, {"adaptive": partial(adaptive, queries=40)})
    assert len(wrong.fell) > 60


# What it is used for


def test_targets_are_reached() -> None:
    model, x, y = trained()
    target = (y + 1) % 10
    given: dict[str, Any] = {"queries": 100, "target": target}
    ball = L0Ball(4, "pixel", -1.0, 1.0)
    mine, theirs = (attack(model, x, y, ball, **given).success for attack in (adaptive, sparse_rs))
    assert mine.sum() >= theirs.sum() + 4


@pytest.mark.parametrize(
    ("wrap", "known"),
    [
        (lambda model: model, True),
        (lambda model: nn.Sequential(InputClamp(-1, 1), InputScale(-1, 1), model), True),
        (lambda model: nn.Sequential(model, nn.Identity()), True),
        (lambda model: nn.Sequential(model, nn.Softmax(1)), False),
        (lambda model: nn.Sequential(nn.Tanh(), model), False),
        (lambda model: lambda x: model(x), False),
    ],
)
def test_a_vote_is_recognised(wrap: Callable[[nn.Module], Any], known: bool) -> None:
    inner, x = vote((1, 4, 4), 4), random(9, 1, 4, 4, seed=3)
    model = wrap(inner)
    y = model(x).argmax(1)
    for unit in get_args(Unit):
        with Victim(model, x, y, L0Ball(2, unit, -3.0, 3.0)) as victim:
            found = _vote(victim)
            assert (found is not None) == known
            if found is not None:
                assert found[0] is inner
                assert torch.equal(inner(found[1](x)), model(x))
        adaptive(model, x, y, victim.ball, queries=20)


class Clamped(nn.Module):
    """A network of parts that clamps what it sees."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.clamp, self.network = InputClamp(-1, 1), network

    def forward(self, parts: Tensor, place: Tensor) -> Tensor:
        logits: Tensor = self.network(self.clamp(parts), place)
        return logits


def test_a_clamp_inside_the_network_of_parts_hides_nothing() -> None:
    model, x = vote((12,), 4), random(30, 12, seed=3)
    model.network = Clamped(model.network)
    with Victim(model, x, model(x).argmax(1), L0Ball(2, low=-5.0, high=5.0)) as victim:
        assert _vote(victim) is not None


# Flags


@pytest.mark.parametrize("rule", RULES)
def test_a_vote_without_an_attack_made_for_it_is_flagged(rule: Rule) -> None:
    model, x = vote((12,), 4, rule=rule), random(20, 12, seed=2)
    model.tau = 1e-9
    y, ball = model(x).argmax(1), L0Ball(1, low=-4.0, high=4.0)
    rs = {"rs": partial(sparse_rs, queries=5)}
    surrogate = "zero or NaN gradients: at 20 of 20 rows, where attacks by gradients follow a surrogate; "
    surrogate += "raise the queries of "
    blind = evaluate(model, x, y, ball, {**rs, "pgd": partial(sparse_pgd, steps=5)}).flags
    missing = "votes of parts without an attack made for them: run adaptive too"
    assert blind[:2] == (f"{surrogate}rs", missing)
    made = {**rs, "mine": partial(adaptive, queries=20)}
    assert evaluate(model, x, y, ball, made).flags[:1] == (f"{surrogate}rs, mine",)
    assert missing not in evaluate(model, x, y, ball, made).flags
    assert missing not in evaluate(lambda x: model(x), x, y, ball, rs).flags
    # An attack of others sees the model's own gradient alone.
    if rule in ("plurality", "run-off"):
        with pytest.raises(ValueError, match="attacks must be black-box for a model that gives no gradient, got own"):
            evaluate(model, x, y, ball, {"own": Entry(ATTACKS["sparse_pgd"].function, white_box=True)})


def test_a_vote_is_known_by_its_buffers_too() -> None:
    model = vote((3, 2, 2), 4)
    assert inspect.getattr_static(model, "owner", None) is None  # all that isinstance looks at from Python 3.12 on
    assert is_vote(model)
    assert not is_vote(certify.RandomisedAblation(nn.Linear(12, 2), 3))
