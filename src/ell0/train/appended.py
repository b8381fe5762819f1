"""X': the adversarial rows that are trained beside the training rows X."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..attacks.contract import AttackResult
from ..common import seeded
from ..parallel import Team
from .config import TrainConfig

BoundAttack = Callable[..., AttackResult]
"""``attack(model, x, y, *, generator, rows)``: an attack of ``ell0.attacks`` with its ball and settings bound."""

_CPU_ROWS, _GPU_ROWS = 1024, 32768
_SHARE, _COPIES = 16, 16  # a call of the attack may fill 1/16 of a GPU's memory with 16 copies of its rows


@dataclass(frozen=True)
class AppendedRows:
    """X', as its differences from X: a sparse attack changes few numbers.

    epoch: the attack runs before it.  done: rows of X attacked so far.  seconds: spent on them.
    rows: ``(m,)`` int64, the broken rows of X, ascending.
    of, at, values: ``(c,)``, for each changed number its row of X, its place in the row, and its value. On the CPU.
    """

    epoch: int
    done: int
    seconds: float
    rows: Tensor
    of: Tensor
    at: Tensor
    values: Tensor

    @classmethod
    def none(cls, epoch: int, x: Tensor) -> AppendedRows:
        """Before the first call of the attack."""
        empty = torch.zeros(0, dtype=torch.int64, device="cpu")
        return cls(epoch, 0, 0.0, empty, empty, empty, torch.zeros(0, dtype=x.dtype, device="cpu"))

    def plus(self, attacked: int, parts: Sequence[tuple[Tensor, ...]]) -> AppendedRows:
        """With what the ranks found in the next ``attacked`` rows."""
        own = self.rows, self.of, self.at, self.values
        rows, of, at, values = (torch.cat(tensors) for tensors in zip(own, *parts, strict=True))
        return replace(self, done=self.done + attacked, rows=rows.sort().values, of=of, at=at, values=values)

    def saved(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tensors, and the rest as JSON has it: ``AppendedRows(**tensors, **rest)`` gives it back."""
        tensors = {key: value for key, value in vars(self).items() if isinstance(value, Tensor)}
        return tensors, {key: value for key, value in vars(self).items() if key not in tensors}


class TrainingSet:
    """X and, behind it in the same memory, X'.

    points, labels: ``(n, ...)``, contiguous, and ``(n,)``, then room for n rows of X'.  appended: rows of X'.
    """

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = self.points, self.labels = x.detach().contiguous(), y
        self.appended = 0

    def __len__(self) -> int:
        return len(self.x) + self.appended

    def append(self, new: AppendedRows) -> None:
        """Replaces X'."""
        n, m = len(self.x), len(new.rows)
        if m and self.points is self.x:
            self.points, self.labels = (torch.cat([t, torch.empty_like(t)]) for t in (self.x, self.y))
            self.x, self.y = self.points[:n], self.labels[:n]
        rows, at = new.rows.to(self.x.device), torch.searchsorted(new.rows, new.of) * self.x[0].numel() + new.at
        self.points[n : n + m] = self.x[rows]
        self.points[n : n + m].view(-1)[at.to(self.x.device)] = new.values.to(self.x.device)
        self.labels[n : n + m] = self.y[rows]
        self.appended = m


def search(
    attack: BoundAttack, model: nn.Module, x: Tensor, y: Tensor, found: AppendedRows, config: TrainConfig, team: Team
) -> Iterator[AppendedRows]:
    """Attacks the rows of X from ``found.done`` on, and yields all that was found after each call."""
    size = (config.attack_batch or _rows_of_a_call(x)) * team.size
    while found.done < len(x):
        start = time.perf_counter()
        rows = torch.arange(found.done, min(found.done + size, len(x)), device=x.device)
        generator = seeded(config.seed, "attack", found.epoch)
        parts = team.gather(partial(_broken, attack, model, x, y, team.share(rows), generator))
        # `plus` reads the result, which waits for the device, so the clock is read after it.
        found = found.plus(len(rows), parts)
        found = replace(found, seconds=found.seconds + time.perf_counter() - start)
        yield found


def _broken(
    attack: BoundAttack, model: nn.Module, x: Tensor, y: Tensor, rows: Tensor, generator: torch.Generator
) -> tuple[Tensor, ...]:
    """Attacks some rows: rows, of, at and values of those that a change broke, as in `AppendedRows`."""
    if not len(rows):
        empty = rows.cpu()
        return empty, empty, empty, torch.zeros(0, dtype=x.dtype, device="cpu")
    result = attack(model, x[rows], y[rows], generator=generator, rows=rows)
    broken = (result.success & (result.distance != 0)).nonzero().squeeze(1)
    points, rows = result.x_adv[broken].flatten(1), rows[broken]
    of, at = (points != x[rows].flatten(1)).nonzero().unbind(1)
    return rows.cpu(), rows[of].cpu(), at.cpu(), points[of, at].cpu()


def _rows_of_a_call(x: Tensor) -> int:
    """By the GPU's memory, not by what is free of it: a resumed run must split its rows as before."""
    if x.device.type != "cuda":
        return _CPU_ROWS
    memory = torch.cuda.get_device_properties(x.device).total_memory // _SHARE
    return max(1, min(_GPU_ROWS, memory // (_COPIES * x[0].numel() * x.element_size())))
