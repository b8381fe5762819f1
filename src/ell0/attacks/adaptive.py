"""An attack that knows the defence: it searches coordinates and values where truncation or a vote leaves a way in."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from .. import ops
from ..common import Progress, check_count, silent
from ..nn import InputClamp, InputScale, InputTruncation, TruncatedLinear
from ..threat import L0Ball
from .contract import AttackResult, Model, Victim
from .declare import attack
from .parts import PartSearch
from .sparse_rs import Search
from .surrogate import Vote, is_vote

__all__ = ["adaptive"]

_SEARCH = 10**6  # number of the random search's first draw, above those of the steps before it
_SWEEPS = 3  # rounds of swaps at most
_INSIDE = 0.999  # of the way from one threshold of a mask to the other: values just inside it


@attack(
    white_box=True, gradients_only=False, random=True, cascade=3,
    cheap={"queries": 24, "candidates": 2}, strong={"queries": 600}, knows_truncation=True, knows_votes=True,
)  # fmt: skip
def adaptive(
    model: Model,
    x: Tensor,
    y: Tensor,
    ball: L0Ball,
    *,
    queries: int = 1000,
    candidates: int = 12,
    generator: torch.Generator | None = None,
    rows: Tensor | None = None,
    target: Tensor | None = None,
    progress: Progress = silent,
) -> AttackResult:
    """Changes the units that move the margin most through the truncation, then swaps them, then searches at random.

    A truncated sum moves by clip(w_i v) - clip(w_i x_i) when x_i becomes v, clipped at its cuts: beyond the cut only
    the side matters, not the value. So each unit is scored by what it moves in every sum of the layer times the slope
    of the margin behind it; the ``candidates`` best are tried, the best one stays, until the budget is spent. Then each
    changed unit in turn is taken back and replaced by a better one, three times. The rest of the queries goes into
    a random search from there. An element-wise mask (`InputTruncation`) sets extremes to 0, so there the values just
    inside its thresholds are tried too. The gradient scores a model without such a layer at its input (behind an
    `InputClamp` and an `InputScale` at most), or with a way around that layer. Behind a clamp a value beyond it is
    scored as the end of it. Of a vote of parts each query tries a unit in every part, and the best units of the best
    parts change (`PartSearch`): three quarters of the queries, before the random search.

    Args:
        queries: for each row; a backward pass counts one.
        candidates: units tried by a query before one is chosen.
        model, x, y, ball, generator, rows, target, progress: as in `sparse_rs`.
    """
    check_count("queries", queries)
    check_count("candidates", candidates)
    with Victim(model, x, y, ball, generator=generator, rows=rows, target=target, progress=progress) as victim:
        if ball.budget and len(victim.standing):
            vote, inner = _vote(victim), None
            if vote is not None and queries > 8:
                PartSearch(victim, *vote).run(3 * queries // 4)
            else:
                scorer = _scorer(victim)
                inner, greedy = scorer.inner, _Greedy(victim, scorer, candidates, queries)
                greedy.grow()
                greedy.swap()
            search = Search(victim, box=inner, first=_SEARCH, start=victim.x_best, limit=queries)
            left = queries - victim.queries[victim.standing]
            for _ in victim.while_standing(range(int(left.max()) if len(left) else 0), "adaptive, searching"):
                search.step(1)
        return victim.result()


@dataclass(frozen=True)
class _Scorer:
    """Estimates what a change would do to the margin.

    layer: the truncation that the estimate goes through; None: it is the gradient.
    moves: points ``(m, ...)``, rows ``(m,)`` and values ``(m, channels, units)`` -> how far each value would move the
        margin, a tensor for each. Costs a forward and a backward.
    inner: values just inside the thresholds of a mask, ``(n, channels, units)`` twice.
    """

    layer: nn.Module | None
    moves: Callable[[Tensor, Tensor, list[Tensor]], list[Tensor]]
    inner: tuple[Tensor, Tensor] | None = None


def _gradient(victim: Victim, clamp: InputClamp) -> _Scorer:
    """Scores by the gradient of the margin. clamp: what the model does to its input first."""

    def moves(points: Tensor, at: Tensor, options: list[Tensor]) -> list[Tensor]:
        slope, now = (victim.units(t) for t in (victim.slopes(points, at, straight=True)[1], points))
        return [slope * (clamp(value) - clamp(now)) for value in options]

    return _Scorer(None, moves)


def _product(victim: Victim, clamp: InputClamp, scale: InputScale, layer: TruncatedLinear) -> _Scorer:
    """Scores through a truncated product: the sum over outputs of slope * (clip(w v) - w x).

    The clip counts by its share of saturated terms, which is known for each sum; which terms make it up would take a
    (batch, out, in) tensor. In the limits, a narrow box where none saturates and a wide one where all do, this is exact
    but for the terms already removed.
    """
    weight = layer.weight.detach()
    ready, sizes = ops.prepare(weight), weight.abs().sort(1).values
    positive, negative = (weight > 0).to(weight), (weight < 0).to(weight)

    def moves(points: Tensor, at: Tensor, options: list[Tensor]) -> list[Tensor]:
        _, slope, source = (t.flatten(1) if t.ndim > 1 else t for t in victim.slopes(points, at, behind=layer))
        high, low = ops.cuts(source, weight, top=layer.k, bottom=layer.k, prepared=ready)
        cut, now = torch.minimum(high, -low).clamp(min=0), source * (slope @ weight)
        moved = []
        for value in options:
            numbers = scale(clamp(victim.points(value))).flatten(1)
            # The share of a row's weights that reach a cut with a value of this size: (m, out).
            size = numbers.abs().mean(1).clamp(min=torch.finfo(numbers.dtype).tiny).unsqueeze(1)
            below = torch.searchsorted(sizes, (cut / size).T.contiguous()).T
            share = 1 - below.to(cut.dtype) / sizes.shape[1]
            up, down = slope * share * high, slope * share * low
            far = torch.where(
                numbers > 0,
                up @ positive + down @ negative,
                torch.where(numbers < 0, up @ negative + down @ positive, 0.0),
            )
            far += numbers * ((slope * (1 - share)) @ weight)
            moved.append((far - now).view_as(value))
        return moved

    return _Scorer(layer, moves)


def _mask(victim: Victim, clamp: InputClamp, scale: InputScale, layer: InputTruncation) -> _Scorer:
    """Scores through an element-wise mask: a number beyond the thresholds counts as 0, one just inside in full."""
    channels = layer.features[0] if len(layer.features) > 1 else 1

    def by_channel(numbers: Tensor) -> Tensor:
        """Those that compete with each other in a row: ``(m, channels, numbers of a channel)``."""
        return numbers.reshape(len(numbers), channels, -1)

    def thresholds(numbers: Tensor) -> tuple[Tensor, Tensor]:
        """The smallest and the largest number of a channel that stays, ``(m, channels, 1)`` each."""
        ordered = numbers.sort(2).values
        return ordered[:, :, layer.k, None], ordered[:, :, -layer.k - 1, None]

    def moves(points: Tensor, at: Tensor, options: list[Tensor]) -> list[Tensor]:
        _, slope, source = victim.slopes(points, at, behind=layer)
        now = by_channel(source)
        least, most = thresholds(now)

        def kept(numbers: Tensor) -> Tensor:
            return numbers.where((numbers >= least) & (numbers <= most), 0.0)

        seen = (scale(clamp(victim.points(value))) for value in options)
        gains = (slope.reshape(now.shape) * (kept(by_channel(numbers)) - kept(now)) for numbers in seen)
        return [victim.units(victim.points(gain)) for gain in gains]

    least, most = thresholds(by_channel(scale(clamp(victim.x))))
    step = (1 - _INSIDE) * (most - least)
    inside = (end.expand(-1, -1, victim.x[0].numel() // channels) for end in (least + step, most - step))
    low, high = victim.units(victim.low), victim.units(victim.high)
    least, most = (victim.units(scale.inverse(victim.points(end))).clamp(low, high) for end in inside)
    return _Scorer(layer, moves, (least, most))


def _scorer(victim: Victim) -> _Scorer:
    """The scorer for the model's first truncation, if nothing but a clamp and a scale stands before it."""
    layers = [*victim.model.modules()] if isinstance(victim.model, nn.Module) else []
    clamp = _clamp(victim, layers)
    for layer in layers:
        if isinstance(layer, TruncatedLinear | InputTruncation) and layer.k:
            scale = _scale(victim, layers, clamp, layer)
            if scale is None:
                break
            if isinstance(layer, TruncatedLinear):
                return _product(victim, clamp, scale, layer)
            return _mask(victim, clamp, scale, layer)
    return _gradient(victim, clamp)


