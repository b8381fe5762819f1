"""The state of an evaluation, in memory and in the file from which a killed evaluation goes on."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..attacks import AttackResult
from ..common import write_whole

_FORMAT = "2"
_SAME = 1e-3  # share of the largest clean margin by which rounding in other batches may move a margin


def compact(rows: Tensor, x: Tensor, result: AttackResult) -> list[Tensor]:
    """What an attack found for rows ``(m,)``, on the CPU, for `State.learn`: of x_adv only what differs from x.

    rows, success, distance, queries, refuted ``(m,)``; and which numbers of all x, flattened, change to what ``(c,)``.
    """
    broken = result.success.nonzero().squeeze(1)
    changed = (result.x_adv[broken] != x[broken]).flatten(1).nonzero()
    values = result.x_adv[broken].flatten(1)[changed[:, 0], changed[:, 1]]
    at = rows.to(x.device)[broken[changed[:, 0]]] * x[0].numel() + changed[:, 1]
    # The margin of a row that was broken in a query stays below 0.
    refuted = ~result.success.cpu() & (result.margin.cpu() < 0)
    return [t.cpu() for t in (rows, result.success, result.distance, result.queries, refuted, at, values)]


@dataclass
class State:
    """The state of an evaluation: the tensors of `Evaluation`, and two more.

    clean: ``(n,)`` float64, the margin of each row before any attack.
    refuted: ``(n,)`` bool; an attack broke the row in a query, and its own last check took that back.
    """

    verdict: Tensor
    distance: Tensor
    queries: Tensor
    tried: Tensor
    seconds: Tensor
    clean: Tensor
    refuted: Tensor
    x_adv: Tensor

    @classmethod
    def fresh(cls, x: Tensor, clean: Tensor, wrong: Tensor, attacks: int) -> State:
        unbroken, none = torch.where(wrong, 0, -1), torch.zeros_like(wrong)
        nothing = torch.zeros(len(x), attacks, dtype=torch.int64, device="cpu")
        seconds = torch.zeros(attacks, dtype=torch.float64, device="cpu")
        points = x.detach().clone(memory_format=torch.contiguous_format)
        return cls(unbroken, unbroken.clone(), nothing, nothing.clone(), seconds, clean, none, points)

    @classmethod
    def joined(cls, parts: Sequence[State]) -> State:
        """The states of parts of the rows as one, on the CPU if there are several."""
        if len(parts) == 1:
            return parts[0]
        tensors = {key: [vars(part)[key].cpu() for part in parts] for key in vars(parts[0])}
        seconds = torch.stack(tensors.pop("seconds")).sum(0)
        return cls(**{key: torch.cat(values) for key, values in tensors.items()}, seconds=seconds)

    def learn(self, column: int, budget: int, found: Sequence[Tensor]) -> None:
        """Takes over what an attack found for some rows, from `compact`."""
        rows, success, distance, queries, refuted, at, values = found
        self.queries[rows, column] += queries
        self.tried[rows, column] = budget
        self.refuted[rows] |= refuted
        self.verdict[rows[success]] = column + 1
        self.distance[rows[success]] = distance[success]
        self.x_adv.view(-1)[at.to(self.x_adv.device)] = values.to(self.x_adv.device)

    def save(self, path: Path, x: Tensor, parts: dict[str, str]) -> None:
        """Writes the file whole. Of x_adv only what differs from x."""
        at = (self.x_adv != x).flatten().nonzero().squeeze(1)
        arrays = {key: value.numpy() for key, value in vars(self).items() if key != "x_adv"}
        arrays |= {"at": at.cpu().numpy(), "values": self.x_adv.flatten()[at].double().cpu().numpy()}
        file = io.BytesIO()
        np.savez(file, allow_pickle=False, parts=np.array(json.dumps({"format": _FORMAT, **parts})), **arrays)
        write_whole(path, file.getvalue())

    @classmethod
    def load(cls, path: Path, content: bytes, x: Tensor, parts: dict[str, str], clean: Tensor, noise: float) -> State:
        """Reads what `save` wrote; raises a ValueError that names the parts in which it differs from this evaluation.

        Clean margins of the same rows that differ by more than rounding and ``noise`` are those of another model.
        """
        try:
            with np.load(io.BytesIO(content), allow_pickle=False) as file:
                arrays = {key: torch.from_numpy(file[key]) for key in file.files if key != "parts"}
                saved = json.loads(str(file["parts"]))
            at, values = arrays.pop("at"), arrays.pop("values")
            state = cls(**arrays, x_adv=x.detach().clone(memory_format=torch.contiguous_format))
        except (ValueError, KeyError, TypeError, AttributeError, EOFError, zipfile.BadZipFile) as error:
            raise ValueError(f"state_path must be a file that evaluate wrote, got {str(path)!r}") from error
        if saved.pop("format", None) != _FORMAT:
            rule = "state_path must be a file that this version of ell0 wrote"
            raise ValueError(f"{rule}, got {str(path)!r}; remove it and start again")
        differs = [part for part in {**saved, **parts} if saved.get(part) != parts.get(part)]
        largest = float(clean.abs().where(clean.isfinite(), 0.0).max())
        if not differs and not torch.allclose(state.clean, clean, rtol=0.0, atol=_SAME * largest + noise):
            differs = ["model"]
        if differs:
            what = ", ".join(differs)
            raise ValueError(f"state_path must be of this evaluation, but {str(path)!r} differs in: {what}")
        state.x_adv.view(-1)[at.to(x.device)] = values.to(x)
        return state
