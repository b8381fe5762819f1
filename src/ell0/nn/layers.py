"""Layers whose sums drop or clip extreme terms, and layers that change the input of a network."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..ops import Prepared, check_k, keep_mask, prepare, truncated_linear
from ..ops.checks import check_like

Device = torch.device | str | None
Dtype = torch.dtype | None

# fx records a call of these as one node instead of tracing into them.
fx.wrap("truncated_linear")
fx.wrap("_truncate_input")


class TruncatedLinear(nn.Linear):
    """``nn.Linear`` whose inner sums drop their k largest and k smallest terms; the bias is added afterwards.

        out[b, o] = sum of the middle in - 2k values of {x[b, i] * weight[o, i]} + bias[o]     ([Beliaev22] eq. 3-5)

    Initialised as ``nn.Linear`` (the same seed gives the same weights), and their state dicts are interchangeable.

    Args:
        k: terms removed on each side, ``0 <= 2k < in_features``; ``k=0`` is ``nn.Linear``.
    """

    _prepared: Prepared | None = None  # set by the context manager `prepared` alone

    def __init__(
        self, in_features: int, out_features: int, k: int, bias: bool = True, device: Device = None, dtype: Dtype = None
    ) -> None:
        check_k(k, in_features)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.k = k

    def forward(self, x: Tensor) -> Tensor:
        """x: ``(..., in_features)``; result: ``(..., out_features)``."""
        return truncated_linear(x, self.weight, self.bias, k=self.k, prepared=self._prepared)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, k={self.k}"

    def __getstate__(self) -> dict[str, Any]:
        # A copy has its own weights, for which nothing is prepared.
        return {name: value for name, value in self.__dict__.items() if name != "_prepared"}


@contextmanager
def prepared(model: nn.Module) -> Iterator[None]:
    """Context: the weights of truncated layers are ordered once for all calls inside, and must not change there."""
    layers = [layer for layer in model.modules() if isinstance(layer, TruncatedLinear) and layer.k]
    before = [layer._prepared for layer in layers]
    try:
        for layer in layers:
            layer._prepared = prepare(layer.weight)
        yield
    finally:
        for layer, value in zip(layers, before, strict=True):
            layer._prepared = value


class InputTruncation(nn.Module):
    """Scales every feature of a sample and sets the k largest and k smallest products to 0.

        u = weight * x,  out = 0 at the k largest and the k smallest entries of u, else u     ([Beliaev22] section 5)

    The paper's variant for convolutional networks, placed before the first convolution. The selection has no gradient.
    At ties the lowest index of the flattened sample is removed first. 0 * inf is 0; a NaN makes its whole sample NaN.

    Args:
        features: shape of one sample, such as ``(3, 32, 32)``, or its length.
        k: features removed on each side, ``0 <= 2k < number of features``; ``k=0`` only scales.
    """

    def __init__(self, features: int | Sequence[int], k: int, device: Device = None, dtype: Dtype = None) -> None:
        super().__init__()
        self.features = check_shape("features", (features,) if isinstance(features, int) else features)
        check_k(k, math.prod(self.features))
        self.k = k
        self.weight = nn.Parameter(torch.ones(self.features, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """x and result: ``(n, *features)``."""
        return _truncate_input(x, self.weight, self.k)

    def extra_repr(self) -> str:
        return f"features={self.features}, k={self.k}"


def _truncate_input(x: Tensor, weight: Tensor, k: int) -> Tensor:
    if x.shape[1:] != weight.shape:
        raise ValueError(f"x must have shape (n, {', '.join(map(str, weight.shape))}), got {tuple(x.shape)}")
    check_like(weight, x=x)
    with torch.no_grad():
        nothing = ((weight == 0) & x.isinf()) | (weight.isinf() & (x == 0))
        product = torch.where(nothing, 0.0, weight * x)
        spoilt = product.flatten(1).isnan().any(1).view(-1, *[1] * weight.ndim)
        keep = keep_mask(product.flatten(1), k, k).view(x.shape) & ~nothing | spoilt
        whole = torch.where(spoilt, torch.nan, torch.ones_like(spoilt, dtype=product.dtype))
    # The factors are masked, not the product: a removed infinity would come back as 0 * inf in the backward.
    return torch.where(keep, weight, 0.0) * torch.where(keep, x, 0.0) * whole


class InputClamp(nn.Module):
    """Clips every number of its input to ``[low, high]``; NaN passes.

    A baseline against attackers without bounds: behind it, a value outside the box acts like the nearest end of the
    box, so beta = 100 is no stronger than beta = 1.

    Args:
        low, high: numbers, ``low <= high``. Default: the range of images here.
    """

    def __init__(self, low: float = -1.0, high: float = 1.0) -> None:
        super().__init__()
        if not low <= high:
            raise ValueError(f"low must be at most high, got low={low!r} and high={high!r}")
        self.low, self.high = low, high

    def forward(self, x: Tensor) -> Tensor:
        """x and result: ``(n, ...)``."""
        return x.clamp(self.low, self.high)

    def extra_repr(self) -> str:
        return f"low={self.low}, high={self.high}"


class InputScale(nn.Module):
    """Maps ``[low, high]`` linearly onto ``[0, 1]``; used after an `InputClamp` to a narrow box.

    A network learns more easily from numbers of the size of 1; it can express the same functions.

    Args:
        low, high: numbers, ``low < high``, a float32 number apart. Default: the range of images here.
    """

    def __init__(self, low: float = -1.0, high: float = 1.0) -> None:
        super().__init__()
        numbers = torch.finfo(torch.float32)
        if not numbers.tiny <= high - low <= numbers.max:
            raise ValueError(f"low must be below high, by a float32 number, got low={low!r} and high={high!r}")
        self.low, self.high = low, high

    def forward(self, x: Tensor) -> Tensor:
        """x and result: ``(n, ...)``."""
        # Multiply: some devices round a division by a number differently.
        return (x - self.low) * (1 / (self.high - self.low))

    def extra_repr(self) -> str:
        return f"low={self.low}, high={self.high}"


def check_shape(name: str, shape: object) -> tuple[int, ...]:
    """Returns the shape as a tuple; raises unless it is a sequence of positive ints."""
    if isinstance(shape, Sequence) and shape and all(type(size) is int and size > 0 for size in shape):
        return tuple(shape)
    raise ValueError(f"{name} must be a shape of positive ints, such as (3, 32, 32), got {shape!r}")
