"""Models whose answer for a row does not depend on the rest of the batch, and the optimum on linear ones."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Generator, Tensor, nn

from ell0 import L0Ball
from ell0.certify import Partition, PartVote, Rule


def random(*shape: int, seed: int) -> Tensor:
    """Standard normal, float64."""
    return torch.randn(shape, generator=Generator().manual_seed(seed), dtype=torch.float64)


class Sums(nn.Module):
    """A linear layer that adds up each row by itself in float64: logits ``(n, out)`` of x ``(n, ...)``."""

    def __init__(self, features: int, out: int, seed: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(random(out, features, seed=seed) / features**0.5)
        self.bias = nn.Parameter(random(out, seed=seed + 1) / 10)

    def forward(self, x: Tensor) -> Tensor:
        return (x.flatten(1).double().unsqueeze(1) * self.weight).sum(2) + self.bias


def network(features: int, classes: int = 3, seed: int = 0) -> nn.Sequential:
    """Two layers with modules that have a mode and buffers between them."""
    return nn.Sequential(
        Sums(features, 8, seed), nn.BatchNorm1d(8).double(), nn.Tanh(), nn.Dropout(0.5), Sums(8, classes, seed + 2)
    ).eval()


class PartSums(nn.Module):
    """A network of parts of a vote, of this many numbers."""

    def __init__(self, parts: int, numbers: int, classes: int = 3, seed: int = 0) -> None:
        super().__init__()
        self.first, self.last = Sums(numbers + parts, 6, seed), Sums(6, classes, seed + 2)
        self.register_buffer("places", 2 * torch.eye(parts, dtype=torch.float64))

    def forward(self, parts: Tensor, place: Tensor) -> Tensor:
        seen = torch.cat((parts.flatten(1).double(), self.get_buffer("places")[place]), 1)
        logits: Tensor = 4 * self.last(torch.tanh(3 * self.first(seen)))
        return logits


def vote(shape: Sequence[int], parts: int, classes: int = 3, seed: int = 0, rule: Rule = "duel") -> PartVote:
    partition = Partition.dealt(shape, parts)
    numbers = partition.index[0].numel() * (shape[0] if len(shape) == 3 else 1)
    return PartVote(PartSums(parts, numbers, classes, seed), partition, rule=rule).eval()


class Linear(Protocol):
    """z = W x + b over all numbers of x."""

    @property
    def weight(self) -> Tensor: ...

    def __call__(self, x: Tensor, /) -> Tensor: ...


def margins(logits: Tensor, labels: Tensor, *, targeted: bool = False) -> Tensor:
    """z_y - max of the other logits, or the max of the others - z_target: ``(n,)``."""
    own = logits.gather(1, labels.unsqueeze(1)).squeeze(1)
    rest = logits.masked_fill(nn.functional.one_hot(labels, logits.shape[1]).bool(), -torch.inf).amax(1)
    return rest - own if targeted else own - rest


def optimum(model: Linear, x: Tensor, y: Tensor, ball: L0Ball) -> Tensor:
    """Fewest units that make a linear model err, ``(n,)`` int64; one more than there are units where none do.

    For each wrong class c, with v = w_c - w_y, a number can add max(v (low - x), v (high - x), 0) to z_c - z_y, a unit
    the sum over its numbers; the best units are taken until the margin is made up for.
    """
    low, high, mutable = (t.expand_as(x) for t in ball.box(x))
    logits = model(x).detach().double()
    counts = []
    for wrong in range(logits.shape[1]):
        slope = (model.weight[wrong] - model.weight[y]).detach().double().view(x.shape)
        gain = torch.maximum(slope * (low - x), slope * (high - x)).clamp(min=0).masked_fill(~mutable, 0)
        gain = (gain.sum(1) if ball.unit == "pixel" else gain).flatten(1)
        reached = gain.sort(1, descending=True).values.cumsum(1)
        lead = (logits.gather(1, y.unsqueeze(1)).squeeze(1) - logits[:, wrong]).unsqueeze(1)
        counts.append(torch.where(y == wrong, reached.shape[1], (reached <= lead).sum(1)) + 1)
    return torch.where(logits.argmax(1) == y, torch.stack(counts).amin(0), 0)
