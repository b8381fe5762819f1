"""Randomised ablation: a majority over copies of which a few random pixels are seen [Levine20].

[Levine20] A. Levine, S. Feizi, "Robustness Certificates for Sparse Adversarial Attacks by Randomized Ablation", 2020.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import reduce
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from ..attacks.draws import Draws
from ..common import check_count
from ..nn import folded
from ..threat import L0Ball
from .certifier import Certifier, Preparation
from .rules import tally
from .votes import check_votes

VotePrecision = Literal["fp32", "bf16"]


class RandomisedAblation(nn.Module, Certifier):
    """Answers by the majority over copies of the input of which ``keep`` random pixels are seen.

        g(x) = argmax over c of P(f(x seen at S) = c),  S uniform among the sets of keep pixels

    An attacker who changes m of d pixels changes what f sees with probability
    ``delta = 1 - C(d - m, keep) / C(d, keep)`` at most, so that class c stays the answer if ``P(c) - delta > 1/2``,
    whatever the values are. A pixel is all channels of a position of ``(n, channels, height, width)``, or one number of
    ``(n, d)``.

    In training mode the result is that of ``base`` on one ablated copy of each row, drawn anew in every call from
    torch's own generator, as dropout does. In eval mode it is the votes of ``selection`` copies, ``(n, classes)``.
    Which pixels they see is drawn with a fixed seed, the same for all rows and calls. The copies of a row go through
    ``base`` by themselves, so the answer depends on the row alone, to the bit: the classifier as it would be deployed,
    whose margin in votes an attack can query. It estimates g, and radii are those of g: an attack on these very copies
    may break a row within its radius.

    A radius counts pixels and holds for any value, with probability ``confidence`` over the draws, by the lower bound
    of Clopper and Pearson. It is -1 where the copies that choose give another class, or those that estimate leave its
    probability at 1/2 or below. ``batch`` counts copies: 512 by default, 16,384 on a GPU.

    Args:
        base: sees ``(n, 2 * channels, height, width)`` or ``(n, 2 * d)``: the channels ``(1 + x) / 2``, then
            ``(1 - x) / 2``, both 0 where a pixel is hidden, which no value of x is.
        keep: pixels seen.
        selection, samples: copies that choose the class, and others that estimate its probability. ``passes`` is the
            former, ``forwards`` the sum.
        confidence: with which a radius holds, for each row by itself.
        precision: of ``base`` on the copies that vote; ``"bf16"`` rounds its products (autocast), which makes another
            ``base``, of which the same holds.
    """

    confidence: float
    _kept: tuple[object, Tensor] | None = None

    def __init__(
        self,
        base: nn.Module,
        keep: int,
        *,
        selection: int = 1_000,
        samples: int = 10_000,
        confidence: float = 0.95,
        precision: VotePrecision = "fp32",
    ) -> None:
        super().__init__()
        if not 0 < confidence < 1:
            raise ValueError(f"confidence must lie in (0, 1), got {confidence!r}")
        if precision not in get_args(VotePrecision):
            raise ValueError(f'precision must be "fp32" or "bf16", got {precision!r}')
        self.base, self.keep = base, check_count("keep", keep)
        self.selection, self.samples = check_count("selection", selection), check_count("samples", samples)
        self.confidence, self.precision = confidence, precision
        self.passes, self.forwards = self.selection, self.selection + self.samples

    def forward(self, x: Tensor) -> Tensor:
        """x: ``(n, channels, height, width)`` or ``(n, d)``; result: ``(n, classes)``."""
        if self.training:
            noise = torch.rand(len(x), self._pixels(x), device=x.device)
            return _logits(self.base, x, smallest(noise, self.keep).unsqueeze(0))
        seen, base = self._always_seen(x), self._voter(x)
        if torch.compiler.is_exporting():  # the loop would be one for this number of rows
            return self._count(base, x, seen.expand(-1, x.shape[0], -1)).to(x.dtype)
        return torch.cat([self._count(base, row, seen) for row in x.split(1)]).to(x.dtype)

    def limit(self, x: Tensor, ball: L0Ball) -> int:  # noqa: ARG002
        """The radius of a row for whose label all samples vote."""
        return max(0, int((self._needed(x) <= self.samples).sum()) - 1)

    def prepare(self, x: Tensor, ball: L0Ball, draws: Draws, batch: int | None) -> Preparation:
        check_votes(self, x)
        if ball.unit != "pixel" and x.ndim == 4 and x.shape[1] > 1:
            raise ValueError(f'unit must be "pixel", of which a copy sees all channels, got "{ball.unit}"')
        copies = check_count("batch", (16384 if x.is_cuda else 512) if batch is None else batch)
        needed = self._needed(x)
        first = torch.zeros(1, dtype=torch.int64, device=x.device)
        with torch.no_grad():
            classes = self._votes(x[:1], draws, first, range(1), copies).shape[1]

        def radii(at: Tensor, y: Tensor) -> Tensor:
            found = torch.full_like(at, -1)
            right = (self._votes(x[at], draws, at, range(self.selection), copies).argmax(1) == y).nonzero().squeeze(1)
            if len(right):
                estimate = range(self.selection, self.selection + self.samples)
                votes = self._votes(x[at[right]], draws, at[right], estimate, copies)
                count = votes.gather(1, y[right].unsqueeze(1)).squeeze(1)
                found[right] = torch.searchsorted(needed, count, right=True) - 1
            return found

        return Preparation(classes, copies, radii)

    def _needed(self, x: Tensor) -> Tensor:
        return votes_needed(self._pixels(x), self.keep, self.samples, self.confidence).to(x.device)

    def _votes(self, x: Tensor, draws: Draws, at: Tensor, queries: range, batch: int) -> Tensor:
        """How many of a row's copies each class gets: ``(n, classes)``.  at: positions of the rows in ``draws``."""
        step, base = max(1, batch // len(x)), self._voter(x)
        parts = [queries[start : start + step] for start in range(0, len(queries), step)]
        return reduce(torch.add, (self._count(base, x, self._seen(x, draws, at, part)) for part in parts))

    def _voter(self, x: Tensor) -> nn.Module:
        # Folded on a GPU alone, where it is faster: elsewhere the answer is that of the very base.
        return folded(self.base) if x.is_cuda else self.base

    def _seen(self, x: Tensor, draws: Draws, at: Tensor, queries: range) -> Tensor:
        """Which pixels each copy sees: ``(copies, len(at), units)`` bool."""
        moments = torch.arange(queries[0], queries[-1] + 1, device=x.device).unsqueeze(1)
        return smallest(draws.bits(at, moments, self._pixels(x)), self.keep)

    def _always_seen(self, x: Tensor) -> Tensor:
        """Which pixels the copies see whose votes are the answer, kept for the next call: ``(selection, 1, units)``."""
        key = (self.selection, self.keep, self._pixels(x), x.device)
        if self._kept is None or self._kept[0] != key:
            with torch.inference_mode(False):
                alike = torch.zeros(1, dtype=torch.int64, device=x.device)
                self._kept = key, self._seen(x, Draws(None, alike), alike, range(self.selection))
        return self._kept[1]

    def _count(self, base: nn.Module, x: Tensor, seen: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            logits = _logits(base, x, seen)
        return tally(logits.argmax(1).view(len(seen), -1), logits.shape[1])

    def _pixels(self, x: Tensor) -> int:
        units = x.shape[2:].numel() if x.ndim == 4 else x.shape[1]
        if self.keep > units:
            raise ValueError(f"keep must be at most the number of pixels, got keep={self.keep} with {units} pixels")
        return units

    def extra_repr(self) -> str:
        names = ("keep", "selection", "samples", "confidence", "precision")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)


def changed_share(units: int, keep: int, budget: int) -> Fraction:
    """The share of the sets of ``keep`` units that meet ``budget`` given ones."""
    return 1 - Fraction(math.comb(units - budget, keep), math.comb(units, keep))


def votes_needed(units: int, keep: int, samples: int, confidence: float) -> Tensor:
    """The least count of votes that certifies 0, 1, 2, ... changed units: ``(budgets,)`` int64, never falling.

    With count of samples votes for a class, the lower bound of Clopper and Pearson on its probability exceeds
    ``q = 1/2 + delta`` if and only if ``P(Binomial(samples, q) >= count) < 1 - confidence``. The budgets end where q
    reaches 1, which no count exceeds; a count of samples + 1 cannot be had.
    """
    successes = torch.arange(samples + 1, dtype=torch.float64)
    whole = torch.tensor(samples + 1.0, dtype=torch.float64)
    ways = torch.lgamma(whole) - torch.lgamma(successes + 1) - torch.lgamma(whole - successes)
    needed = []
    for budget in range(units + 1):
        q = float(Fraction(1, 2) + changed_share(units, keep, budget))
        if q >= 1:
            break
        chances = (ways + successes * math.log(q) + (samples - successes) * math.log1p(-q)).exp()
        tails = chances.flip(0).cumsum(0)  # from all successes downwards: small terms first
        # A tail summed in float64 errs by less than 1e-10 of itself at 10,000 samples.
        needed.append(samples + 1 - int((tails * (1 + 1e-9) < 1 - confidence).sum()))
    return torch.tensor(needed)


def smallest(numbers: Tensor, count: int) -> Tensor:
    """Where the ``count`` smallest of the last dimension are: bool, the shape of ``numbers``."""
    places = numbers.topk(count, largest=False, sorted=False).indices
    return torch.zeros_like(numbers, dtype=torch.bool).scatter_(-1, places, True)


def _logits(base: nn.Module, x: Tensor, seen: Tensor) -> Tensor:
    """``(copies * n, classes)``, copy by copy.  seen: ``(copies, n, units)`` bool."""
    channels = torch.cat(((1 + x) / 2, (1 - x) / 2), 1)
    seen = seen.unflatten(2, (1, *channels.shape[2:])) if channels.ndim == 4 else seen.repeat(1, 1, 2)
    # Chosen, not multiplied: a hidden infinity would come through as NaN.
    logits: Tensor = base(torch.where(seen, channels, 0.0).flatten(0, 1))
    return logits
