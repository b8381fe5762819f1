"""What a run left: results, recipe, logs of training, images."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from .. import files
from ..certify import Objective, VoteObjective
from ..data import SETS, DataSet
from ..recipe import Recipe, load, names, slug
from ..results import Results, Row

Floats = npt.NDArray[np.float32]
LogLine = dict[str, Any]
Exhibit = tuple[str, list[dict[str, Any]]]
"""The label of an image, and pictures of it: clean, and what each classifier was shown."""


_TODO = "delete it, and `ell0 run` makes it again"


@dataclass(frozen=True)
class Run:
    """One run, or a bare results file. text: of the recipe, which is None also if one that it uses cannot be found.

    folder: where it lies.  panel: what `panel_of` found there, if the page has that panel.
    """

    results: Results
    text: str = ""
    recipe: Recipe | None = None
    data: DataSet | None = None
    logs: dict[str, list[LogLine]] = field(default_factory=dict)
    exhibits: list[Exhibit] = field(default_factory=list)
    folder: Path | None = None
    panel: dict[str, Any] | None = None

    @property
    def plan(self) -> Recipe | None:
        """Its recipe, or the one of ell0 that a bare results file names."""
        named = self.results.recipe if self.results.recipe in names() and not self.text else None
        return self.recipe or (load(named) if named else None)

    @property
    def quoted(self) -> Sequence[Row]:
        """Figures of others."""
        return self.plan.quoted if self.plan else ()

    @property
    def bound(self) -> list[str]:
        """The classifiers that were trained on their bound."""
        everyone = self.plan.everyone() if self.plan else ()
        losses = [(one.name, one.objective) for one in everyone]
        # Without a mix a vote learns only what single parts say, as FPA does.
        return [name for name, loss in losses if isinstance(loss, Objective | VoteObjective) and loss.mix]

    @property
    def state(self) -> str:
        """What is to be known before the verdict: whether figures are missing."""
        if self.recipe is None:
            unknown = "The folder of this run lacks a recipe that it uses, so it is not known whether it is finished."
            return unknown if self.text else ""
        asked, there = self.recipe.asked(), [row.key for row in self.results.rows]
        missing = sum(key not in there for key in asked)
        words = f"Unfinished: {len(asked) - missing:,} of the {len(asked):,} figures of the recipe exist."
        return words if missing else ""


def read(source: Path) -> Run:
    """Reads a run folder, or a results file."""
    if source.is_file():
        return Run(Results.load(source.resolve()))
    if not (source / "results.json").is_file():
        raise ValueError(f"sources must be results files or run folders that hold results.json, got {str(source)!r}")
    source = source.resolve()  # the runs that it uses lie beside it, also where it was given as "."
    results = Results.load(source / "results.json")
    path, pictures = source / "recipe.toml", source / "gallery.safetensors"
    text = files.read(path).decode(errors="replace") if path.exists() else ""
    recipe = _recipe(path) if text else None
    data = SETS.get(recipe.data.name or "") if recipe else None
    folders = recipe.folders(source) if recipe else {}
    # A run that was moved away from those it uses still names their classifiers in its rows.
    names = dict.fromkeys([*folders, *(row["classifier"] for row in results.rows if "classifier" in row)])
    logs = {name: log for name, folder in folders.items() if (log := _log(folder / "log.jsonl"))}
    shown = gallery(pictures, list(names), data.classes if data else ()) if pictures.exists() else []
    return Run(results, text, recipe, data, logs, shown, source)


def _recipe(path: Path) -> Recipe | None:
    try:
        return load(path)
    except FileNotFoundError:
        return None  # one that it uses, of the user's own: the run was moved away from it
    except ValueError as error:
        raise ValueError(f"{path} is not a recipe: {error}") from error


def _log(path: Path) -> list[LogLine]:
    """The epochs of a log. A training that runs, or was killed, may leave its last line without an end."""
    try:
        lines = [dict(json.loads(line)) for line in files.read(path).split(b"\n")[:-1]] if path.exists() else []
        for number, line in enumerate(lines, 1):
            good = all(value is None or (type(value) in (int, float) and abs(value) < 1e15) for value in line.values())
            if not good or type(line.get("epoch")) is not int:
                raise ValueError(f"line {number} must hold numbers, among them the epoch")
        return lines
    except (TypeError, ValueError, RecursionError) as error:
        raise files.FileError(f"{path} is not a log of training ({error}): {_TODO}") from error


def gallery(path: Path, classifiers: Sequence[str], classes: Sequence[str] = ()) -> list[Exhibit]:
    """The images of a file that holds the tensors of `exhibits`."""
    tensors, _ = files.read_tensors(path, _TODO)
    try:
        return exhibits(tensors, classifiers, classes)
    except (KeyError, ValueError) as error:
        raise files.FileError(f"{path} is not a gallery ({error}): {_TODO}") from error


def exhibits(tensors: Mapping[str, Tensor], classifiers: Sequence[str], classes: Sequence[str] = ()) -> list[Exhibit]:
    """The images of a gallery. classes: what the labels mean; without it they stand as they are.

    tensors: ``clean``, ``(m, channels, height, width)``, its ``box``, which is [-1, 1] if missing, and ``labels``,
        ``(m,)``; for each classifier the attacked images, ``SLUG/adv``, and the labels it gives to clean and attacked,
        ``SLUG/said`` and ``SLUG/says``.
    """
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    clean, labels, box = arrays["clean"], arrays["labels"], arrays["box"].tolist() if "box" in arrays else (-1.0, 1.0)
    if np.shape(box) != (2,) or not np.isfinite(box).all() or not box[0] < box[1]:
        raise ValueError(f"box must be two numbers, low below high, got {box}")
    names = [name for name in classifiers if f"{slug(name)}/adv" in arrays]
    shown = {name: [arrays[f"{slug(name)}/{part}"] for part in ("adv", "said", "says")] for name in names}
    for name, (adv, said, says) in {"clean": (clean, labels, labels), **shown}.items():
        if adv.shape != clean.shape or adv.shape[1:2] not in ((1,), (3,)) or adv.ndim != 4:
            raise ValueError(f"{name} has images of shape {adv.shape}, not (m, 1 or 3, height, width) like all")
        if not np.isfinite(adv).all():
            raise ValueError(f"{name} has images that are not finite")
        if not said.shape == says.shape == clean.shape[:1]:
            raise ValueError(f"{name} has {said.shape} and {says.shape} labels, not one for each image")
    meanings = dict(enumerate(classes))
    found = []
    for i, (image, label) in enumerate(zip(clean, labels.tolist(), strict=True)):
        right = meanings.get(label, str(label))
        first = {"title": "Clean", "says": f"is {right}", "verdict": "clean", "note": ""}
        pictures = [first | _drawn(image, image, box)]
        for name, (adv, said, says) in shown.items():
            answer, drawn = int(says[i]), _drawn(image, adv[i], box)
            words = {"title": name, "says": f"says {meanings.get(answer, answer)}"}
            words["verdict"] = "held" if answer == label else "fooled"
            changed = f"{len(drawn['changed'])} changed" if drawn["changed"] else "no attack broke it"
            words["note"] = changed if said[i] == label else "wrong when clean"
            pictures.append(words | drawn)
        found.append((right, pictures))
    return found


def _drawn(clean: Floats, image: Floats, box: Sequence[float]) -> dict[str, Any]:
    rows, columns = (clean != image).any(axis=0).nonzero()
    changed = list(zip(columns.tolist(), rows.tolist(), strict=True))
    # What lies outside of the box is drawn as black or white.
    low, high = box
    levels = np.rint((np.clip(image, low, high) - low) * (255 / (high - low))).astype(np.uint8)
    colours = np.broadcast_to(levels, (3, *levels.shape[1:])).transpose(1, 2, 0)
    uri = "data:image/png;base64," + base64.b64encode(png(colours)).decode()
    return {"uri": uri, "width": image.shape[2], "height": image.shape[1], "changed": changed}


def png(image: npt.NDArray[np.uint8]) -> bytes:
    """``(height, width, 3)`` as an 8-bit RGB file."""
    height, width, _ = image.shape
    rows = b"".join(b"\0" + row.tobytes() for row in image)  # each row begins with its filter: none
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )
