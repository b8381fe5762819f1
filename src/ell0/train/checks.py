"""Checks of the arguments of `fit`, before an epoch is spent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..attacks.contract import AttackResult
from ..common import seeded
from ..parallel import Team
from ..threat import describe
from .appended import BoundAttack
from .config import TrainConfig
from .stepper import BatchLoss, TrainingObjective

Labelled = tuple[Tensor, Tensor]


def check_arguments(
    model: nn.Module,
    data: Labelled,
    config: TrainConfig,
    attack: BoundAttack | None,
    objective: TrainingObjective | None,
    validation: Labelled | None,
    card: Mapping[str, Any] | None,
    team: Team,
) -> torch.device:
    """The device of the model; raises ValueError where an argument is wrong in itself."""
    if not isinstance(config, TrainConfig):
        raise ValueError(f"config must be a TrainConfig, got {config!r}")
    device = _device(model)
    if config.graph and device.type != "cuda":
        raise ValueError(f"graph must be False or None for a model on {device}, got True")
    _check_rows("data", data, team)
    x = data[0]
    if validation is not None:
        _check_rows("validation", validation, team)
        if validation[0].shape[1:] != x.shape[1:] or validation[0].dtype != x.dtype:
            got = describe(validation[0])
            raise ValueError(f"validation must have an x like that of data, {describe(x)}, got {got}")
    if team.size > 1:
        _check_team(model, config, team)
    if config.augment != "none" and x.ndim != 4:
        got = f"{config.augment!r} for {tuple(x.shape)}"
        raise ValueError(f'augment must be "none" unless x is (n, channels, height, width), got {got}')
    if attack is not None and not callable(attack):
        raise ValueError(f"attack must be a callable, got {attack!r}")
    if attack is not None and config.refresh >= config.epochs:
        got = f"refresh={config.refresh} with epochs={config.epochs}"
        raise ValueError(f"refresh must be below epochs for an attack to run, got {got}")
    if objective is not None and config.precision == "bf16" and not getattr(objective, "rounds", False):
        raise ValueError('precision must not be "bf16" with an objective, which computes as it is written')
    try:
        json.dumps(dict(card or {}))
    except (TypeError, ValueError) as error:
        raise ValueError(f"card must be what JSON can say, got {card!r}") from error
    return device


def check_together(
    model: nn.Module,
    data: Labelled,
    validation: Labelled | None,
    attack: BoundAttack | None,
    last: BatchLoss | None,
) -> None:
    """Calls model, attack and the last epoch's loss once, on few rows; raises ValueError if they do not fit together.

    The attack gets a row with a wrong label, which is broken already, so it does no work.
    """
    model.eval()
    x, y = data
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
    for name, rows in (("data", data), ("validation", validation)):
        if rows is not None and not 0 <= (least := int(rows[1].min())) <= (most := int(rows[1].max())) < classes:
            allowed = f"0 .. {classes - 1}, the classes of the model"
            raise ValueError(f"{name} must have labels in {allowed}, got {least} .. {most}")
    if attack is not None:
        wrong, row = (logits.argmax(1) + 1) % classes, torch.zeros(1, dtype=torch.int64, device=x.device)
        result = attack(model, x[:1], wrong, generator=seeded(0, "attack", 0), rows=row)
        if not isinstance(result, AttackResult):
            raise ValueError(f"attack must return an AttackResult, got {type(result).__name__}")
    if last is not None:
        few, before = slice(least_rows(model)), [buffer.clone() for buffer in model.buffers()]
        last(model.train(), x[few], y[few])
        for buffer, value in zip(model.buffers(), before, strict=True):
            buffer.copy_(value)


def least_rows(model: nn.Module, ranks: int = 1) -> int:
    """The fewest rows of a batch: one on each rank, two if batch norm needs statistics."""
    return ranks * (2 if any(isinstance(module, _BatchNorm) for module in model.modules()) else 1)


def _device(model: nn.Module) -> torch.device:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be an nn.Module, got {model!r}")
    devices = {parameter.device for parameter in model.parameters() if parameter.requires_grad}
    if len(devices) != 1:
        raise ValueError(f"model must have parameters to train, all on one device, got {len(devices)} devices")
    others = [name for name, value in model.state_dict().items() if not isinstance(value, Tensor)]
    if others:
        raise ValueError(f"model must have tensors alone in its state, got {others[0]}")
    return devices.pop()


def _check_rows(name: str, rows: Labelled, team: Team) -> None:
    if not isinstance(rows, tuple) or len(rows) != 2:
        raise ValueError(f"{name} must be a tuple (x, y), got {describe(rows)}")
    x, y = rows
    if not isinstance(x, Tensor) or x.ndim < 2 or not x.is_floating_point() or not len(x):
        raise ValueError(f"{name} must have a floating-point x of shape (n, ...), n >= 1, got {describe(x)}")
    if not isinstance(y, Tensor) or y.is_floating_point() or y.dtype == torch.bool or y.shape != x.shape[:1]:
        raise ValueError(f"{name} must have an integer y of shape ({len(x)},), got {describe(y)}")
    if not x.isfinite().all():
        raise ValueError(f"{name} must have a finite x, got NaN or infinity")
    team.check_rows(name, len(x))


def _check_team(model: nn.Module, config: TrainConfig, team: Team) -> None:
    least = least_rows(model, team.size)
    if config.batch < least:
        raise ValueError(f"batch must be at least {least} for this model on {team.size} ranks, got {config.batch}")
    if config.graph:
        raise ValueError(f"graph must be False or None on {team.size} ranks, got True")
    if not team.sharded:
        return
    scalars = [name for name, parameter in model.named_parameters() if not parameter.ndim]
    if scalars:
        raise ValueError(f"model must have no scalar among its parameters to be sharded, got {scalars[0]}")
    dtypes = {str(parameter.dtype) for parameter in model.parameters()}
    if len(dtypes) > 1:
        raise ValueError(f"model must have parameters of one dtype to be sharded, got {', '.join(sorted(dtypes))}")
