"""`ell0 data`."""

from __future__ import annotations

import sys

from cyclopts import App

from .options import Quiet, Root, show_progress, tell

app = App(name="data", help="List and fetch data sets.")


@app.command(name="get")
def data_get(name: str, /, *, root: Root = None, quiet: Quiet = False) -> None:
    """Fetch a data set, check it, and print the folder it lies in.

    ```
    ell0 data get mnist
    ```

    Args:
        name: mnist, fashion-mnist or cifar10. digits come with scikit-learn.
    """
    from .. import data

    with show_progress(quiet or sys.stderr is None or not sys.stderr.isatty()) as progress:
        folder = data.get(name, root, progress=progress)
    tell(folder)


@app.command(name="list")
def data_list(*, root: Root = None) -> None:
    """List the data sets: where each lies, or what is wrong with it.

    ```
    ell0 data list
    ```
    """
    from .. import data

    for status in data.status(root):
        tell(f"{status.name:14} {status.where or '-'} {status.problem or ''}".rstrip())
