"""A search for votes of parts: one query shows what a change in each part makes that part say."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from .contract import Victim
from .surrogate import Vote

__all__ = ["PartSearch"]

_RIVALS = 6  # classes that a row is pushed towards, each with changes of its own
_HINT = 1e-3  # weight of what only tells apart changes by which a part says the same for the label against the rival


class PartSearch:
    """For each row and part the best changed unit so far, towards each of a few rival classes.

    No part notices the others, so a point with a changed unit in every part shows what each of these changes does. It
    lies outside the ball. The best units of the best parts do not, and which these are takes no query to find out.

    Rivals are the classes that win first if parts say the worst; towards a target, those that are last to lose. Units
    of a part are tried in the order of the surrogate gradient. Values are corners of the box, the one that the gradient
    asks for first, and when all are tried, any of the box.

    Args:
        seen: what the vote sees of points.

    Shapes: m rows, t parts, k rivals, c channels.
    """

    def __init__(self, victim: Victim, vote: Vote, seen: Callable[[Tensor], Tensor]) -> None:
        self._victim, self._vote, self._seen = victim, vote, seen
        self._at = at = victim.standing
        self._clean, self._low, self._high, self._mutable = (
            victim.units(t)[at] for t in (victim.x, victim.low, victim.high, victim.mutable)
        )
        owner = vote.owner.repeat(self._clean.shape[2] // len(vote.owner))
        slope = victim.units(victim.slopes(victim.x[at], at, straight=True)[1]).nan_to_num(0.0, 0.0, 0.0)
        self._rises = slope <= 0
        end, free = torch.where(self._rises, self._high, self._low), self._mutable.any(1)
        gain = (slope * (end - self._clean)).where(self._mutable, 0.0).sum(1).masked_fill(~free, torch.inf)
        # The units of each part one after the other, the best first, frozen ones last.
        order = gain.argsort(dim=1, stable=True)
        self._order = order.gather(1, owner[order].argsort(dim=1, stable=True))
        sizes = torch.bincount(owner, minlength=vote.parts)
        self._first = (sizes.cumsum(0) - sizes).expand(len(at), -1)
        self._free = torch.zeros_like(self._first).index_add(1, owner, free.long())

        said, labels = self._say(victim.x[at]), victim.labels[at]
        sign = -1 if victim.targeted else 1
        lead = sign * vote.leads(said, labels)
        dearest = (1 + lead).topk(min(victim.ball.budget, vote.parts), 1).values.sum(1)
        reach = (sign * (lead.sum(1) - dearest)).scatter(1, labels.unsqueeze(1), torch.inf)
        self._rivals = reach.argsort(dim=1, stable=True)[:, : min(_RIVALS, reach.shape[1] - 1)]
        # The best change of a part: its unit (m, t, k) and values (m, c, t, k), what the part says then (m, t, k,
        # classes), how good that is, and how good it was (m, t, k).
        self._base = self._best = self._key(said)
        self._said = said.unsqueeze(2).expand(*self._base.shape, -1)
        self._unit = torch.zeros_like(self._base, dtype=torch.int64)
        self._value = self._clean.new_zeros(len(at), self._clean.shape[1], *self._base.shape[1:])
        self._clean_said = said

    def run(self, limit: int) -> None:
        """Tries changes until each row has spent ``limit`` queries or is broken."""
        for trial in self._victim.while_standing(range(limit), "adaptive, parts"):
            self._attempt(trial)
            last = int(self._victim.queries[self._at[0]]) + 2 > limit
            if last or trial & (trial + 1) == 0:  # after 1, 2, 4, ... of them
                self._confirm()
            if last:
                return

    def _attempt(self, trial: int) -> None:
        """Changes one unit of every part, and keeps what is better than what was known."""
        unit, value = self._candidate(trial)
        said = self._say(self._changed(unit, value, self._free > 0))
        key = self._key(said)
        better = (key < self._best) & (self._free > 0).unsqueeze(2)
        self._best = torch.where(better, key, self._best)
        self._said = torch.where(better.unsqueeze(3), said.unsqueeze(2), self._said)
        self._unit = torch.where(better, unit.unsqueeze(2), self._unit)
        self._value = torch.where(better.unsqueeze(1), value.unsqueeze(3), self._value)

    def _confirm(self) -> None:
        """Asks the model about the best point of the ball, as far as is known; rows that it breaks leave."""
        victim, (m, _, k) = self._victim, self._best.shape
        gain = self._best - self._base
        parts = gain.topk(min(victim.ball.budget, gain.shape[1]), 1, largest=False).indices
        chosen = torch.zeros_like(gain, dtype=torch.bool).scatter(1, parts, True) & (gain < 0)
        said = torch.where(chosen.unsqueeze(3), self._said, self._clean_said.unsqueeze(2)).transpose(1, 2)
        margin, breaks = victim.judge(self._vote.scores(said.flatten(0, 1)), self._at.repeat_interleave(k))
        # At a margin of 0 the lowest class wins.
        best = margin.masked_fill(breaks, -torch.inf).view(m, k).argmin(1)
        rows = torch.arange(m, device=best.device)
        chosen = chosen[rows, :, best]
        victim.margins(self._changed(self._unit[rows, :, best], self._value[rows, :, :, best], chosen), self._at)
        stands = ~victim.success[self._at]
        if not stands.all():
            for name, value in vars(self).items():
                if isinstance(value, Tensor):
                    setattr(self, name, value[stands])

    def _candidate(self, trial: int) -> tuple[Tensor, Tensor]:
        """A unit of each part (m, t), and its values (m, c, t)."""
        count = self._free.clamp(min=1)
        place, pattern = (self._first + trial % count).clamp(max=self._order.shape[1] - 1), trial // count
        unit = self._order.gather(1, place)
        index = unit.unsqueeze(1).expand(-1, self._clean.shape[1], -1)
        numbers = self._clean, self._low, self._high, self._mutable, self._rises
        clean, low, high, mutable, rises = (t.gather(2, index) for t in numbers)
        channels = torch.arange(clean.shape[1], device=unit.device).unsqueeze(1)
        # Bit c of the pattern turns channel c to the other corner.
        turned = pattern.unsqueeze(1) >> channels & 1 > 0
        value = torch.where(rises ^ turned, high, low)
        if (over := pattern >= 2 ** len(channels)).any():
            drawn = self._victim.draws.uniform(self._at, trial, value[0].numel()).view_as(value).to(value)
            value = torch.where(over.unsqueeze(1), (low + (high - low) * drawn).clamp(low, high), value)
        return unit, torch.where(mutable, value, clean)

    def _changed(self, unit: Tensor, value: Tensor, where: Tensor) -> Tensor:
        """Points with other values (m, c, t) at units (m, t), those where (m, t) it says so."""
        # Beyond the last unit there is a place for what does not change.
        unit = torch.where(where, unit, self._clean.shape[2]).unsqueeze(1).expand_as(value)
        return self._victim.points(F.pad(self._clean, (0, 1)).scatter(2, unit, value)[..., :-1])

    def _say(self, points: Tensor) -> Tensor:
        return self._victim.ask(lambda some: self._vote.part_logits(self._seen(some)), points, self._at)

    def _key(self, said: Tensor) -> Tensor:
        """What each part says against each rival, or for it and against a target: (m, t, k), the less the better."""
        labels = self._victim.labels[self._at]
        rivals = self._rivals.unsqueeze(1).expand(-1, said.shape[1], -1)
        lead, wins = self._vote.leads(said, labels).gather(2, rivals), rivals
        if self._victim.targeted:
            lead, wins = -lead, labels.view(-1, 1, 1).expand_as(rivals)
        # The class that is to win must pass the others, too.
        best = said.topk(2, 2)
        other = torch.where(best.indices[..., :1] == wins, best.values[..., 1:], best.values[..., :1])
        return lead + _HINT * F.softsign(other - said.gather(2, wins))
