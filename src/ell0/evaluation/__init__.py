"""Clean and robust accuracy: attacks in order of price on the rows still standing, claims checked, flags raised."""

from ..results import Share
from .entries import Entry, cascade
from .evaluate import evaluate
from .evaluation import AttackRecord, CurvePoint, Evaluation

__all__ = [
    "AttackRecord",
    "CurvePoint",
    "Entry",
    "Evaluation",
    "Share",
    "cascade",
    "evaluate",
]
