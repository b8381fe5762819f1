"""What each process of a team does in `test_parallel`.

``parallel_worker.py fork '[[RANKS, WORDS], ...]'`` forks the ranks of one run after the other, so that imports are done
once, and prints what the runs returned and wrote.
``parallel_worker.py WORDS`` is one process. WORDS are ``JOB FOLDER [JOB FOLDER ...]`` or those of an ``ell0`` command.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ell0 import L0Ball, data, evaluate, models, train
from ell0.attacks import sparse_rs
from ell0.certify import Objective
from ell0.cli import main
from ell0.common import Progress, Step, digest, silent
from ell0.evaluation import Evaluation
from ell0.parallel import ALONE, Team, together
from ell0.train import TrainConfig

BALL = L0Ball(3, low=-100.0, high=100.0)
# 647 rows, and then those of X': on four ranks the last batch of the first epochs has fewer rows than ranks.
CONFIG = TrainConfig(epochs=7, batch=129, rates=(0.002,), optimizer="adam", refresh=3, rounds=True, attack_batch=500)
ATTACK = partial(sparse_rs, ball=BALL, queries=8)


def network() -> nn.Sequential:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return models.mlp(4, in_features=64, hidden=(64,))


def trained(out: Path | None, team: Team = ALONE, progress: Progress = silent) -> nn.Sequential:
    """Adversarially, on digits."""
    model = network()
    (x, y), validation = data.load("digits", "train"), data.load("digits", "validation")
    train.fit(model, (x[:647], y[:647]), CONFIG, ATTACK, validation=validation, out=out, team=team, progress=progress)
    return model.eval()


def one_epoch(team: Team = ALONE) -> list[list[float]]:
    """The weights after batches that the ranks cannot share evenly, 7, 7 and 4 rows; then on a bound."""
    model, (x, y) = network(), data.load("digits", "train")
    for objective in (None, Objective(2, ramp=0)):
        config = TrainConfig(epochs=1, batch=7, rates=(0.1,), ema=0.5)
        train.fit(model, (x[:18], y[:18]), config, objective=objective, team=team)
    return [tensor.flatten().tolist() for tensor in model.state_dict().values()]


def judged(model: nn.Module, state: Path | None, team: Team = ALONE, batch: int = 16) -> Evaluation:
    """On its own labels, so that all rows stand at first."""
    x = data.load("digits", "test")[0][:61]
    y = model(x).argmax(1)
    attacks = {"rs": partial(sparse_rs, queries=15)}
    return evaluate(model, x, y, BALL, attacks, budgets=[1, 3], batch=batch, state_path=state, team=team)


def found(evaluation: Evaluation) -> str:
    """Everything but the seconds."""
    tensors = (evaluation.verdict, evaluation.distance, evaluation.queries, evaluation.tried, evaluation.x_adv)
    return digest(*tensors, repr(evaluation.flags))


def _all(folder: Path, team: Team) -> None:
    model = trained(folder / "f4", team)
    told = {
        "weights": digest(*model.state_dict().values()),
        "found": found(judged(model, folder / "state.npz", team)),
        "epoch": one_epoch(team),
    }
    (folder / f"rank{team.rank}.json").write_text(json.dumps(told))


def _resumed(folder: Path, team: Team) -> None:
    """`_all` in a copy of a folder in which a run was killed."""
    again = Path(f"{folder}-resumed")
    team.once(lambda: shutil.copytree(folder, again) and None)
    _all(again, team)


def _killed_in_training(folder: Path, team: Team) -> None:
    def progress(step: Step) -> None:
        if team.rank == 1 and step.what == "epoch" and step.done == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    trained(folder / "f4", team, progress)


def _killed_in_evaluation(folder: Path, team: Team) -> None:
    """Rank 1 is killed once the state has been written."""
    model, state = network(), folder / "state.npz"

    def kill(*_: object) -> None:
        if team.rank == 1 and state.exists():
            os.kill(os.getpid(), signal.SIGKILL)

    model.register_forward_pre_hook(kill)
    judged(model, state, team)


JOBS = {
    "all": _all,
    "resumed": _resumed,
    "killed-in-training": _killed_in_training,
    "killed-in-evaluation": _killed_in_evaluation,
}


def work(words: list[str]) -> int:
    if words[0] == "elsewhere-on-rank-1":
        if os.environ.get("LOCAL_RANK") == "1":
            os.chdir("/")
        return main(words[1:])
    if words[0] not in JOBS:
        return main(words)
    launched = None if "LOCAL_WORLD_SIZE" in os.environ else 2
    with together(launched, device="cpu") as team:
        for job, folder in zip(words[::2], words[1::2], strict=True):
            JOBS[job](Path(folder), team)
    return 0


def forked(ranks: int, words: list[str]) -> dict[str, Any]:
    """Exit codes and output of a run in forked processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": 0, "TORCHELASTIC_RUN_ID": "forked"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    children = []
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        for rank in range(ranks):
            children.append(os.fork())
            if not children[-1]:
                os.environ |= {key: str(value) for key, value in (shared | {"RANK": rank, "LOCAL_RANK": rank}).items()}
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                os._exit(_exit_code(words))
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read())
    return {"codes": codes, "out": texts[0], "err": texts[1]}


def _exit_code(words: list[str]) -> int:
    try:
        return work(words)
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


if __name__ == "__main__":
    torch.set_num_threads(1)
    gc.disable()  # it takes half a second of what Fabric imports
    if sys.argv[1] != "fork":
        raise SystemExit(work(sys.argv[1:]))
    import lightning_fabric  # noqa: F401

    data.load("digits", "train")  # imports scikit-learn
    print(json.dumps([forked(ranks, words) for ranks, words in json.loads(sys.argv[2])]))
