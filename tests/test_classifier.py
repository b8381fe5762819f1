"""The truncated linear classifier: margins and certificates against enumeration, the optimum, bad input."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scipy import sparse
from sklearn.datasets import load_iris
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import GridSearchCV
from sklearn.utils.estimator_checks import check_estimator

from ell0.theory import NotAttainableError, TruncatedLinearClassifier, certified_scorer
from ell0.theory.solver import evaluate

Floats = npt.NDArray[np.float64]


def classifier(weight: Floats, intercept: Floats, **settings: Any) -> TruncatedLinearClassifier:
    """A classifier with these weights, (1 or classes, d), as if it had been fitted."""
    model = TruncatedLinearClassifier(**settings)
    model.classes_, model.n_features_in_ = np.arange(max(2, len(weight))), weight.shape[1]
    model._check_settings()
    model.coef_, model.intercept_ = weight, intercept
    return model


def margin(model: TruncatedLinearClassifier, x: Floats, own: int) -> Floats:
    """The margin of class ``own`` by the definition: sort the terms of each duel and add up the middle. x: (n, d)."""
    classes = len(model.classes_)
    weight = np.concatenate([-model.coef_, model.coef_]) / 2 if classes == 2 else model.coef_
    shift = np.concatenate([-model.intercept_, model.intercept_]) / 2 if classes == 2 else model.intercept_
    duels = []
    for other in set(range(classes)) - {own}:
        terms = np.sort(x * (weight[own] - weight[other]), 1)
        kept = terms[:, model.k_ : terms.shape[1] - model.k_]
        duels.append(kept.sum(1) + shift[own] - shift[other])
    lowest: Floats = np.min(duels, 0)
    return lowest


def neighbours(model: TruncatedLinearClassifier, x: Floats, budget: int) -> Floats:
    """Every set of at most ``budget`` features of x (d,) changed: to every mixture of extremes, or 0 to 1 alone."""
    out = [x]
    for count in range(1, budget + 1):
        for features in itertools.combinations(range(len(x)), count):
            for change in itertools.product(*[(1.0,) if model.features == "add" else (-1e6, 1e6)] * count):
                moved = x.copy()
                moved[list(features)] = change
                out.append(moved)
    return np.array(out)


CASES: dict[str, dict[str, Any]] = {
    "any value": {"k": 2},
    "k above budget": {"k": 3},
    "add-only": {"k": 0, "features": "add"},
}


@pytest.mark.parametrize("zero_weights", [False, True])
@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_margin_and_radius_equal_enumeration(case: str, classes: int, zero_weights: bool) -> None:
    rng = np.random.default_rng(5)
    for _ in range(2):
        weight = rng.normal(size=(classes if classes > 2 else 1, 7)) + 0.5
        if zero_weights:
            weight[:, rng.random(7) < 0.4] = 0.0
        model = classifier(weight, rng.normal(size=len(weight)) * 0.3, **CASES[case])
        x = rng.normal(size=(4, 7)) * (rng.random((4, 7)) < 0.7)
        if model.features == "add":
            x = (x != 0).astype(float)
        label = rng.integers(0, classes, 4)
        most = model.k_ if model.features == "any" else 3
        answer = model.predict(x)
        radius = np.full(4, -1)
        for budget in range(most + 1):
            around = [neighbours(model, row, budget) for row in x]
            lowest = np.array([margin(model, near, own).min() for near, own in zip(around, label, strict=True)])
            np.testing.assert_allclose(model.worst_case_margin(x, label, budget), lowest, rtol=1e-9, atol=1e-9)
            same = np.array([(model.predict(near) == a).all() for near, a in zip(around, answer, strict=True)])
            radius = np.where(same & (radius == budget - 1), budget, radius)
        certified = np.minimum(model.certified_radius(x), most)
        assert (certified <= radius).all()
        if classes == 2 and not zero_weights:
            assert (certified == radius).all()


def test_csr_rows_equal_dense_rows() -> None:
    # full and empty rows, and explicit zeros
    x, y = table(100, 40, seed=8, classes=3)
    x[0], x[1] = 0.0, 1.0
    rows = sparse.csr_matrix(x)
    rows.data[::7] = 0.0
    x = rows.toarray()
    dense, csr = (TruncatedLinearClassifier(k=0, budget=2, features="add", tol=1e-2).fit(one, y) for one in (x, rows))
    np.testing.assert_array_equal(dense.coef_, csr.coef_)
    for method in (dense.decision_function, dense.certified_radius, lambda one: dense.worst_case_margin(one, y)):
        np.testing.assert_array_equal(method(rows), method(x))
    assert (rows.toarray() == x).all()
    with pytest.raises(TypeError, match="Sparse data"):
        TruncatedLinearClassifier(k=2).fit(rows, y)


@pytest.mark.parametrize("classes", [2, 3])
def test_rows_of_a_class_that_is_not_attacked_stay_as_they_are(classes: int) -> None:
    rng = np.random.default_rng(4)
    weight = rng.normal(size=(classes if classes > 2 else 1, 30))
    x, y = table(40, 30, seed=2, classes=classes)
    model = classifier(weight, rng.normal(size=len(weight)), k=0, budget=4, features="add", attacked=[1])
    assert ((model.worst_case_margin(x, y) < model.worst_case_margin(x, y, 0)) == (y == 1)).all()


def test_radius_of_sums_that_nothing_breaks_and_of_zero_sums() -> None:
    # two features of nonzero weight are always truncated
    model = classifier(np.array([[1.0, 1, 0, 0, 0, 0, 0]]), np.ones(1), k=2)
    assert model.certified_radius(np.ones((1, 7))).tolist() == [7]
    model = classifier(np.ones((1, 7)), np.zeros(1), k=2)
    assert model.certified_radius(np.zeros((1, 7))).tolist() == [0]


def table(n: int, d: int, seed: int, classes: int = 2) -> tuple[Floats, npt.NDArray[np.int64]]:
    """Rows in {0, 1}; each class has its own features, seen in half of its rows and a twentieth of the others."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, n)
    own = np.arange(d) % classes == y[:, None]
    return (rng.random((n, d)) < np.where(own, 0.5, 0.05)).astype(float), y


