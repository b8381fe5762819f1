"""An attack that knows the defence: it searches coordinates and values where truncation leaves a way in."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from .. import ops
from ..common import Progress, check_count, silent
from ..nn import InputClamp, InputScale, InputTruncation, TruncatedLinear
from ..threat import L0Ball
from .contract import AttackResult, Model, Victim
from .declare import attack
from .sparse_rs import Palette, Search

__all__ = ["adaptive"]

L = TypeVar("L", bound=nn.Module)

_SEARCH = 10**6  # number of the random search's first draw, above those of the steps before it


@attack(
    white_box=True, gradients_only=False, random=True, cascade=3,
    cheap={"queries": 24, "candidates": 2}, strong={"queries": 600},
)  # fmt: skip
def adaptive(
    model: Model,
    x: Tensor,
    y: Tensor,
    ball: L0Ball,
    *,
    queries: int = 1000,
    candidates: int = 12,
    sweeps: int = 3,
    generator: torch.Generator | None = None,
    rows: Tensor | None = None,
    target: Tensor | None = None,
    progress: Progress = silent,
) -> AttackResult:
    """Changes the units that move the margin most through the truncation, then swaps them, then searches at random.

    A truncated sum moves by clip(w_i v) - clip(w_i x_i) when x_i becomes v, clipped at its cuts: beyond the cut any
    value is as good as any other, and only which coordinates change, and to which side, matters. So each unit is scored
    by what it moves in every sum of the layer times the slope of the margin behind it; the ``candidates`` best are
    tried, the best one stays, until the budget is spent. Then each changed unit in turn is taken back and replaced by a
    better one, ``sweeps`` times, and what is left of the queries goes into a random search from there. An element-wise
    mask (`InputTruncation`) sets extremes to 0, so there the values just inside its thresholds are tried too. A model
    without such a layer at its input, an `InputClamp` and an `InputScale` after it aside, or with a way around that
    layer, is scored by its gradient, straight through truncations further on. Behind a clamp a value beyond it is
    scored as the end of it.

    Args:
        queries: for each row; a backward pass counts one.
        candidates: units tried by a query before one is chosen.  sweeps: rounds of swaps at most.
        model, x, y, ball, generator, rows, target, progress: as in `sparse_rs`.
    """
    check_count("queries", queries)
    check_count("candidates", candidates)
    check_count("sweeps", sweeps, least=0)
    with Victim(model, x, y, ball, generator=generator, rows=rows, target=target, progress=progress) as victim:
        if ball.budget:
            state = _State(victim, _scorer(victim), candidates, queries)
            state.grow()
            state.swap(sweeps)
            state.search()
        return victim.result()


@dataclass(frozen=True)
class _Plan:
    """The best value found for every number of some rows, and the estimated change of the margin for each unit."""

    value: Tensor  # (m, channels, units)
    gain: Tensor  # (m, units), negative is good


class _Gradient:
    """Scores units by the gradient of the margin. clamp: what the model does to its input first."""

    def __init__(self, victim: Victim, clamp: InputClamp) -> None:
        self.victim, self.clamp = victim, clamp
        self.low, self.high = (victim.units(t) for t in (victim.low, victim.high))

    def options(self, at: Tensor) -> list[Tensor]:
        """Values that a number may take, each ``(m, channels, units)``."""
        return [self.low[at], self.high[at]]

    def moves(self, points: Tensor, at: Tensor, options: list[Tensor]) -> list[Tensor]:
        """How far each option would move the margin: ``(m, channels, units)`` each. Costs a forward and a backward."""
        _, slope = self.victim.slopes(points, at, surrogate="straight")
        slope, now = self.victim.units(slope), self.victim.units(points)
        return [slope * (self.clamp(value) - self.clamp(now)) for value in options]

    def plan(self, points: Tensor, at: Tensor) -> _Plan:
        """The best option for every number, and what a unit gains by all of its numbers."""
        options, now = self.options(at), self.victim.units(points)
        gain, best = torch.stack(self.moves(points, at, options)).min(0)
        value = torch.stack(options).gather(0, best.unsqueeze(0)).squeeze(0)
        # Of a pixel's numbers only those that help change; but all of a changed pixel must lie in the box.
        value = torch.where(gain < 0, value, now.clamp(self.low[at], self.high[at]))
        mutable = self.victim.units(self.victim.mutable)[at]
        return _Plan(torch.where(mutable, value, now), gain.clamp(max=0).where(mutable, 0.0).sum(1))

    def palette(self) -> Palette:
        """Values for the random search."""
        return Palette(self.victim, "corners")


class _Product(_Gradient):
    """Scores through a truncated product of the input, clamped and scaled."""

    def __init__(self, victim: Victim, clamp: InputClamp, scale: InputScale, layer: TruncatedLinear) -> None:
        super().__init__(victim, clamp)
        self.scale, self.layer = scale, layer
        self.weight = layer.weight.detach()
        self.prepared = ops.prepare(self.weight)
        self.positive, self.negative = (self.weight > 0).to(self.weight), (self.weight < 0).to(self.weight)
        self.sizes = self.weight.abs().sort(1).values

    def moves(self, points: Tensor, at: Tensor, options: list[Tensor]) -> list[Tensor]:
        """The sum over outputs of slope * (clip(w v) - w x), the clip by its share of saturated terms.

        That share is known for each sum; which terms make it up would take a (batch, out, in) tensor. In the limits,
        a narrow box where none saturates and a wide one where all do, this is exact but for the terms already removed.
        """
        _, source, slope = self.victim.slopes_behind(self.layer, points, at)
        source, slope = source.flatten(1), slope.flatten(1)
        high, low = ops.cuts(source, self.weight, top=self.layer.k, bottom=self.layer.k, prepared=self.prepared)
        now = source * (slope @ self.weight)
        moves = []
        for value in options:
            numbers = self.scale(self.clamp(value)).flatten(1)
            share = self._saturated(high, low, numbers.abs().mean(1))
            up, down = slope * share * high, slope * share * low
            far = torch.where(
                numbers > 0,
                up @ self.positive + down @ self.negative,
                torch.where(numbers < 0, up @ self.negative + down @ self.positive, 0.0),
            )
            far += numbers * ((slope * (1 - share)) @ self.weight)
            moves.append((far - now).view_as(value))
        return moves

    def _saturated(self, high: Tensor, low: Tensor, size: Tensor) -> Tensor:
        """The share of a row's weights that reach a cut with a value of that size: ``(m, out)``."""
        cut = torch.minimum(high, -low).clamp(min=0) / size.clamp(min=torch.finfo(size.dtype).tiny).unsqueeze(1)
        below = torch.searchsorted(self.sizes, cut.T.contiguous())
        return 1 - below.T.to(cut.dtype) / self.sizes.shape[1]


