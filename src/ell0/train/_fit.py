"""The loop: clean, or against an attack."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..nn import folded, prepared
from ..parallel import ALONE, Team
from ..precision import dense_products
from ..threat import describe
from ._append import Attack, Found, TrainingSet, generator, rehearse, search
from ._augment import AUGMENTS
from ._config import TrainConfig
from ._folder import Folder, parts
from ._record import AttackStage, Epoch, Progress, Training, seconds_left
from ._step import GraphStepper, Objective, Stage, Stepper, attack_precision

_VALIDATED = 1000  # rows at a time


def fit(
    model: nn.Module,
    data: tuple[Tensor, Tensor],
    config: TrainConfig,
    attack: Attack | None = None,
    *,
    objective: Objective | None = None,
    validation: tuple[Tensor, Tensor] | None = None,
    out: Path | str | None = None,
    card: Mapping[str, Any] | None = None,
    progress: Progress = lambda _: None,
    team: Team = ALONE,
) -> Training:
    """Trains a model in place, on the device it lies on, by the cross-entropy of its logits or another objective.

        training = fit(models.mlp(10), data.load("mnist", "train"), PAPER_MNIST,
                       partial(sparse_rs, ball=L0Ball(10, low=-100, high=100), queries=300), out="runs/f10")

    Against an attack [Beliaev22, section 3.3]: before the epochs refresh, 2 * refresh, ... every row of X is attacked;
    X' becomes what the attack made of the rows it broke, with their true labels, without those misclassified from the
    start; and the epochs until the next attack train X and X' together, shuffled.

    The last batch of an epoch may be smaller. It is left out if it has no row for each rank or, since one row has no
    statistics, if the model has batch norm and it has no two.

    Killed at any moment and called again with the same arguments and ``out``, it goes on from its last checkpoint and
    ends with the weights of a run that was not killed: on the CPU the same bits. Called when it is done, it loads the
    weights and returns.

    Args:
        data: x ``(n, ...)``, floating-point, and y ``(n,)``, the labels; copied to the device once.
        attack: ``attack(model, x, y, *, generator, rows)``, such as `sparse_rs` with ball and queries bound.
        objective: what is learnt in each epoch, such as `Trades` or `ell0.certify.Objective`; the record's train
            accuracy is then that of its scores. None: the cross-entropy of the logits.
        validation: rows like ``data``, on which the accuracy is taken after each epoch, never trained nor attacked.
        out: a folder for ``checkpoint.safetensors`` with ``checkpoint.json``, ``log.jsonl`` and, against an attack,
            ``appended.safetensors``. None: nothing is kept.
        card: what the checkpoint is to say of the model, in words of JSON.
        progress: called after each epoch, and after each call of the attack.
        team: ranks that share the work (`ell0.parallel`): each calls this with all rows and its own copy of the model,
            and all end with the same weights. The rows of a batch and those that are attacked are shared out, gradients
            averaged, so that a batch means the same whatever the ranks; batch norm takes the statistics of a share.
            Rank 0 alone writes. A sharded team keeps gradients, the state of the optimizer and a second copy of the
            weights in parts; the model has its weights again after each epoch.

    Raises:
        ValueError: an argument is wrong, ``out`` holds another training, or the loss is no number any more.
        OSError: ``out`` cannot be written to; the last checkpoint stays whole.
    """
    if not isinstance(config, TrainConfig):
        raise ValueError(f"config must be a TrainConfig, got {config!r}")
    device = _checked_model(model, config)
    _check_rows("data", data)
    _check_team(model, data, validation, config, team)
    if config.augment != "none" and data[0].ndim != 4:
        shape = tuple(data[0].shape)
        raise ValueError(
            f'augment must be "none" unless x is (n, channels, height, width), got {config.augment!r} for {shape}'
        )
    if validation is not None:
        _check_rows("validation", validation)
        x, other = data[0], validation[0]
        if other.shape[1:] != x.shape[1:] or other.dtype != x.dtype:
            raise ValueError(f"validation must have an x like that of data, {describe(x)}, got {describe(other)}")
    if attack is not None and not callable(attack):
        raise ValueError(f"attack must be a callable, got {attack!r}")
    if attack is not None and config.refresh >= config.epochs:
        got = f"refresh={config.refresh} with epochs={config.epochs}"
        raise ValueError(f"refresh must be below epochs for an attack to run, got {got}")
    if objective is not None and config.precision == "bf16" and not getattr(objective, "rounds", False):
        raise ValueError('precision must not be "bf16" with an objective, which computes as it is written')
    _check_words(card)
    same = {} if out is None else parts(model, data, validation, config, attack)
    same |= {} if objective is None else {"objective": repr(objective)}
    folder = Folder(out if team.first else None, same, card or {})
    checkpoint = team.once(folder.load)
    if checkpoint is not None:
        checkpoint.into(model)
    if device.type == "cuda" if config.channels_last is None else config.channels_last:
        _lay_channels_last(model)
    log = [Epoch(**line) for line in checkpoint.about["log"]] if checkpoint else []
    seconds = checkpoint.about["seconds"] if checkpoint else 0.0
    if len(log) == config.epochs:
        return Training(tuple(log), seconds)
    run = _Run(model, data, config, attack, objective, validation, folder, progress, log, seconds, team)
    devices = [device] if device.type == "cuda" else []
    precision = dense_products(tf32=config.precision == "tf32" and device.type == "cuda")
    with _given_back(model), precision, torch.random.fork_rng(devices):
        return run.through(device, checkpoint.optimizer if checkpoint else None)


class _Run:
    """A training on its way. log: its epochs so far.  seconds: what earlier calls spent on them."""

    def __init__(
        self,
        model: nn.Module,
        data: tuple[Tensor, Tensor],
        config: TrainConfig,
        attack: Attack | None,
        objective: Objective | None,
        validation: tuple[Tensor, Tensor] | None,
        folder: Folder,
        progress: Progress,
        log: list[Epoch],
        seconds: float,
        team: Team,
    ) -> None:
        self._team = team
        self._model, self._config, self._folder, self._progress, self._log = model, config, folder, progress, log
        self._attack, self._objective, self._data, self._validation = attack, objective, data, validation
        self._start = time.perf_counter() - seconds

    def through(self, device: torch.device, optimizer: dict[str, Tensor] | None) -> Training:
        """Trains the epochs that are left."""
        config = self._config
        self._set = TrainingSet(self._data[0].to(device), self._data[1].to(device).long())
        if self._validation is not None:
            x, y = self._validation
            self._validation = self._team.share(x).to(device), self._team.share(y).to(device)
        if self._attack is not None:
            self._attack = attack_precision(config, device)(self._attack)
        self._check_fit()
        self._model.train()
        self._stepper = self._build(self._stage_of(len(self._log)))
        if optimizer is not None:
            self._stepper.load(optimizer)
        for epoch in range(len(self._log), config.epochs):
            if (stage := self._stage_of(epoch)) != self._stepper.stage:
                # A graph holds the stage it was captured with.
                state = {name: tensor.clone() for name, tensor in self._stepper.state().items()}
                self._stepper = self._build(stage)
                self._stepper.load(state)
            record = self._epoch(epoch, self._refresh(epoch))
            self._log.append(record)
            seconds = time.perf_counter() - self._start
            self._save(seconds)
            self._progress(record)
        return Training(tuple(self._log), seconds)

    def _save(self, seconds: float) -> None:
        """Keeps an epoch that is done, and all that is needed to go on from it, if it is time for that.

        What rank 0 cannot write all must know: they would wait for it in their next step.
        """
        done = len(self._log) == self._config.epochs
        # An attack is made on weights that a run which goes on must find.
        now = done or (self._attack is not None and self._config.attacks_before(len(self._log)))
        due = self._team.once(partial(self._begin_save, now))
        if due:
            optimizer = {} if done else self._stepper.whole_state()
            save = partial(self._folder.save, self._model, optimizer, self._config, self._log, seconds)
            self._team.once(save)

    def _begin_save(self, now: bool) -> bool:
        self._folder.log(self._log[-1])
        return self._folder.due(now)

    def _check_fit(self) -> None:
        """Whether model, rows and attack go together, before an epoch is spent."""
        self._model.eval()
        x = self._set.x
        try:
            with torch.no_grad():
                logits = self._model(x[:1])
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ValueError(f"model must take the x of data, {describe(x)}, but: {error}") from error
        if not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != 1:
            raise ValueError(f"model must return logits of shape (n, classes), got {describe(logits)} for one row")
        classes = logits.shape[1]
        for name, y in (("data", self._set.y), ("validation", self._validation and self._validation[1])):
            if y is not None and not 0 <= int(y.min()) <= int(y.max()) < classes:
                raise ValueError(
                    f"{name} must have labels in 0 .. {classes - 1}, the classes of the model, got "
                    f"{int(y.min())} .. {int(y.max())}"
                )
        if self._attack is not None:
            rehearse(self._attack, self._model, x, (logits.argmax(1) + 1) % classes)
        if (last := self._stage_of(self._config.epochs - 1)) is not None:
            some, before = slice(_least(self._model, ALONE)), [buffer.clone() for buffer in self._model.buffers()]
            last(self._model.train(), x[some], self._set.y[some])
            for buffer, value in zip(self._model.buffers(), before, strict=True):
                buffer.copy_(value)

    def _stage_of(self, epoch: int) -> Stage | None:
        return None if self._objective is None else self._objective.at(epoch, self._config.epochs)

    def _build(self, stage: Stage | None) -> Stepper:
        x, y, batch = self._set.x, self._set.y, self._config.batch
        alone = x.device.type == "cuda" and self._team.size == 1
        graph = alone if self._config.graph is None else self._config.graph
        if not graph or len(x) < batch:
            return Stepper(self._model, self._config, self._team, stage)
        try:
            return GraphStepper(self._model, self._config, x[:batch], y[:batch], stage)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ValueError(f"graph must be False for this model, whose step cannot be captured: {error}") from error

    def _refresh(self, epoch: int) -> float:
        """Has the X' of an epoch in its place; the seconds of the attack, if it belongs to this very epoch."""
        config, x, y = self._config, self._set.x, self._set.y
        since = epoch - epoch % config.refresh
        if self._attack is None or since == self._set.since:
            return 0.0
        found = self._team.once(partial(self._folder.found, since)) or Found.nothing(since, x)
        if epoch == since:
            # What an attack took before a kill came after the checkpoint, whose seconds are without it.
            self._start -= found.seconds
        if epoch > since and found.done < len(x):
            raise ValueError(
                f"out must hold all rows appended before epoch {since}, got {found.done} of {len(x)} attacked"
            )
        self._model.eval()
        steps = search(
            self._attack, folded(self._model), x, y, found, seed=config.seed, batch=config.attack_batch, team=self._team
        )
        for found in steps:
            self._team.once(partial(self._folder.keep, found))
            self._progress(self._stage(found))
        self._model.train()
        self._set.append(found)
        return found.seconds if epoch == since else 0.0

    def _stage(self, found: Found) -> AttackStage:
        n, epoch, epochs = len(self._set.x), found.epoch, self._config.epochs
        share = found.done / n
        rest = seconds_left(
            epochs - epoch,
            self._log[-1].seconds / (n + self._log[-1].appended) * (n + len(found.rows) / share),
            self._attacks_after(epoch) + 1 - share,
            found.seconds / share,
        )
        return AttackStage(epoch, epochs, found.done, n, len(found.rows), found.seconds, rest)

    def _epoch(self, epoch: int, attack_seconds: float) -> Epoch:
        start, config, rows = time.perf_counter(), self._config, self._set
        order = torch.randperm(len(rows), generator=generator(config.seed, "order", epoch), device="cpu")
        if len(order) > (rest := len(order) % config.batch) and rest < _least(self._model, self._team):
            order = order[: len(order) - rest]
        _seed(rows.x.device, generator(config.seed, "model", epoch).initial_seed() + self._team.rank)
        batches = order.to(rows.x.device).split(config.batch)
        ways: Iterable[Tensor | None] = repeat(None, len(batches))
        moves = AUGMENTS.get(config.augment)
        if moves is not None:
            drawn = moves.draw(len(order), generator(config.seed, "augment", epoch))
            ways = drawn.to(rows.x.device).split(config.batch)
        rates = config.rates_of(epoch, len(batches))
        with self._team.steps():
            for batch, way, rate in zip(batches, ways, torch.tensor(rates, device=rows.x.device), strict=True):
                self._stepper.rate.copy_(rate)
                mine = self._team.share(batch)
                # Before the step, and so outside of its graph, into whose own input the batch is copied in any case.
                x = rows.points[mine]
                if moves is not None and way is not None:
                    x = moves.moved(rows.points, mine, self._team.share(way))
                self._stepper.step(x, rows.labels[mine], len(mine) * self._team.size / len(batch))
        totals = self._team.gather(self._stepper.take)
        loss, right = (sum(total) / len(order) for total in zip(*totals, strict=True))
        if not math.isfinite(loss):
            raise ValueError(f"rates must be lower for this model, the loss of epoch {epoch} is {loss}")
        accuracy = self._validate()
        seconds = time.perf_counter() - start
        attacks = [attack_seconds, *(done.attack_seconds for done in reversed(self._log))]
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

    def _attacks_after(self, epoch: int) -> int:
        if self._attack is None:
            return 0
        return sum(self._config.attacks_before(later) for later in range(epoch + 1, self._config.epochs))

    def _validate(self) -> float | None:
        if self._validation is None:
            return None
        self._model.eval()
        parts = self._team.gather(partial(self._right, *self._validation))
        self._model.train()
        return sum(right for right, _ in parts) / sum(rows for _, rows in parts)

    def _right(self, x: Tensor, y: Tensor) -> tuple[int, int]:
        """How many rows are classified right, and of how many."""
        with torch.no_grad(), prepared(self._model):
            right = [
                (self._model(some).argmax(1) == labels).sum()
                for some, labels in zip(x.split(_VALIDATED), y.split(_VALIDATED), strict=True)
            ]
        return int(torch.stack(right).sum()), len(x)


