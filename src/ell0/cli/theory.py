"""`ell0 theory`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from .options import Json, Quiet, command_words, hand_over_run, show_progress

app = App(name="theory")

_SEVERAL = Parameter(consume_multiple=True)


@app.default
def theory(
    *,
    dimensions: Annotated[tuple[int, ...], _SEVERAL] = (100, 784, 10_000, 100_000, 1_000_000),
    decays: Annotated[tuple[float, ...], _SEVERAL] = (0.0, 0.5),
    precision: float = 0.03,
    out: Path = Path("runs/theory"),
    seed: int = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure the robust error of linear classifiers on a Gaussian mixture, and show where the paper's theorem applies.

    ```
    ell0 theory
    ell0 theory --dimensions 784 1000 --decays 0 --out runs/784
    ```

    Parameters
    ----------
    dimensions
        Numbers of inputs d, each at least 10.
    decays
        Decays of the signal, nu_i ~ i ** -decay, 0 to 10; 0 spreads it evenly.
    precision
        Target half-width of the 95 % intervals; some may come out wider.
    out
        Folder for results.json and report.html.
    seed
        Seed of the draws.
    """
    from .. import theory as rooms
    from ..files import check_out

    check_out(out / "results.json")
    options: dict[str, Any] = {"dimensions": dimensions, "decays": decays, "precision": precision, "seed": seed}
    command = command_words("ell0 theory", theory, options)
    with show_progress(quiet) as progress:
        results = rooms.figures(**options, command=command, progress=progress)
    results.save(out / "results.json")
    hand_over_run(out, as_json)


@app.command(name="malware")
def theory_malware(
    *,
    data: Path,
    rate: float = 0.01,
    cost: float = 0.02,
    budgets: Annotated[tuple[int, ...], _SEVERAL] = (1, 2, 3, 5, 10),
    out: Path | None = None,
    seed: int = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare logistic regression with TruncatedLinearClassifier on malware that adds features to evade.

    ```
    ell0 theory malware --data drebin215.npz
    ell0 theory malware --data mine.npz --rate 0.001 --budgets 2 8
    ```

    Parameters
    ----------
    data
        An npz file: X (np.packbits of rows in {0, 1}), d (number of features), y (1: malware, 0: not).
    rate
        False-positive rate that every detector is set to, on the validation split.
    cost
        Accuracy that TruncatedLinearClassifier may lose against logistic regression on the validation split. If every
        candidate loses more, the one that loses least is taken, and the page says so.
    budgets
        Candidates for the budget that TruncatedLinearClassifier is trained for.
    out
        Folder for results.json and report.html. Default: runs/malware-NAME.
    seed
        Seed of the split into train, validation and test.
    """
    from .. import theory as rooms
    from ..files import check_out

    name = f"malware-{data.stem}"
    out = Path("runs") / name if out is None else out
    check_out(out / "results.json")
    table = rooms.read_programs(data)
    options: dict[str, Any] = {"rate": rate, "cost": cost, "budgets": budgets, "seed": seed}
    command = command_words("ell0 theory malware", theory_malware, {"data": data, **options})
    with show_progress(quiet) as progress:
        results = rooms.malware(table, name=name, **options, command=command, progress=progress)
    results.save(out / "results.json")
    hand_over_run(out, as_json)
