"""The best weights of a truncated linear classifier against grids and generic optimisers, and what it tolerates."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import ndtr

from ell0.theory import Mixture, bounds, k_trunc, optimal_weights, robust_errors, weights
from ell0.theory.weights import Sample, fit

Floats = NDArray[np.float64]
FOUR = Mixture(np.array([1.9, -0.7, 1.1, 0.3]))
FULL = os.environ.get("HYPOTHESIS_PROFILE") == "full"
SEVEN = Mixture(np.array([2.0, 0.4, 1.2, 0.7, 0.2, 0.9, 1.5]))


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def exact_error(weight: Floats) -> Floats:
    """Robust error of weights ``(..., 4)`` on `FOUR` with k = budget = 1, by quadrature.

    The attacker leaves the two smallest terms. They add up to more than 0 if all terms are positive, or if one is -t
    and the others are above t.
    """
    weight = np.abs(weight)
    mean = weight * np.abs(FOUR.mu)
    t = np.linspace(0, 6, 301)[1:] - 0.01  # middles of equal steps
    right = ndtr(np.abs(FOUR.mu)).prod()
    for i in range(4):
        others = [j for j in range(4) if j != i]
        # in units of the deviation of term i
        scaled = t * weight[..., i, None]
        above = [ndtr((mean[..., j, None] - scaled) / weight[..., j, None]) for j in others]
        density = np.exp(-((t + np.abs(FOUR.mu[i])) ** 2) / 2) / math.sqrt(2 * math.pi)
        right = right + (density * np.prod(above, 0)).sum(-1) * 0.02
    return np.asarray(1 - right)


def test_the_quadrature_is_the_best_attack_by_enumeration() -> None:
    x, wrong = FOUR.mu + generator().standard_normal((200_000, 4)), np.zeros(200_000, bool)
    weight = np.array([0.4, -0.9, 0.6, 1.0])
    for where, value in itertools.product(range(4), (-1e6, 1e6)):
        terms = x * weight
        terms[:, where] = value
        wrong |= np.sort(terms, 1)[:, 1:3].sum(1) <= 0
    assert abs(wrong.mean() - exact_error(weight)) < 4 * 0.5 / math.sqrt(200_000)


def test_best_weights_of_four_inputs_are_those_of_a_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_DRAWN", 0)
    grid = np.array(list(itertools.product(np.exp(np.linspace(-2, 2, 9)), repeat=3)))
    errors = exact_error(np.insert(grid, 3, 1.0, axis=1))
    assert exact_error(np.ones(4)) > errors.min() + 0.01
    found = optimal_weights(FOUR, 1, rows=400, rng=generator())
    assert np.array_equal(np.sign(found.weight), np.sign(FOUR.mu))
    assert found.error.low <= exact_error(found.weight) <= found.error.high
    # Here Bayes' weights happen to be the best; the descents must get there too.
    for weight in (found.weight, fit(Sample(np.abs(FOUR.mu), 4_000, generator(1)), 1, 1)[0]):
        assert exact_error(weight) <= errors.min() + 1e-3


def test_without_truncation_the_best_weights_are_those_of_bayes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_DRAWN", 0)
    weight = min(fit(sample := Sample(SEVEN.mu, 300, generator()), 0, 0), key=lambda one: sample.error(one, 0, 0))
    assert ndtr(-weight @ SEVEN.mu / np.linalg.norm(weight)) <= SEVEN.bayes_error + 1e-4


@pytest.mark.parametrize(("k", "budget"), [(2, 2), (2, 1)])
def test_no_generic_optimiser_finds_better_weights(k: int, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_DRAWN", 5)
    sample, rng = Sample(SEVEN.mu, 300, generator()), generator(1)

    def error(log_weight: Floats) -> float:
        return sample.error(np.exp(np.clip(log_weight, -10, 10)), k, budget)

    ours = min(error(np.log(weight)) for weight in fit(sample, k, budget))
    starts = [np.log(SEVEN.mu), *rng.normal(0, 1.5, (4, 7))]
    found = [minimize(error, one, method="Nelder-Mead", options={"maxfev": 250}).fun for one in starts]
    assert ours <= min(found) + 1e-4
    assert ours < error(np.log(SEVEN.mu)) - 1e-3


@pytest.mark.skipif(not FULL, reason="150 descents in up to 12 dimensions: full profile")
@pytest.mark.parametrize(("d", "k", "budget"), [(9, 2, 2), (12, 3, 2), (12, 2, 1)])
def test_no_better_weights_are_found_by_fifty_restarts(d: int, k: int, budget: int) -> None:
    mixture = Mixture.power_law(d, 1.0)
    sample, fresh = Sample(mixture.mu, 1_000, generator()), Sample(mixture.mu, 20_000, generator(1))

    def slope(log_weight: Floats) -> tuple[float, Floats]:
        return sample.slope(np.exp(np.clip(log_weight, -10, 10)), k, budget)

    starts = [np.log(mixture.mu), *generator(2).normal(0, 1.5, (49, d))]
    found = [np.exp(np.clip(minimize(slope, one, jac=True, method="BFGS").x, -10, 10)) for one in starts]
    ours = min(sample.error(one, k, budget) for one in fit(sample, k, budget))
    assert ours <= min(sample.error(one, k, budget) for one in found) + 1e-5
    best = optimal_weights(mixture, k, budget, rng=generator(3)).weight
    assert fresh.error(best, k, budget) <= min(fresh.error(one, k, budget) for one in found) + 1e-4
    assert fresh.error(best, k, budget) < fresh.error(mixture.mu, k, budget) - 1e-3


@pytest.mark.parametrize(("k", "budget"), [(0, 0), (1, 1), (3, 1), (3, 3), (6, 2)])
def test_a_sample_has_the_robust_error_and_its_gradient(k: int, budget: int) -> None:
    mixture = Mixture.power_law(14, 0.6)
    weight = generator(2).uniform(0.2, 1.0, 14)
    sample = Sample(mixture.mu, 4_000, generator())
    known = robust_errors(mixture, [budget], ks=[k], weight=weight, rows=4_000, rng=generator(3)).truncated[k, budget]
    value, gradient = sample.slope(weight, k, budget)
    assert abs(value - known) <= known.high - known.low  # 4 standard errors of each
    for i in (0, 5, 13):
        step = 1e-5 * (np.arange(14) == i)
        ends = [sample.error(weight * np.exp(sign * step), k, budget) for sign in (1, -1)]
        assert math.isclose((ends[0] - ends[1]) / 2e-5, gradient[i], rel_tol=1e-3, abs_tol=1e-6)


@pytest.mark.parametrize("spread", [5, 20, 24, 40])
@pytest.mark.parametrize(("k", "budget"), [(1, 1), (2, 1), (3, 3), (3, 0)])
def test_rows_of_very_unequal_weights_err_below_g_and_not_above(k: int, budget: int, spread: float) -> None:
    rng = generator(5)
    for _ in range(20):
        sample = Sample(rng.uniform(0.05, 1, 8), 50, rng)
        # steps between few levels, where a search has stopped early
        weight = np.exp(-spread / 2 * rng.integers(0, 3, 8)) * rng.uniform(0.5, 1, 8)
        sample.chances(weight, k, budget)
        sides = [
            np.sort(weight * (sample.x + (sample.g[:, None] + by) * sample.along), 1)[:, k - budget : 8 - k - budget]
            for by in (-1e-6, 1e-6)
        ]
        inside = np.abs(sample.g) < 8.9
        assert (sides[0].sum(1)[inside] <= 0).all()
        assert (sides[1].sum(1)[inside] > 0).all()


def test_power_law_signals_need_flatter_weights() -> None:
    mixture = Mixture.power_law(400, 0.5)
    found = optimal_weights(mixture, 4, rows=300, rng=generator())
    bayes = robust_errors(mixture, [4], ks=[4], rows=1_000, rng=generator(1)).truncated[4, 4]
    assert found.error.high < bayes.low - 0.1
    equal = optimal_weights(Mixture.power_law(50), 3, rows=100, rng=generator())
    assert np.ptp(equal.weight) < 1e-12


def test_tolerated_budgets_are_those_of_enumeration_and_rise_with_eps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_DRAWN", 0)
    mixture = Mixture(np.linspace(1.2, 2.2, 7))
    losses = [float(optimal_weights(mixture, k, rows=300, rng=generator(k)).error) for k in range(4)]
    assert losses == sorted(losses)
    # halfway between the losses of k and k + 1 the answer is k
    between = [(a + b) / 2 for a, b in itertools.pairwise(losses) if b < 0.5]
    assert len(between) >= 2
    found = k_trunc(mixture, between, rows=300, rng=generator(9))
    assert list(map(float, found)) == list(range(len(between)))
    levels = np.linspace(mixture.bayes_error, 0.5, 12).tolist()
    steps = k_trunc(Mixture.power_law(300, 0.3), np.linspace(0.16, 0.5, 12).tolist(), rows=100, rng=generator())
    for found in (k_trunc(mixture, levels, rows=100, rng=generator()), steps):
        assert found == sorted(found)
        assert all(one.low <= one <= one.high for one in found)
    assert float(steps[0]) == 0 < steps[-1]


def test_the_best_weights_tolerate_more_than_those_of_bayes() -> None:
    mixture = Mixture.power_law(600, 0.5)
    k = int(k_trunc(mixture, [0.5], rows=100, rng=generator())[0])
    assert robust_errors(mixture, [k], ks=[k], rows=500, rng=generator(1)).truncated[k, k].low > 0.5


def test_no_more_than_k_opt_is_tolerated() -> None:
    mixture = Mixture.power_law(60, 0.2)
    lower = bounds.finite_lower_bound(mixture, range(61))
    for eps in (0.17, 0.25, 0.4, 0.499):
        assert bounds.k_opt_bound(mixture, eps) == max(m for m in range(61) if lower[m] <= eps)
    assert bounds.k_opt_bound(mixture, 0.5) == 60


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: optimal_weights(FOUR, 2, rng=generator()), r"k must satisfy .* got k=2 with d=4"),
        (lambda: optimal_weights(FOUR, 1, 2, rng=generator()), "budget must be at most k, .* got 2 with k=1"),
        (lambda: optimal_weights(FOUR, 1, rows=1, rng=generator()), "rows must be an int >= 2, got 1"),
        (lambda: k_trunc(FOUR, [0.6], rng=generator()), "eps must lie between the Bayes error 0.0101 and 1/2, got 0.6"),
        (lambda: k_trunc(FOUR, [0.001], rng=generator()), "and 1/2, got 0.001"),
    ],
)
def test_bad_input_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
