"""Evaluations that are killed and go on from their state, and states that are not theirs."""

from __future__ import annotations

import copy
import json
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from balls import within_one
from ell0.attacks import ATTACKS, AttackResult
from ell0.evaluation import Entry, Evaluation, evaluate
from ell0.files import FileError, read_tensors, write_tensors
from ell0.models import mlp
from ell0.threat import L0Ball
from spied_evaluation import D, Line, N, Spy, assert_same, each_row, evaluate_line, rows, two_spies


@pytest.mark.parametrize("dies_after", range(6))
def test_a_killed_evaluation_goes_on_to_the_same_figures(tmp_path: Path, dies_after: int) -> None:
    x, y = rows()
    state = tmp_path / "state.npz"
    _, _, attacks = two_spies()
    whole = evaluate(Line(), x, y, within_one(3), attacks, budgets=[2], batch=7)
    first, second, attacks = two_spies(dies_after=dies_after)
    with pytest.raises(KeyboardInterrupt):
        evaluate(Line(), x, y, within_one(3), attacks, budgets=[2], batch=7, state_path=state)
    assert len(second.calls) == dies_after
    before = [*first.calls, *second.calls]
    second._dies_after = -1
    again = evaluate(Line(), x, y, within_one(3), attacks, budgets=[2], batch=5, state_path=state)
    assert_same(whole, again)
    calls = [(budget, row, name) for name, spy in attacks.items() for budget, row in each_row(spy.attack.calls)]  # type: ignore[attr-defined]
    assert len(calls) == len(set(calls)), "a finished batch ran again"
    assert len(first.calls) + len(second.calls) > len(before)

    ran, seconds = len(first.calls) + len(second.calls), again.seconds
    finished = evaluate(Line(), x, y, within_one(3), attacks, budgets=[2], state_path=state)
    assert len(first.calls) + len(second.calls) == ran
    assert finished.seconds == seconds
    assert_same(whole, finished)
    assert [file.name for file in tmp_path.iterdir()] == ["state.npz"]


def test_seconds_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    x, y = rows()
    _, second, attacks = two_spies(dies_after=1)
    with pytest.raises(KeyboardInterrupt):
        evaluate(Line(), x, y, within_one(2), attacks, batch=10, state_path=tmp_path / "state")
    second._dies_after = -1
    result = evaluate(Line(), x, y, within_one(2), attacks, batch=10, state_path=tmp_path / "state")
    assert result.seconds == (4.0, float(len(second.calls)))
    assert len(second.calls) > 1


