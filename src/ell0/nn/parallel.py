"""Several linear layers as one, for networks that run side by side."""

import torch
from torch import Tensor, nn


class ParallelLinear(nn.Module):
    """One ``nn.Linear`` for each part:  ``out[p] = x[p] @ weight[p] + bias[p]``, initialised as ``nn.Linear`` is."""

    def __init__(self, parts: int, in_features: int, out_features: int) -> None:
        super().__init__()
        bound = in_features**-0.5
        self.weight = nn.Parameter(torch.empty(parts, in_features, out_features).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(parts, 1, out_features).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        """x: ``(parts, n, in_features)``; result: ``(parts, n, out_features)``."""
        return torch.baddbmm(self.bias, x, self.weight)
