"""A TOML recipe becomes one run from data to results, resumable; needs torch and numpy alone."""

from .models import model
from .plan import Recipe, slug
from .reading import load, names, sweep
from .running import BusyError, Swept, run, run_sweep

__all__ = ["BusyError", "Recipe", "Swept", "load", "model", "names", "run", "run_sweep", "slug", "sweep"]
