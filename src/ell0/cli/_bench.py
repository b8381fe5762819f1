"""`ell0 bench`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table

from ..results import Results, Row
from ._common import Device, Json, Quiet, check_out, command_words, hand_over, use_threads

app = App(name="bench", help="Benchmarks: ratios in one run, of checked results.")

Out = Annotated[Path | None, Parameter(help="Write the results file here.")]
Root = Annotated[Path | None, Parameter(help="Where MNIST lies; without MNIST, digits drawn at 28 x 28 stand in.")]
RequireMnist = Annotated[bool, Parameter(negative="", help="Stop where MNIST is not found, and let nothing stand in.")]
Threads = Annotated[
    int | None,
    Parameter(help="Processor threads, at most one for each processor; without it, as many as torch takes."),
]


@app.command(name="layer")
def bench_layer(
    *,
    device: Device = "cpu",
    quick: Annotated[bool, Parameter(negative="")] = False,
    out: Out = None,
    root: Root = None,
    require_mnist: RequireMnist = False,
    threads: Threads = None,
    seed: int = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Time the truncated layer against the dense layer and the topk baseline.

    Examples: ell0 bench layer --quick
              ell0 bench layer --threads 2 --out layer.json
              ell0 bench layer --device cuda

    Parameters
    ----------
    device
        cpu, or cuda: batches of 8,192 on a GPU, beside what the card can do.
    quick
        k = 10, initial weights, two kinds of input: under a minute.
    seed
        Of inputs and weights, 0 to 2**64 - 1.
    """
    _run(
        bench_layer, _show_layer, out, root, threads, as_json, quiet,
        device=device, quick=quick, require_mnist=require_mnist, seed=seed,
    )  # fmt: skip


