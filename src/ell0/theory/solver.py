"""Exact adversarial training as a convex problem, solved to a duality gap.

    F(w, b) = mean_i log(1 + sum_r exp(-(rho_ir(w) + b_ir))) + alpha/2 (|w|^2 + |b|^2)

rho_ir is the worst-case truncated sum of row i against rival r: linear terms minus their largest ones, minus the most
that added features take away. Both are maxima over sets, so rho is concave and F convex. Each maximum is smoothed,

    top(v) = max <p, v> - mu/2 |p|^2   over  0 <= p <= 1,  sum p = count,

which is at most mu/2 * count below the exact one. Its p, and the slopes theta of the loss, are a point of the dual,

    D = mean_i H(theta_i) - |mean_i sum_r theta_ir (keep - p_ir) x_ir|^2 / (2 alpha)  <=  min F,

so every evaluation proves how far it is from the optimum. L-BFGS does the rest, with mu made smaller as it goes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from scipy import sparse
from scipy.optimize import minimize
from scipy.special import logsumexp, xlogy

from .arrays import Bools, Floats, Ints

MU = 0.1
"""The first smoothing. F is at most log(1 + rivals), so this is coarse."""
ITERATIONS = 120
"""L-BFGS iterations between two looks at the gap; each look forgets the curvature it has learnt."""
SMOOTHING = 0.8
"""Share of the gap that may be the smoothing's before it is made smaller."""
REMEMBERED = 80
"""Dual points that a lower bound is mixed from."""

Total = Callable[[Floats, Ints], tuple[Floats, Ints]]
"""From t of some rows and their indices: sums that fall in t, and minus mu times their slopes."""


class Additions(NamedTuple):
    """Rows ``(r,)`` of one label, what they hold ``(r, d)``, and how much may be added, at least 1, against a rival."""

    rows: Ints
    rival: int
    budget: int
    present: sparse.csr_matrix


@dataclass(frozen=True, eq=False)
class Problem:
    """A convex problem of the form above.

    x: ``(n, d)``.  contrast: ``(n, rivals, outputs)``, which rows of the weight a rival's margin is the sum of.
    top: terms that leave at the top.  keep: ``(n, rivals, d)``, terms of the linear part; None: all.
    """

    x: sparse.csr_matrix
    contrast: Floats
    alpha: float
    top: int = 0
    keep: Bools | None = None
    additions: tuple[Additions, ...] = ()

    @cached_property
    def dense(self) -> Floats:
        """``(n, 1, d)``, each row for all outputs."""
        return np.asarray(self.x.toarray()[:, None])


class Dual(NamedTuple):
    """A point of the dual: mean H(theta), and the gradient of the loss without the penalty ``(outputs, d + 1)``."""

    entropy: float
    slope: Floats

    def value(self, alpha: float) -> float:
        """D, which F is at least anywhere."""
        return self.entropy - float((self.slope**2).sum()) / (2 * alpha)


class SmoothedValue(NamedTuple):
    """The smoothed objective at some weights, its gradient ``(outputs, d + 1)``, and what the exact one is at most."""

    value: float
    gradient: Floats
    upper: float
    dual: Dual


class Solution(NamedTuple):
    """params: ``(outputs, d + 1)``, intercept last.  upper: what F is at most there.  gap: relative to upper."""

    params: Floats
    upper: float
    gap: float
    iterations: int


def solve(problem: Problem, start: Floats, *, tol: float, max_iter: int) -> Solution:
    """Weights with a gap of at most tol, or the best of ``max_iter`` iterations."""
    seen: deque[Dual] = deque(maxlen=REMEMBERED)

    def flat(params: Floats, mu: float) -> tuple[float, Floats]:
        point = evaluate(problem, params.reshape(start.shape), mu)
        seen.append(point.dual)
        return point.value, point.gradient.ravel()

    params = best = start
    upper, lower, mu, spent = np.inf, -np.inf, MU, 0
    while True:
        point = evaluate(problem, params, mu)
        if point.upper < upper:
            best, upper = params, point.upper
        mixture = mixed([*seen, point.dual], problem.alpha)
        seen.append(mixture)
        lower = max(lower, mixture.value(problem.alpha))
        gap = max((upper - lower) / upper, 0.0)
        if gap <= tol or spent >= max_iter:
            return Solution(best, upper, gap, spent)
        if spent and point.upper - point.value > SMOOTHING * (upper - lower):
            mu /= 4
        # by strong convexity a gradient this small leaves a tenth of the allowed gap
        enough = float(np.sqrt(0.2 * problem.alpha * tol * upper / params.size))
        limit = {"maxiter": min(ITERATIONS, max_iter - spent), "maxcor": 60, "ftol": 0.0, "gtol": enough}
        found = minimize(flat, params.ravel(), (mu,), jac=True, method="L-BFGS-B", options=limit)
        if found.nit == 0:
            mu /= 4  # converged at this mu
        params, spent = found.x.reshape(start.shape), spent + max(int(found.nit), 1)


