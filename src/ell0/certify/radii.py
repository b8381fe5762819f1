"""Figures of certified radii."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor

from ..evaluation import Share, median_record
from ..results import Row


def check_budgets(budgets: Collection[int]) -> None:
    good = all(isinstance(budget, int) and not isinstance(budget, bool) and budget >= 0 for budget in budgets)
    if not good or not budgets or len(set(budgets)) < len(budgets):
        raise ValueError(f"budgets must be different ints >= 0, got {budgets!r}")


def shares(radii: Tensor, budgets: Collection[int]) -> dict[int, Share]:
    """At each budget the share of rows certified for it.  radii: ``(n,)`` int64, -1 where the answer is wrong."""
    return {budget: Share(int((radii >= budget).sum()), len(radii)) for budget in budgets}


def rows(radii: Tensor, budgets: Collection[int], **what: Any) -> list[Row]:
    """Flat records for `ell0.results.Results`: certified accuracy at each budget, and the median radius.

    radii: what `radius` gave; a misclassified row counts as -1.  what: goes into every record.
    """
    check_budgets(budgets)
    accuracy = [
        {"what": "certified_accuracy", **what, "budget": budget, **share.record()}
        for budget, share in shares(radii, budgets).items()
    ]
    return [*accuracy, {"what": "certified_radius", **what, **median_record(radii)}]
