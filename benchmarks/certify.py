"""Time certificates at all budgets up to 32, and training on a bound against plain training.

python benchmarks/certify.py --images 1000 --epochs 2
python benchmarks/certify.py --device cuda --require-mnist --out results/bench-certify-h200.json
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ell0.certify import Objective, radius
from ell0.common import check_count
from ell0.nn import InputClamp
from ell0.results import Results
from ell0.train import TrainConfig, fit
from ell0.train.stepper import GraphStepper, Stepper
from measure import Run, Timing, add_counts, main, options, timed, timer

HIDDEN, K, MOST = 512, 100, 32
TRAINED = 8  # changes that the certified network is trained for
BUDGET = 10  # changes that the bound of the timed steps allows
MANY = 10_000  # images that are certified, and others that the network is trained on, if there are as many
CHECKED = 50  # images whose radius is computed again, alone and on the processor


def benchmark(
    run: Run, *, images: int | None = None, epochs: int = 6, steps: int = 16, rounds: int = 3, batch: int = 256
) -> Results:
    """Times certificates of images, and steps of training on a bound against plain ones.

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
    sys.exit(main(benchmark, parser))
