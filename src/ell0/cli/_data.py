"""`ell0 data`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from cyclopts import App
from rich.console import Console
from rich.table import Table

from .. import data
from ._common import Json

app = App(name="data", help="Data sets: what is here, and fetching what is not.")


@app.command(name="get")
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


@app.command(name="list")
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