class _Mask(_Gradient):
    """Scores through an element-wise mask: a number beyond the thresholds counts as 0, one just inside in full."""

    INSIDE = 0.999

    def __init__(self, victim: Victim, clamp: InputClamp, scale: InputScale, layer: InputTruncation) -> None:
        super().__init__(victim, clamp)
        self.scale, self.layer = scale, layer
        self.weight = victim.units(layer.weight.detach().view(1, *victim.x.shape[1:]))
        least, most = self._thresholds(victim.units(scale(clamp(victim.x))))
        numbers = [self.INSIDE * cut / torch.where(self.weight == 0, 1.0, self.weight) for cut in (least, most)]
        ends = [scale.low + (scale.high - scale.low) * number for number in numbers]
        self.inner_low = torch.minimum(*ends).clamp(self.low, self.high)
        self.inner_high = torch.maximum(*ends).clamp(self.low, self.high)

    def _thresholds(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """The smallest and the largest product that stays, ``(m, 1, 1)`` each. numbers: ``(m, channels, units)``."""
        products = (self.weight * numbers).flatten(1).sort(1).values
        k = self.layer.k
        return products[:, k].view(-1, 1, 1), products[:, products.shape[1] - k - 1].view(-1, 1, 1)

    def options(self, at: Tensor) -> list[Tensor]:
        return [self.inner_low[at], self.inner_high[at], *super().options(at)]

    def moves(self, points: Tensor, at: Tensor, options: list[Tensor]) -> list[Tensor]:
        _, source, slope = self.victim.slopes_behind(self.layer, points, at)
        slope, numbers = (self.victim.units(t.view_as(points)) for t in (slope, source))
        least, most = self._thresholds(numbers)

        def kept(value: Tensor) -> Tensor:
            product = self.weight * value
            return product.where((product >= least) & (product <= most), 0.0)

        now = kept(numbers)
        return [slope * (kept(self.scale(self.clamp(value))) - now) for value in options]

    def palette(self) -> Palette:
        return Palette(self.victim, "corners", self.inner_low, self.inner_high)


def _scorer(victim: Victim) -> _Gradient:
    """The scorer for the model's first truncation, if nothing but a clamp and a scale stands before it."""
    clamp = _clamp(victim)
    for layer in _layers(victim, nn.Module):
        if not isinstance(layer, TruncatedLinear | InputTruncation) or layer.k == 0:
            continue
        scale = _scale(victim, clamp, layer)
        if scale is None:
            break
        if isinstance(layer, TruncatedLinear):
            return _Product(victim, clamp, scale, layer)
        return _Mask(victim, clamp, scale, layer)
    return _Gradient(victim, clamp)


def _clamp(victim: Victim) -> InputClamp:
    """The clamp that all of the input passes; if there is none, one that clamps nothing."""
    for layer in _layers(victim, InputClamp):
        sample = _sample(victim, 2 * max([1.0, *(abs(end) for end in (layer.low, layer.high) if math.isfinite(end))]))
        # The model is asked, not its structure: some of the input may bypass the layer.
        free, clamped = (_ask(victim, points) for points in (sample, layer(sample)))
        if free is not None and clamped is not None and torch.equal(free, clamped):
            return layer
    return InputClamp(-math.inf, math.inf)


def _layers(victim: Victim, kind: type[L]) -> list[L]:
    """The layers of that kind, in the model's order."""
    modules = victim.model.modules() if isinstance(victim.model, nn.Module) else ()
    return [layer for layer in modules if isinstance(layer, kind)]


def _sample(victim: Victim, size: float) -> Tensor:
    """One input that is none of the rows, with values up to that size."""
    like = victim.x[:1]
    return torch.linspace(-size, size, like.numel(), dtype=like.dtype, device=like.device).view_as(like)


def _ask(victim: Victim, points: Tensor) -> Tensor | None:
    try:
        with torch.no_grad():
            logits: Tensor = victim.model(points.clone())
    except (ValueError, RuntimeError, AssertionError):  # a model that checks its input
        return None
    return logits


def _scale(victim: Victim, clamp: InputClamp, layer: TruncatedLinear | InputTruncation) -> InputScale | None:
    """The scale between clamp and layer (if there is none, one that changes nothing).

    None if the layer does not see every number, clamped and scaled, exactly once, or if some of the input bypasses it.
    """
    ends = (end.where(victim.mutable, 0.0) for end in (victim.low, victim.high))
    sample = _sample(victim, max([2.0, *(float(end.abs().max()) for end in ends)]))
    if (layer.in_features if isinstance(layer, TruncatedLinear) else layer.weight.numel()) != sample.numel():
        return None
    seen: list[tuple[Tensor, ...]] = []
    hook = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs))
    try:
        answered = _ask(victim, sample) is not None
    finally:
        hook.remove()
    if not answered or len(seen) != 1 or len(seen[0]) != 1:
        return None
    (got,) = seen[0]
    if got.numel() != sample.numel() or got.dtype != sample.dtype or _has_a_way_around(victim, layer, sample):
        return None
    for scale in (InputScale(0.0, 1.0), *_layers(victim, InputScale)):
        if torch.equal(got.flatten(), scale(clamp(sample)).flatten()):
            return scale
    return None


