"""X': the adversarial rows that are trained beside the training rows X, and their file."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..attacks.contract import AttackResult
from ..common import write_whole
from ..parallel import Team
from . import _tensors

Attack = Callable[..., AttackResult]
"""``attack(model, x, y, *, generator, rows)``: an attack of ``ell0.attacks`` with its ball and parameters bound."""

NAME = "appended.safetensors"

_CPU_ROWS, _GPU_ROWS = 1024, 32768
_SHARE, _COPIES = 16, 16  # an attack gets this part of a GPU's memory for so many copies of its rows


@dataclass(frozen=True)
class Broken:
    """What an attack made of the rows that it broke by a change.

    rows: ``(m,)`` int64, of X.  of, at, values: ``(c,)``, the row of X and the place in it of each number that changes,
        and what it becomes. All on the CPU.
    """

    rows: Tensor
    of: Tensor
    at: Tensor
    values: Tensor

    @classmethod
    def by(cls, attack: Attack, model: nn.Module, x: Tensor, y: Tensor, rows: Tensor, key: torch.Generator) -> Broken:
        """Attacks some rows of x."""
        if not len(rows):
            none = rows.cpu()
            return cls(none, none, none, torch.zeros(0, dtype=x.dtype, device="cpu"))
        result = attack(model, x[rows], y[rows], generator=key, rows=rows)
        broken = (result.success & (result.distance != 0)).nonzero().squeeze(1)
        points, rows = result.x_adv[broken].flatten(1), rows[broken]
        of, at = (points != x[rows].flatten(1)).nonzero().unbind(1)
        return cls(rows.cpu(), rows[of].cpu(), at.cpu(), points[of, at].cpu())


@dataclass(frozen=True)
class Found:
    """What an attack has found so far: X' by what differs from X, which for sparse attacks is little.

    epoch: before which it runs.  done: training rows attacked.  seconds: that it took.
    rows: ``(m,)`` int64, the training rows of X'.  at, values: ``(c,)``, which numbers of X', flattened, differ from
        the training rows, and what they are. All on the CPU.
    """

    epoch: int
    done: int
    seconds: float
    rows: Tensor
    at: Tensor
    values: Tensor

    @classmethod
    def nothing(cls, epoch: int, x: Tensor) -> Found:
        none = torch.zeros(0, dtype=torch.int64, device="cpu")
        return cls(epoch, 0, 0.0, none, none, torch.zeros(0, dtype=x.dtype, device="cpu"))

    def learn(self, x: Tensor, rows: int, broken: Sequence[Broken]) -> Found:
        """With what was found for the next so many rows of ``x``, in parts."""
        kept = torch.cat([part.rows for part in broken]).sort().values
        # Where a row of x comes to lie in X', whichever part it was in.
        at = torch.cat([torch.searchsorted(kept, part.of) * x[0].numel() + part.at for part in broken])
        order = at.argsort()
        first = len(self.rows) * x[0].numel()
        return replace(
            self,
            done=self.done + rows,
            rows=torch.cat([self.rows, kept]),
            at=torch.cat([self.at, at[order] + first]),
            values=torch.cat([self.values, torch.cat([part.values for part in broken])[order]]),
        )

    def save(self, path: Path) -> None:
        words = {key: value for key, value in vars(self).items() if not isinstance(value, Tensor)}
        tensors = {key: value for key, value in vars(self).items() if isinstance(value, Tensor)}
        write_whole(path, _tensors.encode(tensors, {"found": json.dumps(words)}))

    @classmethod
    def load(cls, path: Path) -> Found:
        tensors, words = _tensors.read(path)
        try:
            fields: dict[str, Any] = json.loads(words["found"]) | tensors
            return cls(**fields)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not what a training wrote") from error


class TrainingSet:
    """X and, after it in the same memory, X'.

    points, labels: ``(n, ...)``, contiguous, and ``(n,)``; behind them room for as many rows of X'.  appended: rows of
        X'.
    since: the epoch before which X' was made, 0 without one.
    """

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = self.points, self.labels = x.detach().contiguous(), y
        self.appended = self.since = 0

    def __len__(self) -> int:
        return len(self.x) + self.appended

    def append(self, found: Found) -> None:
        """Puts what was found in the place of the X' that was there."""
        n, m = len(self.x), len(found.rows)
        if self.points is self.x:
            self.points, self.labels = (torch.cat([t, torch.empty_like(t)]) for t in (self.x, self.y))
            self.x, self.y = self.points[:n], self.labels[:n]
        rows, at, values = (t.to(self.x.device) for t in (found.rows, found.at, found.values))
        self.points[n : n + m] = self.x[rows]
        self.points[n : n + m].view(-1)[at] = values
        self.labels[n : n + m] = self.y[rows]
        self.appended, self.since = m, found.epoch


def search(
    attack: Attack, model: nn.Module, x: Tensor, y: Tensor, found: Found, *, seed: int, batch: int | None, team: Team
) -> Iterator[Found]:
    """Attacks the training rows that ``found`` has not done, and says after each call what was found in all."""
    size = (batch or _rows_of_a_call(x)) * team.size
    while found.done < len(x):
        start = time.perf_counter()
        rows = torch.arange(found.done, min(found.done + size, len(x)), device=x.device)
        key = generator(seed, "attack", found.epoch)
        broken = team.gather(partial(Broken.by, attack, model, x, y, team.share(rows), key))
        # Reading the result waits for the device, so the time is taken after it.
        found = found.learn(x, len(rows), broken)
        found = replace(found, seconds=found.seconds + time.perf_counter() - start)
        yield found


def rehearse(attack: Attack, model: nn.Module, x: Tensor, wrong: Tensor) -> None:
    """Calls an attack on a row given a wrong label, so already broken: parameters that it cannot honour are refused
    before an epoch is spent."""
    row = torch.zeros(1, dtype=torch.int64, device=x.device)
    result = attack(model, x[:1], wrong, generator=generator(0, "attack", 0), rows=row)
    if not isinstance(result, AttackResult):
        raise ValueError(f"attack must return an AttackResult, got {type(result).__name__}")


def generator(seed: int, what: str, epoch: int) -> torch.Generator:
    """The same on every device, whatever else was drawn before."""
    digest = hashlib.sha256(f"{seed} {what} {epoch}".encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def _rows_of_a_call(x: Tensor) -> int:
    """From the size of a GPU's memory, not from what is free: a run that goes on must split its rows as before."""
    if x.device.type != "cuda":
        return _CPU_ROWS
    memory = torch.cuda.get_device_properties(x.device).total_memory // _SHARE
    return max(1, min(_GPU_ROWS, memory // (_COPIES * x[0].numel() * x.element_size())))
