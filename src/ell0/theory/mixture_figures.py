"""The figures of `ell0 theory`: what truncation is worth on a Gaussian mixture, at common dimensions and where the
paper's Theorem 2 applies."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np

from ..common import Progress, Step, check_count, silent
from ..results import CHOSEN, CLIPPED, EQUAL, OPTIMAL, OPTIMAL_CHOSEN, Figure, Results
from .bounds import PowerLaw, c1, c2, finite_lower_bound, k_opt_bound, log_k_opt_bound, log_k_trunc_bound, theorem_range
from .mixture import Mixture, check_distinct
from .robust_error import RobustErrors, robust_errors
from .weights import k_trunc, optimal_weights

_STEEPEST = 10.0
"""Up to this decay the sum of nu_i ** -2 is a float at any d; the first coordinate carries all signal long before."""
_PILOT, _MOST_PILOT, _PILOT_NUMBERS = 256, 1_000, 2**25
"""Rows that choose k and clip, and say how many more are needed: more where d is small and they are cheap. At d = 1e5
the clips that 64 rows chose had an error up to 0.02 above the best clip's, those that 256 chose up to 0.003."""
_KS, _CLIPS = 12, 10
"""Candidates: the error is flat around the best, and neighbours of such a grid differ by less than the precision."""
_OPTIMAL_D = 10_000
"""Up to this d the best weights are looked for: a minute or less for each budget."""
_LEVELS = (0.2, 0.3, 0.4)
"""Robust errors at which the tolerated budgets are given."""
_OVER_K_D, _OVER_K_BUDGETS, _OVER_K_ROWS = 784, (1, 5, 10), 1_000
_EPS = 0.45
"""Robust error at which the exponents of Theorem 2 are taken."""
_LOG10_D = (10, 11, 12, 13, 14, 16, 18, 20, 25, 30, 40, 50, 70, 100, 140, 200, 300)


def figures(
    dimensions: Sequence[int] = (100, 784, 10_000, 100_000, 1_000_000),
    decays: Sequence[float] = (0.0, 0.5),
    *,
    precision: float = 0.03,
    seed: int = 0,
    command: str = "",
    progress: Progress = silent,
) -> Results:
    """Robust errors over budgets, tolerated budgets, robust errors over k, and the exponents of Theorem 2, as results.

    dimensions: each at least 10.  decays: of nu_i ~ i ** -decay, 0 to 10.  precision: target half-width of the 95 %
    intervals, from 0.001. A pilot says how many rows that takes, so an interval may come out somewhat wider. The pilot
    also chooses k and clip; fresh rows, the same for all classifiers, measure their errors. The best weights and the
    tolerated budgets are there up to d = 10,000. With ``decay=0`` the Bayes weights are taken for the best: signals are
    equal, and so are weights.
    """
    check_distinct("dimensions", dimensions)
    for d in dimensions:
        check_count("dimensions", d, 10)
    check_distinct("decays", decays)
    for decay in decays:
        if not 0 <= decay <= _STEEPEST:
            raise ValueError(f"decays must lie between 0 and {_STEEPEST:g}, got {decay}")
    check_count("seed", seed, 0)
    if not 0.001 <= precision < 0.5:
        raise ValueError(f"precision must lie between 0.001 and 0.5, got {precision}")
    started = time.perf_counter()
    results = Results.here("theory", command, seeds=[seed], device="cpu")
    rng = np.random.default_rng(seed)
    done, total = 0, len(decays) * (len(dimensions) + 1)
    for decay in decays:
        for d in dimensions:
            progress(Step("figures", done, total, f"robust error over budget, d = {d:,}, nu_i ~ i ** -{decay:g}"))
            _over_budget(results, d, decay, precision, rng)
            done += 1
        progress(Step("figures", done, total, f"robust error over k, d = {_OVER_K_D}, nu_i ~ i ** -{decay:g}"))
        _over_k(results, decay, rng)
        _exponents(results, decay)
        done += 1
    results.seconds = time.perf_counter() - started
    return results


