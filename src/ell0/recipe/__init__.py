"""A TOML recipe becomes one run from data to results, resumable; needs torch and numpy alone."""

from ._data import Scale, arrays, box, scaled
from ._measure import cascade
from ._model import model
from ._recipe import Recipe, load, names, slug, sweep
from ._run import BusyError, Stage, device_of, run
from ._sweep import Swept, run_sweep

__all__ = [
    "BusyError",
    "Recipe",
    "Scale",
    "Stage",
    "Swept",
    "arrays",
    "box",
    "cascade",
    "device_of",
    "load",
    "model",
    "names",
    "run",
    "run_sweep",
    "scaled",
    "slug",
    "sweep",
]
