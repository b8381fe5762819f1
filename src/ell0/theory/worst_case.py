"""The attacker of a truncated sum: the lowest value of it that changed features can reach, and where it is reached.

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
from scipy import sparse

from .arrays import Bools, Floats, Ints

ENTRIES = 4_000_000
"""Terms held in memory at once."""


@dataclass(frozen=True, eq=False)
class Game:
    """One truncated sum of every row, and how far the attacker can lower its terms. All ``(n, width)``.

    terms: as they are.  lowest: the least each can become, -inf where it can take any value.
    rank: the order in which the attacker takes them; ``width`` at the terms that no change lowers.
    """

    terms: Floats
    lowest: Floats
    rank: Ints

    @classmethod
    def any_value(cls, terms: Floats, movable: Bools) -> Game:
        """A movable term can take any value: the largest go first."""
        return cls(terms, np.where(movable, -np.inf, terms), _rank(-terms, movable))

    @classmethod
    def additions(cls, x: Floats, weight: Floats) -> Game:
        """Only 0 becomes 1: the absent features of most negative weight go first. x: ``(n, d)``, 0 or 1."""
        terms = x * weight
        helps = (x == 0) & (weight < 0)
        lowest = np.where(helps, weight, terms)
        return cls(terms, lowest, _rank(lowest, helps))

    def taken(self, budget: Ints | int) -> Bools:
        """The slots that ``budget`` changes take; budget: ``(n, 1)`` or one for all rows."""
        return self.rank < np.minimum(budget, self.terms.shape[1])

    def value(self, budget: Ints | int, k: int) -> Floats:
        """The lowest T_k that ``budget`` changes can reach: ``(n,)``.

        Any value, m <= k movable terms taken: the sum without its k - m smallest terms, its m largest movable ones
        and the k largest of the rest; with no zero weight that is sum - top_{k+m} - bottom_{k-m}. More than k: -inf.
        """
        return truncated(np.where(self.taken(budget), self.lowest, self.terms), k)

    def radius(self, intercept: float, k: int, d: int) -> Ints:
        """The most changes after which T_k + intercept is still positive, whatever they are: ``(n,)``.

        -1 where it is not positive to begin with, ``d`` where nothing can break it. By bisection: the lowest value
        falls as the budget rises.
        """
        holds = np.full(len(self.terms), -1)
        fails = np.full(len(self.terms), d + 1)
        while np.any(fails - holds > 1):
            middle = np.where(fails - holds > 1, (holds + fails) // 2, np.maximum(holds, 0))
            positive = self.value(middle[:, None], k) + intercept > 0
            holds, fails = np.where(positive & (middle > holds), middle, holds), np.where(positive, fails, middle)
        return holds


@dataclass(frozen=True, eq=False)
class Slots:
    """Sparse rows as tables of terms: slot s of row i holds the term of one feature, or nothing.

    matrix: ``(n * width, d)`` CSR; times the weights it gives the terms.  feature: ``(n, width)``, -1 if empty.
    """

    matrix: sparse.csr_matrix
    feature: Ints

    @classmethod
    def of(cls, x: sparse.csr_matrix, k: int) -> Slots:
        """A slot for each nonzero, and 2k + 1 empty ones that stand for the zeros of a row.

        Terms that are zero tie, so how many of them an order statistic sees is all that counts: at most k leave at the
        top, k at the bottom, and it takes k + 1 <= 2k + 1 movable ones to break a sum.
        """
        n, d = x.shape
        filled = np.diff(x.indptr)
        width = min(d, slot_width(x, k))
        row = np.repeat(np.arange(n), filled)
        slot = np.arange(x.nnz) - np.repeat(x.indptr[:-1], filled)
        feature = np.full((n, width), -1)
        feature[row, slot] = x.indices
        return cls(sparse.csr_matrix((x.data, (row * width + slot, x.indices)), shape=(n * width, d)), feature)

    def terms(self, weight: Floats) -> Floats:
        """``(n, width)`` for a weight ``(d,)``."""
        return np.asarray((self.matrix @ weight).reshape(self.feature.shape))

    def game(self, weight: Floats) -> Game:
        """The attacker's choices if a feature of nonzero weight can take any value. weight: ``(d,)``."""
        filled, moves = self.feature >= 0, weight != 0
        movable = moves[self.feature] & filled
        # empty slots stand for the movable features without a slot, as far as there are some
        without_slot = moves.sum() - movable.sum(1, keepdims=True)
        movable |= ~filled & ((~filled).cumsum(1) <= without_slot)
        return Game.any_value(self.terms(weight), movable)


def truncated(terms: Floats, k: int) -> Floats:
    """T_k over the last axis: the sum of what stays, never all terms minus what leaves, which cancels."""
    return np.asarray(np.sort(terms, -1)[..., k : terms.shape[-1] - k].sum(-1))


def slot_width(x: sparse.csr_matrix, k: int) -> int:
    """The most nonzeros of a row, and 2k + 1."""
    return int(np.diff(x.indptr).max(initial=0)) + 2 * k + 1


def parts(n: int, width: int) -> Iterator[slice]:
    """Slices of n rows of this width, `ENTRIES` terms at a time."""
    step = max(ENTRIES // max(width, 1), 1)
    return (slice(start, min(start + step, n)) for start in range(0, n, step))


def _rank(order: Floats, helps: Bools) -> Ints:
    """Places in ascending order among the terms where ``helps``; ``width`` elsewhere."""
    first = np.argsort(np.where(helps, order, np.inf), 1, kind="stable")
    rank = np.empty_like(first)
    np.put_along_axis(rank, first, np.arange(order.shape[1])[None], 1)
    return np.where(helps, rank, order.shape[1])
