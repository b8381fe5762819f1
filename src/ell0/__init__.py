"""Classifiers that survive sparse (L0) attacks: an attacker who changes a few inputs, by any amount."""

from importlib.metadata import PackageNotFoundError, version

from . import data, models, nn, ops
from .nn import truncate
from .ops import truncated_linear
from .threat import L0Ball

__all__ = ["L0Ball", "__version__", "data", "models", "nn", "ops", "truncate", "truncated_linear"]

try:
    __version__ = version("ell0")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0.0.0"
