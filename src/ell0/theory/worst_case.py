"""The attacker of a truncated sum: the lowest value of it that changed features can reach.

A row x and weights w give the terms u_j = w_j x_j; T_k(u) is the sum of the terms without the k largest and the k
smallest ([Beliaev22] eq. 3). T_k never falls when a term rises, so an attacker who has chosen the features does best
with the lowest value of each, and the choice is an order statistic:

* any value: a feature of nonzero weight goes below all others, so those with the largest terms are taken;
* add-only, x in {0, 1}, k = 0: an absent feature has the term 0 and gets w_j, so the most negative w_j are taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .arrays import Floats, Ints

ENTRIES = 4_000_000
"""Terms held in memory at once."""


@dataclass(frozen=True, eq=False)
class Game:
    """One truncated sum of every row, and how far the attacker can lower its terms. All ``(n, d)``.

    terms: as they are.  lowest: the least each can become, -inf where it can take any value.
    rank: the order in which the attacker takes them; ``d`` at the terms that no change lowers.
    """

    terms: Floats
    lowest: Floats
    rank: Ints

    @classmethod
    def of(cls, x: Floats, weight: Floats, *, add_only: bool) -> Game:
        """x: ``(n, d)``, in {0, 1} if the attacker only adds.  weight: ``(d,)``."""
        terms = x * weight
        if add_only:
            helps = (x == 0) & (weight < 0)
            lowest = order = np.where(helps, weight, terms)
        else:
            helps = np.broadcast_to(weight != 0, x.shape)
            lowest, order = np.where(helps, -np.inf, terms), -terms
        taken = np.argsort(np.where(helps, order, np.inf), 1, kind="stable")
        rank = np.empty_like(taken)
        np.put_along_axis(rank, taken, np.arange(len(weight))[None], 1)
        return cls(terms, lowest, np.where(helps, rank, len(weight)))

    def value(self, budget: Ints | int, k: int) -> Floats:
        """The lowest T_k that ``budget`` changes can reach: ``(n,)``; budget: ``(n, 1)`` or one for all rows.

        Any value, m <= k movable terms taken: the sum without its k - m smallest terms, its m largest movable ones
        and the k largest of the rest; with no zero weight that is sum - top_{k+m} - bottom_{k-m}. More than k: -inf.
        """
        taken = self.rank < np.minimum(budget, self.terms.shape[1])
        return truncated(np.where(taken, self.lowest, self.terms), k)

    def radius(self, intercept: float, k: int) -> Ints:
        """The most changes after which T_k + intercept is still positive, whatever they are: ``(n,)``.

        -1 where it is not positive to begin with, ``d`` where nothing can break it. By bisection: the lowest value
        falls as the budget rises.
        """
        n, d = self.terms.shape
        holds, fails = np.full(n, -1), np.full(n, d + 1)
        while np.any(fails - holds > 1):
            middle = np.where(fails - holds > 1, (holds + fails) // 2, np.maximum(holds, 0))
            positive = self.value(middle[:, None], k) + intercept > 0
            holds, fails = np.where(positive & (middle > holds), middle, holds), np.where(positive, fails, middle)
        return holds


def truncated(terms: Floats, k: int) -> Floats:
    """T_k over the last axis: the sum of what stays, never all terms minus what leaves, which cancels."""
    return np.asarray(np.sort(terms, -1)[..., k : terms.shape[-1] - k].sum(-1))


def parts(n: int, width: int) -> Iterator[slice]:
    """Slices of n rows of this width, `ENTRIES` terms at a time."""
    step = max(ENTRIES // max(width, 1), 1)
    return (slice(start, min(start + step, n)) for start in range(0, n, step))
