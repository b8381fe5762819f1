"""The attacker of a truncated sum: the lowest value of it that changed units can reach, and where it is reached.

A row x and weights w give one term a unit, u_g = sum of w_j x_j over the features j of unit g; T_k(u) is the sum of the
terms without the k largest and the k smallest ([Beliaev22] eq. 3). T_k never falls when a term rises, so an attacker
who has chosen the units does best with the lowest value of each, and the choice is an order statistic:

* any value: a movable unit goes below all others, so the movable units with the largest terms are taken;
* add-only, x in {0, 1}: a feature that may be added has the term 0 and gets w_j, so the most negative w_j are taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from scipy import sparse

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

ENTRIES = 4_000_000
"""Terms held at once when rows are gone through in parts."""


@dataclass(frozen=True, eq=False)
class Threat:
    """What may change.

    unit: ``(d,)``, the unit of each feature, 0 to units - 1.  mutable: ``(d,)``, False where a feature is frozen.
    add_only: a change makes a 0 a 1 and nothing else; every feature is a unit of its own.
    """

    unit: Ints
    mutable: Bools
    add_only: bool

    @property
    def units(self) -> int:
        return int(self.unit.max()) + 1

    def any_of(self, features: Bools) -> Bools:
        """True at the units that have one of these features: ``(units,)``. features: ``(d,)``."""
        return np.bincount(self.unit[features], minlength=self.units) > 0


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows as tables of terms: slot s of row i holds the term of one unit, or nothing.

    matrix: ``(n * width, d)`` CSR; times the weights it gives the terms.  unit: ``(n, width)``, -1 at an empty slot.
    """

    matrix: sparse.csr_matrix
    unit: Ints

    @cached_property
    def summed(self) -> sparse.csr_matrix:
        """``(n, d)``; times the weights it gives the sums of all terms."""
        n, width = self.unit.shape
        ends = self.matrix.indptr[::width]
        return sparse.csr_matrix((self.matrix.data, self.matrix.indices, ends), shape=(n, self.matrix.shape[1]))

    def terms(self, weight: Floats) -> Floats:
        """``(n, width)`` for a weight ``(d,)``."""
        out: Floats = (self.matrix @ weight).reshape(self.unit.shape)
        return out

    def within(self, units: Bools) -> Bools:
        """True at the slots of these units: ``(n, width)``; empty slots stand for the units without a slot.

        units: ``(units,)``.
        """
        filled = self.unit >= 0
        chosen = units[self.unit] & filled
        without_slot = units.sum() - chosen.sum(1, keepdims=True)
        out: Bools = chosen | (~filled & ((~filled).cumsum(1) <= without_slot))
        return out


