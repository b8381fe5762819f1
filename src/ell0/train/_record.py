"""What a training says of itself: while it runs, in its log and at its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar

from ..results import Measurement


@dataclass(frozen=True)
class Epoch:
    """An epoch that is done; also a line of the log.

    epoch: from 0.  epochs: of the whole training.
    loss, train_accuracy: over the rows as they were trained, X' included.  validation_accuracy: None without such rows.
    rate: the learning rate of its last step.  appended: rows of X'.
    seconds: of its steps and its validation.  attack_seconds: of the attack before it, 0 if there was none.
    seconds_left: of the whole training, attacks to come included; None until the first attack has been timed.
    """

    stage: ClassVar[str] = "epoch"

    epoch: int
    epochs: int
    loss: float
    train_accuracy: float
    validation_accuracy: float | None
    rate: float
    appended: int
    seconds: float
    attack_seconds: float
    seconds_left: float | None


@dataclass(frozen=True)
class AttackStage:
    """How far the attack before an epoch is.

    done, rows: training rows attacked, of all.  appended: rows of X' so far.  seconds: of this attack so far.
    seconds_left: of the whole training.
    """

    stage: ClassVar[str] = "attack"

    epoch: int
    epochs: int
    done: int
    rows: int
    appended: int
    seconds: float
    seconds_left: float | None


Progress = Callable[[Epoch | AttackStage], None]


@dataclass(frozen=True)
class Training:
    """A training that is done.

    epochs: its log.  seconds: of all of it, checkpoints included, work that a kill lost aside.
    """

    epochs: tuple[Epoch, ...]
    seconds: float

    @property
    def attack_seconds(self) -> float:
        """Of all attacks together."""
        return sum(epoch.attack_seconds for epoch in self.epochs)

    @property
    def appended(self) -> int:
        """Rows of X' in the last epoch."""
        return self.epochs[-1].appended

    @property
    def loss(self) -> float:
        """Of the last epoch."""
        return self.epochs[-1].loss

    @property
    def train_accuracy(self) -> float:
        """Of the last epoch."""
        return self.epochs[-1].train_accuracy

    @property
    def validation_accuracy(self) -> float | None:
        """Of the last epoch."""
        return self.epochs[-1].validation_accuracy

    def rows(self, **identity: Any) -> list[Measurement]:
        """Times of the stages, and the figures of the end, each with this identity."""
        each = [epoch.seconds for epoch in self.epochs]
        attacks = [epoch.attack_seconds for epoch in self.epochs if epoch.attack_seconds]
        timed = {**identity, "unit": "seconds"}
        rows = [
            Measurement.of("training_seconds", self.seconds, **timed),
            Measurement.of("epoch_seconds", median(each), n=len(each), low=min(each), high=max(each), **timed),
        ]
        if attacks:
            rows.append(Measurement.of("attack_seconds", sum(attacks), n=len(attacks), **timed))
        rows.append(Measurement.of("final_loss", self.loss, **identity))
        rows.append(Measurement.of("train_accuracy", self.train_accuracy, **identity))
        if self.validation_accuracy is not None:
            rows.append(Measurement.of("validation_accuracy", self.validation_accuracy, **identity))
        return rows


def seconds_left(epochs: int, epoch_seconds: float, attacks: float, attack_seconds: float | None) -> float | None:
    """For the epochs and attacks to come, if it is known what one takes."""
    if not attacks:
        return epochs * epoch_seconds
    return None if attack_seconds is None else epochs * epoch_seconds + attacks * attack_seconds
