"""The exact robust error of truncated and clipped linear classifiers on a Gaussian mixture, by conditional Monte Carlo.

The inner maximum over attacks is a closed form of the sorted products v_i = y w_i x_i, so one sort of a row serves all
budgets, all k and all clips. By symmetry y = 1.

Part of the randomness is integrated out exactly. With t the best linear estimate of a common shift of v, v - t is
independent of t ~ N(0, s^2), and the worst-case margin is increasing in t: it is positive above some t*, so each row
gives the probability Phi(t* / s) instead of a 0 or 1. For uniform nu and large d that leaves almost no variance.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import tee
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtr, stdtrit

from ._bounds import check_k, check_weight, floored
from ._mixture import Floats, Mixture, check_count

_CHUNK = 2**20
"""Numbers sorted at a time: rows of them fit the cache, and d = 1e6 costs a few tens of MB."""
_CHUNK_ROWS = 256
"""Rows at a time at most: each has a chance for every setting and budget."""
_BISECTIONS = 32
_REACH = 17.0
"""How far t* is looked for from t, in units of s: with both beyond 8.5, Phi is 0 or 1 to the last digit."""


class Estimate(float):
    """A probability estimated from n rows, with its 95 % interval, ``low`` to ``high``."""

    n: int
    low: float
    high: float

    def __new__(cls, value: float, n: int, low: float, high: float) -> Self:
        self = super().__new__(cls, value)
        self.n, self.low, self.high = n, low, high
        return self

    def __getnewargs__(self) -> tuple[float, int, float, float]:  # type: ignore[override]  # for copies
        return float(self), self.n, self.low, self.high

    def record(self) -> dict[str, float | int]:
        """As entries of a row of results."""
        return {"value": float(self), "n": self.n, "low": self.low, "high": self.high}


@dataclass(frozen=True, eq=False)
class RobustErrors:
    """Robust errors of many classifiers under many budgets, all from the same n rows.

    settings: what tells the classifiers apart, the ks or the clips.  budgets: ``(budgets,)``.
    value, low, high: ``(settings, budgets)``, the estimates and their 95 % intervals.
    """

    settings: tuple[float, ...]
    budgets: tuple[int, ...]
    value: Floats
    low: Floats
    high: Floats
    n: int

    def at(self, setting: float, budget: int) -> Estimate:
        """The robust error of one classifier under one budget."""
        if setting not in self.settings or budget not in self.budgets:
            raise ValueError(f"setting and budget must be among those estimated, got {setting} and {budget}")
        i = self.settings.index(setting), self.budgets.index(budget)
        return Estimate(float(self.value[i]), self.n, float(self.low[i]), float(self.high[i]))

    def best(self, budget: int) -> float:
        """The setting with the lowest estimate, the first at ties: quote its error from fresh rows, not from these."""
        if budget not in self.budgets:
            raise ValueError(f"budget must be among those estimated, got {budget}")
        return self.settings[int(self.value[:, self.budgets.index(budget)].argmin())]


def truncated_errors(
    mixture: Mixture,
    budgets: ArrayLike,
    ks: Sequence[int],
    *,
    weight: ArrayLike | None = None,
    rows: int = 1_000,
    rng: np.random.Generator,
) -> RobustErrors:
    """Robust errors of the classifiers sign <w, x>_k for every k and every budget m.

    P(sum of v without its k + m largest and k - m smallest terms <= 0), v = w * (mu + z)

    That sum is the least margin over all changes of at most m <= k coordinates by any amount, and is attained. For
    m > k the attacker always wins: such pairs read 1 with no doubt.

    Args:
        budgets: m, numbers >= 0; floored.  ks: each ``0 <= 2k < d``, at least one no smaller than the largest budget.
        weight: ``(d,)`` without zeros (a coordinate of weight 0 cannot be used to attack: leave it out of the mixture);
            None is the Bayes weight.
        rows: Monte Carlo rows, at least 2.
    """
    whole = floored(budgets).astype(int)
    each_k = _check_ks(mixture.d, whole, ks)
    shifts = _truncated_shifts(mixture.d, whole, each_k)
    return _truncated_table(each_k, whole, _chances(mixture, weight, rows, rng, shifts))


def clipped_errors(
    mixture: Mixture,
    budgets: ArrayLike,
    clips: Sequence[float] | None = None,
    *,
    weight: ArrayLike | None = None,
    rows: int = 1_000,
    rng: np.random.Generator,
) -> RobustErrors:
    """Robust errors of the clipped (Huber) classifiers sign sum_i clip(w_i x_i, -c, c), for every c and every budget m.

    P(sum of clip(v_i, -c, c) over all but the m largest - m c <= 0), v = w * (mu + z)

    No sort is needed to classify, and no budget is out of reach below d / 2.

    Args:
        clips: c, thresholds on the products w_i x_i; None is `clip_grid`.
        budgets, weight, rows: as for `truncated_errors`, each budget below d / 2.
    """
    whole = floored(budgets).astype(int)
    each_clip = _check_clips(mixture, whole, clips, weight)
    shifts = _clipped_shifts(mixture.d, whole, each_clip)
    return _table(each_clip, whole, _chances(mixture, weight, rows, rng, shifts))


def truncated_and_clipped_errors(
    mixture: Mixture,
    budgets: ArrayLike,
    ks: Sequence[int],
    clips: Sequence[float] | None = None,
    *,
    weight: ArrayLike | None = None,
    rows: int = 1_000,
    rng: np.random.Generator,
) -> tuple[RobustErrors, RobustErrors]:
    """`truncated_errors` and `clipped_errors` from the same rows: one sort of each serves both."""
    whole = floored(budgets).astype(int)
    each_k = _check_ks(mixture.d, whole, ks)
    each_clip = _check_clips(mixture, whole, clips, weight)
    both = [_truncated_shifts(mixture.d, whole, each_k), _clipped_shifts(mixture.d, whole, each_clip)]

    def shifts(v: Floats, spread: float) -> Floats:
        return np.concatenate([one(v, spread) for one in both], 1)

    truncated, clipped = tee(_chances(mixture, weight, rows, rng, shifts))
    return (
        _truncated_table(each_k, whole, (chance[: len(each_k)] for chance in truncated)),
        _table(each_clip, whole, (chance[len(each_k) :] for chance in clipped)),
    )


def k_grid(d: int, budget: int, points: int = 40) -> tuple[int, ...]:
    """Ks worth trying against a budget, from the budget to just below d / 2 in growing steps."""
    first, last = check_count("budget", budget, 0), (d - 1) // 2
    if first > last:
        raise ValueError(f"budget must be at most (d - 1) // 2, got budget={budget} with d={d}")
    steps = np.geomspace(max(first, 1), max(last, 1), check_count("points", points, 2)).round().astype(int)
    return tuple(sorted({first, last, *np.clip(steps, first, last).tolist()}))


def clip_grid(mixture: Mixture, points: int = 24, *, weight: ArrayLike | None = None) -> tuple[float, ...]:
    """Clips worth trying: from a tenth of the smallest to thrice the largest standard deviation of the products."""
    scale = np.abs(check_weight(mixture, weight) * mixture.deviations)
    return tuple(np.geomspace(scale.min() / 10, scale.max() * 3, check_count("points", points, 2)).tolist())


def best_k(
    mixture: Mixture,
    budget: int,
    ks: Sequence[int] | None = None,
    *,
    weight: ArrayLike | None = None,
    rows: int = 1_000,
    rng: np.random.Generator,
) -> tuple[int, Estimate]:
    """The k with the lowest robust error under a budget, and that error, estimated on rows that did not choose it.

    ks: None is `k_grid`.  weight, rows: as for `truncated_errors`.
    """
    ks = k_grid(mixture.d, budget) if ks is None else ks
    k = int(truncated_errors(mixture, budget, ks, weight=weight, rows=rows, rng=rng).best(budget))
    return k, truncated_errors(mixture, budget, [k], weight=weight, rows=rows, rng=rng).at(k, budget)


def _check_ks(d: int, budgets: NDArray[np.int_], ks: Sequence[int]) -> NDArray[np.int_]:
    each_k = np.array([check_k(d, k) for k in ks], dtype=int)
    if not each_k.size or each_k.max() < budgets.max(initial=0):
        raise ValueError(f"ks must reach the largest budget, got ks={list(ks)} with budget {budgets.max(initial=0)}")
    return each_k


def _check_clips(
    mixture: Mixture, budgets: NDArray[np.int_], clips: Sequence[float] | None, weight: ArrayLike | None
) -> tuple[float, ...]:
    if 2 * budgets.max(initial=0) >= mixture.d:
        raise ValueError(f"budgets must stay below d / 2, got {budgets.max()} with d={mixture.d}")
    each_clip = clip_grid(mixture, weight=weight) if clips is None else tuple(float(clip) for clip in clips)
    if not each_clip or not all(0 < clip < math.inf for clip in each_clip):
        raise ValueError(f"clips must be positive numbers, got {clips!r}")
    return each_clip


def _truncated_shifts(d: int, budgets: NDArray[np.int_], ks: NDArray[np.int_]) -> Callable[[Floats, float], Floats]:
    """`_chances`'s shifts of the truncated classifiers."""
    tolerated = np.minimum(budgets, ks[:, None])
    start, stop = ks[:, None] - tolerated, d - ks[:, None] - tolerated
    kept = d - 2 * ks[:, None]
    # Sums between neighbouring places, added up, are the sums below each place: a full running sum costs more.
    places = np.unique(np.concatenate([start.ravel(), stop.ravel(), [0]]))
    inner = places[places < d]
    at_start, at_stop = np.searchsorted(places, start), np.searchsorted(places, stop)

    def shifts(v: Floats, spread: float) -> Floats:
        del spread  # the margin is linear in the shift: nothing to search
        below = np.zeros((len(v), len(inner) + 1))
        np.cumsum(np.add.reduceat(v, inner, axis=1), axis=1, out=below[:, 1:])
        return np.asarray((below[:, at_start] - below[:, at_stop]) / kept)

    return shifts


