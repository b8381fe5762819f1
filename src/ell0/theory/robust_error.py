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
from itertools import product
from typing import NamedTuple

import numpy as np
from scipy.special import ndtr, stdtrit

from ..common import check_count
from ..results import Figure
from .arrays import Floats, Ints
from .mixture import Mixture, check_budgets, check_k

_CHUNK = 2**20
"""Numbers sorted at a time: rows of them fit the cache, and d = 1e6 costs a few tens of MB."""
_CHUNK_ROWS = 256
_BISECTIONS = 32
_REACH = 17.0
"""How far t* is looked for from t, in units of s: with both beyond 8.5, Phi is 0 or 1 to the last digit."""

Shifts = Callable[[Floats, float], Floats]
"""From sorted v ``(n, d)`` and s: the shift that makes each row's worst-case margin 0, ``(n, settings, budgets)``."""


class RobustErrors(NamedTuple):
    """Robust errors by k and budget, and by clip and budget, all from the same rows."""

    truncated: dict[tuple[int, int], Figure]
    clipped: dict[tuple[float, int], Figure]


def robust_errors(
    mixture: Mixture,
    budgets: Sequence[int],
    *,
    ks: Sequence[int] = (),
    clips: Sequence[float] = (),
    weight: Floats | None = None,
    rows: int = 1_000,
    rng: np.random.Generator,
) -> RobustErrors:
    """Robust errors of truncated and clipped (Huber) linear classifiers, for every k or clip c and every budget m.

    sign <w, x>_k:                      P(sum of v without its k + m largest and k - m smallest terms <= 0)
    sign sum_i clip(w_i x_i, -c, c):    P(sum of clip(v_i, -c, c) over all but the m largest - m c <= 0)

    with v = w * (mu + z). Each sum is the least margin over all changes of at most m coordinates by any
    amount, and is attained. Truncation with k < m always loses: these errors are 1, without an interval. Clipping needs
    no sort to classify, and withstands any budget below d / 2.

    budgets: m, below d / 2 with clips.  ks: each ``0 <= 2k < d``.  clips: c > 0.  weight: w ``(d,)`` without zeros;
    None: mu, the Bayes weights.  rows: of Monte Carlo, at least 2.
    """
    w = mixture.mu if weight is None else np.asarray(weight, dtype=np.float64)
    if w.shape != mixture.mu.shape or not np.isfinite(w).all() or not w.all():
        raise ValueError(f"weight must be {mixture.d} finite numbers without zeros, got {weight}")
    m = check_budgets(budgets)
    each_k = np.array([check_k(mixture.d, k) for k in ks], dtype=int)
    if not all(0 < clip < math.inf for clip in clips):
        raise ValueError(f"clips must be positive numbers, got {clips!r}")
    if clips and 2 * m.max(initial=0) >= mixture.d:
        raise ValueError(f"budgets must stay below d / 2 with clips, got {m.max()} with d={mixture.d}")
    shifts = [_truncated_shifts(mixture.d, m, each_k)]
    shifts += [_clipped_shifts(mixture.d, m, np.array(clips))] * bool(clips)
    shape = len(each_k) + len(clips), len(m)
    n, mean, squares = 0, np.zeros(shape), np.zeros(shape)
    for n, chance in enumerate(_chances(mixture, w, rows, rng, shifts), start=1):
        step = chance - mean
        mean += step / n
        squares += step * (chance - mean)
    low, high = interval(mean, squares / (n - 1), n)
    for bound in (mean, low, high):
        bound[: len(each_k)][m > each_k[:, None]] = 1.0
    found = [Figure(float(at), n, float(a), float(b)) for at, a, b in zip(mean.flat, low.flat, high.flat, strict=True)]
    pairs = len(each_k) * len(m)
    return RobustErrors(
        dict(zip(product(each_k.tolist(), m.tolist()), found[:pairs], strict=True)),
        dict(zip(product(clips, m.tolist()), found[pairs:], strict=True)),
    )


def _truncated_shifts(d: int, budgets: Ints, ks: Ints) -> Shifts:
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


def _clipped_shifts(d: int, budgets: Ints, clips: Floats) -> Shifts:
    clip, left = clips[:, None], d - budgets

    def shift(v: Floats, spread: float) -> Floats:
        below = np.append(0.0, np.cumsum(v))

        def margin(by: Floats) -> Floats:
            low = np.minimum(np.searchsorted(v, -clip - by), left)
            high = np.minimum(np.searchsorted(v, clip - by), left)
            between = below[high] - below[low] + by * (high - low)
            return np.asarray(between + clip * (left - high - low - budgets))

        # The margin does not fall as the row shifts: where it crosses 0, by bisection; an end where it does not.
        start = np.full((len(clips), len(budgets)), -_REACH * spread)
        end = -start
        for _ in range(_BISECTIONS):
            middle = (start + end) / 2
            wins = margin(middle) <= 0
            start, end = np.where(wins, middle, start), np.where(wins, end, middle)
        return start

    return lambda v, spread: np.stack([shift(row, spread) for row in v])


def _chances(
    mixture: Mixture, w: Floats, rows: int, rng: np.random.Generator, shifts: Sequence[Shifts]
) -> Iterator[Floats]:
    """For each row the chance of an error given v - t: ``(settings, budgets)``."""
    check_count("rows", rows, 2)
    # t = <share, v - E v> is the generalised least squares estimate of a common shift of v = w * (mu + z).
    precision = 1 / w / w
    share, spread = precision / precision.sum(), 1 / math.sqrt(precision.sum())
    centre = w * mixture.mu
    chunk = min(max(1, _CHUNK // mixture.d), _CHUNK_ROWS)
    sizes = [min(chunk, rows - first) for first in range(0, rows, chunk)]

    def chances(size: int, child: np.random.Generator) -> Floats:
        v = child.standard_normal((size, mixture.d))
        v *= w
        estimates = v @ share
        v += centre
        v.sort(axis=1)
        shift = np.concatenate([one(v, spread) for one in shifts], 1)
        return np.asarray(ndtr((estimates[:, None, None] + shift) / spread))

    # A generator for each chunk: the rows do not depend on how many threads draw them.
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for found in threads.map(chances, sizes, rng.spawn(len(sizes))):
            yield from found


def interval(mean: Floats, variance: Floats, n: int) -> tuple[Floats, Floats]:
    """95 % interval for the mean of n numbers in [0, 1]: Wilson's, with the n of 0-1 rows that would vary as little."""
    spread = mean * (1 - mean)
    # Rows that are all alike, such as all 0, count as plain 0-1 rows: no doubt at all would be too good.
    rows = n * np.divide(spread, variance, out=np.ones_like(mean), where=(variance > 0) & (spread > variance))
    z = float(stdtrit(n - 1, 0.975))
    centre = (mean + z**2 / (2 * rows)) / (1 + z**2 / rows)
    half = z / (1 + z**2 / rows) * np.sqrt(spread / rows + z**2 / (4 * rows**2))
    return np.maximum(centre - half, 0.0), np.minimum(centre + half, 1.0)
