"""How an attack says what it is. `ATTACKS`, evaluation's defaults and flags, benchmarks and tests read it here."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial, update_wrapper
from typing import Any, Generic, ParamSpec

from .contract import AttackResult

__all__ = ["ATTACKS", "Attack", "attack", "declared"]

P = ParamSpec("P")

_SHARED = ("generator", "rows", "target", "progress")  # keyword arguments of every attack

ATTACKS: dict[str, Attack[...]] = {}
"""Every attack by its name. Only `attack` adds to it."""


@dataclass(eq=False)
class Attack(Generic[P]):
    """A declared attack. It is called like its function.

    white_box: it uses gradients or looks into the model.
    gradients_only: it uses nothing but gradients. Evaluation raises a flag if a search breaks many rows that it left.
    random: its result depends on the generator.
    cascade: its place in the default evaluation, the cheapest first; None: it is not part of that.
    knows_truncation: it looks into truncated layers. Evaluation raises a flag if no such attack runs on them.
    knows_votes: it looks at the parts of a vote one by one. Evaluation raises a flag if no such attack runs on a vote.
    variants: settings by name. The default evaluation runs each of them, as ``attack_variant``.
    cheap: settings with which tests run it in a moment.
    strong: settings with which it comes within 1.25 of the optimum on linear models; None: it does not.
    """

    function: Callable[P, AttackResult]
    white_box: bool
    gradients_only: bool
    random: bool
    cascade: int | None
    cheap: Mapping[str, Any]
    strong: Mapping[str, Any] | None
    knows_truncation: bool = False
    knows_votes: bool = False
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.name = self.function.__name__
        update_wrapper(self, self.function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> AttackResult:
        return self.function(*args, **kwargs)

    def __reduce__(self) -> str:
        return self.name  # pickled and copied by reference, as a function is

    @property
    def settings(self) -> dict[str, Any]:
        """Its own keyword arguments with their defaults, without those that every attack takes."""
        parameters = inspect.signature(self.function).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in _SHARED}


def attack(**declaration: Any) -> Callable[[Callable[P, AttackResult]], Attack[P]]:
    """Declares a function as an attack and adds it to `ATTACKS`. The arguments are the fields of `Attack`."""

    def declare(function: Callable[P, AttackResult]) -> Attack[P]:
        own = Attack(function, **declaration)
        if own.name in ATTACKS:
            raise ValueError(f"an attack must have a name of its own, got a second {own.name!r}")
        if own.gradients_only and not own.white_box:
            raise ValueError(f"white_box must be True for an attack by gradients alone, got False for {own.name!r}")
        ATTACKS[own.name] = own
        return own

    return declare


def declared(function: Callable[..., AttackResult]) -> Attack[...] | None:
    """The declared attack under partials, or None."""
    while isinstance(function, partial):
        function = function.func
    return function if isinstance(function, Attack) else None
