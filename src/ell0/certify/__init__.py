"""Proven robustness: bounds on what changed inputs can do to a network, certified radius and accuracy, and a loss."""

from .ablation import RandomisedAblation, VotePrecision
from .certificates import accuracy, bounds, certifier, margins, radius, rows
from .certifier import Certifier
from .challenge import Challenge, challenge
from .objective import Objective
from .partition import PartitionEnsemble
from .propagate import Method
from .vote_objective import VoteObjective

__all__ = [
    "Certifier",
    "Challenge",
    "Method",
    "Objective",
    "PartitionEnsemble",
    "RandomisedAblation",
    "VoteObjective",
    "VotePrecision",
    "accuracy",
    "bounds",
    "certifier",
    "challenge",
    "margins",
    "radius",
    "rows",
]
