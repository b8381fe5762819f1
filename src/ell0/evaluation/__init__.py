"""Clean and robust accuracy: attacks in order of price on the rows still standing, claims checked, flags raised."""

from ._evaluate import evaluate
from ._record import AttackRecord, Evaluation, Point, Share, median_record
from .entries import Entry, cascade

__all__ = [
    "AttackRecord",
    "Entry",
    "Evaluation",
    "Point",
    "Share",
    "cascade",
    "evaluate",
    "median_record",
]