def _vote(victim: Victim) -> tuple[Vote, Callable[[Tensor], Tensor]] | None:
    """The vote that is the model, and what it sees of points: clamped and scaled at most."""
    layers = [*victim.model.modules()] if isinstance(victim.model, nn.Module) else []
    units, some = victim.units(victim.x).shape[2], victim.x[:1]
    for vote in filter(is_vote, layers):
        pixels = len(vote.owner)
        if units != pixels if victim.ball.unit == "pixel" else units % pixels:
            continue
        # A clamp may stand before the vote, or in the network of its parts.
        for clamp in (InputClamp(-math.inf, math.inf), _clamp(victim, layers)):
            scale = _scale(victim, layers, clamp, cast(nn.Module, vote))
            if scale is not None:
                with torch.no_grad():
                    same = torch.equal(vote.scores(vote.part_logits(scale(clamp(some)))), victim.model(some))
                if same:
                    return vote, nn.Sequential(clamp, scale)
    return None


def _clamp(victim: Victim, layers: list[nn.Module]) -> InputClamp:
    """The clamp that all of the input passes; if there is none, one that clamps nothing."""
    for layer in layers:
        if isinstance(layer, InputClamp):
            ends = [abs(end) for end in (layer.low, layer.high) if math.isfinite(end)]
            sample = _sample(victim, 2 * max([1.0, *ends]))
            # The model is asked, not its structure: some of the input may bypass the layer.
            if _same(victim, sample, layer(sample)):
                return layer
    return InputClamp(-math.inf, math.inf)


