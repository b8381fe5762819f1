"""Time certificates at all budgets up to 32, and training on a bound against plain training; or votes of parts.

python benchmarks/certify.py --images 1000 --epochs 2
python benchmarks/certify.py --device cuda --require-mnist --out results/bench-certify-h200.json
python benchmarks/certify.py --device cuda --votes --out results/bench-votes-h200.json
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ell0.attacks.draws import Draws
from ell0.certify import Objective, Partition, PartVote, radius
from ell0.common import check_count
from ell0.nn import InputClamp
from ell0.part_networks import PartCNN, PartMLP
from ell0.precision import dense_products
from ell0.results import Results
from ell0.threat import L0Ball
from ell0.train import TrainConfig, fit
from ell0.train.stepper import GraphStepper, Stepper
from measure import Run, Timing, add_counts, main, options, timed, timer

HIDDEN, K, MOST = 512, 100, 32
TRAINED = 8  # changes that the certified network is trained for
BUDGET = 10  # changes that the bound of the timed steps allows
MANY = 10_000  # images that are certified, and others that the network is trained on, if there are as many
CHECKED = 50  # images whose radius is computed again, alone and on the processor
VOTES = (("mlp", 32, (8, 16), 10), ("cnn", 32, (4, 4), 10), ("cnn", 32, (8, 8), 10), ("cnn", 96, (12, 12), 10),
         ("cnn", 96, (24, 24), 10), ("cnn", 96, (12, 12), 1000))  # fmt: skip
"""Votes: network, height and width of an image, strides, classes."""
SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "cpu": {"mlp": {"width": 256, "depth": 2}, "cnn": {"widths": (32,), "blocks": 1}},
    "cuda": {"mlp": {"width": 1024, "depth": 4}, "cnn": {"widths": (160,), "blocks": 4}},
}


def benchmark(
    run: Run,
    *,
    images: int | None = None,
    epochs: int = 6,
    steps: int = 16,
    rounds: int = 3,
    batch: int = 256,
    votes: bool = False,
) -> Results:
    """Times certificates of images, and steps of training on a bound against plain ones; or, instead, `time_votes`.

    The certificates are those of 784-512(100)-10, trained on the bound for 8 changes with the last 10,000 images; the
    first ones are certified, by intervals ("ibp") and by the better of intervals and lines ("best"). Before that some
    radii must be the same on a processor, and "best" must not be below "ibp". The steps are those of a clamped
    784-512-10, its bound for 10 changes exact or quick, on a GPU replayed from a CUDA graph.

    Args:
        images: None: 10,000, or all if there are fewer.  epochs: of the training.  steps: timed together.
        rounds: of everything, in turns.  batch: images of a step.
    """
    given = {"images": images, "epochs": epochs, "steps": steps, "rounds": rounds, "batch": batch}
    for argument, value in given.items():
        if value is not None:
            check_count(argument, value)
    if votes:
        return time_votes(run, images or (MANY if run.device == "cuda" else 512), rounds, batch)
    results = run.results("bench-certify")
    name, x, y = run.images()
    images = min(MANY, len(x)) if images is None else images
    if max(images, batch) > len(x):
        raise ValueError(f"images and batch must be at most the {len(x)} images of {name}, got {images} and {batch}")
    x, y = x.to(run.place), y.to(run.place)
    what: dict[str, Any] = {"data": name, "hidden": HIDDEN}

    run.say(f"training 784-{HIDDEN}({K})-10 on the bound")
    network = run.network(K, hidden=(HIDDEN,)).to(run.place)
    config = TrainConfig(epochs, batch, (0.002,), schedule="cosine", warm_up=0.1, optimizer="adam", seed=run.seed)
    fit(network, (x[-MANY:], y[-MANY:]), config, objective=Objective(TRAINED, ramp=0.5))
    network.eval()
    run.say("radii, here and on a processor")
    _check(network, x[:CHECKED], y[:CHECKED])
    run.say(f"certificates of {images} images")
    found: dict[str, Tensor] = {}

    def certificates(method: str) -> None:
        found[method] = _radii(network, x[:images], y[:images], method)

    timing = timed({method: partial(certificates, method) for method in ("ibp", "best")}, rounds)
    for method, radii in found.items():
        size = {"k": K, "images": images, "budget": MOST, "median_radius": int(radii.median())}
        results.add(**timing.spread(method), what="certificates", method=method, **size, **what)

    run.say("steps of training")
    part = x[:batch], y[:batch]
    stages = {
        "plain step": None,
        "exact bound": Objective(BUDGET, ramp=0).at(0, 1),
        "quick bound": Objective(BUDGET, ramp=0, quick=True).at(0, 1),
    }
    learners: dict[str, Stepper] = {}
    for key, stage in stages.items():
        model = nn.Sequential(InputClamp(), *run.network(0, hidden=(HIDDEN,))).to(run.place)
        graph = run.device == "cuda"
        learners[key] = GraphStepper(model, config, *part, stage) if graph else Stepper(model, config, batch_loss=stage)
    loops = timer(run.place)({key: partial(_loop, each, part, steps) for key, each in learners.items()}, rounds)
    timing = Timing({key: [each / steps for each in seconds] for key, seconds in loops.seconds.items()})
    for key in ("exact bound", "quick bound"):
        step: dict[str, Any] = {"k": 0, "budget": BUDGET, "mode": learners[key].mode, "batch": batch, "steps": steps}
        results.add(**timing.ratio(key, "plain step"), what=f"step, {key}", **step, **what)
    return results


def time_votes(run: Run, images: int, rounds: int, batch: int) -> Results:
    """Times votes: certificates at every number of changed pixels against the passes of the part network alone.

    Networks are those of the recipes, on a CPU smaller ones, with initial weights. Images are drawn, fewer where they
    are larger or have more classes. How far logits are off is measured before, once, by some 300 passes.
    """
    results, first = run.results("bench-votes"), 0.0
    for kind, side, strides, classes in VOTES:
        n = max(8, images * 32**2 // side**2 // (1 if classes == 10 else 10))
        torch.manual_seed(run.seed)
        partition = Partition.strides((3, side, side), strides)
        size: dict[str, Any] = {
            "network": kind,
            "side": side,
            "parts": partition.parts,
            "classes": classes,
            "images": n,
        }
        run.say("votes, " + ", ".join(f"{key} {value}" for key, value in size.items()))
        make = {"mlp": PartMLP, "cnn": PartCNN}[kind]
        network = make(partition.part_shape, partition.parts, classes=classes, **SIZES[run.device][kind])
        model = PartVote(network, partition).eval().to(run.place)
        with torch.no_grad(), dense_products(tf32=False):
            timing = _timed_vote(model, torch.rand(n, 3, side, side, device=run.place), rounds, batch)
        results.add(**timing.ratio("certificates", "passes"), what="votes", **size)
        each = timing.median("passes") / n
        results.add(each, unit="seconds", what="passes of an image", **size)
        if kind == "cnn":
            first = first or each
            results.add(each / first, unit="x", to="the first", what="growth", **size)
    return results


def _timed_vote(model: PartVote, x: Tensor, rounds: int, batch: int) -> Timing:
    places = torch.arange(len(x), device=x.device)
    parts = places.split(batch)
    y = torch.cat([model(x[at]).argmax(1) for at in parts])
    radii = model.prepare(x, L0Ball(0, "pixel", -torch.inf, torch.inf), Draws(None, places), batch).radii
    some = places[:CHECKED]
    check_radii(model.part_logits(x[some]), y[some], model.tau, radii(some, y[some]))
    # What comes last goes to the processor, so that the time of a GPU ends with it.
    calls = {
        "passes": lambda: [model.part_logits(x[at])[0, 0] for at in parts][-1].cpu(),
        "certificates": lambda: [radii(at, y[at]) for at in parts][-1].cpu(),
    }
    return timed(calls, rounds)


def check_radii(logits: Tensor, y: Tensor, tau: float, radii: Tensor) -> None:
    """Raises AssertionError unless the radii are those of the definition, or one less, by rounding."""
    for row, label, found in zip(logits.double().tolist(), y.tolist(), radii.tolist(), strict=True):
        lasts = []
        for other in (c for c in range(len(row[0])) if c != label):
            duels = [min(1.0, max(-1.0, (part[label] - part[other]) / tau)) for part in row]
            left, costs = sum(duels), sorted((1 + duel for duel in duels), reverse=True)
            m = 0
            while m < len(costs) and left - costs[m] > 0:
                left, m = left - costs[m], m + 1
            lasts.append(m)
        if not min(lasts) - 1 <= found <= min(lasts):
            raise AssertionError(f"a radius must be {min(lasts)} or one less, by rounding, got {found}")


def _radii(network: nn.Module, x: Tensor, y: Tensor, method: str) -> Tensor:
    """On the processor, so that the time of a GPU ends with the last of them."""
    return radius(network, x, y, max_budget=MOST, method=method).cpu()  # type: ignore[arg-type]


def _check(network: nn.Module, x: Tensor, y: Tensor) -> None:
    place = x.device
    here = {method: _radii(network, x, y, method) for method in ("ibp", "best")}
    network.cpu()
    for method, radii in here.items():
        if not torch.equal(radii, _radii(network, x.cpu(), y.cpu(), method)):
            raise AssertionError(f"radii by {method!r} must be the same on a processor, and they are not")
    if bool((here["best"] < here["ibp"]).any()):
        raise AssertionError('radii by "best" must be at least those by "ibp", and they are not')
    network.to(place)


def _loop(learner: Stepper, part: tuple[Tensor, Tensor], steps: int) -> None:
    for _ in range(steps):
        learner.step(*part)


if __name__ == "__main__":
    parser = options(__file__, __doc__)
    add_counts(
        parser, images="images to certify (default: 10,000)", epochs="epochs of training (default: 6)",
        steps="training steps timed together (default: 16)", rounds="rounds of timing (default: 3)",
        batch="images of a step (default: 256)",
    )  # fmt: skip
    parser.add_argument("--votes", action="store_true", help="time votes of parts instead")
    sys.exit(main(benchmark, parser))
