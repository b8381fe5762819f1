"""The loss of a bound, which may be bounded itself.

[Zhang18] Z. Zhang, M. Sabuncu, "Generalized Cross Entropy Loss for Training Deep Neural Networks with Noisy Labels",
2018.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def bound_loss(scores: Tensor, y: Tensor, power: float) -> Tensor:
    """The mean of -log p, or for power > 0 of (1 - p^power) / power     ([Zhang18])

    with p the share of y ``(n,)`` in the softmax of scores ``(n, classes)``.
    """
    if not power:
        return F.cross_entropy(scores, y)
    return -torch.expm1(-power * F.cross_entropy(scores, y, reduction="none")).mean() / power


def check_power(power: float) -> None:
    """Raises ValueError unless `bound_loss` takes it."""
    if power and not 1e-3 <= power <= 1:
        raise ValueError(f"power must be 0 or lie in [0.001, 1], got {power!r}")
