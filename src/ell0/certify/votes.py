"""What classifiers share that certify by counting votes: checks of their arguments, and the count."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..threat import L0Ball, describe


def check_rows(model: nn.Module, x: Tensor, ball: L0Ball | None) -> None:
    """Raises ValueError unless the model can certify these rows within a ball of this unit."""
    if any(module.training for module in model.modules()):
        raise ValueError("model must be in eval mode, and it is in training mode: call model.eval()")
    if not isinstance(x, Tensor) or x.ndim not in (2, 4) or not len(x) or not bool(x.isfinite().all()):
        raise ValueError(f"x must be (n, d) or (n, channels, height, width), finite and n > 0, got {describe(x)}")
    if ball is not None and ball.unit != "pixel" and x.ndim == 4 and x.shape[1] > 1:
        raise ValueError(f'unit must be "pixel", of which a vote sees all channels, got "{ball.unit}"')


def tally(answers: Tensor, classes: int) -> Tensor:
    """How many voters answer each class: ``(n, classes)`` int64.  answers: ``(voters, n)`` int64."""
    votes = torch.zeros(answers.shape[1], classes, dtype=torch.int64, device=answers.device)
    return votes.scatter_add_(1, answers.T, torch.ones_like(answers.T))