@app.command(name="train")
def bench_train(
    *,
    device: Device = "cpu",
    steps: int = 64,
    rounds: int = 7,
    batch: int = 256,
    out: Out = None,
    root: Root = None,
    require_mnist: RequireMnist = False,
    threads: Threads = None,
    seed: int = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Time training of truncated networks against F(0): steps and epochs.

    Examples: ell0 bench train --steps 8 --rounds 3
              ell0 bench train --device cuda --out train.json

    Parameters
    ----------
    device
        cpu, or cuda: a GPU, also with steps replayed from a CUDA graph.
    steps
        Steps of training that are timed together.
    rounds
        Times that each is timed, in turns.
    batch
        Images of a step.
    seed
        Of weights and of the order of images, 0 to 2**64 - 1.
    """
    _run(
        bench_train, _show_train, out, root, threads, as_json, quiet,
        device=device, steps=steps, rounds=rounds, batch=batch, require_mnist=require_mnist, seed=seed,
    )  # fmt: skip


@app.command(name="certify")
def bench_certify(
    *,
    device: Device = "cpu",
    images: int | None = None,
    epochs: int = 6,
    steps: int = 16,
    rounds: int = 3,
    batch: int = 256,
    out: Out = None,
    root: Root = None,
    require_mnist: RequireMnist = False,
    threads: Threads = None,
    seed: int = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Time certificates at all budgets up to 32, and training on a bound against plain training.

    Examples: ell0 bench certify --images 1000 --epochs 2
              ell0 bench certify --device cuda --out certify.json

    Parameters
    ----------
    device
        cpu, or cuda: a GPU, with steps replayed from a CUDA graph.
    images
        Images that are certified: 10,000, or all where there are fewer.
    epochs
        Of training the network with certificates, on 10,000 images.
    steps
        Steps of training that are timed together.
    rounds
        Times that each is timed, in turns.
    batch
        Images of a step.
    seed
        Of weights and of the order of images, 0 to 2**64 - 1.
    """
    _run(
        bench_certify, _show_certify, out, root, threads, as_json, quiet,
        device=device, images=images, epochs=epochs, steps=steps, rounds=rounds,
        batch=batch, require_mnist=require_mnist, seed=seed,
    )  # fmt: skip


@app.command(name="attacks")
def bench_attacks(
    *,
    device: Device = "cpu",
    images: int | None = None,
    budget: int | None = None,
    queries: int | None = None,
    epochs: int | None = None,
    reference: Path | None = None,
    out: Out = None,
    root: Path | None = None,
    require_mnist: RequireMnist = False,
    threads: Threads = None,
    seed: int = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare the attacks with each other and with their peers on one truncated network.

    Examples: ell0 bench attacks --images 100 --epochs 1
              ell0 bench attacks --reference sparse-rs/rs_attacks.py --out attacks.json
              ell0 bench attacks --device cuda

    Parameters
    ----------
    device
        cpu, or cuda: only the time of sparse_rs on F(10) against F(0), on a GPU.
    images
        Images that are attacked: 1000 of the test, from the first on; with cuda 60000 of the training.
    budget
        Features that may change: 5; with cuda 10.
    queries
        Of sparse_rs and adaptive, for each image: 1000; with cuda 300.
    epochs
        Of training F(10) on clean images: 5; not with cuda.
    reference
        The file rs_attacks.py of the authors of Sparse-RS; not with cuda. foolbox is compared where it is installed.
    root
        Where MNIST lies; without MNIST, digits stand in.
    seed
        Of training and attacks, 0 to 2**64 - 1.
    """
    from .. import bench

    use_threads(threads)
    if out is not None:
        check_out(out)
    console = Console(stderr=True, quiet=quiet)
    options: dict[str, Any] = {
        "images": images,
        "budget": budget,
        "queries": queries,
        "epochs": epochs,
        "require_mnist": require_mnist,
        "reference": reference,
        "seed": seed,
    }
    # What is not given is left to the function: the two have defaults of their own.
    given = {name: value for name, value in options.items() if value is not None}
    command = command_words("ell0 bench attacks", bench_attacks, {"device": device, **given, "threads": threads})
    run: Callable[..., Results] = bench.attacks
    if device == "cuda":
        for name in ("epochs", "reference"):
            if name in given:
                raise ValueError(f"{name} must be left out with --device cuda, got {given[name]}")
        run = partial(bench.attack_speed, device=device)
    with console.status("attacks"):
        # A line stays: it may say that a peer failed.
        results = run(**given, root=root, command=command, progress=lambda line: console.out(line, highlight=False))
    hand_over(results, out, as_json, console, _show_attacks)


def _run(
    command: Callable[..., None],
    show: Callable[[Results], None],
    out: Path | None,
    root: Path | None,
    threads: int | None,
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Runs the benchmark of a command's name with its options, and hands its results over."""
    from .. import bench

    use_threads(threads)
    if out is not None:
        check_out(out)
    console = Console(stderr=True, quiet=quiet)
    name = command.__name__.removeprefix("bench_")
    words = command_words(f"ell0 bench {name}", command, options | {"threads": threads})
    with console.status("") as status:
        run = getattr(bench, name)
        results = run(**options, root=root, command=words, progress=lambda line: status.update(line))
    hand_over(results, out, as_json, console, show)


def _show_layer(results: Results) -> None:
    table = Table("measured", "size", "data", "weights", "k", "ratio", box=None, title_justify="left")
    made = "triton" if "triton" in results.versions else results.versions.get("kernel", "no")
    table.title = f"{results.name}: {results.device}, {made} kernel"
    for row in results.rows:
        detail = {True: ", prepared", False: ", unprepared", None: ""}[row.get("prepared")]
        detail += "".join(f", {row[key]}" for key in ("gradient", "part") if key in row)
        size = f"{row['images']} images" if "images" in row else ""
        if "in" in row:
            size = f"{row['batch']}x{row['in']}>{row['out']}"
        cells = (row["what"] + detail, size, row.get("data", ""), row.get("weights", ""), row.get("k", ""), _value(row))
        table.add_row(*map(str, cells))
    Console().print(table)


def _show_train(results: Results) -> None:
    table = Table("measured", "network", "mode", "batch", "figure", "paper", box=None, title_justify="left")
    table.title = f"{results.name}: {results.device}"
    for row in results.rows:
        paper = f"{row['paper']:g}x" if "paper" in row else ""
        table.add_row(row["what"], f"F({row['k']})", row["mode"], str(row["batch"]), _value(row), paper)
    Console().print(table)


def _show_certify(results: Results) -> None:
    table = Table("measured", "method", "images", "figure", box=None, title_justify="left")
    table.title = f"{results.name}: {results.device}"
    for row in results.rows:
        table.add_row(row["what"], row.get("method", ""), str(row.get("images", row.get("batch"))), _value(row))
    Console().print(table)


def _show_attacks(results: Results) -> None:
    table = Table("measured", "attack", "beta", "figure", "queries", "seconds", "q/s", box=None, title_justify="left")
    table.title = f"{results.name}: {results.device}\nshares of images left standing, values up to beta"
    for row in results.rows:
        queries = f"{row['queries']:.0f}" if "queries" in row else ""
        seconds = f"{row['seconds']:.3g}" if "seconds" in row else ""
        speed = f"{row['queries_per_second']:.0f}" if "queries_per_second" in row else ""
        beta = f"{row['beta']:g}" if "beta" in row else ""
        attack = row.get("attack", "").split(" of sparse_pgd")[0]  # the union names its parts
        attack += f" on F({row['k']})" if "k" in row else ""
        table.add_row(row["what"], attack, beta, _figure(row), queries, seconds, speed)
    Console().print(table)


def _figure(row: Row) -> str:
    if row["unit"] == "accuracy":
        return f"{100 * row['value']:.1f} %"
    if row["unit"] == "x faster":
        return f"1/{row['value']:.0f} of the time"
    if row["unit"] in ("x", "bytes"):
        return _value(row)
    return f"{row['value']:.3g} {row['unit']}"


def _value(row: Row) -> str:
    if row["unit"] == "bytes":
        return f"{row['value'] / 2**20:.1f} MiB"
    return _ratio(row) if "to" in row else f"{row['value']:.3g} {row['unit']}"


def _ratio(row: Row) -> str:
    times = f"{row['value']:.1f}" if row["value"] < 20 else f"{row['value']:.0f}"
    return f"1/{times} of {row['to']}" if row["unit"] == "x faster" else f"{times}x {row['to']}"
