"""Several ranks do what one does: threads for the properties, processes for launchers, gradients and kills."""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from email.message import Message
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.error import ContentTooShortError

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import parallel_worker as worker
from ell0 import L0Ball, evaluate, parallel, recipe, train
from ell0.attacks import sparse_rs
from ell0.attacks.contract import Victim
from ell0.cli import main
from ell0.cli.model import check_ranks
from ell0.common import digest
from ell0.evaluation import flags as flags_room
from ell0.evaluation.state import State
from ell0.parallel import ALONE, Team
from ell0.precision import _SWITCHES
from ell0.train.checkpoint import TrainingFolder
from ell0.train.rows import AppendedRows, TrainingSet, search
from small_training import read_log
from tiny_recipe import write_recipe

T = TypeVar("T")
STARTS = ThreadPoolExecutor(2)


class Thread(Team):
    """A rank that is a thread of this process."""

    told: Exception | None = None

    def __init__(self, rank: int, size: int, board: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self._board, self._barrier = rank, size, board, barrier

    def gather(self, work: Callable[[], T]) -> list[T]:
        self._board[self.rank] = parallel._tried(work)
        self._barrier.wait(900)
        said = copy.deepcopy(self._board)  # processes share no memory
        self._barrier.wait(900)
        for error, _ in said:
            if error is not None:
                self.told = error
                raise error
        return [value for _, value in said]

    def once(self, work: Callable[[], T]) -> T:
        return self.gather(work if self.first else lambda: None)[0]  # type: ignore[return-value]


def on_ranks(size: int, work: Callable[[Team], T]) -> list[T]:
    """What the work gives on each of so many ranks."""
    board, barrier = [None] * size, threading.Barrier(size)

    def guarded(team: Thread) -> T:
        try:
            return work(team)
        except BaseException as error:
            if error is not team.told:  # what was told ends the others by itself, and some may still be on their way
                barrier.abort()  # nobody waits for a rank that is gone
            raise

    # Torch's switches for float32 are those of the whole process, and threads put them back in any order.
    before = [switch.fp32_precision for switch in _SWITCHES]
    try:
        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(guarded, [Thread(rank, size, board, barrier) for rank in range(size)]))
    finally:
        for switch, precision in zip(_SWITCHES, before, strict=True):
            switch.fp32_precision = precision


