"""The Gaussian mixture: every formula against brute force or Monte Carlo, and the paper's slips."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ell0.results import Figure
from ell0.theory import Mixture, bounds, robust_error, robust_errors
from ell0.theory.bounds import PowerLaw, asymptotic_lower_bound, finite_lower_bound, upper_bound

Floats = NDArray[np.float64]
UNEVEN = Mixture(np.array([1.8, -0.6, 0.25, 0.5, -1.0]))


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def phibar(x: float) -> float:
    return math.erfc(x / math.sqrt(2)) / 2


def is_rate(hits: NDArray[np.bool_], chance: float) -> bool:
    """Whether a chance lies within 4 standard errors of the rate of hits."""
    return bool(abs(hits.mean() - chance) <= 4 * math.sqrt(chance * (1 - chance) / hits.size) + 1e-12)


def agrees(estimate: Figure, margins: Floats) -> bool:
    """Whether an estimate is within 4 standard errors of brute force: margins ``(attacks, n)`` of other rows."""
    wrong = (margins <= 0).any(0)
    errors = (estimate.high - estimate.low) / 4, math.sqrt(estimate * (1 - estimate) / wrong.size)
    return bool(abs(estimate - wrong.mean()) <= 4 * math.hypot(*errors))


def sample(mixture: Mixture, n: int, seed: int = 0) -> tuple[Floats, Floats]:
    """Rows x ``(n, d)`` and their classes y ``(n,)``."""
    rng = generator(seed)
    y = rng.choice(np.array([-1.0, 1.0]), size=n)
    return y[:, None] * mixture.mu + rng.standard_normal((n, mixture.d)), y


def test_bayes_error_and_a_copy_of_mu() -> None:
    x, y = sample(UNEVEN, 40_000)
    assert is_rate(y * (x @ UNEVEN.mu) <= 0, UNEVEN.bayes_error)
    mu = Mixture.power_law(50, 0.7).mu.copy()
    mixture = Mixture(mu)
    mu[0] = 5.0
    assert math.isclose(mixture.bayes_error, phibar(1.0))


def erase(mixture: Mixture, x: Floats, y: Floats, *, printed: bool = False) -> tuple[Floats, NDArray[np.bool_]]:
    """Adv(A) of `finite_lower_bound` on all coordinates, or as printed, with p_i = 0 where the signs disagree: Z, I."""
    rng, agreement = generator(1), y[:, None] * x * mixture.mu
    erased = rng.random(x.shape) >= np.exp(-2 * np.maximum(agreement, 0.0))
    erased |= printed & (agreement <= 0)
    return np.where(erased, rng.uniform(-1, 1, x.shape), x), erased


@pytest.mark.parametrize("signal", [0.05, 0.3, 1.0])
def test_erasing_is_as_likely_as_said_and_not_as_printed(signal: float) -> None:
    mixture = Mixture(np.array([signal]))
    chance = math.erf(signal / math.sqrt(2))
    x, y = sample(mixture, 100_000)
    assert is_rate(erase(mixture, x, y)[1], chance)
    assert not is_rate(erase(mixture, x, y, printed=True)[1], chance)
    assert abs(chance - (1 - 2 * phibar(signal))) < 1e-12


def test_what_is_left_says_nothing_about_the_class_but_does_as_printed() -> None:
    mixture = Mixture(np.array([0.45]))
    x, y = sample(mixture, 400_000)

    def distance(z: Floats) -> float:
        """Total variation between the histograms of z in the two classes."""
        edges = np.linspace(-4, 4, 41)
        shares = [np.histogram(z[y == side, 0], edges)[0] / (y == side).sum() for side in (-1, 1)]
        return float(np.abs(shares[0] - shares[1]).sum() / 2)

    assert distance(erase(mixture, x, y)[0]) < 0.01
    assert distance(erase(mixture, x, y, printed=True)[0]) > 0.1


def exceeding_by_enumeration(chances: list[float], budget: int) -> float:
    """P(more than budget events) by all outcomes."""
    total = 0.0
    for outcome in itertools.product([0, 1], repeat=len(chances)):
        if sum(outcome) > budget:
            total += math.prod(p if hit else 1 - p for p, hit in zip(chances, outcome, strict=True))
    return total


def test_the_finite_lower_bound_is_the_best_over_prefixes() -> None:
    mixture = Mixture(np.array([0.2, -1.2, 0.7, 0.4, -0.9, 0.05, 0.3]) / 1.1)
    mu = -np.sort(-np.abs(mixture.mu))
    found = finite_lower_bound(mixture, range(8))
    for budget in range(8):
        candidates = [
            phibar(float(np.linalg.norm(mu[length:])))
            - exceeding_by_enumeration([math.erf(m / math.sqrt(2)) for m in mu[:length]], budget)
            for length in range(8)
        ]
        assert math.isclose(found[budget], max(candidates), rel_tol=1e-12)


@pytest.mark.parametrize("decay", [0.0, 0.3, 0.6])
def test_the_bound_for_large_d_is_below_the_exact_one_and_near(monkeypatch: pytest.MonkeyPatch, decay: float) -> None:
    mixture, budgets = Mixture.power_law(3_000, decay), [0, 3, 10, 20, 40, 60, 5_000]
    exact = finite_lower_bound(mixture, budgets)
    monkeypatch.setattr(bounds, "_EXACT_D", 100)
    bound = finite_lower_bound(mixture, budgets)
    assert (bound <= exact + 1e-12).all()
    assert (bound >= exact - 0.02).all()
    assert bound[-1] == 0.5
    assert 0.5 - 1e-9 < exact[-1] <= 0.5


def test_the_chance_to_exceed_is_never_put_too_low() -> None:
    # Also below the mean, where the binomial's own chance would be too low.
    chances = -np.sort(-(generator().uniform(0, 1, 60) ** 4))
    budgets = np.arange(30)
    lengths, bound = bounds._exceeding_bound(chances, budgets)
    exact = bounds._exceeding(chances, budgets)[1][lengths]
    assert (bound >= exact - 1e-12).all()
    assert (bound - exact)[bound < 1].max() < 0.2


def test_no_classifier_beats_the_lower_bound_under_the_attacker_but_some_do_as_printed() -> None:
    mixture, budget = Mixture.power_law(400), 14
    bound = float(finite_lower_bound(mixture, [budget])[0])
    assert bound > mixture.bayes_error + 0.05
    x, y = sample(mixture, 6_000)

    def errors(length: int, *, printed: bool = False) -> list[float]:
        z, erased = erase(mixture, x, y, printed=printed)
        erased[:, length:] = False
        x_adv = np.where(erased & (erased.sum(1, keepdims=True) <= budget), z, x)
        return [float((y * score.sum(1) <= 0).mean()) for score in (x_adv, np.clip(x_adv, -1, 1))]

    # The bound is that of some prefix; no attacker of the family does better, so one of them must do as well.
    mended = [errors(length) for length in range(100, 401, 50)]
    assert min(max(each) for each in zip(*mended, strict=True)) >= bound - 0.02
    assert max(errors(400, printed=True)) < bound - 0.03


def test_theorem_1_over_prefixes_with_floored_budgets() -> None:
    mu = np.linspace(0.02, 0.6, 3_000)
    mixture = Mixture(mu / np.linalg.norm(mu))
    nu, log_d = -np.sort(-mixture.mu), math.log(3_000)
    budgets = [0, 7, 60, 200, 250, 290, 330, 400]
    found = asymptotic_lower_bound(mixture, budgets)
    needed = np.cumsum(nu) * log_d
    values = np.array([phibar(float(np.linalg.norm(nu[length:]))) - 1 / log_d for length in range(1, 3_001)])

    def best(counted: Floats) -> list[float]:
        return [max([mixture.bayes_error, *values[counted <= budget]]) for budget in budgets]

    np.testing.assert_allclose(found, best(np.floor(needed)), rtol=1e-12)
    assert (found > best(needed)).any()
    assert (found <= finite_lower_bound(mixture, budgets)).all()
    mnist = Mixture.power_law(784)
    for bound, first in ((asymptotic_lower_bound, 140), (finite_lower_bound, 1)):
        assert (bound(mnist, [first - 1, first]) > mnist.bayes_error).tolist() == [False, True]


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


def test_the_upper_bound() -> None:
    d, k, reach = 100_000, 4, math.sqrt(2 * math.log(100_000))
    for strength in (1.0, 2.5):
        by_hand = 1 / reach + phibar(strength - 2 * k * (strength + reach) / math.sqrt(d))
        found = upper_bound(Mixture(Mixture.power_law(d).mu * strength), k)
        assert math.isclose(found, by_hand, rel_tol=1e-9)
    assert upper_bound(Mixture.power_law(784), 300) == 1.0
    mixture = Mixture(generator(6).uniform(0.075, 0.225, 800))
    exact = robust_errors(mixture, [1, 2], ks=[1, 2], rows=200, rng=generator())
    for k in (1, 2):
        assert exact.truncated[k, k].high < upper_bound(mixture, k) < 1.0


@pytest.mark.parametrize("decay", [0.0, 0.25, 0.5, 0.8, 1.0, 1.6])
def test_a_power_law_without_the_vector_is_the_one_with_it(decay: float) -> None:
    nu, law = Mixture.power_law(30_000, decay).mu, PowerLaw(30_000, decay)
    for c in (0.05, 0.3137, 0.7071, 0.95, 0.9999):
        length, norm1 = law.prefix(c)
        assert length == np.searchsorted(np.cumsum(nu**2), c * c) + 1
        assert math.isclose(norm1, nu[:length].sum(), rel_tol=1e-10)
    assert PowerLaw(2).prefix(0.9)[0] == 2  # lambda_c may be d


@pytest.mark.parametrize("decay", [0.0, 0.3, 0.5])
@pytest.mark.parametrize("d", [10**12, 10**30, 10**100, 10**300])
def test_theorem_2_at_huge_d(d: int, decay: float) -> None:
    law, log_d, c1 = PowerLaw(d, decay), math.log(d), bounds.c1(d)
    low, high = bounds.theorem_range(d)
    assert low < high
    eps = (low + high) / 2
    shifted = bounds.log_k_opt_bound(law, eps - c1)
    trunc = bounds.log_k_trunc_bound(law, eps)
    least = shifted - bounds.c2(eps, d) * log_d
    # The two meet but for flooring.
    if trunc < 30:
        assert abs(math.exp(trunc) - math.exp(least)) < 1.01
    else:
        assert math.isclose(trunc, least, abs_tol=1e-9 * log_d)
    assert trunc < shifted
    if decay == 0:
        by_hand = bounds.c_of_eps(eps - c1 + 1 / log_d) ** 2 * log_d * math.exp(log_d / 2)
        assert math.isclose(shifted, math.log(by_hand), rel_tol=1e-4)


def test_a_whole_number_is_not_floored_to_the_one_before() -> None:
    assert all(bounds._log_floor(math.log(n)) == math.log(n) for n in range(1, 1000))
    assert bounds._log_floor(math.log(4.999)) == math.log(4)


def test_theorem_2_is_empty_up_to_where_it_starts() -> None:
    for d, applies in ((784, False), (6_700_000_000, False), (6_900_000_000, True)):
        assert (bounds.theorem_range(d)[0] < 0.5) == applies
    assert round(bounds.c1(10**10), 3) == 0.338


def test_k_trunc_is_tolerated_by_the_candidate_of_the_proof() -> None:
    d, eps = 10**14, 0.49
    log_d, reach = math.log(d), math.sqrt(2 * math.log(d))
    k = math.exp(bounds.log_k_trunc_bound(PowerLaw(d), eps))
    assert abs(k - round(k)) < 1e-6 * k
    assert round(k) > 100
    tail = math.sqrt(1 - (PowerLaw(d).prefix(bounds.c_of_eps(eps - math.sqrt(2 / log_d)))[0] - 1) / d)
    error = 1 / reach + phibar(tail - 2 * k * (1 + reach) / math.sqrt(d) / tail)
    assert error <= eps
    # Small bounds are floored.
    assert math.isclose(math.exp(bounds.log_k_trunc_bound(PowerLaw(10**8), 0.4999)), 11)
    assert bounds.log_k_trunc_bound(PowerLaw(10**8, 2.0), 0.4999) == -math.inf


@pytest.mark.parametrize("decay", [0.0, 0.4])
def test_no_classifier_tolerates_more_than_k_opt(decay: float) -> None:
    mixture, eps = Mixture.power_law(20_000, decay), 0.3
    k = round(math.exp(bounds.log_k_opt_bound(PowerLaw(20_000, decay), eps)))
    at_k, below = asymptotic_lower_bound(mixture, [k, k // 4])
    assert at_k >= eps > below


@pytest.mark.parametrize("weight", [UNEVEN.mu, np.array([0.3, -1.0, -0.4, 0.7, -0.6])])
def test_errors_are_those_of_the_best_attack(weight: Floats) -> None:
    clips = [0.1, 0.6, 2.0]
    table = robust_errors(UNEVEN, [0, 1, 2], ks=[0, 1, 2], clips=clips, weight=weight, rows=1_500, rng=generator())
    x, y = sample(UNEVEN, 20_000, seed=1)
    for budget in range(3):
        terms = changes(x, budget, (-1e6, 1e6)) * weight
        for k in range(budget, 3):
            assert agrees(table.truncated[k, budget], y * truncated(terms, k))
        for k in range(budget):
            assert table.truncated[k, budget] == table.truncated[k, budget].low == 1.0
        for clip in clips:
            assert agrees(table.clipped[clip, budget], y * np.clip(terms, -clip, clip).sum(-1))


def test_one_sort_serves_both_kinds_of_classifier() -> None:
    mixture, budgets, ks, clips = Mixture.power_law(60, 0.5), [0, 1, 4], [4, 9, 20], [0.01, 0.1]
    both = robust_errors(mixture, budgets, ks=ks, clips=clips, rows=300, rng=generator(3))
    assert both.truncated == robust_errors(mixture, budgets, ks=ks, rows=300, rng=generator(3)).truncated
    assert both.clipped == robust_errors(mixture, budgets, clips=clips, rows=300, rng=generator(3)).clipped


def test_without_truncation_or_attack_the_error_is_that_of_bayes() -> None:
    uniform = Mixture.power_law(300)
    # Of uniform weights nothing random is left.
    plain = robust_errors(uniform, [0], ks=[0], clips=[100.0], rows=5, rng=generator())
    assert math.isclose(plain.truncated[0, 0], uniform.bayes_error, rel_tol=1e-9)
    assert math.isclose(plain.clipped[100.0, 0], uniform.bayes_error, rel_tol=1e-7)
    steep = robust_errors(Mixture.power_law(300, 0.5), [0], ks=[0], rows=4_000, rng=generator()).truncated[0, 0]
    assert abs(steep - uniform.bayes_error) <= steep.high - steep.low  # 4 standard errors


def test_intervals_hold_the_error_as_often_as_they_say() -> None:
    mixture = Mixture.power_law(30, 0.8)
    for k, budget in ((0, 0), (3, 1), (10, 2)):
        truth: float = robust_errors(mixture, [budget], ks=[k], rows=40_000, rng=generator(9)).truncated[k, budget]
        if k == 0:
            # Here the truth is known without the estimator, which could be wrong in all runs alike.
            truth = mixture.bayes_error
        rng = generator(2)
        runs = [robust_errors(mixture, [budget], ks=[k], rows=40, rng=rng).truncated[k, budget] for _ in range(300)]
        held = sum(run.low <= truth <= run.high for run in runs)
        assert 0.91 * 300 <= held <= 0.99 * 300


def test_rows_that_are_all_alike_still_leave_doubt() -> None:
    low, high = robust_error.interval(np.array([0.0, 1.0, 0.5]), np.zeros(3), 40)
    assert (high[0], low[1]) == (pytest.approx(0.0927, abs=1e-3), pytest.approx(1 - 0.0927, abs=1e-3))
    assert high[2] - low[2] > 0.2


class BackToFront(ThreadPoolExecutor):
    """Runs what it is given last to first, as threads may."""

    def map(self, fn: Callable[..., Any], *lists: Iterable[Any], **_: Any) -> Iterator[Any]:
        done = [fn(*each) for each in reversed(list(zip(*lists, strict=True)))]
        return iter(done[::-1])


def test_rows_do_not_depend_on_the_order_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def errors() -> object:
        return robust_errors(Mixture.power_law(50, 0.4), [0, 2], ks=[2, 9], rows=100, rng=generator())

    monkeypatch.setattr(robust_error, "_CHUNK", 700)
    many = errors()
    monkeypatch.setattr(robust_error, "ThreadPoolExecutor", BackToFront)
    assert many == errors()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: robust_errors(UNEVEN, [1], ks=[3], rng=generator()), r"k must satisfy .* got k=3 with d=5"),
        (lambda: robust_errors(UNEVEN, [-1], ks=[1], rng=generator()), "budgets must be an int >= 0, got -1"),
        (lambda: robust_errors(UNEVEN, [1], ks=[1], rows=1, rng=generator()), "rows must be an int >= 2, got 1"),
        (lambda: robust_errors(UNEVEN, [3], clips=[1.0], rng=generator()), "budgets must stay below d / 2 with clips"),
        (lambda: robust_errors(UNEVEN, [1], weight=np.ones(4), rng=generator()), "weight must be 5 finite numbers"),
        (lambda: robust_errors(UNEVEN, [1], weight=np.eye(5)[0], rng=generator()), "without zeros"),
        (lambda: robust_errors(UNEVEN, [1], clips=[0.0], rng=generator()), "clips must be positive numbers"),
        (lambda: Mixture(np.array([1.0, 0.0])), "mu must be a vector of finite numbers without zeros, got"),
        (lambda: bounds.c_of_eps(0.15), r"eps must lie between Phibar\(1\) = 0.1587 and 1/2, got 0.15"),
        (lambda: PowerLaw(10.0), r"d must be an int >= 2, got 10\.0"),  # type: ignore[arg-type]
        (lambda: PowerLaw(10, math.nan), "decay must be a number >= 0, got nan"),
    ],
)
def test_bad_input_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
