"""Layers whose sums drop their extreme terms, and the surgery that puts one into any model."""

from .layers import InputClamp, InputTruncation, TruncatedLinear, prepared
from .surgery import truncate

__all__ = ["InputClamp", "InputTruncation", "TruncatedLinear", "prepared", "truncate"]
