"""Layers whose sums drop extreme terms, and layers that change the input of a network."""

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, fx, nn

from ..ops import Prepared, check_k, keep_mask, prepare, truncated_linear

_LOCK = threading.Lock()
Device = torch.device | str | None
Dtype = torch.dtype | None

# fx records a call of these as one node instead of tracing into them.
fx.wrap("truncated_linear")
fx.wrap("_truncate_input")
fx.wrap("_by_channel")


class TruncatedLinear(nn.Linear):
    """``nn.Linear`` whose inner sums drop their k largest and k smallest terms; the bias is added afterwards.

        out[b, o] = sum of the middle in - 2k values of {x[b, i] * weight[o, i]} + bias[o]     ([Beliaev22] eq. 3-5)

    Initialised as ``nn.Linear`` (the same seed gives the same weights), and their state dicts are interchangeable.

    Args:
        k: terms removed on each side, ``0 <= 2k < in_features``; ``k=0`` is ``nn.Linear``.
    """

    _prepared: Prepared | None = None  # set by the context manager `prepared` alone, for so many users:
    _users = 0

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
        return {name: value for name, value in self.__dict__.items() if name not in ("_prepared", "_users")}


@contextmanager
def prepared(model: nn.Module) -> Iterator[None]:
    """Context: the weights of truncated layers are ordered once for all calls inside, and must not change there.

    Several threads may be inside for the same model.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, TruncatedLinear) and layer.k]
    with _LOCK, torch.inference_mode(False):  # another thread may want gradients
        ready = [layer._prepared or prepare(layer.weight) for layer in layers]
        for layer, its in zip(layers, ready, strict=True):
            layer._prepared, layer._users = its, layer._users + 1
    try:
        yield
    finally:
        with _LOCK:
            for layer in layers:
                layer._users -= 1
                layer._prepared = layer._prepared if layer._users else None


class InputTruncation(nn.Module):
    """Sets the k largest and the k smallest values of each channel of a sample to 0; has no parameters.

        out[c, p] = 0 where x[c, p] is one of the k largest or k smallest values of x[c], else x[c, p]

    The paper's truncation for convolutional networks ([Beliaev22] section 5), placed before the first convolution and
    behind the normalisation, so that 0 is the mean of the channel. The selection has no gradient. At ties the lowest
    index of the channel is removed first, the large side before the small one. A NaN makes its whole channel NaN.
    Differs from the paper's supplement: ``torch.topk`` there leaves open which of tied values it removes, and may
    remove one value on both sides.

    Args:
        features: shape of one sample, channels first, such as ``(3, 32, 32)``; a length or one size is one channel.
        k: values removed on each side of a channel, ``0 <= 2k < values of a channel``; ``k=0`` removes nothing.
    """

    def __init__(self, features: int | Sequence[int], k: int) -> None:
        super().__init__()
        self.features = check_shape("features", (features,) if isinstance(features, int) else features)
        one = len(self.features) == 1
        check_k(k, math.prod(self.features[0 if one else 1 :]), "in_features" if one else "values of a channel")
        self.k = k

    def forward(self, x: Tensor) -> Tensor:
        """x and result: ``(n, *features)``."""
        return _truncate_input(x, self.features, self.k)

    def extra_repr(self) -> str:
        return f"features={self.features}, k={self.k}"


def _truncate_input(x: Tensor, features: tuple[int, ...], k: int) -> Tensor:
    if x.shape[1:] != features:
        raise ValueError(f"x must have shape (n, {', '.join(map(str, features))}), got {tuple(x.shape)}")
    if k == 0:
        return x
    with torch.no_grad():
        values = x.flatten(2) if len(features) > 1 else x.unsqueeze(1)
        spoilt = values.amax(-1, keepdim=True).isnan()
        keep = (keep_mask(values, k, k) & ~spoilt).view(x.shape)
        removed = torch.where(spoilt, torch.nan, 0.0).to(x.dtype).view(-1, spoilt.shape[1], *[1] * (x.ndim - 2))
    # A choice, not a product: a removed infinity would come back as 0 * inf in the backward.
    return torch.where(keep, x, removed)


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
    """Maps ``[low, high]`` linearly onto ``[0, 1]``, in each channel an interval of its own if several are given.

    A network learns more easily from numbers of the size of 1; it can express the same functions.

    Args:
        low, high: numbers, or as many numbers as x has channels (axis 1); ``low < high``, a float32 number apart.
            Default: the range of images here.
    """

    _ends: Tensor  # (2, channels) of float64, if there are several channels

    def __init__(self, low: float | Sequence[float] = -1.0, high: float | Sequence[float] = 1.0) -> None:
        super().__init__()
        lows, highs = (tuple(end) if isinstance(end, Sequence) else (end,) for end in (low, high))
        numbers = torch.finfo(torch.float32)
        good = [numbers.tiny <= b - a <= numbers.max for a, b in zip(lows, highs, strict=False)]
        if len(lows) != len(highs) or not good or not all(good):
            raise ValueError(f"low must be below high, by a float32 number, got low={low!r} and high={high!r}")
        self.low: float | tuple[float, ...] = lows if len(lows) > 1 else lows[0]  # one interval fits rows of any shape
        self.high: float | tuple[float, ...] = highs if len(lows) > 1 else highs[0]
        if len(lows) > 1:
            self.register_buffer("_ends", torch.tensor([lows, highs], dtype=torch.float64), persistent=False)

    @classmethod
    def normalising(cls, mean: Sequence[float], deviation: Sequence[float]) -> Self:
        """Maps images in [-1, 1] to ``((x + 1) / 2 - mean) / deviation``; a number of each for every channel."""
        low = [2 * number - 1 for number in mean]
        return cls(low, [start + 2 * number for start, number in zip(low, deviation, strict=True)])

    def forward(self, x: Tensor) -> Tensor:
        """x and result: ``(n, ...)``, or ``(n, channels, ...)``."""
        low, high = self._interval(x)
        # Multiply: some devices round a division by a number differently.
        return (x - low) * (1 / (high - low))

    def inverse(self, x: Tensor) -> Tensor:
        """What this layer maps to x, up to rounding; shapes as in ``forward``."""
        low, high = self._interval(x)
        return low + (high - low) * x

    def _interval(self, x: Tensor) -> tuple[Tensor | float, Tensor | float]:
        if isinstance(self.low, tuple) or isinstance(self.high, tuple):
            return _by_channel(x, self._ends, 0), _by_channel(x, self._ends, 1)
        return self.low, self.high

    def extra_repr(self) -> str:
        return f"low={self.low}, high={self.high}"


def _by_channel(x: Tensor, ends: Tensor, which: int) -> Tensor:
    """A row of ends ``(2, channels)``, as it combines with x ``(n, channels, ...)``."""
    if x.ndim < 2 or x.shape[1] != ends.shape[1]:
        raise ValueError(f"x must have {ends.shape[1]} channels, as low has numbers, got shape {tuple(x.shape)}")
    return ends[which].to(x.dtype).view(-1, *[1] * (x.ndim - 2))


def check_shape(name: str, shape: object) -> tuple[int, ...]:
    """Returns the shape as a tuple; raises unless it is a sequence of positive ints."""
    if isinstance(shape, Sequence) and shape and all(type(size) is int and size > 0 for size in shape):
        return tuple(shape)
    raise ValueError(f"{name} must be a shape of positive ints, such as (3, 32, 32), got {shape!r}")
