"""The training loop: clean, or against an attack."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..common import Progress, Step, seeded, silent
from ..nn import folded, prepared
from ..parallel import ALONE, Team
from ..precision import dense_products
from .appended import AppendedRows, BoundAttack, TrainingSet, search
from .augment import AUGMENTS
from .checkpoint import Checkpoint
from .checks import Labelled, check_arguments, check_together, least_rows
from .config import TrainConfig
from .folder import TrainingFolder, made_from
from .log import Epoch, Training, seconds_left
from .stepper import BatchLoss, GraphStepper, Stepper, TrainingObjective, attack_precision, modes_restored

_VALIDATED = 1000  # rows at a time


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
    epochs train on X and X' together, shuffled.

    The last batch of an epoch may be smaller. It is left out if it has fewer rows than ranks or, for a model with batch
    norm, fewer than two for each rank.

    A killed training, called again with the same arguments and ``out``, resumes from its last checkpoint and ends with
    the weights of an undisturbed run, bit for bit on the CPU. A finished one loads its weights and returns.

    Args:
        data: x ``(n, ...)``, floating-point, and labels y ``(n,)``; copied to the device once.
        attack: ``attack(model, x, y, *, generator, rows)``, such as `sparse_rs` with ball and queries bound.
        objective: the loss of each epoch, such as `Trades` or `ell0.certify.Objective`; train accuracies in the log are
            then those of its scores. Default: the cross-entropy of the logits.
        validation: rows like ``data``, classified after each epoch, neither trained on nor attacked.
        out: folder for ``checkpoint.safetensors``, ``checkpoint.json`` and ``log.jsonl``. Default: keep nothing.
        card: a JSON object that the checkpoint keeps.
        progress: called after each epoch and each call of the attack.
        team: ranks that share the work (`ell0.parallel`). Each calls this with all rows and its own copy of the model,
            and all end with the same weights. Batches and attacked rows are shared out and gradients averaged; batch
            norm takes the statistics of a rank's share. Rank 0 alone writes. A sharded team keeps gradients, optimizer
            state and a second copy of the weights in parts; the model has its weights again after each epoch.

    Raises:
        ValueError: an argument is wrong, ``out`` holds another training, or the loss is not finite.
        OSError: ``out`` cannot be written to; the last checkpoint stays whole.
    """
    device = check_arguments(model, data, config, attack, objective, validation, card, team)
    same = {} if out is None else made_from(model, data, validation, config, attack, objective)
    folder = TrainingFolder(out if team.first else None, same, card or {})
    checkpoint = team.once(folder.load)
    if checkpoint is not None:
        checkpoint.into(model)
    if device.type == "cuda":
        _lay_channels_last(model)
    about: dict[str, Any] = checkpoint.about if checkpoint else {"log": [], "seconds": 0.0}
    log = [Epoch(**line) for line in about["log"]]
    if len(log) == config.epochs:
        return Training(tuple(log), about["seconds"])
    rows = TrainingSet(data[0].to(device), data[1].to(device).long())
    if validation is not None:
        validation = team.share(validation[0]).to(device), team.share(validation[1]).to(device)
    if attack is not None:
        attack = attack_precision(config, device)(attack)
    start = time.perf_counter() - about["seconds"]
    run = _TrainingRun(model, rows, config, attack, objective, validation, folder, progress, log, start, team)
    precision = dense_products(tf32=config.precision == "tf32" and device.type == "cuda")
    devices = [device] if device.type == "cuda" else []
    with modes_restored(model), _gradients_restored(model), precision, torch.random.fork_rng(devices):
        return run.train(checkpoint)