def objective(model: TruncatedLinearClassifier, x: Floats, y: npt.NDArray[np.int64]) -> float:
    """F of the class's docstring at the weights of the model, from the exact worst case of every duel."""
    duels = model._duels(sparse.csr_matrix(x), y, model.budget_)
    penalty = (model.coef_**2).sum() + (model.intercept_**2).sum()
    return float(np.log1p(np.exp(-duels).sum(1)).mean() + model.alpha / 2 * penalty)


CONVEX: dict[str, dict[str, Any]] = {
    "any value": {"k": 2},
    "add-only": {"k": 0, "budget": 3, "features": "add"},
    "add-only, one class attacked": {"k": 0, "budget": 3, "features": "add", "attacked": [1]},
    "plain": {"k": 0},
}


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("kind", CONVEX)
def test_convex_problem_is_solved_to_the_gap(kind: str, classes: int) -> None:
    x, y = table(150, 30, seed=3, classes=classes)
    model = TruncatedLinearClassifier(alpha=1e-2, **CONVEX[kind]).fit(x, y)
    assert 0 <= model.gap_ <= 1e-3
    at = objective(model, x, y)
    least = model.objective_ * (1 - model.gap_)
    assert least <= at <= model.objective_ + 1e-12
    # no point is below the lower bound, and the optimum is a minimum on every line through it
    rng, best = np.random.default_rng(0), model.coef_
    near = [
        size * rng.normal(size=best.shape) / np.sqrt(best.size) for size in (1e-3, 1e-2, 0.1, 1.0) for _ in range(10)
    ]
    for step in (*near, -0.1 * best, -0.03 * best, 0.03 * best, 0.1 * best):
        model.coef_ = best + step
        assert objective(model, x, y) >= least


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("kind", CONVEX)
def test_smoothed_objective(kind: str, classes: int) -> None:
    """Gradient by differences; the exact objective between the smoothed one and its upper bound, which close in."""
    x, y = table(40, 30, seed=4, classes=classes)
    rng = np.random.default_rng(1)
    weight = rng.normal(size=(1 if classes == 2 else classes, 30)) / 3
    model = classifier(weight, rng.normal(size=len(weight)), alpha=1e-2, **CONVEX[kind])
    problem = model._problem(sparse.csr_matrix(x), y)
    params = np.column_stack([model.coef_, model.intercept_])
    exact = objective(model, x, y)
    for mu in (0.3, 1e-3, 1e-6):
        point = evaluate(problem, params, mu)
        assert point.dual.value(model.alpha) <= point.value <= exact + 1e-12
        assert exact <= point.upper + 1e-9
        assert point.upper - point.value <= mu * 6
    point = evaluate(problem, params, 0.3)
    for _ in range(10):
        step = rng.normal(size=params.shape) * 1e-6
        rise = evaluate(problem, params + step, 0.3).value - evaluate(problem, params - step, 0.3).value
        assert rise / 2 == pytest.approx(float((point.gradient * step).sum()), rel=1e-4, abs=1e-12)


