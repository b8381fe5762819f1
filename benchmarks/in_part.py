"""Try votes whose parts have bounds for changes inside them, between a plain vote and the bound of one network: MNIST.

python benchmarks/in_part.py --threads 1 --out results/votes-in-part.json
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ell0 import data
from ell0.certify import Objective, Partition, radius, rows
from ell0.common import check_count
from ell0.models import mlp
from ell0.nn import InputClamp, InputScale
from ell0.results import Results
from ell0.train import TrainConfig, fit
from measure import Run, add_counts, main, options

BUDGETS, BUDGET = (0, 1, 2, 4, 6, 8, 10, 13, 16), 10
TRIED = (((7, 7), 0, 96), ((7, 7), 2, 96), ((2, 7), 4, 128), ((2, 2), 8, 256))  # strides, changes inside, hidden
MOST = 32  # changes that are looked at
TRAINING = TrainConfig(
    12, 128, (2e-3,), schedule="cosine", warm_up=0.05, optimizer="adam", augment="shift"
)  # fmt: skip


class BoundedParts(nn.Module):
    """A network of one hidden layer for each part of a clamped image; intervals bound 0 to ``inside`` changes."""

    index: Tensor

    def __init__(self, partition: Partition, inside: int, hidden: int) -> None:
        super().__init__()
        self.register_buffer("index", partition.index.flatten(1), persistent=False)
        (parts, pixels), self.inside = self.index.shape, inside
        self.ends = nn.Sequential(InputClamp(-1.0, -0.8), InputScale(-1.0, -0.8), nn.Flatten())
        self.first = nn.Parameter(torch.randn(parts, pixels, hidden) * pixels**-0.5)
        self.last = nn.Parameter(torch.randn(parts, hidden, 10) * 0.5 * hidden**-0.5)
        self.bias, self.shift = nn.Parameter(torch.zeros(parts, 1, hidden)), nn.Parameter(torch.zeros(parts, 1, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.part_logits(x).mean(1)

    def part_logits(self, x: Tensor) -> Tensor:
        seen = self.ends(x)[:, self.index].transpose(0, 1)
        logits: Tensor = ((seen @ self.first + self.bias).relu() @ self.last + self.shift).transpose(0, 1)
        return logits

    def leads(self, x: Tensor, y: Tensor, *, quick: bool) -> Tensor:
        """Below d_t(y, c) = clip(l_t[y] - l_t[c], -1, 1) with 0, 1, .. changes, then -1: ``(inside + 2, n, T, 10)``.

        A change moves hidden number h by w[p, h] u, where pixel p moves by u; the sum of the largest of them bounds
        several.  quick: whatever the image, for training.
        """
        seen = self.ends(x)[:, self.index].transpose(0, 1)  # (T, n, pixels)
        center, (up, down) = seen @ self.first + self.bias, self._moves(seen, quick)
        pairs = (self.last.unsqueeze(3) - self.last.unsqueeze(2)).flatten(2)  # (T, hidden, y and c)
        gap = (self.shift.unsqueeze(3) - self.shift.unsqueeze(2)).flatten(2)
        picked, found = y.view(1, -1, 1, 1).expand(len(seen), -1, 1, 10), []
        for j in range(self.inside + 1):
            high, low = ((center + up[j]).relu(), (center - down[j]).relu()) if j else (center.relu(),) * 2
            lower = ((high + low) / 2) @ pairs - ((high - low) / 2) @ pairs.abs() + gap
            found.append(lower.unflatten(2, (10, 10)).gather(2, picked).squeeze(2).clamp(-1, 1))
        own = F.one_hot(y, 10).to(center)
        return torch.stack((*found, (own - 1).expand_as(found[0]))).transpose(1, 2)

    def _moves(self, seen: Tensor, quick: bool) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """How far up, and down, 0, 1, .. changes move a hidden number at most."""
        rise, fall = self.first.clamp(min=0), (-self.first).clamp(min=0)
        if quick:
            both = [F.pad(self.first.abs().topk(self.inside, 1).values.cumsum(1), (0, 0, 1, 0))] * 2
            return [up.unsqueeze(1) for up in both[0].unbind(1)], [down.unsqueeze(1) for down in both[1].unbind(1)]
        on, rise, fall = seen.unsqueeze(3), rise.unsqueeze(1), fall.unsqueeze(1)
        effects = rise * (1 - on) + fall * on, rise * on + fall * (1 - on)
        up, down = (F.pad(one.topk(self.inside, 2).values.cumsum(2), (0, 0, 1, 0)).unbind(2) for one in effects)
        return up, down


def increments(leads: Tensor) -> Tensor:
    """Of the least concave function above the costs of 0, 1, .. changes in a part: ``(n, classes, parts * those)``.

    So m changes, however they are shared out among parts, cost at most the sum of the m largest of them.
    """
    costs = (leads[:1] - leads).cummax(0).values
    hull = [costs[0]]
    for j in range(1, len(costs)):
        ends = product(range(j), range(j, len(costs)))
        chords = [costs[a] + (costs[b] - costs[a]) * ((j - a) / (b - a)) for a, b in ends]
        hull.append(torch.stack(chords).amax(0))
    return torch.stack(hull).diff(dim=0).permute(1, 3, 0, 2).flatten(2)


@dataclass(frozen=True)
class InPart:
    """An objective of `fit`: cross-entropy of the parts, which gives way to that of the bound at ``budget`` changes."""

    budget: int
    share: float = 1.0
    bf16: ClassVar[bool] = False

    def at(self, epoch: int, epochs: int) -> InPart:
        share = min(1.0, 2 * epoch / max(1, epochs - 1))
        return replace(self, budget=round(self.budget * share), share=share)

    def check(self, model: nn.Module, x: Tensor, y: Tensor) -> None:
        self(model, x, y)

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        leads = (model := cast(BoundedParts, model)).leads(x, y, quick=True)
        worst = leads[0].sum(1) - increments(leads).topk(self.budget, 2).values.sum(2)
        scores, logits = -16 / leads.shape[2] * worst, model.part_logits(x)
        alone = F.cross_entropy(logits.flatten(0, 1), y.repeat_interleave(logits.shape[1]))
        return scores, self.share * F.cross_entropy(scores, y) + (1 - self.share) * alone


@torch.no_grad()
def radii(model: BoundedParts, x: Tensor, y: Tensor) -> Tensor:
    """Without an allowance for rounding."""
    found = []
    for some, labels in zip(x.double().split(50), y.split(50), strict=True):
        leads = model.leads(some, labels, quick=False)
        costs = increments(leads)
        costs = F.pad(costs, (0, max(0, MOST - costs.shape[2]))).topk(MOST, 2).values.cumsum(2)
        margin = leads[0].sum(1).masked_fill(F.one_hot(labels, 10).bool(), torch.inf)
        held = (margin.unsqueeze(2) - costs > 1e-9).long().cumprod(2).sum(2).amin(1)
        found.append(torch.where(margin.amin(1) > 0, held, -1))
    return torch.cat(found)


def benchmark(run: Run, *, images: int = 10_000, epochs: int = 12) -> Results:
    """Certified accuracy of votes with bounds inside, and of one network by intervals, all trained for 10 changes.

    Args:
        images: of the train split; a fifth as many are certified, of the validation split.
    """
    for name, count in (("images", images), ("epochs", epochs)):
        check_count(name, count)
    results = Results.here("votes-in-part", run.command, seeds=[run.seed], device="cpu")
    train = [part[:images] for part in data.load("mnist", "train", run.root)]
    x, y = (part[: images // 5] for part in data.load("mnist", "validation", run.root))
    config = replace(TRAINING, epochs=epochs, seed=run.seed)
    what = {"split": "validation", "unit": "pixel", "trained_for": BUDGET, "images": images, "epochs": epochs}
    for strides, inside, hidden in TRIED:
        partition = Partition.strides((1, 28, 28), strides)
        run.say(f"{partition.parts} parts, {inside} inside")
        torch.manual_seed(run.seed)
        model = BoundedParts(partition, inside, hidden)
        fit(model, (train[0], train[1]), config, objective=InPart(BUDGET))
        found = radii(model.double(), x, y)
        results.rows += rows(found, BUDGETS, **what, classifier="vote", parts=partition.parts, inside=inside)
    run.say("one network")
    torch.manual_seed(run.seed)
    ends = InputClamp(-1.0, -0.8), InputScale(-1.0, -0.8)
    network = nn.Sequential(*ends, *mlp(k=0, hidden=(512,)))
    fit(network, (train[0], train[1]), config, objective=Objective(BUDGET, ramp=0.3, quick=True))
    found = radius(network.eval(), x, y, max_budget=MOST, method="ibp")
    results.rows += rows(found, BUDGETS, **what, classifier="one network")
    return results


if __name__ == "__main__":
    parser = options(__file__, __doc__)
    add_counts(parser, images="images to train on (default: 10,000)", epochs="epochs of training (default: 12)")
    sys.exit(main(benchmark, parser))
