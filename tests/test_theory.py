"""The Gaussian mixture: every formula against brute force or Monte Carlo, and the paper's slips."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from ell0 import theory
from ell0.theory import Mixture, PowerLaw, _bounds, _robust

Floats = NDArray[np.float64]
COVARIANCE = np.array([[1.0, 0.5, 0.1, 0.0, 0.2], [0.5, 2.0, -0.3, 0.1, 0.0], [0.1, -0.3, 0.5, 0.0, 0.1]])
COVARIANCE = np.vstack([COVARIANCE, [[0.0, 0.1, 0.0, 1.5, 0.4], [0.2, 0.0, 0.1, 0.4, 1.0]]])
FULL = Mixture([0.9, -0.6, 0.5, 0.7, -0.8], COVARIANCE)
SPREAD = Mixture([0.9, -0.6, 0.5, 0.7, -0.8], [0.5, 1.0, 2.0, 1.5, 0.8])


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def phibar(x: float) -> float:
    return math.erfc(x / math.sqrt(2)) / 2


def is_rate(hits: NDArray[np.bool_], chance: float) -> bool:
    """Whether a chance lies within 4 standard errors of the rate of hits."""
    return bool(abs(hits.mean() - chance) <= 4 * math.sqrt(chance * (1 - chance) / hits.size) + 1e-12)


def agrees(estimate: theory.Estimate, margins: Floats) -> bool:
    """Whether an estimate is within 4 standard errors of brute force: margins ``(attacks, n)`` of other rows."""
    wrong = (margins <= 0).any(0)
    errors = (estimate.high - estimate.low) / 4, math.sqrt(estimate * (1 - estimate) / wrong.size)
    return bool(abs(estimate - wrong.mean()) <= 4 * math.hypot(*errors))


# The mixture


@pytest.mark.parametrize("mixture", [Mixture([1.0, -0.3, 0.2], 2.0), Mixture([1.0, -2.0], [0.5, 3.0]), FULL])
def test_samples_have_the_mean_and_covariance_asked_for(mixture: Mixture) -> None:
    x, y = mixture.sample(40_000, generator())
    assert is_rate(y == 1, 0.5)
    assert set(np.unique(y)) == {-1.0, 1.0}
    z = x - y[:, None] * mixture.mu
    covariance = mixture.sigma if mixture.sigma.ndim == 2 else np.diag(mixture.deviations**2)
    scale = np.outer(mixture.deviations, mixture.deviations)
    assert np.abs(np.cov(z.T) / scale - covariance / scale).max() < 0.03
    assert np.abs(z.mean(0) / mixture.deviations).max() < 0.025


@pytest.mark.parametrize("mixture", [SPREAD, FULL])
def test_bayes_error_is_that_of_the_bayes_weight(mixture: Mixture) -> None:
    x, y = mixture.sample(40_000, generator())
    assert is_rate(y * (x @ mixture.bayes_weight) <= 0, mixture.bayes_error)


def test_nu_is_the_signal_in_units_of_the_noise() -> None:
    whitened = FULL.sigma @ FULL.solve(FULL.mu)
    assert np.allclose(whitened, FULL.mu)
    assert math.isclose(FULL.strength**2, FULL.mu @ np.linalg.inv(COVARIANCE) @ FULL.mu)
    same = Mixture(SPREAD.mu, np.diag(SPREAD.deviations**2))
    assert same.diagonal
    assert np.allclose(same.nu, SPREAD.mu / SPREAD.deviations)
    assert math.isclose(SPREAD.normalised().bayes_error, phibar(1.0))
    assert math.isclose(Mixture.power_law(50, 0.7).strength, 1.0)


def test_a_mixture_does_not_change() -> None:
    mu = np.array([1.0, 2.0])
    mixture = Mixture(mu)
    mu[0] = 5.0
    assert mixture.mu[0] == 1.0
    with pytest.raises(ValueError, match="read-only"):
        mixture.mu[0] = 3.0
    with pytest.raises(FrozenInstanceError):
        mixture.mu = mu  # type: ignore[misc]


@pytest.mark.parametrize(
    ("mu", "sigma", "message"),
    [
        ([0.0, 0.0], 1.0, "mu must not be zero"),
        ([1.0, math.nan], 1.0, "mu must be a vector of finite"),
        ([[1.0]], 1.0, "mu must be a vector"),
        ([1.0, 2.0], 0.0, "sigma must be positive, got 0"),
        ([1.0, 2.0], [1.0, -1.0], "sigma must be positive, got -1"),
        ([1.0, 2.0], [1.0, 1.0, 1.0], r"sigma must be a number, \(2,\) or \(2, 2\)"),
        ([1.0, 2.0], [1.0, math.inf], "sigma must be finite"),
        ([1.0, 2.0], [[1.0, 1.0], [1.0, 1.0]], "positive definite"),
        ([1.0, 2.0], [[1.0, 0.5], [0.2, 1.0]], "symmetric"),
    ],
)
def test_bad_mixtures_are_refused(mu: Any, sigma: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Mixture(mu, sigma)


# The attacker Adv(A)


def as_printed(mixture: Mixture, x: Floats, y: Floats, rng: np.random.Generator) -> tuple[Floats, NDArray[np.bool_]]:
    """Adv(A) on all coordinates with the paper's p_i = 0 where the signs disagree: z and what was erased."""
    agreement = y[:, None] * x * mixture.mu / mixture.deviations**2
    erased = (agreement <= 0) | (rng.random(x.shape) >= np.exp(-2 * np.maximum(agreement, 0)))
    return np.where(erased, rng.uniform(-1, 1, x.shape), x), erased


