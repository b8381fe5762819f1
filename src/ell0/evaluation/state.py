"""The state of an evaluation, in memory and in the file from which a killed evaluation goes on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..attacks import AttackResult
from ..files import FileError, read_tensors, write_tensors

Saved = tuple[dict[str, Tensor], dict[str, str]]
"""The tensors and words of a file."""

_FORMAT = "4"
_TODO = "delete it, and its rows are attacked again"
_SAME = 1e-3  # share of the largest clean margin by which rounding in other batches may move a margin


def compact(rows: Tensor, x: Tensor, result: AttackResult) -> list[Tensor]:
    """What an attack found for rows ``(m,)``, on the CPU, for `State.learn`: of x_adv only what differs from x.

    rows, success, distance, queries, refuted, spent ``(m,)``; which numbers of x, flattened, change to what ``(c,)``.
    """
    broken = result.success.nonzero().squeeze(1)
    changed = (result.x_adv[broken] != x[broken]).flatten(1).nonzero()
    values = result.x_adv[broken].flatten(1)[changed[:, 0], changed[:, 1]]
    at = rows.to(x.device)[broken[changed[:, 0]]] * x[0].numel() + changed[:, 1]
    # The margin of a row that was broken in a query stays below 0.
    refuted = ~result.success.cpu() & (result.margin.cpu() < 0)
    # An attack that goes on after a break does not tell when it was.
    spent = torch.zeros_like(result.queries) if result.late is None else result.queries
    return [t.cpu() for t in (rows, result.success, result.distance, result.queries, refuted, spent, at, values)]


@dataclass
class State:
    """The state of an evaluation: the tensors of `Evaluation`, and three more.

    clean: ``(n,)`` float64, the margin of each row before any attack.
    refuted: ``(n,)`` bool; an attack broke the row in a query, and its own last check took that back.
    spent: ``(n, attacks)`` int64, queries of the last run, 0 for an attack that goes on after a break.
    """

    verdict: Tensor
    distance: Tensor
    queries: Tensor
    tried: Tensor
    seconds: Tensor
    clean: Tensor
    refuted: Tensor
    spent: Tensor
    x_adv: Tensor

    @classmethod
    def fresh(cls, x: Tensor, clean: Tensor, wrong: Tensor, attacks: int) -> State:
        unbroken, none = torch.where(wrong, 0, -1), torch.zeros_like(wrong)
        nothing = torch.zeros(len(x), attacks, dtype=torch.int64, device="cpu")
        seconds = torch.zeros(attacks, dtype=torch.float64, device="cpu")
        points = x.detach().clone(memory_format=torch.contiguous_format)
        return cls(unbroken, unbroken.clone(), nothing, nothing.clone(), seconds, clean, none, nothing.clone(), points)

    def learn(self, column: int, budget: int, found: Sequence[Tensor]) -> None:
        """Takes over what an attack found for some rows, from `compact`."""
        rows, success, distance, queries, refuted, spent, at, values = found
        self.queries[rows, column] += queries
        self.tried[rows, column] = budget
        self.refuted[rows] |= refuted
        self.spent[rows, column] = spent
        self.verdict[rows[success]] = column + 1
        self.distance[rows[success]] = distance[success]
        self.x_adv.view(-1)[at.to(self.x_adv.device)] = values.to(self.x_adv.device)

    @property
    def late(self) -> Tensor:
        """Rows that fell in the last tenth of the queries that rows which stood spent on that attack: ``(n,)`` bool."""
        late = torch.zeros_like(self.refuted)
        for column in range(self.tried.shape[1]):
            spent, broken = self.spent[:, column], self.verdict == column + 1
            stood = spent[~broken]
            late |= broken & (10 * spent > 9 * stood.max()) & (stood.max() > 0) if len(stood) else late
        return late

    def save(self, path: Path, x: Tensor, parts: dict[str, str]) -> None:
        """Writes the file whole. Of x_adv only what differs from x."""
        at = (self.x_adv != x).flatten().nonzero().squeeze(1)
        more = {"at": at, "values": self.x_adv.flatten()[at].double()}
        write_tensors(path, self._small() | more, {"parts": json.dumps({"format": _FORMAT, **parts})})

    def _small(self) -> dict[str, Tensor]:
        return {key: value for key, value in vars(self).items() if key != "x_adv"}

    def forget(self, rows: Tensor, fresh: State) -> None:
        """Puts some rows, ``(n,)`` bool, back to where no attack has run."""
        for key in ("verdict", "distance", "queries", "tried", "refuted", "spent", "x_adv"):
            mine, its = getattr(self, key), getattr(fresh, key)
            mine[rows.to(mine.device)] = its[rows.to(mine.device)]

    @staticmethod
    def read(path: Path | None) -> Saved | None:
        """What `save` wrote, if it is there; raises FileError if it was altered."""
        return None if path is None or not path.exists() else read_tensors(path, _TODO)

    @classmethod
    def load(cls, path: Path, saved: Saved, fresh: State, parts: dict[str, str], noise: float) -> State:
        """The state in a file; raises a ValueError that names the parts in which it differs from this evaluation.

        Clean margins of the same rows that differ by more than rounding and ``noise`` are those of another model.
        """
        try:
            tensors, words = dict(saved[0]), dict(json.loads(saved[1].get("parts", "{}")))
        except (TypeError, ValueError, RecursionError) as error:
            raise FileError(f"{path} is damaged ({error}): {_TODO}") from error
        if words.pop("format", None) != _FORMAT:
            raise FileError(f"{path} must be a file that this version of evaluate wrote: {_TODO}")
        differs = [part for part in {**words, **parts} if words.get(part) != parts.get(part)]
        at, values = tensors.pop("at", torch.tensor([-1])), tensors.pop("values", torch.empty(1))
        inside = at.dtype == torch.int64 and at.shape == values.shape and bool(values.isfinite().all())
        inside &= bool(((at >= 0) & (at < fresh.x_adv.numel())).all())
        forms = [{key: (t.dtype, t.shape) for key, t in held.items()} for held in (tensors, fresh._small())]
        if not differs and not (inside and forms[0] == forms[1]):
            raise FileError(f"{path} is damaged, its tensors do not fit the rows: {_TODO}")
        largest = float(fresh.clean.abs().where(fresh.clean.isfinite(), 0.0).max())
        if not differs and not torch.allclose(tensors["clean"], fresh.clean, rtol=0.0, atol=_SAME * largest + noise):
            differs = ["model"]
        if differs:
            what = ", ".join(differs)
            raise ValueError(f"state_path must be of this evaluation, but {str(path)!r} differs in: {what}")
        state = cls(**tensors, x_adv=fresh.x_adv.clone())
        state.x_adv.view(-1)[at.to(state.x_adv.device)] = values.to(state.x_adv)
        return state
