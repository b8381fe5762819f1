"""Votes of parts: each bound against all that touched parts can say, and what the others must not notice."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, combinations_with_replacement, product
from pathlib import Path
from typing import Any, cast, get_args

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from ell0 import L0Ball, certify, data, evaluate, train
from ell0.attacks import sparse_rs
from ell0.certify import Partition, PartVote, Rule
from ell0.certify.rules import radii, run_off, run_off_radius, score_bounds, scores
from ell0.evaluation.identity import of_model

FULL = os.environ.get("HYPOTHESIS_PROFILE") == "full"
ROWS = 40  # vote networks in a drawn case; 2,000 in 50 cases, 10,000 in the full profile
networks = settings(max_examples=250 if FULL else 50)
few = settings(max_examples=settings().max_examples // 8)
ADDED: tuple[Rule, ...] = ("duel", "hard", "plurality")
seeds = st.integers(0, 2**40)
ANY = L0Ball(0, low=-math.inf, high=math.inf)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Says(nn.Module):
    """A part of as many numbers as there are classes says these numbers: each row is a vote network of its own."""

    def forward(self, parts: Tensor, place: Tensor) -> Tensor:  # noqa: ARG002
        return parts


def says(parts: int, classes: int, **given: Any) -> PartVote:
    groups = torch.arange(parts * classes).view(parts, classes).tolist()
    return PartVote(Says(), Partition.groups((parts * classes,), groups), **given).eval()


def voices(logits: Tensor, rule: Rule, tau: float) -> Tensor:
    """What each part adds, from the definition: ``(..., classes, classes)``, for y (row) against c (column)."""
    gap = logits.unsqueeze(-1) - logits.unsqueeze(-2)
    if rule == "plurality":
        vote = F.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits)
        return vote.unsqueeze(-1) - vote.unsqueeze(-2)
    return gap.sign() if rule == "hard" else torch.minimum(torch.maximum(gap / tau, -(gap**0)), gap**0)


def worst(duels: Tensor) -> Tensor:
    """The scores ``(..., classes)`` of the duels ``(..., classes, classes)``."""
    own = torch.eye(duels.shape[-1], dtype=torch.bool)
    return duels.masked_fill(own, math.inf).amin(-1)


def attacked(voice: Tensor, sayings: Tensor, budget: int, reached: Tensor) -> Tensor:
    """The duels ``(rows, attacks, classes, classes)``; without attack where a part of the set is not reached.

    voice: ``(rows, parts, classes, classes)``.  sayings: ``(g, classes, classes)``, what a touched part may say.
    """
    parts, whole, found = voice.shape[1], voice.sum(1), []
    chosen = torch.tensor(list(combinations_with_replacement(range(len(sayings)), budget)))
    added = sayings[chosen].sum(1)
    for places in map(list, combinations(range(parts), budget)):
        moved = (whole - voice[:, places].sum(1)).unsqueeze(1) + added
        free = reached[:, places].all(1).view(-1, 1, 1, 1)
        found.append(torch.where(free, moved, whole.unsqueeze(1)))
    return torch.cat(found, 1)


class Votes:
    """Random vote networks of one size on a grid of logits, on which all sums are exact, and ties are many."""

    def __init__(self, seed: int, classes: int, parts: int, frozen: bool, tau: float) -> None:
        g, shape = seeded(seed), (ROWS, parts, classes)
        logits = torch.randint(-6, 7, shape, generator=g) / 8
        favourite = F.one_hot(torch.randint(classes, (ROWS, 1), generator=g), classes)
        liked = torch.rand(ROWS, parts, 1, generator=g) < torch.rand(ROWS, 1, 1, generator=g)
        self.logits = (logits + favourite * liked * 0.75).double()
        self.x, self.tau = self.logits.flatten(1), tau
        self.mutable = (torch.rand(shape, generator=g) < 0.3) if frozen else torch.ones(shape, dtype=torch.bool)
        self.reached = self.mutable.any(2)
        self.ball = replace(ANY, mutable=self.mutable.flatten(1))
        # Ends of the clip, and all orders that matter: each class at each of three heights, a few at random.
        corners = torch.tensor(list(product((-1.0, 0.0, 1.0), repeat=classes)))
        keep = torch.randperm(len(corners), generator=g)[:10] if classes > 2 else torch.arange(len(corners))
        ends = torch.cat((2 * torch.eye(classes), -2 * torch.eye(classes), corners[keep] * tau))
        # y last, c first: the worst for that pair.
        pairs = [4.0 * F.one_hot(torch.tensor(c), classes) - 4.0 * F.one_hot(torch.tensor(y), classes)
                 for c in range(classes) for y in range(classes) if c != y]  # fmt: skip
        self.sayings = torch.cat((ends, torch.stack(pairs))).double()


votes = st.builds(
    Votes, seeds, st.integers(2, 5), st.integers(1, 5), st.booleans(), st.sampled_from([0.25, 0.5, 1.0])
)  # fmt: skip


@networks
@given(votes, st.sampled_from(ADDED))
def test_no_touched_part_beats_a_certificate(its: Votes, rule: Rule) -> None:
    """Touched parts say anything on a grid: radii and bounds of the scores hold, and are exact where it is said so."""
    parts, classes = its.logits.shape[1:]
    model = says(parts, classes, rule=rule, tau=its.tau)
    voice = voices(its.logits, rule, its.tau)
    lead = worst(voice.sum(1))
    answer = lead.argmax(1)
    now = F.one_hot(its.logits.argmax(2), classes).sum(1).double() if rule == "plurality" else lead
    torch.testing.assert_close(model(its.x), now, rtol=0, atol=0)
    assert torch.equal(now.argmax(1), answer)
    radius = certify.radius(model, its.x, answer, its.ball, max_budget=its.x.shape[1])
    assert (certify.radius(model, its.x, (answer + 1) % classes, its.ball) == -1).all()
    # The same without an allowance for rounding, which takes a tie inside a part for undecided.
    steady = radii(its.logits, answer, its.reached, rule, its.tau, 0.0, 0.0)
    assert (radius <= torch.where(steady == parts, its.x.shape[1], steady)).all()
    assert torch.equal(radius.clamp(max=parts), steady) or rule != "duel"
    said = voices(its.sayings, rule, its.tau).unique(dim=0)
    stands, positive = (torch.ones(2, ROWS, dtype=torch.bool)).unbind()
    most = parts if classes == 2 else min(parts, 2)
    for budget in range(1, most + 1):
        reachable = worst(attacked(voice, said, budget, its.reached))
        stands = stands & (reachable.argmax(2) == answer.unsqueeze(1)).all(1)
        assert stands[steady >= budget].all(), "a certificate is wrong"
        positive = positive & (reachable.amin(1).gather(1, answer.unsqueeze(1)).squeeze(1) > 0)
        # A set of so many parts is among the attacks only if as many can be touched.
        full = its.reached.sum(1) >= budget
        if classes == 2 or rule == "plurality":
            true = positive if rule == "duel" else stands
            assert torch.equal((steady >= budget)[full], true[full])
        if rule != "plurality":
            lower, upper = certify.bounds(model, its.x, replace(its.ball, budget=budget))
            assert ((lower <= reachable.amin(1)) & (reachable.amax(1) <= upper)).all()
            lower, upper = score_bounds(its.logits, budget, its.reached, rule, its.tau, 0.0, 0.0)
            assert torch.equal(lower[full], reachable.amin(1)[full])
            assert classes > 2 or torch.equal(upper[full], reachable.amax(1)[full])


@few
@given(votes)
def test_bounds_of_votes_hold(its: Votes) -> None:
    parts, classes = its.logits.shape[1:]
    model, budget = says(parts, classes, rule="plurality"), min(2, parts)
    count = F.one_hot(its.logits.argmax(2), classes).double()
    lower, upper = certify.bounds(model, its.x, replace(its.ball, budget=budget))
    for places in map(list, combinations(range(parts), budget)):
        for said in product(range(classes), repeat=budget):
            kept = ~its.reached[:, places].unsqueeze(2)
            moved = count.clone()
            moved[:, places] = torch.where(kept, count[:, places], F.one_hot(torch.tensor(said), classes).double())
            assert ((lower <= moved.sum(1)) & (moved.sum(1) <= upper)).all()
    lower, _ = score_bounds(its.logits, budget, its.reached, "plurality", 1.0, 0.0, 0.0)
    assert torch.equal(lower, (count.sum(1) - (count * its.reached.unsqueeze(2)).sum(1).clamp(max=budget)))


def test_frozen_parts_cost_nothing() -> None:
    """Seven parts agree on class 0. Any three may be touched; if only three can be, nothing changes the answer."""
    model, x, y = says(7, 2), torch.tensor([[1.0, 0.0] * 7]), torch.tensor([0])
    mutable = torch.zeros(1, 14, dtype=torch.bool)
    mutable[:, :6] = True
    frozen = replace(ANY, mutable=mutable)
    assert (model.limit(x, ANY), model.limit(x, frozen)) == (3, 14)
    assert (int(model.radius(x, y)), int(model.radius(x, y, frozen, max_budget=14))) == (3, 14)
    mutable[:, 6] = True  # a fourth part: one number of it is enough
    assert (model.limit(x, frozen), int(model.radius(x, y, frozen, max_budget=14))) == (3, 3)
    mutable[:, [0, 2, 4]] = False  # fewer numbers in the same parts change nothing
    assert int(model.radius(x, y, frozen, max_budget=14)) == 3
    assert certify.accuracy(model, x, y, [3, 4, 14]) == {3: 1.0, 4: 0.0, 14: 0.0}
    # In whole numbers class 0 wins a tie, so that all of four parts bear two changes, and one in a duel.
    assert [says(4, 2, rule=rule).limit(x[:, :8], ANY) for rule in get_args(Rule)] == [1, 2, 2, 2]
    model, x = made("strides")  # one colour of a pixel is enough
    coloured = torch.zeros(2, 4, 6, dtype=torch.bool)
    coloured[1, :, 1] = True  # parts 1 and 4, of six
    assert model.limit(x, replace(ANY, mutable=coloured)) == 48
    coloured[0, 0, 0] = True
    assert model.limit(x, replace(ANY, unit="pixel", mutable=coloured)) == 2


def test_ties_and_no_positive_score() -> None:
    cycle = torch.tensor([[2.0, 1.0, 0.0, 0.0, 2.0, 1.0, 1.0, 0.0, 2.0]])  # 0 > 1 > 2, 1 > 2 > 0, 2 > 0 > 1
    for rule in ADDED:
        model = says(3, 3, rule=rule)
        assert (model(cycle) == model(cycle)[:, :1]).all()
        assert model.radius(cycle.expand(3, -1), torch.arange(3)).tolist() == [0, -1, -1]
    even = torch.tensor([[1.0, 0.0, 1.0, 0.0, 0.0, 1.0]]), torch.tensor([[0.0, 1.0, 0.0, 1.0, 1.0, 0.0]])
    # One of four parts turned leaves 2 : 2, which class 0 wins, and in whole numbers that is certain.
    for x, rule, expected in (
        (F.pad(even[0], (0, 2)), "hard", 0), (F.pad(even[0], (0, 2)), "duel", 0),
        (torch.tensor([[1.0, 0.0] * 2]), "hard", 1), (torch.tensor([[1.0, 0.0] * 2]), "plurality", 1),
        (torch.tensor([[1.0, 0.0] * 2]), "duel", 0), (torch.tensor([[0.0, 1.0] * 2]), "hard", 0),
        (torch.tensor([[1.0, 0.0] * 2]), "run-off", 1), (torch.tensor([[0.0, 1.0] * 2]), "run-off", 0),
    ):  # fmt: skip
        model = says(x.shape[1] // 2, 2, rule=rule)
        assert int(model.radius(x, model(x).argmax(1))) == expected, (rule, x)


def test_the_certificate_is_not_tight_for_three_classes() -> None:
    """52 parts say y > b > c, 24 b > c > y, 24 c > y > b: certified 1, though c still loses to b far beyond."""
    orders = torch.tensor([[2.0, 1.0, 0.0]] * 52 + [[0.0, 2.0, 1.0]] * 24 + [[1.0, 0.0, 2.0]] * 24)
    assert int(says(100, 3).radius(orders.view(1, -1), torch.tensor([0]))) == 1


@few
@given(seeds, st.sampled_from(get_args(Rule)), st.integers(2, 4), st.sampled_from([0.125, 0.25]))
@example(4, "run-off", 2, 0.125)  # a gap of exactly 2 delta may become a tie
def test_a_radius_allows_for_other_logits_of_untouched_parts(seed: int, rule: Rule, classes: int, delta: float) -> None:
    """Logits that are all off by delta, in the worst direction for y, or in any."""
    g, n, parts = seeded(seed), 30, 6
    logits = torch.randint(-4, 5, (n, parts, classes), generator=g).double() / 4
    logits[..., 0] += torch.rand(n, 1, generator=g).double().mul(8).round() / 4
    y = scores(logits, rule, 0.5).argmax(1)
    own, reached = F.one_hot(y, classes).unsqueeze(1), torch.ones(n, parts, dtype=torch.bool)
    found = radii(logits, y, reached, rule, 0.5, delta, 1e-9)
    assert (found <= radii(logits, y, reached, rule, 0.5, 0.0, 1e-9)).all()
    rivals = [delta * (F.one_hot(torch.tensor(c), classes) - own) for c in range(classes)]
    noise = [delta * (torch.randint(0, 3, logits.shape, generator=g) - 1) for _ in range(20)]
    touched = (4.0 * F.one_hot((y + 1) % classes, classes) - 4.0 * own.squeeze(1)).double()
    for off in (delta - 2 * delta * own, *rivals, *noise):
        moved = logits + off
        for budget in range(parts + 1):
            if budget:
                costly = (moved.gather(2, y.view(-1, 1, 1).expand(-1, parts, 1)).squeeze(2)).argsort(1, descending=True)
                moved = moved.scatter(1, costly[:, :1, None].expand(-1, 1, classes), touched.unsqueeze(1))
            stays = scores(moved, rule, 0.5).argmax(1) == y
            assert stays[(found >= budget) & (found > 0)].all()


# Pixels and parts


class Hashed(nn.Module):
    """Logits of a part from its numbers and its place, all of which matter."""

    def __init__(self, numbers: int, classes: int, seed: int, scale: float = 2.0) -> None:
        super().__init__()
        draw = partial(torch.randn, generator=seeded(seed))
        self.weight, self.bias = nn.Parameter(draw(numbers, 8)), nn.Parameter(draw(64, 8))
        self.last = nn.Parameter(draw(8, classes) * scale)

    def forward(self, parts: Tensor, place: Tensor) -> Tensor:
        return torch.relu(parts.flatten(1) @ self.weight + self.bias[place]) @ self.last


STRIDES = {
    "strides": ((2, 4, 6), (2, 3)),
    "uneven strides": ((1, 3, 5), (2, 2)),
    "even strides of an odd image": ((1, 4, 5), (1, 4)),
}
PARTITIONS: dict[str, Callable[[], Partition]] = {
    **{name: partial(Partition.strides, *both) for name, both in STRIDES.items()},
    "groups": lambda: Partition.groups((7,), [[0, 6], [5], [3, 1, 2], [4]]),
    "pixels": lambda: Partition.groups((2, 2, 3), [[0, 2], [3, 5], [1], [4]]),
    "dealt": lambda: Partition.dealt((3, 4, 4), 5),
}


def made(name: str, seed: int = 0, **given: Any) -> tuple[PartVote, Tensor]:
    partition = PARTITIONS[name]()
    x = torch.randn(5, *partition.shape, generator=seeded(seed + 1))
    return PartVote(Hashed(math.prod(partition.part_shape), 3, seed), partition, **given).eval(), x


@pytest.mark.parametrize("name", PARTITIONS)
@pytest.mark.parametrize("mirrored", [False, True])
def test_a_pixel_touches_its_part_alone_whatever_its_value(name: str, mirrored: bool) -> None:
    if mirrored and name in ("groups", "dealt"):
        with pytest.raises(ValueError, match="mirrored must be False for a partition of which a part, mirrored, is no"):
            made(name, mirrored=True)
        return
    model, x = made(name, mirrored=mirrored)
    before, owner = model.part_logits(x), model.partition.owner
    for pixel, value in product(range(model.partition.pixels), (7.0, math.nan, math.inf, -math.inf, 3e38)):
        changed = x.clone()
        changed.view(len(x), *([-1] if x.ndim == 2 else [x.shape[1], -1]))[..., pixel] = value
        after = model.part_logits(changed)
        others = torch.arange(model.parts) != owner[pixel]
        assert torch.equal(after[:, others], before[:, others])
        assert not torch.equal(after[:, ~others], before[:, ~others])
        assert bool((after.abs() <= 1e4).all())
        if math.isnan(value) and not mirrored:
            assert (after[:, ~others] == 0).all()
        assert bool(model(changed).isfinite().all())


@pytest.mark.parametrize("name", PARTITIONS)
def test_parts_are_gathered_by_the_definition(name: str) -> None:
    model, x = made(name)
    seen = dict[str, Tensor]()
    model.network.register_forward_hook(lambda _, given, __: seen.update(parts=given[0], place=given[1]))
    model(x)
    partition, parts = model.partition, seen["parts"].unflatten(0, (5, -1))
    assert torch.equal(seen["place"], torch.arange(partition.parts).repeat(5))
    assert seen["parts"].shape[1:] == partition.part_shape
    assert len(partition.part_shape) == partition.index.ndim - (partition.index.ndim == 2)
    rows = x.flatten(2) if x.ndim == 4 else x.unsqueeze(1)
    for t, index in enumerate(partition.index):
        expected = torch.where(index < 0, 0.0, rows[..., index.clamp(min=0)])
        assert torch.equal(parts[:, t].flatten(), expected.flatten())
    if name in STRIDES:
        (_, height, width), (a, b) = STRIDES[name]
        for i, j in product(range(height), range(width)):
            t = (i % a) * b + j % b
            assert int(partition.index[t, i // a, j // b]) == i * width + j


def test_mirrored_logits_are_those_of_the_matched_part() -> None:
    for shape, (a, b) in STRIDES.values():
        partition = Partition.strides(shape, (a, b))
        network = Hashed(math.prod(partition.part_shape), 3, 0)
        plain, mirrored = (PartVote(network, partition, mirrored=on).eval() for on in (False, True))
        x, width = torch.randn(5, *shape, generator=seeded(3)), shape[2]
        one, other = plain.part_logits(x), plain.part_logits(x.flip(-1))
        for i, j in product(range(a), range(b)):
            mean = (one[:, i * b + j] + other[:, i * b + (width - 1 - j) % b]) / 2
            torch.testing.assert_close(mirrored.part_logits(x)[:, i * b + j], mean)
        assert (plain.forwards, mirrored.forwards) == (a * b, 2 * a * b)
        assert torch.equal(mirrored.train().part_logits(x), plain.train().part_logits(x))


def test_clamped_before_views_are_averaged() -> None:
    """An infinite view counts as 10,000 and not as all."""

    class Loud(nn.Module):
        def forward(self, parts: Tensor, place: Tensor) -> Tensor:  # noqa: ARG002
            first = parts.flatten(1)[:, :1]
            return torch.cat((first * math.inf, -first), 1)  # NaN at 0

    model = PartVote(Loud(), Partition.strides((1, 1, 2), (1, 1)), mirrored=True).eval()
    x = torch.tensor([[[[1.0, -1.0]]], [[[0.0, 2.0]]], [[[1.0, 3.0]]]])
    assert model.part_logits(x).squeeze(1).tolist() == [[0.0, 0.0], [5e3, -1.0], [1e4, -2.0]]


@few
@given(seeds, st.sampled_from(get_args(Rule)), st.booleans(), st.sampled_from(["strides", "uneven strides", "groups"]))
def test_attacked_images_keep_their_answers(seed: int, rule: Rule, mirrored: bool, name: str) -> None:
    """Pixels, or single features, at random places and of random, huge, infinite values and NaN."""
    model, x = made(name, seed % 1000, rule=rule, mirrored=mirrored and name != "groups", tau=0.5)
    y, g = model(x).argmax(1), seeded(seed)
    unit = "pixel" if x.ndim == 4 and seed % 2 else "feature"
    radius = certify.radius(model, x, y, replace(ANY, unit=cast(Any, unit)), max_budget=model.limit(x, ANY))
    assert (radius >= 0).all()
    values = torch.tensor([-100.0, 100.0, math.nan, math.inf, -math.inf, 0.0, 3e38, 1e20])
    numbers = x.flatten(2) if unit == "pixel" else x.flatten(1).unsqueeze(1)
    for _ in range(40):
        order = torch.rand(len(x), 1, numbers.shape[2], generator=g).argsort(2)
        put = values[torch.randint(len(values), numbers.shape, generator=g)]
        moved = torch.where(order < radius.view(-1, 1, 1), put, numbers).view_as(x)
        assert torch.equal(model(moved).argmax(1), y)


# Rounding


def test_rounding_is_measured_and_allowed_for() -> None:
    class Unsteady(nn.Module):
        """As a kernel that sums in another order in other batches."""

        def forward(self, parts: Tensor, place: Tensor) -> Tensor:  # noqa: ARG002
            return parts + 0.003 * (len(parts) == 7 * 5) + torch.tensor([0.001, 0.0]) * (len(parts) == 5)

    class Growing(nn.Module):
        def forward(self, parts: Tensor, place: Tensor) -> Tensor:  # noqa: ARG002
            return parts * (1 + 0.001 * (len(parts) == 7 * 5))

    x, y = torch.tensor([[0.52, 0.5] * 5, [0.9, 0.5] * 5]), torch.tensor([0, 0])
    steady = says(5, 2, tau=1e-3)
    before = of_model(steady)
    assert steady.radius(x, y).tolist() == [2, 2]
    assert steady.rounding == pytest.approx(10 * 2**-23 * 0.9)
    assert of_model(steady) == before  # or an evaluation that is resumed would take it for another model
    unsteady = PartVote(Unsteady(), steady.partition, tau=1e-3).eval()
    assert unsteady.radius(x, y).tolist() == [0, 2]
    assert unsteady.rounding == pytest.approx(0.03, rel=1e-3)
    assert unsteady.radius(x[1:], y[1:]).tolist() == [2]  # a row by itself is measured in the same batches
    for rule in ("hard", "plurality", "run-off"):
        assert PartVote(Unsteady(), steady.partition, rule=rule).eval().radius(x, y).tolist() == [0, 2]
    # A row that was not measured and says more may be off by more.
    x = torch.tensor([[0.9, 0.5] * 5] * 256)
    x[1] = torch.tensor([90.0, 89.95] * 5)
    growing = PartVote(Growing(), steady.partition, tau=1e-3).eval()
    assert growing.radius(x, torch.zeros(256, dtype=torch.int64)).tolist() == [2, 0, *[2] * 254]
    assert growing.rounding == pytest.approx(10 * 0.001 * 90, rel=1e-3)
    assert growing.bounds(x, ANY)[0][:, 0].round().tolist() == [5.0, -5.0, *[5.0] * 254]
    with pytest.raises(ValueError, match='model must have another rule for bounds of its scores, got "run-off"'):
        certify.bounds(says(5, 2, rule="run-off"), x, ANY)


def test_certifying_costs_little_more_than_the_passes() -> None:
    passed, x = list[int](), torch.randn(4000, 10, generator=seeded(0))
    model = says(5, 2)
    model.network.register_forward_hook(lambda _, given, __: passed.append(len(given[0])))
    model.radius(x, torch.zeros(4000, dtype=torch.int64))
    assert sum(passed) < 1.1 * 5 * len(x)


# As any other classifier


def test_it_learns_is_attacked_kept_and_certified(tmp_path: Path) -> None:
    rows, (x, y) = data.load("digits", "train+validation"), data.load("digits", "test")
    x, y = x[:60], y[:60]
    torch.manual_seed(0)
    partition = Partition.strides((1, 8, 8), (3, 3))
    model = PartVote(Hashed(9, 10, 0, scale=0.3), partition, mirrored=False)
    train.fit(model, rows, train.TrainConfig(epochs=3, batch=128, rates=(0.02,), optimizer="adam"), out=tmp_path)
    again = PartVote(Hashed(9, 10, 1), partition)
    train.load_checkpoint(tmp_path).into(again)
    assert torch.equal(again.eval()(x), model.eval()(x))
    radius = model.radius(x, y)
    assert torch.equal(radius, model.radius(x, y, batch=7))
    assert torch.equal(radius >= 0, model(x).argmax(1) == y)
    assert (certify.certifier(model), model.limit(x, ANY)) == (model, 4)
    assert certify.accuracy(model, x, y, [1, 5])[1] == float((radius >= 1).double().mean()) > 0.2
    attacks = {"rs": partial(sparse_rs, queries=10)}
    ball = L0Ball(1, "pixel", -1.0, 1.0)
    assert evaluate(model, x, y, ball, attacks).robust_accuracy >= float((radius >= 1).double().mean())
    assert not len(certify.challenge(model, x[:30], y[:30], radius[:30], ball, attacks).fell)
    inputs = x[:9].clone().requires_grad_()
    model(inputs).amax(1).sum().backward()
    assert inputs.grad is not None
    assert bool((inputs.grad != 0).any())


def test_rules_agree_with_the_run_off_of_rivals() -> None:
    logits = torch.randn(20, 9, 4, generator=seeded(0))
    model = says(9, 4, rule="run-off")
    votes = run_off(logits)
    assert torch.equal(model(logits.flatten(1)).long(), votes)
    y = votes.argmax(1)
    assert torch.equal(model.radius(logits.flatten(1), y), run_off_radius(logits, y))


class Peeks(nn.Module):
    """A part sees something of the other parts of the batch."""

    def __init__(self, peek: Any) -> None:
        super().__init__()
        self.peek = peek

    def forward(self, parts: Tensor, place: Tensor) -> Tensor:  # noqa: ARG002
        return cast(Tensor, parts.flatten(1)[:, :2] + self.peek(parts.flatten(1)))


class Leaks(nn.Module):
    """Parts at some places see the part before them in the batch."""

    def __init__(self, places: Sequence[int]) -> None:
        super().__init__()
        self.places = torch.tensor(places)

    def forward(self, parts: Tensor, place: Tensor) -> Tensor:
        said = parts.flatten(1)[:, :3]
        return torch.where(torch.isin(place, self.places).unsqueeze(1), said + said.roll(1, 0), said)


def test_a_leak_at_a_few_places_is_found_when_it_is_made_or_when_it_certifies() -> None:
    """Of 32 parts every second is tried at first, all before a row is certified."""
    cut = Partition.strides((1, 32, 32), (4, 8))
    with pytest.raises(ValueError, match="one part at a time, but part 8 changes with pixels of others"):
        PartVote(Leaks([8]), cut)
    votes = PartVote(Leaks([9, 11]), cut).eval()
    x, y = torch.rand(2, 1, 32, 32), torch.zeros(2, dtype=torch.int64)
    ball = L0Ball(1, low=-1.0, high=1.0, unit="pixel")
    for call in (lambda: votes.radius(x, y), lambda: certify.bounds(votes, x, ball)):
        with pytest.raises(ValueError, match="one part at a time, but part 9 changes with pixels of others"):
            call()


@pytest.mark.parametrize("mirrored", [False, True])
def test_no_rows_have_no_scores(mirrored: bool) -> None:
    votes = PartVote(Hashed(4, 3, 0), Partition.strides((1, 4, 4), (2, 2)), mirrored=mirrored).eval()
    none, chosen = torch.zeros(0, 1, 4, 4), torch.zeros(0, 3, dtype=torch.int64)
    assert votes(none).shape == (0, 3)
    assert votes.part_logits(none, chosen).shape == (0, 3, 3)


def test_bad_input_is_named() -> None:
    pairs = Partition.groups((8,), [[0, 1], [2, 3], [4, 5], [6, 7]])
    four, x, y = says(4, 2), torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64)
    images = PartVote(Hashed(4, 3, 0), Partition.strides((1, 4, 4), (2, 2))).eval()
    assert not PartVote(nn.Module.eval(Says()), pairs).network.training
    training = PartVote(Says(), pairs)
    assert training.network.training
    for call, message in (
        (lambda: Partition.groups((4,), [[0, 1], [1, 2, 3]]), "hold every pixel once, but pixel 1 is in several"),
        (lambda: Partition.groups((4,), [[0, 1], [3]]), "parts must hold every pixel once, but pixel 2 is in no part"),
        (lambda: Partition.groups((4,), [[0, 1, 2, 3], []]), "parts must have a pixel each, but part 1 has none"),
        (lambda: Partition.groups((4,), [[0, 1], [2, 4]]), r"index must lie in \[-1, 4\), .* got 0 to 4"),
        (lambda: Partition.groups((2, 2), [[0]]), r"shape must be \(channels, height, width\) or \(d,\), got"),
        (lambda: Partition((4,), torch.zeros(2, 2)), r"index must be int64 of shape \(parts, size\), got a float32"),
        (lambda: Partition.strides((1, 4, 4), (2, 5)), r"strides must be two ints .* got strides=\(2, 5\) with shape"),
        (lambda: Partition.strides((16,), (2, 2)), "strides must be two ints from 1 to height and width"),
        (lambda: images(torch.zeros(2, 1, 4, 5)), r"x must have shape \(n, 1, 4, 4\), got a float32 tensor of shape"),
        (lambda: images.radius(torch.zeros(2, 1, 5, 4), y), r"x must have shape \(n, 1, 4, 4\)"),
        (lambda: PartVote(Says(), pairs, tau=0), "tau must be a number from 1e-6 to 20,000, got 0"),
        (lambda: PartVote(Says(), pairs, tau=1e-30), "tau must be a number from 1e-6 to 20,000, got 1e-30"),
        (lambda: PartVote(Says(), pairs, tau=math.nan), "tau must be a number from 1e-6 to 20,000, got nan"),
        (lambda: PartVote(Says(), pairs, rule=cast(Any, "soft")), "rule must be one of duel, hard, .* got 'soft'"),
        (lambda: PartVote(Says(), cast(Any, (2, 2))), r"partition must be a certify.Partition, got \(2, 2\)"),
        (lambda: PartVote(Peeks(lambda p: p.mean()), pairs), "network must see one part at a time, but part 1 changes"),
        (lambda: PartVote(Peeks(lambda p: 0.1 * p.roll(2, 0)), pairs), "network must see one part at a time"),
        (lambda: PartVote(Peeks(lambda p: 1e-6 * p.mean()), pairs), "network must see one part at a time"),
        (lambda: PartVote(Peeks(lambda p: 0 * p.mean()), pairs), "network must see one part at a time"),  # by NaN
        (lambda: PartVote(nn.Identity(), pairs), "takes 2 positional arguments|positional"),
        (lambda: PartVote(Peeks(lambda p: p[:1, :1] * 0), Partition.dealt((8,), 8)), "network must give logits"),
        (lambda: training.radius(x, y), "model must be in eval mode"),
        (lambda: four.radius(x / 0, y), "x must be .* finite"),
        (lambda: four.radius(x.half(), y), "x must be float32 or float64, in which votes are counted, got a float16"),
        (lambda: four.radius(x, y + 2), r"y must lie in \[0, 2\), got 2 to 2"),
        (lambda: four.radius(x, y, replace(ANY, mutable=torch.ones(3, dtype=torch.bool))), "mutable must be broadcast"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            call()
