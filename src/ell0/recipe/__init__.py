"""A TOML recipe becomes one run from data to results, resumable; needs torch and numpy alone."""

from .gallery import first_of_each, pictures
from .models import imported, model
from .plan import Recipe, slug
from .reading import load, names, source, sweep
from .running import BusyError, Swept, run, run_sweep

__all__ = [
    "BusyError", "Recipe", "Swept", "first_of_each", "imported", "load", "model", "names", "pictures", "run",
    "run_sweep", "slug", "source", "sweep",
]  # fmt: skip
