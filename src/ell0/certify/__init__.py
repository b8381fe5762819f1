"""Proven robustness: bounds on what changed inputs can do to a network, certified radius and accuracy, and a loss."""

from ._ablation import RandomisedAblation
from ._bound import Method
from ._certify import accuracy, bounds, limit, margins, radius
from ._challenge import Challenge, challenge
from ._exact import exact
from ._objective import Objective
from ._partition import PartitionEnsemble
from ._record import rows

__all__ = [
    "Challenge",
    "Method",
    "Objective",
    "PartitionEnsemble",
    "RandomisedAblation",
    "accuracy",
    "bounds",
    "challenge",
    "exact",
    "limit",
    "margins",
    "radius",
    "rows",
]
