"""Certificates put to the test: attacks on rows at their own certified radius, where none may succeed."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..attacks import ATTACKS, AttackResult
from ..common import Progress, Step, silent
from ..evaluation import Entry, evaluate
from ..precision import dense_products
from ..threat import L0Ball
from .certifier import ANY_VALUE


@dataclass(frozen=True)
class Challenge:
    """What attacks found within certified radii.

    tried: rows with a radius of 1 or more.
    fell: ``(f,)`` int64, rows that an attack broke within their radius. If there is one, a certificate was wrong.
    by: for each of them the attack.  attacks: the names of all.  flags: why they may have been weak (`ell0.evaluate`).
    """

    tried: int
    fell: Tensor
    by: tuple[str, ...]
    attacks: tuple[str, ...]
    flags: tuple[str, ...]


def challenge(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    radii: Tensor,
    ball: L0Ball | None = None,
    attacks: Mapping[str, Callable[..., AttackResult] | Entry] | Collection[str] = tuple(ATTACKS),
    *,
    batch: int = 512,
    seed: int = 0,
    progress: Progress = silent,
) -> Challenge:
    """Attacks every row with as many changes as `radius` proved harmless.

        radii = radius(model, x, y)
        assert not len(challenge(model, x, y, radii).fell)

    Args:
        radii: ``(n,)`` int64, what `radius` gave for these rows and this ball.
        ball: as for `radius`. If its box is infinite the attacks get two boxes instead, to 1 and to 100.
        attacks: as for `ell0.evaluate`.  batch: rows in one call of an attack.  seed: of the attacks.
    """
    if radii.shape != y.shape or radii.is_floating_point() or radii.dtype == torch.bool:
        raise ValueError(f"radii must be integers of shape {tuple(y.shape)}, got {radii.dtype} {tuple(radii.shape)}")
    boxes, radii = _boxes(ANY_VALUE if ball is None else ball, x), radii.to(x.device)
    tried, done = int(radii.gt(0).sum()), 0
    fallen: dict[int, str] = {}
    flags: dict[str, None] = {}
    for budget in radii[radii > 0].unique().tolist():
        rows = (radii == budget).nonzero().squeeze(1)
        for box in boxes:
            with dense_products(tf32=False):
                here = box.part(x, rows, budget)
                found = evaluate(model, x[rows], y[rows], here, attacks, batch=batch, seed=seed)
            broken = {row: name for row, name in zip(rows.tolist(), found.decided, strict=True) if name is not None}
            fallen, flags = broken | fallen, flags | dict.fromkeys(found.flags)
        done += len(rows)
        progress(Step("rows attacked", done, tried))
    fell = torch.tensor(sorted(fallen), dtype=torch.int64)
    return Challenge(tried, fell, tuple(fallen[row] for row in fell.tolist()), tuple(attacks), tuple(flags))


def _boxes(ball: L0Ball, x: Tensor) -> list[L0Ball]:
    """The ball itself, or the two boxes that stand for an infinite one: attacks need a finite box."""
    low, high, mutable = torch.broadcast_tensors(*ball.box(x))
    if ((high - low).isfinite() | ~mutable).all():
        return [ball]
    if not ((low.eq(-math.inf) & high.eq(math.inf)) | ~mutable).all():
        raise ValueError(f"ball must have a finite box, or none at all, got low={ball.low!r} and high={ball.high!r}")
    # As tensors: they stand for any value, so they need not be of the scale of x.
    return [replace(ball, low=x.new_tensor([-beta]), high=x.new_tensor([beta])) for beta in (1.0, 100.0)]