def _scale(victim: Victim, layers: list[nn.Module], clamp: InputClamp, layer: nn.Module) -> InputScale | None:
    """The scale between clamp and layer (if there is none, one that changes nothing).

    None if the layer does not see every number, clamped and scaled, exactly once, or if some of the input bypasses it.
    """
    ends = (end.where(victim.mutable, 0.0) for end in (victim.low, victim.high))
    sample = _sample(victim, max([2.0, *(float(end.abs().max()) for end in ends)]))
    seen: list[tuple[Tensor, ...]] = []
    with layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs)):
        answered = _same(victim, sample)
    # A model that tells two samples apart while the layer gives the same output for both has a way around it.
    with layer.register_forward_hook(lambda _, __, output: torch.ones_like(output)):
        alone = _same(victim, sample, -sample)
    features = sample.numel()
    if isinstance(layer, TruncatedLinear | InputTruncation):
        features = layer.in_features if isinstance(layer, TruncatedLinear) else math.prod(layer.features)
    if not answered or not alone or features != sample.numel() or [len(inputs) for inputs in seen] != [1]:
        return None
    got = seen[0][0].flatten()
    for scale in (InputScale(0.0, 1.0), *(layer for layer in layers if isinstance(layer, InputScale))):
        fits = not isinstance(scale.low, tuple) or len(scale.low) == sample.shape[1]
        if fits and got.dtype == sample.dtype and torch.equal(got, scale(clamp(sample)).flatten()):
            return scale
    return None


def _sample(victim: Victim, size: float) -> Tensor:
    """One input that is none of the rows, with values up to that size."""
    like = victim.x[:1]
    return torch.linspace(-size, size, like.numel(), dtype=like.dtype, device=like.device).view_as(like)


def _same(victim: Victim, *samples: Tensor) -> bool:
    """Whether the model gives the same logits for all samples; not if it refuses one."""
    try:
        with torch.no_grad():
            first, *others = (victim.model(points.clone()) for points in samples)
    except (ValueError, RuntimeError, AssertionError):  # a model that checks its input
        return False
    return all(torch.equal(first, other) for other in others)


