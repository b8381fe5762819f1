"""What certificates cost: those of many images, and a step of training on one."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..attacks.contract import check_count
from ..certify import Objective, radius
from ..nn import InputClamp
from ..results import Results
from ..train import TrainConfig, fit
from ..train._step import GraphStepper, Stepper
from ._device import Device, card, check_device
from ._layer import check_seed, load_images, seeded
from ._timing import Progress, Timing, timed, timer

HIDDEN, K, MOST = 512, 100, 32
TRAINED = 8
"""Changes that the network with certificates is trained for."""
BUDGET = 10
"""Changes that the bound of the timed steps allows."""
MANY = 10_000
"""Images that are certified, and others that the network is trained on, where there are as many."""
CHECKED = 50
"""Images whose radius is found again, alone and on the processor."""


def certify(
    *,
    device: Device = "cpu",
    images: int | None = None,
    epochs: int = 6,
    steps: int = 16,
    rounds: int = 3,
    batch: int = 256,
    root: Path | None = None,
    require_mnist: bool = False,
    command: str = "ell0 bench certify",
    seed: int = 0,
    progress: Progress = lambda _: None,
) -> Results:
    """Times certificates of images, at all budgets up to 32, and steps of training on a bound against plain ones.

    The certificates are those of 784-512(100)-10, trained on the bound for 8 changes with the last 10,000 images; the
    first ones are certified, by intervals and by whichever of intervals and lines proves more. Some radii must come out
    the same on a processor first, and lines must take nothing away. The steps are those of a clamped 784-512-10, its
    bound for 10 changes exact or quick, on a GPU replayed from a CUDA graph.

    Args:
        images: at most as many as there are; None: 10,000, or all where there are fewer.  epochs: of the training.
        steps: timed together.  batch: images of a step.  rounds: of everything, in turns.
        require_mnist: lets nothing stand in for MNIST.
    """
    given = {"images": images, "epochs": epochs, "steps": steps, "rounds": rounds, "batch": batch}
    for argument, value in given.items():
        if value is not None:
            check_count(argument, value)
    check_seed(seed)
    place = check_device(device)
    start = time.perf_counter()
    results = Results.here(f"bench-certify-{card(place)}", command, seeds=[seed], device=place)
    name, x, y = load_images(root, require_mnist)
    images = min(MANY, len(x)) if images is None else images
    if max(images, batch) > len(x):
        raise ValueError(f"images and batch must be at most the {len(x)} images of {name}, got {images} and {batch}")
    x, y = x.to(place), y.to(place)
    what: dict[str, Any] = {"data": name, "hidden": HIDDEN}

    progress(f"training 784-{HIDDEN}({K})-10 on the bound")
    network = seeded(K, seed, hidden=(HIDDEN,)).to(place)
    config = TrainConfig(epochs, batch, (0.002,), schedule="cosine", warm_up=0.1, optimizer="adam", seed=seed)
    fit(network, (x[-MANY:], y[-MANY:]), config, objective=Objective(TRAINED, ramp=0.5))
    network.eval()
    progress("radii, here and on a processor")
    _check(network, x[:CHECKED], y[:CHECKED])
    progress(f"certificates of {images} images")
    found: dict[str, Tensor] = {}

    def certificates(method: str) -> None:
        found[method] = _radii(network, x[:images], y[:images], method)

    timing = timed({method: partial(certificates, method) for method in ("ibp", "best")}, rounds)
    for method, radii in found.items():
        seconds = timing.seconds[method]
        results.add(
            timing.median(method), what="certificates", unit="seconds", method=method, k=K, images=images, budget=MOST,
            n=len(seconds), low=min(seconds), high=max(seconds), median_radius=int(radii.median()), **what,
        )  # fmt: skip

    progress("steps of training")
    part = x[:batch], y[:batch]
    stages = {
        "plain": None,
        "exact bound": Objective(BUDGET, ramp=0).at(0, 1),
        "quick bound": Objective(BUDGET, ramp=0, quick=True).at(0, 1),
    }
    learners: dict[str, Stepper] = {}
    for key, stage in stages.items():
        model = nn.Sequential(InputClamp(), *seeded(0, seed, hidden=(HIDDEN,))).to(place)
        graph = place.type == "cuda"
        learners[key] = GraphStepper(model, config, *part, stage) if graph else Stepper(model, config, stage=stage)
    loops = timer(place)({key: partial(_loop, each, part, steps) for key, each in learners.items()}, rounds)
    timing = Timing({key: [each / steps for each in seconds] for key, seconds in loops.seconds.items()})
    for key in ("exact bound", "quick bound"):
        results.add(
            **timing.ratio(key, "plain"), what=f"step, {key}", to="plain step", unit="x", k=0, budget=BUDGET,
            mode=learners[key].mode, batch=batch, steps=steps, to_seconds=timing.median("plain"), **what,
        )  # fmt: skip
    results.seconds = round(time.perf_counter() - start, 1)
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
