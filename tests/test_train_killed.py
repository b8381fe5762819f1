"""Trainings that are killed and called again: they end with the same bits."""

from __future__ import annotations

import errno
import math
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ell0 import L0Ball, common, train
from ell0.train import checkpoint as checkpoints
from ell0.train import fit, loop
from ell0.train.config import Optimizer
from small_training import ATTACK, CLASSES, CONFIG, Killed, dropping, network, read_log, rows, run, same


def figures(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A log without its times; of an attack's, that there was one."""
    return [
        {key: value for key, value in line.items() if "seconds" not in key} | {"attacked": line["attack_seconds"] > 0}
        for line in log
    ]


def of_other_weights() -> nn.Module:
    """What a caller who sets no seed would come back with."""
    return nn.Sequential(network(seed=1), nn.BatchNorm1d(CLASSES), nn.Dropout(0.1))


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint after every epoch and every call of the attack."""
    monkeypatch.setattr(checkpoints, "_SHARE", math.inf)


@pytest.mark.parametrize(
    ("optimizer", "ema", "share"), [("sgd", 0.0, math.inf), ("adam", 0.0, 1e-9), ("adamw", 0.95, math.inf)]
)
def test_stopped_anywhere_it_goes_on_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: Optimizer, ema: float, share: float
) -> None:
    """With as many checkpoints as there can be, and with as few."""
    monkeypatch.setattr(checkpoints, "_SHARE", share)
    config = replace(CONFIG, optimizer=optimizer, ema=ema, weight_decay=0.1, schedule="cosine", rates=(0.02,))
    whole = run(tmp_path / "whole", config=config)
    for stop in range(12):
        out = tmp_path / str(stop)
        with pytest.raises(Killed):
            run(out, stop=stop, config=config)
        model = run(out, of_other_weights(), config=config)
        assert same(model, whole), stop
        assert figures(read_log(out)) == figures(read_log(tmp_path / "whole")), stop
        assert train.load_checkpoint(out).about["epoch"] == 6


@pytest.mark.usefixtures("often")
def test_an_attack_goes_on_where_it_was_and_keeps_its_seconds(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        run(tmp_path, stop=3)  # two epochs, two calls of the attack
    checkpoint = train.load_checkpoint(tmp_path)
    attacked = checkpoint.about["attacked"]
    assert (attacked["epoch"], attacked["done"], len(checkpoint.about["log"])) == (2, 40, 2)
    about = checkpoint.about | {"attacked": attacked | {"seconds": 1000.0}, "seconds": 1001.0}
    checkpoints.write(tmp_path / "checkpoint.safetensors", replace(checkpoint, about=about))
    seen: list[common.Step] = []
    fit(dropping(), rows(), CONFIG, ATTACK, validation=rows(9, seed=1), out=tmp_path, progress=seen.append)
    assert (seen[0].what, seen[0].done, seen[0].total) == ("rows attacked", 50, 50)
    checkpoint = train.load_checkpoint(tmp_path)
    assert checkpoint.about["log"][2]["attack_seconds"] > 1000
    assert checkpoint.about["seconds"] > 1001


def test_a_training_that_is_done_is_not_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = run(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr(loop, "_TrainingRun", lambda *_: pytest.fail("it was begun again"))
    assert same(run(tmp_path, of_other_weights()), model)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    # What a kill left behind is cleared up.
    for name in ("log.jsonl", ".checkpoint.safetensors.0123abcd.part", ".log.jsonl.4567abcd.part"):
        (tmp_path / name).write_text("half a li")
    run(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


LOW = torch.full((12,), -5.3)  # prints as LOW - 1e-5 does


@pytest.mark.parametrize(
    ("other", "differs"),
    [
        ({"config": replace(CONFIG, epochs=7, seed=3)}, "config.epochs, config.seed"),
        ({"data": rows(50, seed=5)}, "x of data, y of data"),
        ({"validation": None}, "x of validation, y of validation"),
        ({"attack": partial(ATTACK, queries=9)}, "parameters of attack"),
        ({"attack": partial(ATTACK, ball=L0Ball(3, low=LOW - 1e-5, high=5.0))}, "parameters of attack"),
        ({"attack": None}, "parameters of attack"),
        ({"model": nn.Sequential(network(), nn.BatchNorm1d(CLASSES), nn.Dropout(0.2))}, "model"),
    ],
)
def test_the_folder_of_another_training_is_refused(tmp_path: Path, other: dict[str, Any], differs: str) -> None:
    first: dict[str, Any] = {"attack": partial(ATTACK, ball=L0Ball(3, low=LOW.clone(), high=5.0))}
    with pytest.raises(Killed):
        run(tmp_path, stop=6, **first)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    message = f"out must be of this training, but {str(tmp_path)!r} differs in: {differs}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        run(tmp_path, **(first | other))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_what_fit_did_not_write_is_not_overwritten(tmp_path: Path) -> None:
    path = train.save_checkpoint(tmp_path / "checkpoint.safetensors", dropping())
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"^out must be an empty folder or one of this version's fit, but .* is of an"):
        run(tmp_path)
    path.write_bytes(before[:-3])
    with pytest.raises(ValueError, match=r"checkpoint\.safetensors is altered, its content does not fit"):
        run(tmp_path)
    assert path.read_bytes() == before[:-3]
    with pytest.raises(OSError, match=r"^out must be a name in a folder that can be written, got .*checkpoint"):
        run(path)


@pytest.mark.usefixtures("often")
def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []

    def full(handle: int) -> None:
        size = os.fstat(handle).st_size
        if size > 5000:
            if len(done) == 4:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            done.append(size)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"checkpoint.safetensors could not be written.*: No space left on device$"):
        run(tmp_path)
    assert len((tmp_path / "checkpoint.safetensors").read_bytes()) == done[-1]
    monkeypatch.undo()
    assert same(run(tmp_path), run(None))


def test_checkpoints_take_little_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock on which an epoch takes 7 s and a checkpoint 10 s: of 100 s at most 5 go into checkpoints."""
    written: list[int] = []
    clock = [0.0]

    def write(_: object, checkpoint: train.Checkpoint, _previous: object) -> None:
        written.append(checkpoint.about["epoch"])
        clock[0] += 10

    def progress(_: object) -> None:
        clock[0] += 7

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(checkpoints, "write", write)
    fit(network(), rows(), replace(CONFIG, epochs=60), out=tmp_path, progress=progress)
    assert written == [1, 30, 59, 60]


KILLER = """
import os, random, signal, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import torch
import small_training

torch.set_num_threads(1)
torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # imports what its first use imports, once for all children


def train(out, seconds=None):
    process = os.fork()
    if not process:
        small_training.run(out)
        while seconds is not None:  # never ends before it is killed
            signal.pause()
        os._exit(0)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(process, signal.SIGKILL)
    return os.waitpid(process, 0)[1]


start = time.perf_counter()
assert train(None) == 0
took = time.perf_counter() - start
chance = random.Random(0)
for folder in map(Path, sys.argv[2:]):
    assert train(folder, chance.uniform(0, took)) == signal.SIGKILL
    assert train(folder) == 0
"""


def test_kill_9_at_random_moments(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole")
    folders = [str(tmp_path / str(i)) for i in range(5)]
    command = [sys.executable, "-c", KILLER, str(Path(__file__).parent), *folders]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    for out in map(Path, folders):
        assert same(train.load_checkpoint(out).tensors, whole), out
        assert figures(read_log(out)) == figures(read_log(tmp_path / "whole")), out
