"""The figures of `ell0 theory`: what truncation is worth on a Gaussian mixture, at the dimensions people have and where
the theorem speaks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ..results import Results, Row
from ._bounds import PowerLaw, alpha_opt_bound, alpha_trunc_bound, c1, c2, finite_lower_bound, theorem_range
from ._mixture import Mixture, check_count, check_several
from ._robust import Estimate, RobustErrors, clip_grid, k_grid, truncated_and_clipped_errors, truncated_errors

DIMENSIONS = (100, 784, 10_000, 100_000, 1_000_000)
DECAYS = (0.0, 0.5)
"""Of nu_i ~ i ** -decay: signal spread evenly, and signal that a few coordinates carry much of."""
_STEEPEST = 10.0
"""Up to this decay the sum of nu_i ** -2 is a float at any d; the first coordinate carries all signal long before."""

EQUAL, CHOSEN, CLIPPED = "truncated, k = m", "truncated, k chosen", "clipped"

_STEPS = (1, 2, 3, 5, 7)
"""Budgets of each decade."""
_PILOT, _MOST_PILOT, _PILOT_NUMBERS = 256, 1_000, 2**25
"""Rows that choose k and clip, and say how many more are needed: more where d is small and they are cheap. At d = 1e5
the clips that 64 rows chose had an error up to 0.02 above the best clip's, those that 256 chose up to 0.003."""
_KS, _CLIPS = 12, 10
"""Candidates: the error is flat around the best, and neighbours of such a grid differ by less than the precision."""
_OVER_K_D, _OVER_K_BUDGETS, _OVER_K_ROWS = 784, (1, 5, 10), 1_000
_LOG10_D = (10, 11, 12, 13, 14, 16, 18, 20, 25, 30, 40, 50, 70, 100, 140, 200, 300)


def figures(
    dimensions: Sequence[int] = DIMENSIONS,
    decays: Sequence[float] = DECAYS,
    *,
    precision: float = 0.03,
    eps: float = 0.45,
    seed: int = 0,
    command: str = "",
    progress: Callable[[str], None] = lambda _: None,
) -> Results:
    """Robust errors over budgets, over k, and the exponents of Theorem 2, as rows of results.

    Args:
        dimensions: each at least 10.  decays: of nu_i ~ i ** -decay, 0 to 10.
        precision: half-width of the 95 % intervals that is aimed at, from 0.001: a pilot says how many rows it takes,
            so an interval may come out somewhat wider. The pilot chooses k and clip too, on other rows than their
            errors.
        eps: the robust error of the exponents, between Phibar(1) + c1 and 1/2 at d = 10**300.
    """
    check_several("dimensions", dimensions)
    for d in dimensions:
        check_count("dimensions", d, 10)
    check_several("decays", decays)
    for decay in decays:
        if not 0 <= decay <= _STEEPEST:
            raise ValueError(f"decays must lie between 0 and {_STEEPEST:g}, got {decay}")
    check_count("seed", seed, 0)
    if not 0.001 <= precision < 0.5:
        raise ValueError(f"precision must lie between 0.001 and 0.5, got {precision}")
    lowest, highest = theorem_range(10 ** _LOG10_D[-1])
    if not lowest < eps < highest:
        raise ValueError(f"eps must lie between {lowest:.3f} and {highest} for d = 10**{_LOG10_D[-1]}, got {eps}")
    started = time.perf_counter()
    results = Results.here("theory", command, seeds=[seed], device="cpu")
    rng = np.random.default_rng(seed)
    for decay in decays:
        for d in dimensions:
            progress(f"robust error over budget, d = {d:,}, nu_i ~ i ** -{decay:g}")
            _over_budget(results, d, decay, precision, rng)
        progress(f"robust error over k, d = {_OVER_K_D}, nu_i ~ i ** -{decay:g}")
        _over_k(results, decay, rng)
        _exponents(results, decay, eps)
    results.seconds = time.perf_counter() - started
    return results


def budgets_of(d: int) -> tuple[int, ...]:
    """Budgets up to sqrt d, around which every classifier gives in."""
    most = math.isqrt(d)
    return tuple(step * 10**power for power in range(len(str(most))) for step in _STEPS if step * 10**power <= most)