@contextmanager
def _given_back(model: nn.Module) -> Iterator[None]:
    """A model ends in the mode and with the gradients it came with."""
    modes = [(module, module.training) for module in model.modules()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        yield
    finally:
        for module, training in modes:
            module.training = training
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _lay_channels_last(model: nn.Module) -> None:
    """A convolution works in the layout of its weight, whatever that of its input."""
    for parameter in model.parameters():
        if parameter.ndim == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)


def _seed(device: torch.device, seed: int) -> None:
    """What a model draws from, dropout for one; torch gives it no other generator."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)


def _checked_model(model: nn.Module, config: TrainConfig) -> torch.device:
    """The device of a model; raises if it cannot be trained."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be an nn.Module, got {model!r}")
    devices = {p.device for p in model.parameters() if p.requires_grad}
    if len(devices) != 1:
        raise ValueError(f"model must have parameters to train, all on one device, got {len(devices)} devices")
    odd = [name for name, value in model.state_dict().items() if not isinstance(value, Tensor)]
    if odd:
        raise ValueError(f"model must have tensors alone in its state, got {odd[0]}")
    (device,) = devices
    if config.graph and device.type != "cuda":
        raise ValueError(f"graph must be False or None for a model on {device}, got True")
    return device


def _least(model: nn.Module, team: Team) -> int:
    """How many rows a batch must have: one on each rank, two where batch norm needs statistics."""
    return team.size * (2 if any(isinstance(module, _BatchNorm) for module in model.modules()) else 1)


