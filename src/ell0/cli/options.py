"""What the commands share: options, progress and output."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

if TYPE_CHECKING:
    from ..common import Progress, Step
    from ..results import Results

Flag = Annotated[bool, Parameter(show_default=False)]
Json = Annotated[Flag, Parameter(name="--json", help="Print JSON to standard output.")]
Quiet = Annotated[Flag, Parameter(name="--quiet", help="Print no progress to standard error.")]
Root = Annotated[Path | None, Parameter(help="Folder of the data sets. Default: $ELL0_DATA, else the user cache.")]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class WorkOptions:
    """Where a command runs and what it prints.

    Parameters
    ----------
    device
        cpu or cuda. Default: a GPU if there is one.
    devices
        Processes on each machine that share the work, each with a GPU if there are any; more than one needs ell0[dist].
        Default: one, or under torchrun as many as it started.
    nodes
        Machines that run this command, started by SLURM or with $NODE_RANK and $MASTER_ADDR set.
    """

    device: str | None = None
    root: Root = None
    devices: int | None = None
    nodes: int = 1
    as_json: Json = False
    quiet: Quiet = False


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """The rows that a model is attacked on or certified for, and what an attack may spend on each.

    Parameters
    ----------
    data
        Data set (its test split), or a .npz file with arrays x and y. Default: the data set that the checkpoint was
        trained on.
    unit
        What counts as one change: a feature, or a pixel with all its channels.
    rows
        Use only the first N rows. Default: all.
    queries
        Queries of a search attack for each row.
    steps
        Steps of a gradient attack for each row.
    out
        Results file to write.
    """

    data: str | None = None
    unit: Literal["feature", "pixel"] = "feature"
    rows: int | None = None
    queries: int = 1000
    steps: int = 100
    out: Path | None = None


def command_words(words: str, function: Callable[..., object], given: Mapping[str, object]) -> str:
    """The command that does the same again: the options that differ from their defaults; of a path only the name.

    A list repeats its option, a tuple follows it.
    """
    defaults = {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}
    defaults |= {field.name: field.default for field in fields(RowOptions)}
    for name, value in given.items():
        if value is None or value == defaults.get(name):
            continue
        for each in value if isinstance(value, list) else [value]:
            words += f" --{name.replace('_', '-')}"
            for word in each if isinstance(each, tuple) else [each]:
                words += "" if word is True else f" {word.name if isinstance(word, Path) else word}"
    return words


@contextmanager
def show_progress(quiet: bool) -> Iterator[Progress]:
    """On a terminal one line that changes; elsewhere a line for each step that is not part of a larger one."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=True, quiet=quiet)

    def show(step: Step) -> None:
        if console.is_terminal:
            status.update(escape(str(step)))
        elif step.stage is None:
            console.out(str(step), highlight=False)

    with console.status("") as status:
        yield show


def hand_over(results: Results, out: Path | None, work: WorkOptions, show: Callable[[Results], None]) -> None:
    """Prints results, then writes them: if the disk is full, the figures are not lost."""
    print(json.dumps(results.plain())) if work.as_json else show(results)
    if out is not None:
        results.save(out)
        if not work.quiet:
            print(f"written to {out}", file=sys.stderr)


def hand_over_run(folder: Path, as_json: bool, show: Callable[[Results], None] | None = None) -> None:
    """Writes the page of a run folder, and prints what the run found."""
    from .. import report
    from ..results import Results

    page = report.write([folder], folder / "report.html")
    results = Results.load(folder / "results.json")
    if as_json:
        print(json.dumps({"run": str(folder), "page": str(page), "results": results.plain()}))
        return
    if show is not None:
        show(results)
    print(f"{report.verdict([folder])}\npage: {page}")
