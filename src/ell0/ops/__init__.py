"""The trimmed product: one operator, several backends, one definition (`reference`)."""

from .blocked import keep_mask
from .operator import Prepared, check_k, prepare, trimmed_linear, truncated_linear

__all__ = ["Prepared", "check_k", "keep_mask", "prepare", "trimmed_linear", "truncated_linear"]
