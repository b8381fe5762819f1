"""The convolution whose sums drop their extreme terms."""

from typing import Any

from torch import Tensor, fx, nn

from ..ops import check_k, trimmed_conv2d
from ..ops.conv import Pair, count_terms
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
    ) -> None:
        if isinstance(padding, str):
            raise ValueError(f"padding must be an int or two of them, got {padding!r}")
        super().__init__(in_channels, out_channels, kernel_size, stride, padding, dilation, bias=bias)
        check_k(k, count_terms(in_channels, self.kernel_size, unit), "terms of a field")
        self.k = k
        self.unit: Unit = unit

    def forward(self, x: Tensor) -> Tensor:
        """x: ``(n, in_channels, height, width)``; result: ``(n, out_channels, ...)``."""
        return trimmed_conv2d(x, self.weight, self.bias, top=self.k, bottom=self.k, unit=self.unit, **self.geometry)

    @property
    def geometry(self) -> dict[str, Any]:
        """How its window moves over an image: stride, padding and dilation."""
        return {"stride": self.stride, "padding": self.padding, "dilation": self.dilation}

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, k={self.k}, unit={self.unit}"
