"""Speed of the truncated layer on a GPU: ratios to the dense layer, and how far above what the card can do."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import ops
from ..ops import reference
from ..results import Results
from ..train import PAPER_MNIST, fit
from ._device import card, check_device
from ._layer import check, compare, first_layer, kinds_of_input, load_images, seeded, topk_baseline
from ._timing import Progress, Timing, cuda_timed

BATCH, IN, OUT = 8192, 784, 1568
CHUNKS = (64, 256, 1024)
BATCHES = (256, 1024, 8192, 32768)
INPUTS = (196, 784, 3136)
WIDTHS = (392, 1568, 6272)
KS = (1, 10, 100, 300)
EPOCHS = 25  # before the paper's first attack
FLOAT = 4  # bytes
COPIED, SQUARE = 2**28, 4096  # numbers of the copy and rows of the matrices that the rates are measured with


def floor(bytes_moved: float, operations: float, copy_rate: float, matrix_rate: float) -> float:
    """Seconds that work cannot take less than on a card with these rates of copying and of multiplying matrices."""
    return max(bytes_moved / copy_rate, operations / matrix_rate)


@dataclass(frozen=True)
class Rates:
    """What the card did in this run: bytes read and written in a second, and fp32 operations."""

    copy: float
    matrix: float

    def row(self, seconds: float, batch: int, d: int, out: int) -> dict[str, float]:
        """What the dense part of a forward counts, and a time beside the floor of that."""
        bytes_moved, operations = FLOAT * (batch * d + out * d + batch * out), 2 * batch * d * out
        least = floor(bytes_moved, operations, self.copy, self.matrix)
        return {"bytes": bytes_moved, "operations": operations, "floor": least, "over_floor": seconds / least}


def layer_on_gpu(
    *,
    quick: bool,
    root: Path | None,
    require_mnist: bool,
    command: str,
    seed: int,
    progress: Progress,
) -> Results:
    """Times the truncated layer against the dense one on the GPU, in fp32; values are ratios, rates and bytes.

    784 -> 1568, 8,192 samples: forward with and without `ops.prepare`, beside the floor that the rates of the card,
    measured first, set to the dense product; backward to the weight and to the input; the topk baseline; growth with
    batch, inputs, width and k; peak memory. Weights at initialisation and of F(10) after 25 epochs of
    the paper's training. ``quick`` keeps
    to k = 10, initial weights, two kinds of input and no growth.
    """
    start = time.perf_counter()
    device = check_device("cuda")
    results = Results.here(f"bench-layer-{card(device)}", command, seeds=[seed], device=device)
    results.versions["triton"] = _triton()
    rounds = 9 if quick else 21
    generator = torch.Generator().manual_seed(seed)
    name, images, labels = load_images(root, require_mnist)
    inputs = {
        source: x.to(device)
        for source, x in kinds_of_input(images, name, generator, BATCH).items()
        if not quick or source in (name, "gaussian")
    }
    progress("the rates of the card")
    rates = _rates(results, device, rounds)
    model = seeded(10, seed).to(device)
    weights = {"initial": tuple(t.clone() for t in first_layer(model))}
    if not quick:
        progress(f"{EPOCHS} epochs of F(10), for its weights")
        fit(model, (images, labels), replace(PAPER_MNIST, epochs=EPOCHS, seed=seed))
        weights["trained"] = first_layer(model)
    for kind, (weight, bias) in weights.items():
        for source, x in inputs.items():
            for k in (10,) if quick or source != name else (10, 1, 100):
                progress(f"k={k}, {kind} weights, {source}")
                check(x, weight, bias, k, generator)
                what = {"data": source, "weights": kind, "k": k}
                _forward(results, x, weight, bias, k, rounds, rates, what)
                if source == name and k == 10:
                    _backward(results, x, weight, bias, k, rounds, what, generator)
    weight, bias = weights["initial"]
    progress("the topk baseline")
    _topk(results, inputs[name], weight, bias, {"data": name, "weights": "initial", "k": 10})
    if not quick:
        _growth(results, device, generator, rounds, rates, progress)
    progress("peak memory")
    _memory(results, inputs[name], weight, bias)
    results.seconds = round(time.perf_counter() - start, 1)
    return results


def _triton() -> str:
    return str(importlib.import_module("triton").__version__)


def _sizes(x: Tensor, weight: Tensor) -> dict[str, int]:
    return {"batch": len(x), "in": weight.shape[1], "out": weight.shape[0]}


def _rates(results: Results, device: torch.device, rounds: int) -> Rates:
    source, matrix = torch.zeros(COPIED, device=device), torch.rand(SQUARE, SQUARE, device=device)
    target, product = torch.empty_like(source), torch.empty_like(matrix)

    def copy() -> object:
        return target.copy_(source)

    def multiply() -> object:
        return torch.mm(matrix, matrix, out=product)

    copied, multiplied = 2 * FLOAT * COPIED, 2 * SQUARE**3
    work: tuple[tuple[str, float, Callable[[], object]], ...] = (
        ("bytes/s", copied, copy), ("operations/s", multiplied, multiply),
    )  # fmt: skip
    rates = []
    for unit, amount, call in work:
        timing = cuda_timed({unit: call}, rounds)
        slow, fast = max(timing.seconds[unit]), min(timing.seconds[unit])
        rates.append(amount / timing.median(unit))
        results.add(
            rates[-1], what="rate", unit=unit, n=rounds, low=amount / slow, high=amount / fast,
            seconds=timing.median(unit),
        )  # fmt: skip
    return Rates(*rates)


def _against_dense(timing: Timing, name: str) -> dict[str, Any]:
    """The ratio to the dense layer, and the seconds of both."""
    return {**timing.ratio(name, "dense"), "to": "dense", "to_seconds": timing.median("dense"), "unit": "x"}


def _time_forward(x: Tensor, weight: Tensor, bias: Tensor, k: int, rounds: int) -> Timing:
    prepared = ops.prepare(weight)
    with torch.no_grad():
        return cuda_timed(
            {
                "dense": partial(F.linear, x, weight, bias),
                "prepared": partial(ops.truncated_linear, x, weight, bias, k=k, prepared=prepared),
                "unprepared": partial(ops.truncated_linear, x, weight, bias, k=k),
            },
            rounds,
        )


def _forward(
    results: Results, x: Tensor, weight: Tensor, bias: Tensor, k: int, rounds: int, rates: Rates, what: dict[str, Any]
) -> None:
    timing, sizes = _time_forward(x, weight, bias, k, rounds), _sizes(x, weight)
    for name in ("prepared", "unprepared"):
        results.add(
            **_against_dense(timing, name), what="forward", prepared=name == "prepared", **what, **sizes,
            **rates.row(timing.median(name), *sizes.values()),
        )  # fmt: skip


def _backward(
    results: Results,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    k: int,
    rounds: int,
    what: dict[str, Any],
    generator: torch.Generator,
) -> None:
    """The backward pass alone, on graphs that are kept, to the weight and to the input."""
    grad = torch.randn(len(x), len(weight), generator=generator).to(x.device)
    leaves = {"weight": weight.clone().requires_grad_(), "input": x.clone().requires_grad_()}
    for gradient, leaf in leaves.items():
        inputs = (x, leaf, bias) if gradient == "weight" else (leaf, weight, bias)
        outputs = {"dense": F.linear(*inputs), "truncated": ops.truncated_linear(*inputs, k=k)}
        if gradient == "input":
            _check_input_gradient(outputs["truncated"], leaf, weight, grad, k)
        calls = {
            name: partial(torch.autograd.grad, out, leaf, grad, retain_graph=True) for name, out in outputs.items()
        }
        timing = cuda_timed(calls, rounds)
        results.add(
            **_against_dense(timing, "truncated"), what="backward", gradient=gradient, **what, **_sizes(x, weight)
        )


def _check_input_gradient(out: Tensor, x: Tensor, weight: Tensor, grad: Tensor, k: int) -> None:
    """Compares the gradient to the first samples with the definition, as `check` does that to the weight."""
    (got,) = torch.autograd.grad(out, x, grad, retain_graph=True)
    x, grad = x.detach()[:4], grad[:4]
    want, _ = reference.gradients(grad, x, weight, top=k, bottom=k)
    kept = reference.kept(reference.products(x, weight), k, k)
    shares = (grad.unsqueeze(-1) * weight).abs().where(kept, 0.0)
    compare("input gradients", got[:4], want, shares.double().sum(1), k)


def _topk(results: Results, x: Tensor, weight: Tensor, bias: Tensor, what: dict[str, Any]) -> None:
    """The baseline at its fastest chunk against the prepared layer."""
    prepared, k = ops.prepare(weight), what["k"]
    with torch.no_grad():
        few = x[: max(CHUNKS)]
        chunks = cuda_timed({str(c): partial(topk_baseline, few, weight, bias, k, c) for c in CHUNKS}, 3)
        chunk = min(CHUNKS, key=lambda c: chunks.median(str(c)))
        timing = cuda_timed(
            {
                "topk": partial(topk_baseline, x, weight, bias, k, chunk),
                "prepared": partial(ops.truncated_linear, x, weight, bias, k=k, prepared=prepared),
            },
            3,
        )
    results.add(
        **timing.ratio("topk", "prepared"), what="forward", to="topk", unit="x faster", prepared=True, chunk=chunk,
        **what, **_sizes(x, weight),
    )  # fmt: skip


def _growth(
    results: Results,
    device: torch.device,
    generator: torch.Generator,
    rounds: int,
    rates: Rates,
    progress: Progress,
) -> None:
    shapes = {(batch, IN, OUT, 10) for batch in BATCHES} | {(BATCH, d, OUT, 10) for d in INPUTS}
    shapes |= {(BATCH, IN, out, 10) for out in WIDTHS} | {(BATCH, IN, OUT, k) for k in KS}
    for batch, d, out, k in sorted(shapes):
        progress(f"growth: {batch} samples, {d} -> {out}, k={k}")
        x = _dark(batch, d, generator).to(device)
        weight = ((torch.rand(out, d, generator=generator) * 2 - 1) / d**0.5).to(device)
        bias = torch.zeros(out, device=device)
        check(x, weight, bias, k, generator)
        timing, sizes = _time_forward(x, weight, bias, k, rounds), _sizes(x, weight)
        results.add(
            **_against_dense(timing, "prepared"), what="growth", data="dark80", weights="uniform", k=k, prepared=True,
            **sizes, **rates.row(timing.median("prepared"), *sizes.values()),
        )  # fmt: skip


def _dark(batch: int, d: int, generator: torch.Generator) -> Tensor:
    """Inputs like images: 80 % at -1, the rest anywhere in [-1, 1]."""
    x = torch.rand(batch, d, generator=generator) * 2 - 1
    return x.where(torch.rand(batch, d, generator=generator) < 0.2, -1.0)


def _memory(results: Results, x: Tensor, weight: Tensor, bias: Tensor) -> None:
    """Bytes by which a forward, and a step of training, of the layer alone raise what is held."""

    def forward(k: int) -> None:
        with torch.no_grad():
            ops.truncated_linear(x, weight, bias, k=k)

    def step(k: int) -> None:
        leaf = weight.detach().requires_grad_()
        torch.autograd.grad(ops.truncated_linear(x, leaf, bias, k=k).sum(), leaf)

    for part, call in (("forward", forward), ("step", step)):
        peaks = {k: peak_memory(partial(call, k), x.device) for k in (0, 10, 100)}
        for k, peak in peaks.items():
            results.add(peak, what="memory", part=part, unit="bytes", dense=peaks[0], k=k, n=1, **_sizes(x, weight))


def peak_memory(call: Callable[[], object], device: torch.device) -> int:
    """Bytes of GPU memory that a call holds at its peak beyond what was held before; it is called twice."""
    call()  # compiles kernels and makes the workspaces that stay
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
