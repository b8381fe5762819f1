"""What each process of a team does in `test_parallel`: ``parallel_worker.py JOB FOLDER [RANKS]``."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from ell0 import L0Ball, data, evaluate, models, train
from ell0.attacks import sparse_rs
from ell0.cli import main
from ell0.evaluation import Evaluation
from ell0.evaluation._state import Found
from ell0.parallel import ALONE, Team, together
from ell0.recipe import _run
from ell0.train import Epoch, TrainConfig, Training

BALL = L0Ball(3, low=-100.0, high=100.0)
# 1,294 rows, and then those of X': the last batch is odd, and on four ranks one of them may have no row in it.
CONFIG = TrainConfig(epochs=9, batch=129, rates=(0.002,), optimizer="adam", refresh=3, attack_batch=500)
ATTACK = partial(sparse_rs, ball=BALL, queries=20)
ROWS = 101
JUDGES = {"rs": partial(sparse_rs, queries=30)}


def network() -> nn.Sequential:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return models.mlp(4, in_features=64, hidden=(64,))


def trained(out: Path | None, team: Team = ALONE, progress: Callable[[Any], None] = lambda _: None) -> nn.Sequential:
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


def judged(model: nn.Module, state: Path | None, team: Team = ALONE, batch: int = 16) -> Evaluation:
    """On labels of its own, so that all rows stand at first."""
    x, _ = data.load("digits", "test")
    x = x[:ROWS]
    return evaluate(
        model, x, model(x).argmax(1), BALL, JUDGES, budgets=[1, 3], batch=batch, state_path=state, team=team,
        progress=False,
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
        "loss": training.loss,
        "epoch": [t.flatten().tolist() for t in epoch.state_dict().values()],
    }
    (folder / f"rank{team.rank}.json").write_text(json.dumps(told))


def _killed_in_training(folder: Path, team: Team) -> None:
    def progress(stage: Any) -> None:
        if team.rank == 1 and isinstance(stage, Epoch) and stage.epoch == 4:
            os.kill(os.getpid(), signal.SIGKILL)

    trained(folder / "f4", team, progress)


def _killed_in_evaluation(folder: Path, team: Team) -> None:
    honest, calls = Found.of, 0

    def killed(*given: Any) -> Found:
        nonlocal calls
        calls += 1
        if team.rank == 1 and calls == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return honest(*given)

    with patch.object(Found, "of", killed):
        judged(network(), folder / "state.npz", team)


def _raises_on_rank_1(folder: Path) -> int:
    """The command line, on a recipe whose data only rank 1 cannot read."""
    words = ["run", str(folder / "tiny.toml"), "--out", str(folder / "run"), "--device", "cpu", "--devices", "2"]
    if os.environ.get("LOCAL_RANK") != "1":
        return main(words)
    with patch.object(_run, "splits", side_effect=FileNotFoundError("tiny.npz is not on this machine")):
        return main(words)


JOBS = {"all": _all, "killed-in-training": _killed_in_training, "killed-in-evaluation": _killed_in_evaluation}

if __name__ == "__main__":
    torch.set_num_threads(1)
    job, where = sys.argv[1], Path(sys.argv[2])
    if job == "raises":
        raise SystemExit(_raises_on_rank_1(where))
    with together(int(sys.argv[3]) if len(sys.argv) > 3 else None, device="cpu") as its:
        JOBS[job](where, its)
