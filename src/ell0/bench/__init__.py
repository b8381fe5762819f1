"""Benchmarks: ratios in one run, of checked results."""

from ._attacks import attacks
from ._certify import certify
from ._layer import layer
from ._speed import attack_speed
from ._train import train

__all__ = ["attack_speed", "attacks", "certify", "layer", "train"]
