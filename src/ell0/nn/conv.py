"""The convolution whose sums drop their extreme terms."""

from typing import cast

import torch
from torch import Tensor, fx, nn

from ..ops import trimmed_conv2d
from ..ops.conv import Pair, check_geometry, check_pair, count_terms
from ..ops.reference import Geometry
from ..threat import Unit

# fx records a call of this as one node instead of tracing into it.
fx.wrap("trimmed_conv2d")


class TruncatedConv2d(nn.Conv2d):
    """``nn.Conv2d`` whose sums drop the k largest and k smallest terms of their receptive field; then comes the bias.

        feature:  the terms are the products weight[o, c, p] * x[c, p], in_channels * kh * kw of them
        pixel:    the terms are u_p = sum over c of weight[o, c, p] * x[c, p], kh * kw of them

    If m <= k of the features of a field change, or of its pixels, by any amount, its sum stays between the sum without
    the k + m largest and k - m smallest terms and the sum without the k - m largest and k + m smallest. Zero padding
    counts as terms of value 0. Initialised as ``nn.Conv2d`` (the same seed gives the same weights), and their state
    dicts are interchangeable.

    Args:
        kernel_size, stride, padding, dilation: an int, or a pair (vertical, horizontal).
        k: terms removed on each side, ``0 <= 2k <`` the terms of a field; ``k=0`` is ``nn.Conv2d``.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Pair,
        k: int,
        stride: Pair = 1,
        padding: Pair = 0,
        dilation: Pair = 1,
        bias: bool = True,
        unit: Unit = "feature",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        kernel, geometry = check_pair("kernel_size", kernel_size, 1), check_geometry(stride, padding, dilation)
        check_field_k(k, in_channels, kernel, unit)
        where = vars(geometry)
        super().__init__(in_channels, out_channels, kernel, bias=bias, device=device, dtype=dtype, **where)
        self.k = k
        self.unit: Unit = unit

    def forward(self, x: Tensor) -> Tensor:
        """x: ``(n, in_channels, height, width)``; result: ``(n, out_channels, ...)``."""
        where = vars(self.geometry)
        return trimmed_conv2d(x, self.weight, self.bias, top=self.k, bottom=self.k, unit=self.unit, **where)

    @property
    def geometry(self) -> Geometry:
        """How its window moves over an image."""
        stride, padding, dilation = (cast(tuple[int, int], pair) for pair in (self.stride, self.padding, self.dilation))
        return Geometry(stride, padding, dilation)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, k={self.k}, unit={self.unit}"


def check_field_k(k: int, channels: int, kernel: tuple[int, int], unit: Unit) -> None:
    """Raises unless k terms can leave on each side of a receptive field."""
    terms = count_terms(channels, kernel, unit)
    if isinstance(k, bool) or not isinstance(k, int):
        raise ValueError(f"k must be an integer, got {k!r}")
    if not 0 <= 2 * k < terms:
        raise ValueError(
            f'k must satisfy 0 <= 2*k < the terms of a field, got k={k} with {terms} terms of unit "{unit}" '
            f"({channels} channels, {kernel[0]}x{kernel[1]})"
        )
