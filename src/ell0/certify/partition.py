"""Partition ensemble: small classifiers that see disjoint parts of the input, and a vote [Hammoudeh24].

[Hammoudeh24] Z. Hammoudeh, D. Lowd, "Provable Robustness against a Union of L0 Adversarial Attacks", 2024.
[Rezaei23] K. Rezaei et al., "Run-Off Election: Improved Provable Defense against Data Poisoning Attacks", 2023.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..common import Progress, Step, check_count, silent
from ..nn.layers import check_shape
from ..threat import L0Ball, describe
from .network_bounds import check_labels
from .votes import check_rows, tally

PixelSplit = Literal["strided", "random"]
VoteRule = Literal["run-off", "plurality"]


class PartitionEnsemble(nn.Module):
    """A vote of small ReLU networks, each of which sees a part of the pixels, no two the same one.

    An attacker who changes m pixels, to any value, reaches m parts at most, and moves m votes. By ``"plurality"`` the
    class with most votes wins     ([Hammoudeh24]); by ``"run-off"`` the two with most votes go into a second round, in
    which every part votes for the one of them with its larger logit     ([Rezaei23]). The lowest class wins every tie.
    A pixel is all channels of a position, or one number of a row.

    In training mode the result is ``(n, classes + 1)``: the mean over parts of their log-probabilities, and the
    logarithm of what is missing to a sum of 1. Its cross-entropy is exactly the mean of those of the parts, so that
    `ell0.train.fit` trains each part as if it were alone; the accuracy that fit reports of its own rows is too low, as
    the class that is missing may be the largest. In eval mode it is the votes, ``(n, classes)``; those of the second
    round are counted on top of all of the first.

    Args:
        shape: of one row, ``(channels, height, width)`` or ``(d,)``.
        parts: number of networks, at most the number of pixels.
        hidden: widths of the hidden layers of each.
        split: pixel i goes to part ``i % parts``; ``"random"``: the pixels are shuffled first, by ``generator``.
        rule: who wins; nothing that is trained depends on it.
    """

    index: Tensor
    confidence: None = None

    def __init__(
        self,
        shape: Sequence[int],
        parts: int,
        *,
        hidden: Sequence[int] = (128, 128),
        classes: int = 10,
        split: PixelSplit = "strided",
        rule: VoteRule = "run-off",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.shape = check_shape("shape", shape)
        if len(self.shape) not in (1, 3):
            raise ValueError(f"shape must be (channels, height, width) or (d,), got {shape!r}")
        for name, kind, value in (("split", PixelSplit, split), ("rule", VoteRule, rule)):
            if value not in get_args(kind):
                raise ValueError(f"{name} must be one of {', '.join(map(repr, get_args(kind)))}, got {value!r}")
        check_count("classes", classes, least=2)
        check_count("parts", parts)
        for width in hidden:
            check_count("hidden", width)
        channels, units = (self.shape[0], math.prod(self.shape[1:])) if len(self.shape) == 3 else (1, self.shape[0])
        if parts > units:
            raise ValueError(f"parts must be at most the number of pixels, got parts={parts} with {units} pixels")
        self.parts, self.classes, self.split, self.rule = parts, classes, split, rule
        self.register_buffer("index", _dealt(units, parts, split, generator))
        sizes = (channels * self.index.shape[1], *hidden, classes)
        layers: list[nn.Module] = []
        for before, after in pairwise(sizes):
            layers += [ParallelLinear(parts, before, after), nn.ReLU()]
        self.networks = nn.Sequential(*layers[:-1])

    @property
    def forwards(self) -> int:
        """Forward passes of a small network for one certified answer."""
        return self.parts

    def forward(self, x: Tensor) -> Tensor:
        """x: ``(n, *shape)``; result: ``(n, classes)``, in training mode ``(n, classes + 1)``."""
        logits = self.logits(x)
        if self.training:
            mean = F.log_softmax(logits, 2).mean(0)
            # Where all parts are certain nothing is missing, and the logarithm must stay finite.
            sure = mean.logsumexp(1, keepdim=True).clamp_max(-torch.finfo(mean.dtype).eps)
            return torch.cat((mean, torch.log(-torch.expm1(sure))), 1)
        return self._votes(logits).to(x.dtype)

    def logits(self, x: Tensor) -> Tensor:
        """Those of each part: ``(parts, n, classes)``.  x: ``(n, *shape)``."""
        if x.shape[1:] != self.shape:
            raise ValueError(f"x must have shape (n, {', '.join(map(str, self.shape))}), got {describe(x)}")
        units = x.flatten(2) if x.ndim == 4 else x.unsqueeze(1)
        seen = F.pad(units, (0, 1))[:, :, self.index]  # (n, channels, parts, size); the pixel added is 0
        logits: Tensor = self.networks(seen.permute(2, 0, 1, 3).flatten(2))
        return logits

    def check(self, x: Tensor, ball: L0Ball) -> None:
        """Raises ValueError if these rows cannot be certified, counted in units of the ball."""
        check_rows(self, x, ball)
        self.logits(x[:1])

    def limit(self, x: Tensor, ball: L0Ball | None = None) -> int:  # noqa: ARG002
        """No row is certified for more changes than there are parts."""
        return self.parts

    def radius(
        self,
        x: Tensor,
        y: Tensor,
        ball: L0Ball | None = None,
        *,
        max_budget: int | None = None,
        rows: Tensor | None = None,  # noqa: ARG002
        generator: torch.Generator | None = None,  # noqa: ARG002
        batch: int | None = None,
        progress: Progress = silent,
    ) -> Tensor:
        """The certified radius of each row: pixels that may change to any value while the answer stays y.

        Result ``(n,)`` int64, -1 where the answer to x itself is another one. Nothing is drawn: rows and generator are
        not used.

        Args:
            ball: its unit must be "pixel" for images with several channels; the radius holds for every box.
            max_budget: the largest radius given.  batch: rows at a time, 1,024 by default.
        """
        check_rows(self, x, ball)
        check_labels(x, y, self.classes)
        batch = check_count("batch", 1024 if batch is None else batch)
        found: list[Tensor] = []
        with torch.no_grad():
            for some, labels in zip(x.split(batch), y.split(batch), strict=True):
                logits = self.logits(some)
                right = self._votes(logits).argmax(1) == labels
                found.append(torch.where(right, RADIUS[self.rule](logits, labels), -1))
                progress(Step("rows certified", sum(map(len, found)), len(x)))
        return torch.cat(found).clamp(max=self.parts if max_budget is None else max_budget)

    def _votes(self, logits: Tensor) -> Tensor:
        """``(n, classes)`` int64, the winner's the most.  logits: ``(parts, n, classes)``."""
        votes = tally(logits.argmax(2), self.classes)
        if self.rule == "plurality":
            return votes
        final = _finalists(votes)
        first = prefers(logits, final[:, 0]).sum(0).gather(1, final[:, 1:])
        return votes.scatter(1, final, self.parts + torch.cat((first, self.parts - first), 1))

    def extra_repr(self) -> str:
        return f"shape={self.shape}, parts={self.parts}, split={self.split!r}, rule={self.rule!r}"


