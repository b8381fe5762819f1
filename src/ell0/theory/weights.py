"""The paper's linear classifier: the weights w*(k) of least robust error at finite d, and the budget it tolerates.

The weights take the signs of mu: where one differs, turning it raises the distribution of its term, and the worst-case
margin rises with every term. Zeros need no care: the error of positive weights near them is no larger in the limit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize
from scipy.special import ndtr

from ..common import check_count
from ..results import Figure
from .arrays import Bools, Floats
from .mixture import Mixture, check_k
from .robust_error import interval, robust_errors

_NUMBERS, _LEAST_ROWS, _MOST_ROWS = 2**20, 256, 4_000
"""A sample has this many numbers, and rows between these."""
_FRESH = 4
"""Times as many rows measure the error of the chosen weights."""
_OWN = 12
"""Up to this d every coordinate has a weight of its own; above, log w is piecewise linear in log |mu| with so many
knots. More would fit the sample: d = 10,000 has 256 rows."""
_POWERS = (0.0, 0.25, 0.5, 1.0, 1.5)
"""Starts |mu| ** power; 1 is the Bayes weights."""
_FILTERED = math.exp(-5)
"""What is left of the weights of the largest |mu| in the starts that filter them, as FilTrun does."""
_DRAWN = 30
"""More starts for d up to `_OWN`: the best quarter of four times as many drawn at random."""
_LOG_RANGE = 10.0
_REACH = 9.0
"""How far g* is looked for: beyond, Phi is 0 or 1."""
_CLOSE = 1e-11
"""How close to g* the search ends."""


class OptimalWeights(NamedTuple):
    """weight: ``(d,)``, of norm 1.  error: its robust error on rows that neither fitted nor chose it."""

    weight: Floats
    error: Figure


def optimal_weights(
    mixture: Mixture, k: int, budget: int | None = None, *, rows: int | None = None, rng: np.random.Generator
) -> OptimalWeights:
    """w*(k) = argmin over w of the robust error of sign <w, x>_k under ``budget`` changes ([Beliaev22] section 4).

    The error is that of `robust_errors`, P(sum of v without its k + m largest and k - m smallest terms <= 0). It is not
    convex in w: descents from several starts minimise it on one sample, a second sample chooses among what they found
    and the Bayes weights, and a third measures the choice. Equal |mu| get equal weights where d > 12.

    k: ``0 <= 2k < d``.  budget: m <= k; None: k, as in [Beliaev22].  rows: of the first two samples; None: by d.
    """
    k, budget = check_k(mixture.d, k), k if budget is None else check_count("budget", budget, 0)
    if budget > k:
        raise ValueError(f"budget must be at most k, where truncation withstands nothing, got {budget} with k={k}")
    fitting, choosing, fresh = rng.spawn(3)
    nu, rows = np.abs(mixture.mu), _rows(mixture.d) if rows is None else check_count("rows", rows, 2)
    found = [nu, *fit(Sample(nu, rows, fitting), k, budget)]
    judge = Sample(nu, rows, choosing)
    best = min(found, key=lambda weight: judge.error(weight, k, budget))
    weight = np.sign(mixture.mu) * best / np.linalg.norm(best)
    measured = robust_errors(mixture, [budget], ks=[k], weight=weight, rows=_FRESH * rows, rng=fresh)
    return OptimalWeights(weight, measured.truncated[k, budget])


def k_trunc(
    mixture: Mixture, eps: Sequence[float], *, rows: int | None = None, rng: np.random.Generator
) -> list[Figure]:
    """max{k : robust error of sign <w*(k), x>_k under k changes <= eps}, for each eps ([Beliaev22] section 4).

    The error of any w rises with k on every row, so the least error over a set of weights, measured on one sample, does
    too, and k_trunc with eps. The set is grown until it holds w*(k + 1) for the k of each eps. The estimate counts as
    it is; the interval of k has the largest k whose error's interval lies below eps, and the largest at which it may.

    eps: each from the Bayes error to 1/2, where a constant answer is as good.
    """
    lowest = mixture.bayes_error
    for one in eps:
        if not lowest <= one <= 0.5:
            raise ValueError(f"eps must lie between the Bayes error {lowest:.4f} and 1/2, got {one}")
    nu, rows = np.abs(mixture.mu), _rows(mixture.d) if rows is None else check_count("rows", rows, 2)
    fitting, judging = rng.spawn(2)
    judge, fitted = Sample(nu, rows, judging), Sample(nu, rows, fitting)
    pool, errors = {0: nu}, dict[tuple[int, int], Figure]()

    def largest(most: float, end: str) -> int:
        """The largest k for which the pool has weights whose error, or this end of its interval, is at most this."""

        def holds(k: int) -> bool:
            for trained_for, weight in reversed(pool.items()):
                if (trained_for, k) not in errors:
                    errors[trained_for, k] = _figure(judge.chances(weight, k, k))
                found = errors[trained_for, k]
                if (found if end == "value" else getattr(found, end)) <= most:
                    return True
            return False

        held, fails = 0, 1
        while 2 * fails < mixture.d and holds(fails):
            held, fails = fails, 2 * fails
        fails = min(fails, (mixture.d + 1) // 2)
        while fails - held > 1:
            middle = (held + fails) // 2
            held, fails = (middle, fails) if holds(middle) else (held, middle)
        return held

    for one in eps:
        while (k := largest(one, "value") + 1) not in pool and 2 * k < mixture.d:
            pool[k] = min(fit(fitted, k, k), key=lambda weight: judge.error(weight, k, k))
    return [Figure(largest(one, "value"), rows, largest(one, "high"), largest(one, "low")) for one in eps]


class Sample:
    """Rows of a mixture of y = 1 without their component along nu, which is integrated out.

    x = nu + r + g a with a = nu / ||nu||_2 and g ~ N(0, 1) independent of r. The worst-case margin of weights w > 0
    rises with g, and is positive above some g*: a row errs with probability Phi(g*), which is smooth in w where a 0-1
    error is not. At g* the kept terms v_i = w_i x_i add up to 0, so d g* / d log w_i = -v_i / sum of the kept w_j a_j.

    nu: ``(d,)``, positive.
    """

    def __init__(self, nu: Floats, rows: int, rng: np.random.Generator) -> None:
        self.nu, self.along, self.rng = nu, nu / np.linalg.norm(nu), rng
        self.x = rng.standard_normal((rows, len(nu)))
        self.x += nu - np.outer(self.x @ self.along, self.along)
        self.g = np.zeros(rows)  # where the last search ended: the next one begins there

    def chances(self, weight: Floats, k: int, budget: int) -> Floats:
        """The probability that each row errs: ``(rows,)``."""
        return np.asarray(ndtr(self._roots(weight, k, budget)[0]))

    def error(self, weight: Floats, k: int, budget: int) -> float:
        return float(self.chances(weight, k, budget).mean())

    def slope(self, weight: Floats, k: int, budget: int) -> tuple[float, Floats]:
        """The error, and its gradient in log w ``(d,)``."""
        g, kept = self._roots(weight, k, budget)
        density = np.exp(-(g**2) / 2) / math.sqrt(2 * math.pi) / (kept @ (weight * self.along)) / len(g)
        # sum over rows of density * kept * v, with v = w * (x + g a)
        moved = np.einsum("n,nd,nd->d", density, kept, self.x) + self.along * ((density * g) @ kept)
        return float(ndtr(g).mean()), -weight * moved

    def _roots(self, weight: Floats, k: int, budget: int) -> tuple[Floats, Bools]:
        """g* of each row, and the terms kept there ``(rows, d)``: Newton's steps, halving where they leave a bracket.

        The margin is piecewise linear in g, so the steps are few: some three near the last weights.
        """
        first, last = k - budget, len(weight) - k - budget - 1
        drift, terms = weight * self.along, self.x * weight
        kept = np.empty(self.x.shape, bool)
        low, high = np.full(len(kept), -np.inf), np.full(len(kept), np.inf)
        g, rows = self.g, np.arange(len(kept))
        while len(rows):
            at, v = g[rows], terms[rows] + g[rows, None] * drift
            ends = np.partition(v, [first, last], 1)
            margin = ends[:, first : last + 1].sum(1)
            kept[rows] = (v >= ends[:, [first]]) & (v <= ends[:, [last]])
            low[rows] = np.where(margin <= 0, at, low[rows])
            high[rows] = np.where(margin > 0, at, high[rows])
            below, above = low[rows], high[rows]
            # A little beyond the root, so that the next step closes the bracket: a small step alone proves nothing
            # where weights are very unequal, since past a kink the margin may be flat.
            beyond = np.where(margin > 0, -_CLOSE, _CLOSE)
            newton = np.clip(at - margin / (kept[rows] @ drift) + beyond, -_REACH, _REACH)
            ended = (above - below <= 4 * _CLOSE) | (newton == at)
            outside = ((newton <= below) | (newton >= above)) & ~ended
            newton[outside] = (below + above)[outside] / 2
            rows = rows[~ended]
            g[rows] = newton[~ended]
        return g.copy(), kept


def fit(sample: Sample, k: int, budget: int) -> list[Floats]:
    """Weights ``(d,)`` that descents reach on a sample: up to d = 12 from many starts, above from the best of a few."""
    basis, knots = _basis(sample.nu)
    starts = [power * np.log(knots) for power in _POWERS]
    order = np.argsort(-knots)
    for filtered in (1, 2, 4, 8):
        starts.append(np.log(knots))
        starts[-1][order[:filtered]] += math.log(_FILTERED)
    starts = [start - start.mean() for start in starts]

    def error(theta: Floats) -> float:
        return sample.error(np.exp(basis @ theta), k, budget)

    def slope(theta: Floats) -> tuple[float, Floats]:
        value, gradient = sample.slope(np.exp(basis @ theta), k, budget)
        return value, basis.T @ gradient

    def descend(theta: Floats, tol: float) -> Floats:
        bounds = [(-_LOG_RANGE, _LOG_RANGE)] * len(theta)
        return np.asarray(minimize(slope, theta, jac=True, bounds=bounds, options={"maxiter": 60, "ftol": tol}).x)

    if len(sample.nu) > _OWN:
        found = [descend(min(starts, key=error), 1e-5)]
    else:
        starts += sorted(sample.rng.normal(0, 1.5, (4 * _DRAWN, len(knots))), key=error)[:_DRAWN]
        # A kink ends a descent early, and a second one, which has forgotten the curvature, may go on.
        found = sorted((descend(descend(start, 1e-7), 1e-7) for start in starts), key=error)
        found.append(minimize(error, found[0], method="Nelder-Mead", options={"maxfev": 50 * len(knots)}).x)
    return [np.exp(basis @ (theta - theta.max())) for theta in found]


def _basis(nu: Floats) -> tuple[Floats, Floats]:
    """How log w depends on its values at the knots ``(d, knots)``, and |mu| at the knots."""
    if len(nu) <= _OWN:
        return np.eye(len(nu)), nu
    knots = np.unique(nu)
    if len(knots) > _OWN:
        # at ranks in geometric steps: the few largest |mu|, which the attacker takes first, have their own
        knots = np.unique(-np.sort(-nu)[np.geomspace(1, len(nu), _OWN).round().astype(int) - 1])
    hats = [np.interp(np.log(nu), np.log(knots), one) for one in np.eye(len(knots))]
    return np.stack(hats, 1), knots


def _rows(d: int) -> int:
    return max(_LEAST_ROWS, min(_MOST_ROWS, _NUMBERS // d))


def _figure(chances: Floats) -> Figure:
    mean, n = chances.mean(keepdims=True), len(chances)
    low, high = interval(mean, chances.var(ddof=1, keepdims=True), n)
    return Figure(float(mean[0]), n, float(low[0]), float(high[0]))