@dataclass
class _TrainingRun:
    """A training under way. log: its epochs so far.  start: when it began, earlier calls included."""

    model: nn.Module
    rows: TrainingSet
    config: TrainConfig
    attack: BoundAttack | None
    objective: TrainingObjective | None
    validation: Labelled | None
    folder: TrainingFolder
    progress: Progress
    log: list[Epoch]
    start: float
    team: Team

    def train(self, checkpoint: Checkpoint | None) -> Training:
        """Trains the epochs that are left."""
        epochs, data = self.config.epochs, (self.rows.x, self.rows.y)
        check_together(self.model, data, self.validation, self.attack, self._batch_loss(epochs - 1))
        self.model.train()
        self._stepper = self._build(self._batch_loss(len(self.log)))
        self._found = AppendedRows.none(0, self.rows.x)
        if checkpoint is not None:
            state = {kind: _under(f"{kind}/", checkpoint.state) for kind in ("optimizer", "appended")}
            self._stepper.load(state["optimizer"])
            self._found = AppendedRows(**state["appended"], **checkpoint.about["attacked"])
            self.rows.append(self._found)
        for epoch in range(len(self.log), epochs):
            if (batch_loss := self._batch_loss(epoch)) != self._stepper.batch_loss:
                # A graph holds the loss that it was captured with.
                optimizer = {name: tensor.clone() for name, tensor in self._stepper.state().items()}
                self._stepper = self._build(batch_loss)
                self._stepper.load(optimizer)
            attacked = self.attack is not None and self.config.attacks_before(epoch)
            self.log.append(self._epoch(epoch, self._append(epoch) if attacked else 0.0))
            self.team.once(partial(self.folder.log, self.log[-1]))
            self._save()
            self.progress(self.log[-1].step)
        return Training(tuple(self.log), time.perf_counter() - self.start)

    def _batch_loss(self, epoch: int) -> BatchLoss | None:
        return None if self.objective is None else self.objective.at(epoch, self.config.epochs)

    def _build(self, batch_loss: BatchLoss | None) -> Stepper:
        x, y, batch = self.rows.x, self.rows.y, self.config.batch
        graph = x.device.type == "cuda" and self.team.size == 1 if self.config.graph is None else self.config.graph
        if not graph or len(x) < batch:
            return Stepper(self.model, self.config, self.team, batch_loss)
        try:
            return GraphStepper(self.model, self.config, x[:batch], y[:batch], batch_loss)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ValueError(f"graph must be False for this model, whose step cannot be captured: {error}") from error

    def _save(self) -> None:
        """Writes a checkpoint if it is time. All ranks learn if rank 0 fails: they would wait for it in their next
        step."""
        seconds, done = time.perf_counter() - self.start, len(self.log) == self.config.epochs
        if not (self.team.once(self.folder.due) or done):
            return
        tensors, attacked = self._found.saved()
        kinds = {} if done else {"optimizer": self._stepper.whole_state(), "appended": tensors}
        state = {f"{kind}/{name}": tensor for kind, some in kinds.items() for name, tensor in some.items()}
        about = {"config": asdict(self.config), "seconds": seconds, "attacked": attacked}
        self.team.once(partial(self.folder.save, self.model, state, self.log, **about))

    def _append(self, epoch: int) -> float:
        """Makes X' anew; returns the seconds that this took, in earlier calls too."""
        assert self.attack is not None
        x, y = self.rows.x, self.rows.y
        if self._found.epoch != epoch:
            self._found = AppendedRows.none(epoch, x)
        self.model.eval()
        for found in search(self.attack, folded(self.model), x, y, self._found, self.config, self.team):
            self._found = found
            self._save()
            self.progress(self._attack_step(found))
        self.model.train()
        self.rows.append(self._found)
        return self._found.seconds

    def _attack_step(self, found: AppendedRows) -> Step:
        n, epochs, last = len(self.rows.x), self.config.epochs - found.epoch, self.log[-1]
        done = found.done / n
        epoch_seconds = last.seconds / (n + last.appended) * (n + len(found.rows) / done)
        left = seconds_left(epochs, epoch_seconds, self._attacks_after(found.epoch) + 1 - done, found.seconds / done)
        return Step("rows attacked", found.done, n, f"{len(found.rows)} broken", left)

    def _attacks_after(self, epoch: int) -> int:
        later = range(epoch + 1, self.config.epochs)
        return 0 if self.attack is None else sum(map(self.config.attacks_before, later))

    def _epoch(self, epoch: int, attack_seconds: float) -> Epoch:
        start, config, rows, device = time.perf_counter(), self.config, self.rows, self.rows.x.device
        order = torch.randperm(len(rows), generator=seeded(config.seed, "order", epoch), device="cpu")
        rest = len(order) % config.batch
        if len(order) > rest and rest < least_rows(self.model, self.team.size):
            order = order[: len(order) - rest]
        _seed_model(device, seeded(config.seed, "model", epoch).initial_seed() + self.team.rank)
        batches = order.to(device).split(config.batch)
        moves = AUGMENTS.get(config.augment)
        ways = None if moves is None else moves.draw(len(order), seeded(config.seed, "augment", epoch)).to(device)
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
        attacks = [attack_seconds, *(done.attack_seconds for done in reversed(self.log))]
        return Epoch(
            epoch=epoch,
            epochs=config.epochs,
            loss=loss,
            train_accuracy=right,
            validation_accuracy=accuracy,
            rate=rates[-1],
            appended=rows.appended,
            seconds=seconds,
            attack_seconds=attack_seconds,
            seconds_left=seconds_left(
                config.epochs - epoch - 1, seconds, self._attacks_after(epoch), next(filter(None, attacks), None)
            ),
        )

    def _validate(self) -> float | None:
        if self.validation is None:
            return None
        self.model.eval()
        counts = self.team.gather(partial(self._count_right, *self.validation))
        self.model.train()
        return sum(right for right, _ in counts) / sum(rows for _, rows in counts)

    def _count_right(self, x: Tensor, y: Tensor) -> tuple[int, int]:
        """Rows classified right, and all rows."""
        with torch.no_grad(), prepared(self.model):
            right = [
                (self.model(some).argmax(1) == labels).sum()
                for some, labels in zip(x.split(_VALIDATED), y.split(_VALIDATED), strict=True)
            ]
        return int(torch.stack(right).sum()), len(x)


@contextmanager
def _gradients_restored(model: nn.Module) -> Iterator[None]:
    """At the end every parameter has the gradient that it had before."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The tensors whose names begin with the prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _lay_channels_last(model: nn.Module) -> None:
    """A convolution works in the layout of its weight, and a GPU's fast ones want this one; no value changes."""
    for parameter in model.parameters():
        if parameter.ndim == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)


def _seed_model(device: torch.device, seed: int) -> None:
    """Seeds the generators that a model's own draws, such as dropout, come from; torch gives it no other."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)
