"""Whether an evaluation can be trusted: claims looked at once more, and flags."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..attacks.contract import Model, Victim
from ..threat import L0Ball
from ._state import State

_BEATEN = 3.0  # points that black-box attacks may take from white-box ones before a flag is raised
_SAME = 1e-5  # relative and absolute difference of logits that rounding explains
# A point on the decision boundary may fall to either side in another batch: so much of the clean margin is rounding.
_BOUNDARY = 1e-3


@dataclass(frozen=True)
class Probe:
    """What a few forward passes say about a model."""

    differentiable: bool
    random: bool
    softmaxed: bool

    @classmethod
    def of(cls, model: Model, x: Tensor) -> Probe:
        with torch.no_grad():
            logits, again = model(x), model(x)
        softmaxed = bool((logits >= 0).all()) and torch.allclose(logits.sum(1), torch.ones_like(logits[:, 0]))
        return cls(_differentiable(model, x[:1]), not torch.allclose(logits, again, _SAME, _SAME), softmaxed)


def _differentiable(model: Model, x: Tensor) -> bool:
    try:
        with torch.enable_grad():
            return model(x.detach().clone().requires_grad_()).requires_grad
    except RuntimeError:  # a model that leaves torch, through x.numpy() for one
        return False


def clean_pass(
    model: Model, x: Tensor, y: Tensor, ball: L0Ball, batch: int, differentiable: bool
) -> tuple[Tensor, Tensor]:
    """Which rows are misclassified, and which have a gradient of the margin that is zero or not finite: ``(n,)``."""
    wrong, blind = [], []
    for rows in torch.arange(len(x)).split(batch):
        with on_rows(model, x, y, ball, rows) as victim:
            wrong.append(victim.success.cpu())
            if differentiable:
                slope = victim.slopes(victim.x, torch.arange(len(rows), device=x.device))[1].flatten(1)
                blind.append(((slope == 0).all(1) | ~slope.isfinite().all(1)).cpu())
            else:
                blind.append(torch.ones(len(rows), dtype=torch.bool))
    return torch.cat(wrong), torch.cat(blind)


def check_claims(
    model: Model, x: Tensor, y: Tensor, ball: L0Ball, state: State, names: tuple[str, ...], batch: int, random: bool
) -> int:
    """Looks at every broken row once more; raises where a claim is wrong.

    The model of a flagged evaluation may answer by chance: then errors that do not come back are only counted.
    """
    lost = 0
    for rows in batches(state.verdict > 0, batch):
        here = rows.to(x.device)
        points = state.x_adv[here]
        mine = part(ball, x, here, ball.budget)
        false = ~mine.contains(x[here], points) | (mine.count(x[here], points).cpu() != state.distance[rows]).to(
            x.device
        )
        _blame("lies in the ball at its distance", false, rows, state, names)
        with on_rows(model, x, y, ball, rows) as victim:
            clean = victim.margin.clone()
            margin = victim.margins(points, torch.arange(len(rows), device=x.device))
            false = ~victim.success & (margin > _BOUNDARY * clean.abs())
        if random:
            lost += int(false.sum())
        else:
            _blame("is misclassified", false, rows, state, names)
    return lost


def _blame(claim: str, false: Tensor, rows: Tensor, state: State, names: tuple[str, ...]) -> None:
    if false.any():
        row = int(rows[false.cpu()][0])
        name = names[int(state.verdict[row]) - 1]
        raise RuntimeError(f"attack {name!r} says that its point for row {row} {claim}, which is not so")


def train_mode(model: Model) -> list[str]:
    if isinstance(model, nn.Module) and any(module.training for module in model.modules()):
        return ["model left in train mode: it was evaluated in eval mode"]
    return []


def nature(probe: Probe, blind: int, lost: int, n: int) -> list[str]:
    flags = []
    if not probe.differentiable:
        flags.append("zero or NaN gradients: the model gives no gradient at all, white-box attacks are blind")
    elif blind:
        flags.append(f"zero or NaN gradients: at {blind} of {n} rows, where white-box attacks are blind")
    if probe.random:
        flags.append(f"random outputs: two forward passes differ, and {lost} errors did not come back at the end")
    if probe.softmaxed:
        flags.append("softmaxed outputs: rows are non-negative and sum to 1, gradients may vanish; give logits")
    return flags


def beaten(state: State, white_box: list[bool]) -> list[str]:
    """Whether black-box attacks broke many rows that a white-box attack had tried with the same budget."""
    white = torch.tensor(white_box)
    if not white.any():
        return []
    broken = (state.verdict > 0).nonzero().squeeze(1)
    column = state.verdict[broken] - 1
    tried = state.tried[broken]
    beaten = ~white[column] & (tried[:, white].amax(1) >= tried[torch.arange(len(broken)), column])
    points = 100 * int(beaten.sum()) / len(state.verdict)
    if points <= _BEATEN:
        return []
    return [f"black-box beats white-box: by {points:.1f} points, rows that the white-box attacks had left standing"]


def on_rows(model: Model, x: Tensor, y: Tensor, ball: L0Ball, rows: Tensor) -> Victim:
    rows = rows.to(x.device)
    mine = part(ball, x, rows, ball.budget)
    return Victim(model, x[rows], y[rows], mine, generator=None, rows=None, target=None, finite=False)


def part(ball: L0Ball, x: Tensor, rows: Tensor, budget: int) -> L0Ball:
    """The ball for some rows of x, where the box or the mask may have a value for each row."""

    def take(value: Any) -> Any:
        each = isinstance(value, Tensor) and value.ndim == x.ndim and len(value) == len(x) > 1
        return value[rows] if each else value

    return replace(ball, budget=budget, low=take(ball.low), high=take(ball.high), mutable=take(ball.mutable))


def batches(mask: Tensor, batch: int) -> list[Tensor]:
    """Positions of the True entries of ``(n,)``, at most ``batch`` at a time."""
    rows = mask.nonzero().squeeze(1)
    return list(rows.split(batch)) if len(rows) else []
