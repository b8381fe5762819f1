"""The training loop, clean or against an attack, and its log."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from ..common import Progress, Step, seeded, silent
from ..nn import folded, prepared
from ..parallel import ALONE, Team
from ..precision import dense_products
from ..results import Measurement
from .arguments import TrainingArguments
from .checkpoint import Checkpoint, TrainingFolder
from .config import TrainConfig
from .rows import AUGMENTS, AppendedRows, BoundAttack, TrainingSet, search
from .stepper import BatchLoss, GraphStepper, Stepper, TrainingObjective, restored

_VALIDATED = 1000  # rows at a time


@dataclass(frozen=True)
class Epoch:
    """A finished epoch: a line of the log.

    epoch: counted from 0.  loss, train_accuracy: over the rows as trained, X' included.
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
    """A finished training: its log, and its seconds in all, with checkpoints, without work lost to a kill."""

    epochs: tuple[Epoch, ...]
    seconds: float

    def rows(self, **identity: Any) -> list[Measurement]:
        """Times, and figures of the last epoch, each with this identity."""
        last, each = self.epochs[-1], [epoch.seconds for epoch in self.epochs]
        attacks = [epoch.attack_seconds for epoch in self.epochs if epoch.attack_seconds]
        timed = {**identity, "unit": "seconds"}
        rows = [Measurement.of("training_seconds", self.seconds, **timed)]
        rows.append(Measurement.of("epoch_seconds", median(each), n=len(each), low=min(each), high=max(each), **timed))
        if attacks:
            rows.append(Measurement.of("attack_seconds", sum(attacks), n=len(attacks), **timed))
        figures = {"final_loss": last.loss, "train_accuracy": last.train_accuracy}
        if last.validation_accuracy is not None:
            figures["validation_accuracy"] = last.validation_accuracy
        return [*rows, *(Measurement.of(what, value, **identity) for what, value in figures.items())]


def fit(
    model: nn.Module,
    data: tuple[Tensor, Tensor],
    config: TrainConfig,
    attack: BoundAttack | None = None,
    *,
    objective: TrainingObjective | None = None,
    validation: tuple[Tensor, Tensor] | None = None,
    out: Path | str | None = None,
    card: Mapping[str, Any] | None = None,
    progress: Progress = silent,
    team: Team = ALONE,
) -> Training:
    """Trains a model in place, on its device, on the cross-entropy of its logits or another objective.

        training = fit(models.mlp(10), data.load("mnist", "train"), PAPER_MNIST,
                       partial(sparse_rs, ball=L0Ball(10, low=-100, high=100), queries=300), out="runs/f10")

    With an attack [Beliaev22, section 3.3]: before the epochs refresh, 2 * refresh, ... it attacks every row of X. X'
    becomes the broken rows with their true labels, without rows misclassified from the start. Until the next attack the
    epochs train on X and X' together, shuffled. A last batch is left out if it has fewer rows than ranks or, for a
    model with batch norm, fewer than two for each rank.
    Differs from [Beliaev22]'s supplement: X and X' are shuffled together. There each batch of X is shuffled with the
    rows of X' made from it and cut to its size. What is cut off, less one row each time, fills batches at the end; a
    last one that is not full is dropped.

    A killed training, called again with the same arguments and ``out``, resumes from its last checkpoint and ends with
    the weights of an undisturbed run, bit for bit on the CPU. A finished one loads its weights and returns.

    Args:
        data: x ``(n, ...)``, floating-point, and labels y ``(n,)``; copied to the device once.
        attack: ``attack(model, x, y, *, generator, rows)``, such as `sparse_rs` with ball and queries bound.
        objective: the loss of each epoch, such as `Trades` or `ell0.certify.Objective`; train accuracies in the log are
            then those of its scores. Default: the cross-entropy of the logits.
        validation: rows like ``data``, classified after each epoch, neither trained on nor attacked.
        out: folder for ``checkpoint.safetensors`` and ``log.jsonl``. Default: keep nothing.
        card: a JSON object that the checkpoint keeps.  progress: called after each epoch and each call of the attack.
        team: ranks that share batches and attacked rows (`ell0.parallel`). Each calls this with all rows and a copy of
            the model, and all end with the same weights. Batch norm takes the statistics of a rank's share.

    Raises:
        ValueError: an argument is wrong, ``out`` holds another training, or the loss is not finite.
        OSError: ``out`` cannot be written to; the last checkpoint stays whole.
    """
    arguments = TrainingArguments(model, data, config, attack, objective, validation, team)
    device = arguments.check()
    folder = TrainingFolder(out if team.first else None, {} if out is None else arguments.made_from(), card or {})
    checkpoint = team.once(folder.load)
    if checkpoint is not None:
        checkpoint.into(model)
    if device.type == "cuda":
        # A convolution works in the layout of its weight, and a GPU's fast ones want this one; no value changes.
        for parameter in model.parameters():
            if parameter.ndim == 4:
                parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    about: dict[str, Any] = checkpoint.about if checkpoint else {"log": [], "seconds": 0.0}
    log = [Epoch(**line) for line in about["log"]]
    if len(log) == config.epochs:
        return Training(tuple(log), about["seconds"])
    x, y = data[0].to(device), data[1].to(device).long()
    if (moves := AUGMENTS.get(config.augment)) and moves.once:
        ways = moves.draw(len(x), seeded(config.seed, "augment")).to(device)
        x = moves.moved(x, torch.arange(len(x), device=device), ways)
    rows = TrainingSet(x, y)
    data = rows.x, rows.y
    if validation is not None:
        validation = validation[0].to(device), validation[1].to(device)
    if attack is not None:
        attack = _attack_precision(config, device)(attack)
    run = _TrainingRun(model, data, config, attack, objective, validation, team, rows, folder, progress, log)
    run.start -= about["seconds"]
    precision = dense_products(tf32=config.precision == "tf32" and device.type == "cuda")
    with restored(model), precision, torch.random.fork_rng([device] if device.type == "cuda" else []):
        return run.train(checkpoint)


