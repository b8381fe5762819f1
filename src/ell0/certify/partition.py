"""Partition ensemble: small classifiers that see disjoint parts of the input, and a vote [Hammoudeh24].

[Hammoudeh24] Z. Hammoudeh, D. Lowd, "Provable Robustness against a Union of L0 Adversarial Attacks", 2024.
[Rezaei23] K. Rezaei et al., "Run-Off Election: Improved Provable Defense against Data Poisoning Attacks", 2023.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..attacks.draws import Draws
from ..common import check_count
from ..nn import ParallelLinear
from ..nn.layers import check_shape
from ..threat import L0Ball, describe
from .certifier import Certifier, Preparation


class PartitionEnsemble(nn.Module, Certifier):
    """A vote of small ReLU networks, each of which sees a part of the pixels, no two the same one.

    An attacker who changes m pixels, to any value, reaches m parts at most, and moves m votes. The two classes with
    most votes go into a second round, in which every part votes for the one of them with its larger logit (run-off,
    [Rezaei23]). The lowest class wins every tie. A pixel is all channels of a position, or one number of a row.

    In training mode the result is ``(n, classes + 1)``: the mean over parts of their log-probabilities, and the
    logarithm of what is missing to a sum of 1. Its cross-entropy is exactly the mean of those of the parts; the train
    accuracy in the log is too low, as the class that is missing may be the largest. In eval mode it is the votes,
    ``(n, classes)``; those of the second round are counted on top of all of the first.

    Args:
        shape: of one row, ``(channels, height, width)`` or ``(d,)``.
        parts: number of networks, at most the number of pixels; pixel i goes to part ``i % parts``.
        hidden: widths of the hidden layers of each.
    """

    index: Tensor

    def __init__(
        self, shape: Sequence[int], parts: int, *, hidden: Sequence[int] = (128, 128), classes: int = 10
    ) -> None:
        super().__init__()
        self.shape = check_shape("shape", shape)
        if len(self.shape) not in (1, 3):
            raise ValueError(f"shape must be (channels, height, width) or (d,), got {shape!r}")
        channels, units = (self.shape[0], math.prod(self.shape[1:])) if len(self.shape) == 3 else (1, self.shape[0])
        if check_count("parts", parts) > units:
            raise ValueError(f"parts must be at most the number of pixels, got parts={parts} with {units} pixels")
        self.parts = self.passes = self.forwards = parts
        self.classes = check_count("classes", classes, least=2)
        # The pixels of each part, (parts, size); where they run out, one beyond the last.
        dealt = F.pad(torch.arange(units), (0, -units % parts), value=units).view(-1, parts).T
        self.register_buffer("index", dealt.contiguous())
        sizes = (channels * dealt.shape[1], *(check_count("hidden", width) for width in hidden), classes)
        layers: list[nn.Module] = []
        for before, after in pairwise(sizes):
            layers += [ParallelLinear(parts, before, after), nn.ReLU()]
        self.networks = nn.Sequential(*layers[:-1])

    def forward(self, x: Tensor) -> Tensor:
        logits = self.logits(x)
        if not self.training:
            return run_off(logits).to(x.dtype)
        mean = F.log_softmax(logits, 2).mean(0)
        # Where all parts are certain nothing is missing, and the logarithm must stay finite.
        sure = mean.logsumexp(1, keepdim=True).clamp_max(-torch.finfo(mean.dtype).eps)
        return torch.cat((mean, torch.log(-torch.expm1(sure))), 1)

    def logits(self, x: Tensor) -> Tensor:
        """Those of each part: ``(parts, n, classes)``.  x: ``(n, *shape)``."""
        if x.shape[1:] != self.shape:
            raise ValueError(f"x must have shape (n, {', '.join(map(str, self.shape))}), got {describe(x)}")
        units = x.flatten(2) if x.ndim == 4 else x.unsqueeze(1)
        seen = F.pad(units, (0, 1))[:, :, self.index]  # (n, channels, parts, size); the pixel added is 0
        return cast(Tensor, self.networks(seen.permute(2, 0, 1, 3).flatten(2)))

    def limit(self, x: Tensor, ball: L0Ball) -> int:  # noqa: ARG002
        return self.parts

    def prepare(self, x: Tensor, ball: L0Ball, draws: Draws, batch: int | None) -> Preparation:  # noqa: ARG002
        check_votes(self, x, ball)
        self.logits(x[:1])  # raises if x has another shape

        def radii(at: Tensor, y: Tensor) -> Tensor:
            logits = self.logits(x[at])
            return torch.where(run_off(logits).argmax(1) == y, run_off_radius(logits, y), -1)

        return Preparation(self.classes, check_count("batch", 1024 if batch is None else batch), radii)

    def extra_repr(self) -> str:
        return f"shape={self.shape}, parts={self.parts}"


def run_off(logits: Tensor) -> Tensor:
    """The votes ``(n, classes)`` int64, the winner's the most.  logits: ``(parts, n, classes)``."""
    parts, _, classes = logits.shape
    votes = tally(logits.argmax(2), classes)
    # The two classes with most votes, the lowest first at ties.
    final = (votes * classes - torch.arange(classes, device=votes.device)).topk(2).indices
    first = prefers(logits, final[:, 0]).sum(0).gather(1, final[:, 1:])
    return votes.scatter(1, final, parts + torch.cat((first, parts - first), 1))


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


def prefers(logits: Tensor, one: Tensor) -> Tensor:
    """Whether a part puts class ``one`` (n,) of a row above each class, the lowest first at ties, as logits."""
    mine = logits.gather(2, one.expand(len(logits), -1).unsqueeze(2))
    return (mine > logits) | ((mine == logits) & (one.unsqueeze(1) < torch.arange(logits.shape[2], device=one.device)))


def check_votes(model: nn.Module, x: Tensor, ball: L0Ball) -> None:
    """Raises ValueError unless a model that counts votes can certify these rows in units of the ball."""
    if any(module.training for module in model.modules()):
        raise ValueError("model must be in eval mode, and it is in training mode: call model.eval()")
    if not isinstance(x, Tensor) or x.ndim not in (2, 4) or not len(x) or not bool(x.isfinite().all()):
        raise ValueError(f"x must be (n, d) or (n, channels, height, width), finite and n > 0, got {describe(x)}")
    if ball.unit != "pixel" and x.ndim == 4 and x.shape[1] > 1:
        raise ValueError(f'unit must be "pixel", of which a vote sees all channels, got "{ball.unit}"')


def tally(answers: Tensor, classes: int) -> Tensor:
    """How many voters answer each class: ``(n, classes)`` int64.  answers: ``(voters, n)`` int64."""
    votes = torch.zeros(answers.shape[1], classes, dtype=torch.int64, device=answers.device)
    return votes.scatter_add_(1, answers.T, torch.ones_like(answers.T))