def slots(x: sparse.csr_matrix, threat: Threat, *, k: int, every: bool = False) -> Rows:
    """Rows with a slot for each unit that has a nonzero, and 2k + 1 empty ones, or one for ``every`` unit.

    Terms that are zero tie, so how many of them an order statistic sees is all that counts: of the units without a
    nonzero at most k leave at the top, k at the bottom, and it takes k + 1 <= 2k + 1 movable ones to break a sum.
    """
    entries = x.tocoo()
    n, units = x.shape[0], threat.units
    row, feature = entries.row.astype(np.int64), entries.col.astype(np.int64)
    keys, of_entry = np.unique(row * units + threat.unit[feature], return_inverse=True)
    filled = np.bincount(keys // units, minlength=n)
    if every:
        width, position = units, keys % units
        unit = np.tile(np.arange(units), (n, 1))
    else:
        width = min(units, int(filled.max(initial=0)) + 2 * k + 1)
        position = np.arange(len(keys)) - np.repeat(filled.cumsum() - filled, filled)
        unit = np.full((n, width), -1)
        unit[keys // units, position] = keys % units
    slot = (keys // units * width + position)[of_entry]
    matrix = sparse.csr_matrix((entries.data, (slot, feature)), shape=(n * width, x.shape[1]))
    return Rows(matrix, unit)


def truncated(terms: Floats, k: int) -> Floats:
    """T_k over the last axis: the sum of what stays, never all terms minus what leaves, which cancels."""
    out: Floats = np.sort(terms, -1)[..., k : terms.shape[-1] - k].sum(-1)
    return out


@dataclass(frozen=True, eq=False)
class Game:
    """One truncated sum of every row, and what the attacker can make of its terms. All ``(n, width)``.

    terms: as they are.  lowest: the least each can become, -inf where it is movable to any value.
    rank: the order in which the attacker takes them; ``width`` at the terms that no change lowers.
    """

    terms: Floats
    lowest: Floats
    rank: Ints

    def taken(self, budget: Ints) -> Bools:
        """The slots that ``budget`` (n,) changes take."""
        return self.rank < np.minimum(budget, self.terms.shape[1])[:, None]

    def value(self, budget: Ints, k: int) -> Floats:
        """The lowest T_k that ``budget`` (n,) changes can reach: ``(n,)``.

        Any value, m <= k movable units taken: the sum without its k - m smallest terms, its m largest movable ones
        and the k largest of the rest; with no zero weight that is sum - top_{k+m} - bottom_{k-m}. More than k: -inf.
        """
        return truncated(np.where(self.taken(budget), self.lowest, self.terms), k)


def play(rows: Rows, threat: Threat, weight: Floats) -> Game:
    """The attacker's choices against the sum with this weight ``(d,)``. Add-only needs rows with every slot."""
    terms = rows.terms(weight)
    if threat.add_only:
        present = np.asarray(rows.matrix.getnnz(1)).reshape(terms.shape) > 0
        helps = ~present & (threat.mutable & (weight < 0))
        lowest = np.where(helps, weight, terms)
        order = lowest
    else:
        helps = rows.within(threat.any_of(threat.mutable & (weight != 0)))
        lowest = np.where(helps, -np.inf, terms)
        order = -terms
    first = np.argsort(np.where(helps, order, np.inf), 1, kind="stable")
    rank = np.empty_like(first)
    np.put_along_axis(rank, first, np.arange(terms.shape[1])[None], 1)
    return Game(terms, lowest, np.where(helps, rank, terms.shape[1]))


def radius(game: Game, intercept: float, k: int, units: int) -> Ints:
    """The most changes after which T_k + intercept is still positive, whatever they are: ``(n,)``.

    -1 where it is not positive to begin with, ``units`` where nothing can break it. By bisection: the lowest value
    falls as the budget rises.
    """
    holds = np.full(len(game.terms), -1)
    fails = np.full(len(game.terms), units + 1)
    while np.any(fails - holds > 1):
        middle = np.where(fails - holds > 1, (holds + fails) // 2, np.maximum(holds, 0))
        positive = game.value(middle, k) + intercept > 0
        holds, fails = np.where(positive & (middle > holds), middle, holds), np.where(positive, fails, middle)
    return holds


def attack(x: Floats, rows: Rows, threat: Threat, weight: Floats, budget: int) -> Floats:
    """x ``(n, d)`` with the at most ``budget`` changes that make the truncated sum lowest; rows with every slot.

    Any value, ``budget <= k``: a taken unit gets the smallest term of its row, which is finite and as good as -inf,
    since a term at the bottom is truncated; its mutable feature with the largest |w_j| carries the change.
    """
    game = play(rows, threat, weight)
    row, unit = np.nonzero(game.taken(np.full(len(x), budget)))
    x_adv = x.copy()
    if threat.add_only:
        x_adv[row, unit] = 1.0
        return x_adv
    size = np.where(threat.mutable, np.abs(weight), -1.0)
    strongest = np.zeros(threat.units, np.int64)
    by_size = np.argsort(size, kind="stable")
    strongest[threat.unit[by_size]] = by_size  # the last write, the largest, stays
    feature = strongest[unit]
    x_adv[row, feature] += (game.terms.min(1)[row] - game.terms[row, unit]) / weight[feature]
    return x_adv


def parts(n: int, width: int) -> Iterator[slice]:
    """Slices of n rows of this width, `ENTRIES` terms at a time."""
    step = max(ENTRIES // max(width, 1), 1)
    return (slice(start, min(start + step, n)) for start in range(0, n, step))
