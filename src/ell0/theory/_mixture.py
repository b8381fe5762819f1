"""The Gaussian mixture of [Beliaev22] section 4, and the attacker that proves its lower bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import erf, ndtr

Floats = NDArray[np.float64]


class Prefix(NamedTuple):
    """The coordinates 1..length of the largest |nu|, and the sum of their |nu|."""

    length: int
    norm1: float


class Decay(Protocol):
    """How |nu|, sorted downwards and with ||nu||_2 = 1, falls off; all that Theorem 2 needs of a mixture."""

    @property
    def d(self) -> int: ...

    def prefix(self, c: float) -> Prefix:
        """lambda_c = min{l : ||nu_[1:l]||_2 >= c} and ||nu_[1:lambda_c]||_1, for 0 < c < 1."""
        ...


@dataclass(frozen=True, eq=False)
class Mixture:
    """Two Gaussian classes of equal weight and noise: x = y mu + z, y = -1 or 1, z ~ N(0, Sigma).

    Args:
        mu: ``(d,)``, not all zero.
        sigma: a number or ``(d,)``: standard deviations, Sigma is diagonal. ``(d, d)``: the covariance Sigma itself.

    ||nu||_2 may be any positive number; `normalised` gives the paper's ||nu||_2 = 1.
    """

    mu: Floats
    sigma: Floats

    def __init__(self, mu: ArrayLike, sigma: ArrayLike = 1.0) -> None:
        # A frozen dataclass: what is kept are float64 copies that nobody else can write to.
        for name, value in (("mu", mu), ("sigma", sigma)):
            array = np.array(value, dtype=np.float64)
            array.flags.writeable = False
            object.__setattr__(self, name, array)
        _check(self.mu, self.sigma)

    @classmethod
    def power_law(cls, d: int, decay: float = 0.0) -> Self:
        """nu_i proportional to i ** -decay with ||nu||_2 = 1 and sigma = 1; ``decay=0`` is uniform nu."""
        nu = np.arange(1, check_count("d", d, 1) + 1, dtype=np.float64) ** -decay
        return cls(nu / np.linalg.norm(nu))

    @property
    def d(self) -> int:
        return len(self.mu)

    @cached_property
    def diagonal(self) -> bool:
        """Whether the coordinates of z are independent."""
        return self.sigma.ndim < 2 or not np.any(self.sigma - np.diag(np.diag(self.sigma)))

    @cached_property
    def deviations(self) -> Floats:
        """Standard deviation of each coordinate of z: ``(d,)``."""
        if self.sigma.ndim == 2:
            return np.sqrt(np.diag(self.sigma))
        return np.broadcast_to(self.sigma, self.mu.shape)

    @cached_property
    def nu(self) -> Floats:
        """Sigma^(-1/2) mu with the symmetric root, mu_i / sigma_i for diagonal Sigma: ``(d,)``."""
        if self.diagonal:
            return self.mu / self.deviations
        variances, directions = np.linalg.eigh(self.sigma)
        return np.asarray(directions @ ((directions.T @ self.mu) / np.sqrt(variances)))

    @property
    def strength(self) -> float:
        """||nu||_2, the signal in units of the noise."""
        return float(np.linalg.norm(self.nu))

    @property
    def bayes_error(self) -> float:
        """Error of the best classifier without an attacker, 1 - Phi(||nu||_2)."""
        return float(ndtr(-self.strength))

    @cached_property
    def bayes_weight(self) -> Floats:
        """Sigma^-1 mu, whose sign of <w, x> is the best classifier without an attacker: ``(d,)``."""
        return self.solve(self.mu)

    def solve(self, vector: Floats) -> Floats:
        """Sigma^-1 vector: ``(d,)``."""
        if self.diagonal:
            return vector / self.deviations**2
        return np.asarray(np.linalg.solve(self.sigma, vector), dtype=np.float64)

    def normalised(self) -> Mixture:
        """The mixture with mu scaled so that ||nu||_2 = 1."""
        return Mixture(self.mu / self.strength, self.sigma)

    def without(self, largest: int) -> Mixture:
        """The mixture of what remains when the ``largest`` coordinates of largest |mu_i| / sigma_i are dropped.

        FilTrun of [Delgosha21] is the truncated classifier on these: it filters a prefix first and truncates the
        survivors alone, and a change of a filtered coordinate is wasted. The paper's candidate
        w_i = 0 for filtered i keeps the zeros in the sort; it is the same classifier only where at least k products of
        survivors are positive and k are negative.
        """
        if not 0 <= check_count("largest", largest, 0) < self.d:
            raise ValueError(f"largest must be below d, got largest={largest} with d={self.d}")
        order = np.argsort(-np.abs(self.mu) / self.deviations, kind="stable")
        stays = np.sort(order[largest:])
        if self.sigma.ndim == 2:
            return Mixture(self.mu[stays], self.sigma[np.ix_(stays, stays)])
        return Mixture(self.mu[stays], self.sigma if self.sigma.ndim == 0 else self.sigma[stays])

    def sample(self, n: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
        """n rows x ``(n, d)`` and their classes y ``(n,)``, each -1.0 or 1.0."""
        y = rng.choice(np.array([-1.0, 1.0]), size=check_count("n", n, 0))
        return y[:, None] * self.mu + self.noise(n, rng), y

    def noise(self, n: int, rng: np.random.Generator) -> Floats:
        """n rows of z ~ N(0, Sigma): ``(n, d)``."""
        z = rng.standard_normal((n, self.d))
        if self.diagonal:
            z *= self.deviations
            return z
        return np.asarray(z @ self._root.T)

    def prefix(self, c: float) -> Prefix:
        """lambda_c and ||nu_[1:lambda_c]||_1 ([Beliaev22], definition of lambda_c); needs ||nu||_2 = 1.

        Differs from [Beliaev22]: lambda_c < d is not true (two equal nu and c = 0.9 give 2), so it may be d.
        """
        if not 0 < c < 1:
            raise ValueError(f"c must lie between 0 and 1, got {c}")
        if not math.isclose(self.strength, 1.0, rel_tol=1e-9):
            raise ValueError(f"the mixture must have ||nu||_2 = 1: use normalised(), got {self.strength}")
        nu = self.sorted_nu()
        # Rounding may leave the last norm just below a c that is just below 1.
        length = min(int(np.searchsorted(np.cumsum(nu**2), c * c)) + 1, self.d)
        return Prefix(length, float(nu[:length].sum()))

    def sorted_nu(self) -> Floats:
        """|nu| sorted downwards, ``(d,)``; the results that use it need diagonal Sigma."""
        if not self.diagonal:
            raise ValueError("sigma must be diagonal for this result, got a full covariance")
        return -np.sort(-np.abs(self.nu))

    @cached_property
    def _root(self) -> Floats:
        return np.asarray(np.linalg.cholesky(self.sigma), dtype=np.float64)


class Erasure(NamedTuple):
    """What Adv(A) did to n rows.

    x_adv: ``(n, d)``, z where at most ``budget`` coordinates were erased, else x.
    z: ``(n, d)``, x with the erased coordinates redrawn; its part in A says nothing about y.
    erased: ``(n, d)`` bool, the I_i.
    """

    x_adv: Floats
    z: Floats
    erased: NDArray[np.bool_]


def erase(
    mixture: Mixture, x: Floats, y: Floats, coordinates: ArrayLike, *, budget: float, rng: np.random.Generator
) -> Erasure:
    """The attacker Adv(A) of [Beliaev22] appendix A, which makes the coordinates A carry nothing about the class.

    Coordinate i of A stays with probability p_i = min(1, exp(-2 x_i y mu_i / sigma_i^2)), else it is drawn from
    Unif[-1, 1]; a row with more than ``budget`` erased coordinates is left as it was.

    Differs from [Beliaev22]: p_i is 1, not 0, where the sign of x_i disagrees with that of y mu_i. As printed the
    attacker erases half of all coordinates and z still depends on y.

    Args:
        x: ``(n, d)``.  y: ``(n,)``, -1 or 1.  coordinates: indices of A, or a bool mask ``(d,)``.
        budget: the paper's ||nu_A||_1 log d, or any other number; floored, as a count of coordinates must be.
    """
    inside = _mask(mixture, coordinates)
    if not budget >= 0:
        raise ValueError(f"budget must be >= 0, got {budget}")
    stays = np.exp(-2 * np.maximum(y[:, None] * x * mixture.mu / mixture.deviations**2, 0.0))
    erased = inside & (rng.random(x.shape) >= stays)
    z = np.where(erased, rng.uniform(-1.0, 1.0, x.shape), x)
    within = erased.sum(1, keepdims=True) <= budget
    return Erasure(np.where(within, z, x), z, erased)


def erase_probability(nu: ArrayLike) -> Floats:
    """P(I_i = 1), the chance that Adv(A) erases a coordinate of signal nu_i: erf(|nu_i| / sqrt 2), shape of nu.

    Differs from [Beliaev22]: the printed middle step 1 - (1 - Phi(|nu_i|)) belongs to the wrong p_i; the value is
    1 - 2 (1 - Phi(|nu_i|)).
    """
    return np.asarray(erf(np.abs(np.asarray(nu, dtype=np.float64)) / math.sqrt(2.0)))


def erased_log_density(mixture: Mixture, z: Floats, coordinates: ArrayLike) -> Floats:
    """log f_{Z_A|y}(z_A), the same for both y: ``(n,)``. z: ``(n, d)``.

    f = prod over i in A of [N(|z_i|; -|mu_i|, sigma_i^2) + alpha_i / 2 on [-1, 1]], alpha_i = P(I_i = 1)
    ([Beliaev22] appendix A, density of Z_A).
    """
    inside = _mask(mixture, coordinates)
    z, mu, deviations = z[:, inside], mixture.mu[inside], mixture.deviations[inside]
    kept = np.exp(-0.5 * ((np.abs(z) + np.abs(mu)) / deviations) ** 2) / (math.sqrt(2 * math.pi) * deviations)
    redrawn = np.where(np.abs(z) <= 1, erase_probability(mu / deviations) / 2, 0.0)
    with np.errstate(divide="ignore"):  # a density of 0 far out is log density -inf
        return np.asarray(np.log(kept + redrawn).sum(1))


def check_count(name: str, value: object, least: int) -> int:
    """The value as an int, or an error that names it."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ValueError(f"{name} must be an int >= {least}, got {value!r}")
    return int(value)


