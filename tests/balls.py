"""The balls of tests that need no box of their own."""

from typing import Any

from ell0 import L0Ball
from ell0.train import Trades


def within_one(*arguments: Any, **named: Any) -> L0Ball:
    """A ball with values in [-1, 1] where the arguments do not say otherwise."""
    return L0Ball(*arguments, **{"low": -1.0, "high": 1.0, **named})


def trades_within_one(*arguments: Any, **named: Any) -> Trades:
    """The same for the attack inside a training step."""
    return Trades(*arguments, **{"low": -1.0, "high": 1.0, **named})