@pytest.mark.parametrize("signal", [0.05, 0.3, 1.0])
def test_erasing_is_as_likely_as_said_and_not_as_printed(signal: float) -> None:
    mixture = Mixture([signal * 0.7], 0.7)
    chance = float(theory.erase_probability(signal))
    x, y = mixture.sample(100_000, generator())
    assert is_rate(theory.erase(mixture, x, y, [0], budget=1, rng=generator(1)).erased, chance)
    assert not is_rate(as_printed(mixture, x, y, generator(1))[1], chance)
    # Differs from the printed middle step 1 - Phibar, and from the integral printed without its density factor.
    assert abs(chance - (1 - 2 * phibar(signal))) < 1e-12
    t = np.linspace(0, 10, 200_001)
    integrand = (1 - np.exp(-2 * t * signal / 0.7)) * np.exp(-((t - signal * 0.7) ** 2) / (2 * 0.49))
    integral = float(np.trapezoid(integrand, t))
    assert abs(integral / math.sqrt(2 * math.pi * 0.49) - chance) < 1e-6
    assert abs(integral - chance) > 0.01


def test_what_is_left_says_nothing_about_the_class_but_does_as_printed() -> None:
    mixture = Mixture([0.4], 0.9)
    x, y = mixture.sample(400_000, generator())
    edges = np.linspace(-4, 4, 41)

    def distance(z: Floats) -> float:
        """Total variation between the histograms of z in the two classes."""
        shares = [np.histogram(z[y == side, 0], edges)[0] / (y == side).sum() for side in (-1, 1)]
        return float(np.abs(shares[0] - shares[1]).sum() / 2)

    assert distance(theory.erase(mixture, x, y, [0], budget=1, rng=generator(1)).z) < 0.01
    assert distance(as_printed(mixture, x, y, generator(1))[0]) > 0.1


def test_the_density_is_that_of_what_is_left() -> None:
    mixture = Mixture([0.4, -1.1], [0.9, 0.6])
    grid = np.linspace(-8, 8, 64_001)
    step = grid[1] - grid[0]
    for i in range(2):
        points = np.zeros((len(grid), 2))
        points[:, i] = grid
        density = np.exp(theory.erased_log_density(mixture, points, [i]))
        assert abs(density.sum() * step - 1) < 1e-3
        for side in (-1.0, 1.0):
            y = np.full(100_000, side)
            x = y[:, None] * mixture.mu + mixture.noise(len(y), generator(3))
            z = theory.erase(mixture, x, y, [0, 1], budget=2, rng=generator(4)).z[:, i]
            for a, b in itertools.pairwise([-3.0, -1.0, -0.4, 0.0, 0.2, 1.0, 3.0]):
                assert is_rate((z > a) & (z <= b), float(density[(grid > a) & (grid <= b)].sum() * step))
    z = np.array([[0.3, -2.0], [1.5, 0.1]])
    parts = [theory.erased_log_density(mixture, z, [i]) for i in range(2)]
    assert np.allclose(theory.erased_log_density(mixture, z, np.array([True, True])), parts[0] + parts[1])


