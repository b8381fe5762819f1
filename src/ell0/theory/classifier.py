# ruff: noqa: N803, N806  (scikit-learn calls the rows X)
"""A linear classifier for tables that proves how many changed features each decision survives."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import combinations
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
from .arrays import Floats, Ints
from .solver import Additions, Problem, duel_terms, logistic, solve
from .worst_case import Game, parts, truncated

ROUNDS = 5
"""How often the convex part is solved again where the problem is a difference of convex functions."""
ROUND_TOL = 1e-2
"""Relative gap of each round: the rounds move further than this."""
DEFAULTS = (5, 2, 1, 0)
"""Values of k that are tried where none is given."""
HELD_OUT = 0.2
"""Share of the rows on which the best round is chosen."""


class NotAttainableError(ValueError):
    """No weights do better against this budget than a constant answer."""


def certified_scorer(budget: int) -> Callable[[Any, Any, Any], float]:
    """A scorer for scikit-learn: the share of rows classified rightly whatever ``budget`` changed features hold.

        GridSearchCV(TruncatedLinearClassifier(), {"k": [1, 3, 9]}, scoring=certified_scorer(1)).fit(X, y).best_params_

    It scores a `TruncatedLinearClassifier`, by `worst_case_margin`, whatever budget it was trained for.
    """
    return partial(_certified_share, budget=check_count("budget", budget, 0))


def _certified_share(model: Any, X: Any, y: Any, *, budget: int) -> float:
    if not isinstance(model, TruncatedLinearClassifier):
        rule = "estimator must be a TruncatedLinearClassifier itself for certified_scorer: scale X before"
        raise ValueError(f"{rule}, got {type(model).__name__}")
    return float((model.worst_case_margin(X, y, budget) > 0).mean())


class TruncatedLinearClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn is untyped
    """Truncated linear classifier, trained against the exact worst case of ``budget`` changed features.

        f(x) = T_k(w * x) + b,   the sum of the terms w_j x_j without the k largest and the k smallest
        L_m(v) = sum(v) - top_{k+m}(v) - bottom_{k-m}(v),   the lowest T_k that m <= k changes of any size can reach
        F(w, b) = mean_i log(1 + exp(-(L_m(y_i w * x_i) + y_i b))) + alpha/2 (|w|^2 + b^2)

    ([Beliaev22] eq. 3-5; two classes, y in {-1, 1}.) For budget = k, F is convex and solved to a relative duality gap
    ``tol``. For budget < k, bottom_{k-m} is replaced by its terms at the last weights, starting from plain logistic
    regression, and the best round on held-out rows is kept. More than two classes: weights W (classes, d), and class a
    beats class b where T_k((W_a - W_b) * x) + b_a - b_b > 0; the loss is log(1 + sum of exp(-L_m) over the rivals of
    the row's class), and the answer is the class whose closest duel goes best.

    Differs from [Beliaev22]: k may be larger than the budget, which at finite d is far better. A layer of the paper's
    network would compare T_k(W_a * x) with T_k(W_b * x), whose joint worst case has no closed form.

    Args:
        k: terms removed on each side, ``0 <= 2k < d``. None: the budget, or 0 with ``"add"``; without a budget, the
            largest of 5, 2, 1 and 0 with which more training rows stay right than with a constant answer. See ``k_``.
        budget: features that the attacker may change; None: k. At most k, unless ``features="add"``.
        alpha: weight of the penalty.
        features: ``"any"``: a changed feature takes any value. ``"add"``: X is in {0, 1}, only 0 becomes 1, and k is 0.
        attacked: labels of the classes whose rows the attacker changes, such as malware; None: all. Only with
            ``"add"``: the margin of a row that stays as it is would not be concave in the weights of the others.
        max_iter: iterations of the solver; if they do not suffice, `fit` warns, and ``gap_`` says how far it is.
        tol: relative duality gap.
        random_state: seed of the held-out rows, for budget < k.

    Attributes: ``classes_``, ``coef_`` (1 or classes, d), ``intercept_``, ``k_``, ``budget_``, ``gap_`` (NaN for
    budget < k), ``objective_`` (F at the weights, or an upper bound within the gap), ``n_iter_``, ``n_features_in_``.

    `fit` raises `NotAttainableError`, a ValueError, if budget > 0 and no weights do better than a constant answer, to
    within tol.
    """

    k_: int
    budget_: int

    def __init__(
        self,
        k: int | None = None,
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
        tags.input_tags.sparse = self.features == "add"
        return tags

    def fit(self, X: Any, y: Any) -> Self:
        """X: ``(n, d)``, with ``"add"`` also sparse.  y: ``(n,)``, two classes or more."""
        X, y = validate_data(self, X, y, accept_sparse=self.features == "add", dtype=np.float64)
        check_classification_targets(y)
        self.classes_, label = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"y must have at least two classes, got one class, {self.classes_[0]!r}")
        candidates = self._check_settings()
        x = self._rows(X)
        for self.k_ in candidates:
            self.budget_ = self.k_ if self.budget is None else self.budget_
            if self._beats_constant(x, label):
                return self
        del self.coef_, self.intercept_
        raise NotAttainableError(
            f"budget={self.budget_} is not attainable with k={self.k_} on these rows: the best weights found have "
            "no lower worst-case loss than a constant answer; lower the budget"
        )

    def _beats_constant(self, x: sparse.csr_matrix, label: Ints) -> bool:
        """Trains with ``k_``; whether the worst case is better than that of a constant answer, or none attacks."""
        if self.features == "add" or self.budget_ == self.k_:
            self._solve(self._problem(x, label), tol=self.tol)
            least = self.objective_ * (1 - self.gap_)
        else:
            least = self._solve_in_rounds(x, label)
        share = np.bincount(label) / len(label)
        constant = float(-(share * np.log(share)).sum())
        if self.budget_ == 0:
            return True
        if self.k is None and self.budget is None:
            return bool((self._duels(x, label, self.budget_).min(1) > 0).mean() > share.max())
        # with weights zero the lower bound is within tol of the constant's loss
        return constant - least > 2 * self.tol * constant

    def decision_function(self, X: Any) -> Floats:
        """f ``(n,)``, positive for ``classes_[1]``; with more classes the closest duel of each, ``(n, classes)``."""
        x = self._fitted_rows(X)
        closest = np.full((x.shape[0], len(self.classes_)), np.inf)
        for part in parts(*x.shape):
            rows = x[part].toarray()
            if len(self.classes_) == 2:
                closest[part, 1] = truncated(rows * self.coef_[0], self.k_) + self.intercept_[0]
            for a, b in combinations(range(len(self.coef_)), 2):
                sums = truncated(rows * (self.coef_[b] - self.coef_[a]), self.k_)
                duel = sums + self.intercept_[b] - self.intercept_[a]
                closest[part, b] = np.minimum(closest[part, b], duel)
                closest[part, a] = np.minimum(closest[part, a], -duel)
        return closest[:, 1] if len(self.classes_) == 2 else closest

    def predict(self, X: Any) -> NDArray[Any]:
        """The class of each row: ``(n,)``."""
        score = self.decision_function(X)
        return np.asarray(self.classes_[(score > 0).astype(np.int64) if score.ndim == 1 else score.argmax(1)])

    def worst_case_margin(self, X: Any, y: Any, budget: int | None = None) -> Floats:
        """The lowest margin of the true class that ``budget`` changes can reach, exactly: ``(n,)``.

        The margin is y f(x), or with more classes the closest duel of the true one; at 0 and below the row is lost.
        Rows of a class that is not attacked stay as they are. budget: None: the one trained for.
        """
        x, y = self._fitted_rows(X), np.asarray(y)
        if y.shape != x.shape[:1] or not np.isin(y, self.classes_).all():
            raise ValueError(f"y must be ({x.shape[0]},) of the classes {self.classes_.tolist()}, got shape {y.shape}")
        budget = self.budget_ if budget is None else check_count("budget", budget, 0)
        return np.asarray(self._duels(x, np.searchsorted(self.classes_, y), budget).min(1))

    def certified_radius(self, X: Any) -> Ints:
        """The largest m such that no change of at most m features alters the answer for a row: ``(n,)``. Deterministic.

        Two classes, no zero margin: exactly that; more: never above it. 0 where the margin is zero, and d where no
        change can alter the answer. The rows of every class count as attacked.
        """
        x = self._fitted_rows(X)
        label = np.searchsorted(self.classes_, self.predict(X))
        out = np.full(x.shape[0], x.shape[1])
        for rows, _, game, intercept in self._games(x, label):
            out[rows] = np.minimum(out[rows], np.maximum(game.radius(intercept, self.k_), 0))
        return out

    def _check_settings(self) -> list[int]:
        """Sets ``attacked_`` ``(classes,)``, ``k_`` and ``budget_``, or raises ValueError.

        Returns the values of k to try, in this order.
        """
        check_count("max_iter", self.max_iter)
        for name, value in (("alpha", self.alpha), ("tol", self.tol)):
            if not (isinstance(value, int | float | np.number) and np.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be a finite number > 0, got {value!r}")
        if self.features not in ("any", "add"):
            raise ValueError(f'features must be "any" or "add", got {self.features!r}')
        if self.features == "add" and self.k:
            raise ValueError(f'k must be 0 with features="add", got k={self.k}')
        if self.attacked is not None and self.features != "add":
            raise ValueError(f'attacked must be None unless features="add", got {self.attacked!r}')
        attacked = self.classes_ if self.attacked is None else np.unique(np.asarray(self.attacked))
        if not attacked.size or not np.isin(attacked, self.classes_).all():
            raise ValueError(f"attacked must be labels among {self.classes_.tolist()}, got {self.attacked!r}")
        self.attacked_ = np.isin(self.classes_, attacked)
        budget = None if self.budget is None else check_count("budget", self.budget, 0)
        if self.k is not None:
            candidates = [check_count("k", self.k, 0)]
        elif self.features == "add":
            candidates = [0]
        else:
            candidates = [k for k in DEFAULTS if 2 * k < self.n_features_in_] if budget is None else [budget]
        self.k_ = candidates[0]
        self.budget_ = self.k_ if budget is None else budget
        if 2 * self.k_ >= self.n_features_in_:
            raise ValueError(f"k must satisfy 0 <= 2*k < n_features = {self.n_features_in_}, got k={self.k_}")
        if self.features == "any" and self.budget_ > self.k_:
            rule = "budget must be at most k: more than k changes of any value break every truncated sum"
            raise ValueError(f"{rule}, got budget={self.budget_} with k={self.k_}")
        return candidates

    def _fitted_rows(self, X: Any) -> sparse.csr_matrix:
        check_is_fitted(self, "coef_")
        sparse_too = self.features == "add"
        return self._rows(validate_data(self, X, accept_sparse=sparse_too, dtype=np.float64, reset=False))

    def _rows(self, X: Any) -> sparse.csr_matrix:
        """CSR of the nonzeros alone; raises ValueError where values must be 0 or 1 and are not."""
        x = sparse.csr_matrix(X, copy=sparse.issparse(X))
        x.sum_duplicates()
        x.eliminate_zeros()
        if self.features == "add" and not np.all(x.data == 1):
            raise ValueError(f'X must be in {{0, 1}} with features="add", got {x.data[x.data != 1][0]}')
        return x

    def _games(self, x: sparse.csr_matrix, label: Ints) -> Iterator[tuple[Ints, int, Game, float]]:
        """The attacker's choices against each rival: rows of one class, rival, game, intercept."""
        for own, contrasts in enumerate(_contrasts(len(self.classes_))):
            of_own = np.flatnonzero(label == own)
            for part in parts(len(of_own), x.shape[1]):
                rows = x[of_own[part]].toarray()
                for rival, contrast in enumerate(contrasts):
                    game = Game.of(rows, contrast @ self.coef_, add_only=self.features == "add")
                    yield of_own[part], rival, game, float(contrast @ self.intercept_)

    def _duels(self, x: sparse.csr_matrix, label: Ints, budget: int) -> Floats:
        """The lowest margin against each rival: ``(n, classes - 1)``."""
        out = np.empty((x.shape[0], len(self.classes_) - 1))
        allowed = np.where(self.attacked_[label], budget, 0)[:, None]
        for rows, rival, game, intercept in self._games(x, label):
            out[rows, rival] = game.value(allowed[rows], self.k_) + intercept
        return out

    def _problem(self, x: sparse.csr_matrix, label: Ints) -> Problem:
        """The convex problem that takes no term out at the bottom."""
        contrast = _contrasts(len(self.classes_))[label]
        if self.features == "any":
            return Problem(x, contrast, self.alpha, top=self.k_ + self.budget_)
        additions = []
        for own in np.flatnonzero(self.attacked_ & (self.budget_ > 0)):
            rows = np.flatnonzero(label == own)
            additions += [Additions(rows, r, self.budget_, x[rows]) for r in range(len(self.classes_) - 1)]
        return Problem(x, contrast, self.alpha, additions=tuple(additions))

    def _solve(self, problem: Problem, *, tol: float, start: Floats | None = None) -> Floats:
        """Solve a convex problem and take its weights, ``gap_``, ``objective_`` and ``n_iter_``."""
        zero = np.zeros((problem.contrast.shape[2], self.n_features_in_ + 1))
        found = solve(problem, zero if start is None else start, tol=tol, max_iter=self.max_iter)
        self.objective_, self.gap_, self.n_iter_ = found.upper, found.gap, found.iterations
        if self.gap_ > tol:
            found_gap = f"gap_ is {self.gap_:.2g} after max_iter={self.max_iter} iterations, above tol={tol:.2g}"
            warnings.warn(f"{found_gap}; raise max_iter or alpha", ConvergenceWarning, stacklevel=5)
        self.coef_, self.intercept_ = found.params[:, :-1].copy(), found.params[:, -1].copy()
        return found.params

    def _solve_in_rounds(self, x: sparse.csr_matrix, label: Ints) -> float:
        """A difference of convex functions: linearise at the last weights, solve, and keep the best on held-out rows.

        Best: highest robust accuracy, then lowest worst-case loss. Returns the lowest objective of any round.
        """
        ours = held = np.arange(len(label))
        # every class is in both, or all rows are where a class has too few
        if np.bincount(label).min() * HELD_OUT >= 1:
            ours, held = train_test_split(ours, test_size=HELD_OUT, stratify=label, random_state=self.random_state)
        problem = self._problem(x[ours], label[ours])
        rounds: list[tuple[tuple[float, float], float, Floats]] = []
        spent, params = 0, None
        for _ in range(ROUNDS + 1):
            convex = replace(problem, top=0) if params is None else self._linearised(problem)
            params = self._solve(convex, tol=ROUND_TOL, start=params)
            spent += self.n_iter_
            duels = self._duels(x, label, self.budget_)
            losses = logistic(duels)[1]
            score = float((duels[held].min(1) > 0).mean()), -float(losses[held].mean())
            rounds.append((score, float(losses.mean()) + self.alpha / 2 * float((params**2).sum()), params))
        _, self.objective_, best = max(rounds, key=lambda one: one[0])
        self.coef_, self.intercept_ = best[:, :-1].copy(), best[:, -1].copy()
        self.gap_, self.n_iter_ = np.nan, spent
        return min(loss for _, loss, _ in rounds)

    def _linearised(self, problem: Problem) -> Problem:
        """The problem without the terms that leave at the bottom now, which is never below the true one.

        -bottom(v) is a maximum over sets, so the set of the moment gives a lower bound of rho, equal to it here.
        """
        rank = np.argsort(np.argsort(duel_terms(problem, self.coef_), -1), -1)
        return replace(problem, keep=rank >= self.k_ - self.budget_)


def _contrasts(classes: int) -> Floats:
    """[own, rival] times the outputs is the margin of one class over another: ``(classes, classes - 1, outputs)``."""
    if classes == 2:
        return np.array([[[-1.0]], [[1.0]]])
    one = np.eye(classes)
    return np.array([[one[own] - one[other] for other in range(classes) if other != own] for own in range(classes)])
