"""Evaluations: figures, curves, flags, and attacks whose claims are checked."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from balls import within_one
from ell0.attacks import ATTACKS, Attack, AttackResult, declared
from ell0.common import Progress, Step, silent
from ell0.evaluation import Entry, Share, cascade, evaluate
from ell0.nn import TruncatedLinear
from ell0.results import Results
from ell0.threat import L0Ball
from spied_evaluation import D, Line, N, Odd, Spy, assert_same, each_row, evaluate_line, rows, two_spies


@pytest.mark.parametrize(
    ("count", "n", "low", "high"),
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (81, 263, 0.2553, 0.3662), (1, 2, 0.0945, 0.9055)],
)
def test_wilson_intervals(count: int, n: int, low: float, high: float) -> None:
    share = Share(count, n)
    assert share == count / n
    assert share.n == n
    assert (share.low, share.high) == pytest.approx((low, high), abs=5e-5)
    assert vars(copy.deepcopy(share)) == vars(share)
    for many in (1, 7, 1000, 10_000):
        assert (Share(0, many).low, Share(many, many).high) == (0.0, 1.0)


def test_the_attacks_run_on_what_stands() -> None:
    x, y = rows()
    first, second, attacks = two_spies()
    result = evaluate(Line(), x, y, within_one(2), attacks, batch=7)
    assert result.clean_accuracy == (N - 3) / N
    assert [row for _, rows in first.calls for row in rows] == list(range(3, N))
    stand = [row for row in range(N) if result.decided[row] not in ("clean", "first")]
    assert [row for _, rows in second.calls for row in rows] == stand
    assert all(len(rows) <= 7 for _, rows in first.calls)
    assert result.decided[:3] == ("clean",) * 3
    assert result.distance[:3].tolist() == [0, 0, 0]
    assert not result.queries[:3].any()
    assert 0 < result.robust_accuracy < result.per_attack["first"].value < result.clean_accuracy
    row = result.per_attack["second"]
    queries, broken = sum(1 + row % 3 for row in stand), result.decided.count("second")
    assert row.beside == {"white_box": False, "attacked": len(stand), "broken": broken, "queries": queries, "late": 0}
    assert broken > 0
    assert row.value == result.robust_accuracy == result.decided.count(None) / N
    assert (row.seconds or 0) > 0


def test_each_attack_has_one_key_of_its_own() -> None:
    x, y = rows()
    first, second, attacks = two_spies()
    evaluate(Line(), x, y, within_one(2), attacks, batch=7)
    assert len(first.keys) == len(second.keys) == 1
    assert first.keys != second.keys
    alone, other = Spy(), Spy()
    evaluate(Line(), x, y, within_one(2), {"second": Entry(alone, False)})
    evaluate(Line(), x, y, within_one(2), {"second": Entry(other, False)}, seed=1)
    assert alone.keys == second.keys != other.keys


def test_the_batch_size_does_not_matter() -> None:
    x, y = rows()
    attacks = {"rs": partial(ATTACKS["sparse_rs"], queries=20), "uniform": partial(ATTACKS["sparse_rs"], queries=9)}
    whole = evaluate(Line(), x, y, within_one(2), attacks)
    assert 0 < whole.robust_accuracy < whole.clean_accuracy
    assert_same(whole, evaluate(Line(), x, y, within_one(2), attacks, batch=7))


def test_a_box_with_a_value_for_each_row() -> None:
    x, y = rows()
    high = torch.ones(N, D)
    high[20:] = 2.0
    mutable = torch.ones(N, D, dtype=torch.bool)
    mutable[5:15] = False
    ball = L0Ball(3, low=-high, high=high, mutable=mutable)
    attack = {"rs": partial(ATTACKS["sparse_rs"], queries=30)}
    result = evaluate(Line(), x, y, ball, attack, batch=6)
    assert result.decided[5:15] == (None,) * 10
    assert bool((result.x_adv[20:].abs() == 2).any())
    assert not bool((result.x_adv[:20].abs() > 1).any())


def test_a_curve_equals_separate_evaluations() -> None:
    x, y = rows()
    spy = Spy()
    budgets = [5, 0, 1, 2, 4]
    result = evaluate(Line(), x, y, within_one(6), {"spy": Entry(spy, False)}, budgets=budgets)
    assert [point["budget"] for point in result.curve] == [0, 1, 2, 4, 5, 6]
    accuracies = [point.value for point in result.curve]
    assert accuracies == sorted(accuracies, reverse=True)
    assert accuracies[0] == result.clean_accuracy
    assert accuracies[-1] == result.robust_accuracy
    assert len(set(accuracies)) > 3
    assert [budget for budget, _ in spy.calls] == [1, 2, 4, 5, 6][: len(spy.calls)]
    for point in result.curve:
        alone = evaluate(Line(), x, y, within_one(point["budget"]), {"spy": Entry(Spy(), False)})
        assert (alone.robust_accuracy, alone.curve[-1].decided) == (point.value, point.decided)
        assert sum(point.decided.values()) == round(N * (1 - point.value))
    beside = result.per_attack["spy"].beside
    assert (beside["attacked"], beside["queries"]) == (N - 3, sum(1 + row % 3 for _, row in each_row(spy.calls)))


def test_a_row_is_attacked_above_its_certified_radius_alone() -> None:
    whole = evaluate_line(ball=within_one(4), budgets=[1, 2])
    true = torch.where(whole.verdict < 0, 4, whole.distance - 1)
    for radii in (true, true // 2):
        spy = Spy()
        found = evaluate_line(ball=within_one(4), budgets=[1, 2], radii=radii, attacks={"spy": Entry(spy, False)})
        for name in ("verdict", "distance", "x_adv"):
            assert torch.equal(getattr(found, name), getattr(whole, name)), name
        least = torch.full_like(radii, 5)
        for budget, row in each_row(spy.calls):
            least[row] = min(int(least[row]), budget)
        right = whole.verdict != 0
        expected = torch.tensor([min((m for m in (1, 2, 4) if m > radius), default=5) for radius in radii.tolist()])
        assert torch.equal(least[right], expected[right])


def test_a_certified_radius_that_an_attack_refutes_stops_the_evaluation() -> None:
    whole = evaluate_line(ball=within_one(4))
    radii = torch.zeros(N, dtype=torch.int64)
    assert_same(evaluate_line(ball=within_one(4), radii=radii.numpy()), whole)
    row, true = int(whole.distance.argmax()), int(whole.distance.max())
    radii[row] = 4
    assert evaluate_line(ball=within_one(4), radii=radii).verdict[row] == -1  # it is not attacked
    radii[row] = true
    with pytest.raises(RuntimeError, match=f"row {row} has a certified radius of {true}, and a point at {true} is"):
        evaluate_line(ball=within_one(4), radii=radii)
    with pytest.raises(RuntimeError, match="row 0 has a certified radius of 1, and a point at 0 is misclassified"):
        evaluate_line(ball=within_one(4), radii=torch.ones_like(radii))


def test_a_row_falls_at_its_distance() -> None:
    """An attack that wakes up at budget 4 only, and then finds a nearer point, lowers the curve below 4 too."""
    x, y = rows()

    def late(model: Any, x: Tensor, y: Tensor, ball: L0Ball, **rest: Any) -> AttackResult:
        return Spy(reach=D if ball.budget == 4 else 0)(model, x, y, ball, **rest)

    result = evaluate(Line(), x, y, within_one(4), {"late": Entry(late, False)}, budgets=[1, 2, 3])
    plain = evaluate(Line(), x, y, within_one(4), {"spy": Entry(Spy(), False)}, budgets=[1, 2, 3])
    assert [point.value for point in result.curve] == [point.value for point in plain.curve]
    assert len({point.value for point in result.curve}) > 2


def test_rho() -> None:
    x, y = rows()
    result = evaluate(Line(), x, y, within_one(D), {"spy": Entry(Spy(), False)})
    assert not result.robust_accuracy
    assert result.rho() == result.distance.double().quantile(0.5).item() > 0
    none = evaluate(Line(), x, y, within_one(D), {"spy": Entry(Spy(reach=0), False)})
    assert none.rho() == float(D)
    assert evaluate(Line(), x[:6], y[:6], within_one(D), {"spy": Entry(Spy(reach=0), False)}).rho() == D / 2
    # Rows that stand count the units: of 2 x 2 pixels, 4.
    images, attack = torch.ones(6, 2, 2, 2), {"rs": partial(ATTACKS["sparse_rs"], queries=5)}
    labels, signs = torch.ones(6, dtype=torch.int64), torch.tensor([-1.0, 1.0])
    stands = evaluate(
        lambda x: x.sum((1, 2, 3)).unsqueeze(1) * signs, images, labels, within_one(1, unit="pixel"), attack
    )
    assert stands.rho() == 4.0


@pytest.mark.parametrize(
    ("odd", "flag"),
    [
        ("", None),
        ("zero", "zero or NaN gradients: at 40 of 40 rows"),
        ("nan", "zero or NaN gradients: at 40 of 40 rows"),
        ("numpy", "zero or NaN gradients: the model gives no gradient at all"),
        ("random", "random outputs: two forward passes differ"),
        ("softmax", "softmaxed outputs"),
        ("sigmoid", "outputs within [0, 1], as those of sigmoids"),
    ],
)
def test_flags_of_the_model(odd: str, flag: str | None) -> None:
    x, y = rows()
    result = evaluate(Odd(odd).eval(), x, y, within_one(2), {"spy": Entry(Spy(), False)})
    assert len(result.flags) == (flag is not None)
    if flag is not None:
        assert result.flags[0].startswith(flag)
        assert f"flag: {flag}" in str(result)
    if odd in ("zero", "numpy", "sigmoid"):  # no attack could break more, unless a smaller budget is asked about
        done = partial(evaluate, Odd(odd).eval(), x, y, within_one(D), {"spy": Entry(Spy(), False)})
        assert not done().robust_accuracy
        assert done().flags == ()
        assert done(budgets=[1]).flags[0].startswith(flag or "")


@pytest.mark.parametrize("odd", ["numpy", "detached"])
def test_white_box_attacks_on_a_model_without_gradients(odd: str) -> None:
    model = Odd(odd).eval()
    spy = Spy()
    attacks = {"spy": Entry(spy, False), "mine": Entry(Spy(), True), "adaptive": ATTACKS["adaptive"]}
    x, y = rows(12)
    # As a function its weights ask for gradients all the time; a module's do not while it is attacked.
    for asked in (model, lambda x: model(x)):
        with pytest.raises(ValueError, match=r"attacks must be black-box for .* no gradient, got mine, adaptive$"):
            evaluate(asked, x, y, within_one(2), attacks)
        assert spy.calls == []
        flag = "zero or NaN gradients: the model gives no gradient at all, no white-box attack ran"
        told = (f"{flag}; raise the queries of spy",)
        assert evaluate(asked, x, y, within_one(2), {"spy": attacks["spy"]}).flags == told
        spy.calls.clear()
        # Budget 0 runs no attack: which ones would have run is the point.
        result = evaluate(asked, x, y, within_one(0))
        searches = ["sparse_rs_corners", "sparse_rs_uniform"]
        left_out = f"{flag}: sparse_pgd, sigma_zero, adaptive left out"
        assert result.flags == (f"{left_out}; raise the queries of {', '.join(searches)}",)
        assert list(result.attacks) == searches


def test_a_model_left_in_train_mode() -> None:
    x, y = rows()
    model = nn.Sequential(nn.Dropout(0.9), Line())
    model[1].eval()
    model[1].weight.requires_grad_(True)
    result = evaluate(model, x, y, within_one(2), {"spy": Entry(Spy(), True)})
    assert result.flags == ("model left in train mode: it was evaluated in eval mode; call model.eval()",)
    assert result.clean_accuracy == (N - 3) / N
    assert [module.training for module in model.modules()] == [True, True, False]
    assert model[1].weight.requires_grad
    assert model[1].weight.grad is None


ONES = torch.ones(100, D), torch.ones(100, dtype=torch.int64)


@pytest.mark.parametrize(("rows", "fires"), [(3, False), (4, True)])
def test_search_beats_gradients_by_more_than_three_points(rows: int, fires: bool) -> None:
    white, black = Entry(Spy(reach=0), True), Entry(Spy(only=lambda ids: ids < rows), False)
    words = "search beats gradients by 4.0 points: black broke rows that gradients alone (white) had left standing"
    words += "; run the default attacks"
    assert evaluate(Line(), *ONES, within_one(D), {"white": white, "black": black}).flags == (words,) * fires
    # Rows that no white-box attack has tried say nothing about them.
    assert evaluate(Line(), *ONES, within_one(D), {"black": black, "white": white}).flags == ()
    assert evaluate(Line(), *ONES, within_one(D), {"black": black}).flags == ()


def test_the_default_attacks_have_done_what_the_flag_would_ask_for() -> None:
    white, black = Entry(Spy(reach=0), True), Entry(Spy(only=lambda ids: ids < 90), False)
    cheap = {name: partial(entry.attack, **cheapest(entry.attack)) for name, entry in cascade().items()}
    assert evaluate(Line(), *ONES, within_one(D), {"white": white, "black": black}).flags
    assert evaluate(Line(), *ONES, within_one(D), {"white": white, "black": black, **cheap}).flags == ()


def cheapest(attack: Any) -> Mapping[str, Any]:
    own = declared(attack)
    assert own is not None
    return own.cheap


def test_a_truncated_model_wants_an_attack_that_knows_truncation() -> None:
    x, y = rows()
    model = nn.Sequential(TruncatedLinear(D, 2, 1)).eval()
    y = model(x).argmax(1)
    flag = "truncated model: no attack that ran looks into truncated layers; run adaptive too"
    rs, adaptive = (partial(ATTACKS[name], queries=4) for name in ("sparse_rs", "adaptive"))
    assert flag in evaluate(model, x, y, within_one(1), {"rs": rs}).flags
    assert flag not in evaluate(model, x, y, within_one(1), {"rs": rs, "mine": adaptive}).flags
    assert flag not in evaluate(nn.Sequential(TruncatedLinear(D, 2, 0)), x, y, within_one(1), {"rs": rs}).flags
    assert flag not in evaluate(Line(), x, y, within_one(1), {"rs": rs}).flags


@pytest.mark.parametrize(("count", "fires"), [(2, False), (3, True)])
def test_rows_that_fall_late_say_that_more_queries_would_break_more(count: int, fires: bool, tmp_path: Path) -> None:
    x, y = rows()
    plain = evaluate(Line(), x, y, within_one(D), {"spy": Entry(Spy(reach=2), False)})
    late = (plain.verdict == 1).nonzero()[:count]

    def function(*arguments: Any, queries: int = 50, progress: Progress = silent, **rest: Any) -> AttackResult:
        del progress, queries
        result = Spy(reach=2)(*arguments, **rest)
        when = torch.where(torch.isin(rest["rows"], late), 91, 90)  # of the 100 that rows which stand spend
        return replace(result, queries=torch.where(result.success, when, 100), late=torch.zeros_like(result.success))

    attack = Attack(function, white_box=False, gradients_only=False, random=False, cascade=None, cheap={}, strong=None)
    told = partial(evaluate, Line(), x, y, within_one(D), {"slow": partial(attack, queries=70)})
    flag = f"not converged: {count} rows fell in the last tenth of an attack; raise queries to 210 (slow)"
    result = told(state_path=tmp_path / "state", batch=9)
    assert result.flags == (flag,) * fires
    assert result.per_attack["slow"].beside["late"] == count == int(result.late.sum())
    assert told(state_path=tmp_path / "state").flags == result.flags


def test_a_white_box_attack_that_searches_does_not_hide_that_gradients_fail() -> None:
    def own(reach: int, only: bool) -> Attack[...]:
        def function(*arguments: Any, progress: Progress = silent, **rest: Any) -> AttackResult:
            del progress
            return Spy(reach, only=lambda ids: ids < 90)(*arguments, **rest)

        return Attack(function, white_box=True, gradients_only=only, random=False, cascade=None, cheap={}, strong=None)

    gradients, search = own(0, True), own(D, False)
    result = evaluate(Line(), *ONES, within_one(D), {"gradients": gradients, "search": partial(search)})
    assert result.attacks == {"gradients": True, "search": True}
    words = (
        "search beats gradients by 90.0 points: search broke rows that gradients alone (gradients) had left standing"
    )
    words += "; run the default attacks"
    assert result.flags == (words,)
    # By itself it is no attack by gradients alone, which others could beat.
    assert evaluate(Line(), *ONES, within_one(D), {"a": own(0, False), "b": Entry(Spy(), False)}).flags == ()


def test_a_white_box_attack_of_a_smaller_budget_is_not_beaten() -> None:
    attacks = {"black": Entry(Spy(), False), "white": Entry(Spy(reach=0), True)}
    result = evaluate(Line(), *ONES, within_one(D), attacks, budgets=[1])
    assert result.per_attack["white"].beside["attacked"] == 100
    assert not result.robust_accuracy
    assert result.flags == ()


def claiming(points: Callable[[Tensor, Tensor], Tensor], distance: int = 1) -> dict[str, Entry]:
    """An attack that says of points, made of x and y, that they break every row with so many changes."""

    def liar(model: Any, x: Tensor, y: Tensor, ball: L0Ball, **_: Any) -> AttackResult:
        del model, ball
        x_adv, ones = points(x, y), torch.ones_like(y)
        return AttackResult(x_adv, ones.bool(), distance * ones, ones, x_adv, -ones.float())

    return {"liar": Entry(liar, False)}


FOUR = torch.ones(4, D), torch.ones(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("lie", "distance", "claim"),
    [
        (lambda x, y: x - 0.25 * (2 * y - 1).unsqueeze(1) * (torch.arange(D) == 7), 1, "is misclassified"),
        (lambda x, _: -x, 1, "lies in the ball"),
        (lambda x, _: torch.where(torch.arange(D) == 0, -100.0, x), 1, "lies in the ball"),
        (lambda x, _: torch.where(torch.arange(D) < 4, -1.0, x), 3, "lies in the ball at its distance"),
    ],
)
def test_a_lie_is_found(lie: Callable[[Tensor, Tensor], Tensor], distance: int, claim: str) -> None:
    with pytest.raises(RuntimeError, match=f"attack 'liar' says that its point for row 0 {claim}"):
        evaluate(Line(), *FOUR, within_one(4), claiming(lie, distance))


def test_errors_of_a_random_model_that_do_not_come_back_are_counted() -> None:
    lucky = claiming(lambda x, _: x.masked_fill(torch.arange(D) == 7, 0.0))
    result = evaluate(Odd("random").eval(), *FOUR, within_one(1), lucky)
    words = "random outputs: two forward passes differ, and 4 errors did not come back at the end"
    assert result.flags == (f"{words}; fix its seed, or average its outputs",)


def test_claims_that_the_attack_takes_back_are_counted(tmp_path: Path) -> None:
    """An attack whose last check refutes every break leaves margins below 0; the flag outlives the process."""

    def modest(*arguments: Any, **rest: Any) -> AttackResult:
        result = Spy()(*arguments, **rest)
        taken = result.success & (rest["rows"] % 2 == 0)
        found = {"success": result.success & ~taken, "distance": torch.where(taken, -1, result.distance)}
        x_adv = torch.where(taken.unsqueeze(1), arguments[1], result.x_adv)
        return AttackResult(**{**vars(result), **found, "x_adv": x_adv, "margin": -taken.float()})

    once = partial(evaluate_line, ball=within_one(D), batch=7, state_path=tmp_path / "state")
    flags = "claims taken back: 18 rows were broken in a query, but not in the attack's own check"
    flags += "; they count as standing, add them to the uncertainty"
    modestly = {"modest": Entry(modest, False)}
    result = once(attacks=modestly)
    assert result.decided.count(None) == 18
    assert result.flags == (flags,)
    assert once(attacks=modestly).flags == (flags,)
    # A row that another attack breaks is in no doubt.
    assert evaluate_line(ball=within_one(D), attacks={**modestly, "spy": Entry(Spy(), False)}).flags == ()


@pytest.mark.parametrize("everywhere", [True, False])
def test_a_row_that_only_tf32_breaks_stands(everywhere: bool) -> None:
    def model(x: Tensor) -> Tensor:
        errs = everywhere or torch.get_float32_matmul_precision() == "high"
        changed = (x != 1).any(1) & errs
        return torch.stack([changed.float(), 1 - changed.float()], 1)

    x, ball, rs = torch.ones(4, D), L0Ball(1, low=0.5, high=0.5), cascade(["sparse_rs"], queries=3)
    evaluation = evaluate(model, x, torch.ones(4, dtype=torch.int64), ball, rs, tf32=True)
    assert evaluation.robust_accuracy == (0.0 if everywhere else 1.0)
    assert int((evaluation.x_adv == 0.5).sum()) == int((evaluation.x_adv != x).sum()) == (4 if everywhere else 0)
    assert any("claims taken back: 4" in flag for flag in evaluation.flags) != everywhere


def test_a_break_on_the_boundary_is_no_lie() -> None:
    """Rows with a clean margin of 4e-6 and logits near 10: batch noise of 1e-6 decides on which side a point lies."""
    x, y = torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64)

    def model(x: Tensor) -> Tensor:
        margin = x[:, 0] + 4e-6 + 1e-6 * (len(x) == 4)
        return torch.stack([10 + margin, torch.full_like(margin, 10.0)], 1)

    def moved(step: float) -> dict[str, Entry]:
        return claiming(lambda x, _: x.index_fill(1, torch.tensor(0), step))

    result = evaluate(model, x.double(), y, within_one(1), moved(-4.5e-6), batch=4)
    words = "on the boundary: 4 broken rows lie so near that the model did not err on them at the end"
    assert result.flags == (f"{words}; they count as broken, add them to the uncertainty",)
    assert not result.robust_accuracy
    with pytest.raises(RuntimeError, match="'liar' says that its point for row 0 is misclassified"):
        evaluate(model, x.double(), y, within_one(1), moved(0.02), batch=4)


def test_the_default_device_does_not_matter(tmp_path: Path) -> None:
    """A tensor that evaluation makes on the default device would have no values here."""
    x, y = rows()
    model, attacks = Odd("").eval(), ["sigma_zero", "sparse_rs"]
    with torch.device("meta"):
        for batch in (7, 40):
            result = evaluate(model, x, y, within_one(2), attacks, batch=batch, state_path=tmp_path / "state")
            assert str(result)
            assert result.rows()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"y": torch.full((N,), 2)}, "y must lie in 0 .. 1"),
        ({"ball": within_one(D + 1)}, "budget must be at most the number of units"),
        (
            {"model": lambda x: x.argmax(1)},
            r"model must return logits .* shape \(40, classes\), or one a row, got a int64",
        ),
        ({"model": None}, "model must be a module, a function, or a classifier with .*, got None"),
        ({"ball": None}, r"ball must be an L0Ball, such as ball=L0Ball.of\(x, 5\), got None"),
        ({"attacks": {}}, "attacks must be"),
        ({"attacks": "sparse_rs"}, "attacks must be"),
        ({"attacks": ["nosuch"]}, "attack must be one of .*sparse_rs_uniform, got 'nosuch'"),
        ({"attacks": ["sparse_rs", "sparse_rs"]}, "attacks must differ, got 'sparse_rs' twice"),
        ({"attacks": {"clean": Entry(Spy(), False)}}, "other than 'clean'"),
        ({"attacks": {"a": 3}}, "attacks must be functions of .*, got 3 as 'a'"),
        ({"attacks": {"a": Spy()}}, r"or Entry\(.*\), got .* as 'a'"),
        ({"budgets": []}, "budgets must be different ints"),
        ({"budgets": [1, 3]}, "budgets must be different ints from 0 to the ball's 2"),
        ({"budgets": [0.5]}, "budgets must be an int >= 0, got 0.5"),
        ({"radii": torch.zeros(N)}, r"radii must be int64 of shape \(40,\), .* got torch.float32 of shape \(40,\)"),
        ({"batch": 0}, "batch must be an int >= 1, got 0"),
        ({"seed": 0.5}, "seed must be an int, got 0.5"),
    ],
)
def test_bad_input(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        evaluate_line(**changed)


def test_an_attack_that_cannot_do_it_says_so_before_any_query() -> None:
    x, y = rows()
    spy = Spy()
    attacks = {"spy": Entry(spy, False), "rs": partial(ATTACKS["sparse_rs"], alpha=7.0)}
    with pytest.raises(ValueError, match="alpha must lie in"):
        evaluate(Line(), x, y, within_one(2), attacks)
    assert spy.calls == []


def test_the_default_attacks() -> None:
    names = ["sparse_pgd", "sigma_zero", "adaptive", "sparse_rs_corners", "sparse_rs_uniform"]
    assert list(cascade()) == names
    assert [entry.white_box for entry in cascade().values()] == [True] * 3 + [False] * 2
    x, y = rows(3)
    result = evaluate(Line(), x, y, within_one(1), ["sparse_rs", "sparse_rs_uniform"])
    assert result.attacks == {"sparse_rs": False, "sparse_rs_uniform": False}


def test_a_function_under_partials_is_known() -> None:
    x, y = rows(8)
    for name, attack in ATTACKS.items():
        deep = partial(partial(attack, target=None), target=None)
        white = evaluate(Line(), x[:3], y[:3], within_one(1), {"a": deep}).attacks["a"]
        assert white == (name not in ("sparse_rs", "pointwise"))


def test_records_go_into_results(tmp_path: Path) -> None:
    x, y = rows()
    result = evaluate(Line(), x, y, within_one(3), two_spies()[2], budgets=[1])
    results = Results("a", "b", rows=result.rows(model="line"))
    assert Results.load(results.save(tmp_path / "a.json")) == results
    clean = results.find(what="clean_accuracy")
    assert (clean["value"], clean["n"], clean["model"]) == (result.clean_accuracy, N, "line")
    assert clean["low"] < clean["value"] < clean["high"]
    worst = results.find(what="robust_accuracy", attack="worst case", budget=3)
    assert (worst["value"], worst.decided["clean"]) == (result.robust_accuracy, 3)
    assert results.find(attack="worst case", budget=1)["value"] == result.curve[0].value
    assert results.find(attack="second").beside == result.per_attack["second"].beside


def test_the_box_is_named_and_doubted(tmp_path: Path) -> None:
    x, y = rows()
    attacks = {"spy": Entry(Spy(), False)}
    result = evaluate(Line(), x, y, L0Ball(2, low=-1.0, high=3.0), attacks, budgets=[1])
    assert "1 feature changed, values in [-1, 3]" in str(result)
    assert "2 features changed, values in [-1, 3]" in str(result)
    results = Results("a", "b", rows=result.rows())
    assert [row["box"] for row in results.rows] == ["[-1, 3]"] * 4
    assert Results.load(results.save(tmp_path / "a.json")) == results
    assert [row["beta"] for row in evaluate(Line(), x, y, within_one(2), attacks).rows()] == [1.0] * 3
    half = (x + 1) / 2
    (flag,) = evaluate(Line(), half, y, within_one(2), attacks).flags
    assert flag.startswith("half of the box is empty: x lies in [0, 1]")
    spy = Spy()
    with pytest.raises(ValueError, match=r"scale of x: x lies in \[-100, 100\]"):
        evaluate(Line(), 100 * x, y, within_one(2), {"spy": Entry(spy, False)})
    assert spy.calls == []


def test_as_text() -> None:
    x, y = rows()
    lines = str(evaluate(Line(), x, y, within_one(3), two_spies()[2], budgets=[1])).splitlines()
    assert lines[0] == "clean accuracy 92.5 % (80.1-97.4), n = 40"
    assert len(lines) == 7
    assert len({len(line) for line in lines[1:4]}) == 1


def test_progress(capsys: pytest.CaptureFixture[str]) -> None:
    x, y = rows()
    attacks = {"first": Entry(Spy(reach=1), True), "rs": partial(ATTACKS["sparse_rs"], queries=3)}
    steps: list[Step] = []
    evaluate(Line(), x, y, within_one(3), attacks, batch=20, progress=steps.append)
    done, total = [step for step in steps if step.stage is None], [step for step in steps if step.stage is not None]
    assert [str(step).split(" % ")[0] for step in done] == [
        "1/2 attacks, first, budget 3: robust accuracy 72.5",
        "2/2 attacks, rs, budget 3: robust accuracy 52.5",
    ]
    # Only an attack that is declared as one is asked to report; it does so for each batch.
    assert {str(step.stage) for step in total} == {"1/2 attacks, rs, budget 3"}
    assert [step.done for step in total] == [0, 1, 2, 0, 1, 2]
    assert capsys.readouterr() == ("", "")
