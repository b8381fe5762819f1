"""The command line: the only place where its words become objects."""

from __future__ import annotations

import inspect
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, CycloptsError, Parameter
from rich.console import Console
from rich.table import Table

from . import __version__, data
from .results import Results, Row

app = App(
    name="ell0",
    version=__version__,
    help="Classifiers that survive sparse (L0) attacks: an attacker who changes a few inputs, by any amount.",
    suppress_keyboard_interrupt=False,
)
data_app = App(name="data", help="Data sets: what is here, and fetching what is not.")
bench_app = App(name="bench", help="Benchmarks: ratios in one run, of checked results.")
app.command(data_app)
app.command(bench_app)

Json = Annotated[bool, Parameter(name="--json", negative="", help="Print JSON to standard output.")]
Device = Literal["cpu", "cuda"]
Quiet = Annotated[bool, Parameter(name="--quiet", negative="", help="No progress on standard error.")]


@data_app.command(name="get")
def data_get(name: str, /, *, root: Path | None = None) -> None:
    """Fetch a data set, check it, and say where it lies.

    Example: ell0 data get mnist

    Parameters
    ----------
    name
        mnist, fashion-mnist or cifar10 (digits come with scikit-learn).
    root
        Where to put it: this folder, else $ELL0_DATA, else the user cache.
    """
    print(data.get(name, root))


@data_app.command(name="list")
def data_list(*, root: Path | None = None, as_json: Json = False) -> None:
    """Say which data sets are here, whole or not.

    Example: ell0 data list

    Parameters
    ----------
    root
        Where to look: this folder alone, else $ELL0_DATA and the user cache.
    """
    found = data.status(root)
    if as_json:
        print(json.dumps([asdict(status) for status in found], default=str))
        return
    table = Table("set", "where", "problem", box=None)
    for status in found:
        table.add_row(status.name, str(status.where or "-"), status.problem or "")
    Console().print(table)


