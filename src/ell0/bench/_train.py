"""What training F(k) costs against F(0)."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..attacks.contract import check_count
from ..nn import TruncatedLinear
from ..results import Results
from ..train import PAPER_MNIST
from ..train._step import GraphStepper, Stepper
from ._device import Device, card, check_device
from ._layer import check_seed, load_images, seeded, topk_baseline
from ._timing import Progress, Timing, timer

PAPER = 58.0  # times the epoch of F(0) that an epoch of F(10) takes, in [Beliaev22]
AGREEMENT = 1e-3
QUERIES = 300  # of an attack on the training set, in [Beliaev22]


class Trainer(Stepper):
    """F(k) and a step of its training, as in the paper."""

    def __init__(self, k: int, seed: int, device: torch.device) -> None:
        super().__init__(seeded(k, seed).to(device), PAPER_MNIST)


class Topk(nn.Module):
    """The truncated layer as one writes it without a kernel."""

    def __init__(self, layer: TruncatedLinear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return topk_baseline(x, self.layer.weight, self.layer.bias, self.layer.k, len(x))


def train(
    *,
    device: Device = "cpu",
    steps: int = 64,
    rounds: int = 7,
    batch: int = 256,
    root: Path | None = None,
    require_mnist: bool = False,
    command: str = "ell0 bench train",
    seed: int = 0,
    progress: Progress = lambda _: None,
) -> Results:
    """Times training steps of F(10) against F(0), and epochs of F(0), F(1) and F(10), as `ell0.train.fit` does.

    The images of MNIST (digits drawn at 28 x 28 where it is not found) lie on the device. A step is timed eager and, on
    a GPU, replayed from a CUDA graph, over loops of ``steps`` in turns; an epoch in the faster of these ways, in a new
    random order, without the last batch where that is smaller. Both ways must have the same losses first. On a GPU the
    time of the paper's whole training with the topk baseline is estimated from a few of its steps and forwards.

    Args:
        rounds: of the loops; an epoch is timed in at most three.
        batch: images of a step, at most as many as there are.
        require_mnist: lets nothing stand in for MNIST.
    """
    for argument, value in (("steps", steps), ("rounds", rounds), ("batch", batch)):
        check_count(argument, value)
    check_seed(seed)
    place = check_device(device)
    start = time.perf_counter()
    results = Results.here(f"bench-train-{card(place)}", command, seeds=[seed], device=place)
    name, images, labels = load_images(root, require_mnist)
    if batch > len(images):
        raise ValueError(f"batch must be at most the {len(images)} images of {name}, got {batch}")
    whole = len(images) // batch * batch
    x, y = images[:whole].to(place), labels[:whole].to(place)
    batches = list(zip(x.split(batch), y.split(batch), strict=True))

    def trainer(mode: str, k: int) -> Stepper:
        if mode == "graph":
            return GraphStepper(seeded(k, seed).to(place), PAPER_MNIST, *batches[0])
        return Trainer(k, seed, place)

    def loop(learner: Stepper) -> None:
        for i in range(steps):
            learner.step(*batches[i % len(batches)])

    modes = ("eager", "graph") if place.type == "cuda" else ("eager",)
    what: dict[str, Any] = {"data": name, "batch": batch}
    if len(modes) > 1:
        for k in (0, 1, 10):
            progress(f"the losses of F({k}), eager and from a graph")
            _check_losses(trainer("eager", k), trainer("graph", k), batches, k)
    for mode in modes:
        progress(f"steps of F(0) and F(10), {mode}")
        learners = {f"F({k})": trainer(mode, k) for k in (0, 10)}
        loops = timer(place)({key: partial(loop, learner) for key, learner in learners.items()}, rounds)
        timing = Timing({key: [each / steps for each in seconds] for key, seconds in loops.seconds.items()})
        results.add(
            **timing.ratio("F(10)", "F(0)"), what="step", to="F(0)", unit="x", k=10, mode=mode,
            to_seconds=timing.median("F(0)"), steps=steps, **what,
        )  # fmt: skip
    progress(f"epochs of F(0), F(1) and F(10), {mode}")
    generator = torch.Generator(place).manual_seed(seed)
    timing = timer(place)(
        {f"F({k})": partial(_epoch, trainer(mode, k), x, y, batch, generator) for k in (0, 1, 10)}, min(rounds, 3)
    )
    what |= {"what": "epoch", "mode": mode, "images": whole}
    for k in (0, 1, 10):
        seconds = timing.seconds[f"F({k})"]
        results.add(
            timing.median(f"F({k})"), unit="seconds", k=k, n=len(seconds), low=min(seconds), high=max(seconds), **what
        )
    papers: dict[int, dict[str, float]] = {1: {}, 10: {"paper": PAPER}}
    for k, paper in papers.items():
        results.add(
            **timing.ratio(f"F({k})", "F(0)"), to="F(0)", unit="x", k=k, to_seconds=timing.median("F(0)"), **what,
            **paper,
        )  # fmt: skip
    if place.type == "cuda":
        progress("steps of F(10) with the topk baseline")
        estimate_topk(results, seeded(10, seed).to(place), x, y, batch)
    results.seconds = round(time.perf_counter() - start, 1)
    return results


def estimate_topk(results: Results, model: nn.Sequential, x: Tensor, y: Tensor, batch: int) -> None:
    """Adds how long the paper's training would take if the truncated layer of the model were the topk baseline.

    Its steps and the forwards of its attacks are timed on one batch and multiplied; the rows that the attacks append
    are not counted, so it is an estimate from below.
    """
    layers = [Topk(layer) if isinstance(layer, TruncatedLinear) else layer for layer in model]
    learner = Stepper(nn.Sequential(*layers), PAPER_MNIST)
    part, labels = x[:batch], y[:batch]

    @torch.no_grad()
    def forward() -> None:
        learner.model(part)

    timing = timer(x.device)({"step": partial(learner.step, part, labels), "forward": forward}, 3)
    batches = len(x) / batch
    steps = PAPER_MNIST.epochs * batches * timing.median("step")
    attacks = sum(map(PAPER_MNIST.attacks_before, range(PAPER_MNIST.epochs)))
    queries = attacks * QUERIES * batches * timing.median("forward")
    results.add(
        steps + queries, what="training", mode="topk", unit="seconds", k=10, estimated=True,
        step=timing.median("step"), forward=timing.median("forward"), batch=batch, attack_seconds=queries,
    )  # fmt: skip


def _epoch(learner: Stepper, x: Tensor, y: Tensor, batch: int, generator: torch.Generator) -> None:
    for part in torch.randperm(len(x), generator=generator, device=x.device).split(batch):
        learner.step(x[part], y[part])


def _check_losses(eager: Stepper, other: Stepper, batches: list[tuple[Tensor, Tensor]], k: int) -> None:
    """Raises unless both learn alike from the first three batches."""
    for i in range(3):
        given = batches[i % len(batches)]
        want, got = float(eager.step(*given)), float(other.step(*given))
        if not abs(got - want) <= AGREEMENT:
            raise AssertionError(f"step {i + 1} of F({k}) has the loss {want} {eager.mode} and {got} {other.mode}")
