"""What adapters share: points that another library found are judged as those of our attacks are."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..attacks import AttackResult
from ..attacks.contract import Model, Victim
from ..evaluation import Entry, cascade
from ..threat import L0Ball

_SAME = 1e-6  # of the box: a number that another library's arithmetic moved by less is not changed

Find = Callable[["Counted", Tensor, Tensor, L0Ball], Tensor]
"""``find(model, x, y, ball)``: the points ``(n, ...)`` of an attack, for rows that the model classifies right."""


def theirs(find: Find, settings: object, white_box: bool) -> Entry:
    """An attack of another library for `ell0.evaluate`. settings: what it prints as, which a state is known by."""
    return Entry(Judged(find, " ".join(repr(settings).split())), white_box)


def configured(name: str, **settings: Any) -> Callable[..., AttackResult]:
    """One of our attacks by its name, with settings."""
    return partial(cascade([name])[name].attack, **settings)


def away_from(target: Tensor, logits: Tensor) -> Tensor:
    """Labels for rows whose true ones are not known: what the model says, or next to it where that is the target."""
    first, second = logits.topk(2, 1).indices.unbind(1)
    return torch.where(first == target, second, first)


@dataclass(frozen=True)
class Judged:
    """Counts as broken the rows whose point lies in the ball and is misclassified, whatever the library says of them.

    Numbers that moved by rounding alone, and frozen ones, go back to those of x first. The queries are the forward
    passes of all rows, twice where a gradient was asked for, shared out evenly.
    """

    find: Find
    settings: str

    def __call__(
        self,
        model: Model,
        x: Tensor,
        y: Tensor,
        ball: L0Ball,
        *,
        generator: torch.Generator | None = None,
        rows: Tensor | None = None,
    ) -> AttackResult:
        with Victim(model, x, y, ball, generator=generator, rows=rows) as victim:
            at = victim.standing
            if len(at):
                low, high = ends(ball)
                clean, own, counted = victim.x[at], ball.part(x, at), Counted(model, x.device)
                if clean.min() < low or clean.max() > high:
                    raise ValueError(f"x must lie in the box [{low:g}, {high:g}] for an attack of another library")
                with borrowed_draws(0 if generator is None else generator.initial_seed()), torch.enable_grad():
                    points = self.find(counted, clean.clone(), y[at].long(), own).detach().to(clean)
                moved = ((points - clean).abs() > _SAME * (high - low)) & own.box(clean)[2]
                points = torch.where(moved, points, clean)
                inside = own.contains(clean, points)
                victim.errs(points[inside], at[inside])
                victim.queries[at] += -(-counted.asked // len(at))
            return victim.result()


class Counted(nn.Module):
    """A model, any callable, as a module that counts the rows it is asked about; it has a parameter on the device."""

    def __init__(self, model: Model, device: torch.device) -> None:
        super().__init__()
        self.model, self.asked = model, 0
        self.place = nn.Parameter(torch.empty(0, device=device), requires_grad=False)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        self.asked += len(x) * (2 if x.requires_grad else 1)
        return self.model(x)


class Around(nn.Module):
    """A function that calls a network, as a module: an attack finds the layers of the network in it."""

    def __init__(self, network: nn.Module, function: Model) -> None:
        super().__init__()
        self.network, self.function = network, function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def ends(ball: L0Ball) -> tuple[float, float]:
    """The box of a ball as two numbers; raises ValueError if it is another for each number."""
    if isinstance(ball.low, Tensor) or isinstance(ball.high, Tensor):
        raise ValueError("low and high must be two numbers for an attack of another library, got tensors")
    return float(ball.low), float(ball.high)


@contextmanager
def borrowed_draws(seed: int) -> Iterator[None]:
    """Seeds the global generators that other libraries draw from, and gives them back as they were."""
    ours, numpys = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(ours)
            np.random.set_state(numpys)  # noqa: NPY002