def mixed(points: Sequence[Dual], alpha: float) -> Dual:
    """The best mixture of dual points, never worse than the best of them.

    D is concave, so for shares s >= 0 that add up to 1, min F >= sum s_j H_j - |sum s_j g_j|^2 / (2 alpha). One point
    alone has a rough gradient, which 1 / alpha makes count; a mixture evens it out.
    """
    entropy = np.array([point.entropy for point in points])
    slope = np.array([point.slope.ravel() for point in points])
    gram = slope @ slope.T / alpha

    def drop(share: Floats) -> tuple[float, Floats]:
        pull = gram @ share
        return float(share @ pull / 2 - share @ entropy), pull - entropy

    alone = points[int((entropy - np.diag(gram) / 2).argmax())]
    first = np.array([float(point is alone) for point in points])
    adds_up = {"type": "eq", "fun": lambda share: share.sum() - 1, "jac": np.ones_like}
    found = minimize(drop, first, jac=True, method="SLSQP", bounds=[(0, 1)] * len(points), constraints=[adds_up])
    share = np.maximum(found.x, 0)
    share /= share.sum()
    mixture = Dual(float(share @ entropy), (share @ slope).reshape(alone.slope.shape))
    return mixture if mixture.value(alpha) > alone.value(alpha) else alone


def evaluate(problem: Problem, params: Floats, mu: float) -> SmoothedValue:
    """The smoothed objective, its gradient and both bounds. params: ``(outputs, d + 1)``, intercept last."""
    weight, intercept = params[:, :-1], params[:, -1]
    n, rivals, _ = problem.contrast.shape
    # Where every term stays, the sums are one product of the rows and the weights.
    whole = problem.top == 0 and problem.keep is None
    if whole:
        rho = np.einsum("nro,no->nr", problem.contrast, problem.x @ weight.T)
    else:
        terms = duel_terms(problem, weight)
        leaves = capped(terms, problem.top, mu)
        stays = (1.0 if problem.keep is None else problem.keep) - leaves
        rho = (stays * terms).sum(-1) + mu / 2 * (leaves**2).sum(-1)
    count = np.full((n, rivals), float(problem.top))
    pulls = []
    for one in problem.additions:
        harm, pull = _added_harm(one, problem.contrast[one.rows[0], one.rival], weight, mu)
        rho[one.rows, one.rival] -= harm
        count[one.rows, one.rival] += one.budget
        pulls.append(pull)
    margin = rho + problem.contrast @ intercept
    theta, value = logistic(margin)
    upper = logistic(margin - mu / 2 * count)[1].mean()

    to_outputs = -theta[..., None] * problem.contrast
    gradient = np.empty_like(params)
    if whole:
        gradient[:, :-1] = (problem.x.T @ to_outputs.sum(1)).T
    else:
        to_terms = np.matmul(to_outputs.transpose(0, 2, 1), stays)
        gradient[:, :-1] = (to_terms * problem.dense).sum(0)
    gradient[:, -1] = to_outputs.sum((0, 1))
    for one, pull in zip(problem.additions, pulls, strict=True):
        gradient[:, :-1] -= pull(theta[one.rows, one.rival])
    gradient /= n

    rest = 1 - theta.sum(1)
    entropy = -(xlogy(theta, theta).sum(1) + xlogy(rest, rest)).mean()
    penalty = problem.alpha / 2 * float((params**2).sum())
    total = gradient + problem.alpha * params
    return SmoothedValue(float(value.mean()) + penalty, total, float(upper) + penalty, Dual(float(entropy), gradient))


def duel_terms(problem: Problem, weight: Floats) -> Floats:
    """The terms of each row against each rival: ``(n, rivals, d)``. weight: ``(outputs, d)``."""
    return np.asarray(problem.contrast @ (problem.dense * weight))


def logistic(margin: Floats) -> tuple[Floats, Floats]:
    """Minus the slopes of log(1 + sum_r exp(-margin_r)), ``(n, rivals)``, and its values ``(n,)``."""
    logits = np.concatenate([np.zeros((len(margin), 1)), -margin], 1)
    value = logsumexp(logits, axis=1)
    return np.exp(-margin - value[:, None]), value


def capped(v: Floats, count: int, mu: float) -> Floats:
    """argmax of <p, v> - mu/2 |p|^2 over 0 <= p <= 1, sum p = count, on the last axis: clip((v - t) / mu, 0, 1)."""
    shape = v.shape
    v = v.reshape(-1, shape[-1])
    place = shape[-1] - count
    ends = np.partition(v, [place - 1, place], 1)
    low, high = ends[:, place] - mu, ends[:, place - 1]
    # sum p is at least count at low and at most count at high; where they cross, low serves exactly

    def total(t: Floats, rows: Ints) -> tuple[Floats, Ints]:
        share = (v[rows] - t[:, None]) / mu
        return np.clip(share, 0, 1).sum(1), ((share > 0) & (share < 1)).sum(1)

    t = bracketed(total, mu, np.full(len(v), float(count)), low, high)
    return np.clip((v - t[:, None]) / mu, 0, 1).reshape(shape)