def _check_team(
    model: nn.Module,
    data: tuple[Tensor, Tensor],
    validation: tuple[Tensor, Tensor] | None,
    config: TrainConfig,
    team: Team,
) -> None:
    """Raises where there is not enough for every rank."""
    for name, rows in (("data", data), ("validation", validation)):
        if rows is not None:
            team.check_rows(name, len(rows[0]))
    if team.size > 1 and config.batch < _least(model, team):
        least = _least(model, team)
        raise ValueError(f"batch must be at least {least} for this model on {team.size} ranks, got {config.batch}")
    if team.size > 1 and config.graph:
        raise ValueError(f"graph must be False or None on {team.size} ranks, got True")
    if team.sharded:
        _check_sharded(model, config)


def _check_sharded(model: nn.Module, config: TrainConfig) -> None:
    """Raises where a training cannot be sharded."""
    if config.compile:
        raise ValueError("compile must be False for a training that is sharded, got True")
    scalars = [name for name, parameter in model.named_parameters() if not parameter.ndim]
    if scalars:
        raise ValueError(f"model must have no scalar among its parameters to be sharded, got {scalars[0]}")
    dtypes = {str(parameter.dtype) for parameter in model.parameters()}
    if len(dtypes) > 1:
        raise ValueError(f"model must have parameters of one dtype to be sharded, got {', '.join(sorted(dtypes))}")


def _check_rows(name: str, rows: tuple[Tensor, Tensor]) -> None:
    if not isinstance(rows, tuple) or len(rows) != 2:
        raise ValueError(f"{name} must be a tuple (x, y), got {describe(rows)}")
    x, y = rows
    if not isinstance(x, Tensor) or x.ndim < 2 or not x.is_floating_point() or not len(x):
        raise ValueError(f"{name} must have a floating-point x of shape (n, ...), n >= 1, got {describe(x)}")
    if not isinstance(y, Tensor) or y.is_floating_point() or y.dtype == torch.bool or y.shape != x.shape[:1]:
        raise ValueError(f"{name} must have an integer y of shape ({len(x)},), got {describe(y)}")
    if not x.isfinite().all():
        raise ValueError(f"{name} must have a finite x, got NaN or infinity")


def _check_words(card: Mapping[str, Any] | None) -> None:
    try:
        json.dumps(dict(card or {}))
    except (TypeError, ValueError) as error:
        raise ValueError(f"card must be what JSON can say, got {card!r}") from error