def test_only_a_changes_and_only_within_the_budget() -> None:
    mixture = Mixture(np.full(12, 1.5))
    x, y = mixture.sample(500, generator())
    inside = np.arange(12) % 2 == 0
    result = theory.erase(mixture, x, y, inside, budget=4.9, rng=generator(1))
    assert (result.z == x)[:, ~inside].all()
    assert ((result.z != x) == result.erased).all()
    changed = (result.x_adv != x).sum(1)
    assert changed.max() == 4
    over = result.erased.sum(1) > 4
    assert over.any()
    assert (changed[over] == 0).all()
    assert (result.x_adv == result.z)[~over].all()
    whole = theory.erase(mixture, x, y, inside, budget=4, rng=generator(1))
    assert (whole.x_adv == result.x_adv).all()
    nothing = theory.erase(mixture, x, y, [], budget=3, rng=generator(1))
    assert not nothing.erased.any()
    with pytest.raises(ValueError, match="sigma must be diagonal"):
        theory.erase(FULL, x[:, :5], y, [0], budget=1, rng=generator())
    with pytest.raises(ValueError, match="budget must be >= 0, got -1"):
        theory.erase(mixture, x, y, [0], budget=-1, rng=generator())


# Lower bounds


def exceeding_by_enumeration(chances: Floats, budget: int) -> float:
    """P(more than budget events) by all outcomes."""
    total = 0.0
    for outcome in itertools.product([0, 1], repeat=len(chances)):
        if sum(outcome) > budget:
            total += math.prod(p if hit else 1 - p for p, hit in zip(chances.tolist(), outcome, strict=True))
    return total


def test_the_finite_lower_bound_is_the_best_over_prefixes() -> None:
    mixture = Mixture([0.2, -1.2, 0.7, 0.4, -0.9, 0.05, 0.3], 1.1)
    nu = -np.sort(-np.abs(mixture.nu))
    for budget in range(8):
        candidates = [
            phibar(float(np.linalg.norm(nu[length:])))
            - exceeding_by_enumeration(theory.erase_probability(nu[:length]), budget)
            for length in range(8)
        ]
        assert math.isclose(theory.finite_lower_bound(mixture, budget)[0], max(candidates), rel_tol=1e-12)
    assert theory.finite_lower_bound(mixture, [2.9]) == theory.finite_lower_bound(mixture, 2)


@pytest.mark.parametrize("decay", [0.0, 0.3, 0.6])
def test_the_bound_for_large_d_is_below_the_exact_one_and_near(monkeypatch: pytest.MonkeyPatch, decay: float) -> None:
    mixture, budgets = Mixture.power_law(3_000, decay), [0, 3, 10, 20, 40, 60, 5_000]
    exact = theory.finite_lower_bound(mixture, budgets)
    monkeypatch.setattr(_bounds, "_EXACT_D", 100)
    bound = theory.finite_lower_bound(mixture, budgets)
    assert (bound <= exact + 1e-12).all()
    assert (bound >= exact - 0.02).all()
    assert bound[-1] == 0.5
    assert 0.5 - 1e-9 < exact[-1] <= 0.5


def test_the_chance_to_exceed_is_never_put_too_low() -> None:
    # Also below the mean, where the binomial's own chance would be too low.
    chances = -np.sort(-(generator().uniform(0, 1, 60) ** 4))
    budgets = np.arange(0.0, 30.0)
    lengths, bound = _bounds._exceeding_bound(chances, budgets)
    exact = _bounds._exceeding(chances, budgets)[1][lengths]
    assert (bound >= exact - 1e-12).all()
    assert (bound - exact)[bound < 1].max() < 0.2


