"""`ell0 run` and `ell0 report`, which write pages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from .options import Flag, WorkOptions, hand_over_run, printable, show_progress, tell

if TYPE_CHECKING:
    from ..results import Results


def run(
    recipe: str = "digits",
    /,
    *,
    out: Path | None = None,
    fresh: Flag = False,
    list_: Annotated[Flag, Parameter(name="--list")] = False,
    print_: Annotated[Flag, Parameter(name="--print")] = False,
    allow_code: Flag = False,
    no_panel: Flag = False,
    work: WorkOptions = WorkOptions(),
) -> None:
    """Run a recipe: train, attack, certify, and write a page.

    ```
    ell0 run
    ell0 run mnist-quick --out runs/first
    ell0 run mnist-f10 --devices 8
    ell0 run --list
    ell0 run digits --print > mine.toml
    ell0 run mine.toml --allow-code
    ```

    If a run was stopped, the same command resumes it. Several processes that are given the same sweep share its runs.

    Args:
        recipe: Name of a recipe that comes with ell0, or a TOML file.
        out: Run folder: a new one, or one that holds a run of the same recipe. Default: runs/NAME.
        fresh: Stop if the run folder already holds a run.
        list_: List the recipes that come with ell0.
        print_: Print the recipe, to copy and change.
        allow_code: Run the code that the recipe names as a model (python = "package.module:name").
        no_panel: Leave out the panel of the page in which classifiers can be attacked by hand.
    """
    from .. import recipe as recipes
    from ..parallel import together

    if list_:
        summaries = {name: recipes.load(name).summary for name in recipes.names()}
        # NAME-PART stands below NAME, indented: a part of it, or a variant.
        below = {name: any(name.startswith(f"{other}-") for other in summaries) for name in summaries}
        lines = [f"{'  ' * below[name] + name:24} {summary}" for name, summary in summaries.items()]
        tell(json.dumps(summaries) if work.as_json else "\n".join(lines))
        return
    if print_:
        tell(recipes.source(recipe)[1].replace("\r\n", "\n"), end="")
        return
    with together(work.devices, work.nodes, work.device) as team:
        members, swept = recipes.sweep(recipe), None
        home = Path("runs") / recipes.source(recipe)[0] if out is None else out
        with show_progress(work.quiet or not team.first) as progress:
            how: dict[str, Any] = {"device": work.device, "root": work.root, "progress": progress, "team": team}
            how["allow_code"] = allow_code
            if members:
                swept = recipes.run_sweep(members, home, resume=not fresh, **how)
            else:
                home = recipes.run(recipe, out=out, resume=not fresh, **how)
        if team.first:
            hand_over_run(home, work.as_json, _show, swept, panel=not no_panel)


def report(*runs: Path, out: Path | None = None, no_panel: Flag = False) -> None:
    """Write one page about one or several runs, and print its path.

    ```
    ell0 report runs/digits
    ell0 report runs/mnist-table1 results/mnist-table2.json --out mnist.html
    ```

    Args:
        runs: Run folders or results files.
        out: Page to write. Default: report.html in the run folder, if there is only one.
        no_panel: Leave out the panel in which the classifiers of a single run can be attacked by hand.
    """
    from .. import report as pages
    from ..files import check_out

    if out is None:
        if len(runs) != 1 or not runs[0].is_dir():
            given = ", ".join(map(str, runs)) or "none"
            raise ValueError(f"runs must be one run folder that exists, or out must be given, got {given}")
        out = runs[0] / "report.html"
    check_out(out)
    tell(pages.write(runs, out, panel=not no_panel))


def _show(results: Results) -> None:
    """Prints a line for each classifier: clean accuracy, and the lowest robust accuracy at each budget.

    Robust is the worst case if it was measured. A figure is shown only if the classifier was attacked in the widest
    box, which holds the points of all others. Rows of another split served to choose, and are left out.
    """
    from ..report.selection import within
    from ..results import WORST_CASE

    rows = [row for row in results.rows if not row.keys() & {"split", "over", "part"}]
    rows = sorted(rows, key=lambda row: -row.value)
    robust = [row for row in rows if row.what == "robust_accuracy"]
    robust = [row for row in robust if row["attack"] == WORST_CASE] or robust
    widest = max((row["beta"] for row in robust), default=0.0)
    attacked = {(row["classifier"], row["budget"]) for row in robust if row["beta"] == widest}
    figures = {(row["classifier"], "clean"): f"{100 * row.value:.1f}" for row in rows if row.what == "clean_accuracy"}
    for row in sorted(robust, key=lambda row: int(row["budget"])):  # of equal budgets the lowest comes last, and stays
        if (row["classifier"], row["budget"]) in attacked:
            figures[row["classifier"], f"{row['budget']} changed"] = f"{100 * row.value:.1f}"
    whole = dict.fromkeys(str(row.n) for row in rows if row.what == "clean_accuracy")
    clean = f"; clean: n = {' or '.join(whole)}" if whole else ""
    if robust:
        attacks, units, sizes = (dict.fromkeys(str(row.get(key)) for row in robust) for key in ("attack", "unit", "n"))
        box = within(next(row for row in robust if row["beta"] == widest))
        changed = f"{' or '.join(units)}s changed"
        tell(f"accuracy in %: {', '.join(attacks)}, {changed}, values {box}, n = {' or '.join(sizes)}{clean}")
    names = {row["classifier"]: printable(row["classifier"]) for row in results.rows if "classifier" in row}
    columns = list(dict.fromkeys(column for _, column in figures))
    columns = columns[:1] + columns[1 :: max(1, -(-len(columns) // 7))]  # a terminal has room for seven budgets
    width = max(map(len, ["classifier", *names.values()]))
    tell("classifier".ljust(width), *(f"{column:>12}" for column in columns))
    for name, shown in names.items():
        tell(shown.ljust(width), *(f"{figures.get((name, column), ''):>12}" for column in columns))
