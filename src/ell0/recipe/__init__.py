"""A TOML recipe becomes one run from data to results, resumable; needs torch and numpy alone."""

from ._data import arrays
from ._measure import cascade
from ._model import model
from ._recipe import Recipe, load, names, slug
from ._run import Stage, device_of, run

__all__ = ["Recipe", "Stage", "arrays", "cascade", "device_of", "load", "model", "names", "run", "slug"]