def test_the_finite_lower_bound_at_known_places() -> None:
    at_784 = theory.finite_lower_bound(Mixture.power_law(784), [5, 10, 20])
    assert at_784.round(3).tolist() == [0.164, 0.180, 0.238]
    assert theory.finite_lower_bound(Mixture.power_law(10_000), [40, 80]).round(3).tolist() == [0.202, 0.307]


def test_no_classifier_beats_the_lower_bound_under_the_attacker_but_some_do_as_printed() -> None:
    mixture, budget = Mixture.power_law(400), 14
    bound = float(theory.finite_lower_bound(mixture, budget)[0])
    assert bound > mixture.bayes_error + 0.05
    x, y = mixture.sample(6_000, generator())

    def errors(x_adv: Floats) -> list[float]:
        classifiers: list[Callable[[Floats], Floats]] = [lambda u: u.sum(1), lambda u: np.clip(u, -1, 1).sum(1)]
        return [float((y * score(x_adv) <= 0).mean()) for score in classifiers]

    # The bound is that of some prefix; no attacker of the family does better, so one of them must do as well.
    lengths = range(100, 401, 50)
    mended = [theory.erase(mixture, x, y, np.arange(n), budget=budget, rng=generator(n)).x_adv for n in lengths]
    assert min(max(each) for each in zip(*map(errors, mended), strict=True)) >= bound - 0.02
    z, erased = as_printed(mixture, x, y, generator(1))
    printed = np.where(erased.sum(1, keepdims=True) <= budget, z, x)
    assert max(errors(printed)) < bound - 0.03


def test_theorem_1_over_prefixes_with_floored_budgets() -> None:
    mixture = Mixture(np.linspace(0.02, 0.6, 3_000)).normalised()
    nu, log_d = -np.sort(-np.abs(mixture.nu)), math.log(3_000)
    budgets = [0, 7, 60, 200, 250, 290, 330, 400]
    found = theory.asymptotic_lower_bound(mixture, budgets)
    unfloored = []
    for budget, bound in zip(budgets, found.tolist(), strict=True):
        values = {True: [mixture.bayes_error], False: [mixture.bayes_error]}
        for length in range(1, 3_001):
            needed = nu[:length].sum() * log_d
            value = phibar(float(np.linalg.norm(nu[length:]))) - 1 / log_d
            values[True] += [value] * int(math.floor(needed) <= budget)
            values[False] += [value] * int(needed <= budget)
        assert math.isclose(bound, max(values[True]), rel_tol=1e-12)
        unfloored.append(max(values[False]))
    assert (found >= unfloored).all()
    assert (found > unfloored).any()
    assert (found <= theory.finite_lower_bound(mixture, budgets)).all()


def test_lower_bounds_need_diagonal_noise_and_numbers() -> None:
    for bound in (theory.finite_lower_bound, theory.asymptotic_lower_bound):
        with pytest.raises(ValueError, match="sigma must be diagonal"):
            bound(FULL, 1)
        for wrong in (-1, math.nan, math.inf):
            with pytest.raises(ValueError, match="budgets must be numbers >= 0"):
                bound(SPREAD, [1, wrong])


# The upper bound


def truncated(v: Floats, k: int) -> Floats:
    """Sum of the middle terms: ``(..., d)`` to ``(...)``."""
    return np.asarray(np.sort(v, axis=-1)[..., k : v.shape[-1] - k].sum(-1))


def changes(x: Floats, budget: int, values: tuple[float, ...]) -> Floats:
    """All rows with ``budget`` coordinates set to some of the values: ``(attacks, n, d)``."""
    attacked = []
    for where in itertools.combinations(range(x.shape[1]), budget):
        for what in itertools.product(values, repeat=budget):
            x_adv = x.copy()
            x_adv[:, where] = what
            attacked.append(x_adv)
    return np.array(attacked)


def test_the_lemma_holds_with_2k_and_with_no_less() -> None:
    x = generator().standard_normal((300, 7))
    for k in (1, 2, 3):
        for budget in range(k + 1):
            drift = np.abs(truncated(changes(x, budget, (-1e3, 1e3)), k) - x.sum(1)).max(0)
            assert (drift <= 2 * k * np.abs(x).max(1) + 1e-9).all()
        flat = np.array([[1.0] * (2 * k) + [0.0] * (7 - 2 * k)])
        drift = np.abs(truncated(changes(flat, k, (-1e3, 1e3)), k) - flat.sum(1)).max()
        assert math.isclose(drift, 2 * k)


