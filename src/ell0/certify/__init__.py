"""Proven robustness: bounds on what changed inputs can do to a network, certified radius and accuracy, and a loss."""

from .ablation import RandomisedAblation, VotePrecision
from .certifier import Certifier, accuracy, certifier, limit, radius
from .challenge import Challenge, challenge
from .lower_bounds import Method
from .network_bounds import bounds, margins
from .objective import Objective
from .partition import PartitionEnsemble, PixelSplit, VoteRule
from .radii import rows

__all__ = [
    "Certifier",
    "Challenge",
    "Method",
    "Objective",
    "PartitionEnsemble",
    "PixelSplit",
    "RandomisedAblation",
    "VotePrecision",
    "VoteRule",
    "accuracy",
    "bounds",
    "certifier",
    "challenge",
    "limit",
    "margins",
    "radius",
    "rows",
]
