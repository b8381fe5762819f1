"""Proven robustness: bounds on what changed inputs can do to a network, certified radius and accuracy, and a loss."""

from .ablation import RandomisedAblation, VotePrecision
from .certificates import accuracy, bounds, certifier, margins, radius, rows
from .certifier import Certifier
from .challenge import Challenge, challenge
from .objective import Objective
from .partition import Partition
from .propagate import Method
from .rules import Rule
from .vote_objective import VoteObjective
from .votes import PartitionEnsemble, PartVote

__all__ = [
    "Certifier",
    "Challenge",
    "Method",
    "Objective",
    "PartVote",
    "Partition",
    "PartitionEnsemble",
    "RandomisedAblation",
    "Rule",
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
