"""What classifiers share that certify by counting votes: their arguments, and the count."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..threat import describe


def check_rows(model: nn.Module, x: Tensor) -> None:
    """Raises unless rows can be certified by this model."""
    if any(module.training for module in model.modules()):
        raise ValueError("model must be in eval mode, and it is in training mode: call model.eval()")
    if not isinstance(x, Tensor) or x.ndim not in (2, 4) or not len(x) or not bool(x.isfinite().all()):
        raise ValueError(f"x must be (n, d) or (n, channels, height, width), finite and n > 0, got {describe(x)}")


def tally(answers: Tensor, classes: int) -> Tensor:
    """How many voters answer each class: ``(n, classes)`` int64.  answers: ``(voters, n)`` int64."""
    votes = torch.zeros(answers.shape[1], classes, dtype=torch.int64, device=answers.device)
    return votes.scatter_add_(1, answers.T, torch.ones_like(answers.T))
