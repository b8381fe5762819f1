"""The trimmed product: one operator, several backends, one definition (`reference`); and as a convolution."""

from .blocked import keep_mask
from .checks import check_k
from .conv import trimmed_conv2d
from .operator import Prepared, cuts, prepare, trimmed_linear, trimmed_linears, truncated_linear

__all__ = [
    "Prepared",
    "check_k",
    "cuts",
    "keep_mask",
    "prepare",
    "trimmed_conv2d",
    "trimmed_linear",
    "trimmed_linears",
    "truncated_linear",
]