class _Greedy:
    """The current point of each row, to which units are added one after the other. No row depends on the others."""

    def __init__(self, victim: Victim, scorer: _Scorer, candidates: int, queries: int) -> None:
        self._victim, self._scorer, self._candidates, self._queries = victim, scorer, candidates, queries
        self._options = [*(scorer.inner or ()), victim.units(victim.low), victim.units(victim.high)]
        self._points, self._margin = victim.x.clone(), victim.margin.clone()

    def grow(self) -> None:
        """Adds units until the budget is spent, several at a time if the queries do not suffice for one at a time."""
        budget = self._victim.ball.budget
        steps = max(1, min(budget, self._queries // 2 // (self._candidates + 2)))
        for step in self._victim.while_standing(range(steps), "adaptive, growing"):
            count = budget * (step + 1) // steps - budget * step // steps
            at = self._able(self._victim.standing)
            self._add(at, self._points[at], count, first=step * self._candidates, always=True)

    def swap(self) -> None:
        """Replaces each changed unit of a row in turn by a better one; a row that gained nothing is done."""
        victim, gaining = self._victim, torch.ones_like(self._victim.success)
        for _ in victim.while_standing(range(_SWEEPS), "adaptive, swapping"):
            before = self._margin.clone()
            changed = victim.units(self._points != victim.x).any(1) & gaining.unsqueeze(1)
            places = changed.int().argsort(dim=1, descending=True, stable=True)
            for turn in range(int(changed.sum(1).max())):
                at = self._able((changed.sum(1) > turn).nonzero().squeeze(1))
                points, clean = victim.units(self._points[at]), victim.units(victim.x[at])
                back = torch.arange(points.shape[2], device=at.device) == places[at, turn].unsqueeze(1)
                self._add(at, victim.points(torch.where(back.unsqueeze(1), clean, points)), 1)
            gaining = self._margin < before

    def _able(self, at: Tensor) -> Tensor:
        """Those of the rows that stand and have the queries for another choice."""
        pays = self._victim.queries[at] + self._candidates + 2 <= self._queries
        return at[pays & ~self._victim.success[at]]

    def _add(self, at: Tensor, points: Tensor, count: int, *, first: int = 0, always: bool = False) -> None:
        """Tries sets of ``count`` more units on points of the rows; keeps the best if it helps, or always."""
        if not len(at):
            return
        victim, now = self._victim, self._victim.units(points)
        options = [value[at] for value in self._options]
        gain, best = torch.stack(self._scorer.moves(points, at, options)).min(0)
        value = torch.stack(options).gather(0, best.unsqueeze(0)).squeeze(0)
        # Of a pixel's numbers only those that help change; but all of a changed pixel must lie in the box.
        value = torch.where(gain < 0, value, now.clamp(options[-2], options[-1]))
        mutable = victim.units(victim.mutable[at])
        value = torch.where(mutable, value, now)
        free = (now == victim.units(victim.x[at])).all(1) & mutable.any(1)
        gain = gain.clamp(max=0).where(mutable, 0.0).sum(1).masked_fill(~free, torch.inf)
        for number in range(self._candidates):
            live = (~victim.success[at]).nonzero().squeeze(1)
            if not len(live):
                return
            units = self._set(gain[live], at[live], count, number, first + number)
            chosen = torch.zeros_like(free[live]).scatter(1, units, True) & free[live]
            trial = victim.points(torch.where(chosen.unsqueeze(1), value[live], now[live]))
            margin = victim.margins(trial, at[live])
            better = torch.ones_like(live) > 0 if always and number == 0 else margin < self._margin[at[live]]
            self._points[at[live[better]]] = trial[better]
            self._margin[at[live[better]]] = margin[better]

    def _set(self, gain: Tensor, at: Tensor, count: int, number: int, moment: int) -> Tensor:
        """``(m, count)`` units: the one at rank ``number``, or the best ones, by noisy gains from the second set on."""
        if count == 1:
            return gain.argsort(dim=1, stable=True)[:, number : number + 1]
        if number:
            gain = gain * (1 + 2 * self._victim.draws.uniform(at, moment, gain.shape[1])).to(gain.dtype)
        return gain.argsort(dim=1, stable=True)[:, :count]
