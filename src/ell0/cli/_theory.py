"""`ell0 theory`."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..common import check_out
from ..results import Results
from ._common import Json, Quiet, command_words

app = App(name="theory", help="What truncation is worth, exactly: on a Gaussian mixture, and against evading malware.")


_SEVERAL = Parameter(consume_multiple=True, negative="")


@app.default
def theory(
    *,
    dimensions: Annotated[tuple[int, ...], _SEVERAL] = (100, 784, 10_000, 100_000, 1_000_000),
    decays: Annotated[tuple[float, ...], _SEVERAL] = (0.0, 0.5),
    precision: float = 0.03,
    eps: float = 0.45,
    out: Path = Path("runs/theory"),
    seed: int = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Draw the robust error of linear classifiers on a Gaussian mixture, and where the paper's theorem speaks.

    Examples: ell0 theory
              ell0 theory --dimensions 784 1000 --decays 0 --precision 0.01 --out runs/784

    Parameters
    ----------
    dimensions
        Numbers of inputs d, from 10.
    decays
        Of the signal, nu_i ~ i ** -decay, 0 to 10; 0 is even.
    precision
        Half-width of the 95 % intervals to aim at; some may come out wider.
    eps
        Robust error at which the exponents of Theorem 2 are taken.
    out
        The folder for results.json and report.html.
    seed
        Of the draws.
    """
    from .. import theory as rooms

    check_out(out / "results.json")
    console = Console(stderr=True, quiet=quiet)
    options: dict[str, Any] = {
        "dimensions": dimensions, "decays": decays, "precision": precision, "eps": eps, "seed": seed
    }  # fmt: skip
    command = _words("ell0 theory", theory, options)
    with _progress(console) as progress:
        results = rooms.figures(**options, command=command, progress=progress)
    _hand_over(results, out, as_json, _show_theory)


@app.command(name="malware")
def theory_malware(
    *,
    data: Path,
    rate: float = 0.01,
    cost: float = 0.02,
    ks: Annotated[tuple[int, ...], _SEVERAL] = (0,),
    budgets: Annotated[tuple[int, ...], _SEVERAL] = (1, 2, 3, 5, 10),
    most: int = 15,
    out: Path | None = None,
    seed: int = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare logistic regression with TruncatedLinearClassifier on malware that adds features to evade.

    Examples: ell0 theory malware --data drebin215.npz
              ell0 theory malware --data mine.npz --rate 0.001 --budgets 2 8

    Parameters
    ----------
    data
        An npz file: X (np.packbits of rows in {0, 1}), d (number of features), y (1: malware, 0: not).
    rate
        False-positive rate that every detector is set to, on the validation split.
    cost
        Accuracy that ours may lose against logistic regression, on the validation split; where every candidate loses
        more, the one that loses least is taken, and the page says so.
    ks
        Candidates for k of ours. 0: nothing is truncated, training against additions is exact; above, it takes minutes.
    budgets
        Candidates for the budget that ours is trained for.
    most
        Added features up to which evasion is told.
    out
        The folder for results.json and report.html; without it runs/malware-NAME.
    seed
        Of the split into train, validation and test.
    """
    from .. import theory as rooms

    name = f"malware-{data.stem}"
    out = Path("runs") / name if out is None else out
    check_out(out / "results.json")
    table = rooms.read_table(data)
    console = Console(stderr=True, quiet=quiet)
    options: dict[str, Any] = {
        "rate": rate, "cost": cost, "ks": ks, "budgets": budgets, "most": most, "seed": seed
    }  # fmt: skip
    command = _words("ell0 theory malware", theory_malware, {"data": data, **options})
    with _progress(console) as progress:
        results = rooms.malware(table, name=name, **options, command=command, progress=progress)
    _hand_over(results, out, as_json, _show_malware)


def _words(words: str, function: Callable[..., object], options: Mapping[str, object]) -> str:
    """`command_words`, with the entries of a list one after the other."""
    parameters = inspect.signature(function).parameters
    given = {name: value for name, value in options.items() if value != parameters[name].default}
    listed = {name: " ".join(map(str, v)) if isinstance(v, tuple) else v for name, v in given.items()}
    return command_words(words, function, listed)


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[str], None]]:
    """On a terminal one line that changes; elsewhere a line for each step."""
    with console.status("") as status:
        if console.is_terminal:
            yield lambda line: status.update(escape(line))
        else:
            yield lambda line: console.out(line, highlight=False)


def _hand_over(results: Results, out: Path, as_json: bool, show: Callable[[Results], None]) -> None:
    from .. import report

    results.save(out / "results.json")
    page = report.write([out], out / "report.html")
    if as_json:
        print(json.dumps({"run": str(out), "page": str(page), "results": results.plain()}))
        return
    show(results)
    print(report.verdict([out]))
    print(f"page: {page}")


def _show_theory(results: Results) -> None:
    """Each dimension at the largest budget that some classifier withstands better than a coin, or at the smallest."""
    errors = [row for row in results.rows if row["what"] == "robust_error"]
    names = list(dict.fromkeys(row["classifier"] for row in errors))
    table = Table("d", "signal", "changed", *names, "any classifier", box=None, title_justify="left")
    table.title = "robust error in per cent, at the largest budget with an error below 50 %"
    for d, decay in dict.fromkeys((row["d"], row["decay"]) for row in errors):
        here = [row for row in errors if (row["d"], row["decay"]) == (d, decay)]
        below = [row["budget"] for row in here if row["value"] < 0.5]
        budget = max(below, default=here[0]["budget"])
        changed = f"{budget:,}" if below else f"{budget:,}*"
        if not below:
            table.caption = "* the smallest budget: none has an error below 50 %"
        cells = [f"{100 * row['value']:.1f}" for row in here if row["budget"] == budget]
        bound = results.find(what="lower_bound", d=d, decay=decay, budget=budget)
        table.add_row(f"{d:,}", f"i ** -{decay:g}", changed, *cells, f"{100 * bound['value']:.1f}")
    Console().print(table)


def _show_malware(results: Results) -> None:
    budgets = [m for m in (0, 1, 2, 5, 10) if any(row.get("budget") == m for row in results.rows)]
    table = Table("detector", "accuracy", "median radius", *(f"{m} added" for m in budgets), box=None)
    for row in (row for row in results.rows if row["what"] == "clean_accuracy"):
        who = {"classifier": row["classifier"]}
        cells = [results.find(what="evasion", **who, budget=m) for m in budgets]
        median = results.find(what="median_radius", **who)["value"]
        shares = (f"{100 * one['value']:.1f}" for one in (row, *cells))
        accuracy, *evaded = shares
        table.add_row(row["classifier"], accuracy, f"{median:g}", *evaded)
        if "over_cost" in row:
            lost = f"{100 * row['over_cost']:.1f} %"
            table.caption = f"on the validation split {row['classifier']} loses {lost} more accuracy than the cost"
    table.title = "accuracy, and malware that evades, in per cent"
    Console().print(table)