def test_linearised_problem_is_above_the_true_one_and_equal_where_it_is_made() -> None:
    x, y = table(60, 30, seed=5, classes=3)
    rng = np.random.default_rng(2)
    model = classifier(rng.normal(size=(3, 30)), rng.normal(size=3), alpha=1e-2, k=4, budget=1)
    problem = model._linearised(model._problem(sparse.csr_matrix(x), y))

    def values() -> tuple[float, float]:
        point = evaluate(problem, np.column_stack([model.coef_, model.intercept_]), 1e-7)
        return point.upper, objective(model, x, y)

    bound, exact = values()
    assert bound == pytest.approx(exact, rel=1e-5)
    for _ in range(20):
        model.coef_ = model.coef_ + rng.normal(size=(3, 30)) / 5
        bound, exact = values()
        assert bound >= exact - 1e-9


@pytest.mark.parametrize(
    "settings",
    [{"k": 3}, {"k": 6, "budget": 3}, {"k": 0, "budget": 3, "features": "add"}],
    ids=["k = budget", "k", "add"],
)
def test_training_beats_plain_weights_in_the_worst_case(settings: dict[str, Any]) -> None:
    def uneven(seed: int) -> tuple[Floats, npt.NDArray[np.int64]]:
        # two telling features that a plain classifier leans on, and forty weak ones
        rng = np.random.default_rng(seed)
        y = rng.integers(0, 2, 500)
        own = np.arange(42) % 2 == y[:, None]
        often = np.where(np.arange(42) < 2, 0.95, 0.45)
        return (rng.random((500, 42)) < np.where(own, often, 0.05)).astype(float), y

    x, y = uneven(6)
    x_test, y_test = uneven(7)
    plain = TruncatedLinearClassifier(k=0, alpha=1e-3).fit(x, y)
    model = TruncatedLinearClassifier(alpha=1e-3, random_state=0, **settings).fit(x, y)
    assert np.isnan(model.gap_) == (settings["k"] == 6)
    rival = classifier(plain.coef_, plain.intercept_, **settings)
    robust, without = ((m.worst_case_margin(x_test, y_test) > 0).mean() for m in (model, rival))
    # Weights that lose to fewer changes than k are found only to a local optimum, from the plain ones.
    assert robust >= without if settings["k"] == 6 else robust > without


@pytest.mark.parametrize("settings", [{"k": 2}, {"k": 4, "budget": 2, "random_state": 3}])
def test_fit_is_repeatable(settings: dict[str, Any]) -> None:
    x, y = table(100, 40, seed=8)
    one, again = (TruncatedLinearClassifier(**settings).fit(x, y) for _ in range(2))
    np.testing.assert_array_equal(one.coef_, again.coef_)


def test_random_state_chooses_the_rows_held_out() -> None:
    x, y = table(100, 40, seed=8)
    one, other = (TruncatedLinearClassifier(k=4, budget=2, random_state=seed).fit(x, y) for seed in (3, 4))
    assert not np.array_equal(one.coef_, other.coef_)


def test_scikit_learn_contract() -> None:
    check_estimator(TruncatedLinearClassifier(), on_skip=None)


def test_the_default_fits_any_rows() -> None:
    """Flowers, few features, many, labels that nothing tells; k is as large as they bear."""
    x, y = load_iris(return_X_y=True)
    model = TruncatedLinearClassifier().fit(x, y)
    assert (model.k_, model.budget_) == (1, 1)
    assert model.score(x, y) > 0.85
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 300)
    for d, k in ((1, 0), (2, 0), (8, 2), (40, 5)):
        x = rng.normal(size=(300, d)) + (2 * y[:, None] - 1)
        model = TruncatedLinearClassifier().fit(x, y)
        assert model.k_ == k
        assert model.score(x, y) > 0.75
    model = TruncatedLinearClassifier().fit(rng.normal(size=(300, 3)), y)
    assert model.k_ == 0
    x = (rng.random((300, 30)) < 0.2 + 0.5 * y[:, None]).astype(float)
    model = TruncatedLinearClassifier(features="add", budget=2).fit(x, y)
    assert (model.k_, model.budget_) == (0, 2)
    assert TruncatedLinearClassifier(budget=3).fit(x, y).k_ == 3