def _over_budget(results: Results, d: int, decay: float, precision: float, rng: np.random.Generator) -> None:
    started = time.perf_counter()
    mixture = Mixture.power_law(d, decay)
    setting = {"d": d, "decay": decay}
    results.add(mixture.bayes_error, what="bayes_error", **setting)
    # Up to sqrt d, around which every classifier fails.
    most = math.isqrt(d)
    budgets = [m for power in range(len(str(most))) for step in (1, 2, 3, 5, 7) if (m := step * 10**power) <= most]
    # From a tenth of the smallest to thrice the largest standard deviation of the products.
    scale = np.abs(mixture.mu)
    clips = np.geomspace(scale.min() / 10, scale.max() * 3, _CLIPS).tolist()
    cheap = max(_PILOT, min(_MOST_PILOT, _PILOT_NUMBERS // d))
    ks = sorted({*budgets, *_k_grid(d, _KS)})
    pilot = robust_errors(mixture, budgets, ks=ks, clips=clips, rows=cheap, rng=rng)
    chosen = [
        (m, min(ks, key=lambda k: pilot.truncated[k, m]), min(clips, key=lambda clip: pilot.clipped[clip, m]))
        for m in budgets
    ]
    # Rows that make the intervals as narrow as asked if the pilot's spread is the true one, and a fifth more.
    narrow = [1.2 * one.n * ((one.high - one.low) / 2 / precision) ** 2 for *_, one in _shown(pilot, chosen)]
    rows = max(_PILOT, math.ceil(max(narrow)))
    if decay and d <= _OPTIMAL_D:
        # The spread of the best weights is not known yet: as many as rows of 0 or 1 would need.
        rows = max(rows, math.ceil(1 / precision**2))
    ks, clips = sorted({*budgets, *(k for _, k, _ in chosen)}), sorted({clip for *_, clip in chosen})
    seed = int(rng.integers(2**63))  # all classifiers are measured on the same rows
    final = robust_errors(mixture, budgets, ks=ks, clips=clips, rows=rows, rng=np.random.default_rng(seed))
    measured = list(_shown(final, chosen))
    for (m, k, _), best in product(chosen, (OPTIMAL, OPTIMAL_CHOSEN)):
        at = m if best == OPTIMAL else k
        if decay == 0:
            measured.append((best, m, at, final.truncated[at, m]))
        elif d <= _OPTIMAL_D:
            weight, same = optimal_weights(mixture, at, m, rng=rng).weight, np.random.default_rng(seed)
            errors = robust_errors(mixture, [m], ks=[at], weight=weight, rows=rows, rng=same)
            measured.append((best, m, at, errors.truncated[at, m]))
    for name, budget, value, found in measured:
        detail = {"clip" if name == CLIPPED else "k": value}
        results.add(found, what="robust_error", classifier=name, **setting, budget=budget, **detail)
    for budget, bound in zip(budgets, finite_lower_bound(mixture, budgets), strict=True):
        results.add(float(bound), what="lower_bound", **setting, budget=budget)
    if d <= _OPTIMAL_D:
        _tolerated(results, mixture, decay, cheap, rng)
    results.add(time.perf_counter() - started, what="seconds", **setting)


def _tolerated(results: Results, mixture: Mixture, decay: float, rows: int, rng: np.random.Generator) -> None:
    """The largest budgets m with a robust error of eps: Bayes weights with k = m, w*(m), Bayes weights with the best k,
    and what no classifier exceeds."""
    budgets, grid = range(min(math.isqrt(mixture.d) + 1, (mixture.d + 1) // 2)), _k_grid(mixture.d, 2 * _KS)
    errors = robust_errors(mixture, budgets, ks=sorted({*budgets, *grid}), rows=rows, rng=rng).truncated
    equal = [errors[m, m] for m in budgets]
    chosen = [min(errors[k, m] for k in {m, *grid}) for m in budgets]
    bayes = [_largest(equal, eps) for eps in _LEVELS]
    optimal = bayes if decay == 0 else k_trunc(mixture, _LEVELS, rng=rng)
    for i, eps in enumerate(_LEVELS):
        setting = {"d": mixture.d, "decay": decay, "eps": eps}
        results.add(bayes[i], what="k_trunc_bayes", **setting)
        results.add(optimal[i], what="k_trunc", **setting)
        results.add(_largest(chosen, eps), what="k_chosen", **setting)
        results.add(k_opt_bound(mixture, eps), what="k_opt_bound", **setting)


def _largest(errors: Sequence[Figure], eps: float) -> Figure:
    """The largest m with errors[m] <= eps; its interval, by the ends of theirs."""
    ends = ([error, error.high, error.low] for error in errors)
    value, low, high = (max((m for m, e in enumerate(end) if e <= eps), default=0) for end in zip(*ends, strict=True))
    return Figure(value, errors[0].n, low, high)


def _k_grid(d: int, points: int) -> list[int]:
    last = (d - 1) // 2
    return sorted({1, last, *np.geomspace(1, last, points).round().astype(int).tolist()})


def _shown(errors: RobustErrors, chosen: Sequence[tuple[int, int, float]]) -> Iterator[tuple[str, int, float, Figure]]:
    """The three figures of each budget: classifier, budget, its k or clip, robust error."""
    for budget, k, clip in chosen:
        yield EQUAL, budget, budget, errors.truncated[budget, budget]
        yield CHOSEN, budget, k, errors.truncated[k, budget]
        yield CLIPPED, budget, clip, errors.clipped[clip, budget]


def _over_k(results: Results, decay: float, rng: np.random.Generator) -> None:
    ks = _k_grid(_OVER_K_D, 24)
    errors = robust_errors(Mixture.power_law(_OVER_K_D, decay), _OVER_K_BUDGETS, ks=ks, rows=_OVER_K_ROWS, rng=rng)
    for budget, k in product(_OVER_K_BUDGETS, ks):
        if k >= budget:
            found = errors.truncated[k, budget]
            results.add(found, what="robust_error_over_k", d=_OVER_K_D, decay=decay, budget=budget, k=k)


def _exponents(results: Results, decay: float) -> None:
    """alpha = log_d k of Theorem 2 where it applies: alpha_opt(eps) >= alpha_trunc(eps) >= alpha_opt(eps - c1) - c2."""
    for log10_d in _LOG10_D:
        nu = PowerLaw(10**log10_d, decay)
        log_d = math.log(nu.d)
        setting = {"log10_d": log10_d, "decay": decay, "eps": _EPS}
        results.add(c1(nu.d), what="c1", **setting)
        if theorem_range(nu.d)[0] >= _EPS:
            continue
        results.add(c2(_EPS, nu.d), what="c2", **setting)
        results.add(log_k_trunc_bound(nu, _EPS) / log_d, what="alpha_trunc_bound", **setting)
        if _EPS + 1 / log_d < 0.5:
            results.add(log_k_opt_bound(nu, _EPS) / log_d, what="alpha_opt_bound", **setting)
