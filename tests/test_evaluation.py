from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ell0.attacks import ATTACKS, AttackResult
from ell0.evaluation import Entry, Evaluation, Share, default_attacks, evaluate
from ell0.results import Results
from ell0.threat import L0Ball

N, D = 40, 8
WEIGHT = torch.tensor([2.0, 2.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0])


class Line(nn.Module):
    """Two classes on either side of a plane; small whole numbers, so a row's answer is the same in every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(WEIGHT.clone())
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        score = (x * self.weight).sum(1)
        return torch.stack([-score, score], 1)


class Spy:
    """A minimal attack that knows `Line`: sends the heaviest coordinates over, to within ``reach`` of the budget.

    It notes each call; a row with a wrong label, as in the rehearsal, is broken at once and not noted.
    """

    def __init__(self, reach: int = D, only: Callable[[Tensor], Tensor] | None = None, dies_after: int = -1) -> None:
        self.reach, self.only, self.dies_after = reach, only, dies_after
        self.calls: list[tuple[int, list[int]]] = []
        self.keys: set[int] = set()

    def __call__(
        self,
        model: Callable[[Tensor], Tensor],
        x: Tensor,
        y: Tensor,
        ball: L0Ball,
        *,
        generator: torch.Generator,
        rows: Tensor,
        strength: int = 1,
    ) -> AttackResult:
        wrong = model(x).argmax(1) != y
        if not wrong.all():
            if len(self.calls) == self.dies_after:
                raise KeyboardInterrupt
            self.calls.append((ball.budget, rows.tolist()))
            self.keys.add(generator.initial_seed())
        side = (2.0 * y - 1).unsqueeze(1)
        # WEIGHT falls, so the first coordinates are the best ones; (n, D + 1, D), the first m of them changed.
        changed = torch.arange(D) < torch.arange(D + 1).unsqueeze(1)
        points = torch.where(changed, -side.unsqueeze(1), x.unsqueeze(1))
        errs = torch.stack([model(points[:, m]).argmax(1) != y for m in range(D + 1)], 1)
        need = errs.float().argmax(1)
        success = errs.any(1) & (need <= min(self.reach, ball.budget)) | wrong
        if self.only is not None:
            success &= self.only(rows)
        x_adv = torch.where(success.unsqueeze(1), points[torch.arange(len(x)), need], x)
        distance = torch.where(success, ball.count(x, x_adv), -1)
        queries = torch.where(wrong, 0, strength * (1 + rows % 3))
        return AttackResult(x_adv, success, distance, queries, x_adv, torch.zeros(len(x)))


def _rows(n: int = N) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    y = torch.randint(0, 2, (n,), generator=generator)
    x = (2 * y - 1).unsqueeze(1) * torch.randint(-1, 5, (n, D), generator=generator) / 4
    y[:3] = 1 - y[:3]
    return x, y


def _same(one: Evaluation, other: Evaluation) -> None:
    for name in ("verdict", "distance", "x_adv", "queries", "tried"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert one.flags == other.flags


def _two(**options: Any) -> tuple[Spy, Spy, dict[str, Entry]]:
    first, second = Spy(reach=1), Spy(**options)
    return first, second, {"first": Entry(first, True), "second": Entry(second, False)}


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


def test_the_attacks_run_on_what_stands() -> None:
    x, y = _rows()
    first, second, attacks = _two()
    result = evaluate(Line(), x, y, L0Ball(2), attacks, batch=7)
    assert result.clean_accuracy == (N - 3) / N
    assert [row for _, rows in first.calls for row in rows] == list(range(3, N))
    stand = [row for row in range(N) if result.decided[row] not in ("clean", "first")]
    assert [row for _, rows in second.calls for row in rows] == stand
    assert all(len(rows) <= 7 for _, rows in first.calls)
    assert result.decided[:3] == ("clean",) * 3
    assert result.distance[:3].tolist() == [0, 0, 0]
    assert not result.queries[:3].any()
    assert 0 < result.robust_accuracy < result.per_attack["first"].robust_accuracy < result.clean_accuracy
    record = result.per_attack["second"]
    assert record.attacked == len(stand)
    assert record.broken == result.decided.count("second") > 0
    assert record.robust_accuracy == result.robust_accuracy == result.decided.count(None) / N
    assert record.queries == sum(1 + row % 3 for row in stand)
    assert record.seconds > 0


def test_each_attack_has_one_key_of_its_own() -> None:
    x, y = _rows()
    first, second, attacks = _two()
    evaluate(Line(), x, y, L0Ball(2), attacks, batch=7)
    assert len(first.keys) == len(second.keys) == 1
    assert first.keys != second.keys
    alone = Spy()
    evaluate(Line(), x, y, L0Ball(2), {"second": Entry(alone, False)})
    assert alone.keys == second.keys
    other = Spy()
    evaluate(Line(), x, y, L0Ball(2), {"second": Entry(other, False)}, seed=1)
    assert other.keys != second.keys


def test_the_batch_size_does_not_matter() -> None:
    x, y = _rows()
    attacks = {"rs": partial(ATTACKS["sparse_rs"], queries=20), "uniform": partial(ATTACKS["sparse_rs"], queries=9)}
    whole = evaluate(Line(), x, y, L0Ball(2), attacks)
    assert 0 < whole.robust_accuracy < whole.clean_accuracy
    _same(whole, evaluate(Line(), x, y, L0Ball(2), attacks, batch=7))


def test_a_box_with_a_value_for_each_row() -> None:
    x, y = _rows()
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


@pytest.mark.parametrize("dies_after", range(6))
def test_a_killed_evaluation_goes_on_to_the_same_figures(tmp_path: Path, dies_after: int) -> None:
    x, y = _rows()
    state = tmp_path / "state.npz"
    _, _, attacks = _two()
    whole = evaluate(Line(), x, y, L0Ball(3), attacks, budgets=[2], batch=7)
    first, second, attacks = _two(dies_after=dies_after)
    with pytest.raises(KeyboardInterrupt):
        evaluate(Line(), x, y, L0Ball(3), attacks, budgets=[2], batch=7, state_path=state)
    assert len(second.calls) == dies_after
    before = [*first.calls, *second.calls]
    second.dies_after = -1
    again = evaluate(Line(), x, y, L0Ball(3), attacks, budgets=[2], batch=5, state_path=state)
    _same(whole, again)
    calls = [(budget, row, name) for name, spy in attacks.items() for budget, row in _each(spy.attack.calls)]  # type: ignore[attr-defined]
    assert len(calls) == len(set(calls)), "a finished batch ran again"
    assert len(first.calls) + len(second.calls) > len(before)

    ran, seconds = len(first.calls) + len(second.calls), again.seconds
    finished = evaluate(Line(), x, y, L0Ball(3), attacks, budgets=[2], state_path=state)
    assert len(first.calls) + len(second.calls) == ran
    assert finished.seconds == seconds
    _same(whole, finished)
    assert [file.name for file in tmp_path.iterdir()] == ["state.npz"]


def _each(calls: list[tuple[int, list[int]]]) -> list[tuple[int, int]]:
    return [(budget, row) for budget, rows in calls for row in rows]


def test_seconds_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    x, y = _rows()
    _, second, attacks = _two(dies_after=1)
    with pytest.raises(KeyboardInterrupt):
        evaluate(Line(), x, y, L0Ball(2), attacks, batch=10, state_path=tmp_path / "state")
    second.dies_after = -1
    result = evaluate(Line(), x, y, L0Ball(2), attacks, batch=10, state_path=tmp_path / "state")
    assert result.seconds == (4.0, float(len(second.calls)))
    assert len(second.calls) > 1


def test_a_state_of_another_evaluation(tmp_path: Path) -> None:
    x, y = _rows()
    state = tmp_path / "state"
    spy = Spy()
    usual = {"model": Line(), "x": x, "y": y, "ball": L0Ball(2), "attacks": {"spy": Entry(spy, False)}}
    evaluate(**usual, state_path=state)  # type: ignore[arg-type]
    other_model = Line()
    other_model.weight.data[0] += 1
    others: dict[str, dict[str, Any]] = {
        "x": {"x": x + (torch.arange(N) == 20).unsqueeze(1) / 64},
        "y": {"y": torch.where(torch.arange(N) == 20, 1 - y, y)},
        "ball": {"ball": L0Ball(2, high=torch.tensor(1.5))},
        "budgets": {"budgets": [1]},
        "seed": {"seed": 1},
        "model": {"model": other_model},
        "attacks, parameters of spy, parameters of spies": {"attacks": {"spies": Entry(spy, False)}},
        "parameters of spy": {"attacks": {"spy": Entry(partial(spy, strength=2), False)}},
    }
    ran = len(spy.calls)
    for part, changed in others.items():
        with pytest.raises(ValueError, match="state_path must be of this evaluation") as error:
            evaluate(**{**usual, **changed}, state_path=state)
        assert str(error.value).endswith(f"differs in: {part}")
    assert len(spy.calls) == ran
    evaluate(**{**usual, "ball": L0Ball(2, low=-1, high=1)}, batch=3, state_path=state)  # type: ignore[arg-type]


def test_a_model_that_is_no_module_is_known_by_its_errors(tmp_path: Path) -> None:
    x, y = _rows()
    attacks = {"spy": Entry(Spy(), False)}
    evaluate(lambda x: Line()(x), x, y, L0Ball(2), attacks, state_path=tmp_path / "state")
    evaluate(lambda x: Line()(x), x, y, L0Ball(2), attacks, state_path=tmp_path / "state")
    with pytest.raises(ValueError, match="differs in: model"):
        evaluate(lambda x: -Line()(x), x, y, L0Ball(2), attacks, state_path=tmp_path / "state")


@pytest.mark.parametrize("content", [b"", b"not a state", b"PK\x03\x04 cut off"])
def test_a_file_that_is_no_state(tmp_path: Path, content: bytes) -> None:
    x, y = _rows()
    state = tmp_path / "state"
    state.write_bytes(content)
    with pytest.raises(ValueError, match="must be a file that evaluate wrote"):
        evaluate(Line(), x, y, L0Ball(2), {"spy": Entry(Spy(), False)}, state_path=state)
    assert state.read_bytes() == content


def test_a_curve_equals_separate_evaluations() -> None:
    x, y = _rows()
    spy = Spy()
    budgets = [5, 0, 1, 2, 4]
    result = evaluate(Line(), x, y, L0Ball(6), {"spy": Entry(spy, False)}, budgets=budgets)
    assert [point.budget for point in result.curve] == [0, 1, 2, 4, 5, 6]
    accuracies = [point.robust_accuracy for point in result.curve]
    assert accuracies == sorted(accuracies, reverse=True)
    assert accuracies[0] == result.clean_accuracy
    assert accuracies[-1] == result.robust_accuracy
    assert len(set(accuracies)) > 3
    assert [budget for budget, _ in spy.calls] == [1, 2, 4, 5, 6][: len(spy.calls)]
    for point in result.curve:
        alone = evaluate(Line(), x, y, L0Ball(point.budget), {"spy": Entry(Spy(), False)})
        assert alone.robust_accuracy == point.robust_accuracy
        assert alone.curve[-1].decided == point.decided
        assert sum(point.decided.values()) == round(N * (1 - point.robust_accuracy))
    assert result.per_attack["spy"].attacked == N - 3
    assert result.per_attack["spy"].queries == sum(1 + row % 3 for _, row in _each(spy.calls))
    assert len(spy.calls) > 1


def test_a_row_falls_at_its_distance() -> None:
    """An attack that wakes up at budget 4 only, and then finds a nearer point, lowers the curve below 4 too."""
    x, y = _rows()

    def late(model: Any, x: Tensor, y: Tensor, ball: L0Ball, **rest: Any) -> AttackResult:
        return Spy(reach=D if ball.budget == 4 else 0)(model, x, y, ball, **rest)

    result = evaluate(Line(), x, y, L0Ball(4), {"late": Entry(late, False)}, budgets=[1, 2, 3])
    plain = evaluate(Line(), x, y, L0Ball(4), {"spy": Entry(Spy(), False)}, budgets=[1, 2, 3])
    assert [p.robust_accuracy for p in result.curve] == [p.robust_accuracy for p in plain.curve]
    assert len({p.robust_accuracy for p in result.curve}) > 2


def test_rho() -> None:
    x, y = _rows()
    result = evaluate(Line(), x, y, L0Ball(D), {"spy": Entry(Spy(), False)})
    assert not result.robust_accuracy
    assert result.rho() == result.distance.double().quantile(0.5).item() > 0
    none = evaluate(Line(), x, y, L0Ball(D), {"spy": Entry(Spy(reach=0), False)})
    assert none.rho() == D
    assert evaluate(Line(), x[:6], y[:6], L0Ball(D), {"spy": Entry(Spy(reach=0), False)}).rho() == D / 2


def test_rho_of_pixels() -> None:
    x = torch.tensor([[1.0, 1.0], [-1.0, -1.0]]).repeat(3, 1).view(6, 2, 1, 1).expand(6, 2, 2, 2).contiguous()
    y = (x[:, 0, 0, 0] > 0).long()

    def model(x: Tensor) -> Tensor:
        return x.flatten(1).sum(1, keepdim=True) * torch.tensor([-1.0, 1.0])

    attack = {"rs": partial(ATTACKS["sparse_rs"], queries=5)}
    assert evaluate(model, x, y, L0Ball(1, unit="pixel"), attack).rho() == 4


class Odd(nn.Module):
    """`Line` with something odd about it."""

    def __init__(self, odd: str) -> None:
        super().__init__()
        self.line, self.odd = Line(), odd

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.line(x)
        if self.odd == "zero":
            return logits.sign() + 0 * x[:, :1]
        if self.odd == "nan":
            return logits + 0 * (x[:, :1] * 0).sqrt()
        if self.odd == "numpy":
            return torch.from_numpy(self.line.weight.detach().numpy() * x.numpy()).sum(1, keepdim=True) * torch.tensor(
                [-1.0, 1.0]
            )
        if self.odd == "random":
            return logits + torch.rand_like(logits) / 100
        if self.odd == "softmax":
            return logits.softmax(1)
        return logits


@pytest.mark.parametrize(
    ("odd", "flag"),
    [
        ("", None),
        ("zero", "zero or NaN gradients: at 40 of 40 rows"),
        ("nan", "zero or NaN gradients: at 40 of 40 rows"),
        ("numpy", "zero or NaN gradients: the model gives no gradient at all"),
        ("random", "random outputs: two forward passes differ"),
        ("softmax", "softmaxed outputs"),
    ],
)
def test_flags_of_the_model(odd: str, flag: str | None) -> None:
    x, y = _rows()
    result = evaluate(Odd(odd).eval(), x, y, L0Ball(2), {"spy": Entry(Spy(), True)})
    assert len(result.flags) == (flag is not None)
    if flag is not None:
        assert result.flags[0].startswith(flag)
        assert f"flag: {flag}" in str(result)


def test_a_model_left_in_train_mode() -> None:
    x, y = _rows()
    model = nn.Sequential(nn.Dropout(0.9), Line())
    model[1].eval()
    model[1].weight.requires_grad_(True)
    result = evaluate(model, x, y, L0Ball(2), {"spy": Entry(Spy(), True)})
    assert result.flags == ("model left in train mode: it was evaluated in eval mode",)
    assert result.clean_accuracy == (N - 3) / N
    assert [module.training for module in model.modules()] == [True, True, False]
    assert model[1].weight.requires_grad
    assert model[1].weight.grad is None


@pytest.mark.parametrize(("rows", "fires"), [(3, False), (4, True)])
def test_black_box_beats_white_box_by_more_than_three_points(rows: int, fires: bool) -> None:
    x, y = (torch.ones(100, D), torch.ones(100, dtype=torch.int64))
    white, black = Entry(Spy(reach=0), True), Entry(Spy(only=lambda ids: ids < rows), False)
    flags = evaluate(Line(), x, y, L0Ball(D), {"white": white, "black": black}).flags
    assert len(flags) == fires
    if fires:
        assert flags[0].startswith("black-box beats white-box: by 4.0 points")
    # Rows that no white-box attack has tried say nothing about them.
    assert evaluate(Line(), x, y, L0Ball(D), {"black": black, "white": white}).flags == ()
    assert evaluate(Line(), x, y, L0Ball(D), {"black": black}).flags == ()


def test_a_white_box_attack_of_a_smaller_budget_is_not_beaten() -> None:
    x, y = (torch.ones(100, D), torch.ones(100, dtype=torch.int64))
    attacks = {"black": Entry(Spy(), False), "white": Entry(Spy(reach=0), True)}
    result = evaluate(Line(), x, y, L0Ball(D), attacks, budgets=[1])
    assert result.per_attack["white"].attacked == 100
    assert not result.robust_accuracy
    assert result.flags == ()


@pytest.mark.parametrize(
    ("lie", "claim"),
    [
        (lambda x, y: x - 0.25 * (2 * y - 1).unsqueeze(1) * (torch.arange(D) == 7), "is misclassified"),
        (lambda x, y: -(2.0 * y - 1).unsqueeze(1).expand_as(x), "lies in the ball"),
        (lambda x, y: torch.where(torch.arange(D) == 0, -100.0 * (2 * y - 1).unsqueeze(1), x), "lies in the ball"),
    ],
)
def test_a_lie_is_found(lie: Callable[[Tensor, Tensor], Tensor], claim: str) -> None:
    x, y = torch.ones(4, D), torch.ones(4, dtype=torch.int64)

    def liar(model: Any, x: Tensor, y: Tensor, ball: L0Ball, **_: Any) -> AttackResult:
        del model, ball
        x_adv, ones = lie(x, y), torch.ones_like(y)
        return AttackResult(x_adv, ones.bool(), ones, ones, x_adv, -ones.float())

    with pytest.raises(RuntimeError, match=f"attack 'liar' says that its point for row 0 {claim}"):
        evaluate(Line(), x, y, L0Ball(1), {"liar": Entry(liar, False)})


def test_errors_of_a_random_model_that_do_not_come_back_are_counted() -> None:
    x, y = torch.ones(4, D), torch.ones(4, dtype=torch.int64)

    def lucky(model: Any, x: Tensor, y: Tensor, ball: L0Ball, **_: Any) -> AttackResult:
        del model, ball
        x_adv, ones = x.masked_fill(torch.arange(D) == 7, 0.0), torch.ones_like(y)
        return AttackResult(x_adv, ones.bool(), ones, ones, x_adv, -ones.float())

    result = evaluate(Odd("random").eval(), x, y, L0Ball(1), {"lucky": Entry(lucky, False)})
    assert result.flags == ("random outputs: two forward passes differ, and 4 errors did not come back at the end",)


def test_a_wrong_distance_is_found() -> None:
    x, y = _rows()

    def modest(*arguments: Any, **rest: Any) -> AttackResult:
        result = Spy()(*arguments, **rest)
        return AttackResult(**{**vars(result), "distance": torch.where(result.success, 1, -1)})

    with pytest.raises(RuntimeError, match="lies in the ball at its distance"):
        evaluate(Line(), x, y, L0Ball(D), {"modest": Entry(modest, False)})


def _evaluate(**changed: Any) -> Evaluation:
    x, y = _rows()
    usual = {"model": Line(), "x": x, "y": y, "ball": L0Ball(2), "attacks": {"spy": Entry(Spy(), False)}}
    return evaluate(**{**usual, **changed})


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"y": torch.full((N,), 2)}, "y must lie in 0 .. 1"),
        ({"y": _rows()[1].tolist()}, "y must be an integer tensor"),
        ({"y": torch.cat([_rows()[1]] * 2)}, r"y must be an integer tensor of shape \(40,\)"),
        ({"x": torch.zeros(0, D), "y": torch.zeros(0, dtype=torch.int64)}, "x must have at least one row"),
        ({"ball": L0Ball(D + 1)}, "budget must be at most the number of units"),
        ({"model": lambda x: x[:, 0]}, "model must return logits"),
        ({"model": lambda x: x[:, :2] / 0 * 0}, "model must return .*logits.*(?i:nan)"),
        ({"attacks": {}}, "attacks must be"),
        ({"attacks": []}, "attacks must be"),
        ({"attacks": "sparse_rs"}, "attacks must be"),
        ({"attacks": ["nosuch"]}, "attacks must be among .*sparse_rs_uniform, got 'nosuch'"),
        ({"attacks": ["sparse_rs", "sparse_rs"]}, "attacks must differ, got 'sparse_rs' twice"),
        ({"attacks": {"clean": Entry(Spy(), False)}}, "other than 'clean'"),
        ({"attacks": {"a": 3}}, "attacks must be functions, got 3 as 'a'"),
        ({"attacks": {"a": Spy()}}, "got 'a' without Entry"),
        ({"budgets": []}, "budgets must be different ints"),
        ({"budgets": [1, 3]}, "budgets must be different ints from 0 to the ball's 2"),
        ({"budgets": [1, 1]}, "budgets must be different ints"),
        ({"budgets": [0.5]}, "budgets must be different ints"),
        ({"batch": 0}, "batch must be an int >= 1, got 0"),
        ({"seed": 0.5}, "seed must be an int, got 0.5"),
    ],
)
def test_bad_input(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        _evaluate(**changed)


def test_bad_state_paths(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="state_path must be a file, got the folder"):
        _evaluate(state_path=tmp_path)
    with pytest.raises(ValueError, match="state_path must be in a folder that exists"):
        _evaluate(state_path=tmp_path / "nowhere" / "state")


def test_an_attack_that_cannot_do_it_says_so_before_any_query() -> None:
    x, y = _rows()
    spy = Spy()
    attacks = {"spy": Entry(spy, False), "rs": partial(ATTACKS["sparse_rs"], values=torch.tensor([7.0]))}
    with pytest.raises(ValueError, match="values must lie in the box"):
        evaluate(Line(), x, y, L0Ball(2), attacks)
    assert spy.calls == []


def test_the_default_attacks() -> None:
    names = list(default_attacks())
    assert names[-2:] == ["sparse_rs_corners", "sparse_rs_uniform"]
    assert [entry.white_box for entry in default_attacks().values()] == [True] * (len(names) - 2) + [False] * 2
    assert set(names[:-2]) == set(ATTACKS) - {"sparse_rs", "pointwise"}
    x, y = _rows(3)
    result = evaluate(Line(), x, y, L0Ball(1), ["sparse_rs", "sparse_rs_uniform"])
    assert result.attacks == {"sparse_rs": False, "sparse_rs_uniform": False}


def test_a_function_under_partials_is_known() -> None:
    x, y = _rows(8)
    for name, attack in ATTACKS.items():
        deep = partial(partial(attack, target=None), target=None)
        white = evaluate(Line(), x[:3], y[:3], L0Ball(1), {"a": deep}).attacks["a"]
        assert white == (name not in ("sparse_rs", "pointwise"))


def test_records_go_into_results(tmp_path: Path) -> None:
    x, y = _rows()
    result = evaluate(Line(), x, y, L0Ball(3), _two()[2], budgets=[1])
    results = Results("a", "b", rows=result.rows(model="line"))
    assert Results.load(results.save(tmp_path / "a.json")) == results
    clean = results.find(what="clean_accuracy")
    assert (clean["value"], clean["n"], clean["model"]) == (result.clean_accuracy, N, "line")
    assert clean["low"] < clean["value"] < clean["high"]
    worst = results.find(what="robust_accuracy", attack="worst case", budget=3)
    assert worst["value"] == result.robust_accuracy
    assert worst["decided by clean"] == 3
    assert results.find(attack="worst case", budget=1)["value"] == result.curve[0].robust_accuracy
    second = results.find(attack="second")
    assert (second["queries"], second["white_box"]) == (result.per_attack["second"].queries, False)
    assert all(isinstance(v, str | int | float) for row in results.rows for v in row.values())


def test_as_text() -> None:
    x, y = _rows()
    text = str(evaluate(Line(), x, y, L0Ball(3), _two()[2], budgets=[1]))
    assert "clean accuracy 92.5 % (80.1-97.4), n = 40" in text
    assert len(text.splitlines()) == 7
    assert len({len(line) for line in text.splitlines()[1:4]}) == 1
    text = str(evaluate(Line(), x, y, L0Ball(3), {"a": Entry(Spy(), False)}))
    assert len({len(line) for line in text.splitlines()[1:3]}) == 1


def test_progress_is_for_terminals(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = _rows()
    evaluate(Line(), x, y, L0Ball(3), _two()[2])
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    evaluate(Line(), x, y, L0Ball(3), _two()[2], batch=4, progress=False)
    assert capsys.readouterr() == ("", "")
    evaluate(Line(), x, y, L0Ball(3), _two()[2], batch=4)
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.split(":")[0] for line in err.splitlines()] == ["first, budget 3", "second, budget 3"]
