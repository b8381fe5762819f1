"""Sparse-PGD [Zhong24]: gradient steps on what a changed unit becomes and on which units change."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from ..common import Progress, check_count, silent
from ..threat import L0Ball
from .contract import AttackResult, Model, Victim
from .declare import attack

__all__ = ["sparse_pgd"]

STEP_SIZE = 0.25  # of the values, as a share of the box
MASK_STEP = 0.25  # of the scores, root mean square
_PATIENCE = 3  # steps without a new set of units before the scores are drawn anew
_CLOSE = 0.5  # below this margin the loss is the margin itself

Gradient = Literal["both", "unprojected", "projected"]


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
    gradient: Gradient = "both",
    generator: torch.Generator | None = None,
    rows: Tensor | None = None,
    target: Tensor | None = None,
    progress: Progress = silent,
) -> AttackResult:
    """Sparse-PGD [Zhong24, algorithm 1]: a value v for every number and a score s for every unit, both learnt.

        x_adv = v on the ``budget`` units with the highest scores, else x
        s <- s - 0.25 * sqrt(units) * g_s / ||g_s||,   g_s = sigmoid'(s) * sum over a unit of g * (v - x)
        v <- v - 0.25 * (high - low) * sign(g) inside the box,   g the gradient of the loss at x_adv

    All values move in the first half of the steps; then from a new start only those that x_adv shows (the paper's
    unprojected and projected gradients). A row whose set of units stays the same for 3 steps in a row draws new scores.
    The loss is the cross-entropy while the margin is at least 0.5, then the margin; its gradient goes straight through
    truncated layers, see `surrogate_gradients`. A step costs two queries.

    Args:
        steps: for each row and restart.  restarts: runs from a new start, for the rows that still stand.
        gradient: ``"both"``, half of the steps each; or one of the two in all steps, as the ensemble sAA has them.
        model, x, y, ball, generator, rows, target, progress: as in `sparse_rs`; the model is differentiable.

    Differs from [Zhong24]'s code: each row counts its own patience; where the cross-entropy is the loss, the gradient
    is that of the log-odds, which has the same direction and does not vanish at a large margin.
    """
    check_count("steps", steps)
    check_count("restarts", restarts)
    if gradient not in get_args(Gradient):
        raise ValueError(f"gradient must be one of {', '.join(map(repr, get_args(Gradient)))}, got {gradient!r}")
    first = {"both": (steps + 1) // 2, "unprojected": steps, "projected": 0}[gradient]
    with Victim(model, x, y, ball, generator=generator, rows=rows, target=target, progress=progress) as victim:
        for restart in range(restarts if ball.budget else 0):
            moments = range(restart * steps, (restart + 1) * steps)
            for projected, part in ((False, moments[:first]), (True, moments[first:])):
                _descend(victim, part, projected, targeted=target is not None)
        return victim.result()


def _descend(victim: Victim, moments: range, projected: bool, targeted: bool) -> None:
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
        _, slope, _ = victim.slopes(victim.points(points), at, _targeted if targeted else _untargeted, straight=True)
        # Where the gradient is no number, nothing moves until new scores are drawn.
        slope = victim.units(slope).nan_to_num(0.0, 0.0, 0.0)

        scores = lowered(scores, slope, values - x)
        moved = slope * shown if projected else slope
        values = (values - STEP_SIZE * width * moved.sign()).clamp(low, high)

        stuck = (unchanged >= _PATIENCE).nonzero().squeeze(1)
        scores[stuck] = victim.draws.normal(at[stuck], 2 * moment + 1, units).to(x)
        unchanged[stuck] = 0


def highest(scores: Tensor, count: int) -> Tensor:
    """True at the ``count`` units with the highest scores: ``(m, units)``."""
    best = scores.topk(count, dim=1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(1, best, True)


def lowered(scores: Tensor, slope: Tensor, change: Tensor) -> Tensor:
    """The scores ``(m, units)`` a step later. slope, change: ``(m, channels, units)``, of the loss and v - x."""
    share = torch.sigmoid(scores.double())
    pull = share * (1 - share) * (slope.double() * change).sum(1)
    length = torch.linalg.vector_norm(pull, dim=1, keepdim=True)
    pull = torch.where(length > 0, pull / length, 0.0)
    length_of_step: float = MASK_STEP * scores.shape[1] ** 0.5
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
