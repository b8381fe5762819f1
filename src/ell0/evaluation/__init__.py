"""Clean and robust accuracy: attacks in order of price on the rows still standing, claims checked, flags raised."""

from ..results import Share
from .evaluate import Entry, cascade, evaluate
from .evaluation import Evaluation

__all__ = ["Entry", "Evaluation", "Share", "cascade", "evaluate"]
