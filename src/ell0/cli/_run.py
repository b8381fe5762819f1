"""`ell0 run`."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from .. import recipe as recipes
from ..parallel import together
from ..recipe import Swept
from ..results import WORST_CASE, Measurement, Results
from ._common import Devices, Json, Nodes, Quiet, shown

_COLUMNS = 6  # budgets that a terminal has room for


def run(
    recipe: str = "digits",
    /,
    *,
    out: Path | None = None,
    device: str | None = None,
    root: Path | None = None,
    devices: Devices = None,
    nodes: Nodes = 1,
    sharded: Annotated[bool, Parameter(negative="")] = False,
    fresh: Annotated[bool, Parameter(negative="")] = False,
    list_: Annotated[bool, Parameter(name="--list", negative="")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train, attack and report: one recipe, from data to a page.

    Examples: ell0 run
              ell0 run mnist-quick --out runs/first
              ell0 run my-recipe.toml --device cpu
              ell0 run mnist-f10 --devices 8
              ell0 run --list

    A run that was stopped, by Ctrl-C or worse, goes on when the same command is given again. The runs of a sweep are
    shared by all processes that were given the command.

    Parameters
    ----------
    recipe
        One that comes with ell0, by its name, or a TOML file.
    out
        The run folder; without it runs/NAME. It must be new, or hold a run of the same recipe.
    device
        cpu or cuda; without it a GPU where there is one.
    root
        Where the data lies: this folder, else $ELL0_DATA, else the user cache.
    sharded
        Each process keeps the weights once, and of what the steps of a training need besides, a second copy of them,
        gradients and the optimizer's state, only its part (FSDP): for networks that leave a GPU no room for all of it.
    fresh
        Stop where the run folder holds a run already.
    list_
        Say which recipes there are, and do nothing.
    """
    if list_:
        _list(as_json)
        return
    with together(devices, nodes, device, sharded=sharded) as team:
        console = Console(file=sys.stderr, quiet=quiet or not team.first)
        members = recipes.sweep(recipe)
        home = Path("runs") / Path(recipe).stem if out is None else out
        try:
            with shown(console) as progress:
                how: dict[str, Any] = {"device": device, "root": root, "progress": progress, "team": team}
                if members:
                    swept = recipes.run_sweep(members, home, resume=not fresh, **how)
                else:
                    folder = recipes.run(recipe, out=out, resume=not fresh, **how)
        except KeyboardInterrupt:
            options = {"--out": out, "--device": device, "--root": root, "--devices": devices}
            options |= {"--nodes": nodes} if nodes > 1 else {}
            words = [str(word) for option in options.items() if option[1] is not None for word in option]
            command = shlex.join(["ell0", "run", recipe, *words, *(["--sharded"] if sharded else [])])
            raise KeyboardInterrupt(f"interrupted: go on with `{command}`") from None
        if team.first and members:
            _tell_sweep(swept, home, as_json)
        elif team.first:
            _tell(folder, as_json)


def _tell(folder: Path, as_json: bool) -> None:
    """Writes the page of a run, and says what it found."""
    from .. import report

    page = report.write([folder], folder / "report.html")
    results = Results.load(folder / "results.json")
    if as_json:
        print(json.dumps({"run": str(folder), "page": str(page), "results": results.plain()}))
        return
    _show(results)
    print(report.verdict([folder]))
    print(f"page: {page}")


def _tell_sweep(swept: Swept, home: Path, as_json: bool) -> None:
    """Writes the page of the runs of a sweep that are done, and says what they found."""
    from .. import report

    page = report.write(swept.finished, home / "report.html") if swept.finished else None
    if as_json:
        runs = {str(folder): Results.load(folder / "results.json").plain() for folder in swept.finished}
        print(json.dumps({"runs": runs, "busy": [str(folder) for folder in swept.busy], "page": page and str(page)}))
        return
    if page is not None:
        print(report.verdict(swept.finished))
    if swept.busy:
        print(f"other processes are at work on {', '.join(folder.name for folder in swept.busy)}")
    print(f"page: {page}" if page else "no run is done yet")


def _list(as_json: bool) -> None:
    summaries = {name: recipes.load(name).summary for name in recipes.names()}
    if as_json:
        print(json.dumps(summaries))
        return
    table = Table("recipe", "what it does", box=None)
    for name, summary in summaries.items():
        table.add_row(name, summary)
    Console().print(table)


def _show(results: Results) -> None:
    """A line for each classifier: clean, under attack (the worst case, where it was measured), median distances."""
    measured = [row for row in results.rows if row.get("split") is None]  # others served to choose
    robust = _robust(measured)
    budgets = sorted({row["budget"] for row in robust})
    shown = budgets[:: -(-len(budgets) // _COLUMNS)] if budgets else []
    medians = [row for row in measured if row.what == "median_distance"]
    betas = sorted({row["beta"] for row in medians})
    table = Table(box=None)
    table.add_column("classifier", no_wrap=True)
    for header in ("clean", *(f"{m} changed" for m in shown), *(f"distance to {beta:g}" for beta in betas)):
        table.add_column(header, justify="right")
    if robust:
        names, sizes = (dict.fromkeys(str(row[key]) for row in robust) for key in ("attack", "n"))
        within = f"values to {robust[0]['beta']:g}"
        print(f"right answers in per cent: {', '.join(names)}, {within}, n = {' or '.join(sizes)}")
    clean = [row for row in measured if row.what == "clean_accuracy"]
    for name in dict.fromkeys(row["classifier"] for row in results.rows if "classifier" in row):
        cells = [_cell(clean, name)]
        cells += [_cell(robust, name, budget=budget) for budget in shown]
        cells += [_cell(medians, name, beta=beta) for beta in betas]
        table.add_row(name, *cells)
    Console().print(table)


def _robust(rows: list[Measurement]) -> list[Measurement]:
    """A figure for each classifier and budget, the lowest: of the worst case where it was measured, in the widest box,
    in which the points of all the others lie too."""
    found = [row for row in rows if row.what == "robust_accuracy"]
    found = [row for row in found if row["attack"] == WORST_CASE] or found
    groups: dict[tuple[str, int], list[Measurement]] = {}
    for row in found:
        groups.setdefault((row["classifier"], row["budget"]), []).append(row)
    widest = max((row["beta"] for row in found), default=0.0)
    lowest = [
        min(group, key=lambda row: row.value)
        for group in groups.values()
        if any(row["beta"] == widest for row in group)
    ]
    return [replace(row, identity={**row.identity, "beta": widest}) for row in lowest]


def _cell(rows: list[Measurement], classifier: str, **what: object) -> str:
    """The lowest figure of the classifier with these entries."""
    found = [row for row in rows if row["classifier"] == classifier and what.items() <= row.items()]
    if not found:
        return ""
    row = min(found, key=lambda row: row.value)
    return f"{row.value:g}" if row.what == "median_distance" else f"{100 * row.value:.1f}"
