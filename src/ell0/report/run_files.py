"""What a run left: results, recipe, logs of training, images."""

from __future__ import annotations

import json
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..recipe import Recipe, load, slug
from ..results import Measurement, Results
from .formatting import NONE

LogLine = dict[str, Any]
Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class AttackedImages:
    """What an attack did to the m images of a gallery, and what one classifier says.

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
    attacked: dict[str, AttackedImages]


@dataclass(frozen=True, eq=False)
class Run:
    """One run, or a bare results file, which has rows and nothing else.

    text: of the recipe.  recipe: None also where recipes that it uses cannot be found.
    logs: by classifier, one record for each epoch.
    """

    results: Results
    text: str | None = None
    recipe: Recipe | None = None
    logs: dict[str, list[LogLine]] = field(default_factory=dict)
    gallery: Gallery | None = None

    @property
    def data(self) -> str | None:
        return self.recipe.data.name if self.recipe else None

    @property
    def quoted(self) -> list[Measurement]:
        rows = [dict(row) for row in self.recipe.quoted] if self.recipe else []
        return [Measurement.of(row.pop("what", NONE), row.pop("value"), **row) for row in rows]

    @property
    def state(self) -> str:
        """What is to be known before the verdict: whether figures are missing."""
        if self.recipe is None:
            unknown = "The folder of this run lacks a recipe that it uses, so it is not known whether it is finished."
            return "" if self.text is None else unknown
        asked, there = self.recipe.asked(), [row.key for row in self.results.rows]
        found = sum(row in there for row in asked)
        return (
            "" if found == len(asked) else f"Unfinished: {found:,} of the {len(asked):,} figures of the recipe exist."
        )


def read(source: Path) -> Run:
    """Reads a run folder, or a results file."""
    if source.is_file():
        return Run(Results.load(source))
    if not (source / "results.json").is_file():
        raise ValueError(f"sources must be results files or run folders that hold results.json, got {str(source)!r}")
    source = source.resolve()  # the runs that it uses lie beside it, also where it was given as "."
    results = Results.load(source / "results.json")
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


def _recipe(path: Path) -> Recipe | None:
    try:
        return load(path)
    except FileNotFoundError:
        return None  # one that it uses, of the user's own: the run was moved away from it
    except ValueError as error:
        raise ValueError(f"{path} is not a recipe: {error}") from error


def _log(path: Path) -> list[LogLine]:
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
                name: AttackedImages(*(file[f"{slug(name)}/{part}"] for part in ("adv", "said", "says")))
                for name in classifiers
                if f"{slug(name)}/adv" in file
            }
            gallery = Gallery(file["clean"], file["labels"], attacked)
        images = gallery.clean.shape
        if len(images) != 4 or images[1] not in (1, 3) or gallery.labels.shape != images[:1]:
            raise ValueError(f"images must be (m, 1 or 3, height, width) with m labels, got {images}")
        for name, one in attacked.items():
            if one.adv.shape != images or not one.said.shape == one.says.shape == images[:1]:
                raise ValueError(f"{name} has images of shape {one.adv.shape}, not the {images} of the clean ones")
        return gallery
    except (KeyError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is not a gallery: {error}") from error
