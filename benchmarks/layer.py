"""Time the truncated layer, 784 -> 1568, against the dense layer and the topk baseline.

    python benchmarks/layer.py --quick
    python benchmarks/layer.py --require-mnist --threads 2 --out results/bench-layer-cpu.json
    python benchmarks/layer.py --device cuda --require-mnist

Values are ratios of times in one run. Only checked results are timed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ell0 import ops
from ell0.ops import kernel, reference
from ell0.results import Results
from ell0.train import PAPER_MNIST, fit
from measure import IN, OUT, Run, Timing, main, options, timed, timer, topk_baseline

Entries = dict[str, Any]
EPOCHS = 25  # of the weights called trained, on a GPU: those before the paper's first attack
FLOAT = 4  # bytes
KS = (1, 10, 16, 32, 64, 100, 200, 300, 391)
LISTED, COUNTED = 10, 100  # two k at which the topk baseline is timed
COPIED, SQUARE = 2**28, 4096  # numbers of the copy and rows of the matrices that the rates are measured with


@dataclass(frozen=True)
class Sizes:
    """What is measured on a kind of device.  chunks: candidates of the topk baseline."""

    batch: int
    rounds: int
    quick_rounds: int
    ks: tuple[int, ...]
    chunks: tuple[int, ...]


CPU = Sizes(256, 9, 5, KS, (1, 8, 32))
GPU = Sizes(8192, 21, 9, KS, (64, 256, 1024))


def benchmark(run: Run, *, quick: bool = False, build: str | None = None) -> Results:
    """Forward with and without `ops.prepare`, training, and the topk baseline.

    Weights are those at initialisation and of a trained F(10), inputs are of four kinds. ``quick`` keeps to k = 10,
    initial weights and two kinds of input. Training is the backward pass alone and, on a processor, a whole step of the
    layer. On a GPU the rates of the card set a floor beside each forward. build: of `ell0.ops.kernel.use`.
    """
    gpu = run.device == "cuda"
    sizes = GPU if gpu else CPU
    rounds = sizes.quick_rounds if quick else sizes.rounds
    kernel.use(build)
    results = run.results("bench-layer" if build is None else f"bench-layer-{build}")
    results.versions |= {"triton": import_module("triton").__version__} if gpu else {"kernel": kernel.build()}
    generator = torch.Generator().manual_seed(run.seed)
    name, images, labels = run.images()
    inputs = kinds_of_input(images, name, generator, sizes.batch)
    inputs = {source: x.to(run.place) for source, x in inputs.items() if not quick or source in (name, "gaussian")}
    rates = None
    if gpu:
        run.say("the rates of the card")
        rates = _rates(results, run.place, rounds)
    weights = {"initial": first_layer(run.network(10).to(run.place))}
    if not quick:
        run.say("the weights of a trained F(10)")
        if gpu:
            model = run.network(10).to(run.place)
            fit(model, (images, labels), replace(PAPER_MNIST, epochs=EPOCHS, seed=run.seed))
        weights["trained"] = first_layer(model) if gpu else _trained(results, run, name, images, labels)
    for (kind, (weight, bias)), (source, x) in product(weights.items(), inputs.items()):
        for k in (10,) if quick or (gpu and source not in (name, "gaussian")) else sizes.ks:
            run.say(f"k={k}, {kind} weights, {source}")
            check(x, weight, bias, k, generator)
            what = {"data": source, "weights": kind, "k": k}
            timing = _time_forward(x, weight, bias, k, rounds)
            for each in ("prepared", "unprepared"):
                _add(results, timing, each, x, weight, rates, what="forward", prepared=each == "prepared", **what)
            if not gpu:
                _step(results, x, weight, bias, rounds, what)
            if source in (name, "zeros80"):  # where hundreds of terms tie
                _backward(results, x, weight, bias, rounds, generator, what)
            if source == name and (k in (LISTED, COUNTED) if not gpu else (kind, k) == ("initial", LISTED)):
                _topk(results, x, weight, bias, sizes.chunks, what)
    return results


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


def first_layer(model: torch.nn.Sequential) -> tuple[Tensor, Tensor]:
    """Weight and bias, without gradient."""
    layer = model[1]
    assert isinstance(layer, torch.nn.Linear)
    assert layer.bias is not None
    return layer.weight.detach(), layer.bias.detach()


def check(x: Tensor, weight: Tensor, bias: Tensor, k: int, generator: torch.Generator) -> None:
    """Raises if values or weight gradients differ from the definition, on a sample of rows and columns.

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
        _compare("values", got[samples][:, rows], want, scale, k)
    rows = rows[:4]
    _, want = reference.gradients(grad[:, rows], x, weight[rows], **counts)
    terms = reference.products(x, weight[rows])
    shares = (grad[:, rows].unsqueeze(-1) * x.unsqueeze(1)).abs().where(reference.kept(terms, k, k), 0.0)
    assert w.grad is not None
    _compare("weight gradients", w.grad[rows], want, shares.double().sum(0), k)


