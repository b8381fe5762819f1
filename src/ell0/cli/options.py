"""What the commands share: options, progress and output."""

from __future__ import annotations

import inspect
import json
import math
import os
import sys
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TextIO

from cyclopts import Parameter

if TYPE_CHECKING:
    from ..common import Progress, Step
    from ..recipe import Swept
    from ..results import Results

Flag = Annotated[bool, Parameter(show_default=False)]
Json = Annotated[Flag, Parameter(name="--json", help="Print JSON to standard output.")]
Quiet = Annotated[Flag, Parameter(name="--quiet", help="Print no progress to standard error.")]
Root = Annotated[Path | None, Parameter(help="Folder of the data sets. Default: $ELL0_DATA, else the user cache.")]
_NAME = "Checkpoint (folder or .safetensors file), or package.module:name of a model or of a function that returns one"
ModelName = Annotated[str, Parameter(name="model", help=f"{_NAME}; the module may lie in the current folder.")]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class WorkOptions:
    """Where a command runs and what it prints.

    Args:
        device: cpu or cuda. Default: a GPU if there is one.
        devices: Processes on each machine that share the work, each with a GPU if there are any; more than one needs
            ell0[dist]. Default: one, or under torchrun as many as it started.
        nodes: Machines that run this command, started by SLURM or with $NODE_RANK and $MASTER_ADDR set.
    """

    device: str | None = None
    root: Root = None
    devices: int | None = None
    nodes: int = 1
    as_json: Json = False
    quiet: Quiet = False


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class BoxOptions:
    """The range of a changed value.

    Args:
        beta: Changed values lie between -beta and beta.
        low: Least changed value; with --high, in place of --beta.
        high: Largest changed value.
    """

    beta: float | None = None
    low: float | None = None
    high: float | None = None

    def given(self) -> tuple[float, float] | None:
        """The two ends, or None if there are none; raises ValueError if they make no box."""
        if self.beta is not None:
            if (self.low, self.high) != (None, None):
                raise ValueError(f"beta must be left out beside low and high, got --beta {self.beta:g} too")
            if not 0 < self.beta < math.inf:
                raise ValueError(f"beta must be a number > 0, got {self.beta}")
            return -self.beta, self.beta
        if self.low is None and self.high is None:
            return None
        if self.low is None or self.high is None:
            raise ValueError("low and high must be given together, such as --low 0 --high 1")
        return self.low, self.high


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """The rows that a model is attacked on or certified for.

    Args:
        data: Data set (its test split), or a .npz file with arrays x_test and y_test, as a recipe takes it, or x and y.
            Default: the data set that the checkpoint was trained on.
        unit: What counts as one change: a feature, or a pixel with all its channels.
        rows: Use only the first N rows. Default: all.
        batch: Rows worked on together.
        queries: Queries of a search attack for each row.
        steps: Steps of a gradient attack for each row.
        out: Results file to write.
        page: HTML page to write; for images it shows some of them, clean and attacked.
        weights: Checkpoint to load into the model that package.module:name gives, such as a folder of fit(out=...).
        allow_code: Run the code that a checkpoint names as its model.
    """

    data: str | None = None
    unit: Literal["feature", "pixel"] = "feature"
    rows: int | None = None
    batch: int = 512
    queries: int = 1000
    steps: int = 100
    out: Path | None = None
    page: Path | None = None
    weights: Path | None = None
    allow_code: Flag = False


def command_words(words: str, function: Callable[..., object], given: Mapping[str, object]) -> str:
    """The command that does the same again: the options that differ from their defaults; of a path only the name.

    A list repeats its option, a tuple follows it.
    """
    defaults = {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}
    defaults |= {field.name: field.default for kind in (RowOptions, BoxOptions) for field in fields(kind)}
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
    from rich.text import Text

    class Patient(Console):
        def on_broken_pipe(self) -> None:  # rich would end the run
            self.quiet = True
            _silence(sys.stderr)

    console = Patient(stderr=True, quiet=quiet)

    def show(step: Step) -> None:
        if console.is_terminal:
            status.update(Text(printable(str(step))))
        elif step.stage is None and not quiet:
            tell(step, file=sys.stderr)

    with console.status("") as status:
        yield show


def printable(text: str) -> str:
    """Text as a terminal shows it and does not obey it: characters that control or format, tabs aside, as escapes.

    They are those of JSON and TOML, so that a recipe that was printed says the same.
    """
    kinds = {c: unicodedata.category(c) for c in set(text) if c != "\t"}
    hidden = [c for c, kind in kinds.items() if kind[0] == "C" or kind in ("Zl", "Zp")]
    return text.translate({ord(c): f"\\u{ord(c):04x}" if c < "\U00010000" else f"\\U{ord(c):08x}" for c in hidden})


def tell(*words: object, sep: str = " ", end: str = "\n", file: TextIO | None = None) -> None:
    """Prints text that may come from files: escaped for a terminal, with ? for what the stream cannot encode.

    A reader that has left, such as `head`, is no error.
    """
    stream = sys.stdout if file is None else file
    text = "\n".join(map(printable, sep.join(map(str, words)).split("\n")))
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        print(text.encode(encoding, "replace").decode(encoding), end=end, file=stream, flush=True)
    except BrokenPipeError:
        _silence(stream)


def _silence(stream: TextIO) -> None:
    """Lets the stream write to nowhere, so that its end is no error either."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def hand_over(results: Results, out: Path | None, work: WorkOptions, show: Callable[[Results], None]) -> None:
    """Prints results, then writes them: if the disk is full, the figures are not lost."""
    tell(json.dumps(results.plain())) if work.as_json else show(results)
    if out is not None:
        results.save(out)
        say_written(out, work.quiet)


def say_written(path: Path, quiet: bool) -> None:
    if not quiet:
        tell(f"written to {path}", file=sys.stderr)


def hand_over_run(
    home: Path,
    as_json: bool,
    show: Callable[[Results], None] = lambda _: None,
    swept: Swept | None = None,
    *,
    panel: bool = True,
) -> None:
    """Writes the page of a run folder, or of the finished runs of a sweep, and prints what they found."""
    from .. import report
    from ..results import Results

    folders, busy = ([home], []) if swept is None else (swept.finished, swept.busy)
    runs = {str(folder): Results.load(folder / "results.json") for folder in folders}
    page = report.write(folders, home / "report.html", panel=panel) if folders else None
    if as_json:
        plain = {folder: results.plain() for folder, results in runs.items()}
        tell(json.dumps({"runs": plain, "busy": [str(folder) for folder in busy], "page": page and str(page)}))
        return
    if swept is None:
        show(runs[str(home)])
    if busy:
        tell(f"other processes work on {', '.join(folder.name for folder in busy)}")
    tell(f"{report.verdict(folders)}\npage: {page}" if page else "no run is finished yet")
