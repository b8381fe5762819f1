"""What the benchmarks share: options, clocks, images, seeded networks and the topk baseline."""

from __future__ import annotations

import os
import shlex
import statistics
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ell0 import data, models
from ell0.common import device_of
from ell0.files import check_out
from ell0.results import Measurement, Results

IN, OUT = 784, 1568


@dataclass(frozen=True)
class Run:
    """The options that all benchmarks share.  say: takes a line for each part of the work."""

    device: str = "cpu"
    root: Path | None = None
    require_mnist: bool = False
    seed: int = 0
    command: str = ""
    say: Callable[[str], None] = lambda _: None

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed must satisfy 0 <= seed < 2**64, got {self.seed}")
        device_of(self.device)

    @property
    def place(self) -> torch.device:
        return device_of(self.device)

    def results(self, name: str) -> Results:
        """Empty results, named after the benchmark and the card: ``"bench-layer-h200"``, ``"bench-layer-cpu"``."""
        on_gpu = self.place.type == "cuda"
        card = torch.cuda.get_device_name(self.place).split()[-1].lower() if on_gpu else "cpu"
        return Results.here(f"{name}-{card}", self.command, seeds=[self.seed], device=self.place)

    def images(self) -> tuple[str, Tensor, Tensor]:
        """Name, images ``(n, 784)`` and labels of MNIST's training set; without MNIST, digits drawn at 28 x 28."""
        try:
            x, y = data.load("mnist", "train+validation", self.root)
            return "mnist", x.flatten(1), y
        except FileNotFoundError:
            if self.require_mnist:
                raise
            x, y = data.load("digits", "train+validation")
            x = F.pad(x.repeat_interleave(3, 2).repeat_interleave(3, 3), (2, 2, 2, 2), value=-1.0)
            return "digits28", x.flatten(1), y

    def network(self, k: int, **settings: Any) -> nn.Sequential:
        """F(k) with weights drawn from the seed; settings: of `models.mlp`."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return models.mlp(k, **settings)


def options(script: str, description: str | None) -> ArgumentParser:
    """The command line of a script, with the options that all benchmarks share."""
    parser = ArgumentParser(Path(script).name, description=description, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to measure (default: cpu)")
    parser.add_argument("--require-mnist", action="store_true", help="stop if MNIST is not found; default: use digits")
    parser.add_argument("--threads", type=int, help="processor threads; default: torch's choice")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, inputs and attacks (default: 0)")
    parser.add_argument("--root", type=Path, help="folder of the data; default: $ELL0_DATA, else the user cache")
    parser.add_argument("--out", type=Path, help="results file to write")
    return parser


def add_counts(parser: ArgumentParser, **helps: str) -> None:
    """Adds an option with a number for each name; without it the benchmark's own default holds."""
    for name, text in helps.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help=text)


def main(benchmark: Callable[..., Results], parser: ArgumentParser, argv: Sequence[str] | None = None) -> int:
    """Runs a benchmark with the options of the command line, prints its figures and writes them to --out."""
    given = vars(parser.parse_args(argv))
    words = ["python", f"benchmarks/{parser.prog}"]
    for name, value in given.items():
        if name not in ("root", "out") and value != parser.get_default(name):
            words.append(f"--{name.replace('_', '-')}")
            words += [] if value is True else [value.name if isinstance(value, Path) else str(value)]
    out, threads = given.pop("out"), given.pop("threads")
    try:
        if threads is not None:
            processors = os.cpu_count() or 1
            if not 1 <= threads <= processors:
                raise ValueError(f"threads must satisfy 1 <= threads <= {processors}, the processors, got {threads}")
            torch.set_num_threads(threads)
        if out is not None:
            check_out(out)
        shared = {field.name: given.pop(field.name) for field in fields(Run) if field.name in given}
        run = Run(**shared, command=shlex.join(words), say=lambda line: print(line, file=sys.stderr))
        start = time.perf_counter()
        results = benchmark(run, **{name: value for name, value in given.items() if value is not None})
        results.seconds = round(time.perf_counter() - start, 1)
        print(f"{results.name}: {results.device}")  # before the file: a full disk loses no figure
        for row in results.rows:
            print(_line(row))
        if out is not None:
            print(f"written to {results.save(out)}", file=sys.stderr)
    except (OSError, ValueError, ImportError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


def _line(row: Measurement) -> str:
    """The figure of a row, then what it is the figure of."""
    value, unit = row["value"], row["unit"]
    figure = f"{value:.3g} {unit}"
    if unit in ("x", "x faster"):
        figure += f" than {row['to']}" if unit == "x faster" else f" {row['to']}"
    elif unit == "accuracy" or row.what.endswith("accuracy"):
        figure = f"{100 * value:.1f} %"
    elif unit == "bytes":
        figure = f"{value / 2**20:.1f} MiB"
    keys = ("classifier", "attack", "gradient", "part", "method", "mode", "prepared", "data", "weights", "k", "batch",
            "in", "out", "images", "beta", "budget", "queries", "restarts", "paper")  # fmt: skip
    return f"{row['what']}: {figure}" + "".join(f", {key} {row[key]}" for key in keys if row.get(key) is not None)


@dataclass(frozen=True)
class Timing:
    """Seconds of several calls, measured in turns so that a slow moment of the machine hits all of them."""

    seconds: dict[str, list[float]]

    def median(self, name: str) -> float:
        """Median seconds of one call."""
        return statistics.median(self.seconds[name])

    def ratio(self, name: str, to: str) -> dict[str, Any]:
        """Entries of a row: median over median, and the lowest and highest ratio of a single round."""
        rounds = [a / b for a, b in zip(self.seconds[name], self.seconds[to], strict=True)]
        return {
            "value": self.median(name) / self.median(to),
            "n": len(rounds),
            "low": min(rounds),
            "high": max(rounds),
            "seconds": self.median(name),
            "to_seconds": self.median(to),
            "to": to,
            "unit": "x",
        }

    def spread(self, name: str) -> dict[str, Any]:
        """Entries of a row: the median seconds of one call, and the lowest and highest."""
        seconds = self.seconds[name]
        spread = {"n": len(seconds), "low": min(seconds), "high": max(seconds)}
        return {"value": self.median(name), "unit": "seconds", **spread}


def timed(calls: Mapping[str, Callable[[], object]], rounds: int) -> Timing:
    """Runs every call once to warm up, then all of them ``rounds`` times in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return Timing(seconds)


def cuda_timed(calls: Mapping[str, Callable[[], object]], rounds: int) -> Timing:
    """As `timed`, by the clock of the current CUDA device.

    Calls are queued and nobody waits between them: where the device is slower than the host, the host's time is hidden.
    """
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    for _ in range(rounds):
        for name, call in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return Timing({name: [start.elapsed_time(end) / 1000 for start, end in pairs] for name, pairs in events.items()})


def timer(device: torch.device) -> Callable[[Mapping[str, Callable[[], object]], int], Timing]:
    """`timed` on a processor, `cuda_timed` on a GPU."""
    return cuda_timed if device.type == "cuda" else timed


def topk_baseline(x: Tensor, weight: Tensor, bias: Tensor | None, k: int, chunk: int) -> Tensor:
    """The truncated layer as one writes it without a kernel: dense product minus topk sums, by chunks of samples."""
    parts = []
    for part in x.split(chunk):
        terms = part.unsqueeze(1) * weight
        largest = terms.topk(k, dim=-1).values.sum(-1)
        smallest = terms.topk(k, dim=-1, largest=False).values.sum(-1)
        parts.append(F.linear(part, weight, bias) - largest - smallest)
    return torch.cat(parts)
