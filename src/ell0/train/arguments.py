"""The arguments of `fit`: whether they are right, before an epoch is spent, and what makes two trainings the same."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..attacks.contract import AttackResult
from ..common import seeded
from ..evaluation.identity import of_attack, of_model, of_value
from ..parallel import Team
from ..threat import describe
from .config import TrainConfig
from .rows import BoundAttack, Labelled
from .stepper import BatchLoss, TrainingObjective


@dataclass
class TrainingArguments:
    """See `fit`."""

    model: nn.Module
    data: Labelled
    config: TrainConfig
    attack: BoundAttack | None
    objective: TrainingObjective | None
    validation: Labelled | None
    team: Team

    def check(self) -> torch.device:
        """The device of the model; raises ValueError where an argument is wrong in itself."""
        config, attack, ranks = self.config, self.attack, self.team.size
        if not isinstance(config, TrainConfig):
            raise ValueError(f"config must be a TrainConfig, got {config!r}")
        if not isinstance(self.model, nn.Module):
            raise ValueError(f"model must be an nn.Module, got {self.model!r}")
        devices = {parameter.device for parameter in self.model.parameters() if parameter.requires_grad}
        if len(devices) != 1:
            raise ValueError(f"model must have parameters to train, all on one device, got {len(devices)} devices")
        self._check_rows("data", self.data)
        x = self.data[0]
        if self.validation is not None:
            self._check_rows("validation", self.validation)
            if self.validation[0].shape[1:] != x.shape[1:] or self.validation[0].dtype != x.dtype:
                raise ValueError(f"validation must have an x like {describe(x)}, got {describe(self.validation[0])}")
        if ranks > 1 and config.batch < self.least_rows:
            raise ValueError(f"batch must be >= {self.least_rows} for this model on {ranks} ranks, got {config.batch}")
        if config.augment != "none" and x.ndim != 4:
            raise ValueError(f'augment must be "none" unless x is (n, channels, height, width), got {tuple(x.shape)}')
        if attack is not None and not callable(attack):
            raise ValueError(f"attack must be a callable, got {attack!r}")
        if attack is not None and config.refresh >= config.epochs:
            raise ValueError(f"refresh must be < epochs={config.epochs} for an attack to run, got {config.refresh}")
        if self.objective is not None and config.precision == "bf16" and not getattr(self.objective, "bf16", False):
            rule = 'precision must not be "bf16" with an objective that needs exact sums'
            raise ValueError(f"{rule}, got {self.objective}")
        return devices.pop()

    def check_together(self) -> None:
        """Calls model, attack and the last epoch's loss on few rows; raises ValueError if they do not fit together."""
        model, (x, y) = self.model.eval(), self.data
        try:
            with torch.no_grad():
                logits = model(x[:1])
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ValueError(f"model must take the x of data, {describe(x)}, but: {error}") from error
        if not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != 1:
            raise ValueError(f"model must return logits of shape (n, classes), got {describe(logits)} for one row")
        classes = logits.shape[1]
        for name, rows in (("data", self.data), ("validation", self.validation)):
            if rows is not None and not 0 <= (least := int(rows[1].min())) <= (most := int(rows[1].max())) < classes:
                raise ValueError(f"{name} must have labels in 0 .. {classes - 1}, the classes, got {least} .. {most}")
        if self.attack is not None:
            # With a wrong label the row is broken already, so the attack does no work.
            wrong, row = (logits.argmax(1) + 1) % classes, torch.zeros(1, dtype=torch.int64, device=x.device)
            result = self.attack(model, x[:1], wrong, generator=seeded(0, "attack", 0), rows=row)
            if not isinstance(result, AttackResult):
                raise ValueError(f"attack must return an AttackResult, got {type(result).__name__}")
        if (last := self.batch_loss(self.config.epochs - 1)) is not None:
            before = [buffer.clone() for buffer in model.buffers()]
            last(model.train(), x[: self.least_rows], y[: self.least_rows])
            for buffer, value in zip(model.buffers(), before, strict=True):
                buffer.copy_(value)

    @property
    def least_rows(self) -> int:
        """The fewest rows of a batch: one on each rank, two if batch norm needs statistics."""
        return self.team.size * (2 if any(isinstance(module, _BatchNorm) for module in self.model.modules()) else 1)

    def batch_loss(self, epoch: int) -> BatchLoss | None:
        """The loss of an epoch; None: cross-entropy."""
        return None if self.objective is None else self.objective.at(epoch, self.config.epochs)

    def made_from(self) -> dict[str, str]:
        """What makes two trainings the same, by name. Of the model its architecture: a checkpoint has the weights."""
        found = {f"config.{name}": of_value(name, value) for name, value in asdict(self.config).items()}
        found["model"] = of_model(self.model, weights=False)
        for name, rows in (("data", self.data), ("validation", self.validation)):
            if rows is not None:
                found |= {f"{part} of {name}": of_value(part, value) for part, value in zip("xy", rows, strict=True)}
        if self.attack is not None:
            found["parameters of attack"] = of_attack("attack", self.attack)
        if self.objective is not None:
            found["objective"] = f"{type(self.objective).__qualname__} {of_value('objective', self.objective)}"
        return found

    def _check_rows(self, name: str, rows: Labelled) -> None:
        if not isinstance(rows, tuple) or len(rows) != 2:
            raise ValueError(f"{name} must be a tuple (x, y), got {describe(rows)}")
        x, y = rows
        if not isinstance(x, Tensor) or x.ndim < 2 or not x.is_floating_point() or not len(x):
            raise ValueError(f"{name} must have a floating-point x of shape (n, ...), n >= 1, got {describe(x)}")
        if not isinstance(y, Tensor) or y.is_floating_point() or y.dtype == torch.bool or y.shape != x.shape[:1]:
            raise ValueError(f"{name} must have an integer y of shape ({len(x)},), got {describe(y)}")
        if not x.isfinite().all():
            raise ValueError(f"{name} must have a finite x, got NaN or infinity")
        self.team.check_rows(name, len(x))
