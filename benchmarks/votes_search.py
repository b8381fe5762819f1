"""Try partitions, part networks and trainings of votes of parts; measure each on the validation split.

python benchmarks/votes_search.py --device cuda --workers 3 --seconds 60 --out results/votes-search.json
python benchmarks/votes_search.py --device cuda --only "16 parts + 128 parts, sheared" --seconds 20
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast, get_args

import torch
from torch import Tensor, nn

from ell0 import data
from ell0.certify import Partition, PartVote, Rule, VoteObjective, rows, rules
from ell0.common import check_count
from ell0.part_networks import Members
from ell0.precision import dense_products
from ell0.recipe.models import PART_NETWORKS
from ell0.results import Measurement, Results
from ell0.train import TrainConfig, fit
from ell0.train.config import Augment
from measure import Run, add_counts, main, options

DATA = "cifar10"
BUDGETS = (0, 1, 2, 4, 8, 10, 13, 16, 20)
TAUS = (0.125, 0.25, 0.5, 1.0, 2.0)
TRAINING = TrainConfig(
    batch=512, rates=(0.0015,), schedule="cosine", warm_up=0.05, optimizer="adamw", weight_decay=0.05, ema=0.998,
    precision="bf16",
)  # fmt: skip
PROBED = 20  # steps of an epoch that is timed
MOST = 64  # changes that are looked at


@dataclass(frozen=True)
class Grid:
    """Sub-grids of blocks of pixels, whose row p moves to the left by p * shear."""

    strides: tuple[int, int]
    block: tuple[int, int] = (1, 1)
    shear: int = 0

    def partition(self, shape: Sequence[int]) -> Partition:
        _, height, width = shape
        (a, b), (h, w) = self.strides, self.block
        row, column = torch.arange(height).view(-1, 1) // h, torch.arange(width) // w
        owner = (row % a * b + (column + self.shear * (row // a)) % b).flatten()
        # All pixels of a part, row by row: a picture.
        return Partition(tuple(shape), owner.argsort(stable=True).view(a * b, height // a, width // b))


@dataclass(frozen=True)
class Candidate:
    """grids: several are families of parts that all vote.  budget: of the training.  more: of `VoteObjective`.

    epochs: None: as many as fit into share times the seconds that a candidate is given.
    members: networks that learn apart, batch rows of a step each.
    """

    grids: tuple[Grid, ...]
    network: str
    size: dict[str, Any]
    budget: int
    mirrored: bool = True
    epochs: int | None = None
    share: float = 1.0
    members: int = 1
    batch: int = TRAINING.batch
    rate: float = TRAINING.rates[0]
    augment: Augment = "crop-flip-reflect"
    more: dict[str, Any] = field(default_factory=dict)

    def on(self, *grids: Grid, **settings: Any) -> Candidate:
        return replace(self, grids=grids or self.grids, **settings)


def few(*strides: tuple[int, int]) -> tuple[Grid, ...]:
    return tuple(map(Grid, strides))


_WIDE, _TOKENS = {"widths": (160,), "blocks": 4}, {"width": 192, "depth": 4, "dropout": 0.1}
_16, _32 = Candidate(few((4, 4)), "cnn", _WIDE, 4, share=1.6), Candidate(few((4, 8)), "cnn", _WIDE, 8, share=1.3)
_64 = Candidate(few((8, 8)), "mlp", {"width": 1536, "depth": 4, "dropout": 0.3}, 12, share=1.3)
_128 = Candidate(few((8, 16)), "mlp", {"width": 1024, "depth": 4, "dropout": 0.2}, 20)
_SMALL = {"widths": (192,), "blocks": 3, "pool": "learned"}
_STAGES = {"widths": (128, 256), "blocks": 2, "pool": "learned"}
_PAIRS, _SHEARED = Grid((16, 8), block=(1, 2)), Grid((8, 16), shear=8)
_ONE_STAGE = {**_WIDE, "pool": "learned"}
_TANH, _SMOOTH = {"votes": "tanh", "tau": 2.0}, {"votes": "tanh", "tau": 4.0}
TRIED = {
    "128 parts": _128,
    "64 parts": _64,
    "16 parts": _16,
    "128 parts, colours": _128.on(augment="warp-colour"),
    "64 parts, colours": _64.on(augment="warp-colour"),
    "16 parts, colours": _16.on(augment="warp-colour"),
    "128 parts, pairs of pixels": _128.on(_PAIRS),
    "128 parts, three families": _128.on(Grid((8, 16)), _SHEARED, _PAIRS, share=2.0),
    "64 parts, transformer": _64.on(network="transformer", size=_TOKENS),
    "64 parts, convolutions": _64.on(network="cnn", size=_SMALL),
    "128 parts, sheared": _128.on(_SHEARED),
    "32 parts": _32,
    "16 parts, 4 seen, two stages": _16.on(size=_STAGES, more={"seen": 4}),
    "64 parts, 8 seen, convolutions": _64.on(network="cnn", size=_SMALL, more={"seen": 8}),
    "128 parts, 16 seen, tanh": _128.on(more={"seen": 16, **_TANH}),
    "128 parts, 16 seen": _128.on(more={"seen": 16}),
}
_16_SEEN = TRIED["16 parts, 4 seen, two stages"].on(epochs=50)
_64_SEEN = TRIED["64 parts, 8 seen, convolutions"].on(epochs=50)
_128_SEEN = TRIED["128 parts, 16 seen, tanh"].on(epochs=55, more={"seen": 16, **_SMOOTH})
_256_SEEN = _128_SEEN.on(Grid((16, 16)), budget=40)
TRIED |= {
    "256 parts, 16 seen, three members": _256_SEEN.on(epochs=165, members=3),
    "128 parts, 16 seen, three members": _128_SEEN.on(epochs=165, members=3),
    "16 parts, 4 seen, short": _16_SEEN,
    "16 parts, 4 seen, short, colours": _16_SEEN.on(augment="warp-colour"),
    "64 parts, 8 seen, short": _64_SEEN,
    "64 parts, 8 seen, short, colours": _64_SEEN.on(augment="warp-colour"),
    "128 parts, 16 seen, short, colours": _128_SEEN.on(augment="warp-colour"),
    "128 parts, 16 seen, short, convolutions": _128_SEEN.on(network="cnn", size=_SMALL),
}
_16_COLOURS = _16_SEEN.on(augment="warp-colour")
_64_COLOURS = _64_SEEN.on(augment="warp-colour")
TRIED |= {
    "16 parts, all seen, colours": _16_COLOURS.on(epochs=25, more={}),
    "16 parts, 8 seen, colours, one stage": _16_COLOURS.on(epochs=30, size=_ONE_STAGE, more={"seen": 8}),
    "16 parts, 8 seen, colours": _16_COLOURS.on(epochs=40, more={"seen": 8}),
    "16 parts, 4 seen, colours, tanh": _16_COLOURS.on(more={"seen": 4, **_SMOOTH}),
    "64 parts, 16 seen, colours": _64_COLOURS.on(epochs=35, more={"seen": 16}),
    "64 parts, 8 seen, colours, tanh": _64_COLOURS.on(more={"seen": 8, **_SMOOTH}),
}
_16_TANH = TRIED["16 parts, 4 seen, colours, tanh"]
_SMALL_STEPS = {
    "16 parts, 4 seen": _16_TANH,
    "16 parts, 4 seen, wide": _16_TANH.on(size={**_STAGES, "widths": (192, 384)}),
    "64 parts, 8 seen": TRIED["64 parts, 8 seen, colours, tanh"],
    "128 parts, 8 seen": _128_SEEN.on(network="cnn", size=_SMALL, augment="warp-colour", more={"seen": 8, **_SMOOTH}),
}
TRIED |= {
    f"{name}, rate {rate}": each.on(epochs=40, batch=256, rate=rate)
    for name, each in _SMALL_STEPS.items()
    for rate in (0.0015, 0.003, 0.006, 0.012)
}


class Families(nn.Module):
    """Votes on the same image; a pixel lies in one part of each."""

    def __init__(self, votes: Iterable[PartVote]) -> None:
        super().__init__()
        self.votes = nn.ModuleList(votes)

    def forward(self, x: Tensor) -> Tensor:
        return self.part_logits(x).mean(1)

    def part_logits(self, x: Tensor) -> Tensor:
        return torch.cat([cast(PartVote, each).part_logits(x) for each in self.votes], 1)


def radii(logits: Tensor, y: Tensor, owners: Sequence[Tensor], tau: float) -> Tensor:
    """Radii of the duel of families: D(y, c) less the costs of the m dearest pixels, at most those of as many parts.

    A pixel costs the sum of 1 + d over the parts that hold it. owners: the part of each pixel, of each family.
    """
    said = rules.leads(logits, y, "duel", tau, 0.0).transpose(1, 2)  # (n, classes, parts)
    most, pixels, parts = min(MOST, len(owners[0])), torch.zeros(()), torch.zeros(())
    for owner, costs in zip(owners, (1 + said).split([int(owner.max()) + 1 for owner in owners], 2), strict=True):
        pixels = pixels.to(said) + costs.index_select(2, owner)
        spread = costs.new_zeros(*costs.shape[:2], most)
        spread[..., : costs.shape[2]] = costs.sort(2, descending=True).values[..., :most]
        parts = parts.to(said) + spread.cumsum(2)
    dearest = torch.minimum(pixels.topk(most, 2).values.cumsum(2), parts)
    held = (said.sum(2, keepdim=True) - dearest > 0).long().cumprod(2).sum(2)
    right = rules.scores(logits, "duel", tau).argmax(1) == y
    return torch.where(right, held.scatter(1, y.unsqueeze(1), most).amin(1), -1)


def benchmark(
    run: Run, *, only: str = "", seconds: int = 60, limit: int = 86400, workers: int = 1, images: int | None = None
) -> Results:
    """Certified accuracy of each candidate on validation images, by the tau that proves most at its budget.

    Nothing is allowed for rounding. Other rules on the same logits are measured for candidates without a comma.

    Args:
        only: names of candidates, with " + " between them.
        seconds: of each training that does not name its epochs.
        limit: seconds after which no candidate begins.
        workers: processes that share the candidates.  images: of each split, at most.
    """
    for name, count in (("seconds", seconds), ("limit", limit), ("workers", workers), ("images", images or 1)):
        check_count(name, count)
    names = [each.strip() for each in only.split("+")] if only else list(TRIED)
    if unknown := [name for name in names if name not in TRIED]:
        raise ValueError(f"only must name candidates ({'; '.join(TRIED)}), got {unknown[0]!r}")
    results = Results.here("votes-search", run.command, seeds=[run.seed], device=run.place)
    given = replace(run, say=print) if workers > 1 else run
    work = partial(tried, given, seconds=seconds, until=time.time() + limit, images=images)
    found: dict[str, list[Measurement]] = {}
    if workers == 1:
        found = {name: work(name) for name in names}
    else:
        with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
            futures: dict[Future[list[Measurement]], str] = {pool.submit(work, name): name for name in names}
            for done in as_completed(futures):
                found[futures[done]] = done.result()
    results.rows = [row for name in names for row in found[name]]
    return results


def tried(run: Run, name: str, *, seconds: int, until: float, images: int | None) -> list[Measurement]:
    """Trains a candidate and measures it; nothing, and a line, if it fails or it is too late: the others go on."""
    candidate = TRIED[name]
    if time.time() > until:
        run.say(f"{name} is left out: the time is over")
        return []
    try:
        (x, y), (x_val, y_val) = (
            [part[:images].to(run.place) for part in data.load(DATA, split, run.root)]
            for split in ("train", "validation")
        )
        model, owners = built(candidate, tuple(x.shape[1:]), int(y.max()) + 1, run)
        objective = VoteObjective(candidate.budget * len(owners), **candidate.more)
        batch = min(candidate.batch * candidate.members, len(x))
        config = replace(TRAINING, seed=run.seed, batch=batch, rates=(candidate.rate,), augment=candidate.augment)
        epochs = candidate.epochs
        if epochs is None:
            some = min(len(x), PROBED * config.batch)
            probe = fit(deepcopy(model), (x[:some], y[:some]), replace(config, epochs=2), objective=objective)
            epochs = max(2, int(candidate.share * seconds / (probe.epochs[-1].seconds * len(x) / some)))
        training = fit(model, (x, y), replace(config, epochs=epochs), objective=objective)
        with torch.no_grad(), dense_products(tf32=True):
            logits = torch.cat([model.eval().part_logits(part) for part in x_val.split(500)]).double()
    except (RuntimeError, ValueError) as error:
        run.say(f"{name} failed: {error}")
        return []
    what = {"classifier": name, "split": "validation", "data": DATA, "unit": "pixel", "parts": logits.shape[1]}
    what |= {"network": candidate.network, "trained_for": candidate.budget}
    by_tau = {tau: radii(logits, y_val, owners, tau) for tau in TAUS}
    tau = max(TAUS, key=lambda each: int((by_tau[each] >= candidate.budget).sum()))
    last = training.epochs[-1]
    beside = {"epochs": epochs, "epoch_seconds": training.seconds / epochs, "train_accuracy": last.train_accuracy}
    found = rows(by_tau[tau], BUDGETS, **what, tau=tau, beside=beside)
    if "," not in name and len(owners) == 1:
        reached = torch.ones(logits.shape[:2], dtype=torch.bool, device=x.device)
        for rule in get_args(Rule)[1:]:
            right = rules.scores(logits, rule, 1.0).argmax(1) == y_val
            others = torch.where(right, rules.radii(logits, y_val, reached, rule, 1.0, 0.0, 0.0), -1)
            found += rows(others, BUDGETS, **what, method=rule)
    run.say(
        f"{name}: {epochs} epochs, bound on the training rows {last.train_accuracy:.3g}, tau {tau:g}, "
        + ", ".join(f"{row.value:.3g}" for row in found[: len(BUDGETS) + 1])
    )
    return found


def built(
    candidate: Candidate, shape: tuple[int, ...], classes: int, run: Run
) -> tuple[PartVote | Families, list[Tensor]]:
    """The votes of a candidate, and which part of each family holds each pixel."""
    torch.manual_seed(run.seed)
    partitions, make = [grid.partition(shape) for grid in candidate.grids], PART_NETWORKS[candidate.network]
    votes = []
    for each in partitions:
        members = range(candidate.members)
        networks = [make(each.part_shape, each.parts, classes=classes, **candidate.size) for _ in members]
        votes.append(PartVote(Members(networks), each, mirrored=candidate.mirrored))
    model = votes[0] if len(votes) == 1 else Families(votes)
    return model.to(run.place), [each.owner.to(run.place) for each in partitions]


if __name__ == "__main__":
    parser = options(__file__, __doc__)
    parser.add_argument("--only", help='names of candidates, with " + " between them; default: all')
    add_counts(
        parser, seconds="seconds of each training (default: 60)", workers="processes on the device (default: 1)",
        limit="seconds after which no candidate begins (default: a day)",
        images="images of each split to use (default: all)",
    )  # fmt: skip
    sys.exit(main(benchmark, parser))