@bench_app.command(name="layer")
def bench_layer(
    *,
    device: Device = "cpu",
    quick: Annotated[bool, Parameter(negative="")] = False,
    out: Path | None = None,
    root: Path | None = None,
    require_mnist: Annotated[bool, Parameter(negative="")] = False,
    threads: int | None = None,
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
    out
        Write the results file here.
    root
        Where MNIST lies; without MNIST, digits drawn at 28 x 28 stand in.
    require_mnist
        Stop where MNIST is not found, and let nothing stand in.
    threads
        Processor threads, at most one for each processor; without it, as many as torch takes.
    seed
        Of inputs and weights, 0 to 2**64 - 1.
    """
    from . import bench

    _use_threads(threads)
    if out is not None:
        _check_out(out)
    console = Console(stderr=True, quiet=quiet)
    options: dict[str, Any] = {"device": device, "quick": quick, "require_mnist": require_mnist, "seed": seed}
    command = _command("ell0 bench layer", bench_layer, options | {"threads": threads})
    with console.status("") as status:
        results = bench.layer(**options, root=root, command=command, progress=lambda line: status.update(line))
    _hand_over(results, out, as_json, console, _show_layer)


@bench_app.command(name="train")
def bench_train(
    *,
    device: Device = "cpu",
    steps: int = 64,
    rounds: int = 7,
    batch: int = 256,
    out: Path | None = None,
    root: Path | None = None,
    require_mnist: Annotated[bool, Parameter(negative="")] = False,
    threads: int | None = None,
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
    out
        Write the results file here.
    root
        Where MNIST lies; without MNIST, digits drawn at 28 x 28 stand in.
    require_mnist
        Stop where MNIST is not found, and let nothing stand in.
    threads
        Processor threads, at most one for each processor; without it, as many as torch takes.
    seed
        Of weights and of the order of images, 0 to 2**64 - 1.
    """
    from . import bench

    _use_threads(threads)
    if out is not None:
        _check_out(out)
    console = Console(stderr=True, quiet=quiet)
    options: dict[str, Any] = {
        "device": device,
        "steps": steps,
        "rounds": rounds,
        "batch": batch,
        "require_mnist": require_mnist,
        "seed": seed,
    }
    command = _command("ell0 bench train", bench_train, options | {"threads": threads})
    with console.status("") as status:
        results = bench.train(**options, root=root, command=command, progress=lambda line: status.update(line))
    _hand_over(results, out, as_json, console, _show_train)


@bench_app.command(name="attacks")
def bench_attacks(
    *,
    device: Device = "cpu",
    images: int | None = None,
    budget: int | None = None,
    queries: int | None = None,
    epochs: int | None = None,
    reference: Path | None = None,
    out: Path | None = None,
    root: Path | None = None,
    require_mnist: Annotated[bool, Parameter(negative="")] = False,
    threads: int | None = None,
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
    out
        Write the results file here.
    root
        Where MNIST lies; without MNIST, digits stand in.
    require_mnist
        Stop where MNIST is not found, and let nothing stand in.
    threads
        Processor threads, at most one for each processor; without it, as many as torch takes.
    seed
        Of training and attacks, 0 to 2**64 - 1.
    """
    from . import bench

    _use_threads(threads)
    if out is not None:
        _check_out(out)
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
    command = _command("ell0 bench attacks", bench_attacks, {"device": device, **given, "threads": threads})
    run: Callable[..., Results] = bench.attacks
    if device == "cuda":
        for name in ("epochs", "reference"):
            if name in given:
                raise ValueError(f"{name} must be left out with --device cuda, got {given[name]}")
        run = partial(bench.attack_speed, device=device)
    with console.status("attacks"):
        # A line stays: it may say that a peer failed.
        results = run(**given, root=root, command=command, progress=lambda line: console.out(line, highlight=False))
    _hand_over(results, out, as_json, console, _show_attacks)


def _command(words: str, function: Callable[..., None], given: Mapping[str, object]) -> str:
    """The command that does the same again: what was given beyond the defaults; of a file the name, not the place."""
    parameters = inspect.signature(function).parameters
    for name, value in given.items():
        if value != parameters[name].default:
            words += f" --{name.replace('_', '-')}"
            words += "" if value is True else f" {value.name if isinstance(value, Path) else value}"
    return words


def _use_threads(threads: int | None) -> None:
    import torch

    if threads is None:
        return
    processors = os.cpu_count() or 1
    if not 1 <= threads <= processors:
        raise ValueError(f"threads must satisfy 1 <= threads <= {processors} (the processors here), got {threads}")
    torch.set_num_threads(threads)


def _hand_over(
    results: Results, out: Path | None, as_json: bool, console: Console, show: Callable[[Results], None]
) -> None:
    # Shown first: where the disk is full by now, the figures are not lost.
    if as_json:
        print(json.dumps(asdict(results)))
    else:
        show(results)
    if out is not None:
        results.save(out)
        console.print(f"written to {out}")


def _check_out(out: Path) -> None:
    """Raises where a results file cannot be written, before the work whose results it is to hold."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        tempfile.NamedTemporaryFile(dir=out.parent, prefix=f".{out.name}.").close()
    except OSError as error:
        raise OSError(f"out must be a name in a folder that can be written, got {out} ({error})") from error
    if out.exists() and not out.is_file():
        raise OSError(f"out must be a file or a new name, got {out}{', a folder' if out.is_dir() else ''}")


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


def main(argv: list[str] | None = None) -> int:
    """Runs the command line. An error the user can mend is one sentence and exit code 1; a wrong word is 2."""
    try:
        app(argv, exit_on_error=False, print_error=True, result_action="return_value")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except CycloptsError:  # printed already, with what it may have meant
        return 2
    except (OSError, ValueError, ImportError) as error:
        print(f"ell0: {error}", file=sys.stderr)
        return 1
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    return 0
