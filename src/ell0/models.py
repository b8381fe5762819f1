"""The networks of the paper, F(k) and VGG(k), a plain convolutional one and a small one. All return logits."""

import math
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, get_args

from torch import nn

from .nn import InputTruncation, TruncatedConv2d, TruncatedLinear
from .nn.layers import check_shape
from .ops import check_k
from .ops.conv import count_terms
from .threat import Unit

Shape = tuple[int, int, int]  # channels, height, width
Truncation = Literal["channel", "input", "conv", "pixel"]
"""What a convolutional network truncates: each channel of its input, its input times trained numbers, or the products
or pixels that its first layer adds up."""

__all__ = ["cnn", "mlp", "small_cnn", "vgg19"]

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


def vgg19(
    k: int = 10, *, classes: int = 10, in_shape: Shape = (3, 32, 32), truncation: Truncation = "channel"
) -> nn.Sequential:
    """VGG(k): VGG-19 without dropout, its input truncated before the first convolution     ([Beliaev22] appendix).

    Input ``(n, *in_shape)``, height and width at least 32; output ``(n, classes)``. ``k=0`` truncates nothing; the
    other parameters have the same names, and from the same seed the same values, for every k and truncation.

    As in the paper's supplement: batch norm after each of the sixteen 3x3 convolutions, and a head of 512, batch norm,
    ReLU and the classes on the 512 channels that five poolings leave.

    Args:
        truncation: "channel" puts an `InputTruncation` before the first convolution, as the paper does, and "input" its
            weighted variant; "conv" and "pixel" make that convolution a `TruncatedConv2d` with unit "feature" or
            "pixel", where k counts terms of one receptive field: ``2k < 9 * channels``, or ``2k < 9``.
    """
    channels, height, width = _check_image(in_shape, 32, "five poolings")
    truncated = _truncation(k, in_shape, truncation)
    features: list[nn.Module] = []
    for wide, convolutions in VGG19_BLOCKS:
        for _ in range(convolutions):
            convolution = _convolution(channels, wide, 0 if features else k, truncation)
            features += [convolution, nn.BatchNorm2d(wide), nn.ReLU()]
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
        for convolution in (halves, *(nn.Conv2d(wide, wide, 3, padding=1) for _ in range(depth - 1))):
            features += [convolution, nn.BatchNorm2d(wide), nn.ReLU()]
        channels, height, width = wide, height // 2, width // 2
    head: list[nn.Module] = []
    for before, after in pairwise((channels * height * width, *hidden, classes)):
        head += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(
        OrderedDict(features=nn.Sequential(*features), flatten=nn.Flatten(), head=nn.Sequential(*head[:-1]))
    )


def small_cnn(
    k: int = 0, *, classes: int = 10, in_shape: Shape = (1, 28, 28), width: int = 8, truncation: Truncation = "channel"
) -> nn.Sequential:
    """Two convolutions and a linear layer without batch norm, for any ``in_shape``; k and truncation as in `vgg19`."""
    channels, *size = _check_image(in_shape)
    truncated = _truncation(k, in_shape, truncation)
    first, second = _convolution(channels, width, k, truncation), nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
    head = nn.Linear(2 * width * math.prod(math.ceil(length / 2) for length in size), classes)
    return _classifier(truncated, [first, nn.ReLU(), second, nn.ReLU()], head)


def _check_image(in_shape: Sequence[int], least: int = 1, why: str = "") -> tuple[int, ...]:
    """Returns the shape; raises unless it is that of an image with height and width of at least so many."""
    if len(check_shape("in_shape", in_shape)) != 3:
        raise ValueError(f"in_shape must be (channels, height, width), got {in_shape!r}")
    if min(in_shape[1:]) < least:
        raise ValueError(f"in_shape must have height and width of at least {least}, for {why}, got {in_shape}")
    return tuple(in_shape)


def _truncation(k: int, in_shape: Sequence[int], truncation: Truncation) -> dict[str, nn.Module]:
    """The layer before the first convolution, if there is one; raises unless k and truncation fit."""
    if truncation not in get_args(Truncation):
        raise ValueError(f'truncation must be "channel", "input", "conv" or "pixel", got {truncation!r}')
    if truncation in _UNITS:
        check_k(k, count_terms(in_shape[0], (3, 3), _UNITS[truncation]), "terms of a field")
        return {}
    layer = InputTruncation(in_shape, k, weighted=truncation == "input")
    return {"truncation": layer} if k else {}


_UNITS: dict[Truncation, Unit] = {"conv": "feature", "pixel": "pixel"}


def _convolution(channels: int, wide: int, k: int, truncation: Truncation) -> nn.Conv2d:
    if k == 0 or truncation not in _UNITS:
        return nn.Conv2d(channels, wide, 3, padding=1)
    return TruncatedConv2d(channels, wide, 3, k, padding=1, unit=_UNITS[truncation])


def _classifier(first: dict[str, nn.Module], features: list[nn.Module], head: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(**first, features=nn.Sequential(*features), flatten=nn.Flatten(), head=head))
