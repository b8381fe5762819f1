"""Parts of residual networks."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SMALL = 9  # pixels of a picture up to which a 3x3 convolution is one dense product


class ResidualBlock(nn.Module):
    """relu(x + branch(x)), both convolved with stride 2 where the block halves the picture.

    picture: height and width of what it is given, if they are always the same.
    """

    def __init__(self, before: int, after: int, stride: int = 1, picture: Sequence[int] | None = None) -> None:
        super().__init__()
        last = nn.BatchNorm2d(after)
        nn.init.zeros_(last.weight)  # at first the block is the identity
        halved = None if picture is None else [-(-length // stride) for length in picture]
        first = convolution(before, after, stride, picture=picture), nn.BatchNorm2d(after), nn.ReLU()
        self.branch: nn.Module = nn.Sequential(*first, convolution(after, after, picture=halved), last)
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


class SmallConvolution(nn.Conv2d):
    """A 3x3 convolution, padded with 0, of pictures of at most nine pixels, as one dense product.

    Each pixel of the result is a sum over all pixels of the picture, some of them with a weight of 0. These are no more
    multiplications than the nine of a convolution, in a form that processors are fast at.
    """

    taps: Tensor

    def __init__(self, before: int, after: int, stride: int, picture: Sequence[int]) -> None:
        super().__init__(before, after, 3, stride, 1, bias=False)
        self.picture = tuple(picture)
        pixels = torch.eye(self.picture[0] * self.picture[1]).view(-1, 1, *self.picture)
        # (9, results, pixels): which of the nine weights, if any, lies between a pixel and one of the result.
        self.register_buffer("taps", F.unfold(pixels, 3, padding=1, stride=stride).permute(1, 2, 0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: ``(n, before, *picture)``."""
        # Channels last, on both sides: (results, after, pixels, before).
        weight = (self.weight.flatten(2) @ self.taps.flatten(1)).unflatten(2, self.taps.shape[1:]).permute(2, 0, 3, 1)
        found = F.linear(x.permute(0, 2, 3, 1).flatten(1), weight.flatten(2).flatten(0, 1))
        height, width = (-(-length // self.stride[0]) for length in self.picture)
        return found.view(-1, height, width, self.out_channels).permute(0, 3, 1, 2)


def convolution(
    before: int, after: int, stride: int = 1, size: int = 3, *, picture: Sequence[int] | None = None
) -> nn.Conv2d:
    """Before a batch norm, which has the bias.  picture: as of `ResidualBlock`."""
    if picture is not None and size == 3 and picture[0] * picture[1] <= SMALL:
        layer: nn.Conv2d = SmallConvolution(before, after, stride, picture)
    else:
        layer = nn.Conv2d(before, after, size, stride, size // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return layer
