"""A TOML recipe becomes one run from data to results, resumable; needs torch and numpy alone."""

from ._model import model
from ._recipe import Recipe, load, names, slug, sweep
from ._run import BusyError, Stage, run
from ._sweep import Swept, run_sweep

__all__ = [
    "BusyError",
    "Recipe",
    "Stage",
    "Swept",
    "load",
    "model",
    "names",
    "run",
    "run_sweep",
    "slug",
    "sweep",
]
