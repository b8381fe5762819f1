"""Clean and robust accuracy: attacks in order of price on the rows still standing, claims checked, flags raised."""

from ..results import Share
from ._evaluate import evaluate
from ._record import AttackRecord, Evaluation, Point
from .entries import Entry, cascade

__all__ = [
    "AttackRecord",
    "Entry",
    "Evaluation",
    "Point",
    "Share",
    "cascade",
    "evaluate",
]
