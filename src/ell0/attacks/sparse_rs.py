"""Sparse-RS [Croce22], the adversary of the paper: random search over sets of changed units."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from ..common import Progress, check_count, silent
from ..threat import L0Ball
from .contract import AttackResult, Model, Victim
from .declare import attack
from .graphs import FILLED, Graphs

__all__ = ["Values", "sparse_rs"]

Values = Literal["corners", "black-white", "uniform"]

_AHEAD = 2000  # numbers drawn at once
_MOMENTS, _NUMBERS = 32, 2**20  # moments, and numbers, drawn at once at most for a step that is replayed
# Up to this share of the queries (in ten-thousandths), alpha is divided by that.
_SCHEDULE = ((0, 1), (50, 2), (200, 4), (500, 5), (1000, 6), (2000, 8), (4000, 10), (6000, 12), (8000, 15))


@attack(
    white_box=False, gradients_only=False, random=True, cascade=4,
    variants={"corners": {"values": "corners"}, "uniform": {"values": "uniform"}},
    cheap={"queries": 15}, strong={"queries": 600, "restarts": 3},
)  # fmt: skip
def sparse_rs(
    model: Model,
    x: Tensor,
    y: Tensor,
    ball: L0Ball,
    *,
    queries: int = 1000,
    restarts: int = 1,
    alpha: float = 0.8,
    values: Values = "corners",
    generator: torch.Generator | None = None,
    rows: Tensor | None = None,
    target: Tensor | None = None,
    progress: Progress = silent,
) -> AttackResult:
    """Sparse-RS [Croce22, algorithm 1]: keeps a random set of ``budget`` changed units, moves a few of them at a time.

    The first query changes random units to random values. Each later one takes max(int(alpha_i * budget), 1) units back
    to their clean values and changes as many others; it stays if the margin falls, or if the model errs. alpha_i falls
    with the share of the queries spent: alpha / 2, / 4, / 5, / 6, / 8, / 10, / 12, / 15, / 20 up to 0.5, 2, 5, 10, 20,
    40, 60, 80 and 100 %.

    Args:
        model: gives logits for x.  x: ``(n, ...)``.  y: ``(n,)``, the true labels.  ball: with a finite box.
        queries: for each row and restart.  restarts: runs from a new start, for the rows that still stand.
        alpha: share of the budget moved at the start of the schedule, in (0, 1].
        values: what a changed number becomes. ``"corners"``: low or high. ``"black-white"``, the paper's: the same, but
            a unit that a query moves alone becomes low or high in all its channels. ``"uniform"``: any in the box.
        generator: gives the key of the random draws; default: seed 0.  rows: ``(n,)`` int64, global row ids.
        target: ``(n,)``, a wanted label for each row.  progress: called after each step.

    Differs from [Croce22]'s code: units are drawn for each row, not for the batch; a single pixel that would keep its
    colour gets another in one channel, not a new draw of all; the best failure is kept.
    """
    check_count("queries", queries)
    check_count("restarts", restarts)
    if not 0 < alpha <= 1:
        raise ValueError(f"alpha must lie in (0, 1], got {alpha!r}")
    if values not in get_args(Values):
        raise ValueError(f"values must be one of {', '.join(map(repr, get_args(Values)))}, got {values!r}")
    with Victim(model, x, y, ball, generator=generator, rows=rows, target=target, progress=progress) as victim:
        for restart in range(restarts if ball.budget else 0):
            search = Search(victim, values, first=restart * queries)
            for query in victim.while_standing(range(queries), f"sparse_rs, run {restart + 1} of {restarts}"):
                search.step(max(int(_alpha(alpha, query, queries) * ball.budget), 1))
        return victim.result()


def _alpha(alpha: float, query: int, queries: int) -> float:
    share = int(query / queries * 10_000)
    return alpha / next((divisor for until, divisor in _SCHEDULE if share <= until), 20)


def take(numbers: Tensor, at: Tensor, units: Tensor) -> Tensor:
    """``(m, channels, s)``: some units ``(m, s)`` of some rows ``(m,)`` of numbers ``(n, channels, units)``."""
    channels = torch.arange(numbers.shape[1], device=at.device)
    return numbers[at.view(-1, 1, 1), channels.view(1, -1, 1), units.unsqueeze(1)]


@dataclass
class _Ahead:
    """What is drawn to move so many units from the moment ``since`` on: ``(moments, m, numbers)``.  place: the next."""

    moved: int
    drawn: Tensor
    place: Tensor
    since: int = -_MOMENTS


class Search:
    """A random search: for each standing row a set of changed units, and the best point so far.

    Rows are changed in place and back again where a step does not pay, so a step costs what it moves.

    Args:
        values: as in `sparse_rs`.  box: ``(n, channels, units)`` twice, a box inside that of the ball.
        first: number of the first moment of drawing.
        start: ``(n, ...)``, the points of ``victim.margin``, to go on from.  limit: queries after which a row leaves.
    """

    def __init__(
        self,
        victim: Victim,
        values: Values = "corners",
        *,
        box: tuple[Tensor, Tensor] | None = None,
        first: int = 0,
        start: Tensor | None = None,
        limit: int | None = None,
    ) -> None:
        self._victim, self._kind, self._moment, self._limit = victim, values, first, limit
        self._clean, self._mutable = victim.units(victim.x), victim.units(victim.mutable)
        self._low, self._high = box or (victim.units(victim.low), victim.units(victim.high))
        self._at = at = victim.standing
        free = self._mutable.any(1)[at]
        self._size = free.sum(1).clamp(max=victim.ball.budget)
        self._rest = free.sum(1) - self._size
        self._begun, self._best = start is not None, victim.margin[at].clone()
        self._points = victim.units((victim.x if start is None else start)[at].clone())
        # Each row's units, the changed ones first, then those that may change, then the frozen ones.
        rank = (~free).to(torch.int8)
        rank[(self._points != self._clean[at]).any(1)] = -1
        self._order = rank.argsort(dim=1, stable=True)
        self._drawn: tuple[int, Tensor] = first, torch.empty(0)  # a moment, and what is drawn from it on
        self._each = 3 + self._clean.shape[1]  # numbers drawn for a unit
        self._ahead: _Ahead | None = None

    def step(self, moved: int) -> None:
        """One query for every standing row: a start, or ``moved`` units moved."""
        graphs = self._victim.graphs if self._begun else None
        if graphs is None or self._victim.left < FILLED * len(self._at):
            self._drop_fallen()
        if len(self._at):
            if not self._begun:
                self._begin()
            elif graphs is None:
                self._move(moved, self._random(2 * moved))
            else:
                self._replay(graphs, moved)
            self._begun, self._moment = True, self._moment + 1

    def _standing(self) -> Tensor:
        stands = ~self._victim.success[self._at]
        return stands if self._limit is None else stands & (self._victim.queries[self._at] < self._limit)

    def _drop_fallen(self) -> None:
        stands = self._standing()
        if not stands.all():
            self._at, self._points, self._order = self._at[stands], self._points[stands], self._order[stands]
            self._size, self._rest, self._best = self._size[stands], self._rest[stands], self._best[stands]
            self._drawn = self._moment, torch.empty(0)
            self._ahead = None

    def _replay(self, graphs: Graphs, moved: int) -> None:
        """`_move` for the rows that stand, without waiting for the device; fallen rows stay for a while."""
        ahead = self._ahead
        if ahead is None or ahead.moved != moved:
            # What was recorded for other rows, or for another number, which only falls, is done with.
            graphs.forget()
            m, count = len(self._at), 2 * moved * self._each
            drawn = self._best.new_empty(max(1, min(_MOMENTS, _NUMBERS // (m * count))), m, count, dtype=torch.float64)
            ahead = self._ahead = _Ahead(moved, drawn, self._at.new_zeros(1))
        if not 0 <= self._moment - ahead.since < len(ahead.drawn):
            moments = torch.arange(self._moment, self._moment + len(ahead.drawn), device=self._at.device).unsqueeze(1)
            ahead.drawn.copy_(self._victim.draws.uniform(self._at, moments, ahead.drawn.shape[2]))
            ahead.since = self._moment
        ahead.place.fill_(self._moment - ahead.since)

        def move() -> None:
            drawn = ahead.drawn.index_select(0, ahead.place).squeeze(0)
            self._move(moved, drawn.unflatten(1, (2 * moved, self._each)), self._standing())

        graphs.run(("search", moved), move)

    def _begin(self) -> None:
        count = int(self._size.max())
        random = self._random(count)
        for i in range(count):
            self._shuffle(torch.zeros_like(self._size), i, self._size + self._rest, random[:, i, 0])
        units = self._order[:, :count]
        values = self._values(units, random[:, :, 1:])
        held = torch.arange(count, device=units.device) < self._size.unsqueeze(1)
        self._write(units, torch.where(held.unsqueeze(1), values, self._read(units)))
        self._best = self._victim.margins(self._victim.points(self._points), self._at)

    def _move(self, moved: int, random: Tensor, alive: Tensor | None = None) -> None:
        for i in range(moved):
            self._shuffle(torch.zeros_like(self._size), i, self._size, random[:, i, 0])
            self._shuffle(self._size, i, self._rest, random[:, moved + i, 0])
        columns = torch.arange(moved, device=self._at.device)
        # A row whose set is smaller than that moves its first unit several times: the same write, to the same place.
        going = torch.where(columns < self._size.unsqueeze(1), columns, 0)
        # Where nothing else may change, a unit of the set gets another value.
        coming = torch.where(going < self._rest.unsqueeze(1), self._size.unsqueeze(1) + going, going)
        out, into = self._order.gather(1, going), self._order.gather(1, coming)
        drawn = random[:, moved:, 1:].gather(1, going.unsqueeze(2).expand(-1, -1, random.shape[2] - 1))
        values = self._values(into, drawn, self._read(into) if moved == 1 else None)
        clean = torch.where((out == into).unsqueeze(1), values, take(self._clean, self._at, out))
        units = torch.cat([out, into], 1)
        old, new = self._read(units), torch.cat([clean, values], 2)
        self._write(units, new)
        margin = self._victim.margins(self._victim.points(self._points), self._at, alive)
        accept = (margin < self._best) | (margin < -1e-6)
        self._best.copy_(torch.where(accept, margin, self._best))
        self._write(units, torch.where(accept.view(-1, 1, 1), new, old))
        self._order.scatter_(1, going, torch.where(accept.unsqueeze(1), into, out))
        self._order.scatter_(1, coming, torch.where(accept.unsqueeze(1), out, into))

    def _shuffle(self, start: Tensor, i: int, size: Tensor, random: Tensor) -> None:
        """A step of Fisher and Yates over the ``size`` columns from ``start``: the i-th becomes one of those left."""
        mine = (start + size.clamp(min=1, max=i + 1) - 1).clamp(max=self._order.shape[1] - 1).unsqueeze(1)
        other = mine + (random * (size - i).clamp(min=0)).long().unsqueeze(1)
        here, there = self._order.gather(1, mine), self._order.gather(1, other)
        self._order.scatter_(1, mine, there)
        self._order.scatter_(1, other, here)

    def _random(self, units: int) -> Tensor:
        """``(m, units, 3 + channels)``: for each unit one to place it, one for each number, two so that it changes."""
        each, (since, drawn) = self._each, self._drawn
        if self._moment >= since + len(drawn) or drawn.shape[2] != units:
            # For many moments at once where rows are few: each call has its price.
            ahead = _AHEAD // max(1, len(self._at) * units * each) + 1
            moments = torch.arange(self._moment, self._moment + ahead, device=self._at.device).unsqueeze(1)
            drawn = self._victim.draws.uniform(self._at, moments, units * each).unflatten(2, (units, each))
            self._drawn = since, drawn = self._moment, drawn
        return drawn[self._moment - since]

    def _values(self, units: Tensor, random: Tensor, now: Tensor | None = None) -> Tensor:
        """New values ``(m, channels, s)`` for units ``(m, s)``, from random ``(m, s, channels + 2)``.

        now: ``(m, channels, s)``, if a query moves one unit; none gets its value of now, if there is another corner.
        """
        low, high, mutable = (take(t, self._at, units) for t in (self._low, self._high, self._mutable))
        random = random.transpose(1, 2)
        mine = random[:, : low.shape[1]]
        if self._kind == "uniform":
            value = (low + (high - low) * mine.to(low.dtype)).clamp(low, high)
        else:
            one_end = self._kind == "black-white" and now is not None
            mine = mine[:, :1].expand_as(low) if one_end else mine
            value = torch.where(mine < 0.5, low, high)
            if now is not None:
                number = (random[:, -2:-1] * mutable.sum(1, keepdim=True)).long()
                altered = mutable if one_end else mutable & (mutable.cumsum(1) - 1 == number)
                stuck = ((value == now) | ~mutable).all(1, keepdim=True)
                value = torch.where(stuck & altered, torch.where(mine < 0.5, high, low), value)
        return torch.where(mutable, value, take(self._clean, self._at, units))

    def _read(self, units: Tensor) -> Tensor:
        return self._points.gather(2, units.unsqueeze(1).expand(-1, self._points.shape[1], -1))

    def _write(self, units: Tensor, values: Tensor) -> None:
        self._points.scatter_(2, units.unsqueeze(1).expand(-1, self._points.shape[1], -1), values)