def check_input_gradient(out: Tensor, x: Tensor, weight: Tensor, grad: Tensor, k: int) -> None:
    """As `check`, of the gradient to the first samples."""
    (got,) = torch.autograd.grad(out, x, grad, retain_graph=True)
    x, grad = x.detach()[:4], grad[:4]
    want, _ = reference.gradients(grad, x, weight, top=k, bottom=k)
    kept = reference.kept(reference.products(x, weight), k, k)
    shares = (grad.unsqueeze(-1) * weight).abs().where(kept, 0.0)
    _compare("input gradients", got[:4], want, shares.double().sum(1), k)


def _compare(what: str, got: Tensor, want: Tensor, scale: Tensor, k: int) -> None:
    excess = ((got.double() - want).abs() - 1e-5 * scale).max().item()
    if not excess <= 0:
        raise AssertionError(f"{what} of the truncated layer with k={k} differ from the definition by {excess:.2e}")


@dataclass(frozen=True)
class Rates:
    """What the card did in this run: bytes read and written in a second, and fp32 operations."""

    copy: float
    matrix: float

    def row(self, seconds: float, batch: int, d: int, out: int) -> dict[str, float]:
        """Bytes and operations of the dense product, the seconds that these take at least, and a time over that."""
        bytes_moved, operations = FLOAT * (batch * d + out * d + batch * out), 2 * batch * d * out
        least = max(bytes_moved / self.copy, operations / self.matrix)
        return {"bytes": bytes_moved, "operations": operations, "floor": least, "over_floor": seconds / least}


def _rates(results: Results, device: torch.device, rounds: int) -> Rates:
    source, matrix = torch.zeros(COPIED, device=device), torch.rand(SQUARE, SQUARE, device=device)
    target, result = torch.empty_like(source), torch.empty_like(matrix)
    calls: dict[str, Callable[[], object]] = {
        "bytes/s": lambda: target.copy_(source),
        "operations/s": lambda: torch.mm(matrix, matrix, out=result),
    }
    amounts = {"bytes/s": 2 * FLOAT * COPIED, "operations/s": 2 * SQUARE**3}
    rates = []
    for unit, amount in amounts.items():
        timing = timer(device)({unit: calls[unit]}, rounds)
        seconds = timing.seconds[unit]
        rates.append(amount / timing.median(unit))
        spread = {"n": rounds, "low": amount / max(seconds), "high": amount / min(seconds)}
        results.add(rates[-1], what="rate", unit=unit, seconds=timing.median(unit), **spread)
    return Rates(*rates)


def _sizes(x: Tensor, weight: Tensor) -> dict[str, int]:
    return {"batch": len(x), "in": weight.shape[1], "out": weight.shape[0]}


def _add(
    results: Results, timing: Timing, name: str, x: Tensor, weight: Tensor, rates: Rates | None = None, **what: Any
) -> None:
    """A row with the ratio to the dense layer and, where the rates are known, the floor."""
    sizes = _sizes(x, weight)
    beside = rates.row(timing.median(name), *sizes.values()) if rates else {}
    results.add(**timing.ratio(name, "dense"), **what, **sizes, **beside)


def _time_forward(x: Tensor, weight: Tensor, bias: Tensor, k: int, rounds: int) -> Timing:
    prepared = ops.prepare(weight)
    calls = {
        "dense": partial(F.linear, x, weight, bias),
        "prepared": partial(ops.truncated_linear, x, weight, bias, k=k, prepared=prepared),
        "unprepared": partial(ops.truncated_linear, x, weight, bias, k=k),
    }
    with torch.no_grad():
        return timer(x.device)(calls, rounds)


