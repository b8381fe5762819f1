"""What the measures of a run found, row by row: each is evidence for the worst case of the rows they share."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from ..common import write_whole

CERTIFICATE = "certificate"


@dataclass(frozen=True)
class Found:
    """What one evaluation found within a box.

    names: of what may have decided a row.  verdict: ``(n,)`` int64, a place in names; -1 the row stands.
    distance: ``(n,)`` int64, units changed; 0 if misclassified from the start, -1 if the row stands.
    """

    beta: float
    names: tuple[str, ...]
    verdict: Tensor
    distance: Tensor

    @classmethod
    def certificate(cls, beta: float, radii: Tensor) -> Found:
        """That no point within a box, nearer than the radius of a row, is an error: as distances that nothing broke."""
        return cls(beta, (CERTIFICATE,), torch.full_like(radii, -1), radii)

    @classmethod
    def nothing(cls, n: int) -> Found:
        """That n rows were looked at, and no word on any."""
        return cls(0.0, (), torch.full((n,), -1), torch.full((n,), -1))

    @property
    def proves(self) -> bool:
        """Whether it is a certificate."""
        return self.names == (CERTIFICATE,)

    def check(self, other: Found) -> None:
        """Raises where one is a certificate and the other an error nearer than it allows: one of them is wrong."""
        if other.proves and not self.proves:
            other.check(self)
        if not self.proves or other.proves or other.beta > self.beta:
            return
        n = min(len(self.verdict), len(other.verdict))
        broken = (other.verdict[:n] >= 0) & (other.distance[:n] <= self.distance[:n])
        if bool(broken.any()):
            row = int(broken.nonzero()[0])
            raise ValueError(
                f"row {row} is certified for {int(self.distance[row])} changes, and "
                f"{other.names[int(other.verdict[row])]} broke it with {int(other.distance[row])}: a bug in one of them"
            )


class Nearest:
    """The nearest error known for each of n rows, and what found it."""

    def __init__(self, n: int) -> None:
        self._distance = torch.full((n,), torch.iinfo(torch.int64).max)
        self._decided = torch.full((n,), -1)
        self._names: dict[str, int] = {}
        self._certificates: list[Found] = []

    def learn(self, found: Found) -> None:
        """Takes over what is nearer, on the rows that both have, and every certificate."""
        if found.proves:
            self._certificates.append(found)
            return
        n = min(len(found.verdict), len(self._distance))
        places = [self._names.setdefault(name, len(self._names)) for name in found.names]
        own = torch.tensor(places, dtype=torch.int64)
        verdict, distance = found.verdict[:n], found.distance[:n]
        nearer = ((verdict >= 0) & (distance < self._distance[:n])).nonzero().squeeze(1)
        self._distance[nearer], self._decided[nearer] = distance[nearer], own[verdict[nearer]]

    def proven(self, budget: int, beta: float) -> int | None:
        """How many rows no point of a box within so many changed units breaks; None if there is no word on them all."""
        n = len(self._distance)
        there = [c for c in self._certificates if c.beta >= beta and len(c.distance) >= n]
        return max((int((c.distance[:n] >= budget).sum()) for c in there), default=None)

    def decided(self, budget: int) -> dict[str, int]:
        """How many rows each has broken with at most so many changed units."""
        counts = torch.bincount(self._decided[self._distance <= budget], minlength=len(self._names)).tolist()
        return dict(zip(self._names, counts, strict=True))


def save(path: Path, weights: str, found: list[Found]) -> None:
    """Writes what was found with these weights, box by box; all have the same rows and names."""
    path.parent.mkdir(exist_ok=True)
    file = io.BytesIO()
    np.savez_compressed(
        file,
        allow_pickle=False,
        weights=np.array(weights),
        names=np.array(json.dumps(found[0].names)),
        beta=np.array([one.beta for one in found]),
        verdict=np.stack([one.verdict.numpy().astype(np.int16) for one in found]),
        distance=np.stack([one.distance.numpy().astype(np.int32) for one in found]),
    )
    write_whole(path, file.getvalue())


def load(path: Path, weights: str) -> list[Found] | None:
    """What `save` wrote; None if it is not there, not whole, or of other weights, and must be found again."""
    try:
        with np.load(path, allow_pickle=False) as file:
            if str(file["weights"]) != weights:
                return None
            names = tuple(json.loads(str(file["names"])))
            verdict, distance = (torch.from_numpy(file[key].astype(np.int64)) for key in ("verdict", "distance"))
            boxes = zip(file["beta"].tolist(), verdict, distance, strict=True)
            return [Found(beta, names, *both) for beta, *both in boxes]
    except (FileNotFoundError, ValueError, EOFError, KeyError, zipfile.BadZipFile):
        return None


def weights_of(network: nn.Module) -> str:
    """The SHA-256 of a network's weights."""
    digest = hashlib.sha256()
    for name, tensor in network.state_dict().items():
        digest.update(name.encode() + tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
