"""Pointwise [Schott19]: salt-and-pepper noise, then units go back to their clean values while the model still errs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ..common import Progress, check_count, silent
from ..threat import L0Ball
from .contract import AttackResult, Model, Victim, by_unit
from .declare import attack
from .sparse_rs import take

__all__ = ["pointwise", "pointwise_counts", "reset_units"]

Rule = Literal["blocks", "foolbox", "foolbox-flat"]
Count = Callable[[Tensor, Tensor], Tensor]
"""From rows and the points that runs ended at, ``(p, ...)`` each, a number of each run, ``(p,)`` int64."""

_STARTS = 8  # noises that a run draws
_FEWER = 80  # per cent: a further noise must break the row with so many of the best start's units
_BLOCK = 4  # units that are first tried together
_TOGETHER = 1 << 24  # numbers in the runs that advance together
_NOISES, _LEVELS = 10, 100  # foolbox's: it raises the level of noise so often, and in so many steps


@attack(white_box=False, gradients_only=False, random=True, cascade=None, cheap={"repeats": 2}, strong=None)
def pointwise(
    model: Model,
    x: Tensor,
    y: Tensor,
    ball: L0Ball,
    *,
    repeats: int = 10,
    rule: Rule = "blocks",
    generator: torch.Generator | None = None,
    rows: Tensor | None = None,
    target: Tensor | None = None,
    progress: Progress = silent,
) -> AttackResult:
    """Pointwise [Schott19]: a decision-based attack for few changed units; the nearest of ``repeats`` runs is kept.

    A run sets units to salt and pepper, ``high`` and ``low``, in random order until the model errs. Of 8 such noises it
    takes the one with the fewest changed units. Then units go back to their clean values, in random order, as long as
    the model still errs: in the end no single one can. A run is a success if its distance is within the budget; the
    budget does not steer it.

    Args:
        repeats: runs of each row, which advance together.
        rule: ``"blocks"`` finds the level of noise by doubling and bisection, draws each channel's noise by itself, and
            takes units back in blocks that grow and shrink: a run asks tens of queries. ``"foolbox"`` is the rule of
            [Schott19]'s code in foolbox 2.4: noise of one kind for all channels of a position, levels on a grid, of ten
            noises the nearest, and one unit at a time; thousands of queries. ``"foolbox-flat"`` is what that code does
            with rows ``(n, d)`` if it is told that axis 1 are channels: the whole row becomes ``high`` or ``low``.
        model, x, y, ball, generator, rows, target, progress: as in `sparse_rs`.

    Differs from foolbox 2.4, with its rules: a level of noise is at most 1; no bisection of values follows, which
    hardly changes L0.
    """
    return pointwise_counts(
        model, x, y, ball, (), repeats=repeats, rule=rule, generator=generator, rows=rows, target=target,
        progress=progress,
    )[0]  # fmt: skip


def pointwise_counts(
    model: Model,
    x: Tensor,
    y: Tensor,
    ball: L0Ball,
    counts: Sequence[Count],
    *,
    repeats: int = 10,
    rule: Rule = "blocks",
    **common: Any,
) -> tuple[AttackResult, Tensor]:
    """`pointwise`, and other counts of its runs: the least above 0 of a row's runs.

    Returns the result, and ``(n, counts)`` int64, -1 where no run of a row has a count above 0.
    common: the other keyword arguments of `pointwise`.
    """
    check_count("repeats", repeats)
    if rule not in get_args(Rule):
        raise ValueError(f"rule must be one of {', '.join(map(repr, get_args(Rule)))}, got {rule!r}")
    with Victim(model, x, y, ball, **common, minimal=True) as victim:
        none = torch.iinfo(torch.int64).max
        least = torch.full((victim.n, len(counts)), none, device=victim.x.device)
        for at, points in _runs(victim, repeats, rule):
            for column, count in enumerate(counts):
                found = count(victim.x[at], victim.points(points))
                found = torch.where(found > 0, found, none)
                least[:, column].scatter_reduce_(0, at, found, "amin")
        return victim.result(), torch.where(least < none, least, -1)


def _runs(victim: Victim, repeats: int, rule: Rule) -> Iterator[tuple[Tensor, Tensor]]:
    """Runs the standing rows, a group at a time: rows ``(p,)``, and where each ended, ``(p, channels, units)``."""
    group = max(1, _TOGETHER // (repeats * victim.x[0].numel()))
    for standing in victim.standing.split(group) if victim.ball.budget else ():
        if rule == "blocks":
            at, points, order = _noise(victim, standing, repeats)
            yield at, reset_units(victim, at, points, order, "pointwise")
        else:
            run = torch.arange(repeats, device=standing.device).repeat_interleave(len(standing))
            at, points = standing.repeat(repeats), _foolbox_noise(victim, standing.repeat(repeats), run, rule)
            found = (points != victim.x[at]).flatten(1).any(1)
            yield at[found], _reset_singly(victim, at[found], run[found], victim.units(points[found]))


def _foolbox_noise(victim: Victim, at: Tensor, run: Tensor, rule: Rule) -> Tensor:
    """Where runs start: ``(p, ...)``, the clean row if none was found.  at, run: ``(p,)``, row and number of each run.

    At level q a position is salt with chance q / 2, pepper with chance q / 2. The level rises in even steps, each with
    a new noise, until the model errs; the next noises rise to 1.2 times that level only. Noise that changes no fewer
    numbers than the best is not asked about.
    """
    # The axis whose numbers share their noise.
    shared = by_unit(victim.x, "feature" if victim.x.ndim != 4 else "pixel")
    shared = shared.reshape(victim.n, -1, 1) if rule == "foolbox-flat" else shared
    clean = shared[at]
    low, high, mutable = (t.reshape(shared.shape) for t in (victim.low, victim.high, victim.mutable))
    steps, best = min(_LEVELS, clean.shape[2]), clean.clone()
    top, fewest = torch.ones_like(at, dtype=torch.float64), torch.full_like(at, clean.shape[1:].numel() + 1)
    noises, step, start = torch.zeros_like(at), torch.zeros_like(at), time.monotonic()
    while len(live := (noises < _NOISES).nonzero().squeeze(1)):
        victim.report("noise", int(noises.min()), _NOISES, start, f"{len(live)} runs")
        rows, level = at[live], top[live] * (step[live] + 1) / steps
        chance = victim.draws.uniform(rows, (run[live] * _NOISES + noises[live]) * steps + step[live], clean.shape[2])
        salt, pepper = chance >= 1 - level.unsqueeze(1) / 2, chance < level.unsqueeze(1) / 2
        ends = torch.where(salt.unsqueeze(1), high[rows], low[rows])
        points = torch.where((salt | pepper).unsqueeze(1) & mutable[rows], ends, clean[live])
        count = (points != clean[live]).flatten(1).sum(1)
        asks = ((count > 0) & (count < fewest[live])).nonzero().squeeze(1)
        errs = torch.zeros_like(live, dtype=torch.bool)
        if len(asks):
            errs[asks] = victim.errs(victim.points(points[asks]), rows[asks])
        found = live[errs]
        best[found], fewest[found] = points[errs], count[errs]
        top[found] = (1.2 * level[errs]).clamp(max=1.0)
        step[live] += 1
        over = errs | (step[live] == steps)
        noises[live[over]] += 1
        step[live[over]] = 0
    return victim.points(best)


def _reset_singly(victim: Victim, at: Tensor, run: Tensor, points: Tensor) -> Tensor:
    """Takes units back one at a time while the model errs, until none of them can go.

    A unit that goes back begins a new random order of the others, as in foolbox 2.4.

    at, run: ``(p,)``, row and number of each run.  points, result: ``(p, channels, units)``.
    """
    clean, points, start = victim.units(victim.x), points.clone(), time.monotonic()
    order = torch.zeros_like(points[:, 0], dtype=torch.int64)
    place, size, orders = (torch.zeros_like(at) for _ in range(3))
    begins = torch.arange(len(at), device=at.device)
    while True:
        # Negative moments: those of the noise are positive.
        keys = victim.draws.uniform(at[begins], -1 - (run[begins] << 20) - orders[begins], order.shape[1])
        changed = (points[begins] != clean[at[begins]]).any(1)
        order[begins], size[begins] = keys.masked_fill(~changed, 1.0).argsort(dim=1), changed.sum(1)
        place[begins] = 0
        orders[begins] += 1
        live = (place < size).nonzero().squeeze(1)
        if not len(live):
            return points
        victim.report("pointwise", len(at) - len(live), len(at), start, f"{int(victim.queries.max())} queries")
        rows, units, tried = at[live], order[live, place[live]], points[live]
        tried[torch.arange(len(live), device=at.device), :, units] = clean[rows, :, units]
        errs = victim.errs(victim.points(tried), rows)
        points[live[errs]] = tried[errs]
        place[live] += 1
        begins = live[errs]


def _noise(victim: Victim, standing: Tensor, repeats: int) -> tuple[Tensor, Tensor, Tensor]:
    """The runs that found a start: rows ``(p,)``, points ``(p, channels, units)``, random orders ``(p, units)``."""
    at, clean = standing.repeat(repeats), victim.units(victim.x)[standing].repeat(repeats, 1, 1)
    fewest, points = torch.zeros_like(at), clean.clone()
    order = torch.zeros_like(clean[:, 0], dtype=torch.int64)
    for start in range(_STARTS):
        noises, ranks = zip(*(_draw(victim, standing, run * _STARTS + start) for run in range(repeats)), strict=True)
        noise, rank = torch.cat(noises), torch.cat(ranks)
        level = _least_level(victim, at, clean, noise, rank, fewest)
        found = level > 0
        fewest[found] = level[found]
        points[found] = torch.where((rank < level.unsqueeze(1)).unsqueeze(1), noise, clean)[found]
        order[found] = rank[found].argsort(dim=1)
    found = fewest > 0
    return at[found], points[found], order[found]


def _draw(victim: Victim, standing: Tensor, moment: int) -> tuple[Tensor, Tensor]:
    """Noise ``(m, channels, units)``, and the rank ``(m, units)`` at which a unit takes it.

    The share of salt is drawn too: where the model takes even noise for the true class, an uneven one may do. Units on
    which the noise changes nothing come last, all with the same rank.
    """
    low, high, mutable, clean = (victim.units(t)[standing] for t in (victim.low, victim.high, victim.mutable, victim.x))
    numbers, units = clean.shape[1:].numel(), clean.shape[2]
    salt, key, share = victim.draws.uniform(standing, moment, numbers + units + 1).split([numbers, units, 1], dim=1)
    noise = torch.where(mutable, torch.where(salt.view_as(clean) < share.unsqueeze(2), high, low), clean)
    changes = (noise != clean).any(1)
    rank = key.masked_fill(~changes, 1.0).argsort(dim=1).argsort(dim=1)
    return noise, torch.where(changes, rank, units)


def _least_level(victim: Victim, at: Tensor, clean: Tensor, noise: Tensor, rank: Tensor, fewest: Tensor) -> Tensor:
    """How many units of noise ``(p,)`` make the model err, where one less does not; 0 if no number was found.

    The number is doubled until the model errs, then bisected. A run with a start of ``fewest > 0`` units asks once for
    clearly less and gives up if the model stands.
    """
    most = (rank < rank.shape[1]).sum(1)
    stands, errs = torch.zeros_like(fewest), torch.zeros_like(fewest)  # the levels between which the least one lies
    level = torch.where(fewest > 0, fewest * _FEWER // 100, 1)
    asks = ((level > 0) & (level <= most)).nonzero().squeeze(1)
    while len(asks):
        shown = (rank[asks] < level[asks].unsqueeze(1)).unsqueeze(1)
        points = torch.where(shown, noise[asks], clean[asks])
        broken = victim.errs(victim.points(points), at[asks])
        errs[asks[broken]] = level[asks[broken]]
        stands[asks[~broken]] = level[asks[~broken]]
        level = torch.where(errs > 0, (stands + errs) // 2, torch.minimum(2 * stands, most))
        more = torch.where(errs > 0, errs - stands > 1, (fewest == 0) & (stands < most))
        asks = asks[more[asks]]
    return errs


def reset_units(victim: Victim, at: Tensor, points: Tensor, order: Tensor, name: str, goal: int = 1) -> Tensor:
    """Takes units back to their clean values while the model errs, until no single one of them can go back.

    Units are tried in blocks. A block that goes back doubles the next one; in a block that does not, bisection finds
    the unit at which it fails. That unit stays, and is tried again in the next round if others went back after it.

    Args:
        at: ``(p,)``, rows, each as often as it has points.  points: ``(p, channels, units)``, on which the model errs.
        order: ``(p, units)``, the units in the order in which they are tried; clean ones may be among them.
        name: of the attack, for progress.  goal: a row that is broken within so many units is done.

    Returns the points, ``(p, channels, units)``.
    """
    points, clean = points.clone(), victim.units(victim.x)
    changed = (points != clean[at]).any(1).gather(1, order)
    queue = order.gather(1, (~changed).to(torch.int8).argsort(dim=1, stable=True))
    size = changed.sum(1)
    none, block = torch.zeros_like(size), size.clamp(max=_BLOCK)
    # A column is a path, whose units are queue[path, :size]. Of those, [:kept] had to stay in this round, [kept:pos]
    # are dealt with, [pos:end] are tried next, and cannot all go back if `failed`. The last `fresh` units that were
    # tried had to stay with the rest as it is now.
    state = torch.stack([torch.arange(len(at), device=at.device), size, none, none, block, block, none, none])
    start = time.monotonic()
    while True:
        path, size, pos, kept, _, end, failed, fresh = state
        unsure = (fresh < kept + size - pos) & torch.isin(at[path], victim.above(goal))
        if not unsure.any():
            return points
        state = state[:, unsure]
        path, _, pos, _, _, end, failed, _ = state
        victim.report(name, len(at) - len(path), len(at), start, f"{int(victim.queries.max())} queries")
        stop = torch.where(failed > 0, (pos + end) // 2, end)
        columns = pos.unsqueeze(1) + torch.arange(int((stop - pos).max()), device=at.device)
        # Shorter blocks name their first unit again: the same write, to the same place.
        units = queue[path.unsqueeze(1), torch.where(columns < stop.unsqueeze(1), columns, pos.unsqueeze(1))]
        tried = points[path]
        tried.scatter_(2, units.unsqueeze(1).expand(-1, tried.shape[1], -1), take(clean, at[path], units))
        errs = victim.errs(victim.points(tried), at[path])
        points[path[errs]] = tried[errs]
        state = _advance(state, queue, stop, errs)


def _advance(state: Tensor, queue: Tensor, stop: Tensor, errs: Tensor) -> Tensor:
    """The next state, now that ``[pos:stop]`` went back (``errs``) or cannot. Moves units that stay up in the queue."""
    path, size, pos, kept, block, end, failed, fresh = state
    pos, end = torch.where(errs, stop, pos), torch.where(errs, end, stop)
    fresh, failed = torch.where(errs, 0, fresh), torch.where(errs, failed, 1)
    # A last unit of a failed block needs no query of its own: with those before it gone back, it is that block.
    stays = (failed > 0) & (end - pos == 1)
    queue[path[stays], kept[stays]] = queue[path[stays], pos[stays]]
    pos, kept, fresh = pos + stays, kept + stays, fresh + stays

    over = pos == end
    failed = torch.where(over, 0, failed)
    block = torch.where(over, torch.where(stays, (block // 2).clamp(min=1), 2 * block), block)
    around = pos == size
    size, pos, kept = torch.where(around, kept, size), torch.where(around, 0, pos), torch.where(around, 0, kept)
    block = torch.where(around, 1, block)
    end = torch.where(over, torch.minimum(pos + block, size), end)
    return torch.stack([path, size, pos, kept, block, end, failed, fresh])