@dataclass
class _TrainingRun(TrainingArguments):
    """A training under way. log: its epochs so far.  start: when it began, earlier calls included."""

    rows: TrainingSet
    folder: TrainingFolder
    progress: Progress
    log: list[Epoch]
    start: float = field(default_factory=time.perf_counter)

    def train(self, checkpoint: Checkpoint | None) -> Training:
        """Trains the epochs that are left."""
        self.check_together()
        self.model.train()
        self._stepper = self._build(self.batch_loss(len(self.log)))
        self._found = AppendedRows.none(0, self.rows.x)
        if checkpoint is not None:
            self._stepper.load(checkpoint.state.get("optimizer", {}))
            found: dict[str, Any] = checkpoint.state["appended"] | checkpoint.about["attacked"]
            self._found = AppendedRows(**found)
            self.rows.append(self._found)
        for epoch in range(len(self.log), self.config.epochs):
            if (batch_loss := self.batch_loss(epoch)) != self._stepper.batch_loss:
                # A graph holds the loss that it was captured with.
                optimizer = {name: tensor.clone() for name, tensor in self._stepper.state().items()}
                self._stepper = self._build(batch_loss)
                self._stepper.load(optimizer)
            if self.config.rounds and self.config.batches_of(epoch) == epoch:
                self._stepper.restart()
            attacks = self.attack is not None and self.config.attacks_before(epoch)
            self.log.append(self._epoch(epoch, self._append(epoch) if attacks else 0.0))
            if epoch + 1 == self.config.epochs and self._stepper.average is not None:
                self._stepper.average.take()
            self.team.once(partial(self.folder.log, list(map(asdict, self.log))))
            self._save()
            self.progress(self.log[-1].step)
        return Training(tuple(self.log), time.perf_counter() - self.start)

    def _build(self, batch_loss: BatchLoss | None) -> Stepper:
        x, y, batch = self.rows.x, self.rows.y, self.config.batch
        graph = self.config.graph and x.device.type == "cuda" and self.team.size == 1
        if not graph or len(x) < batch:
            return Stepper(self.model, self.config, self.team, batch_loss)
        try:
            return GraphStepper(self.model, self.config, x[:batch], y[:batch], batch_loss)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ValueError(f"graph must be False: the step of this model cannot be captured: {error}") from error

    def _save(self) -> None:
        """Writes a checkpoint if it is time. If rank 0 fails all ranks learn it: they would wait for its next step."""
        seconds, done = time.perf_counter() - self.start, len(self.log) == self.config.epochs
        if not (self.team.once(self.folder.due) or done):
            return
        tensors, attacked = self._found.saved()
        state = {} if done else {"optimizer": self._stepper.state(), "appended": tensors}
        about = {"config": asdict(self.config), "seconds": seconds, "attacked": attacked}
        about |= {"epoch": len(self.log), "log": list(map(asdict, self.log))}
        self.team.once(partial(self.folder.save, self.model, state, about))

    def _append(self, epoch: int) -> float:
        """Makes X' anew; returns the seconds that this took, in earlier calls too."""
        assert self.attack is not None
        x, y, last = self.rows.x, self.rows.y, self.log[-1]
        if self._found.epoch != epoch:
            self._found = AppendedRows.none(epoch, x)
        self.model.eval()
        for found in search(self.attack, folded(self.model), x, y, self._found, self.config, self.team):
            self._found = found
            self._save()
            share, broken = found.done / len(x), len(found.rows)
            epoch_seconds = last.seconds / (len(x) + last.appended) * (len(x) + broken / share)
            left = self._seconds_left(epoch, epoch_seconds, found.seconds / share, share)
            self.progress(Step("rows attacked", found.done, len(x), f"{broken} broken", left))
        self.model.train()
        self.rows.append(self._found)
        return self._found.seconds

    def _seconds_left(self, first: int, epoch: float, attack: float | None, attacked: float = 0.0) -> float | None:
        """For the epochs from ``first`` on and their attacks, of which ``attacked`` is done; epoch, attack: seconds."""
        epochs = range(first, self.config.epochs)
        attacks = (0 if self.attack is None else sum(map(self.config.attacks_before, epochs))) - attacked
        return None if attacks and attack is None else len(epochs) * epoch + attacks * (attack or 0.0)

    def _epoch(self, epoch: int, attack_seconds: float) -> Epoch:
        start, config, rows, device = time.perf_counter(), self.config, self.rows, self.rows.x.device
        drawn = seeded(config.seed, "order", config.batches_of(epoch))
        order = torch.randperm(len(rows), generator=drawn, device="cpu")
        rest = len(order) % config.batch
        if len(order) > rest and rest < self.least_rows:
            order = order[: len(order) - rest]
        # The generators that a model's own draws, such as dropout, come from; torch gives it no other.
        seed = seeded(config.seed, "model", epoch).initial_seed() + self.team.rank
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            torch.cuda.default_generators[device.index].manual_seed(seed)
        batches = order.to(device).split(config.batch)
        moves, ways = AUGMENTS.get(config.augment), None
        if moves is not None and not moves.once:
            ways = moves.draw(len(order), seeded(config.seed, "augment", epoch)).to(device)
        rates = config.rates_of(epoch, len(batches))
        with self.team.steps():
            for step, rate in enumerate(torch.tensor(rates, device=device)):
                self._stepper.rate.copy_(rate)
                mine = self.team.share(batches[step])
                # Outside of the step's graph, which copies the batch into its own input anyway.
                if moves is None or ways is None:
                    x = rows.points[mine]
                else:
                    its = ways[step * config.batch : (step + 1) * config.batch]
                    x = moves.moved(rows.points, mine, self.team.share(its))
                self._stepper.step(x, rows.labels[mine], len(mine) * self.team.size / len(batches[step]))
        totals = self.team.gather(self._stepper.take)
        loss, right = (sum(total) / len(order) for total in zip(*totals, strict=True))
        if not math.isfinite(loss):
            raise ValueError(f"rates must be lower for this model, the loss of epoch {epoch} is {loss}")
        accuracy = self._validate()
        seconds = time.perf_counter() - start
        timed = [attack_seconds, *(done.attack_seconds for done in reversed(self.log))]
        left = self._seconds_left(epoch + 1, seconds, next(filter(None, timed), None))
        last = rates[-1]
        return Epoch(epoch, config.epochs, loss, right, accuracy, last, rows.appended, seconds, attack_seconds, left)

    def _validate(self) -> float | None:
        if self.validation is None:
            return None
        self.model.eval()
        with nullcontext() if self._stepper.average is None else self._stepper.average.shown():
            right = self.team.by_row(self._right, *self.validation)
        self.model.train()
        return int(right.sum()) / len(right)

    def _right(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad(), prepared(self.model):
            return torch.cat([self.model(some).argmax(1) for some in x.split(_VALIDATED)]) == y


@contextmanager
def _attack_precision(config: TrainConfig, device: torch.device) -> Iterator[None]:
    """Inside, models compute in the precision of the attack."""
    precision = config.attack_precision or ("tf32" if config.precision == "tf32" else "fp32")
    rounded = torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")
    with dense_products(tf32=precision == "tf32" and device.type == "cuda"), rounded:
        yield