def test_the_upper_bound_by_hand() -> None:
    d, k, reach = 100_000, 4, math.sqrt(2 * math.log(100_000))
    cases: list[tuple[Literal[2, 8], float]] = [(2, 1.0), (8, 1.0), (2, 2.5), (8, 2.5)]
    for constant, strength in cases:
        by_hand = 1 / reach + phibar(strength - constant * k * (strength + reach) / math.sqrt(d))
        mixture = Mixture(Mixture.power_law(d).mu * strength)
        found = theory.upper_bound(mixture, k, constant=constant)
        assert math.isclose(found, by_hand, rel_tol=1e-9)
    assert theory.upper_bound(Mixture.power_law(784), 300) == 1.0


def test_the_upper_bound_is_above_the_error_for_any_noise_and_weight() -> None:
    # One factor in common makes the noise far from independent; ||nu||_2 is not 1.
    d = 800
    factor = generator(5).uniform(0, 0.1, d)
    weight = generator(6).uniform(0.5, 1.5, d)
    mixture = Mixture(np.full(d, 0.15), np.eye(d) + np.outer(factor, factor))
    assert abs(mixture.strength - 1) > 0.5
    for k in (1, 2):
        tight = theory.upper_bound(mixture, k, weight=weight)
        exact = theory.truncated_errors(mixture, k, [k], weight=weight, rows=200, rng=generator()).at(k, k)
        assert exact.high < tight < 1
        assert tight < theory.upper_bound(mixture, k, weight=weight, constant=8)


def test_upper_bounds_refuse_bad_input() -> None:
    with pytest.raises(ValueError, match=r"k must satisfy 0 <= 2\*k < d, got k=3 with d=5"):
        theory.upper_bound(SPREAD, 3)
    with pytest.raises(ValueError, match=r"k must be an int >= 0, got 1\.5"):
        theory.upper_bound(SPREAD, 1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="constant must be 2 or 8, got 4"):
        theory.upper_bound(SPREAD, 1, constant=4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"weight must be \(5,\)"):
        theory.upper_bound(SPREAD, 1, weight=[1.0, 2.0])


# Where the theorem bites


@pytest.mark.parametrize("decay", [0.0, 0.25, 0.5, 0.8, 1.0, 1.6])
def test_a_power_law_without_the_vector_is_the_one_with_it(decay: float) -> None:
    mixture, law = Mixture.power_law(30_000, decay), PowerLaw(30_000, decay)
    for c in (0.05, 0.3137, 0.7071, 0.95, 0.9999):
        with_vector, without = mixture.prefix(c), law.prefix(c)
        assert with_vector.length == without.length
        assert math.isclose(with_vector.norm1, without.norm1, rel_tol=1e-10)


def test_lambda_c_may_be_d() -> None:
    assert Mixture.power_law(2).prefix(0.9).length == 2
    assert PowerLaw(2).prefix(0.9).length == 2
    with pytest.raises(ValueError, match=r"\|\|nu\|\|_2 = 1"):
        Mixture([1.0, 1.0]).prefix(0.5)
    with pytest.raises(ValueError, match="c must lie between 0 and 1, got 1"):
        PowerLaw(5).prefix(1.0)


def test_q_and_c_give_back_the_error() -> None:
    for eps in (0.16, 0.25, 0.4999):
        assert math.isclose(phibar(theory.q_of_eps(eps)), eps)
        assert math.isclose(phibar(math.sqrt(1 - theory.c_of_eps(eps) ** 2)), eps)
    for eps in (0.15, 0.5):
        with pytest.raises(ValueError, match=r"eps must lie between Phibar\(1\) = 0.1587 and 1/2"):
            theory.c_of_eps(eps)


