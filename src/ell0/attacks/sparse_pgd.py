"""Sparse-PGD [Zhong24]: gradient steps on what a changed unit becomes and on which units change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from ..common import Progress, check_count, silent
from ..threat import L0Ball
from .contract import AttackResult, Model, Victim
from .declare import attack
from .surrogate import Surrogate

__all__ = ["Mask", "sparse_pgd"]

Mask = Literal["unprojected", "projected", "both"]

_CLOSE = 0.5
"""Below this margin the loss is the margin itself."""


@attack(
    white_box=True, gradients_only=True, random=True, cascade=1,
    cheap={"steps": 6}, strong={"steps": 100, "restarts": 3},
)  # fmt: skip
def sparse_pgd(
    model: Model,
    x: Tensor,
    y: Tensor,
    ball: L0Ball,
    *,
    steps: int = 100,
    restarts: int = 1,
    mask: Mask = "both",
    step_size: float = 0.25,
    mask_step: float = 0.25,
    patience: int = 3,
    surrogate: Surrogate | None = "straight",
    generator: torch.Generator | None = None,
    rows: Tensor | None = None,
    target: Tensor | None = None,
    progress: Progress = silent,
) -> AttackResult:
    """Sparse-PGD [Zhong24, algorithm 1]: a value v for every number and a score s for every unit, both learnt.

        x_adv = v on the ``budget`` units with the highest scores, else x
        s <- s - mask_step * sqrt(units) * g_s / ||g_s||,   g_s = sigmoid'(s) * sum over a unit of g * (v - x)
        v <- v - step_size * (high - low) * sign(g) inside the box,   g the gradient of the loss at x_adv

    A row whose set of units stays the same for ``patience`` steps in a row draws new scores. The loss is the
    cross-entropy while the margin is at least 0.5, then the margin. A step costs two queries.

    Args:
        model: gives logits for x, differentiable.  x: ``(n, ...)``.  y: ``(n,)``, the true labels.
        ball: with a finite box.
        steps: for each row and restart.  restarts: runs from a new start, for the rows that still stand.
        mask: whose values move: ``"unprojected"``, all; ``"projected"``, those that x_adv shows; ``"both"``, all in
            the first half of the steps, then from a new start those that x_adv shows.
        step_size: of the values, as a share of the box.  mask_step: of the scores, root mean square.
        patience: steps without a new set before the scores are drawn anew.
        surrogate: how the gradient goes through truncated layers, see `surrogate_gradients`; None: as it is.
        generator, rows, target, progress: as in `sparse_rs`.

    Differs from [Zhong24]'s code: each row counts its own patience; where the cross-entropy is the loss, the gradient
    is that of the log-odds, which has the same direction and does not vanish at a large margin.
    """
    check_count("steps", steps)
    check_count("restarts", restarts)
    check_count("patience", patience)
    if mask not in get_args(Mask):
        raise ValueError(f'mask must be "unprojected", "projected" or "both", got {mask!r}')
    for name, value in (("step_size", step_size), ("mask_step", mask_step)):
        if not 0 < value < float("inf"):
            raise ValueError(f"{name} must be a finite number > 0, got {value!r}")
    loss = _untargeted if target is None else _targeted
    half = {"unprojected": steps, "projected": 0, "both": (steps + 1) // 2}[mask]
    with Victim(model, x, y, ball, generator=generator, rows=rows, target=target, progress=progress) as victim:
        for restart in range(restarts if ball.budget else 0):
            moments = range(restart * steps, (restart + 1) * steps)
            for projected, part in ((False, moments[:half]), (True, moments[half:])):
                _descend(victim, part, projected, step_size, mask_step, patience, loss, surrogate)
        return victim.result()


def _descend(
    victim: Victim,
    moments: range,
    projected: bool,
    step_size: float,
    mask_step: float,
    patience: int,
    loss: Callable[[Tensor, Tensor], Tensor],
    surrogate: Surrogate | None,
) -> None:
    """One descent of the standing rows from a new start. Numbers are ``(m, channels, units)``, scores ``(m, units)``.

    moments: the steps, by their numbers in the whole attack; each draws under its own.
    """
    at = victim.standing
    if not len(at) or not moments:
        return
    x, low, high, mutable = (victim.units(t)[at] for t in (victim.x, victim.low, victim.high, victim.mutable))
    # A frozen number has the box of one point: so it never moves, and no bound is infinite.
    low, high = torch.where(mutable, low, x), torch.where(mutable, high, x)
    width, units = high - low, x.shape[2]
    start = victim.draws.uniform(at, 2 * moments[0], x[0].numel()).view(x.shape).to(x)
    values = (x + width * (2 * start - 1)).clamp(low, high)
    scores = victim.draws.normal(at, 2 * moments[0] + 1, units).to(x)
    chosen, unchanged = torch.zeros_like(scores, dtype=torch.bool), torch.zeros_like(at)
    for moment in victim.while_standing(moments, f"sparse_pgd, {'projected' if projected else 'unprojected'}"):
        stands = ~victim.success[at]
        if not stands.all():
            at, x, low, high, mutable = (t[stands] for t in (at, x, low, high, mutable))
            width, values, scores, chosen, unchanged = (t[stands] for t in (width, values, scores, chosen, unchanged))
        free = mutable.any(1)
        before, chosen = chosen, highest(scores.masked_fill(~free, -torch.inf), victim.ball.budget) & free
        unchanged = torch.where((chosen == before).all(1), unchanged + 1, 0)
        shown = chosen.unsqueeze(1)
        points = torch.where(shown, values, x)
        _, slope = victim.slopes(victim.points(points), at, loss, surrogate)
        # Where the gradient is no number, nothing moves until new scores are drawn.
        slope = victim.units(slope).nan_to_num(0.0, 0.0, 0.0)

        scores = lowered(scores, slope, values - x, mask_step)
        moved = slope * shown if projected else slope
        values = (values - step_size * width * moved.sign()).clamp(low, high)

        stuck = (unchanged >= patience).nonzero().squeeze(1)
        scores[stuck] = victim.draws.normal(at[stuck], 2 * moment + 1, units).to(x)
        unchanged[stuck] = 0


def highest(scores: Tensor, count: int) -> Tensor:
    """True at the ``count`` units with the highest scores: ``(m, units)``."""
    best = scores.topk(count, dim=1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(1, best, True)


def lowered(scores: Tensor, slope: Tensor, change: Tensor, mask_step: float) -> Tensor:
    """The scores ``(m, units)`` a step later. slope, change: ``(m, channels, units)``, of the loss and v - x."""
    share = torch.sigmoid(scores.double())
    pull = share * (1 - share) * (slope.double() * change).sum(1)
    length = torch.linalg.vector_norm(pull, dim=1, keepdim=True)
    pull = torch.where(length > 0, pull / length, 0.0)
    length_of_step: float = mask_step * scores.shape[1] ** 0.5
    return (scores - length_of_step * pull).to(scores)


def _untargeted(logits: Tensor, margin: Tensor) -> Tensor:
    # At such a margin the label has the largest logit, for rows that stand.
    largest = logits.max(1)
    others = logits.scatter(1, largest.indices.unsqueeze(1), -torch.inf).logsumexp(1)
    return torch.where(margin >= _CLOSE, largest.values - others, margin)


def _targeted(logits: Tensor, margin: Tensor) -> Tensor:
    # At such a margin the target does not have the largest logit, so the margin is the largest minus the target's.
    entropy = logits.logsumexp(1) - logits.amax(1) + margin
    return torch.where(margin >= _CLOSE, entropy, margin)
