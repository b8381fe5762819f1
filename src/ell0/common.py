"""What every room may need: checks of arguments, nearest words, digests, seeded generators, progress."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "Progress", "Step", "check_count", "device_of", "did_you_mean", "digest", "seeded", "silent",
]  # fmt: skip


def check_count(name: str, value: object, least: int = 1, bits: int | None = 63) -> int:
    """Returns value as an int if it is one, or numpy's, and >= least; raises a ValueError that names it otherwise.

    bits: as many as it may have; None: any.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ValueError(f"{name} must be an int >= {least}, got {value!r}")
    if bits is not None and value >= 2**bits:
        raise ValueError(f"{name} must be less than 2**{bits}, got {value!r}")
    return int(value)


def device_of(name: str | None) -> torch.device:
    """The device of that name; None: a GPU if there is one, else the CPU."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f'device must be such as "cpu" or "cuda", got {name!r}') from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f'torch finds no CUDA GPU: device must be "cpu", got {name!r}')
    return device


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the known word nearest to a wrong one, or an empty string."""
    near = get_close_matches(word, list(known), n=1, cutoff=0.5) if isinstance(word, str) else []
    return f"; did you mean {near[0]!r}?" if near else ""


def digest(*parts: Tensor | bytes | str) -> str:
    """SHA-256 of values in order, each with its type, and for a tensor its dtype and shape."""
    found = hashlib.sha256()
    for part in parts:
        if isinstance(part, Tensor):
            raw = part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            head = f"tensor {part.dtype} {tuple(part.shape)}"
        else:
            raw, head = (part, "bytes") if isinstance(part, bytes) else (part.encode(), "text")
        found.update(f"{head} {len(raw)}\n".encode() + raw)
    return found.hexdigest()


def seeded(seed: int, *words: object) -> torch.Generator:
    """A CPU generator that depends on the seed and on these words alone, so that every use has draws of its own."""
    key = hashlib.sha256(" ".join(map(str, (seed, *words))).encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(key[:8], "big") >> 1)


@dataclass(frozen=True)
class Step:
    """How far a piece of work is.

    what: "epoch", "sparse_rs", "F(4): clean accuracy".  done, total: steps of it; total is None where it is unknown.
    note: figures so far.  seconds_left: an estimate.  stage: the larger piece of work that this belongs to.
    """

    what: str
    done: int
    total: int | None = None
    note: str = ""
    seconds_left: float | None = None
    stage: Step | None = None

    def __str__(self) -> str:
        count = f"{self.done}/{self.total}" if self.total is not None else f"{self.done}"
        left = (
            ""
            if self.seconds_left is None
            else f"{int(self.seconds_left // 60)}:{int(self.seconds_left % 60):02d} left"
        )
        own = ", ".join(filter(None, [f"{count} {self.what}", self.note, left]))
        return own if self.stage is None else f"{self.stage}: {own}"


Progress = Callable[[Step], None]
"""What attacks, trainings, certificates, downloads and recipes call while they work."""


def silent(_: Step) -> None:
    """The default `Progress`: says nothing."""
