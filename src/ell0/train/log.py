"""The log of a training, one `Epoch` a line, and its summary."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

from ..common import Step
from ..results import Measurement


@dataclass(frozen=True)
class Epoch:
    """A finished epoch: a line of the log.

    epoch: counted from 0.  epochs: of the whole training.
    loss, train_accuracy: over the rows as trained, X' included.  validation_accuracy: None without validation rows.
    rate: learning rate of the last step.  appended: rows of X'.
    seconds: for steps and validation.  attack_seconds: for the attack before the epoch, 0 without one.
    seconds_left: for the rest of the training, attacks included; None until the first attack was timed.
    """

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

    @property
    def step(self) -> Step:
        """What `fit` reports of it."""
        note = f"loss {self.loss:.3g}, accuracy {100 * self.train_accuracy:.1f} %"
        if self.validation_accuracy is not None:
            note += f", validation {100 * self.validation_accuracy:.1f} %"
        return Step("epoch", self.epoch + 1, self.epochs, note, self.seconds_left)


@dataclass(frozen=True)
class Training:
    """A finished training.

    epochs: its log.  seconds: in all, with checkpoints, without work lost to a kill.
    """

    epochs: tuple[Epoch, ...]
    seconds: float

    def rows(self, **identity: Any) -> list[Measurement]:
        """Times, and figures of the last epoch, each with this identity."""
        last, each = self.epochs[-1], [epoch.seconds for epoch in self.epochs]
        attacks = [epoch.attack_seconds for epoch in self.epochs if epoch.attack_seconds]
        timed = {**identity, "unit": "seconds"}
        rows = [
            Measurement.of("training_seconds", self.seconds, **timed),
            Measurement.of("epoch_seconds", median(each), n=len(each), low=min(each), high=max(each), **timed),
        ]
        if attacks:
            rows.append(Measurement.of("attack_seconds", sum(attacks), n=len(attacks), **timed))
        rows.append(Measurement.of("final_loss", last.loss, **identity))
        rows.append(Measurement.of("train_accuracy", last.train_accuracy, **identity))
        if last.validation_accuracy is not None:
            rows.append(Measurement.of("validation_accuracy", last.validation_accuracy, **identity))
        return rows


def seconds_left(epochs: int, epoch_seconds: float, attacks: float, attack_seconds: float | None) -> float | None:
    """The time that the remaining epochs and attacks take; None if no attack was timed yet."""
    if not attacks:
        return epochs * epoch_seconds
    return None if attack_seconds is None else epochs * epoch_seconds + attacks * attack_seconds