class Signs(nn.Module):
    """Two classes by a sum of whole numbers: a row's answer is the same in every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([3.0, 2.0, 2.0, 1.0, 1.0, 1.0]))

    def forward(self, x: Tensor) -> Tensor:
        score = (x * self.weight).sum(1)
        return torch.stack([-score, score], 1)


def points(n: int) -> tuple[Tensor, Tensor]:
    x = torch.randint(-2, 3, (n, 6), generator=torch.Generator().manual_seed(n)).float()
    wrong = torch.arange(n) % 7 == 3
    return x, (Signs()(x).argmax(1) + wrong) % 2


BALL = L0Ball(2, low=-2.0, high=2.0)
WEAK = {"weak": partial(sparse_rs, queries=3), "rs": partial(sparse_rs, queries=8)}


@settings(max_examples=10)
@given(st.integers(5, 20), st.integers(1, 5))
def test_a_function_of_rows_is_shared(n: int, size: int) -> None:
    x, y = points(n)
    for mine in on_ranks(size, lambda team: team.by_row(partial(torch.add, alpha=2), x[:, 0], y)):
        assert torch.equal(mine, x[:, 0] + 2 * y)


@settings(max_examples=10)
@given(st.integers(6, 40), st.integers(2, 6), st.integers(1, 9))
def test_figures_do_not_depend_on_ranks_or_batch(n: int, size: int, batch: int) -> None:
    x, y = points(n)

    def judged(team: Team, batch: int = batch) -> str:
        return worker.found(evaluate(Signs(), x, y, BALL, WEAK, budgets=[1, 2], batch=batch, team=team))

    assert set(on_ranks(size, judged)) == {judged(ALONE, batch=1000)}


def test_rank_0_alone_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = points(40)
    wrote: list[int] = []
    monkeypatch.setattr(State, "save", lambda *_: wrote.append(threading.get_ident()))

    def judged(team: Team) -> int:
        path = tmp_path / ("state.npz" if team.first else "nowhere/state.npz")
        evaluate(Signs(), x, y, BALL, WEAK, batch=4, state_path=path, team=team)
        return threading.get_ident()

    first, *_ = on_ranks(3, judged)
    assert set(wrote) == {first}


def test_a_run_measures_the_same_on_ranks(tiny: Path, out: Path, whole: Path) -> None:
    """What is trained already: threads do not average gradients."""
    for name in ("results.json", "gallery.safetensors"):
        (out / name).unlink()
    shutil.rmtree(out / "verdicts")
    assert on_ranks(3, lambda team: recipe.run(tiny, out=out, device="cpu", team=team)) == [out] * 3

    mine, alone = (json.loads((folder / "results.json").read_text()) for folder in (out, whole))
    assert figures(mine) == figures(alone)
    assert mine["device"].startswith("3 ranks, each ")
    assert (out / "gallery.safetensors").exists()


def test_errors_that_did_not_come_back_are_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful(Victim):
        def errs(self, points: Tensor, at: Tensor) -> Tensor:
            return torch.zeros_like(super().errs(points, at))

    x, y = points(30)
    monkeypatch.setattr(flags_room, "Victim", Forgetful)

    def lost(team: Team) -> tuple[int, bool]:
        result = evaluate(Signs(), x, y, BALL, WEAK, team=team)
        broken = int((result.verdict > 0).sum())
        return broken, f"on the boundary: {broken} broken rows" in " ".join(result.flags)

    (broken, said), *others = on_ranks(3, lost)
    assert broken > 3
    assert said
    assert others == [(broken, said)] * 2


@settings(max_examples=10)
@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 9))
def test_x_prime_does_not_depend_on_ranks_or_batch(n: int, size: int, batch: int) -> None:
    x, y = points(n)
    attack = partial(sparse_rs, ball=BALL, queries=4)

    def found(team: Team, batch: int = batch) -> list[list[float]]:
        config = train.TrainConfig(attack_batch=batch)
        *_, last = search(attack, Signs(), x, y, AppendedRows.none(2, x), config, team)
        assert last.done == n
        rows = TrainingSet(x, y)
        rows.append(last)
        return rows.points[: len(rows)].tolist()

    alone = found(ALONE, batch=1000)
    assert all(one == alone for one in on_ranks(size, found))


def refused(size: int, work: Callable[[Team], object], message: str) -> None:
    """Every rank raises the error by itself."""

    def one(team: Team) -> None:
        with pytest.raises(ValueError, match=message):
            work(team)

    on_ranks(size, one)


def test_what_ranks_cannot_share_is_refused() -> None:
    normed = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    config, few = train.TrainConfig(epochs=1, batch=7), "must have at least a row for each of the 4 ranks, got 3"
    refused(4, lambda team: evaluate(Signs(), *points(3), BALL, WEAK, team=team), f"^x {few}$")
    refused(4, lambda team: train.fit(Signs(), points(3), config, team=team), f"^data {few}$")
    refused(4, lambda team: train.fit(normed, points(30), config, team=team), "^batch must be >= 8 for this model")
    with pytest.raises(ValueError, match=r"devices must be an int >= 1, got 0"), parallel.together(0):
        pass


def test_ranks_have_the_same_model_and_rows() -> None:
    def check(team: Team, odd: int = -1) -> None:
        model = Signs()
        with torch.no_grad():
            model.weight.add_(float(team.rank == odd))
        check_ranks(team, model, *points(9))

    on_ranks(3, check)
    refused(3, partial(check, odd=2), "^model and data must be the same on all ranks, got others on rank 2")


@pytest.mark.parametrize("method", ["log", "save"])
def test_all_ranks_know_what_rank_0_could_not_write(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would wait for it in the next step."""

    def full(folder: TrainingFolder, *_: object, **__: object) -> None:
        if folder._path is not None:
            raise OSError("the disk is full")

    monkeypatch.setattr(TrainingFolder, method, full)
    attack = partial(sparse_rs, ball=BALL, queries=2)

    def said(team: Team) -> str:
        with pytest.raises(OSError, match="the disk is full") as error:
            train.fit(Signs(), points(9), train.TrainConfig(epochs=2, refresh=1), attack, out=tmp_path, team=team)
        return str(error.value)

    assert on_ranks(2, said) == ["the disk is full"] * 2


