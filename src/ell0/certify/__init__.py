"""Proven robustness: bounds on what changed inputs can do to a network, certified radius and accuracy, and a loss."""

from .ablation import RandomisedAblation, VotePrecision
from .certificates import accuracy, bounds, certifier, limit, margins, radius, rows
from .certifier import Certifier
from .challenge import Challenge, challenge
from .lower_bounds import Method
from .objective import Objective
from .partition import PartitionEnsemble

__all__ = [
    "Certifier",
    "Challenge",
    "Method",
    "Objective",
    "PartitionEnsemble",
    "RandomisedAblation",
    "VotePrecision",
    "accuracy",
    "bounds",
    "certifier",
    "challenge",
    "limit",
    "margins",
    "radius",
    "rows",
]
