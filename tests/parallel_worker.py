"""What each process of a team does in `test_parallel`: ``parallel_worker.py RANKS JOB FOLDER [JOB FOLDER ...]``.

A start takes longer than most jobs, so one does several. RANKS is 0 where torchrun has started them. Or, with the words
of a command: ``parallel_worker.py command WORDS``.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import shutil
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from ell0 import L0Ball, data, evaluate, models, train
from ell0.attacks import sparse_rs
from ell0.certify import Objective
from ell0.cli import _attack, main
from ell0.common import Progress, Step, silent
from ell0.evaluation import Evaluation
from ell0.evaluation.state import AttackedRows
from ell0.nn import TruncatedLinear
from ell0.parallel import ALONE, Team, _Ranks, together
from ell0.recipe import running
from ell0.train import TrainConfig, Training
from ell0.train.folder import TrainingFolder
from ell0.train.stepper import Stepper

BALL = L0Ball(3, low=-100.0, high=100.0)
# 1,294 rows, and then those of X': the last batch is odd, and on four ranks one of them may have no row in it.
CONFIG = TrainConfig(epochs=7, batch=129, rates=(0.002,), optimizer="adam", refresh=3, attack_batch=500)
ATTACK = partial(sparse_rs, ball=BALL, queries=20)
ROWS = 101
JUDGES = {"rs": partial(sparse_rs, queries=30)}


def network() -> nn.Sequential:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return models.mlp(4, in_features=64, hidden=(64,))


def trained(out: Path | None, team: Team = ALONE, progress: Progress = silent) -> nn.Sequential:
    """Adversarially, on digits."""
    model = network()
    rows = data.load("digits", "train")
    train.fit(model, rows, CONFIG, ATTACK, validation=data.load("digits", "validation"), out=out, team=team,
              progress=progress)  # fmt: skip
    return model.eval()


def one_epoch(team: Team = ALONE) -> tuple[nn.Sequential, Training]:
    """Of few rows in batches that the ranks cannot share evenly: 7, 7 and 4."""
    model = network()
    x, y = data.load("digits", "train")
    return model, train.fit(model, (x[:18], y[:18]), TrainConfig(epochs=1, batch=7, rates=(0.1,)), team=team)


def normed(team: Team = ALONE) -> nn.Sequential:
    """A network with batch norm, whose statistics are buffers, not gradients."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
    x, y = data.load("digits", "train")
    train.fit(model, (x[:18], y[:18]), TrainConfig(epochs=2, batch=9, rates=(0.1,)), team=team)
    return model


SHARDED = {
    "sgd": TrainConfig(epochs=2, batch=29, rates=(0.1, 0.01), weight_decay=0.01),
    "adam": TrainConfig(epochs=4, batch=29, rates=(0.01,), optimizer="adam"),
    "bf16": TrainConfig(epochs=2, batch=29, rates=(0.1,), precision="bf16"),
}