def test_a_last_batch_without_a_row_for_each_rank_is_left_out() -> None:
    """Gradients of a thread are its own, so the rows that each is trained on are looked at, not the weights."""
    x, y = points(30)

    def seen(team: Team) -> list[int]:
        model, sizes = nn.Sequential(nn.Linear(6, 2)), list[int]()
        model.register_forward_hook(lambda its, args, _: sizes.append(len(args[0])) if its.training else None)
        train.fit(model, (x[:23], y[:23]), train.TrainConfig(epochs=1, batch=7, rates=(0.1,)), team=team)
        return sizes

    assert seen(ALONE) == [7, 7, 7, 2]
    assert on_ranks(2, seen) == [[4, 4, 4, 1], [3, 3, 3, 1]]
    assert on_ranks(3, seen) == [[3, 3, 3], [2, 2, 2], [2, 2, 2]]


def environment() -> dict[str, str]:
    """That of a process which no launcher has started."""
    gone = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR", "NODE_RANK")
    kept = {key: value for key, value in os.environ.items() if key not in gone}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def start(*words: object, torchrun: int = 0) -> subprocess.CompletedProcess[str]:
    """Runs a worker to its end."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(torchrun)] if torchrun else []
    command = [sys.executable, *launcher, worker.__file__, *map(str, words)]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=900)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def killed_in_evaluation(folder: Path) -> Future[subprocess.CompletedProcess[str]]:
    """Two processes that Fabric starts, one of which is killed."""
    return STARTS.submit(start, "killed-in-evaluation", folder)


@pytest.fixture(scope="module")
def runs(folder: Path, whole: Path, killed_in_evaluation: object) -> dict[str, dict[str, Any]]:  # noqa: ARG001
    """Exit codes and output of runs in forked processes, by the name of their folder."""
    tiny = write_recipe(folder)
    options = ["--device", "cpu", "--devices", "2"]
    words: dict[str, tuple[int, list[str]]] = {
        "killed": (2, ["killed-in-training", f"{folder}/killed"]),
        "two": (2, ["all", f"{folder}/two", "resumed", f"{folder}/killed"]),
        "four": (4, ["all", f"{folder}/four"]),
        "run": (2, ["elsewhere-on-rank-1", "run", tiny.name, "--out", f"{folder}/run", *options]),
        "attack": (2, ["elsewhere-on-rank-1", "attack", str(whole / "f2"), "--data", rows_of(tiny).name, *options]),
    }
    for name in words:
        (folder / name).mkdir(exist_ok=True)
    forks = subprocess.run(
        [sys.executable, worker.__file__, "fork", json.dumps(list(words.values()))],
        env=environment(), cwd=folder, capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    assert forks.returncode == 0, forks.stderr
    return dict(zip(words, json.loads(forks.stdout), strict=True))


def told(folder: Path, ranks: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize(("name", "ranks"), [("two", 2), ("four", 4)])
def test_processes_train_and_judge_as_one(name: str, ranks: int, folder: Path, runs: dict[str, dict[str, Any]]) -> None:
    assert runs[name]["codes"] == [0] * ranks, runs[name]["err"]
    all_ = told(folder / name, ranks)
    assert all(one == all_[0] for one in all_)
    model = worker.network()
    train.load_checkpoint(folder / name / "f4").into(model)
    assert digest(*model.state_dict().values()) == all_[0]["weights"]
    assert all_[0]["found"] == worker.found(worker.judged(model.eval(), None, batch=1000))
    for mine, its in zip(worker.one_epoch(), all_[0]["epoch"], strict=True):
        assert its == pytest.approx(mine, rel=1e-4, abs=1e-6)


def test_a_rank_killed_in_training_ends_the_run(runs: dict[str, dict[str, Any]], folder: Path) -> None:
    """Which two processes resume."""
    first, second = runs["killed"]["codes"]
    assert (first > 0, second) == (True, -signal.SIGKILL)
    assert "a process of this run has ended" in runs["killed"]["err"]
    assert 0 < len(read_log(folder / "killed" / "f4")) < worker.CONFIG.epochs
    assert told(folder / "killed-resumed", 2) == told(folder / "two", 2)


def test_a_rank_killed_in_evaluation_ends_the_run(
    killed_in_evaluation: Future[subprocess.CompletedProcess[str]], folder: Path
) -> None:
    assert killed_in_evaluation.result().returncode != 0
    model, state = worker.network().eval(), folder / "state.npz"
    assert state.exists()
    assert worker.found(worker.judged(model, state)) == worker.found(worker.judged(model, None))


@pytest.mark.parametrize("name", ["run", "attack"])
def test_what_one_rank_raises_is_told_by_rank_0(name: str, runs: dict[str, dict[str, Any]]) -> None:
    assert runs[name]["codes"] == [1, 0]
    (said,) = runs[name]["err"].splitlines()
    assert said.startswith("ell0: ")
    assert {"run": "tiny.toml", "attack": "rows.npz"}[name] in said
    assert runs[name]["out"] == ""


def test_an_error_that_cannot_travel_is_told_as_text() -> None:
    told = parallel._tellable(ContentTooShortError("short", ("", Message())))  # pickled, it cannot be made again
    assert (type(told), str(told)) == (RuntimeError, "ContentTooShortError: <urlopen error short>")


def figures(results: dict[str, Any]) -> list[dict[str, Any]]:
    rows = [row for row in results["rows"] if not row["what"].endswith("_seconds")]
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def rows_of(tiny: Path) -> Path:
    """The rows that the recipe measures, in a file such as commands take."""
    rows, path = np.load(tiny.parent / "tiny.npz"), tiny.parent / "rows.npz"
    np.savez(path, x=rows["x_test"], y=rows["y_test"])
    return path


def test_attack_and_certify_are_shared(tiny: Path, whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The one started by ell0, the other by torchrun."""
    out, common = tiny.parent / "out.json", [str(whole / "f2"), "--data", str(rows_of(tiny)), "--device", "cpu"]
    options = {
        "attack": "--beta 10 --queries 20 --steps 3 --rows 23 --fail-under 1",
        "certify": "--rows 23 --batch 5 --json --challenge --queries 5 --steps 2",
    }
    attack, certify = ([command, *common, *words.split()] for command, words in options.items())
    first = STARTS.submit(start, *attack, "--out", out, "--devices", 2)
    certified, attacked = start(*certify, torchrun=2), first.result()
    assert attacked.returncode == 3, attacked.stderr
    assert attacked.stdout.count("clean accuracy") == 1
    assert attacked.stderr.split()[-3:] == ["written", "to", str(out)]
    assert main([*attack, "--json"]) == 3
    mine, theirs = json.loads(capsys.readouterr().out), json.loads(out.read_text())
    assert figures(theirs) == figures(mine)
    assert theirs["command"] == mine["command"]
    assert theirs["device"] == f"2 ranks, each {mine['device']}"
    assert certified.returncode == 0, certified.stderr
    assert main(certify) == 0
    assert figures(json.loads(certified.stdout)) == figures(json.loads(capsys.readouterr().out))


def test_one_process_needs_no_fabric(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lightning_fabric", None)
    with parallel.together() as team:
        assert team is ALONE
    for words in (["run", str(tiny), "--out", str(tiny.parent / "run")], ["attack", "m:m"], ["certify", "m:m"]):
        assert main([*words, "--devices", "2", "--device", "cpu"]) == 1
        (said,) = capsys.readouterr().err.splitlines()
        assert "pip install 'ell0[dist]'" in said
    assert not (tiny.parent / "run").exists()