@pytest.mark.parametrize("decay", [0.0, 0.3, 0.5])
@pytest.mark.parametrize("d", [10**12, 10**30, 10**100, 10**300])
def test_theorem_2_at_huge_d(d: int, decay: float) -> None:
    law = PowerLaw(d, decay)
    low, high = theory.theorem_range(d)
    assert low < high
    eps = (low + high) / 2
    for constant in (2, 8):
        trunc = theory.alpha_trunc_bound(law, eps, constant=constant)
        loss = theory.c2(eps, d, constant=constant)
        shifted = theory.alpha_opt_bound(law, eps - theory.c1(d))
        # The two meet but for flooring.
        if trunc * math.log(d) < 30:
            assert abs(math.exp(trunc * math.log(d)) - math.exp((shifted - loss) * math.log(d))) < 1.01
        else:
            assert math.isclose(trunc, shifted - loss, abs_tol=1e-9)
        assert trunc < shifted
    if decay == 0:
        by_hand = theory.c_of_eps(eps - theory.c1(d) + 1 / math.log(d)) ** 2 * math.log(d) * math.exp(math.log(d) / 2)
        log_k = theory.log_k_opt_bound(law, eps - theory.c1(d))
        assert math.isclose(log_k, math.log(by_hand), rel_tol=1e-4)


def test_theorem_2_is_empty_up_to_where_it_starts() -> None:
    for d, says_something in ((784, False), (6_700_000_000, False), (6_900_000_000, True)):
        low, high = theory.theorem_range(d)
        assert (low < high) == says_something
    assert round(theory.c1(10**10), 3) == 0.338


def test_k_trunc_is_tolerated_by_the_candidate_of_the_proof() -> None:
    d, eps = 10**14, 0.49
    log_d, reach = math.log(d), math.sqrt(2 * math.log(d))
    for constant in (2, 8):
        k = math.exp(theory.log_k_trunc_bound(PowerLaw(d), eps, constant=constant))
        assert abs(k - round(k)) < 1e-6 * k
        assert round(k) > 100
        inner = eps - math.sqrt(2 / log_d)
        tail = math.sqrt(1 - (PowerLaw(d).prefix(theory.c_of_eps(inner)).length - 1) / d)
        error = 1 / reach + phibar(tail - constant * k * (1 + reach) / math.sqrt(d) / tail)
        assert error <= eps


def test_small_bounds_are_floored() -> None:
    law, eps = PowerLaw(10**8), 0.4999
    assert math.isclose(math.exp(theory.log_k_trunc_bound(law, eps)), 11)
    assert math.isclose(math.exp(theory.log_k_trunc_bound(law, eps, constant=8)), 2)
    assert theory.alpha_trunc_bound(PowerLaw(10**8, 2.0), eps) == -math.inf


