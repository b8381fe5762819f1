"""Classifiers that survive sparse (L0) attacks: an attacker who changes a few inputs, by any amount.

Rooms are imported when they are first used, so that ``ell0 --help`` does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module, metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import (
        attacks,
        certify,
        data,
        evaluation,
        export,
        models,
        nn,
        ops,
        part_networks,
        recipe,
        report,
        results,
        theory,
        train,
    )
    from .attacks import ATTACKS
    from .evaluation.evaluate import evaluate
    from .nn import truncate
    from .ops import truncated_linear
    from .threat import L0Ball
    from .wrapping import wrap

    __version__: str

__all__ = [
    "ATTACKS",
    "L0Ball",
    "__version__",
    "attacks",
    "certify",
    "data",
    "evaluate",
    "evaluation",
    "export",
    "models",
    "nn",
    "ops",
    "part_networks",
    "recipe",
    "report",
    "results",
    "theory",
    "train",
    "truncate",
    "truncated_linear",
    "wrap",
]

_HOME = {
    "ATTACKS": "attacks",
    "L0Ball": "threat",
    "evaluate": "evaluation",
    "truncate": "nn",
    "truncated_linear": "ops",
    "wrap": "wrapping",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name == "__version__":  # 0.0.0: a source tree that was never installed
            return next((found.version for found in metadata.distributions(name="ell0")), "0.0.0")
        room = import_module(f".{_HOME.get(name, name)}", __name__)
        return getattr(room, name) if name in _HOME else room


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
