"""Figures of certified radii."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor

from ..results import Measurement, Share, median


def check_budgets(budgets: Collection[int]) -> None:
    good = all(isinstance(budget, int) and not isinstance(budget, bool) and budget >= 0 for budget in budgets)
    if not good or not budgets or len(set(budgets)) < len(budgets):
        raise ValueError(f"budgets must be different ints >= 0, got {budgets!r}")


def shares(radii: Tensor, budgets: Collection[int]) -> dict[int, Share]:
    """At each budget the share of rows certified for it.  radii: ``(n,)`` int64, -1 where the answer is wrong."""
    return {budget: Share(int((radii >= budget).sum()), len(radii)) for budget in budgets}


def rows(radii: Tensor, budgets: Collection[int], **identity: Any) -> list[Measurement]:
    """Measurements for `ell0.results.Results`: certified accuracy at each budget, and the median radius.

    radii: what `radius` gave; a misclassified row counts as -1.  identity: goes into every one.
    """
    check_budgets(budgets)
    accuracy = [
        Measurement.of("certified_accuracy", share, **identity, budget=budget)
        for budget, share in shares(radii, budgets).items()
    ]
    return [*accuracy, Measurement.of("certified_radius", median(radii), **identity)]
