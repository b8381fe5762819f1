"""What a run left: results, recipe, logs of training, images."""

from __future__ import annotations

import json
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..recipe import Recipe, load, slug
from ..recipe._recipe import identity
from ..results import Results, Row

_NUMBERS = (
    "k", "n", "low", "high", "paper", "paper_n", "budget", "queries", "steps", "beta", "seconds", "forwards",
    "confidence",
)  # fmt: skip
_TEXTS = ("what", "classifier", "attack", "unit", "protocol")

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Attacked:
    """What an attack did to the images of a gallery, m of them, and what one classifier says.

    adv: ``(m, channels, height, width)``.  said, says: ``(m,)``, the labels given to the clean and the attacked image.
    """

    adv: Floats
    said: Ints
    says: Ints


@dataclass(frozen=True, eq=False)
class Gallery:
    """A few test images and, by classifier, what became of them.

    As a file: ``clean`` and ``labels``, and for each classifier ``SLUG/adv``, ``SLUG/said``, ``SLUG/says``.

    clean: ``(m, channels, height, width)``, in [-1, 1].  labels: ``(m,)``.
    """

    clean: Floats
    labels: Ints
    attacked: dict[str, Attacked]


@dataclass(frozen=True, eq=False)
class Run:
    """One run, or a bare results file, which has rows and nothing else.

    text: of the recipe.  recipe: None also where recipes that it uses cannot be found.
    logs: by classifier, one record for each epoch.
    """

    results: Results
    text: str | None = None
    recipe: Recipe | None = None
    logs: dict[str, list[Row]] = field(default_factory=dict)
    gallery: Gallery | None = None

    @property
    def data(self) -> str | None:
        return self.recipe.data.name if self.recipe else None

    @property
    def quoted(self) -> tuple[Row, ...]:
        return self.recipe.quoted if self.recipe else ()

    def done(self) -> tuple[int, int] | None:
        """How many of the figures that the recipe asks for are there, and how many it asks for; None if unknown."""
        if self.recipe is None:
            return None
        asked = self.recipe.asked()
        there = [identity(row) for row in self.results.rows]
        return sum(row in there for row in asked), len(asked)


def read(source: Path) -> Run:
    """A run folder, or a results file."""
    if source.is_file():
        return Run(_results(source))
    if not (source / "results.json").is_file():
        raise ValueError(f"sources must be results files or run folders that hold results.json, got {str(source)!r}")
    source = source.resolve()  # the runs that it uses lie beside it, also where it was given as "."
    results = _results(source / "results.json")
    path = source / "recipe.toml"
    recipe = _recipe(path) if path.exists() else None
    folders = recipe.folders(source) if recipe else {}
    # A run that was moved away from those it uses still names their classifiers in its rows.
    names = dict.fromkeys([*folders, *(row["classifier"] for row in results.rows if "classifier" in row)])
    return Run(
        results=results,
        text=path.read_text() if path.exists() else None,
        recipe=recipe,
        logs={name: log for name, folder in folders.items() if (log := _log(folder / "log.jsonl"))},
        gallery=_gallery(source / "gallery.npz", list(names)),
    )


def _results(path: Path) -> Results:
    """A results file whose rows can be sorted and drawn."""
    results = Results.load(path)
    for i, row in enumerate(results.rows, 1):
        for key, value in row.items():
            kind = float | int if key in _NUMBERS or key.startswith("decided by ") else str if key in _TEXTS else object
            if value is not None and not isinstance(value, kind):
                words = "a text" if kind is str else "a number"
                raise ValueError(f"{path} is not a results file: {key} of row {i} must be {words}, got {value!r}")
    return results


def _recipe(path: Path) -> Recipe | None:
    try:
        return load(path)
    except FileNotFoundError:
        return None  # one that it uses, of the user's own: the run was moved away from it
    except ValueError as error:
        raise ValueError(f"{path} is not a recipe: {error}") from error


def _log(path: Path) -> list[Row]:
    """The epochs of a log. A training that runs, or was killed, may leave its last line without an end."""
    text = path.read_text() if path.exists() else ""
    try:
        return [dict(json.loads(line)) for line in text.split("\n")[:-1]]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a log of training: {error}") from error


def _gallery(path: Path, classifiers: list[str]) -> Gallery | None:
    if not path.exists():
        return None
    try:
        with np.load(path, allow_pickle=False) as file:
            attacked = {
                name: Attacked(*(file[f"{slug(name)}/{part}"] for part in ("adv", "said", "says")))
                for name in classifiers
                if f"{slug(name)}/adv" in file
            }
            gallery = Gallery(file["clean"], file["labels"], attacked)
        _check_shapes(gallery)
        return gallery
    except (KeyError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is not a gallery: {error}") from error


def _check_shapes(gallery: Gallery) -> None:
    images = gallery.clean.shape
    if len(images) != 4 or images[1] not in (1, 3) or gallery.labels.shape != images[:1]:
        raise ValueError(f"images must be (m, 1 or 3, height, width) with m labels, got {images}")
    for name, attacked in gallery.attacked.items():
        if attacked.adv.shape != images or not attacked.said.shape == attacked.says.shape == images[:1]:
            raise ValueError(f"{name} has images of shape {attacked.adv.shape}, not the {images} of the clean ones")
