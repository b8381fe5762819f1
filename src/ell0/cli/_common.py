"""What the commands share."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.markup import escape

from ..common import Progress, Step
from ..results import Results

Json = Annotated[bool, Parameter(name="--json", negative="", help="Print JSON to standard output.")]
Devices = Annotated[
    int | None,
    Parameter(
        help="Processes on each machine that share the work, each with a GPU where there are some; more than one needs "
        "ell0[dist]. Under torchrun as many as it started."
    ),
]
Nodes = Annotated[
    int,
    Parameter(
        help="Machines, on each of which this command is given, by SLURM or with $NODE_RANK and $MASTER_ADDR set."
    ),
]
Quiet = Annotated[bool, Parameter(name="--quiet", negative="", help="No progress on standard error.")]


def command_words(words: str, function: Callable[..., object], given: Mapping[str, object]) -> str:
    """The command that does the same again: what was given beyond the defaults; of a file the name, not the place."""
    parameters = inspect.signature(function).parameters
    for name, value in given.items():
        if value != parameters[name].default:
            words += f" --{name.replace('_', '-')}"
            each = value if isinstance(value, tuple) else [value.name if isinstance(value, Path) else value]
            words += "" if value is True else f" {' '.join(map(str, each))}"
    return words


def hand_over(
    results: Results, out: Path | None, as_json: bool, console: Console, show: Callable[[Results], None]
) -> None:
    # Shown first: where the disk is full by now, the figures are not lost.
    if as_json:
        print(json.dumps(results.plain()))
    else:
        show(results)
    if out is not None:
        results.save(out)
        # As it is: a path broken over lines, or read as markup, is none that could be used.
        console.print(f"written to {out}", soft_wrap=True, markup=False, highlight=False)


@contextmanager
def shown(console: Console) -> Iterator[Progress]:
    """On a terminal one line that changes; elsewhere a line for each step that belongs to no larger one."""

    def show(step: Step) -> None:
        if console.is_terminal:
            status.update(escape(str(step)))
        elif step.stage is None:
            console.out(str(step), highlight=False)

    with console.status("") as status:
        yield show
