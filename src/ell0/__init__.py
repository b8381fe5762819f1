"""Classifiers that survive sparse (L0) attacks: an attacker who changes a few inputs, by any amount.

Rooms are imported when they are first used, so that ``ell0 --help`` does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import attacks, certify, data, models, nn, ops, recipe, report, theory, train
    from .attacks import ATTACKS
    from .evaluation.evaluate import evaluate
    from .nn import truncate
    from .ops import truncated_linear
    from .threat import L0Ball

    __version__: str

__all__ = [
    "ATTACKS",
    "L0Ball",
    "__version__",
    "attacks",
    "certify",
    "data",
    "evaluate",
    "models",
    "nn",
    "ops",
    "recipe",
    "report",
    "theory",
    "train",
    "truncate",
    "truncated_linear",
]

_HOME = {
    "ATTACKS": "attacks",
    "L0Ball": "threat",
    "evaluate": "evaluation",
    "truncate": "nn",
    "truncated_linear": "ops",
}


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name == "__version__":
            value = _version()
        elif name in _HOME:
            value = getattr(import_module(f".{_HOME[name]}", __name__), name)
        elif name in __all__:
            value = import_module(f".{name}", __name__)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("ell0")
    except PackageNotFoundError:  # a source tree that was never installed
        return "0.0.0"