def test_a_state_of_another_evaluation(tmp_path: Path) -> None:
    x, y = rows()
    state = tmp_path / "state"
    spy = Spy()
    usual = {"model": Line(), "x": x, "y": y, "ball": within_one(2), "attacks": {"spy": Entry(spy, False)}}
    evaluate(**usual, state_path=state)  # type: ignore[arg-type]
    other_model = Line()
    other_model.weight.data[0] += 1
    others: dict[str, dict[str, Any]] = {
        "x": {"x": x + (torch.arange(N) == 20).unsqueeze(1) / 64},
        "y": {"y": torch.where(torch.arange(N) == 20, 1 - y, y)},
        "ball": {"ball": within_one(2, high=torch.tensor(1.5))},
        "budgets": {"budgets": [1]},
        "seed": {"seed": 1},
        "tf32": {"tf32": True},
        "radii": {"radii": torch.zeros(N, dtype=torch.int64)},
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


def test_a_model_that_is_no_module_is_known_by_its_margins(tmp_path: Path) -> None:
    x, y = rows()
    again = partial(
        evaluate, x=x, y=y, ball=within_one(2), attacks={"spy": Entry(Spy(), False)}, state_path=tmp_path / "a"
    )
    again(lambda x: Line()(x))
    again(lambda x: Line()(x))
    again(lambda x: Line()(x) + 1e-4 * torch.rand_like(x[:, :2]))
    for other in (lambda x: -Line()(x), lambda x: 1.1 * Line()(x), lambda x: Line()(x) + 0.1 * (x[:, :2] > 0.9)):
        with pytest.raises(ValueError, match=r"state_path must be of this evaluation.* differs in: model$"):
            again(other)


def test_models_that_share_their_weights(tmp_path: Path) -> None:
    """F(2) and F(3) answer alike where x is 0, so only the attribute k tells them apart there."""
    plain, truncated = (mlp(k, in_features=D, hidden=(4,), classes=2).eval() for k in (2, 3))
    truncated.load_state_dict(plain.state_dict())
    x = torch.zeros(4, D)
    y = plain(x).argmax(1)
    again = partial(evaluate, x=x, y=y, ball=within_one(2), attacks={"a": Entry(Spy(reach=0), False)})
    again(plain, state_path=tmp_path / "a")
    again(copy.deepcopy(plain), state_path=tmp_path / "a")
    with pytest.raises(ValueError, match=r"differs in: model$"):
        again(truncated, state_path=tmp_path / "a")


def test_a_random_model_goes_on(tmp_path: Path) -> None:
    def model(x: Tensor) -> Tensor:
        logits: Tensor = Line()(x)
        return logits + torch.rand_like(logits)

    attacks = {"a": partial(ATTACKS["sparse_rs"], queries=2)}
    for _ in range(2):
        flags = evaluate_line(model=model, attacks=attacks, state_path=tmp_path / "a").flags
        assert flags[0].startswith("random outputs")


def test_two_functions_under_one_name(tmp_path: Path) -> None:
    def weak(*arguments: Any, **rest: Any) -> AttackResult:
        return Spy(reach=0)(*arguments, **rest)

    def strong(*arguments: Any, **rest: Any) -> AttackResult:
        return Spy()(*arguments, **rest)

    evaluate_line(attacks={"a": Entry(weak, False)}, state_path=tmp_path / "a")
    evaluate_line(attacks={"a": Entry(partial(weak), False)}, state_path=tmp_path / "a")
    for attack in (strong, partial(strong), Spy()):
        with pytest.raises(ValueError, match=r"differs in: parameters of a$"):
            evaluate_line(attacks={"a": Entry(attack, False)}, state_path=tmp_path / "a")


def slow(*arguments: Any, **rest: Any) -> AttackResult:
    """The spy, for ever at its third batch if this is the process to be killed."""
    if getattr(slow, "stops", False) and bool((rest["rows"] >= 17).any()):
        time.sleep(600)
    return Spy()(*arguments, **rest)


def _slowly(state: Path | str | None) -> Evaluation:
    return evaluate_line(ball=within_one(3), attacks={"slow": Entry(slow, False)}, batch=7, state_path=state)


def test_an_evaluation_killed_outright_goes_on(tmp_path: Path) -> None:
    state, here = tmp_path / "state", Path(__file__)
    code = f"import sys; sys.path.insert(0, {str(here.parent)!r}); import {here.stem} as t; t.slow.stops = True"
    process = subprocess.Popen([sys.executable, "-c", f"{code}; t._slowly({str(state)!r})"])
    try:
        deadline = time.monotonic() + 600
        while not state.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
    finally:
        process.kill()
    assert process.wait() == -signal.SIGKILL
    assert 0 < (read_tensors(state, "")[0]["tried"] > 0).sum() < N - 3
    assert_same(_slowly(state), _slowly(None))


def test_a_state_of_older_code(tmp_path: Path) -> None:
    state = tmp_path / "state.npz"
    evaluate_line(state_path=state)
    tensors, words = read_tensors(state, "")
    parts = json.loads(words["parts"])
    del parts["format"]
    write_tensors(state, tensors, {"parts": json.dumps(parts)})
    with pytest.raises(FileError, match=r"must be a file that this version of evaluate wrote: delete it, and its rows"):
        evaluate_line(state_path=state)


@pytest.mark.parametrize("forgery", ["none wrong", "all wrong", "no points", "farther", "verdict", "another row"])
def test_a_forged_state_is_not_believed(tmp_path: Path, forgery: str) -> None:
    """Also one whose SHA-256 was made anew: what fresh margins and the points themselves contradict is found again."""
    state = tmp_path / "state"
    whole = evaluate_line(state_path=state)
    assert 0 < whole.robust_accuracy < whole.clean_accuracy < 1
    tensors, words = read_tensors(state, "")
    verdict, broken = tensors["verdict"], tensors["verdict"] > 0
    if forgery == "none wrong":
        tensors["distance"][verdict == 0] = -1
        verdict[verdict == 0] = -1
    elif forgery == "all wrong":
        tensors["distance"].zero_()
        verdict.zero_()
    elif forgery == "no points":
        tensors["at"], tensors["values"] = tensors["at"][:0], tensors["values"][:0]
    elif forgery == "farther":
        tensors["distance"][broken] += 1
    elif forgery == "verdict":
        verdict[broken] = 7
    else:
        tensors["at"] = (tensors["at"] + D) % (N * D)
    write_tensors(state, tensors, words)
    found = evaluate_line(state_path=state)
    assert torch.equal(found.verdict, whole.verdict)
    assert torch.equal(found.x_adv, whole.x_adv)


@pytest.mark.parametrize(("name", "factor"), [("at", 1.0), ("values", float("nan"))])
def test_points_that_are_no_points(tmp_path: Path, name: str, factor: float) -> None:
    state = tmp_path / "state"
    evaluate_line(state_path=state)
    tensors, words = read_tensors(state, "")
    write_tensors(state, {**tensors, name: tensors[name] * factor}, words)
    with pytest.raises(ValueError, match="its tensors do not fit the rows: delete it"):
        evaluate_line(state_path=state)


def test_an_argument_without_an_explicit_form(tmp_path: Path) -> None:
    def noted(*arguments: Any, note: object, **rest: Any) -> AttackResult:
        del note
        return Spy()(*arguments, **rest)

    attacks = {"a": Entry(partial(noted, note=torch.nn.ReLU()), False)}
    evaluate_line(attacks=attacks)
    with pytest.raises(ValueError, match=r"note of a must be made of numbers, .* got ReLU\(\)"):
        evaluate_line(attacks=attacks, state_path=tmp_path / "a")


@pytest.mark.parametrize("content", [b"", b"not a state", b"PK\x03\x04 cut off"])
def test_a_file_that_is_no_state(tmp_path: Path, content: bytes) -> None:
    state = tmp_path / "state"
    state.write_bytes(content)
    with pytest.raises(ValueError, match=r"is damaged or of another version of ell0: delete it, and its rows"):
        evaluate_line(state_path=state)
    assert state.read_bytes() == content


def test_bad_state_paths(tmp_path: Path) -> None:
    spy = Spy()
    # A folder, and a name so long that a temporary file beside it has none.
    for path, words in ((tmp_path, "a folder"), (tmp_path / ("a" * 250), "name too long")):
        with pytest.raises(OSError, match=f"state_path must be a .*{words}"):
            evaluate_line(attacks={"spy": Entry(spy, False)}, state_path=path)
    assert spy.calls == []
    evaluate_line(state_path=tmp_path / "state", attacks={"spy": Entry(Spy(reach=0), False)})
    assert [file.name for file in tmp_path.iterdir()] == ["state"]


def test_settings_of_a_called_object_and_a_lambda(tmp_path: Path) -> None:
    evaluate_line(attacks={"a": Entry(Spy(reach=2), False)}, state_path=tmp_path / "state")
    with pytest.raises(ValueError, match="differs in: parameters of a"):
        evaluate_line(attacks={"a": Entry(Spy(reach=3), False)}, state_path=tmp_path / "state")
    with pytest.raises(ValueError, match="must be a named function for a run that can be resumed, got a lambda"):
        evaluate_line(attacks={"a": Entry(lambda *a, **k: Spy()(*a, **k), False)}, state_path=tmp_path / "other")
