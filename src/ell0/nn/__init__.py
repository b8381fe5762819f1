"""Layers whose sums drop their extreme terms, and the surgery that puts one into any model."""

from .folded import folded
from .layers import InputClamp, InputScale, InputTruncation, TruncatedLinear, prepared
from .parallel import ParallelLinear
from .surgery import truncate

__all__ = [
    "InputClamp",
    "InputScale",
    "InputTruncation",
    "ParallelLinear",
    "TruncatedLinear",
    "folded",
    "prepared",
    "truncate",
]
