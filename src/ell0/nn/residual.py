"""Parts of residual networks."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ResidualBlock(nn.Module):
    """relu(x + branch(x)), both convolved with stride 2 where the block halves the picture."""

    def __init__(self, before: int, after: int, stride: int = 1) -> None:
        super().__init__()
        last = nn.BatchNorm2d(after)
        nn.init.zeros_(last.weight)  # at first the block is the identity
        first = convolution(before, after, stride), nn.BatchNorm2d(after), nn.ReLU()
        self.branch: nn.Module = nn.Sequential(*first, convolution(after, after), last)
        self.skip: nn.Module = nn.Identity()
        if (before, stride) != (after, 1):
            self.skip = nn.Sequential(convolution(before, after, stride, 1), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.skip(x) + self.branch(x)
        return found.relu()


class Skip(nn.Sequential):
    """x plus what its layers make of it."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + super().forward(x)
        return found


class GhostBatchNorm(nn.BatchNorm2d):
    """Batch norm whose statistics, in training, are those of ``rows`` rows of the batch each.

    A batch that is no multiple of them is normed as a whole. In eval mode it is ``nn.BatchNorm2d``.
    """

    def __init__(self, channels: int, rows: int = 32) -> None:
        super().__init__(channels)
        self.rows = rows

    def forward(self, x: Tensor) -> Tensor:
        """x: ``(n, channels, height, width)``."""
        groups = len(x) // self.rows if self.training else 0
        if groups < 2 or len(x) % self.rows:
            return super().forward(x)
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.momentum is not None
        # Every so manieth row is of one group; groups become channels beside each other.
        wide = x.unflatten(0, (self.rows, groups)).flatten(1, 2)
        mean, var, weight, bias = (
            each.repeat(groups) for each in (self.running_mean, self.running_var, self.weight, self.bias)
        )
        out = F.batch_norm(wide, mean, var, weight, bias, True, self.momentum, self.eps)
        with torch.no_grad():
            self.running_mean.copy_(mean.view(groups, -1).mean(0))
            self.running_var.copy_(var.view(groups, -1).mean(0))
        return out.view(x.shape)


def convolution(before: int, after: int, stride: int = 1, size: int = 3) -> nn.Conv2d:
    """Before a batch norm, which has the bias."""
    layer = nn.Conv2d(before, after, size, stride, size // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return layer