def _over_budget(results: Results, d: int, decay: float, precision: float, rng: np.random.Generator) -> None:
    started = time.perf_counter()
    mixture = Mixture.power_law(d, decay)
    setting = {"d": d, "decay": decay}
    results.add(mixture.bayes_error, what="bayes_error", **setting)
    budgets = budgets_of(d)
    ks = sorted({*budgets, *k_grid(d, 1, _KS)})
    clips = clip_grid(mixture, _CLIPS)
    cheap = max(_PILOT, min(_MOST_PILOT, _PILOT_NUMBERS // d))
    pilot = truncated_and_clipped_errors(mixture, budgets, ks, clips, rows=cheap, rng=rng)
    chosen = [[one.best(budget) for budget in budgets] for one in pilot]
    best_ks, best_clips = sorted({*budgets, *(int(k) for k in chosen[0])}), sorted({*chosen[1]})
    rows = max(_PILOT, *(_rows_for(found, precision) for *_, found in _shown(pilot, budgets, *chosen)))
    final = truncated_and_clipped_errors(mixture, budgets, best_ks, best_clips, rows=rows, rng=rng)
    for name, budget, value, found in _shown(final, budgets, *chosen):
        detail = {"clip": value} if name == CLIPPED else {"k": int(value)}
        results.add(what="robust_error", classifier=name, **setting, budget=budget, **detail, **found.record())
    for budget, bound in zip(budgets, finite_lower_bound(mixture, budgets), strict=True):
        results.add(float(bound), what="lower_bound", **setting, budget=budget)
    results.add(time.perf_counter() - started, what="seconds", **setting)


def _shown(
    errors: tuple[RobustErrors, RobustErrors], budgets: Sequence[int], ks: Sequence[float], clips: Sequence[float]
) -> Iterator[tuple[str, int, float, Estimate]]:
    """Of each budget the three figures that are shown: classifier, budget, its k or clip, robust error."""
    truncated, clipped = errors
    for budget, k, clip in zip(budgets, ks, clips, strict=True):
        for name, table, setting in ((EQUAL, truncated, budget), (CHOSEN, truncated, k), (CLIPPED, clipped, clip)):
            yield name, budget, setting, table.at(setting, budget)


def _rows_for(found: Estimate, precision: float) -> int:
    """Rows that make the interval as narrow as asked, if the pilot's spread is the true one; a fifth more in case."""
    return math.ceil(1.2 * found.n * ((found.high - found.low) / 2 / precision) ** 2)


def _over_k(results: Results, decay: float, rng: np.random.Generator) -> None:
    mixture = Mixture.power_law(_OVER_K_D, decay)
    ks = k_grid(_OVER_K_D, 1, 24)
    errors = truncated_errors(mixture, _OVER_K_BUDGETS, ks, rows=_OVER_K_ROWS, rng=rng)
    for budget in _OVER_K_BUDGETS:
        for k in ks:
            if k >= budget:
                what: Row = {"what": "robust_error_over_k", "d": _OVER_K_D, "decay": decay, "budget": budget, "k": k}
                results.add(**what, **errors.at(k, budget).record())


def _exponents(results: Results, decay: float, eps: float) -> None:
    """Theorem 2 where it speaks: alpha_opt(eps) >= alpha_trunc(eps) >= alpha_opt(eps - c1) - c2."""
    for log10_d in _LOG10_D:
        nu = PowerLaw(10**log10_d, decay)
        setting = {"log10_d": log10_d, "decay": decay, "eps": eps}
        results.add(c1(nu.d), what="c1", **setting)
        if eps <= theorem_range(nu.d)[0]:
            continue
        results.add(c2(eps, nu.d), what="c2", **setting)
        results.add(alpha_trunc_bound(nu, eps), what="alpha_trunc_bound", **setting)
        if eps + 1 / math.log(nu.d) < 0.5:
            results.add(alpha_opt_bound(nu, eps), what="alpha_opt_bound", **setting)
