"""Proven robustness: bounds on what changed inputs can do to a network, certified radius and accuracy, and a loss."""

from ._ablation import RandomisedAblation
from ._bound import Method
from ._certify import accuracy, bounds, limit, margins, radius
from ._exact import exact
from ._objective import Objective
from ._partition import PartitionEnsemble
from ._record import rows

__all__ = [
    "Method",
    "Objective",
    "PartitionEnsemble",
    "RandomisedAblation",
    "accuracy",
    "bounds",
    "exact",
    "limit",
    "margins",
    "radius",
    "rows",
]
