"""`ell0 report`."""

from __future__ import annotations

from pathlib import Path


def report(*runs: Path, out: Path | None = None) -> None:
    """Write one page about one or several runs, and print its path.

    ```
    ell0 report runs/digits
    ell0 report runs/mnist-table1 runs/mnist-table2 --out mnist.html
    ell0 report results/mnist-table1.json --out table1.html
    ```

    Parameters
    ----------
    runs
        Run folders or results files.
    out
        Page to write. Default: report.html in the run folder, if there is only one.
    """
    from .. import report as pages
    from ..common import check_out

    if not runs:
        raise ValueError("runs must be run folders or results files, at least one, got none")
    for path in runs:
        if not path.exists():
            raise FileNotFoundError(f"runs must be run folders or results files, got {str(path)!r}, which is not there")
    if out is None:
        if len(runs) > 1 or not runs[0].is_dir():
            raise ValueError("out must be given for anything but a single run folder")
        out = runs[0] / "report.html"
    check_out(out)
    print(pages.write(list(runs), out))
