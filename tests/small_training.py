"""A small training that can be stopped anywhere."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ell0 import L0Ball, models
from ell0.attacks import sparse_rs
from ell0.train import TrainConfig, fit
from ell0.train.stepper import Stepper

CONFIG = TrainConfig(epochs=6, batch=16, rates=(0.2, 0.1), refresh=2, attack_batch=20)
ATTACK = partial(sparse_rs, ball=L0Ball(3, low=-5.0, high=5.0), queries=4)
CLASSES = 3


def rows(n: int = 50, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Points around the corners of a cube, one for each class."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (n,), generator=g)
    return F.one_hot(y, 12).float() * 2 + 0.5 * torch.randn(n, 12, generator=g), y


def images(n: int = 24, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Three classes of 3 x 6 x 6 images, each bright in rows of its own."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 3
    x = 0.3 * torch.randn(n, 3, 6, 6, generator=generator)
    x[torch.arange(n), :, y] += 0.7
    return x.clamp(-1, 1), y


def network(*layers: nn.Module, seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return models.mlp(1, in_features=12, hidden=(10,), classes=CLASSES) if not layers else nn.Sequential(*layers)


def same(one: nn.Module | dict[str, Tensor], other: nn.Module | dict[str, Tensor]) -> bool:
    a, b = (w if isinstance(w, dict) else w.state_dict() for w in (one, other))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def read_log(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


class Killed(BaseException):
    """What `run` raises at its stop."""


def dropping() -> nn.Module:
    """Everything that a checkpoint must restore: statistics, random draws, a truncated layer."""
    return nn.Sequential(network(), nn.BatchNorm1d(CLASSES), nn.Dropout(0.1))


def run(out: Path | None, model: nn.Module | None = None, stop: int | None = None, **other: Any) -> nn.Module:
    """A training that raises Killed at its stop-th report of progress: an epoch, or a call of the attack."""
    events = itertools.count()

    def progress(_: object) -> None:
        if next(events) == stop:
            raise Killed

    model = dropping() if model is None else model
    arguments: dict[str, Any] = {"data": rows(), "config": CONFIG, "attack": ATTACK, "validation": rows(9, seed=1)}
    fit(model, **(arguments | {"progress": progress, "out": out} | other))
    return model


class FakeGraph:
    """Stands in for a CUDA graph on machines without a GPU: to replay, it does the step again."""

    def replay(self) -> None:
        stepper = self.stepper  # type: ignore[attr-defined]
        stepper._loss.copy_(Stepper.step(stepper, stepper._x, stepper._y))


@contextmanager
def nothing(*_: object) -> Iterator[Any]:
    yield


class FakeStream:
    def wait_stream(self, _: object) -> None: ...
