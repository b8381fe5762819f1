"""A search for votes of parts: one pass shows what a change in each part makes that part say, for all parts at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .contract import Victim
from .surrogate import Vote

__all__ = ["search_parts"]

_RIVALS = 6  # classes that a row is pushed towards, each with changes of its own
_LEVELS = 3  # changed units in one part at most
_HINT = 1e-3  # weight of the smooth voice, which tells changes apart that leave the voice of a part as it is


def search_parts(victim: Victim, vote: Vote, seen: Callable[[Tensor], Tensor], queries: int) -> None:
    """Changes one unit in every part by each query, and the best units of the best parts in the end.

    No part notices the others, so one query shows what a change in each part does. The best change of each part for
    each of a few rival classes is kept, from which the best set of parts is computed without a query. The model is
    asked about it after 1, 2, 4, ... queries. Half of the queries tries single units, the rest a second one beside
    the best first, and a third. Units go in the order of the surrogate gradient; values are corners of the box, first
    those that the gradient asks for, and any of the box when all are tried.

    Args:
        seen: what the vote sees of points.  queries: for each row.
    """
    if queries < 5 or not len(victim.standing):
        return
    search = _PartSearch(victim, vote, seen)
    levels, spent = min(_LEVELS, victim.ball.budget), 3
    for level in range(1, levels + 1):
        end = queries if level == levels else 3 + (queries - 3) * (2**level - 1) // 2**level
        search.begin()
        for trial in victim.while_standing(range(end - spent), f"adaptive, {level} in a part"):
            if spent >= end - 1 or spent == end:
                break
            search.attempt(trial)
            spent += 1
            if trial & (trial + 1) == 0 or spent == end - 1:
                search.confirm()
                spent += 1


class _PartSearch:
    """For the standing rows (m) and some rivals (k) the best changes of every part (t), of 1, 2, ... units."""

    def __init__(self, victim: Victim, vote: Vote, seen: Callable[[Tensor], Tensor]) -> None:
        self._victim, self._vote, self._seen = victim, vote, seen
        self._at = at = victim.standing
        self._sign = -1.0 if victim.targeted else 1.0
        self._clean, self._low, self._high, self._mutable = (
            victim.units(t)[at] for t in (victim.x, victim.low, victim.high, victim.mutable)
        )
        units = self._clean.shape[2]
        owner = vote.owner.repeat(units // len(vote.owner))
        slope = victim.units(victim.slopes(victim.x[at], at, straight=True)[1]).nan_to_num(0.0, 0.0, 0.0)
        self._upwards = slope <= 0
        gain = (slope * (torch.where(self._upwards, self._high, self._low) - self._clean)).where(self._mutable, 0.0)
        free = self._mutable.any(1)
        gain = gain.sum(1).masked_fill(~free, torch.inf)
        # Each part's units one after the other, the best first, those that are frozen last.
        self._order = gain.argsort(dim=1, stable=True)
        self._order = self._order.gather(1, owner[self._order].argsort(dim=1, stable=True))
        self._first = torch.bincount(owner, minlength=vote.parts).cumsum(0).roll(1)
        self._first[0] = 0
        self._free = torch.zeros(len(at), vote.parts, dtype=torch.int64, device=at.device)
        self._free.index_add_(1, owner, free.long())
        said = self._say(victim.x[at])
        lead = self._sign * vote.leads(said, victim.labels[at])
        dearest = (1 + lead).topk(min(victim.ball.budget, vote.parts), 1).values.sum(1)
        # The most that every part could say for a rival; towards a target, the class that is hardest to pass.
        reach = (self._sign * (lead.sum(1) - dearest)).scatter(1, victim.labels[at].unsqueeze(1), torch.inf)
        self._rivals = reach.argsort(dim=1, stable=True)[:, : min(_RIVALS, reach.shape[1] - 1)]
        # By number of changed units: what parts say with them (m, t, k, classes), and how good that is (m, t, k).
        self._said = [said.unsqueeze(2).expand(-1, -1, self._rivals.shape[1], -1)]
        self._keys = [self._key(said)]
        # Those units (m, t, k), the last one added, and their values (m, channels, t, k).
        self._units: list[Tensor] = []
        self._values: list[Tensor] = []
        self._base = self._clean

    def begin(self) -> None:
        """Goes on to one more unit in each part, beside the best ones for the rival that is nearest."""
        if self._units:
            self._drop_done()
            best, rows = self._plan()[0], torch.arange(len(self._at), device=self._at.device)
            self._rivals = self._rivals[rows, best].unsqueeze(1)
            for several in (self._said, self._keys, self._units):
                several[:] = [t[rows, :, best].unsqueeze(2) for t in several]
            self._values = [t[rows, :, :, best].unsqueeze(3) for t in self._values]
            self._base = self._changed(self._base, self._units[-1].squeeze(2), self._values[-1].squeeze(3))
        self._said.append(self._said[-1].clone())
        self._keys.append(self._keys[-1].clone())
        none = self._clean.shape[2]  # a place beyond the last unit, where a part changes nothing
        self._units.append(torch.full(self._keys[-1].shape, none, device=self._at.device))
        self._values.append(self._clean.new_zeros(len(self._at), self._clean.shape[1], *self._keys[-1].shape[1:]))

    def attempt(self, trial: int) -> None:
        """Changes one unit of every part, and keeps what is better than what was known of that part."""
        self._drop_done()
        unit, value = self._candidate(trial)
        said = self._say(self._victim.points(self._changed(self._base, unit, value)))
        key = self._key(said)
        better = key < self._keys[-1]
        self._keys[-1] = torch.where(better, key, self._keys[-1])
        self._said[-1] = torch.where(better.unsqueeze(3), said.unsqueeze(2), self._said[-1])
        self._units[-1] = torch.where(better, unit.unsqueeze(2), self._units[-1])
        self._values[-1] = torch.where(better.unsqueeze(1), value.unsqueeze(3), self._values[-1])

    def confirm(self) -> None:
        """Asks the model about the best point of the ball, as far as is known."""
        best, counts = self._plan()
        rows = torch.arange(len(best), device=best.device)
        points, counts = self._clean, counts[rows, :, best]
        for level, (units, values) in enumerate(zip(self._units, self._values, strict=True), 1):
            chosen = torch.where(counts >= level, units[rows, :, best], self._clean.shape[2])
            points = self._changed(points, chosen, values[rows, :, :, best])
        self._victim.margins(self._victim.points(points), self._at)

    def _plan(self) -> tuple[Tensor, Tensor]:
        """The rival (m,) that comes nearest, and how many units change in each part (m, t, k): the best for each rival.

        A knapsack: the least sum over parts, if each takes some units of the budget.
        """
        budget, keys = self._victim.ball.budget, torch.stack(self._keys)
        levels, m, parts, rivals = keys.shape
        least, taken = keys.new_zeros(m, rivals, budget + 1), []
        for part in range(parts):
            options = [least + keys[0, :, part].unsqueeze(2)]
            for level in range(1, levels):
                option = torch.full_like(least, torch.inf)
                option[..., level:] = least[..., : budget + 1 - level] + keys[level, :, part].unsqueeze(2)
                options.append(option)
            found = torch.stack(options).min(0)
            least = found.values
            taken.append(found.indices.to(torch.int8))
        left = torch.full((m, rivals, 1), budget, device=keys.device)
        counts = torch.zeros(m, parts, rivals, dtype=torch.int64, device=keys.device)
        for part in reversed(range(parts)):
            count = taken[part].gather(2, left).long()
            counts[:, part] = count.squeeze(2)
            left = left - count
        said = torch.stack(self._said).gather(0, counts.view(1, m, parts, rivals, 1).expand(-1, -1, -1, -1, self._said[0].shape[3]))[0]
        scores = self._vote.scores(said.transpose(1, 2).flatten(0, 1))
        margin = self._victim.judge(scores, self._at.repeat_interleave(rivals))[0]
        return margin.view(m, rivals).argmin(1), counts

    def _candidate(self, trial: int) -> tuple[Tensor, Tensor]:
        """A unit of each part (m, t), and its values (m, channels, t)."""
        m, channels, none = self._clean.shape
        count = self._free.clamp(min=1)
        place, pattern = trial % count, trial // count
        unit = self._order.gather(1, (self._first + place).clamp(max=none - 1))
        low, high, mutable, upwards, clean = (
            t.gather(2, unit.unsqueeze(1).expand(-1, channels, -1))
            for t in (self._low, self._high, self._mutable, self._upwards, self._clean)
        )
        # Bit c of the pattern turns channel c to the other corner.
        turned = (pattern.unsqueeze(1) >> torch.arange(channels, device=unit.device).view(1, -1, 1)) & 1 > 0
        value = torch.where(upwards ^ turned, high, low)
        over = pattern >= 2**channels
        if over.any():
            moment = len(self._units) * 2**32 + trial
            drawn = self._victim.draws.uniform(self._at, moment, channels * unit.shape[1]).view_as(value).to(value)
            value = torch.where(over.unsqueeze(1), (low + (high - low) * drawn).clamp(low, high), value)
        return torch.where(self._free > 0, unit, none), torch.where(mutable, value, clean)

    def _changed(self, points: Tensor, unit: Tensor, value: Tensor) -> Tensor:
        """Points (m, channels, units) with other values (m, channels, s) at units (m, s)."""
        wider = torch.nn.functional.pad(points, (0, 1))
        return wider.scatter_(2, unit.unsqueeze(1).expand_as(value), value)[..., :-1]

    def _say(self, points: Tensor) -> Tensor:
        return self._victim.ask(lambda some: self._vote.part_logits(self._seen(some)), points, self._at)

    def _key(self, said: Tensor) -> Tensor:
        """How much each part says against each rival, (m, t, k), and a little of what it would say if it could."""
        labels = self._victim.labels[self._at]
        gap = said.gather(2, labels.view(-1, 1, 1).expand(-1, said.shape[1], 1)) - said
        lead = self._vote.leads(said, labels) + _HINT * torch.nn.functional.softsign(gap)
        return self._sign * lead.gather(2, self._rivals.unsqueeze(1).expand(-1, said.shape[1], -1))

    def _drop_done(self) -> None:
        stands = ~self._victim.success[self._at]
        if stands.all():
            return
        for name in ("_at", "_clean", "_low", "_high", "_mutable", "_upwards", "_order", "_free", "_rivals", "_base"):
            setattr(self, name, getattr(self, name)[stands])
        for several in (self._said, self._keys, self._units, self._values):
            several[:] = [t[stands] for t in several]