def test_the_default_is_no_k_at_which_a_constant_answer_is_as_good() -> None:
    rng = np.random.default_rng(0)
    y = rng.random(300) < 0.35
    x = rng.normal(size=(300, 12)) + np.where(y, 0.5, -0.5)[:, None]
    assert TruncatedLinearClassifier(k=2).fit(x, y).score(x, y) == (~y).mean()
    model = TruncatedLinearClassifier().fit(x, y)
    assert model.k_ == 1
    assert certified_scorer(1)(model, x, y) > (~y).mean()


def test_grid_search_chooses_k_by_certified_accuracy() -> None:
    rng = np.random.default_rng(1)
    y = rng.choice(["cat", "dog"], 300)
    x = rng.normal(size=(300, 20)) + 0.7 * (2 * (y[:, None] == "dog") - 1)
    search = GridSearchCV(TruncatedLinearClassifier(), {"k": [0, 1, 3]}, scoring=certified_scorer(1), cv=3).fit(x, y)
    assert search.best_params_ == {"k": 3}
    assert search.cv_results_["mean_test_score"][0] == 0  # nothing is proven without truncation
    model = search.best_estimator_
    proven = (model.certified_radius(x) >= 1) & (model.predict(x) == y)
    assert certified_scorer(1)(model, x, y) == proven.mean() > 0.5
    assert certified_scorer(0)(model, x, y) == model.score(x, y)
    with pytest.raises(ValueError, match="budget must be an int >= 0, got -1"):
        certified_scorer(-1)
    with pytest.raises(ValueError, match=r"estimator must be a Truncated.* itself .* got GridSearchCV"):
        certified_scorer(1)(search, x, y)


def test_too_few_iterations_and_a_budget_that_is_not_attainable() -> None:
    with pytest.warns(ConvergenceWarning, match="max_iter=3"):
        model = TruncatedLinearClassifier(k=1, max_iter=3).fit(*table(200, 30, seed=10))
    assert model.gap_ > 1e-3
    x, y = table(200, 12, seed=9)
    model = TruncatedLinearClassifier(k=5)
    with pytest.raises(NotAttainableError, match="budget=5 is not attainable with k=5"):
        model.fit(x, y)
    assert not hasattr(model, "coef_")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"k": 2, "budget": 3}, "budget must be at most k.*got budget=3 with k=2"),
        ({"k": 5}, r"0 <= 2\*k < n_features = 10, got k=5"),
        ({"k": 2, "budget": 1.5}, "budget must be an int >= 0, got 1.5"),
        ({"k": -1}, "k must be an int >= 0, got -1"),
        ({"k": 1, "alpha": 0.0}, "alpha must be a finite number > 0, got 0.0"),
        ({"k": 1, "tol": float("nan")}, "tol must be a finite number > 0, got nan"),
        ({"k": 1, "max_iter": 0}, "max_iter must be an int >= 1, got 0"),
        ({"k": 1, "features": "remove"}, 'features must be "any" or "add", got \'remove\''),
        ({"k": 1, "features": "add"}, 'k must be 0 with features="add", got k=1'),
        ({"k": 1, "attacked": [1]}, r'attacked must be None unless features="add", got \[1\]'),
        ({"k": 0, "features": "add", "attacked": [3]}, r"attacked must be labels among \[0, 1\], got \[3\]"),
        ({"k": 0, "features": "add", "attacked": []}, r"attacked must be labels among .* got \[\]"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    x, y = table(30, 10, seed=11)
    with pytest.raises(ValueError, match=message):
        TruncatedLinearClassifier(**settings).fit(x, y)


def test_bad_rows_and_labels() -> None:
    x, y = table(200, 30, seed=12)
    with pytest.raises(ValueError, match="one class"):
        TruncatedLinearClassifier(k=1).fit(x, np.zeros(200))
    with pytest.raises(ValueError, match=r"X must be in \{0, 1\}.*got 0.5"):
        TruncatedLinearClassifier(k=0, features="add").fit(x / 2, y)
    model = TruncatedLinearClassifier(k=1).fit(x, y)
    with pytest.raises(ValueError, match=r"y must be \(200,\) of the classes \[0, 1\]"):
        model.worst_case_margin(x, y + 1)
    assert (model.worst_case_margin(x, y, 2) == -np.inf).all()
