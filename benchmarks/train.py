"""Time training of truncated networks against F(0): steps and epochs.

python benchmarks/train.py --steps 8 --rounds 3
python benchmarks/train.py --device cuda --require-mnist --out results/bench-train-h200.json
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ell0.common import check_count
from ell0.nn import TruncatedLinear
from ell0.results import Results
from ell0.train import PAPER_MNIST
from ell0.train.stepper import GraphStepper, Stepper
from measure import Run, Timing, add_counts, main, options, timer, topk_baseline

PAPER = 58.0  # times the epoch of F(0) that an epoch of F(10) takes, in [Beliaev22]
AGREEMENT = 1e-3
QUERIES = 300  # of an attack on the training set, in [Beliaev22]


class Topk(nn.Module):
    """The truncated layer as one writes it without a kernel."""

    def __init__(self, layer: TruncatedLinear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return topk_baseline(x, self.layer.weight, self.layer.bias, self.layer.k, len(x))


def benchmark(run: Run, *, steps: int = 64, rounds: int = 7, batch: int = 256) -> Results:
    """Times training steps of F(10) against F(0), and epochs of F(0), F(1) and F(10), as `ell0.train.fit` does.

    The images lie on the device. A step is timed eager and, on a GPU, replayed from a CUDA graph, over loops of
    ``steps`` in turns; an epoch in the faster of these ways, in a new random order, without the last batch if that is
    smaller. Both ways must have the same losses first. On a GPU the time of the paper's whole training with the topk
    baseline is estimated from a few of its steps and forwards.

    Args:
        rounds: of the loops; an epoch is timed in at most three.  batch: images of a step.
    """
    for argument, value in (("steps", steps), ("rounds", rounds), ("batch", batch)):
        check_count(argument, value)
    results = run.results("bench-train")
    name, images, labels = run.images()
    if batch > len(images):
        raise ValueError(f"batch must be at most the {len(images)} images of {name}, got {batch}")
    whole = len(images) // batch * batch
    x, y = images[:whole].to(run.place), labels[:whole].to(run.place)
    batches = list(zip(x.split(batch), y.split(batch), strict=True))

    def learner(mode: str, k: int) -> Stepper:
        network = run.network(k).to(run.place)
        return GraphStepper(network, PAPER_MNIST, *batches[0]) if mode == "graph" else Stepper(network, PAPER_MNIST)

    def loop(stepper: Stepper) -> None:
        for i in range(steps):
            stepper.step(*batches[i % len(batches)])

    clock = timer(run.place)
    modes = ("eager", "graph") if run.device == "cuda" else ("eager",)
    what: dict[str, Any] = {"data": name, "batch": batch}
    if len(modes) > 1:
        for k in (0, 1, 10):
            run.say(f"the losses of F({k}), eager and from a graph")
            check_losses(learner("eager", k), learner("graph", k), batches, k)
    for mode in modes:
        run.say(f"steps of F(0) and F(10), {mode}")
        loops = clock({f"F({k})": partial(loop, learner(mode, k)) for k in (0, 10)}, rounds)
        timing = Timing({key: [each / steps for each in seconds] for key, seconds in loops.seconds.items()})
        results.add(**timing.ratio("F(10)", "F(0)"), what="step", k=10, mode=mode, steps=steps, **what)
    run.say(f"epochs of F(0), F(1) and F(10), {mode}")
    generator = torch.Generator(run.place).manual_seed(run.seed)
    epochs = {f"F({k})": partial(_epoch, learner(mode, k), x, y, batch, generator) for k in (0, 1, 10)}
    timing = clock(epochs, min(rounds, 3))
    what |= {"what": "epoch", "mode": mode, "images": whole}
    for k in (0, 1, 10):
        results.add(**timing.spread(f"F({k})"), k=k, **what)
    results.add(**timing.ratio("F(1)", "F(0)"), k=1, **what)
    results.add(**timing.ratio("F(10)", "F(0)"), k=10, paper=PAPER, **what)
    if run.device == "cuda":
        run.say("steps of F(10) with the topk baseline")
        estimate_topk(results, run.network(10).to(run.place), x, y, batch)
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


def check_losses(eager: Stepper, other: Stepper, batches: list[tuple[Tensor, Tensor]], k: int) -> None:
    """Raises unless both learn alike from the first three batches."""
    for i in range(3):
        given = batches[i % len(batches)]
        want, got = float(eager.step(*given)), float(other.step(*given))
        if not abs(got - want) <= AGREEMENT:
            raise AssertionError(f"step {i + 1} of F({k}) has the loss {want} {eager.mode} and {got} {other.mode}")


if __name__ == "__main__":
    parser = options(__file__, __doc__)
    add_counts(
        parser, steps="training steps timed together (default: 64)", rounds="rounds of timing (default: 7)",
        batch="images of a step (default: 256)",
    )  # fmt: skip
    sys.exit(main(benchmark, parser))
