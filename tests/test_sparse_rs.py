"""Sparse-RS: its schedule, every query against the rules, its draws, and a slow twin that breaks as many rows."""

import itertools
import math
from collections.abc import Callable
from typing import get_args

import pytest
import torch
from torch import Tensor

from balls import within_one
from ell0 import L0Ball
from ell0.attacks import sparse_rs
from ell0.attacks.sparse_rs import Values, _alpha
from ell0.threat import Unit
from oracle import margins, network, random
from test_draws import chi2


def moved(budget: int, query: int, queries: int, alpha: float = 0.8) -> int:
    return max(int(_alpha(alpha, query, queries) * budget), 1)


@pytest.mark.parametrize(
    ("budget", "queries", "changes"),
    [
        (12, 10_000, {1: 4, 51: 2, 201: 1}),
        (12, 500, {1: 4, 3: 2, 11: 1}),
        (50, 500, {1: 20, 3: 10, 11: 8, 26: 6, 51: 5, 101: 4, 201: 3, 301: 2}),
        (20, 10_000, {1: 8, 51: 4, 201: 3, 501: 2, 2001: 1}),
    ],
)
def test_the_schedule(budget: int, queries: int, changes: dict[int, int]) -> None:
    seen: dict[int, int] = {}
    for query in range(1, queries):
        size = moved(budget, query, queries)
        if not seen or size != list(seen.values())[-1]:
            seen[query] = size
    assert seen == changes


class Log:
    """A model that remembers what it was asked."""

    def __init__(self, model: Callable[[Tensor], Tensor]) -> None:
        self.model = model
        self.asked: list[Tensor] = []

    def __call__(self, x: Tensor) -> Tensor:
        self.asked.append(x.clone())
        return self.model(x)


def rows_of(unit: Unit, n: int) -> tuple[Tensor, Tensor]:
    """Rows ``(n, ...)`` of 12 units strictly inside the box, of class 0."""
    x = random(n, *((12,) if unit == "feature" else (3, 3, 4)), seed=5).clamp(-0.9, 0.9).float()
    return x, torch.zeros(n, dtype=torch.int64)


def steps(x: Tensor) -> Tensor:
    """Logits in coarse steps, so that losses tie; class 0 wins by far."""
    rough: Tensor = (network(x[0].numel())(x) * 4).round().detach()
    return rough + torch.tensor([100.0, 0.0, 0.0])


@pytest.mark.parametrize("targeted", [False, True])
@pytest.mark.parametrize("unit", ["feature", "pixel"])
def test_every_query_follows_the_rules(unit: Unit, targeted: bool) -> None:
    """The best point is followed by hand: a wrong acceptance shows in the next candidate, which starts from there."""
    queries, budget = 120, 5
    x, y = rows_of(unit, 3)
    target = y + 2 if targeted else None
    ball = within_one(budget, unit)
    log = Log(steps)
    result = sparse_rs(log, x, y, ball, queries=queries, target=target)
    assert not result.success.any()

    def value(points: Tensor) -> Tensor:
        return margins(steps(points), y if target is None else target, targeted=targeted)

    clean, first, *candidates = log.asked
    assert torch.equal(clean, x)
    assert len(candidates) == queries - 1
    best, lowest = first, value(first)
    assert (ball.count(x, first) == budget).all()
    ties = rises = falls = 0
    for query, candidate in enumerate(candidates, start=1):
        size = moved(budget, query, queries)
        pixels = unit == "pixel"
        was, now = (((t != x).any(1) if pixels else t != x).flatten(1) for t in (best, candidate))
        differs = ((candidate != best).any(1) if pixels else candidate != best).flatten(1)
        for units, count in ((now, budget), (was & ~now, size), (now & ~was, size), (differs, 2 * size)):
            assert (units.sum(1) == count).all()
        assert (candidate[candidate != x].abs() == 1).all()
        here = value(candidate)
        accept = here < lowest
        ties, rises, falls = (
            total + int(part.sum()) for total, part in ((ties, here == lowest), (rises, here > lowest), (falls, accept))
        )
        best = torch.where(accept.view(-1, *[1] * (x.ndim - 1)), candidate, best)
        lowest = torch.where(accept, here, lowest)
    assert min(ties, rises, falls) > 0
    assert torch.equal(result.x_best, best)
    assert torch.equal(result.margin, lowest)
    assert torch.equal(result.queries, torch.full((3,), queries))


