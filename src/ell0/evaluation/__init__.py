"""Clean and robust accuracy: attacks in order of price on the rows still standing, claims checked, flags raised."""

from ._evaluate import WHITE_BOX, Entry, default_attacks, evaluate
from ._record import AttackRecord, Evaluation, Point, Share, median_record

__all__ = [
    "WHITE_BOX",
    "AttackRecord",
    "Entry",
    "Evaluation",
    "Point",
    "Share",
    "default_attacks",
    "evaluate",
    "median_record",
]
