"""The Gaussian mixture of [Beliaev22] section 4, and the attacker that proves its lower bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import erf, ndtr

from ..common import check_count
from .arrays import Bools, Floats, Ints


@dataclass(frozen=True, eq=False)
class Mixture:
    """Two Gaussian classes of equal weight: x = y mu + z, y = -1 or 1, z ~ N(0, I).

    mu: ``(d,)``, finite, not all zero. The Bayes classifier is the sign of <mu, x>.

    Differs from [Beliaev22]: the noise is 1 in every coordinate, so nu is mu. Any diagonal Sigma reduces to this by
    scaling the coordinates, which changes no product w_i x_i.
    """

    mu: Floats

    def __post_init__(self) -> None:
        mu = np.array(self.mu, dtype=np.float64)  # a copy that nobody else can write to
        mu.flags.writeable = False
        object.__setattr__(self, "mu", mu)
        if mu.ndim != 1 or not np.isfinite(mu).all() or not mu.any():
            raise ValueError(f"mu must be a vector of finite numbers, not all zero, got {self.mu}")

    @classmethod
    def power_law(cls, d: int, decay: float = 0.0) -> Self:
        """mu_i proportional to i ** -decay with ||mu||_2 = 1; ``decay=0`` is uniform mu."""
        mu = np.arange(1, check_count("d", d) + 1, dtype=np.float64) ** -decay
        return cls(mu / np.linalg.norm(mu))

    @property
    def d(self) -> int:
        return len(self.mu)

    @property
    def bayes_error(self) -> float:
        """Error of the best classifier without an attacker, 1 - Phi(||mu||_2)."""
        return float(ndtr(-np.linalg.norm(self.mu)))

    @property
    def sorted_mu(self) -> Floats:
        """|mu| in descending order: ``(d,)``."""
        return -np.sort(-np.abs(self.mu))

    def sample(self, n: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
        """n rows x ``(n, d)`` and their classes y ``(n,)``, each -1.0 or 1.0."""
        y = rng.choice(np.array([-1.0, 1.0]), size=check_count("n", n, 0))
        return y[:, None] * self.mu + rng.standard_normal((n, self.d)), y

    def weight(self, given: ArrayLike | None) -> Floats:
        """A given weight as float64 ``(d,)``; None is the Bayes weight. Raises ValueError if it has zeros."""
        w = self.mu if given is None else np.asarray(given, dtype=np.float64)
        if w.shape != self.mu.shape or not np.isfinite(w).all() or not w.all():
            raise ValueError(f"weight must be ({self.d},), finite and without zeros, got {w}")
        return w


class Erasure(NamedTuple):
    """What Adv(A) did to n rows.

    x_adv: ``(n, d)``, z where at most ``budget`` coordinates were erased, else x.
    z: ``(n, d)``, x with the erased coordinates redrawn; its coordinates in A say nothing about y.
    erased: ``(n, d)``, the I_i.
    """

    x_adv: Floats
    z: Floats
    erased: Bools


def erase(
    mixture: Mixture, x: Floats, y: Floats, within: Sequence[int] | Ints, *, budget: float, rng: np.random.Generator
) -> Erasure:
    """The attacker Adv(A) of [Beliaev22] appendix A, which makes the coordinates A say nothing about the class.

    Coordinate i of A stays with probability p_i = min(1, exp(-2 x_i y mu_i)), else it is drawn from Unif[-1, 1]; a row
    with more than ``budget`` erased coordinates is left as it was.

    Differs from [Beliaev22]: p_i is 1, not 0, where the sign of x_i disagrees with that of y mu_i. As printed the
    attacker erases half of all coordinates and z still depends on y.

    Args:
        x: ``(n, d)``.  y: ``(n,)``, -1 or 1.  within: indices of A.
        budget: the paper's ||nu_A||_1 log d, or any other number >= 0.
    """
    if not budget >= 0:
        raise ValueError(f"budget must be >= 0, got {budget}")
    inside = np.isin(np.arange(mixture.d), within)
    stays = np.exp(-2 * np.maximum(y[:, None] * x * mixture.mu, 0.0))
    erased = inside & (rng.random(x.shape) >= stays)
    z = np.where(erased, rng.uniform(-1.0, 1.0, x.shape), x)
    affordable = erased.sum(1, keepdims=True) <= budget
    return Erasure(np.where(affordable, z, x), z, erased)


def erase_probability(mu: Floats) -> Floats:
    """P(I_i = 1), the chance that Adv(A) erases a coordinate of signal mu_i: erf(|mu_i| / sqrt 2), shape of mu.

    Differs from [Beliaev22]: the printed middle step 1 - (1 - Phi(|nu_i|)) belongs to the wrong p_i; the value is
    1 - 2 (1 - Phi(|nu_i|)).
    """
    return np.asarray(erf(np.abs(mu) / math.sqrt(2.0)))


def check_budgets(budgets: Sequence[int]) -> Ints:
    """Budgets as an array ``(n,)``; raises ValueError unless each is an int >= 0."""
    return np.array([check_count("budgets", budget, 0) for budget in budgets], dtype=np.int64)


def check_k(d: int, k: int) -> int:
    """k as an int; raises ValueError unless 0 <= 2k < d."""
    if 2 * check_count("k", k, 0) >= d:
        raise ValueError(f"k must satisfy 0 <= 2*k < d, got k={k} with d={d}")
    return int(k)


def check_distinct(name: str, values: Sequence[float]) -> None:
    """Raises ValueError if there are no values, or if two are equal."""
    if not values or len(set(values)) < len(values):
        raise ValueError(f"{name} must be at least one number and no number twice, got {list(values)}")
