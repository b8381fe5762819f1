"""Benchmarks: ratios in one run, of checked results."""

from ._attacks import attacks
from ._layer import layer

__all__ = ["attacks", "layer"]
