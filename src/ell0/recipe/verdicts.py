"""What each measure of a run found, row by row: evidence for the worst case of the rows that measures share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..files import read_tensors, write_tensors

CERTIFICATE = "certificate"


@dataclass(frozen=True)
class Verdicts:
    """What one evaluation found within a box.

    names: of what may have decided a row.  verdict: ``(n,)`` int64, an index of names; -1 if the row stands.
    distance: ``(n,)`` int64, units changed; 0 if misclassified from the start, -1 if the row stands.
    """

    beta: float
    names: tuple[str, ...]
    verdict: Tensor
    distance: Tensor

    @classmethod
    def certificate(cls, beta: float, radii: Tensor) -> Verdicts:
        """A proof that no error within the box is nearer than the radius; distance holds the radii."""
        return cls(beta, (CERTIFICATE,), torch.full_like(radii, -1), radii)

    @property
    def proves(self) -> bool:
        return self.names == (CERTIFICATE,)

    def check(self, other: Verdicts) -> None:
        """Raises ValueError if one is a certificate and the other an error that it excludes: one of them is wrong."""
        if other.proves and not self.proves:
            other.check(self)
        if not self.proves or other.proves or other.beta > self.beta:
            return
        n = min(len(self.verdict), len(other.verdict))
        broken = (other.verdict[:n] >= 0) & (other.distance[:n] <= self.distance[:n])
        for row in broken.nonzero().flatten().tolist():
            raise ValueError(
                f"row {row} is certified for {int(self.distance[row])} changes, and "
                f"{other.names[int(other.verdict[row])]} broke it with {int(other.distance[row])}: a bug in one of them"
            )


def decided(evidence: Sequence[Verdicts], n: int, budget: int) -> tuple[dict[str, int], Tensor]:
    """How many of the first n rows each attack broke within the budget, and ``(n,)`` bool, which of them stand.

    A row counts for its nearest error.
    """
    nearest, by = torch.full((n,), torch.iinfo(torch.int64).max), torch.full((n,), -1)
    indices: dict[str, int] = {}
    for one in evidence:
        if one.proves:
            continue
        own = torch.tensor([indices.setdefault(name, len(indices)) for name in one.names], dtype=torch.int64)
        verdict, distance = one.verdict[:n], one.distance[:n]
        nearer = ((verdict >= 0) & (distance < nearest[: len(distance)])).nonzero().squeeze(1)
        nearest[nearer], by[nearer] = distance[nearer], own[verdict[nearer]]
    counts = torch.bincount(by[nearest <= budget], minlength=len(indices)).tolist()
    return dict(zip(indices, counts, strict=True)), nearest > budget


def certified_radii(evidence: Sequence[Verdicts], n: int, beta: float) -> Tensor | None:
    """The most changes at which a certificate excludes errors, ``(n,)``; None if none covers the box and all n rows."""
    radii = [one.distance[:n] for one in evidence if one.proves and one.beta >= beta and len(one.distance) >= n]
    return torch.stack(radii).amax(0) if radii else None


def save(path: Path, made_from: str, boxes: Sequence[Verdicts]) -> None:
    """Writes what was found, box by box; all have the same rows and names.  made_from: a digest of weights and task."""
    tensors = {
        "beta": torch.tensor([one.beta for one in boxes], dtype=torch.float64),
        "verdict": torch.stack([one.verdict for one in boxes]).to(torch.int16),
        "distance": torch.stack([one.distance for one in boxes]).to(torch.int32),
    }
    path.parent.mkdir(exist_ok=True)
    write_tensors(path, tensors, {"made_from": made_from, "names": json.dumps(boxes[0].names)})


def load(path: Path, made_from: str) -> list[Verdicts] | None:
    """What `save` wrote; None if it is not there, was altered, or is of another task: then it is found again."""
    try:
        tensors, words = read_tensors(path, "it is found again")
        names, beta = tuple(json.loads(words["names"])), tensors["beta"].tolist()
        verdict, distance = tensors["verdict"].long(), tensors["distance"].long()
        boxes = [Verdicts(each, names, *both) for each, *both in zip(beta, verdict, distance, strict=True)]
    except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
        return None
    fits = verdict.ndim == 2 and verdict.shape == distance.shape and all(isinstance(name, str) for name in names)
    fits = fits and bool(((verdict >= -1) & (verdict < len(names))).all())
    return boxes if fits and words.get("made_from") == made_from else None
