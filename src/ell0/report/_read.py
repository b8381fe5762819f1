"""What a run left: results, recipe, logs of training, images."""

from __future__ import annotations

import json
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..recipe import slug
from ..results import Results, Row

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

    recipe: its text.  quoted: figures of others, from the recipe.  logs: by classifier, one record for each epoch.
    """

    results: Results
    recipe: str | None = None
    data: str | None = None
    quoted: tuple[Row, ...] = ()
    logs: dict[str, list[Row]] = field(default_factory=dict)
    gallery: Gallery | None = None


def read(source: Path) -> Run:
    """A run folder, or a results file."""
    if source.is_file():
        return Run(Results.load(source))
    if not (source / "results.json").is_file():
        raise ValueError(f"sources must be results files or run folders that hold results.json, got {str(source)!r}")
    text = _text(source / "recipe.toml")
    recipe = _recipe(source / "recipe.toml", text)
    folders = dict(_classifiers(source, recipe))
    results = Results.load(source / "results.json")
    # A run that was moved away from those it uses still names their classifiers in its rows.
    names = dict.fromkeys([*folders, *(row["classifier"] for row in results.rows if "classifier" in row)])
    return Run(
        results=results,
        recipe=text,
        data=recipe.get("data", {}).get("name"),
        quoted=tuple(recipe.get("quoted", ())),
        logs={name: log for name, folder in folders.items() if (log := _log(folder / "log.jsonl"))},
        gallery=_gallery(source / "gallery.npz", list(names)),
    )


def _classifiers(run: Path, recipe: dict[str, Any]) -> Iterator[tuple[str, Path]]:
    """The classifiers of a recipe with their folders; those of the recipes it uses lie in sibling folders."""
    for name in recipe.get("use", ()):
        used = run.parent / name / "recipe.toml"
        yield from _classifiers(used.parent, _recipe(used, _text(used)))
    for classifier in recipe.get("classifier", ()):
        yield classifier["name"], run / slug(classifier["name"])


def _text(path: Path) -> str | None:
    return path.read_text() if path.exists() else None


def _recipe(path: Path, text: str | None) -> dict[str, Any]:
    try:
        return tomllib.loads(text or "")
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not a recipe: {error}") from error


def _log(path: Path) -> list[Row]:
    lines = (_text(path) or "").splitlines()
    try:
        return [json.loads(line) for line in lines]
    except ValueError as error:
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
