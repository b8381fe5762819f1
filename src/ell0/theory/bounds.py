"""Bounds of [Beliaev22] section 4 and appendices A-B, at any dimension up to 10**300."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import bdtrc, erf, ndtr, ndtri

from ..common import check_count
from .arrays import Floats, Ints
from .mixture import Mixture, check_budgets, check_k

_EXACT_D = 20_000
"""Up to this d the Poisson binomial of every prefix is computed; above, it is bounded on `_PREFIXES` of them."""
_PREFIXES = 2_000


def asymptotic_lower_bound(mixture: Mixture, budgets: Sequence[int]) -> Floats:
    """Theorem 1 over the prefixes A of the largest |nu|, for each budget: no classifier's robust error is below it.

    L*(floor(||nu_A||_1 log d)) >= Phibar(||nu_{A^c}||_2) - 1 / log d     ([Beliaev22] Theorem 1)

    Never below the Bayes error. Vacuous at d = 784, where 1 / log d = 0.15: see `finite_lower_bound`.
    Differs from [Beliaev22]: the budget is floored, since ||nu_A||_1 log d counts coordinates.
    """
    nu, log_d = mixture.sorted_mu, math.log(check_count("d", mixture.d, 2))
    longest = np.searchsorted(np.floor(np.cumsum(nu) * log_d), check_budgets(budgets), side="right")
    bound = ndtr(-_rest(nu)[longest]) - 1 / log_d
    return np.maximum(np.where(longest > 0, bound, 0.0), mixture.bayes_error)


def finite_lower_bound(mixture: Mixture, budgets: Sequence[int]) -> Floats:
    """The bound of Theorem 1 with the probability that the attacker exceeds the budget computed, for each budget.

    L*(m) >= max over prefixes A of Phibar(||nu_{A^c}||_2) - P(sum_{i in A} I_i > m)

    The attacker Adv(A) keeps coordinate i of A with probability p_i = min(1, exp(-2 x_i y nu_i)) and draws it from
    Unif[-1, 1] otherwise, so that A says nothing about y. It erases i independently with probability
    P(I_i = 1) = erf(|nu_i| / sqrt 2), so the number of erased coordinates is Poisson binomial: exact for all prefixes
    where d <= 20,000. Above, some 2,000 prefixes are used, and the number is replaced by the binomial of the same mean,
    whose chance to exceed any m at or above the mean is larger (Hoeffding 1956; equal for uniform nu). Fewer prefixes
    and a larger chance can only lower the bound: it stays valid.

    Differs from [Beliaev22]: p_i is 1, not 0, where the signs of x_i and y nu_i disagree: as printed the attacker
    erases half of all coordinates, and what is left still depends on y. P(I_i = 1) is 1 - 2 (1 - Phi(|nu_i|)), not the
    printed 1 - (1 - Phi(|nu_i|)). Markov's inequality, whose 1 / log d makes Theorem 1 vacuous, is not used; and the
    bound follows from P(C(x') != y) >= P(C(Z) != y) - P(x' != Z), not from densities of x' taken for those of Z.
    """
    nu, exceeding = mixture.sorted_mu, _exceeding if mixture.d <= _EXACT_D else _exceeding_bound
    lengths, exceeds = exceeding(erf(nu / math.sqrt(2.0)), check_budgets(budgets))
    return np.asarray(np.maximum((ndtr(-_rest(nu))[lengths, None] - exceeds).max(0), mixture.bayes_error))


def k_opt_bound(mixture: Mixture, eps: float) -> int:
    """The largest budget at which `finite_lower_bound` allows an error of eps, an upper bound on k_opt(eps); at most d.

    k_opt(eps) = max{m : L*(m) <= eps} ([Beliaev22] section 4)
    """
    mean = float(erf(np.abs(mixture.mu) / math.sqrt(2.0)).sum())
    # Six deviations above the mean of the number of erased coordinates the attacker erases all: the bound is 1/2.
    most = min(mixture.d, math.ceil(mean + 6 * math.sqrt(mean)) + 6)
    allowed = finite_lower_bound(mixture, range(most + 1)) <= eps
    return mixture.d if allowed.all() else int(allowed.sum()) - 1


def upper_bound(mixture: Mixture, k: int) -> float:
    """An upper bound on the robust error of the k-truncated Bayes classifier under a budget of at most k coordinates.

    1 / sqrt(2 log d) + Phibar((<w, mu> - 2 k ||w||_inf (||nu||_2 + sqrt(2 log d))) / ||w||_2),  w = mu; at most 1
    ([Beliaev22] appendix B, Corollary)

    Differs from [Beliaev22]: |<w, x'>_k - <w, x>| <= 2k ||w * x||_inf, not 8k, since the worst case drops at most 2k
    more terms of one side; no constant below 2 holds. ||nu||_2 stands where 1 did, so it need not be 1.
    """
    check_k(mixture.d, k)
    strength, largest = float(np.linalg.norm(mixture.mu)), math.sqrt(2 * math.log(mixture.d))
    shift = 2 * k * np.abs(mixture.mu).max() * (strength + largest)
    return min(1.0, 1 / largest + float(ndtr((shift - mixture.mu @ mixture.mu) / strength)))


@dataclass(frozen=True)
class PowerLaw:
    """nu_i proportional to i ** -decay with ||nu||_2 = 1, without the vector: d may be any int up to 10**300."""

    d: int
    decay: float = 0.0

    def __post_init__(self) -> None:
        check_count("d", self.d, 2, bits=None)
        if not 0 <= self.decay < math.inf:
            raise ValueError(f"decay must be a number >= 0, got {self.decay}")

    def prefix(self, c: float) -> tuple[int, float]:
        """lambda_c = min{l : ||nu_[1:l]||_2 >= c} and ||nu_[1:lambda_c]||_1, for 0 < c <= 1.

        Differs from [Beliaev22]: lambda_c < d is not true (two equal nu and c = 0.9 give 2), so it may be d.
        """
        total = _power_sum(self.d, 2 * self.decay)
        below, length = 0, self.d
        while length - below > 1:
            middle = (below + length) // 2
            if _power_sum(middle, 2 * self.decay) >= c * c * total:
                length = middle
            else:
                below = middle
        return length, _power_sum(length, self.decay) / math.sqrt(total)


def log_k_trunc_bound(nu: PowerLaw, eps: float) -> float:
    """Natural logarithm of a lower bound on k_trunc(eps), what truncation with k = m tolerates; -inf where it is 0.

    k_trunc(e + sqrt(2 / log d)) >= floor(q(e) ||nu_[1:lambda_c(e)]||_1 / (4 log d)),  e = eps - sqrt(2 / log d)
    ([Beliaev22] appendix B, eq. on k_trunc, where 16 stands for 4: see `upper_bound`)
    """
    log_d = math.log(nu.d)
    inner = eps - math.sqrt(2 / log_d)
    return _log_floor(math.log(q_of_eps(inner) * nu.prefix(c_of_eps(inner))[1] / (4 * log_d)))


def log_k_opt_bound(nu: PowerLaw, eps: float) -> float:
    """Natural logarithm of an upper bound on k_opt(eps), what the best classifier of all tolerates; -inf where it is 0.

    k_opt(e - 1 / log d) <= floor(||nu_[1:lambda_c(e)]||_1 log d),  e = eps + 1 / log d
    ([Beliaev22] appendix B, Lemma on k_opt)

    Differs from [Beliaev22]: the text calls it a lower bound.
    """
    log_d = math.log(nu.d)
    return _log_floor(math.log(nu.prefix(c_of_eps(eps + 1 / log_d))[1] * log_d))


def c1(d: int) -> float:
    """1 / log d + sqrt(2 / log d), what Theorem 2 subtracts from eps."""
    log_d = math.log(check_count("d", d, 2, bits=None))
    return 1 / log_d + math.sqrt(2 / log_d)


def c2(eps: float, d: int) -> float:
    """(2 log log d - log(q(eps - sqrt(2 / log d)) / 4)) / log d, what Theorem 2 subtracts from alpha_opt.

    alpha_opt(eps) >= alpha_trunc(eps) >= alpha_opt(eps - c1) - c2,  alpha = log_d k     ([Beliaev22] Theorem 2)
    """
    log_d = math.log(check_count("d", d, 2, bits=None))
    return (2 * math.log(log_d) - math.log(q_of_eps(eps - math.sqrt(2 / log_d)) / 4)) / log_d


def theorem_range(d: int) -> tuple[float, float]:
    """The open interval of eps in which Theorem 2 holds, Phibar(1) + c1(d) to 1/2: empty up to d = 6.8e9."""
    return float(ndtr(-1.0)) + c1(d), 0.5


def q_of_eps(eps: float) -> float:
    """The signal that leaves error eps, Phibar(q) = eps; q = sqrt(1 - c^2) for Phibar(1) < eps < 1/2."""
    lowest = float(ndtr(-1.0))
    if not lowest < eps < 0.5:
        raise ValueError(f"eps must lie between Phibar(1) = {lowest:.4f} and 1/2, got {eps}")
    return -float(ndtri(eps))


def c_of_eps(eps: float) -> float:
    """The signal that must be hidden to leave error eps: Phibar(sqrt(1 - c^2)) = eps ([Beliaev22] appendix B)."""
    left = q_of_eps(eps)
    return math.sqrt((1 - left) * (1 + left))


def _rest(nu: Floats) -> Floats:
    """||nu_[l+1:d]||_2 for l = 0..d, added from the small end: ``(d + 1,)``."""
    return np.asarray(np.sqrt(np.append(np.cumsum(nu[::-1] ** 2)[::-1], 0.0)))


def _exceeding(chances: Floats, budgets: Ints) -> tuple[Ints, Floats]:
    """Every l = 0..d, and P(sum of the first l events > m) for each l and m, exactly: ``(d + 1, budgets)``."""
    most = int(min(budgets.max(initial=0), len(chances)))
    at = np.minimum(budgets, most)
    # pmf[j] = P(j events so far); what passes `most` leaves it, and 1 - cdf counts it.
    pmf = np.zeros(most + 1)
    pmf[0] = 1.0
    exceeds = np.zeros((len(chances) + 1, len(budgets)))
    for length, chance in enumerate(chances, start=1):
        moved = pmf[:-1] * chance
        pmf *= 1 - chance
        pmf[1:] += moved
        # Rounding must not make the chance negative, and the bound too high.
        exceeds[length] = np.maximum(1 - np.cumsum(pmf)[at], 0.0)
    return np.arange(len(chances) + 1), exceeds


def _exceeding_bound(chances: Floats, budgets: Ints) -> tuple[Ints, Floats]:
    """Some l, and upper bounds on P(sum of the first l events > m) for each l and m: ``(lengths, budgets)``."""
    half, d = _PREFIXES // 2, len(chances)
    # Even steps for flat nu, growing ones for steep nu, where short prefixes hide most.
    lengths = np.unique(np.append(np.linspace(1, d, half), np.geomspace(1, d, half)).astype(int))
    means = np.cumsum(chances)[lengths - 1][:, None]
    # Capped at l, where the chance is 0 whatever the mean.
    at_most = np.minimum(budgets, lengths[:, None])
    binomial = bdtrc(at_most, lengths[:, None], means / lengths[:, None])
    return lengths, np.where(at_most >= means, binomial, 1.0)


def _power_sum(n: int, exponent: float) -> float:
    """sum_{i=1}^n i ** -exponent, beyond i = 1,000 by Euler and Maclaurin's formula, to 12 digits."""
    first = min(n, 1_000)
    total = float((np.arange(1.0, first + 1) ** -exponent).sum())
    if n == first:
        return total
    # The integral from first to n, written so that exponents near 1 do not cancel.
    ratio, slope = math.log(n) - math.log(first), 1 - exponent
    integral = first**slope * (math.expm1(slope * ratio) / slope if slope else ratio)
    ends = (float(n) ** -exponent - first**-exponent) / 2
    curvature = exponent / 12 * (first ** (-exponent - 1) - float(n) ** (-exponent - 1))
    return float(total + integral + ends + curvature)


def _log_floor(log_value: float) -> float:
    """log(floor(exp(log_value))); beyond 2**53 flooring changes nothing that a float can show."""
    if log_value > 53 * math.log(2):
        return log_value
    # A whole number that comes out a rounding error too small is that number.
    whole = math.floor(math.exp(log_value) * (1 + 1e-12))
    return math.log(whole) if whole else -math.inf