def _clipped_shifts(d: int, budgets: NDArray[np.int_], clips: tuple[float, ...]) -> Callable[[Floats, float], Floats]:
    """`_chances`'s shifts of the clipped classifiers."""
    clip, left = np.array(clips)[:, None], d - budgets

    def shift(v: Floats, spread: float) -> Floats:
        below = np.append(0.0, np.cumsum(v))

        def margin(by: Floats) -> Floats:
            low = np.minimum(np.searchsorted(v, -clip - by), left)
            high = np.minimum(np.searchsorted(v, clip - by), left)
            between = below[high] - below[low] + by * (high - low)
            return np.asarray(between + clip * (left - high - low - budgets))

        return _root(margin, _REACH * spread, (len(clips), len(budgets)))

    def shifts(v: Floats, spread: float) -> Floats:
        return np.stack([shift(row, spread) for row in v])

    return shifts


def _chances(
    mixture: Mixture,
    weight: ArrayLike | None,
    rows: int,
    rng: np.random.Generator,
    shifts: Callable[[Floats, float], Floats],
) -> Iterator[Floats]:
    """For each row the chance of an error given v - t: ``(settings, budgets)``.

    shifts: from sorted v ``(n, d)`` and s, by how much each row must shift until its worst-case margin is 0:
        ``(n, settings, budgets)``.
    """
    check_count("rows", rows, 2)
    w = check_weight(mixture, weight)
    if not w.all():
        raise ValueError(f"weight must have no zeros, got {np.count_nonzero(w == 0)}")
    # t = <share, v - E v> is the generalised least squares estimate of a common shift of v = w * (mu + z).
    precision = mixture.solve(1 / w) / w
    share, spread = precision / precision.sum(), 1 / math.sqrt(precision.sum())
    centre = w * mixture.mu
    chunk = min(max(1, _CHUNK // mixture.d), _CHUNK_ROWS)
    sizes = [min(chunk, rows - first) for first in range(0, rows, chunk)]

    def chances(size: int, child: np.random.Generator) -> Floats:
        v = mixture.noise(size, child)
        v *= w
        estimates = v @ share
        v += centre
        v.sort(axis=1)
        return np.asarray(ndtr((estimates[:, None, None] + shifts(v, spread)) / spread))

    # A generator for each chunk: the rows do not depend on how many threads draw them.
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for found in threads.map(chances, sizes, rng.spawn(len(sizes))):
            yield from found


def _root(margin: Callable[[Floats], Floats], reach: float, shape: tuple[int, ...]) -> Floats:
    """Where a non-decreasing margin crosses 0 within -reach..reach, by bisection; an end where it does not."""
    low, high = np.full(shape, -reach), np.full(shape, reach)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        wins = margin(middle) <= 0
        low, high = np.where(wins, middle, low), np.where(wins, high, middle)
    return low


def _truncated_table(ks: NDArray[np.int_], budgets: NDArray[np.int_], chances: Iterator[Floats]) -> RobustErrors:
    return _table(tuple(ks.tolist()), budgets, chances, lost=budgets > ks[:, None])


def _table(
    settings: tuple[float, ...],
    budgets: NDArray[np.int_],
    chances: Iterator[Floats],
    lost: NDArray[np.bool_] | None = None,
) -> RobustErrors:
    """Means of the chances with their intervals; 1 without an interval where ``lost``."""
    n, mean, squares = 0, np.zeros((len(settings), len(budgets))), np.zeros((len(settings), len(budgets)))
    for n, chance in enumerate(chances, start=1):
        step = chance - mean
        mean += step / n
        squares += step * (chance - mean)
    low, high = _interval(mean, squares / (n - 1), n)
    if lost is not None:
        for bound in (mean, low, high):
            bound[lost] = 1.0
    return RobustErrors(settings, tuple(budgets.tolist()), mean, low, high, n)


def _interval(mean: Floats, variance: Floats, n: int) -> tuple[Floats, Floats]:
    """95 % interval for the mean of n numbers in [0, 1]: Wilson's, with the n of 0-1 rows that would vary as little."""
    spread = mean * (1 - mean)
    # Rows that are all alike, such as all 0, count as plain 0-1 rows: no doubt at all would be too good.
    rows = n * np.divide(spread, variance, out=np.ones_like(mean), where=(variance > 0) & (spread > variance))
    z = float(stdtrit(n - 1, 0.975))
    centre = (mean + z**2 / (2 * rows)) / (1 + z**2 / rows)
    half = z / (1 + z**2 / rows) * np.sqrt(spread / rows + z**2 / (4 * rows**2))
    return np.maximum(centre - half, 0.0), np.minimum(centre + half, 1.0)