class ParallelLinear(nn.Module):
    """One ``nn.Linear`` for each part, in one product:  ``out[p] = x[p] @ weight[p] + bias[p]``.

    Initialised as ``nn.Linear`` is.
    """

    def __init__(self, parts: int, in_features: int, out_features: int) -> None:
        super().__init__()
        bound = in_features**-0.5
        self.weight = nn.Parameter(torch.empty(parts, in_features, out_features).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(parts, 1, out_features).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        """x: ``(parts, n, in_features)``; result: ``(parts, n, out_features)``."""
        return torch.baddbmm(self.bias, x, self.weight)

    def extra_repr(self) -> str:
        parts, in_features, out_features = self.weight.shape
        return f"parts={parts}, in_features={in_features}, out_features={out_features}"


def plurality_radius(logits: Tensor, y: Tensor) -> Tensor:
    """Parts that may answer anything while y, now the winner, keeps most votes: ``(n,)`` int64.

        min over c != y of floor((votes_y - votes_c - [c < y]) / 2)

    A part that goes over from y to c narrows the gap by 2, so the radius is exact if parts can be made to answer
    anything.  logits: ``(parts, n, classes)``.  y: ``(n,)``.
    """
    parts, _, classes = logits.shape
    votes, order = tally(logits.argmax(2), classes), torch.arange(classes, device=y.device)
    lasts = (votes.gather(1, y.unsqueeze(1)) - votes - (order < y.unsqueeze(1)).long()) // 2
    return lasts.masked_fill(order == y.unsqueeze(1), parts).amin(1)


def run_off_radius(logits: Tensor, y: Tensor) -> Tensor:
    """Parts that may answer anything while y, now the winner of the run-off, stays it: ``(n,)`` int64.

    The answer changes in two ways only     ([Rezaei23]):
        1. c wins the second round against y, for which c must have passed every third class in the first;
        2. two classes have passed y in the first. A part that goes over from y to one of them narrows the gap to it by
           2 and the gap to the other by 1, so this takes max(ceil(a / 2), ceil(b / 2), ceil((a + b) / 3)) parts for
           gaps a and b.
    logits: ``(parts, n, classes)``.  y: ``(n,)``.
    """
    parts, _, classes = logits.shape
    votes, order = tally(logits.argmax(2), classes), torch.arange(classes, device=y.device)
    own, same = order == y.unsqueeze(1), torch.eye(classes, dtype=torch.bool, device=y.device)

    duel = (2 * prefers(logits, y).sum(0) - parts - (order < y.unsqueeze(1)).long()) // 2
    # [row, b, c]: how long class b stays ahead of c in the first round.
    stays = (votes.unsqueeze(2) - votes.unsqueeze(1) - (order < order.unsqueeze(1)).long()) // 2
    third = stays.masked_fill(own.unsqueeze(2) | same, -parts).amax(1)
    beaten = torch.maximum(duel, third).masked_fill(own, parts).amin(1)

    gaps = votes.gather(1, y.unsqueeze(1)) - votes + (y.unsqueeze(1) < order).long()
    gaps = gaps.masked_fill(own, 3 * parts)
    one, other = gaps.unsqueeze(2), gaps.unsqueeze(1)
    takes = torch.maximum(-(-torch.maximum(one, other) // 2), -(-(one + other) // 3))
    passed = takes.masked_fill(same, 2 * parts).flatten(1).amin(1) - 1
    return torch.minimum(beaten, passed)


RADIUS: dict[VoteRule, Callable[[Tensor, Tensor], Tensor]] = {"run-off": run_off_radius, "plurality": plurality_radius}


def prefers(logits: Tensor, one: Tensor) -> Tensor:
    """Whether a part puts class ``one`` of a row above each class, the lowest first at ties: ``(parts, n, classes)``.

    logits: ``(parts, n, classes)``.  one: ``(n,)``.
    """
    mine = logits.gather(2, one.expand(len(logits), -1).unsqueeze(2))
    return (mine > logits) | ((mine == logits) & (one.unsqueeze(1) < torch.arange(logits.shape[2], device=one.device)))


def _finalists(votes: Tensor) -> Tensor:
    """The two classes with most votes, the lowest first at ties: ``(n, 2)``.  votes: ``(n, classes)`` int64."""
    classes = votes.shape[1]
    return (votes * classes - torch.arange(classes, device=votes.device)).topk(2).indices


def _dealt(units: int, parts: int, split: PixelSplit, generator: torch.Generator | None) -> Tensor:
    """The units that each part sees: ``(parts, size)`` int64; where units run out, one beyond the last."""
    order = torch.arange(units)
    if split == "random":
        order = torch.randperm(units, generator=torch.Generator().manual_seed(0) if generator is None else generator)
    return F.pad(order, (0, -units % parts), value=units).view(-1, parts).T.contiguous()
