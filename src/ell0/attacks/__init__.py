"""Sparse attacks on one contract: the same call, the same `AttackResult`, every claim checked."""

from collections.abc import Callable

from .contract import AttackResult
from .sparse_rs import sparse_rs

__all__ = ["ATTACKS", "AttackResult", "sparse_rs"]

ATTACKS: dict[str, Callable[..., AttackResult]] = {"sparse_rs": sparse_rs}
"""Every attack by its name."""