def narrow() -> nn.Sequential:
    """What is hard to shard: three rows of weights on four ranks, a view written to, buffers, frozen weights."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        inner = nn.Sequential(TruncatedLinear(64, 3, k=4), nn.ReLU(inplace=True), nn.BatchNorm1d(3))
        model = nn.Sequential(nn.Flatten(), inner, nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 10))
    model[2].requires_grad_(False)
    return model


def narrowly(config: TrainConfig, team: Team = ALONE, out: Path | None = None, stop: bool = False) -> nn.Sequential:
    """The narrow network trained on few rows in two odd batches; stopped after two epochs, with a checkpoint, or to the
    end."""
    model = narrow()
    x, y = data.load("digits", "train")

    def progress(step: Step) -> None:
        if stop and step.done == 2:
            raise InterruptedError

    try:
        with patch.object(TrainingFolder, "due", lambda *_: True):
            train.fit(model, (x[:43], y[:43]), config, out=out, team=team, progress=progress)
    except InterruptedError:
        pass
    return model


OBJECTIVES: dict[str, train.TrainingObjective] = {"objective": Objective(2), "trades": train.Trades(4, steps=3)}


def taught(team: Team, objective: train.TrainingObjective) -> nn.Sequential:
    """Trained on a bound, in which weights are read and layers not called, and which changes from epoch to epoch, or
    with an attack in its steps."""
    model, config = network(), TrainConfig(epochs=3, batch=29, rates=(0.1,))
    x, y = data.load("digits", "train")
    train.fit(model, (x[:43], y[:43]), config, objective=objective, team=team)
    return model


def numbers(model: nn.Module) -> list[list[float]]:
    return [tensor.flatten().tolist() for tensor in model.state_dict().values()]


def judged(model: nn.Module, state: Path | None, team: Team = ALONE, batch: int = 16) -> Evaluation:
    """On labels of its own, so that all rows stand at first."""
    x, _ = data.load("digits", "test")
    x = x[:ROWS]
    return evaluate(
        model, x, model(x).argmax(1), BALL, JUDGES, budgets=[1, 3], batch=batch, state_path=state, team=team,
    )  # fmt: skip


def accuracy(model: nn.Module) -> float:
    x, y = data.load("digits", "test")
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())


def weights(model: nn.Module) -> str:
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in model.state_dict().values())).hexdigest()


def found(evaluation: Evaluation) -> str:
    """Everything but the seconds."""
    tensors = (evaluation.verdict, evaluation.distance, evaluation.queries, evaluation.tried, evaluation.x_adv)
    parts = [tensor.numpy().tobytes() for tensor in tensors]
    return hashlib.sha256(b"".join(parts) + repr(evaluation.flags).encode()).hexdigest()


def _all(folder: Path, team: Team) -> None:
    model = trained(folder / "f4", team)
    evaluation = judged(model, folder / "state.npz", team)
    epoch, training = one_epoch(team)
    told = {
        "weights": weights(model),
        "accuracy": accuracy(model),
        "found": found(evaluation),
        "normed": weights(normed(team)),
        "loss": training.epochs[0].loss,
        "epoch": numbers(epoch),
    }
    (folder / f"rank{team.rank}.json").write_text(json.dumps(told))


def _sharded(folder: Path, team: Team) -> None:
    """What a sharded team of these processes makes of the narrow network, and keeps on a rank."""
    assert isinstance(team, _Ranks)
    parts = _Ranks(team._fabric, sharded=True)
    told: dict[str, Any] = {}
    for name, config in SHARDED.items():
        told[name] = {"sharded": numbers(narrowly(config, parts)), "whole": numbers(narrowly(config, team))}
    for name, objective in OBJECTIVES.items():
        told[name] = {"sharded": numbers(taught(parts, objective)), "whole": numbers(taught(team, objective))}
    for home, its in (("whole", team), ("sharded", parts)):
        narrowly(SHARDED["adam"], its, folder / home, stop=True)
    again = team.once(lambda: Path(shutil.copytree(folder / "sharded", folder / "again")))
    told["resumed"] = numbers(narrowly(SHARDED["adam"], parts, again))
    stepper = Stepper(narrow(), SHARDED["adam"], parts)
    x, y = data.load("digits", "train")
    stepper.step(x[:9], y[:9])
    held: dict[str, list[Any]] = {
        "weights": list(stepper._names),
        "gradients": [part.grad for part in stepper._names],
        "state": [tensor for tensor in stepper.state().values() if tensor.ndim],
    }
    sizes = {kind: sum(tensor.to_local().numel() for tensor in tensors) for kind, tensors in held.items()}
    (folder / f"sharded{team.rank}.json").write_text(json.dumps({"told": told, "sizes": sizes}))


def _killed_in_training(folder: Path, team: Team) -> None:
    def progress(step: Step) -> None:
        if team.rank == 1 and step.what == "epoch" and step.done == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    trained(folder / "f4", team, progress)


def _killed_in_evaluation(folder: Path, team: Team) -> None:
    honest, calls = AttackedRows.of, 0

    def killed(*given: Any) -> AttackedRows:
        nonlocal calls
        calls += 1
        if team.rank == 1 and calls == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return honest(*given)

    with patch.object(AttackedRows, "of", killed):
        judged(network(), folder / "state.npz", team)


def _raises_on_rank_1(words: list[str]) -> int:
    """The command line, with data that only rank 1 cannot read."""
    if os.environ.get("LOCAL_RANK") != "1":
        return main(words)
    error = FileNotFoundError("tiny.npz is not on this machine")
    with patch.object(running, "read_splits", side_effect=error), patch.object(_attack, "load_rows", side_effect=error):
        return main(words)


JOBS = {
    "all": _all,
    "sharded": _sharded,
    "killed-in-training": _killed_in_training,
    "killed-in-sharded-training": _killed_in_training,
    "killed-in-evaluation": _killed_in_evaluation,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    gc.disable()  # it takes half a second of what Fabric imports
    ranks, *words = sys.argv[1:]
    if ranks in ("command", "raises"):
        raise SystemExit(main(words) if ranks == "command" else _raises_on_rank_1(words))
    jobs = list(zip(words[::2], map(Path, words[1::2]), strict=True))
    with together(int(ranks) or None, device="cpu", sharded=words[0] == "killed-in-sharded-training") as its:
        for job, folder in jobs:
            JOBS[job](folder, its)
