"""The trimmed product: one operator, several backends, one definition (`reference`)."""

from .blocked import keep_mask
from .operator import Prepared, check_k, cuts, prepare, trimmed_linear, trimmed_linears, truncated_linear

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