def test_restarts_are_runs_of_their_own() -> None:
    x, y = rows_of("feature", 3)
    log = Log(steps)
    result = sparse_rs(log, x, y, within_one(3), queries=10, restarts=3)
    starts = log.asked[1], log.asked[11], log.asked[21]
    assert len(log.asked) == 31
    assert result.queries.tolist() == [30] * 3
    assert all((within_one(3).count(x, start) == 3).all() for start in starts)
    assert not any(torch.equal(one, other) for one, other in itertools.pairwise(starts))


def constant(x: Tensor) -> Tensor:
    return torch.tensor([[1.0, 0.0]]).expand(len(x), 2)


def places(mask: Tensor) -> Tensor:
    """Where each row of a mask ``(n, cells)`` with one True has it."""
    assert (mask.sum(1) == 1).all()
    return mask.int().argmax(1)


def test_units_and_values_are_drawn_evenly() -> None:
    """With a constant model nothing is accepted, and every query draws from the same two sets."""
    n, budget, queries = 40, 4, 400
    x = torch.zeros(n, 12)
    log = Log(constant)
    sparse_rs(log, x, torch.zeros(n, dtype=torch.int64), within_one(budget), queries=queries, alpha=0.1)
    start, candidates = log.asked[1] != 0, log.asked[2:]
    going, coming, values = [], [], []
    for candidate in candidates:
        now = candidate != 0
        # The position within the set and within its complement, both in ascending order.
        going.append(places((start & ~now)[start].view(n, budget)))
        coming.append(places((now & ~start)[~start].view(n, 12 - budget)))
        values.append(candidate[now & ~start] > 0)
    out, into, up = torch.stack(going), torch.stack(coming), torch.stack(values).long()
    cells = (out * (12 - budget) + into) * 2 + up
    assert abs(chi2(cells.flatten().bincount(minlength=64).double())) < 5
    # One query says nothing of the next, and one row nothing of another.
    for one, other in ((out[1:], out[:-1]), (out[:, 1:], out[:, :-1])):
        assert abs(chi2((one * budget + other).flatten().bincount(minlength=16).double())) < 5
    for one, other in ((into[1:], into[:-1]), (into[:, 1:], into[:, :-1])):
        assert abs(chi2((one * (12 - budget) + other).flatten().bincount(minlength=64).double())) < 5


def test_the_first_set_is_drawn_evenly() -> None:
    n = 6000
    log = Log(constant)
    mutable = torch.arange(7) != 3
    ball = within_one(2, mutable=mutable)
    sparse_rs(log, torch.zeros(n, 7), torch.zeros(n, dtype=torch.int64), ball, queries=1)
    start = log.asked[1][:, mutable]
    assert not log.asked[1][:, 3].any()
    pairs = ((start != 0) * (1 << torch.arange(6))).sum(1)
    counts = pairs.bincount(minlength=64)
    assert (counts > 0).sum() == math.comb(6, 2)
    assert abs(chi2(counts[counts > 0].double())) < 5
    signs = (start.sign() * (start != 0)).sum(1).long() + 2  # two values each: 1, 2, 1
    assert abs(signs.bincount(minlength=5)[2] - n / 2) < 5 * math.sqrt(n) / 2


@pytest.mark.parametrize("rest", [0, 1, 2])
def test_a_budget_near_the_number_of_units_still_moves(rest: int) -> None:
    """Where fewer units are free than should move, units of the set get new values; no query is wasted."""
    x, y = rows_of("feature", 6)
    ball = within_one(12 - rest)
    log = Log(constant)
    sparse_rs(log, x, y, ball, queries=60, alpha=0.5)
    start, *candidates = log.asked[1:]
    assert (ball.count(x, start) == 12 - rest).all()
    for candidate in candidates:
        assert (ball.count(x, candidate) == 12 - rest).all()
    assert all((candidate != start).any(1).all() for candidate in candidates[30:])  # one unit at a time by then
    touched = torch.stack([candidate != start for candidate in candidates]).any(0)
    assert touched.all()


