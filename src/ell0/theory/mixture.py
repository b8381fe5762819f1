"""The Gaussian mixture of [Beliaev22] section 4."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from scipy.special import ndtr

from ..common import check_count
from .arrays import Floats, Ints


@dataclass(frozen=True, eq=False)
class Mixture:
    """Two Gaussian classes of equal weight: x = y mu + z, y = -1 or 1, z ~ N(0, I).

    mu: ``(d,)``, finite and without zeros. The Bayes classifier is the sign of <mu, x>.

    Differs from [Beliaev22]: the noise is 1 in every coordinate, so nu is mu. Any diagonal Sigma reduces to this by
    scaling the coordinates, which changes no product w_i x_i.
    """

    mu: Floats

    def __post_init__(self) -> None:
        mu = np.array(self.mu, dtype=np.float64)  # a copy that nobody else can write to
        mu.flags.writeable = False
        object.__setattr__(self, "mu", mu)
        if mu.ndim != 1 or not len(mu) or not np.isfinite(mu).all() or not mu.all():
            raise ValueError(f"mu must be a vector of finite numbers without zeros, got {self.mu}")

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
