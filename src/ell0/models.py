"""The networks of the paper, F(k) and VGG(k), plain and small ones, and those of the rivals. All return logits.

[Hammoudeh24] Z. Hammoudeh, D. Lowd, "Provable Robustness against a Union of L0 Adversarial Attacks", 2024.
[Levine20] A. Levine, S. Feizi, "Robustness Certificates for Sparse Adversarial Attacks by Randomized Ablation", 2020.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from .nn import InputScale, InputTruncation, TruncatedLinear
from .nn.layers import check_shape
from .nn.residual import GhostBatchNorm, ResidualBlock, Skip, convolution
from .ops import check_k

Shape = tuple[int, int, int]  # channels, height, width

__all__ = ["cnn", "mlp", "resnet9", "resnet18", "small_cnn", "vgg19"]

VGG19_BLOCKS = ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4))


def mlp(
    k: int = 10, *, in_features: int = 784, hidden: Sequence[int] = (1568, 3136, 500, 100), classes: int = 10
) -> nn.Sequential:
    """F(k): a fully connected ReLU network whose first layer is truncated     ([Beliaev22] eq. 5, table 3).

    Input ``(n, ...)`` with ``in_features`` numbers a sample, such as ``(n, 1, 28, 28)`` or ``(n, 784)``; output
    ``(n, classes)``. ``k=0`` has a plain ``nn.Linear`` first. The same seed gives the same weights for every k, and
    state dicts are interchangeable. The appendix speaks of five hidden layers; its table has these four.
    """
    check_k(k, in_features)
    sizes = (in_features, *hidden, classes)
    layers: list[nn.Module] = [nn.Flatten()]
    for i, (before, after) in enumerate(pairwise(sizes)):
        layers += [nn.Linear(before, after) if i or k == 0 else TruncatedLinear(before, after, k), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def vgg19(k: int = 10, *, classes: int = 10, in_shape: Shape = (3, 32, 32)) -> nn.Sequential:
    """VGG(k): VGG-19 without dropout behind an `InputTruncation`     ([Beliaev22] appendix).

    Input ``(n, *in_shape)``, height and width at least 32; output ``(n, classes)``. ``k=0`` truncates nothing. The
    same seed gives the same weights for every k, and state dicts are interchangeable.

    As in the paper's supplement: batch norm after each of the sixteen 3x3 convolutions, and a head of 512, batch norm,
    ReLU and the classes on the 512 channels that five poolings leave.
    Differs from the supplement: convolutions have no bias, which batch norm would take away again.
    """
    channels, height, width = _check_image(in_shape, 32, "five poolings")
    truncated = _truncation(k, in_shape)
    features: list[nn.Module] = []
    for wide, convolutions in VGG19_BLOCKS:
        for _ in range(convolutions):
            layer = nn.Conv2d(channels, wide, 3, padding=1, bias=False)
            features += [layer, nn.BatchNorm2d(wide), nn.ReLU()]
            channels = wide
        features.append(nn.MaxPool2d(2))
    first = nn.Linear(channels * (height // 32) * (width // 32), channels)
    head = nn.Sequential(first, nn.BatchNorm1d(channels), nn.ReLU(), nn.Linear(channels, classes))
    return _classifier(truncated, features, head)


def cnn(
    *,
    classes: int = 10,
    in_shape: Shape = (1, 28, 28),
    widths: Sequence[int] = (64, 128),
    depth: int = 1,
    hidden: Sequence[int] = (),
) -> nn.Sequential:
    """Convolutions with batch norm, then a fully connected ReLU network; nothing is truncated.

    Input ``(n, *in_shape)``, output ``(n, classes)``. Each of ``widths`` makes a stage: a 4x4 convolution that halves
    height and width, and ``depth - 1`` convolutions of 3x3.
    """
    channels, height, width = _check_image(in_shape, 2 ** len(widths), f"{len(widths)} widths")
    features: list[nn.Module] = []
    for wide in widths:
        halves = nn.Conv2d(channels, wide, 4, stride=2, padding=1)
        for layer in (halves, *(nn.Conv2d(wide, wide, 3, padding=1) for _ in range(depth - 1))):
            features += [layer, nn.BatchNorm2d(wide), nn.ReLU()]
        channels, height, width = wide, height // 2, width // 2
    head: list[nn.Module] = []
    for before, after in pairwise((channels * height * width, *hidden, classes)):
        head += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(
        OrderedDict(features=nn.Sequential(*features), flatten=nn.Flatten(), head=nn.Sequential(*head[:-1]))
    )


def resnet9(*, classes: int = 10, in_shape: Shape = (3, 32, 32)) -> nn.Sequential:
    """The base of [Hammoudeh24]: eight convolutions of 64 to 512 channels with ghost batch norm, and CELU; logits / 8.

    Input ``(n, *in_shape)``, height and width at least 8; output ``(n, classes)``.
    """
    channels, *_ = _check_image(in_shape, 8, "three poolings")

    def layer(before: int, after: int, *more: nn.Module) -> list[nn.Module]:
        return [convolution(before, after), GhostBatchNorm(after), nn.CELU(0.075), *more]

    body = layer(channels, 64) + layer(64, 128, nn.MaxPool2d(2)) + [Skip(*layer(128, 128), *layer(128, 128))]
    body += layer(128, 256, nn.MaxPool2d(2)) + layer(256, 512, nn.MaxPool2d(2))
    body += [Skip(*layer(512, 512), *layer(512, 512)), nn.AdaptiveMaxPool2d(1), nn.Flatten()]
    return nn.Sequential(*body, nn.Linear(512, classes, bias=False), InputScale(0.0, 8.0))


def resnet18(*, classes: int = 10, in_shape: Shape = (3, 32, 32)) -> nn.Sequential:
    """ResNet-18 for small images, the base of [Levine20].  Input ``(n, *in_shape)``; output ``(n, classes)``."""
    channels, *_ = _check_image(in_shape)
    body = [convolution(channels, 64), nn.BatchNorm2d(64), nn.ReLU(), *(ResidualBlock(64, 64) for _ in range(2))]
    for wide in (128, 256, 512):
        body += [ResidualBlock(wide // 2, wide, 2), ResidualBlock(wide, wide)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))


def small_cnn(k: int = 0, *, classes: int = 10, in_shape: Shape = (1, 28, 28), width: int = 8) -> nn.Sequential:
    """Two convolutions and a linear layer without batch norm, for any ``in_shape``; k as in `vgg19`."""
    channels, *size = _check_image(in_shape)
    truncated = _truncation(k, in_shape)
    first = nn.Conv2d(channels, width, 3, padding=1)
    second = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
    head = nn.Linear(2 * width * math.prod(math.ceil(length / 2) for length in size), classes)
    return _classifier(truncated, [first, nn.ReLU(), second, nn.ReLU()], head)


def _check_image(in_shape: Sequence[int], least: int = 1, why: str = "") -> tuple[int, ...]:
    """Returns the shape; raises unless it is that of an image with height and width of at least so many."""
    if len(check_shape("in_shape", in_shape)) != 3:
        raise ValueError(f"in_shape must be (channels, height, width), got {in_shape!r}")
    if min(in_shape[1:]) < least:
        raise ValueError(f"in_shape must have height and width of at least {least}, for {why}, got {in_shape}")
    return tuple(in_shape)


def _truncation(k: int, in_shape: Sequence[int]) -> dict[str, nn.Module]:
    """The layer before the first convolution, if there is one; raises unless k fits."""
    layer = InputTruncation(in_shape, k)
    return {"truncation": layer} if k else {}


def _classifier(first: dict[str, nn.Module], features: list[nn.Module], head: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(**first, features=nn.Sequential(*features), flatten=nn.Flatten(), head=head))
