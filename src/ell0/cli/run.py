"""`ell0 run`."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from .options import Flag, WorkOptions, hand_over_run, show_progress

if TYPE_CHECKING:
    from ..recipe import Swept
    from ..results import Results

_COLUMNS = 7  # budgets that a terminal has room for


def run(
    recipe: str = "digits",
    /,
    *,
    out: Path | None = None,
    fresh: Flag = False,
    list_: Annotated[Flag, Parameter(name="--list")] = False,
    work: WorkOptions = WorkOptions(),
) -> None:
    """Run a recipe: train, attack, certify, and write a page.

    ```
    ell0 run
    ell0 run mnist-quick --out runs/first
    ell0 run my-recipe.toml --device cpu
    ell0 run mnist-f10 --devices 8
    ell0 run --list
    ```

    If a run was stopped, the same command resumes it. Several processes that are given the same sweep share its runs.

    Parameters
    ----------
    recipe
        Name of a recipe that comes with ell0, or a TOML file.
    out
        Run folder: a new one, or one that holds a run of the same recipe. Default: runs/NAME.
    fresh
        Stop if the run folder already holds a run.
    list_
        List the recipes that come with ell0.
    """
    from .. import recipe as recipes
    from ..parallel import together

    if list_:
        summaries = {name: recipes.load(name).summary for name in recipes.names()}
        text = "\n".join(f"{name:24} {summary}" for name, summary in summaries.items())
        print(json.dumps(summaries) if work.as_json else text)
        return
    with together(work.devices, work.nodes, work.device) as team:
        members = recipes.sweep(recipe)
        home = Path("runs") / Path(recipe).stem if out is None else out
        try:
            with show_progress(work.quiet or not team.first) as progress:
                how: dict[str, Any] = {"device": work.device, "root": work.root, "progress": progress, "team": team}
                if members:
                    swept = recipes.run_sweep(members, home, resume=not fresh, **how)
                else:
                    folder = recipes.run(recipe, out=out, resume=not fresh, **how)
        except KeyboardInterrupt:
            options = {"--out": out, "--device": work.device, "--root": work.root, "--devices": work.devices}
            options |= {"--nodes": work.nodes} if work.nodes > 1 else {}
            words = [str(word) for option in options.items() if option[1] is not None for word in option]
            command = shlex.join(["ell0", "run", recipe, *words])
            raise KeyboardInterrupt(f"interrupted: resume with `{command}`") from None
        if team.first and members:
            _show_sweep(swept, home, work.as_json)
        elif team.first:
            hand_over_run(folder, work.as_json, _show)


def _show_sweep(swept: Swept, home: Path, as_json: bool) -> None:
    """Writes the page of the finished runs of a sweep, and prints what they found."""
    from .. import report
    from ..results import Results

    page = report.write(swept.finished, home / "report.html") if swept.finished else None
    if as_json:
        runs = {str(folder): Results.load(folder / "results.json").plain() for folder in swept.finished}
        print(json.dumps({"runs": runs, "busy": [str(folder) for folder in swept.busy], "page": page and str(page)}))
        return
    if page is not None:
        print(report.verdict(swept.finished))
    if swept.busy:
        print(f"other processes work on {', '.join(folder.name for folder in swept.busy)}")
    print(f"page: {page}" if page else "no run is finished yet")


def _show(results: Results) -> None:
    """A row for each classifier: clean accuracy, and the lowest robust accuracy at each budget.

    Robust is the worst case if it was measured. A figure is shown only if the classifier was attacked in the widest
    box, which holds the points of all others. Rows of another split served to choose, and are left out.
    """
    from ..results import WORST_CASE

    rows = sorted((row for row in results.rows if row.get("split") is None), key=lambda row: -row.value)
    robust = [row for row in rows if row.what == "robust_accuracy"]
    robust = [row for row in robust if row["attack"] == WORST_CASE] or robust
    widest = max((row["beta"] for row in robust), default=0.0)
    attacked = {(row["classifier"], row["budget"]) for row in robust if row["beta"] == widest}
    figures = {(row["classifier"], "clean"): row.value for row in rows if row.what == "clean_accuracy"}
    for row in sorted(robust, key=lambda row: int(row["budget"])):  # of equal budgets the lowest comes last, and stays
        if (row["classifier"], row["budget"]) in attacked:
            figures[row["classifier"], f"{row['budget']} changed"] = row.value
    if robust:
        attacks, sizes = (dict.fromkeys(str(row[key]) for row in robust) for key in ("attack", "n"))
        print(f"accuracy in %: {', '.join(attacks)}, values to {widest:g}, n = {' or '.join(sizes)}")
    names = dict.fromkeys(row["classifier"] for row in results.rows if "classifier" in row)
    columns = list(dict.fromkeys(column for _, column in figures))
    columns = columns[:1] + columns[1 :: -(-len(columns) // _COLUMNS)]
    width = max(map(len, ["classifier", *names]))
    print("classifier".ljust(width), *(f"{column:>12}" for column in columns))
    for name in names:
        cells = (f"{100 * figures[name, column]:.1f}" if (name, column) in figures else "" for column in columns)
        print(name.ljust(width), *(f"{cell:>12}" for cell in cells))
