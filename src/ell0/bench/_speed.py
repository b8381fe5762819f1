"""Speed of Sparse-RS on F(10) against F(0), on images that it cannot break."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import Tensor, nn

from ..attacks import sparse_rs
from ..attacks.contract import AttackResult, check_count
from ..results import Results
from ..threat import L0Ball
from ._device import Device, card, check_device
from ._layer import check_seed, load_images, seeded
from ._timing import Progress

WARM_UP = 3  # queries
# No ten numbers of [-1, 1] move the logits of an untrained network that far, and differences of logits are still seen
# beside it: at 1e6 float32 would round them away, and the search would have nothing to write down.
LEAD = 1e3


def attack_speed(
    *,
    device: Device = "cpu",
    images: int = 60_000,
    budget: int = 10,
    queries: int = 300,
    root: Path | None = None,
    require_mnist: bool = False,
    command: str = "ell0 bench attacks",
    seed: int = 0,
    progress: Progress = lambda _: None,
) -> Results:
    """Seconds of `sparse_rs` on F(10) and F(0), their ratio and, on a GPU, the peak memory, with every row standing.

    Every image of MNIST (digits drawn at 28 x 28 where it is not found) is said to be of class 0, whose logit has a
    lead that no attack takes, so all rows pay for all queries; raises where one does not.

    Args:
        images: attacked at once; repeated where there are fewer.
        require_mnist: lets nothing stand in for MNIST.
    """
    for argument, value in (("images", images), ("budget", budget), ("queries", queries)):
        check_count(argument, value)
    check_seed(seed)
    place = check_device(device)
    start = time.perf_counter()
    results = Results.here(f"bench-attacks-{card(place)}", command, seeds=[seed], device=place)
    name, found, _ = load_images(root, require_mnist)
    if budget > found.shape[1]:
        raise ValueError(f"budget must be at most the {found.shape[1]} features of {name}, got {budget}")
    x = found[torch.arange(images) % len(found)].to(place)
    ball = L0Ball(budget, low=-1.0, high=1.0)
    what = {
        "attack": "sparse_rs", "data": name, "weights": "initial", "images": images, "n": 1, "budget": budget,
        "queries": queries,
    }  # fmt: skip
    seconds: dict[int, float] = {}
    for k in (0, 10):
        model = _unbreakable(k, seed).to(place)
        progress(f"sparse_rs on F({k}): {WARM_UP} queries to warm up")
        _attack(model, x, ball, WARM_UP, seed)
        progress(f"sparse_rs on F({k}): {queries} queries for each of {images} images")
        before = _start_memory(place)
        seconds[k] = _attack(model, x, ball, queries, seed)
        results.add(
            seconds[k], what="attack seconds", unit="seconds", k=k, queries_per_second=images * queries / seconds[k],
            **what,
        )  # fmt: skip
        if place.type == "cuda":
            results.add(torch.cuda.max_memory_allocated(place) - before, what="memory", unit="bytes", k=k, **what)
    results.add(
        seconds[10] / seconds[0], what="attack", to="F(0)", unit="x", k=10, seconds=seconds[10], to_seconds=seconds[0],
        **what,
    )  # fmt: skip
    results.seconds = round(time.perf_counter() - start, 1)
    return results


def _unbreakable(k: int, seed: int) -> nn.Module:
    """F(k) that gives class 0 whatever the image."""
    model = seeded(k, seed)
    last = model[-1]
    assert isinstance(last, nn.Linear)
    with torch.no_grad():
        last.bias[0] += LEAD
    return model.eval()


def _start_memory(device: torch.device) -> int:
    """Bytes of GPU memory held, from where the peak is counted; 0 on a processor."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _attack(model: nn.Module, x: Tensor, ball: L0Ball, queries: int, seed: int) -> float:
    """Seconds; raises unless every row stood to the end."""
    labels = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    _wait(x.device)
    start = time.perf_counter()
    result: AttackResult = sparse_rs(
        model, x, labels, ball, queries=queries, generator=torch.Generator().manual_seed(seed)
    )
    _wait(x.device)
    seconds = time.perf_counter() - start
    if result.success.any() or not (result.queries == queries).all():
        raise AssertionError(f"{int(result.success.sum())} of {len(x)} rows broke, and none can")
    return seconds


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
