"""Speed of the truncated layer, always as a ratio of times in the same run, and only of checked results."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import data, models, ops
from ..ops import kernel, reference
from ..results import Results
from ._device import Device, check_device
from ._timing import Progress, timed

BATCH, IN, OUT = 256, 784, 1568
KS = (1, 10, 50, 100, 300)
CHUNKS = (1, 8, 32)


def check_seed(seed: int) -> None:
    """Raises unless torch takes the seed."""
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed must satisfy 0 <= seed < 2**64, got {seed}")


def topk_baseline(x: Tensor, weight: Tensor, bias: Tensor | None, k: int, chunk: int) -> Tensor:
    """The layer as one writes it without a kernel: the dense product minus topk sums on chunks of samples."""
    parts = []
    for part in x.split(chunk):
        terms = part.unsqueeze(1) * weight
        largest = terms.topk(k, dim=-1).values.sum(-1)
        smallest = terms.topk(k, dim=-1, largest=False).values.sum(-1)
        parts.append(F.linear(part, weight, bias) - largest - smallest)
    return torch.cat(parts)


def check(x: Tensor, weight: Tensor, bias: Tensor, k: int, generator: torch.Generator) -> None:
    """Compares values and weight gradients on a sample of rows and columns with the definition; raises if they differ.

    The tolerance is the operator's: 1e-5 of the sum of the magnitudes that were added up.
    """
    samples = torch.randperm(len(x), generator=generator)[:16].to(x.device)
    rows = torch.randperm(len(weight), generator=generator)[:32].to(x.device)
    counts = {"top": k, "bottom": k}
    w = weight.detach().clone().requires_grad_()
    out = ops.truncated_linear(x, w, bias, k=k)
    grad = torch.randn(out.shape, generator=generator).to(x.device)
    out.backward(grad)
    for got in (out.detach(), ops.truncated_linear(x, weight, bias, k=k, prepared=ops.prepare(weight))):
        want = reference.trimmed_linear(x[samples], weight[rows], bias[rows], **counts)
        scale = reference.scale(x[samples], weight[rows], bias[rows], **counts)
        compare("values", got[samples][:, rows], want, scale, k)
    rows = rows[:4]
    _, want = reference.gradients(grad[:, rows], x, weight[rows], **counts)
    terms = reference.products(x, weight[rows])
    shares = (grad[:, rows].unsqueeze(-1) * x.unsqueeze(1)).abs().where(reference.kept(terms, k, k), 0.0)
    assert w.grad is not None
    compare("weight gradients", w.grad[rows], want, shares.double().sum(0), k)


def compare(what: str, got: Tensor, want: Tensor, scale: Tensor, k: int) -> None:
    """Raises where got and want differ by more than 1e-5 of the scale."""
    excess = ((got.double() - want).abs() - 1e-5 * scale).max().item()
    if not excess <= 0:
        raise AssertionError(f"{what} of the truncated layer with k={k} differ from the definition by {excess:.2e}")


def load_images(root: Path | None, require_mnist: bool) -> tuple[str, Tensor, Tensor]:
    """MNIST training images ``(n, 784)``; where they are not found and not required, digits drawn at 28 x 28."""
    try:
        x, y = data.load("mnist", "train+validation", root)
        return "mnist", x.flatten(1), y
    except FileNotFoundError:
        if require_mnist:
            raise
        x, y = data.load("digits", "train+validation")
        x = F.pad(x.repeat_interleave(3, 2).repeat_interleave(3, 3), (2, 2, 2, 2), value=-1.0)
        return "digits28", x.flatten(1), y


def kinds_of_input(images: Tensor, name: str, generator: torch.Generator, batch: int) -> dict[str, Tensor]:
    """The first ``batch`` images, Gaussian noise, numbers of which 80 % are 0, and the images under attack."""
    x = images[:batch].contiguous()
    gaussian = torch.randn(x.shape, generator=generator)
    sparse = torch.rand(x.shape, generator=generator)
    sparse = sparse.where(torch.rand(x.shape, generator=generator) < 0.2, 0.0)
    attacked = x.clone()
    for row in attacked:
        where = torch.randperm(IN, generator=generator)[:10]
        row[where] = 100.0 * torch.randint(0, 2, (10,), generator=generator).mul(2).sub(1)
    return {name: x, "gaussian": gaussian, "zeros80": sparse, f"{name}+10@100": attacked}


def train_epoch(model: torch.nn.Module, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """One epoch in batches of 256, in the order of the images."""
    for images, labels in zip(x.split(BATCH), y.split(BATCH), strict=True):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    """What the weights called trained are trained with."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def seeded(k: int, seed: int, **words: Any) -> torch.nn.Sequential:
    """F(k) from a seed, without touching the caller's generator.  words: others of `models.mlp`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return models.mlp(k, **words)


def first_layer(model: torch.nn.Sequential) -> tuple[Tensor, Tensor]:
    """Weight and bias, without gradient."""
    layer = model[1]
    assert isinstance(layer, torch.nn.Linear)
    assert layer.bias is not None
    return layer.weight.detach(), layer.bias.detach()


def layer(
    *,
    device: Device = "cpu",
    quick: bool = False,
    root: Path | None = None,
    require_mnist: bool = False,
    command: str = "ell0 bench layer",
    seed: int = 0,
    progress: Progress = lambda _: None,
) -> Results:
    """Times the truncated layer against the dense layer and the topk baseline; values are ratios, and bytes for memory.

    784 -> 1568, 256 samples: forward with and without `ops.prepare`, and a training step (forward and backward to
    the weights, which change and are prepared at each step); weights at initialisation and of a trained F(10); four
    kinds of input; k from 1 to 300; growth with batch, width and inputs; an epoch of F(10) against F(0); peak memory.
    ``quick`` keeps to k = 10, initial weights and two kinds of input; ``require_mnist`` lets nothing stand in for
    MNIST, and raises FileNotFoundError where it is not found. ``device="cuda"`` is a benchmark of its own, with
    larger batches: see `_gpu.layer_on_gpu`.
    """
    check_seed(seed)
    if check_device(device).type == "cuda":
        from ._gpu import layer_on_gpu

        return layer_on_gpu(
            quick=quick, root=root, require_mnist=require_mnist, command=command, seed=seed, progress=progress
        )
    start = time.perf_counter()
    results = Results.here("bench-layer-cpu", command, seeds=[seed], device="cpu")
    results.versions["kernel"] = kernel.build()
    generator = torch.Generator().manual_seed(seed)
    name, images, labels = load_images(root, require_mnist)
    inputs = kinds_of_input(images, name, generator, BATCH)
    weights = {"initial": first_layer(seeded(10, seed))}
    ks: Iterable[int] = (10,)
    if quick:
        inputs = {key: inputs[key] for key in (name, "gaussian")}
    else:
        ks = KS
        progress("four epochs, the first to warm up, of F(10), for its weights, and of F(0), for the time")
        weights["trained"] = _train(results, images[:10_000], labels[:10_000], name, seed)
    rounds = 5 if quick else 9
    for k in ks:
        chunk = _fastest_chunk(next(iter(inputs.values())), *weights["initial"], k)
        for kind, (weight, bias) in weights.items():
            for source, x in inputs.items():
                progress(f"k={k}, {kind} weights, {source}")
                check(x, weight, bias, k, generator)
                what = {"data": source, "weights": kind, "k": k}
                _forward(results, x, weight, bias, k, chunk, rounds, what)
                _step(results, x, weight, bias, k, rounds, what)
    if not quick:
        _growth(results, generator, rounds, progress)
        progress("peak memory of a training step")
        _memory(results)
    results.seconds = round(time.perf_counter() - start, 1)
    return results


def _train(results: Results, x: Tensor, y: Tensor, name: str, seed: int) -> tuple[Tensor, Tensor]:
    networks = {k: seeded(k, seed) for k in (0, 10)}
    optimizers = {k: sgd(model) for k, model in networks.items()}
    calls = {f"F({k})": partial(train_epoch, networks[k], x, y, optimizers[k]) for k in networks}
    timing = timed(calls, 3)
    results.add(
        **timing.ratio("F(10)", "F(0)"), what="epoch", to="F(0)", unit="x", data=name, k=10, batch=BATCH, images=len(x)
    )
    return first_layer(networks[10])


def _fastest_chunk(x: Tensor, weight: Tensor, bias: Tensor, k: int) -> int:
    few = x[:32]
    timing = timed({str(c): partial(topk_baseline, few, weight, bias, k, c) for c in CHUNKS}, 1)
    return min(CHUNKS, key=lambda c: timing.median(str(c)))


def _forward(
    results: Results, x: Tensor, weight: Tensor, bias: Tensor, k: int, chunk: int, rounds: int, what: dict[str, Any]
) -> None:
    prepared = ops.prepare(weight)
    with torch.no_grad():
        timing = timed(
            {
                "dense": lambda: F.linear(x, weight, bias),
                "prepared": lambda: ops.truncated_linear(x, weight, bias, k=k, prepared=prepared),
                "unprepared": lambda: ops.truncated_linear(x, weight, bias, k=k),
            },
            rounds,
        )
        start = time.perf_counter()
        topk_baseline(x, weight, bias, k, chunk)
        baseline = time.perf_counter() - start
    sizes = {"batch": len(x), "in": IN, "out": OUT}
    for name in ("prepared", "unprepared"):
        ratio = timing.ratio(name, "dense")
        results.add(**ratio, what="forward", to="dense", unit="x", prepared=name == "prepared", **what, **sizes)
    results.add(
        baseline / timing.median("prepared"), n=1, seconds=baseline, chunk=chunk,
        what="forward", to="topk", unit="x faster", prepared=True, **what, **sizes,
    )  # fmt: skip


def _step(results: Results, x: Tensor, weight: Tensor, bias: Tensor, k: int, rounds: int, what: dict[str, Any]) -> None:
    dense, truncated = (weight.clone().requires_grad_() for _ in range(2))
    grad = torch.randn(len(x), OUT, generator=torch.Generator().manual_seed(0))

    def step(w: Tensor, out: Tensor) -> None:
        out.backward(grad)
        with torch.no_grad():
            assert w.grad is not None
            w -= 1e-6 * w.grad
        w.grad = None

    timing = timed(
        {
            "dense": lambda: step(dense, F.linear(x, dense, bias)),
            "truncated": lambda: step(truncated, ops.truncated_linear(x, truncated, bias, k=k)),
        },
        rounds,
    )
    sizes = {"batch": len(x), "in": IN, "out": OUT}
    results.add(
        **timing.ratio("truncated", "dense"), what="step", to="dense", unit="x", prepared=False, **what, **sizes
    )


def _growth(results: Results, generator: torch.Generator, rounds: int, progress: Progress) -> None:
    shapes = {(b, IN, OUT) for b in (1, 16, 64, 256, 1024)}
    shapes |= {(BATCH, IN, out) for out in (98, 392, 1568, 6272)} | {(BATCH, d, OUT) for d in (196, 784, 3136)}
    for batch, d, out in sorted(shapes):
        progress(f"growth: {batch} samples, {d} -> {out}")
        x = torch.randn(batch, d, generator=generator)
        weight = (torch.rand(out, d, generator=generator) * 2 - 1) / d**0.5
        bias = torch.zeros(out)
        check(x, weight, bias, 10, generator)
        prepared = ops.prepare(weight)
        with torch.no_grad():
            timing = timed(
                {
                    "dense": partial(F.linear, x, weight, bias),
                    "truncated": partial(ops.truncated_linear, x, weight, bias, k=10, prepared=prepared),
                },
                rounds,
            )
        results.add(
            **timing.ratio("truncated", "dense"), what="growth", to="dense", unit="x", data="gaussian",
            weights="uniform", k=10, prepared=True, batch=batch, **{"in": d, "out": out},
        )  # fmt: skip


def _memory(results: Results) -> None:
    """Peak memory of one training step, each in a process of its own; Linux alone tells it."""
    if not Path("/proc/self/clear_refs").exists():
        return
    context = torch.multiprocessing.get_context("spawn")
    peaks = {}
    for k in (0, 10, 100):
        with context.Pool(1) as pool:
            peaks[k] = pool.apply(_peak, (k,))
    for k, peak in peaks.items():
        results.add(
            value=peak, what="memory", unit="bytes", dense=peaks[0], k=k, batch=BATCH, n=1, **{"in": IN, "out": OUT}
        )


def _peak(k: int) -> int:
    """Bytes by which one training step of the layer alone raises the peak of a fresh process."""

    def kilobytes(field: str) -> int:
        status = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in status if line.startswith(field))

    def step(samples: int) -> None:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(samples, IN, generator=generator)
        weight = ((torch.rand(OUT, IN, generator=generator) * 2 - 1) / 28).requires_grad_()
        ops.truncated_linear(x, weight, k=k).sum().backward()

    step(1)  # loads libraries and starts threads; what these hold is nobody's step
    before = kilobytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    step(BATCH)
    return 1024 * (kilobytes("VmHWM") - before)