def _trained(results: Results, run: Run, name: str, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of F(10) after four epochs, the first to warm up; adds the time of an epoch against F(0)'s."""
    x, y = images[:10_000], labels[:10_000]
    networks = {f"F({k})": run.network(k) for k in (0, 10)}
    optimizers = {key: torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.9) for key, each in networks.items()}

    def epoch(key: str) -> None:
        for part, wanted in zip(x.split(CPU.batch), y.split(CPU.batch), strict=True):
            optimizers[key].zero_grad()
            F.cross_entropy(networks[key](part), wanted).backward()
            optimizers[key].step()

    timing = timed({key: partial(epoch, key) for key in networks}, 3)
    results.add(**timing.ratio("F(10)", "F(0)"), what="epoch", data=name, k=10, batch=CPU.batch, images=len(x))
    return first_layer(networks["F(10)"])


def _step(results: Results, x: Tensor, weight: Tensor, bias: Tensor, rounds: int, what: Entries) -> None:
    """Forward and backward to the weights, which change and are prepared anew at each step."""
    dense, truncated = (weight.clone().requires_grad_() for _ in range(2))
    grad = torch.randn(len(x), OUT, generator=torch.Generator().manual_seed(0))

    def step(w: Tensor, forward: Callable[..., Tensor]) -> None:
        forward(x, w, bias).backward(grad)
        with torch.no_grad():
            assert w.grad is not None
            w -= 1e-6 * w.grad
        w.grad = None

    truncated_linear = partial(ops.truncated_linear, k=what["k"])
    calls = {"dense": partial(step, dense, F.linear), "truncated": partial(step, truncated, truncated_linear)}
    timing = timed(calls, rounds)
    _add(results, timing, "truncated", x, weight, what="step", prepared=False, **what)


def _backward(
    results: Results, x: Tensor, weight: Tensor, bias: Tensor, rounds: int, generator: torch.Generator, what: Entries
) -> None:
    """The backward pass alone, on graphs that are kept, to the weight and to the input."""
    grad = torch.randn(len(x), len(weight), generator=generator).to(x.device)
    k, leaves = what["k"], {"weight": weight.clone().requires_grad_(), "input": x.clone().requires_grad_()}
    for gradient, leaf in leaves.items():
        inputs = (x, leaf, bias) if gradient == "weight" else (leaf, weight, bias)
        outputs = {"dense": F.linear(*inputs), "truncated": ops.truncated_linear(*inputs, k=k)}
        if gradient == "input":
            check_input_gradient(outputs["truncated"], leaf, weight, grad, k)
        backward = partial(torch.autograd.grad, inputs=leaf, grad_outputs=grad, retain_graph=True)
        timing = timer(x.device)({name: partial(backward, out) for name, out in outputs.items()}, rounds)
        _add(results, timing, "truncated", x, weight, what="backward", gradient=gradient, **what)


def _topk(results: Results, x: Tensor, weight: Tensor, bias: Tensor, chunks: Sequence[int], what: Entries) -> None:
    """The baseline at its fastest chunk against the prepared layer."""
    prepared, k, clock = ops.prepare(weight), what["k"], timer(x.device)
    with torch.no_grad():
        few = x[: max(chunks)]
        tried = clock({str(chunk): partial(topk_baseline, few, weight, bias, k, chunk) for chunk in chunks}, 1)
        chunk = min(chunks, key=lambda chunk: tried.median(str(chunk)))
        timing = clock(
            {
                "topk": partial(topk_baseline, x, weight, bias, k, chunk),
                "prepared": partial(ops.truncated_linear, x, weight, bias, k=k, prepared=prepared),
            },
            3,
        )
    ratio = timing.ratio("topk", "prepared") | {"to": "topk", "unit": "x faster"}
    results.add(**ratio, what="forward", prepared=True, chunk=chunk, **what, **_sizes(x, weight))


if __name__ == "__main__":
    parser = options(__file__, __doc__)
    parser.add_argument("--quick", action="store_true", help="only k = 10, initial weights and two kinds of input")
    parser.add_argument("--build", choices=kernel.builds(), help="build of the kernel on a CPU; default: the fastest")
    sys.exit(main(benchmark, parser))
