"""The trimmed product: one operator, several backends, one definition (`reference`)."""

from .blocked import keep_mask
from .checks import check_k
from .operator import Prepared, cuts, prepare, trimmed_linear, trimmed_linears, truncated_linear

__all__ = [
    "Prepared",
    "check_k",
    "cuts",
    "keep_mask",
    "prepare",
    "trimmed_linear",
    "trimmed_linears",
    "truncated_linear",
]
