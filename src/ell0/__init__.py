"""Classifiers that survive sparse (L0) attacks: an attacker who changes a few inputs, by any amount."""

from importlib.metadata import PackageNotFoundError, version

from . import attacks, certify, data, models, nn, ops, recipe, train
from .attacks import ATTACKS
from .evaluation import evaluate
from .nn import truncate
from .ops import truncated_linear
from .threat import L0Ball

__all__ = [
    "ATTACKS",
    "L0Ball",
    "__version__",
    "attacks",
    "certify",
    "data",
    "evaluate",
    "models",
    "nn",
    "ops",
    "recipe",
    "train",
    "truncate",
    "truncated_linear",
]

try:
    __version__ = version("ell0")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0.0.0"
