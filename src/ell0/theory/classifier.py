# ruff: noqa: N803, N806  (scikit-learn calls the rows X)
"""A linear classifier for tables that proves how many changed features each decision survives."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import sparse
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import train_test_split
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from ..common import check_count
from .arrays import Bools, Floats, Ints
from .solver import Additions, Problem, duel_terms, logistic, solve
from .worst_case import Game, Slots, parts, slot_width, truncated

ROUNDS = 5
"""How often the convex part is solved again where the problem is a difference of convex functions."""

ROUND_TOL = 1e-2
"""Relative gap of each round: the rounds move further than this."""

HELD_OUT = 0.2
"""Share of the rows on which the best round is chosen."""


class NotAttainableError(ValueError):
    """No weights do better against this budget than a constant answer."""


class TruncatedLinearClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn is untyped
    """Truncated linear classifier, trained against the exact worst case of ``budget`` changed features.

        f(x) = T_k(w * x) + b,   the sum of the terms w_j x_j without the k largest and the k smallest
        L_m(v) = sum(v) - top_{k+m}(v) - bottom_{k-m}(v),   the lowest T_k that m <= k changes of any size can reach
        F(w, b) = mean_i log(1 + exp(-(L_m(y_i w * x_i) + y_i b))) + alpha/2 (|w|^2 + b^2)

    ([Beliaev22] eq. 3-5; two classes, y in {-1, 1}.) For budget = k there is no bottom term, F is convex, and it is
    solved to a relative duality gap ``tol``, kept in ``gap_``. For budget < k, bottom_{k-m} is replaced by its terms at
    the last weights, starting from plain logistic regression, and the best round on held-out rows is kept; ``gap_`` is
    then NaN. More than two classes: weights W (classes, d), and class a beats class b where
    T_k((W_a - W_b) * x) + b_a - b_b > 0; the loss is log(1 + sum of exp(-L_m) over the rivals of the row's class), and
    the answer is the class whose closest duel goes best.

    Differs from [Beliaev22]: k may be larger than the budget, which at finite d is far better. A layer of the paper's
    network would compare T_k(W_a * x) with T_k(W_b * x), whose joint worst case has no closed form.

    Args:
        k: terms removed on each side, ``0 <= 2k < d``.
        budget: features that the attacker may change; None: k. At most k, unless ``features="add"``.
        alpha: weight of the penalty.
        features: ``"any"``: a changed feature takes any value. ``"add"``: X is in {0, 1}, only 0 becomes 1, and k is 0:
            a linear classifier trained exactly against added features.
        attacked: labels of the classes whose rows the attacker changes, such as malware; None: all. Only with
            ``"add"``: the margin of a row that stays as it is would not be concave in the weights of the others.
        max_iter: iterations of the solver; if they do not suffice, `fit` warns, and ``gap_`` says how far it is.
        tol: relative duality gap.
        random_state: seed of the held-out rows, for budget < k.

    Attributes: ``classes_``, ``coef_`` (1 or classes, d), ``intercept_``, ``gap_``, ``objective_`` (F at the weights,
    or an upper bound within the gap), ``n_iter_``, ``budget_``, ``n_features_in_``.

    `fit` raises `NotAttainableError`, a ValueError, if no weights do better than a constant answer, to within tol: a
    fitted classifier that withstands nothing would read as robustness.
    """

    def __init__(
        self,
        k: int = 5,
        budget: int | None = None,
        alpha: float = 1e-4,
        features: Literal["any", "add"] = "any",
        attacked: ArrayLike | None = None,
        max_iter: int = 3000,
        tol: float = 1e-3,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.k = k
        self.budget = budget
        self.alpha = alpha
        self.features = features
        self.attacked = attacked
        self.max_iter = max_iter
        self.tol = tol
        self.random_state = random_state

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    classes_: NDArray[Any]
    coef_: Floats
    intercept_: Floats

    def fit(self, X: Any, y: Any) -> Self:
        """X: ``(n, d)``, dense or sparse.  y: ``(n,)``, two classes or more."""
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=np.float64)
        check_classification_targets(y)
        self._check_settings()
        self.classes_, label = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"y must have at least two classes, got one class, {self.classes_[0]!r}")
        self.attacked_ = self._check_attacked()
        self.budget_ = self._check_budget(self.k if self.budget is None else self.budget)
        x = self._rows(X)
        if self.features == "add" or self.budget_ == self.k:
            self._solve(self._problem(x, label), tol=self.tol)
            least = self.objective_ * (1 - self.gap_)
        else:
            least = self._solve_in_rounds(x, label)
        share = np.bincount(label) / len(label)
        constant = float(-(share * np.log(share)).sum())
        # with weights zero the lower bound is within tol of the constant's loss
        if constant - least <= 2 * self.tol * constant:
            del self.coef_, self.intercept_
            raise NotAttainableError(
                f"budget={self.budget_} is not attainable with k={self.k} on these rows: the best weights found have "
                "no lower worst-case loss than a constant answer; lower the budget"
            )
        return self

    def decision_function(self, X: Any) -> Floats:
        """f ``(n,)``, positive for ``classes_[1]``; with more classes the closest duel of each, ``(n, classes)``."""
        x = self._fitted_rows(X)
        if len(self.classes_) == 2:
            return np.asarray(self._sums(x, self.coef_[0]) + self.intercept_[0])
        closest = np.full((x.shape[0], len(self.classes_)), np.inf)
        for a in range(len(self.classes_)):
            for b in range(a):
                duel = self._sums(x, self.coef_[a] - self.coef_[b]) + self.intercept_[a] - self.intercept_[b]
                closest[:, a] = np.minimum(closest[:, a], duel)
                closest[:, b] = np.minimum(closest[:, b], -duel)
        return closest

    def predict(self, X: Any) -> NDArray[Any]:
        """The class of each row: ``(n,)``."""
        answers = self._answers(X)
        return self.classes_[answers]

    def worst_case_margin(self, X: Any, y: Any, budget: int | None = None) -> Floats:
        """The lowest margin of the true class that ``budget`` changes can reach, exactly: ``(n,)``.

        The margin is y f(x), or with more classes the closest duel of the true one; at 0 and below the row is lost.
        Rows of a class that is not attacked stay as they are. budget: None: the one trained for; any value, more than
        k: -inf.
        """
        x = self._fitted_rows(X)
        label = self._labels(y, x.shape[0])
        budget = self.budget_ if budget is None else check_count("budget", budget, 0)
        return np.asarray(self._duels(x, label, budget).min(1))

    def certified_radius(self, X: Any) -> Ints:
        """The largest m such that no change of at most m features alters the answer for a row: ``(n,)``. Deterministic.

        Two classes, no zero margin: exactly that; more: never above it. 0 where the margin is zero, and d where no
        change can alter the answer. The rows of every class count as attacked.
        """
        x = self._fitted_rows(X)
        label = self._answers(X)
        out = np.full(x.shape[0], x.shape[1])
        for own in range(len(self.classes_)):
            of_own = np.flatnonzero(label == own)
            for part, game in self._games(x[of_own]):
                for weight, intercept in self._rivals(own):
                    at_most = game(weight).radius(intercept, self.k, x.shape[1])
                    out[of_own[part]] = np.minimum(out[of_own[part]], np.maximum(at_most, 0))
        return out

    def _check_settings(self) -> None:
        check_count("max_iter", self.max_iter)
        for name, value in (("alpha", self.alpha), ("tol", self.tol)):
            if not (isinstance(value, int | float | np.number) and np.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be a finite number > 0, got {value!r}")
        if 2 * check_count("k", self.k, 0) >= self.n_features_in_:
            raise ValueError(f"k must satisfy 0 <= 2*k < n_features = {self.n_features_in_}, got k={self.k}")
        if self.features not in ("any", "add"):
            raise ValueError(f'features must be "any" or "add", got {self.features!r}')
        if self.features == "add" and self.k:
            raise ValueError(f'k must be 0 with features="add", got k={self.k}')
        if self.attacked is not None and self.features != "add":
            raise ValueError(f'attacked must be None unless features="add", got {self.attacked!r}')

    def _check_attacked(self) -> Bools:
        """True at the classes that are attacked: ``(classes,)``."""
        if self.attacked is None:
            return np.ones(len(self.classes_), bool)
        attacked = np.unique(np.asarray(self.attacked))
        if not attacked.size or not np.isin(attacked, self.classes_).all():
            raise ValueError(f"attacked must be labels among {self.classes_.tolist()}, got {self.attacked!r}")
        return np.isin(self.classes_, attacked)

    def _check_budget(self, budget: int) -> int:
        budget = check_count("budget", budget, 0)
        if self.features == "any" and budget > self.k:
            raise ValueError(
                f"budget must be at most k: more than k changes of any value break every truncated sum, "
                f"got budget={budget} with k={self.k}"
            )
        return budget

    def _fitted_rows(self, X: Any) -> sparse.csr_matrix:
        check_is_fitted(self, "coef_")
        return self._rows(validate_data(self, X, accept_sparse="csr", dtype=np.float64, reset=False))

    def _rows(self, X: Any) -> sparse.csr_matrix:
        """CSR of the nonzeros alone; raises ValueError where values must be 0 or 1 and are not."""
        x = sparse.csr_matrix(X, copy=sparse.issparse(X))
        x.sum_duplicates()
        x.eliminate_zeros()
        if self.features == "add" and not np.all(x.data == 1):
            raise ValueError(f'X must be in {{0, 1}} with features="add", got {x.data[x.data != 1][0]}')
        return x

    def _labels(self, y: Any, n: int) -> Ints:
        y = np.asarray(y)
        if y.shape != (n,) or not np.isin(y, self.classes_).all():
            raise ValueError(f"y must be ({n},) of the classes {self.classes_.tolist()}, got shape {y.shape}")
        return np.asarray(np.searchsorted(self.classes_, y))

    def _answers(self, X: Any) -> Ints:
        score = self.decision_function(X)
        return (score > 0).astype(np.int64) if score.ndim == 1 else score.argmax(1).astype(np.int64)

    def _rivals(self, own: int) -> Iterator[tuple[Floats, float]]:
        """Weights and intercept of each duel of one class."""
        for contrast in _contrasts(len(self.classes_))[own]:
            yield contrast @ self.coef_, float(contrast @ self.intercept_)

    def _sums(self, x: sparse.csr_matrix, weight: Floats) -> Floats:
        """T_k(w * x) of each row: ``(n,)``."""
        out = np.empty(x.shape[0])
        for part in parts(x.shape[0], slot_width(x, self.k)):
            out[part] = truncated(Slots.of(x[part], self.k).terms(weight), self.k)
        return out

    def _games(self, x: sparse.csr_matrix) -> Iterator[tuple[slice, Callable[[Floats], Game]]]:
        """Parts of the rows, each with the attacker's choices as a function of the weight."""
        d, add_only = x.shape[1], self.features == "add"
        for part in parts(x.shape[0], d if add_only else min(d, slot_width(x, self.k))):
            yield part, partial(Game.additions, x[part].toarray()) if add_only else Slots.of(x[part], self.k).game

    def _duels(self, x: sparse.csr_matrix, label: Ints, budget: int) -> Floats:
        """The lowest margin against each rival: ``(n, classes - 1)``."""
        out = np.empty((x.shape[0], len(self.classes_) - 1))
        for own in range(len(self.classes_)):
            of_own = np.flatnonzero(label == own)
            allowed = budget if self.attacked_[own] else 0
            for part, game in self._games(x[of_own]):
                for r, (weight, intercept) in enumerate(self._rivals(own)):
                    out[of_own[part], r] = game(weight).value(allowed, self.k) + intercept
        return out

    def _problem(self, x: sparse.csr_matrix, label: Ints) -> Problem:
        """The convex problem that takes no term out at the bottom."""
        problem = Problem(x, Slots.of(x, self.k), _contrasts(len(self.classes_))[label], self.alpha, top=0)
        if self.features == "any":
            return replace(problem, top=self.k + self.budget_)
        additions = []
        for own in np.flatnonzero(self.attacked_ & (self.budget_ > 0)):
            rows = np.flatnonzero(label == own)
            additions += [Additions(rows, r, self.budget_, x[rows]) for r in range(len(self.classes_) - 1)]
        return replace(problem, additions=tuple(additions))

    def _solve(self, problem: Problem, *, tol: float, start: Floats | None = None) -> Floats:
        """Solve a convex problem and take its weights, ``gap_``, ``objective_`` and ``n_iter_``."""
        if start is None:
            start = np.zeros((problem.contrast.shape[2], self.n_features_in_ + 1))
        found = solve(problem, start, tol=tol, max_iter=self.max_iter)
        self.objective_, self.gap_, self.n_iter_ = found.upper, found.gap, found.iterations
        if self.gap_ > tol:
            warnings.warn(
                f"gap_ is {self.gap_:.2g} after max_iter={self.max_iter} iterations, above tol={tol:.2g}; "
                "raise max_iter or alpha",
                ConvergenceWarning,
                stacklevel=4,
            )
        return self._take(found.params)

    def _take(self, params: Floats) -> Floats:
        self.coef_, self.intercept_ = params[:, :-1].copy(), params[:, -1].copy()
        return params

    def _solve_in_rounds(self, x: sparse.csr_matrix, label: Ints) -> float:
        """A difference of convex functions: linearise at the last weights, solve, and keep the best on held-out rows.

        Best is the highest robust accuracy, then the lowest worst-case loss. Returns the lowest objective of any round,
        which need not be that of the round kept.
        """
        ours = held = np.arange(len(label))
        # every class is in both, or all rows are where a class has too few
        if np.bincount(label).min() * HELD_OUT >= 1:
            ours, held = train_test_split(ours, test_size=HELD_OUT, stratify=label, random_state=self.random_state)
        problem = self._problem(x[ours], label[ours])
        rounds = []
        params = self._solve(replace(problem, top=0), tol=ROUND_TOL)
        spent = self.n_iter_
        for last in range(ROUNDS + 1):
            duels = self._duels(x, label, self.budget_)
            losses = logistic(duels)[1]
            score = float((duels[held].min(1) > 0).mean()), -float(losses[held].mean())
            rounds.append((score, float(losses.mean()) + self.alpha / 2 * float((params**2).sum()), params))
            if last < ROUNDS:
                params = self._solve(self._linearised(problem), tol=ROUND_TOL, start=params)
                spent += self.n_iter_
        _, self.objective_, best = max(rounds, key=lambda one: one[0])
        self._take(best)
        self.gap_, self.n_iter_ = np.nan, spent
        return min(loss for _, loss, _ in rounds)

    def _linearised(self, problem: Problem) -> Problem:
        """The problem without the terms that leave at the bottom now, which is never below the true one.

        -bottom(v) is a maximum over sets, so the set of the moment gives a lower bound of rho, equal to it here.
        """
        terms = duel_terms(problem, self.coef_)
        bottom = np.argsort(np.argsort(terms, -1), -1) < self.k - self.budget_
        return replace(problem, keep=~bottom)


def _contrasts(classes: int) -> Floats:
    """[own, rival] times the outputs is the margin of one class over another: ``(classes, classes - 1, outputs)``."""
    if classes == 2:
        return np.array([[[-1.0]], [[1.0]]])
    one = np.eye(classes)
    return np.array([[one[own] - one[other] for other in range(classes) if other != own] for own in range(classes)])
