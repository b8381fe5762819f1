# ruff: noqa: N803, N806  (scikit-learn calls the rows X)
"""A linear classifier for tables that proves how many changed features each decision survives."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
from scipy import sparse
from scipy.special import expit
from sklearn.base import BaseEstimator, ClassifierMixin, clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import train_test_split
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, check_X_y, validate_data

from ._solver import Additions, Problem, duel_terms, logistic, solve
from ._worst_case import Bools, Floats, Ints, Rows, Threat, attack, parts, play, radius, slots, truncated

ROUNDS = 5
"""Times the convex part is solved anew where the problem is a difference of convex functions."""

ROUND_TOL = 1e-2
"""Relative gap of each of them: the rounds move further than this."""

HELD_OUT = 0.2
"""Share of the rows on which a choice is made."""


class NotAttainableError(ValueError):
    """No weights do better against this budget than a constant answer."""


class TruncatedLinearClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn is untyped
    """Truncated linear classifier, trained against the exact worst case of ``budget`` changed features.

        f(x) = T_k(w * x) + b,   the sum of the terms w_j x_j without the k largest and the k smallest
        L_m(v) = sum(v) - top_{k+m}(v) - bottom_{k-m}(v),   the lowest T_k that m <= k changes of any size can reach
        F(w, b) = mean_i log(1 + exp(-(L_m(y_i w * x_i) + y_i b))) + alpha/2 (|w|^2 + b^2)

    ([Beliaev22] eq. 3-5; two classes, y in {-1, 1}.) For budget = k the bottom term is gone, F is convex, and it is
    solved to a relative duality gap ``tol``, kept in ``gap_``. For budget < k, bottom_{k-m} is replaced by its terms at
    the last weights, from plain logistic regression on, and the best round on held-out rows is kept; ``gap_`` is then
    NaN. More than two classes: weights W (classes, d), and class a beats class b where
    T_k((W_a - W_b) * x) + b_a - b_b > 0; the loss is log(1 + sum of exp(-L_m) over the rivals of the row's class), and
    the answer is the class whose closest duel goes best.

    Differs from [Beliaev22]: k may be larger than the budget, which at finite d is far better. A layer of the paper's
    network would compare T_k(W_a * x) with T_k(W_b * x), whose joint worst case has no closed form.

    Args:
        k: terms removed on each side, ``0 <= 2k < units``.
        budget: units that the attacker may change; None: k. At most k, unless ``features="add"``.
        alpha: weight of the penalty.
        features: ``"any"``, a changed feature takes any value; ``"add"``, X is in {0, 1} and only 0 becomes 1.
            With ``"add"`` the loss is convex for k = 0.
        attacked: labels of the classes whose rows the attacker changes, such as malware; None: all. Only with
            ``"add"``: the margin of a row that stays as it is would not be concave in the weights of the others.
        mutable: bool ``(d,)``, False where a feature is frozen; None: all may change.
        groups: ``(d,)`` labels; features with one label are one unit, truncated and changed together; None: each its
            own. Not with ``"add"``: the closed form needs every term that can change to be zero.
        max_iter: iterations of the solver; past them it warns, and ``gap_`` says how far it is.
        tol: relative duality gap.
        random_state: of the held-out rows, for budget < k.

    Attributes: ``classes_``, ``coef_`` (1 or classes, d), ``intercept_``, ``gap_``, ``objective_`` (F at the weights,
    or an upper bound within the gap), ``n_iter_``, ``budget_``, ``n_features_in_``.

    If no weights do better than a constant answer, to within tol, `fit` raises `NotAttainableError`, a ValueError: a
    fitted classifier that withstands nothing would read as robustness.
    """

    def __init__(
        self,
        k: int = 5,
        budget: int | None = None,
        alpha: float = 1e-4,
        features: Literal["any", "add"] = "any",
        attacked: npt.ArrayLike | None = None,
        mutable: npt.ArrayLike | None = None,
        groups: npt.ArrayLike | None = None,
        max_iter: int = 3000,
        tol: float = 1e-3,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.k = k
        self.budget = budget
        self.alpha = alpha
        self.features = features
        self.attacked = attacked
        self.mutable = mutable
        self.groups = groups
        self.max_iter = max_iter
        self.tol = tol
        self.random_state = random_state

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    classes_: npt.NDArray[Any]
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
        self.threat_ = self._threat()
        self.budget_ = self._check_budget(self.k if self.budget is None else self.budget)
        self._check_k()
        x = self._rows(X)
        if self._is_convex():
            self._solve(self._problem(x, label), tol=self.tol)
            least = self.objective_ * (1 - self.gap_)
        else:
            least = self._solve_in_rounds(x, label)
        constant = _constant_loss(label)
        # with weights zero the lower bound is within tol of the constant's loss
        if constant - least <= 2 * self.tol * constant:
            del self.coef_, self.intercept_
            raise NotAttainableError(
                f"budget={self.budget_} is not attainable with k={self.k} on these rows: no weights found (if convex: "
                "no weights) have a lower worst-case loss than a constant answer; lower the budget, or "
                "freeze what cannot change"
            )
        return self

    def decision_function(self, X: Any) -> Floats:
        """f ``(n,)``, positive for ``classes_[1]``; with more classes the closest duel of each, ``(n, classes)``."""
        x = self._fitted_rows(X)
        if len(self.classes_) == 2:
            score: Floats = self._sums(x, self.coef_[0]) + self.intercept_[0]
            return score
        closest = np.full((x.shape[0], len(self.classes_)), np.inf)
        for a in range(len(self.classes_)):
            for b in range(a):
                duel = self._sums(x, self.coef_[a] - self.coef_[b]) + self.intercept_[a] - self.intercept_[b]
                closest[:, a] = np.minimum(closest[:, a], duel)
                closest[:, b] = np.minimum(closest[:, b], -duel)
        return closest

    def predict(self, X: Any) -> npt.NDArray[Any]:
        """The class of each row: ``(n,)``."""
        answers = self._answers(self.decision_function(X))
        return self.classes_[answers]

    @available_if(lambda self: len(self.classes_) == 2)  # type: ignore[untyped-decorator]
    def predict_proba(self, X: Any) -> Floats:
        """1 / (1 + exp(-f)) for ``classes_[1]``, ``(n, 2)``; two classes only. Trained for the worst case: cautious."""
        score = self.decision_function(X)
        return np.column_stack([expit(-score), expit(score)])

    def worst_case_margin(self, X: Any, y: Any, budget: int | None = None) -> Floats:
        """The lowest margin of the true class that ``budget`` changes can reach, exactly: ``(n,)``.

        The margin is y f(x), or with more classes the closest duel of the true one; at 0 and below the row is lost.
        Rows of a class that is not attacked stay as they are.
        budget: None: the one trained for. Any value, more than k movable units: -inf.
        """
        x = self._fitted_rows(X)
        label = self._labels(y, x.shape[0])
        budget = self.budget_ if budget is None else _whole("budget", budget)
        lowest: Floats = self._duels(x, label, budget).min(1)
        return lowest

    def worst_case_attack(self, X: Any, y: Any, budget: int | None = None) -> Any:
        """X with at most ``budget`` units of each row changed so that the margin is `worst_case_margin`.

        Like X dense or CSR. Any value: ``budget <= k``, since beyond it the margin has no minimum. Rows of a class that
        is not attacked stay as they are.
        """
        x = self._fitted_rows(X)
        label = self._labels(y, x.shape[0])
        budget = self.budget_ if budget is None else self._check_budget(budget)
        rival = self._duels(x, label, budget).argmin(1)
        out = x.tolil() if sparse.issparse(X) else x.toarray()
        for own in range(len(self.classes_)):
            for r, (weight, _) in enumerate(self._rivals(own)):
                rows = np.flatnonzero((label == own) & (rival == r))
                for part in parts(len(rows), self.threat_.units):
                    some = x[rows[part]]
                    table = slots(some, self.threat_, k=self.k, every=True)
                    out[rows[part]] = attack(some.toarray(), table, self.threat_, weight, self._allowed(own, budget))
        return out.tocsr() if sparse.issparse(X) else out

    def certified_radius(self, X: Any) -> Ints:
        """The largest m such that no change of at most m units alters the answer for a row: ``(n,)``. No chance in it.

        Two classes, no zero margin: exactly that; more: never above it. 0 where the margin is zero, and the number of
        units where nothing that may change can alter the answer. Whichever class a row has: it is the answer that must
        not alter.
        """
        x = self._fitted_rows(X)
        label = self._answers(self.decision_function(X))
        out = np.full(x.shape[0], self.threat_.units)
        for own in range(len(self.classes_)):
            of_own = np.flatnonzero(label == own)
            for part, table in self._tables(x[of_own]):
                for weight, intercept in self._rivals(own):
                    game = play(table, self.threat_, weight)
                    at_most = radius(game, intercept, self.k, self.threat_.units)
                    out[of_own[part]] = np.minimum(out[of_own[part]], np.maximum(at_most, 0))
        return out

    def _check_settings(self) -> None:
        _whole("k", self.k)
        _whole("max_iter", self.max_iter, least=1)
        for name, value in (("alpha", self.alpha), ("tol", self.tol)):
            if not (isinstance(value, int | float | np.number) and np.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be a finite number > 0, got {value!r}")
        if self.features not in ("any", "add"):
            raise ValueError(f'features must be "any" or "add", got {self.features!r}')
        if self.features == "add" and self.groups is not None:
            raise ValueError('groups must be None with features="add"')
        if self.attacked is not None and self.features != "add":
            raise ValueError(f'attacked must be None unless features="add", got {self.attacked!r}')

    def _check_attacked(self) -> Bools:
        """True at the classes that are attacked: ``(classes,)``."""
        if self.attacked is None:
            return np.ones(len(self.classes_), bool)
        attacked = np.unique(np.asarray(self.attacked))
        if not attacked.size or not np.isin(attacked, self.classes_).all():
            raise ValueError(f"attacked must be labels among {self.classes_.tolist()}, got {self.attacked!r}")
        chosen: Bools = np.isin(self.classes_, attacked)
        return chosen

    def _allowed(self, own: int, budget: int) -> int:
        """Changes that the attacker may make to rows of a class."""
        return budget if self.attacked_[own] else 0

    def _check_k(self) -> None:
        if 2 * self.k >= self.threat_.units:
            what = f"n_features = {self.n_features_in_}" if self.groups is None else f"{self.threat_.units} groups"
            raise ValueError(f"k must satisfy 0 <= 2*k < the number of units, got k={self.k} with {what}")

    def _check_budget(self, budget: int) -> int:
        budget = _whole("budget", budget)
        if self.features == "any" and budget > self.k:
            raise ValueError(
                f"budget must be at most k: more than k changes of any value break every truncated sum, "
                f"got budget={budget} with k={self.k}"
            )
        return budget

    def _threat(self) -> Threat:
        d = self.n_features_in_
        mutable = np.ones(d, bool) if self.mutable is None else np.asarray(self.mutable)
        if mutable.shape != (d,) or mutable.dtype != bool:
            raise ValueError(f"mutable must be bool of shape ({d},), got {mutable.dtype} of shape {mutable.shape}")
        groups = np.arange(d) if self.groups is None else np.asarray(self.groups)
        if groups.shape != (d,):
            raise ValueError(f"groups must have shape ({d},), got {groups.shape}")
        unit = np.unique(groups, return_inverse=True)[1]
        return Threat(unit, mutable, self.features == "add")

    def _fitted_rows(self, X: Any) -> sparse.csr_matrix:
        check_is_fitted(self, "coef_")
        return self._rows(validate_data(self, X, accept_sparse="csr", dtype=np.float64, reset=False))

    def _rows(self, X: Any) -> sparse.csr_matrix:
        """CSR of the nonzeros alone, checked where only 0 and 1 will do."""
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
        label: Ints = np.searchsorted(self.classes_, y)
        return label

    def _answers(self, score: Floats) -> Ints:
        return (score > 0).astype(np.int64) if score.ndim == 1 else score.argmax(1).astype(np.int64)

    def _rivals(self, own: int) -> Iterator[tuple[Floats, float]]:
        """Weights and intercept of each duel of one class."""
        for contrast in _contrasts(len(self.classes_))[own]:
            yield contrast @ self.coef_, float(contrast @ self.intercept_)

    def _tables(self, x: sparse.csr_matrix) -> Iterator[tuple[slice, Rows]]:
        """Parts of the rows as terms; what is added needs a slot for every feature."""
        widest = int(np.diff(x.indptr).max(initial=0)) + 2 * self.k + 1
        width = self.threat_.units if self.threat_.add_only else min(self.threat_.units, widest)
        for part in parts(x.shape[0], width):
            yield part, slots(x[part], self.threat_, k=self.k, every=self.threat_.add_only)

    def _sums(self, x: sparse.csr_matrix, weight: Floats) -> Floats:
        out = np.empty(x.shape[0])
        for part in parts(x.shape[0], int(np.diff(x.indptr).max(initial=0)) + 2 * self.k + 1):
            out[part] = truncated(slots(x[part], self.threat_, k=self.k).terms(weight), self.k)
        return out

    def _duels(self, x: sparse.csr_matrix, label: Ints, budget: int) -> Floats:
        """The lowest margin against each rival: ``(n, classes - 1)``."""
        out = np.empty((x.shape[0], len(self.classes_) - 1))
        for own in range(len(self.classes_)):
            of_own = np.flatnonzero(label == own)
            for part, table in self._tables(x[of_own]):
                budgets = np.full(len(table.unit), self._allowed(own, budget))
                for r, (weight, intercept) in enumerate(self._rivals(own)):
                    game = play(table, self.threat_, weight)
                    out[of_own[part], r] = game.value(budgets, self.k) + intercept
        return out

    def _effective(self) -> int:
        """Changes that can be made at all."""
        return min(self.budget_, int(self.threat_.any_of(self.threat_.mutable).sum()))

    def _is_convex(self) -> bool:
        return self.k == 0 if self.threat_.add_only else self._effective() == self.k

    def _problem(self, x: sparse.csr_matrix, label: Ints) -> Problem:
        """The convex problem that takes no term out at the bottom."""
        rows = slots(x, self.threat_, k=self.k)
        contrast = _contrasts(len(self.classes_))[label]
        if self.threat_.add_only:
            additions = self._additions(x, label, self._budgets(label), {})
            return Problem(rows, contrast, self.alpha, self.k, self.k, additions=additions)
        mutable = self.threat_.any_of(self.threat_.mutable)
        frozen = None if mutable.all() else ~rows.within(mutable)
        return Problem(rows, contrast, self.alpha, self.k + self._effective(), self.k, frozen)

    def _budgets(self, label: Ints) -> Ints:
        """The changes that rows are trained against, for every rival: ``(n, classes - 1)``."""
        of_row = np.where(self.attacked_[label], self.budget_, 0)
        return np.tile(of_row[:, None], (1, len(self.classes_) - 1))

    def _additions(
        self, x: sparse.csr_matrix, label: Ints, budget: Ints, spared: dict[tuple[int, int], Bools]
    ) -> tuple[Additions, ...]:
        """What may be added, for every attacked label and rival.

        budget: ``(n, rivals)``; spared: of some, ``(rows, d)``.
        """
        out = []
        for own in np.unique(label[self.attacked_[label]]):
            rows = np.flatnonzero(label == own)
            present = x[rows]
            for rival in range(budget.shape[1]):
                barred = present
                if (own, rival) in spared:
                    barred = present + sparse.csr_matrix(spared[own, rival].astype(np.float64))
                out.append(Additions(rows, rival, self.threat_.mutable, budget[rows, rival], barred))
        return tuple(out)

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
        self._take(found.params)
        return found.params

    def _take(self, params: Floats) -> None:
        self.coef_, self.intercept_ = params[:, :-1].copy(), params[:, -1].copy()

    def _solve_in_rounds(self, x: sparse.csr_matrix, label: Ints) -> float:
        """A difference of convex functions: linearise at the last weights, solve, and keep the best on held-out rows.

        Returns the lowest objective of any round, which need not be that of the round kept.
        """
        ours, held = self._split(label)
        problem = self._problem(x[ours], label[ours])
        plain = replace(problem, top=0, top_frozen=0, additions=())
        rounds = []
        params = self._solve(plain, tol=ROUND_TOL)
        spent = self.n_iter_
        for last in range(ROUNDS + 1):
            loss = self._worst_case_loss(x, label) + self.alpha / 2 * float((params**2).sum())
            rounds.append((self._score(x[held], label[held]), loss, params))
            if last < ROUNDS:
                params = self._solve(self._linearised(problem, x[ours], label[ours]), tol=ROUND_TOL, start=params)
                spent += self.n_iter_
        _, self.objective_, best = max(rounds, key=lambda one: one[0])
        self._take(best)
        self.gap_, self.n_iter_ = np.nan, spent
        return min(loss for _, loss, _ in rounds)

    def _split(self, label: Ints) -> tuple[Ints, Ints]:
        """Rows to train on and rows held out, every class in both; all rows for both where a class has too few."""
        every = np.arange(len(label))
        if np.bincount(label).min() * HELD_OUT < 1:
            return every, every
        ours, held = train_test_split(every, test_size=HELD_OUT, stratify=label, random_state=self.random_state)
        return ours, held

    def _score(self, x: sparse.csr_matrix, label: Ints) -> tuple[float, float]:
        """Robust accuracy, then minus the worst-case loss."""
        robust = (self._duels(x, label, self.budget_).min(1) > 0).mean()
        return float(robust), -self._worst_case_loss(x, label)

    def _worst_case_loss(self, x: sparse.csr_matrix, label: Ints) -> float:
        return float(logistic(self._duels(x, label, self.budget_))[1].mean())

    def _linearised(self, problem: Problem, x: sparse.csr_matrix, label: Ints) -> Problem:
        """The problem with the terms that leave at the bottom now, which is never below the true one.

        -bottom(v) is a maximum over sets, so the set of the moment gives a lower bound of rho, equal to it here.
        """
        if not self.threat_.add_only:
            terms = duel_terms(problem, self.coef_)
            bottom = np.argsort(np.argsort(terms, -1), -1) < self.k - self._effective()
            return replace(problem, keep=~bottom)
        keep = np.ones((*problem.contrast.shape[:2], problem.rows.unit.shape[1]), bool)
        budget = self._budgets(label)
        spared = {}
        for own in np.unique(label):
            of_own = np.flatnonzero(label == own)
            for rival, (weight, _) in enumerate(self._rivals(own)):
                here = np.zeros((len(of_own), self.n_features_in_), bool)
                for part, table in self._tables(x[of_own]):
                    game = play(table, self.threat_, weight)
                    taken = game.taken(np.full(len(game.terms), self._allowed(own, self.budget_)))
                    bottom = np.zeros_like(taken)
                    lowest = np.argpartition(np.where(taken, game.lowest, game.terms), self.k - 1, 1)[:, : self.k]
                    np.put_along_axis(bottom, lowest, True, 1)
                    # an addition that is truncated uses up the attacker's budget and does no harm
                    here[part] = bottom & taken
                    unit = problem.rows.unit[of_own[part]]
                    keep[of_own[part], rival] = ~np.take_along_axis(bottom, unit, 1) | (unit < 0)
                budget[of_own, rival] -= here.sum(1)
                spared[own, rival] = here
        return replace(problem, keep=keep, additions=self._additions(x, label, budget, spared))


def select_k(
    X: Any,
    y: Any,
    budget: int,
    *,
    candidates: Sequence[int] | None = None,
    estimator: TruncatedLinearClassifier | None = None,
) -> int:
    """The k with the highest robust accuracy under ``budget`` on held-out rows; the smallest of equals.

    candidates: None: budget times 1, 2, 4, ... while 2k < d; from 0 on for add-only.  estimator: the other settings.
    A k whose budget is not attainable is passed over; `NotAttainableError` if all are.
    """
    base = TruncatedLinearClassifier() if estimator is None else estimator
    budget = _whole("budget", budget)
    X, y = check_X_y(X, y, accept_sparse="csr", dtype=np.float64)
    units = X.shape[1] if base.groups is None else len(np.unique(base.groups))
    if candidates is None:
        doubled = [max(budget, 1) * 2**i for i in range(units.bit_length())]
        candidates = [0] * (base.features == "add" or budget == 0) + [k for k in doubled if 2 * k < units]
    if not candidates:
        raise ValueError(f"budget must leave room for a k with budget <= k and 2*k < {units} units, got {budget}")
    ours, held = train_test_split(np.arange(len(y)), test_size=HELD_OUT, stratify=y, random_state=base.random_state)
    scores: dict[int, float] = {}
    for k in sorted(candidates):
        model = clone(base).set_params(k=k, budget=budget)
        try:
            model.fit(X[ours], y[ours])
        except NotAttainableError:
            continue
        scores[k] = float((model.worst_case_margin(X[held], y[held]) > 0).mean())
    if not scores:
        raise NotAttainableError(f"budget={budget} is not attainable with any k of {sorted(candidates)}")
    return max(scores, key=lambda k: scores[k])


def _contrasts(classes: int) -> Floats:
    """[own, rival] times the outputs is the margin of one class over another: ``(classes, classes - 1, outputs)``."""
    if classes == 2:
        return np.array([[[-1.0]], [[1.0]]])
    one = np.eye(classes)
    return np.array([[one[own] - one[other] for other in range(classes) if other != own] for own in range(classes)])


def _constant_loss(label: Ints) -> float:
    """The least loss of weights that are zero: the entropy of the labels."""
    share = np.bincount(label) / len(label)
    return float(-(share * np.log(share)).sum())


def _whole(name: str, value: Any, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")
    return int(value)