def check_several(name: str, values: Sequence[float]) -> None:
    """Refuses values of which there are none, or two that are equal."""
    if not values or len(set(values)) < len(values):
        raise ValueError(f"{name} must be at least one number and no number twice, got {list(values)}")


def _mask(mixture: Mixture, coordinates: ArrayLike) -> NDArray[np.bool_]:
    if not mixture.diagonal:
        raise ValueError("sigma must be diagonal for Adv(A), got a full covariance")
    inside = np.zeros(mixture.d, dtype=bool)
    chosen = np.asarray(coordinates)
    # An empty list has no dtype to speak of.
    inside[chosen if chosen.size else []] = True
    return inside


def _check(mu: Floats, sigma: Floats) -> None:
    if mu.ndim != 1 or not np.isfinite(mu).all():
        raise ValueError(f"mu must be a vector of finite numbers, got shape {mu.shape}")
    if not mu.any():
        raise ValueError(f"mu must not be zero: the classes would be the same, got {mu.size} zeros")
    if sigma.shape not in ((), mu.shape, mu.shape * 2):
        d = mu.size
        raise ValueError(f"sigma must be a number, ({d},) or ({d}, {d}) for mu of {d}, got shape {sigma.shape}")
    if not np.isfinite(sigma).all():
        raise ValueError("sigma must be finite, got NaN or infinity")
    if sigma.ndim < 2:
        if not (sigma > 0).all():
            raise ValueError(f"sigma must be positive, got {sigma.min()}")
        return
    if not np.allclose(sigma, sigma.T, rtol=1e-10, atol=0.0):
        raise ValueError("sigma must be symmetric as a covariance, got a matrix that is not")
    smallest, largest = np.linalg.eigvalsh(sigma)[[0, -1]]
    if smallest <= largest * sigma.shape[0] * np.finfo(np.float64).eps:
        raise ValueError(f"sigma must be positive definite as a covariance, got smallest eigenvalue {smallest}")