def _has_a_way_around(victim: Victim, layer: nn.Module, sample: Tensor) -> bool:
    """Whether the model tells two samples apart while the layer gives the same output for both."""
    hook = layer.register_forward_hook(lambda _, __, output: torch.ones_like(output))
    try:
        one, other = (_ask(victim, points) for points in (sample, -sample))
    finally:
        hook.remove()
    return one is None or other is None or not torch.equal(one, other)


class _State:
    """The current point of each row. No row depends on the others."""

    def __init__(self, victim: Victim, scorer: _Gradient, candidates: int, queries: int) -> None:
        self._victim, self._scorer, self._candidates, self._queries = victim, scorer, candidates, queries
        self._points = victim.x.clone()
        self._margin = victim.margin.clone()

    def grow(self) -> None:
        """Adds units until the budget is spent, several at a time if the queries do not suffice for one at a time."""
        budget = self._victim.ball.budget
        steps = max(1, min(budget, self._queries // 2 // (self._candidates + 2)))
        for step in self._victim.while_standing(range(steps), "adaptive, growing"):
            count = budget * (step + 1) // steps - budget * step // steps
            at = self._able(self._victim.standing)
            self._add(at, self._points[at], count, first=step * self._candidates, always=True)

    def swap(self, sweeps: int) -> None:
        """Replaces each changed unit of a row in turn by a better one; a row that gained nothing is done."""
        gaining = torch.ones_like(self._victim.success)
        for _ in self._victim.while_standing(range(sweeps), "adaptive, swapping"):
            before = self._margin.clone()
            changed = self._victim.units(self._points != self._victim.x).any(1) & gaining.unsqueeze(1)
            places = changed.int().argsort(dim=1, descending=True, stable=True)
            for turn in range(int(changed.sum(1).max())):
                at = self._able((changed.sum(1) > turn).nonzero().squeeze(1))
                self._add(at, self._without(at, places[at, turn]), 1)
            gaining = self._margin < before

    def search(self) -> None:
        """Spends what is left on a random search from the best points."""
        search = Search(
            self._victim, self._scorer.palette(), first=_SEARCH, start=self._victim.x_best, limit=self._queries
        )
        left = self._queries - self._victim.queries[self._victim.standing]
        for _ in self._victim.while_standing(range(int(left.max()) if len(left) else 0), "adaptive, searching"):
            search.step(1)

    def _able(self, at: Tensor) -> Tensor:
        """Those of the rows that stand and have the queries for another choice."""
        pays = self._victim.queries[at] + self._candidates + 2 <= self._queries
        return at[pays & ~self._victim.success[at]]

    def _without(self, at: Tensor, unit: Tensor) -> Tensor:
        """The points of the rows with one unit each taken back."""
        points, clean = (self._victim.units(t[at]) for t in (self._points, self._victim.x))
        back = torch.zeros_like(points, dtype=torch.bool)
        back[torch.arange(len(at), device=at.device), :, unit] = True
        return self._victim.points(torch.where(back, clean, points))

    def _add(self, at: Tensor, points: Tensor, count: int, *, first: int = 0, always: bool = False) -> None:
        """Tries sets of ``count`` more units on points of the rows; keeps the best if it helps, or always."""
        if not len(at):
            return
        victim = self._victim
        plan = self._scorer.plan(points, at)
        numbers = victim.units(points)
        free = (numbers == victim.units(victim.x[at])).all(1) & victim.units(victim.mutable[at]).any(1)
        gain = plan.gain.masked_fill(~free, torch.inf)
        for number in range(self._candidates):
            live = (~victim.success[at]).nonzero().squeeze(1)
            if not len(live):
                return
            units = self._set(gain[live], at[live], count, number, first + number)
            chosen = torch.zeros_like(free[live]).scatter(1, units, True) & free[live]
            trial = victim.points(torch.where(chosen.unsqueeze(1), plan.value[live], numbers[live]))
            margin = victim.margins(trial, at[live])
            better = margin < self._margin[at[live]]
            if always and number == 0:
                better = torch.ones_like(better)
            self._points[at[live[better]]] = trial[better]
            self._margin[at[live[better]]] = margin[better]

    def _set(self, gain: Tensor, at: Tensor, count: int, number: int, moment: int) -> Tensor:
        """``(m, count)`` units: the one at rank ``number``, or the best ones, by noisy gains from the second set on."""
        if count == 1:
            return gain.argsort(dim=1, stable=True)[:, number : number + 1]
        if number:
            gain = gain * (1 + 2 * self._victim.draws.uniform(at, moment, gain.shape[1])).to(gain.dtype)
        return gain.argsort(dim=1, stable=True)[:, :count]