@pytest.mark.parametrize("unit", ["feature", "pixel"])
@pytest.mark.parametrize("values", get_args(Values))
def test_only_allowed_values_are_written(unit: Unit, values: Values) -> None:
    x, y = rows_of(unit, 6)
    low = -1 - torch.arange(x[0].numel()).view(x.shape[1:]) / 100
    ball = L0Ball(4, unit, low, 1.25)
    log = Log(constant)
    sparse_rs(log, x, y, ball, queries=150, values=values)
    written = torch.stack(log.asked[1:])
    changed = written != x
    assert ((written >= low) & (written <= 1.25))[changed].all()
    if values == "uniform":
        share = ((written - low) / (1.25 - low))[changed]
        # A unit that stays in the set shows the same value in every query.
        assert abs(chi2((share.unique() * 10).long().clamp(max=9).bincount(minlength=10).double())) < 5
    else:
        assert ((written == low) | (written == 1.25))[changed].all()
        assert all((written == value)[changed].any() for value in (low, 1.25))


@pytest.mark.parametrize("values", ["corners", "black-white"])
def test_a_unit_that_comes_in_alone_gets_a_new_value(values: Values) -> None:
    """Clean values lie on the corners, and a corner drawn at random would often change nothing."""
    x = torch.where(random(8, 3, 2, 3, seed=1) > 0, 1.0, -1.0)
    mutable = torch.tensor([True, False, True]).view(3, 1, 1)
    for frozen in (None, mutable):
        log = Log(constant)
        ball = within_one(2, "pixel", mutable=frozen)
        sparse_rs(log, x, torch.zeros(8, dtype=torch.int64), ball, queries=80, values=values)
        start, *candidates = log.asked[1:]
        for candidate in candidates:
            assert ((candidate != start) & (candidate != x)).flatten(1).any(1).all()


def test_black_white() -> None:
    """A pixel that moves alone has one end of the box in all its channels; the first ones and several have any."""
    n, queries = 60, 200
    low, high = -1 - torch.arange(3).view(3, 1, 1) / 10, torch.tensor(1.5)
    x, y = torch.zeros(n, 3, 3, 4), torch.zeros(n, dtype=torch.int64)
    log = Log(constant)
    sparse_rs(log, x, y, L0Ball(8, "pixel", low, high), queries=queries, values="black-white")
    start, *candidates = log.asked[1:]

    def colours(points: Tensor, came: Tensor) -> Tensor:
        """Of the pixels that came in, ``(n, 3, 4)`` True: 0 to 7, a bit for each channel."""
        assert ((points == low) | (points == high)).movedim(1, 3)[came].all()
        return ((points == high) * (1 << torch.arange(3)).view(3, 1, 1)).sum(1)[came]

    held = (start != 0).any(1)
    assert abs(chi2(colours(start, held).bincount(minlength=8).double())) < 5
    drawn: dict[bool, list[Tensor]] = {False: [], True: []}
    for query, candidate in enumerate(candidates, start=1):
        drawn[moved(8, query, queries) == 1].append(colours(candidate, (candidate != 0).any(1) & ~held))
    alone, several = (torch.cat(drawn[kind]).bincount(minlength=8) for kind in (True, False))
    assert alone[1:7].sum() == 0
    assert abs(chi2(alone[[0, 7]].double())) < 5
    assert abs(chi2(several.double())) < 5
    # A frozen channel stays; the others go together, also where one end is their clean value.
    log, mutable = Log(constant), torch.tensor([True, False, True]).view(3, 1, 1)
    sparse_rs(log, x - 1, y, within_one(1, "pixel", mutable=mutable), queries=20, values="black-white")
    points = torch.stack(log.asked[2:])
    assert (points[:, :, 1] == -1).all()
    assert torch.equal(points[:, :, 0], points[:, :, 2])


def test_black_white_features_are_corners() -> None:
    x, y = rows_of("feature", 6)
    for budget in (1, 4):
        one, other = Log(steps), Log(steps)
        sparse_rs(one, x, y, within_one(budget), queries=60, values="corners")
        sparse_rs(other, x, y, within_one(budget), queries=60, values="black-white")
        assert all(map(torch.equal, one.asked, other.asked))


def test_rows_with_few_free_units_keep_to_them() -> None:
    x, y = rows_of("feature", 4)
    mutable = torch.arange(12) < torch.tensor([[0], [1], [3], [12]])
    ball = within_one(6, mutable=mutable)
    log = Log(constant)
    sparse_rs(log, x, y, ball, queries=40, alpha=1.0)
    for asked in log.asked[1:]:
        assert ball.contains(x, asked).all()
        assert ball.count(x, asked).tolist() == [0, 1, 3, 6]