def bracketed(total: Total, mu: float, count: Floats, low: Floats, high: Floats) -> Floats:
    """t with total(t) = count for every row, by Newton's steps inside a bracket; low where low >= high.

    count, low, high: ``(n,)``, total >= count at low, <= at high.
    """
    low, high = low.copy(), high.copy()
    rows = np.flatnonzero(low < high)
    t = low.copy()
    t[rows] = (low[rows] + high[rows]) / 2
    while len(rows):
        at = t[rows]
        sums, inside = total(at, rows)
        excess = sums - count[rows]
        low[rows] = np.where(excess > 0, at, low[rows])
        high[rows] = np.where(excess > 0, high[rows], at)
        newton = at + mu * excess / np.maximum(inside, 1)
        middle = (low[rows] + high[rows]) / 2
        good = (inside > 0) & (newton > low[rows]) & (newton < high[rows])
        moves = (np.abs(excess) > 1e-8) & (middle > low[rows]) & (middle < high[rows])
        t[rows] = np.where(moves, np.where(good, newton, middle), at)
        rows = rows[moves]
    return t


def _added_harm(
    additions: Additions, contrast: Floats, weight: Floats, mu: float
) -> tuple[Floats, Callable[[Floats], Floats]]:
    """The smoothed most that additions take from the sums of some rows: max <p, a> - mu/2 |p|^2, sum p <= budget.

    a = -w. p_ij = clip((a_j - t_i) / mu, 0, 1) for every absent feature, with one t_i >= 0 a row: sums over all
    features come from prefix sums of the sorted a, minus those of the present ones.

    Returns it, ``(r,)``, and a function that lays the sum of theta_i p_i, theta ``(r,)``, on the weights.
    """
    harm = -(contrast @ weight)
    n = len(additions.rows)
    # at a = 0 and below nothing is added, present or not
    counts = harm[additions.present.indices] > 0
    present_row = np.repeat(np.arange(n), np.diff(additions.present.indptr))[counts]
    present_feature = additions.present.indices[counts]
    present = harm[present_feature]
    order = np.argsort(-harm, kind="stable")
    a = harm[order]
    sums = _prefix_sums(a, a**2)

    def total(t: Floats, rows: Ints) -> tuple[Floats, Ints]:
        whole, some = np.searchsorted(-a, -t - mu), np.searchsorted(-a, -t)
        place = np.full(n, -1)
        place[rows] = np.arange(len(rows))
        of = place[present_row]
        live = of >= 0
        of = of[live]
        share = (present[live] - t[of]) / mu
        summed = whole + (sums[0, some] - sums[0, whole] - (some - whole) * t) / mu
        inside = np.bincount(of[(share > 0) & (share < 1)], minlength=len(rows))
        return summed - np.bincount(of, np.clip(share, 0, 1), len(rows)), some - whole - inside

    rank = np.empty(len(a), np.int64)
    rank[order] = np.arange(len(a))

    def largest(number: Ints) -> Floats:
        """The a of this number, counted from 1 downwards, among absent features; 0 where there is none."""
        place, before = number - 1, number - 2
        while (place != before).any():
            passed = np.bincount(present_row[rank[present_feature] <= place[present_row]], minlength=n)
            place, before = number - 1 + passed, place
        return np.append(a, 0.0)[np.minimum(place, len(a))]

    budget = np.full(n, additions.budget)
    low = np.maximum(largest(budget) - mu, 0)
    high = np.maximum(largest(budget + 1), 0)
    high = np.where(total(low, np.arange(n))[0] > budget, high, low)
    t = bracketed(total, mu, budget.astype(np.float64), low, high)
    whole, some = np.searchsorted(-a, -t - mu), np.searchsorted(-a, -t)
    partly = (sums[1, some] - sums[1, whole] - (some - whole) * t**2) / (2 * mu)
    p_present = np.clip((present - t[present_row]) / mu, 0, 1)
    of_present = np.bincount(present_row, p_present * present - mu / 2 * p_present**2, n)

    def pull(theta: Floats) -> Floats:
        rows = np.argsort(t)
        at = t[rows]
        sums = _prefix_sums(theta[rows], theta[rows] * at)
        whole, some = np.searchsorted(at, harm - mu), np.searchsorted(at, harm)
        on = sums[0, whole] + ((sums[0, some] - sums[0, whole]) * harm - (sums[1, some] - sums[1, whole])) / mu
        return np.outer(contrast, on - np.bincount(present_feature, theta[present_row] * p_present, len(on)))

    return sums[0, whole] - whole * mu / 2 + partly - of_present, pull


def _prefix_sums(*rows: Floats) -> Floats:
    return np.concatenate([np.zeros((len(rows), 1)), np.cumsum(rows, 1)], 1)