@pytest.mark.parametrize("decay", [0.0, 0.4])
def test_no_classifier_tolerates_more_than_k_opt(decay: float) -> None:
    mixture, eps = Mixture.power_law(20_000, decay), 0.3
    k = round(math.exp(theory.log_k_opt_bound(mixture, eps)))
    assert theory.asymptotic_lower_bound(mixture, k)[0] >= eps
    assert theory.asymptotic_lower_bound(mixture, k // 4)[0] < eps


def test_power_laws_refuse_bad_input() -> None:
    with pytest.raises(ValueError, match=r"d must be an int >= 2, got 10\.0"):
        PowerLaw(10.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"d must be at most 10\*\*300, got a number of 302 digits"):
        PowerLaw(10**301)
    with pytest.raises(ValueError, match="decay must be a number >= 0, got nan"):
        PowerLaw(10, math.nan)


# The exact robust error


@pytest.mark.parametrize("mixture", [SPREAD, FULL])
@pytest.mark.parametrize("weight", [None, [0.5, -1.5, 0.2, 1.0, 0.7]])
def test_truncated_errors_are_those_of_the_best_attack(mixture: Mixture, weight: list[float] | None) -> None:
    w = mixture.bayes_weight if weight is None else np.array(weight)
    table = theory.truncated_errors(mixture, [0, 1, 2], [0, 1, 2], weight=weight, rows=20_000, rng=generator())
    x, y = mixture.sample(20_000, generator(1))
    for k in range(3):
        for budget in range(k + 1):
            margins = y * truncated(changes(x, budget, (-1e6, 1e6)) * w, k)
            assert agrees(table.at(k, budget), margins)
        for budget in range(k + 1, 3):
            assert table.at(k, budget) == table.at(k, budget).low == 1.0


@pytest.mark.parametrize("mixture", [SPREAD, FULL])
def test_clipped_errors_are_those_of_the_best_attack(mixture: Mixture) -> None:
    w, clips = mixture.bayes_weight, [0.1, 0.6, 2.0]
    table = theory.clipped_errors(mixture, [0, 1, 2], clips, rows=1_500, rng=generator())
    x, y = mixture.sample(20_000, generator(1))
    for clip in clips:
        for budget in range(3):
            margins = y * np.clip(changes(x, budget, (-1e6, 1e6)) * w, -clip, clip).sum(-1)
            assert agrees(table.at(clip, budget), margins)


@pytest.mark.parametrize("mixture", [SPREAD, FULL])
def test_filtering_first_wastes_changes_of_what_is_filtered(mixture: Mixture) -> None:
    survivors = mixture.without(1)
    gone = int((np.abs(mixture.mu) / mixture.deviations).argmax())
    stays = np.delete(np.arange(5), gone)
    found = theory.truncated_errors(survivors, 1, [1], rows=20_000, rng=generator()).at(1, 1)
    x, y = mixture.sample(20_000, generator(1))
    attacked = changes(x, 1, (-1e6, 1e6))[..., stays]
    assert agrees(found, y * truncated(attacked * survivors.bayes_weight, 1))
    with pytest.raises(ValueError, match="largest must be below d, got largest=5 with d=5"):
        mixture.without(5)


def test_without_truncation_or_attack_the_error_is_that_of_bayes() -> None:
    uniform = Mixture.power_law(300)
    # Of uniform weights nothing random is left.
    plain = theory.truncated_errors(uniform, 0, [0], rows=5, rng=generator()).at(0, 0)
    assert math.isclose(plain, uniform.bayes_error, rel_tol=1e-9)
    unclipped = theory.clipped_errors(uniform, 0, [100.0], rows=5, rng=generator()).at(100.0, 0)
    assert math.isclose(unclipped, uniform.bayes_error, rel_tol=1e-7)
    steep = theory.truncated_errors(Mixture.power_law(300, 0.5), 0, [0], rows=4_000, rng=generator()).at(0, 0)
    assert abs(steep - uniform.bayes_error) <= steep.high - steep.low  # 4 standard errors


def test_intervals_hold_the_error_as_often_as_they_say() -> None:
    mixture = Mixture.power_law(30, 0.8)
    for k, budget in ((0, 0), (3, 1), (10, 2)):
        truth: float = theory.truncated_errors(mixture, budget, [k], rows=40_000, rng=generator(9)).at(k, budget)
        if k == 0:
            # Here the truth is known without the estimator, which could be wrong in all runs alike.
            truth = mixture.bayes_error
        rng = generator(2)
        runs = [theory.truncated_errors(mixture, budget, [k], rows=40, rng=rng).at(k, budget) for _ in range(300)]
        held = sum(run.low <= truth <= run.high for run in runs)
        assert 0.91 * 300 <= held <= 0.99 * 300


def test_rows_that_are_all_alike_still_leave_doubt() -> None:
    low, high = _robust._interval(np.array([0.0, 1.0, 0.5]), np.zeros(3), 40)
    assert (high[0], low[1]) == (pytest.approx(0.0927, abs=1e-3), pytest.approx(1 - 0.0927, abs=1e-3))
    assert high[2] - low[2] > 0.2


def test_choosing_k_above_the_budget_pays_at_784() -> None:
    mixture = Mixture.power_law(784)
    k, error = theory.best_k(mixture, 5, rows=1_000, rng=generator())
    assert k > 100
    assert error.high - error.low < 0.03
    table = theory.truncated_errors(mixture, 5, [5, 250], rows=10_000, rng=generator(1))
    assert table.at(250, 5).high <= 0.325
    assert table.at(250, 5) <= 0.32
    assert round(table.at(5, 5), 2) == 0.47
    clipped = theory.clipped_errors(mixture, 5, [0.025], rows=1_000, rng=generator(2)).at(0.025, 5)
    assert abs(clipped - table.at(250, 5)) < 0.02
    assert theory.finite_lower_bound(mixture, 5)[0] < clipped.low


def test_a_million_dimensions_need_few_rows() -> None:
    mixture = Mixture.power_law(10**6)
    error = theory.truncated_errors(mixture, [100], [20_000], rows=24, rng=generator()).at(20_000, 100)
    assert error.high - error.low < 0.06
    assert theory.finite_lower_bound(mixture, 100)[0] < error.low


class BackToFront(ThreadPoolExecutor):
    """Runs what it is given last to first, as threads may."""

    def map(self, fn: Callable[..., Any], *lists: Iterable[Any], **options: Any) -> Iterator[Any]:
        assert not options
        done = [fn(*each) for each in reversed(list(zip(*lists, strict=True)))]
        return iter(done[::-1])


def test_rows_do_not_depend_on_the_order_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def value() -> Floats:
        return theory.truncated_errors(Mixture.power_law(50, 0.4), [0, 2], [2, 9], rows=100, rng=generator()).value

    monkeypatch.setattr(_robust, "_CHUNK", 700)
    many = value()
    monkeypatch.setattr(_robust, "ThreadPoolExecutor", BackToFront)
    assert (many == value()).all()


def test_best_k_quotes_rows_that_did_not_choose() -> None:
    mixture, rng = Mixture.power_law(60, 0.3), generator()
    k, quoted = theory.best_k(mixture, 1, rows=20, rng=rng)
    chosen = theory.truncated_errors(mixture, 1, theory.k_grid(60, 1), rows=20, rng=generator())
    assert chosen.best(1) == k
    assert chosen.at(k, 1) != quoted


def test_grids_reach_from_the_budget_to_the_middle() -> None:
    for d, budget in ((5, 0), (784, 5), (10**6, 100), (11, 5)):
        ks = theory.k_grid(d, budget)
        assert (ks[0], ks[-1]) == (budget, (d - 1) // 2)
        assert list(ks) == sorted(set(ks))
    clips = theory.clip_grid(SPREAD)
    scale = np.abs(SPREAD.bayes_weight * SPREAD.deviations)
    assert clips[0] < scale.min() < scale.max() < clips[-1]
    with pytest.raises(ValueError, match=r"budget must be at most \(d - 1\) // 2, got budget=6 with d=11"):
        theory.k_grid(11, 6)


def test_an_estimate_is_a_number_with_its_interval() -> None:
    table = theory.truncated_errors(SPREAD, [1.9], [1], rows=50, rng=generator())
    assert table.budgets == (1,)
    estimate = table.at(1, 1)
    assert estimate.record() == {"value": float(estimate), "n": 50, "low": estimate.low, "high": estimate.high}
    assert copy.deepcopy(estimate).record() == estimate.record()
    assert estimate.low < estimate < estimate.high
    with pytest.raises(ValueError, match="setting and budget must be among those estimated, got 2 and 1"):
        table.at(2, 1)
    with pytest.raises(ValueError, match="budget must be among those estimated, got 7"):
        table.best(7)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: theory.truncated_errors(SPREAD, 1, [3], rng=generator()), r"k must satisfy 0 <= 2\*k < d, got k=3"),
        (lambda: theory.truncated_errors(SPREAD, 2, [1], rng=generator()), "ks must reach the largest budget"),
        (lambda: theory.truncated_errors(SPREAD, -1, [1], rng=generator()), "budgets must be numbers >= 0"),
        (lambda: theory.truncated_errors(SPREAD, 1, [], rng=generator()), "ks must reach"),
        (lambda: theory.truncated_errors(SPREAD, 1, [1], rows=1, rng=generator()), "rows must be an int >= 2, got 1"),
        (
            lambda: theory.truncated_errors(SPREAD, 1, [1], weight=[1, 0, 1, 1, 0], rng=generator()),
            "weight must have no zeros, got 2",
        ),
        (lambda: theory.clipped_errors(SPREAD, 3, [1.0], rng=generator()), "budgets must stay below d / 2, got 3"),
        (lambda: theory.clipped_errors(SPREAD, 1, [0.0], rng=generator()), "clips must be positive numbers"),
    ],
)
def test_robust_errors_refuse_bad_input(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
